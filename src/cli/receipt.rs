//! Where and how something was measured: what every recorded run has beside its figures.

use std::fs;

use serde_json::{Value, json};

use crate::engine::NUMERICS_ID;
use crate::proto::control::PROTOCOL_VERSION;

/// Adds the machine, the versions and the command of this process to an object.
pub(crate) fn stamped(mut figures: Value) -> Value {
    let command: Vec<String> = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let system = rustix::system::uname();
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    figures["machine"] = json!({
        "processor": processor(),
        "processors": std::thread::available_parallelism().map_or(1, usize::from),
        "memory_bytes": memory(),
        "system": format!("{} {} {}", text(system.sysname()), text(system.release()), text(system.machine())),
    });
    figures["versions"] = json!({
        "ringfence": env!("CARGO_PKG_VERSION"), "protocol": PROTOCOL_VERSION, "numerics": NUMERICS_ID,
    });
    figures["command"] = json!(command);
    figures
}

/// The first processor's name; `None` where the system does not say.
fn processor() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 =
        text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?.split_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}
