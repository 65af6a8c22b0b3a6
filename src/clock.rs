//! The only reader of the clock.
//!
//! Machines take time as an argument; shells ask here. On a thread of the simulator
//! ([`crate::sim`]) time is what the simulator says it is: it drives the real shells.

use std::cell::Cell;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Seconds since 1970 at which simulated time begins.
const SIMULATED_EPOCH: u64 = 1_700_000_000;

thread_local! {
    /// When simulated time began and how much of it went by; `None` on every other thread.
    static SIMULATED: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// The present moment of the monotonic clock.
#[must_use]
pub fn now() -> Instant {
    SIMULATED.get().map_or_else(system_now, |(begun, elapsed)| begun + elapsed)
}

/// Seconds since 1970, for time stamps that people and clients read; 0 on a host whose clock is set before.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
pub fn unix_seconds() -> u64 {
    match SIMULATED.get() {
        Some((_, elapsed)) => SIMULATED_EPOCH + elapsed.as_secs(),
        None => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    }
}

#[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
fn system_now() -> Instant {
    Instant::now()
}

/// Simulated time of this thread, for as long as it lives. Only the simulator makes one.
#[derive(Debug)]
pub(crate) struct Simulated {
    begun: Instant,
}

impl Simulated {
    /// Stops the clock of this thread at zero.
    pub(crate) fn begin() -> Self {
        let begun = system_now();
        SIMULATED.set(Some((begun, Duration::ZERO)));
        Self { begun }
    }

    /// Sets the time of this thread to so much after its zero.
    pub(crate) fn set(&self, elapsed: Duration) {
        SIMULATED.set(Some((self.begun, elapsed)));
    }

    /// What a moment is after zero.
    pub(crate) fn elapsed(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.begun)
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        SIMULATED.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_time_stands_still_until_it_is_set_and_ends_with_its_owner() {
        let simulated = Simulated::begin();
        let zero = now();
        assert_eq!((now(), unix_seconds()), (zero, SIMULATED_EPOCH));
        simulated.set(Duration::from_secs(5));
        assert_eq!((now(), unix_seconds()), (zero + Duration::from_secs(5), SIMULATED_EPOCH + 5));
        assert_eq!(simulated.elapsed(now()), Duration::from_secs(5));
        let elsewhere = std::thread::spawn(unix_seconds).join().unwrap();
        assert!(elsewhere > SIMULATED_EPOCH + 5, "other threads have the system's time");
        drop(simulated);
        assert!(unix_seconds() > SIMULATED_EPOCH + 5);
    }
}
