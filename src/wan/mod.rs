//! An emulated wide-area network: a UDP proxy that delays, loses, reorders, limits and cuts.
//!
//! [`Path`] is the network in one direction, pure: packets go in with a time, and come out when
//! they are due. [`Proxy`] is its shell: it stands in front of one UDP address, gives every client
//! two paths of its own, and needs no privilege. [`WanSettings`] says what the paths do, in text
//! such as `rtt=40ms,loss=0.1%,rate=50mbit`, and can be changed while packets fly.

mod draw;
mod path;
mod proxy;
mod pump;
mod quantity;
mod settings;

pub use path::{HEADER_BYTES, HELD_BYTES_MAX, Path, PathStats};
pub use proxy::{ClientStats, Proxy, ProxyError, ProxyHandle, ProxySettings, ProxyStats};
pub use quantity::Chance;
pub use settings::{DELAY_MAX, JitterShape, PathSettings, SettingsError, WanSettings};

use serde::Serialize;

/// A direction, seen by whoever stands behind the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// From the clients to the target.
    In,
    /// From the target back to the clients.
    Out,
}

impl Way {
    /// Both directions.
    pub const BOTH: [Self; 2] = [Self::In, Self::Out];

    /// As it is written in settings: `in` or `out`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
        }
    }
}
