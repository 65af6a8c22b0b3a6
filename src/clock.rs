//! The only reader of the clock.
//!
//! Machines take time as an argument; shells ask here.

use std::time::Instant;

/// The present moment of the monotonic clock.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn now() -> Instant {
    Instant::now()
}
