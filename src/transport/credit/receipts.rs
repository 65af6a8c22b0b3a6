//! What came in on a hop, what its owner took, and what credit is to be returned for it.

use std::time::{Duration, Instant};

/// Credit for so many bytes is returned at once. A sender that needs it sooner asks.
pub(super) const RETURN_BYTES: u64 = 512 << 10;

/// Credit for less is returned after this time, with whatever was taken in it. A return costs both
/// ends a packet and some wake-ups, as much CPU as half a frame.
pub(super) const RETURN_DELAY: Duration = Duration::from_millis(20);

/// More came in than credit allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{outstanding} bytes of frames sent without credit: {limit} at most may be under way")]
pub struct Flood {
    /// Bytes that came in and were not returned.
    pub outstanding: u64,
    /// Bytes allowed.
    pub limit: u64,
}

/// A note to the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Return {
    /// Bytes taken since the beginning.
    pub taken: u64,
    /// How long the first of those not returned before was held, from when it had come to this
    /// moment.
    pub held: Duration,
    /// How long ago the last of them was taken.
    pub idle: Duration,
}

/// What was taken and not returned.
#[derive(Debug, Clone, Copy)]
struct Owed {
    /// When the first of it had come.
    arrived: Instant,
    /// When the first of it was taken, and the last.
    taken: Instant,
    last: Instant,
    /// Whether its sender waits for it.
    asked: bool,
}

/// The receiver's half of a hop's credits. Costs are those of [`cost`](super::cost).
#[derive(Debug, Clone)]
pub struct Receipts {
    window_max: u64,
    largest: u64,
    arrived: u64,
    taken: u64,
    returned: u64,
    owed: Option<Owed>,
}

impl Receipts {
    /// A hop on which nothing came, and at most `window_max` bytes may be under way, or two frames.
    #[must_use]
    pub fn new(window_max: u64) -> Self {
        Self { window_max, largest: 0, arrived: 0, taken: 0, returned: 0, owed: None }
    }

    /// Takes in that a frame is announced, before any room is made for it.
    ///
    /// # Errors
    /// [`Flood`] where its sender had no credit for it.
    pub fn handle_arrived(&mut self, cost: u64) -> Result<(), Flood> {
        self.largest = self.largest.max(cost);
        self.arrived = self.arrived.saturating_add(cost);
        let outstanding = self.arrived - self.returned;
        let limit = self.window_max.max(self.largest.saturating_mul(2));
        if outstanding > limit { Err(Flood { outstanding, limit }) } else { Ok(()) }
    }

    /// Takes in that the owner took a frame that had come at `arrived`; `asked` as its sender said.
    /// Whether [`Self::poll_timeout`] is sooner for it.
    pub fn handle_taken(&mut self, cost: u64, arrived: Instant, asked: bool, now: Instant) -> bool {
        let before = self.poll_timeout();
        self.taken += cost;
        let owed = self.owed.get_or_insert(Owed { arrived, taken: now, last: now, asked });
        owed.asked |= asked;
        owed.last = now;
        before.is_none() || self.poll_timeout() < before
    }

    /// When [`Self::poll_return`] has something to return; `None` where nothing was taken.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let owed = self.owed?;
        let much = owed.asked || self.taken - self.returned >= RETURN_BYTES;
        Some(if much { owed.taken } else { owed.taken + RETURN_DELAY })
    }

    /// What to return, if it is time.
    pub fn poll_return(&mut self, now: Instant) -> Option<Return> {
        if self.poll_timeout()? > now {
            return None;
        }
        let owed = self.owed.take()?;
        self.returned = self.taken;
        let since = |then| now.saturating_duration_since(then);
        Some(Return { taken: self.taken, held: since(owed.arrived), idle: since(owed.last) })
    }
}
