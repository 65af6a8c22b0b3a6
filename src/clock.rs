//! The only reader of the clock.
//!
//! Machines take time as an argument; shells ask here.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The present moment of the monotonic clock.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn now() -> Instant {
    Instant::now()
}

/// Seconds since 1970, for time stamps that people and clients read; 0 on a host whose clock is set before.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
