//! A stage on its way out: pure.
//!
//! Owns when it may end: it takes nothing new, and finishes what the coordinator has opened on it.

use std::time::{Duration, Instant};

/// Heartbeat whose answer says that the coordinator has heard of the draining: it answers in order.
pub const LEAVE_SEQ: u64 = u64::MAX;

/// Pause between looks at whether the sessions have ended, which is no event for the shell.
const LOOK: Duration = Duration::from_millis(50);

/// How long a stage waits for its sessions to end.
const DEADLINE: Duration = Duration::from_secs(30);

/// What a stage that drains waits for.
#[derive(Debug, Clone, Copy)]
pub struct Leaving {
    until: Instant,
    heard: bool,
}

impl Leaving {
    /// Starts to leave; the coordinator is to be told and asked with [`LEAVE_SEQ`].
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { until: now + DEADLINE, heard: false }
    }

    /// The coordinator answered: every session that it opens here is known by now.
    pub fn handle_ack(&mut self) {
        self.heard = true;
    }

    /// When to look again.
    #[must_use]
    pub fn poll_timeout(&self, now: Instant) -> Instant {
        self.until.min(now + LOOK)
    }

    /// Whether nothing is open and nothing can come, or it waited long enough. A coordinator that is
    /// gone opens nothing.
    #[must_use]
    pub fn is_over(&self, obeys_one: bool, open_sessions: usize, now: Instant) -> bool {
        self.until <= now || ((self.heard || !obeys_one) && open_sessions == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_when_nothing_is_open_and_nothing_can_come() {
        let t0 = crate::clock::now();
        let mut leaving = Leaving::new(t0);
        assert!(!leaving.is_over(true, 0, t0), "the coordinator may be opening one");
        assert!(leaving.is_over(false, 0, t0));
        leaving.handle_ack();
        assert!(!leaving.is_over(true, 1, t0));
        assert!(leaving.is_over(true, 0, t0));
        assert!(leaving.is_over(true, 1, t0 + DEADLINE));
    }
}
