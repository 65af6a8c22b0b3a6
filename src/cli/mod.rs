//! Command lines: thin over library functions.
//!
//! One file a command; [`console`] and [`process`] are what they share.

mod answer;
pub mod churn;
pub mod client;
pub mod console;
pub mod coordinator;
pub mod demo;
pub mod device;
pub mod generate;
pub mod ids;
pub mod memory;
pub mod process;
mod receipt;
pub mod ring;
pub mod ringctl;
pub mod score;
mod screen;
pub mod sim;
pub mod stage;
pub mod synth;
pub mod tiling;
pub mod wan;
mod wan_control;

use std::sync::OnceLock;
use std::time::Duration;

use crate::cli::console::Failure;
use crate::engine::NUMERICS_ID;
use crate::proto::control::PROTOCOL_VERSION;

/// What `--version` says: of the program, the protocol and the arithmetic.
#[must_use]
pub fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION
        .get_or_init(|| format!("{} (protocol {PROTOCOL_VERSION}, numerics {NUMERICS_ID})", env!("CARGO_PKG_VERSION")))
}

/// A time that was given in seconds.
///
/// # Errors
/// [`Failure`] names the flag, the value and the range.
pub(crate) fn seconds(flag: &'static str, value: f64) -> Result<Duration, Failure> {
    if !(0.1..=86_400.0).contains(&value) {
        return Err(Failure::new("config", format!("{flag} {value}: expected 0.1 to 86400 seconds")));
    }
    Ok(Duration::from_secs_f64(value))
}
