//! How many bytes of frames may be under way to a peer: a window, measured live.
//!
//! Owns the sender's half of a hop's credits. The peer returns credit for what its owner took;
//! from the returns comes the rate of the hop, as BBR defines it, and the round trip without a
//! queue, and from both the window: a little more than what fills the hop, so that whatever else
//! shares it waits behind little. Pure: time comes in as an argument, nothing goes out.

mod receipts;
mod shortest;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub use receipts::{Flood, Receipts, Return};
use shortest::{Belief, STALE_ROUNDS, Shortest, Under};

/// The window in bandwidth-delay products: above 1 so that a window that is too small shows it by
/// growing, and below 1.5, the most that a hop may hold.
const GAIN: f64 = 1.4;

/// Round trips for which a rate is remembered.
const RATE_ROUNDS: u64 = 10;

/// Round trips below it are the scheduler's more than the hop's, and count as this long.
const RTT_GRAIN: Duration = Duration::from_millis(1);

/// Frames in each half of what counts as recent.
const RECENT_FRAMES: u32 = 32;

/// What a body of `bytes` costs: its bytes, and a constant so that empty ones are not free.
#[must_use]
pub fn cost(bytes: usize) -> u64 {
    bytes as u64 + 4
}

/// The bounds of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreditConfig {
    /// Bytes under way before anything is known of the hop. Larger fills a long hop at once,
    /// smaller spares a narrow one a queue.
    pub initial: u64,
    /// Bytes under way at most; two frames may be under way whatever they take.
    pub window_max: u64,
}

impl Default for CreditConfig {
    /// 1 MiB at first, 16 MiB at most.
    fn default() -> Self {
        Self { initial: 1 << 20, window_max: 16 << 20 }
    }
}

/// Why a return can't be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CreditError {
    /// More came back than went out.
    #[error("credit for {returned} bytes returned, but {sent} were sent")]
    MoreThanSent {
        /// Bytes returned, since the beginning.
        returned: u64,
        /// Bytes sent, since the beginning.
        sent: u64,
    },
}

/// What is known of a hop, for operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HopStats {
    /// Bytes of frames sent and not yet taken by the peer's owner.
    pub in_flight: u64,
    /// Bytes of frames that may be.
    pub window: u64,
    /// Bytes per second that the hop delivers at most; 0 where nothing has come back yet.
    pub rate: u64,
    /// Round trip without a queue; `None` before the first.
    pub rtt_min: Option<Duration>,
    /// Frames that wait to be sent.
    pub queued: usize,
}

/// A frame under way, and how the hop stood when it was sent.
#[derive(Debug, Clone, Copy)]
struct Sent {
    /// Bytes sent in all, this frame included.
    end: u64,
    at: Instant,
    /// Bytes returned by then, and when the last of them were.
    delivered: u64,
    delivered_at: Instant,
    /// When what was returned last had been sent.
    first_sent: Instant,
    /// Whether the sender had less to send than the hop could carry.
    app_limited: bool,
    under: Under,
}

/// The sender's credits of one hop.
#[derive(Debug, Clone)]
pub struct Credit {
    config: CreditConfig,
    sent: u64,
    returned: u64,
    under_way: VecDeque<Sent>,
    /// When the last return came, or the hop was idle last.
    delivered_at: Instant,
    /// When what was returned last had been sent.
    first_sent: Instant,
    /// The sender had nothing to send when so much was under way; 0: it had.
    app_limited_until: u64,
    /// A round ends when a frame sent after its beginning comes back.
    round_end: u64,
    /// Rounds that showed what the hop can carry.
    rate_round: u64,
    /// Rates in bytes per second with their rounds: falling, the highest first.
    rates: VecDeque<(u64, f64)>,
    last_rate: f64,
    /// The last one before the shortest round trip began to be measured anew: what a small window
    /// shows is not the hop's.
    rate_before: f64,
    /// Whether any rate was the hop's rather than the sender's.
    measured: bool,
    shortest: Option<Shortest>,
    /// The largest frame of the recent ones: of this half, and of the half before.
    largest: [u64; 2],
    frames: u32,
    /// Bytes sent since credit was asked back at once.
    since_asked: u64,
}

impl Credit {
    /// Credits of a hop that has just come up at `now`.
    #[must_use]
    pub fn new(config: CreditConfig, now: Instant) -> Self {
        Self {
            config,
            sent: 0,
            returned: 0,
            under_way: VecDeque::new(),
            delivered_at: now,
            first_sent: now,
            // Whatever is sent first finds an empty hop.
            app_limited_until: 1,
            round_end: 0,
            rate_round: 0,
            rates: VecDeque::new(),
            last_rate: 0.0,
            rate_before: 0.0,
            measured: false,
            shortest: None,
            largest: [0; 2],
            frames: 0,
            since_asked: 0,
        }
    }

    /// Whether a frame of this cost may be sent now. Where none is under way one may, since two
    /// fit whatever they cost.
    #[must_use]
    pub fn may_send(&self, cost: u64) -> bool {
        self.in_flight() + cost <= self.window_for(cost)
    }

    /// Takes in that a frame of this cost is sent; whether its credit is asked back at once, since
    /// much of the window is used.
    pub fn handle_sent(&mut self, cost: u64, now: Instant) -> bool {
        if self.in_flight() == 0 {
            self.first_sent = now;
            self.delivered_at = now;
        }
        self.count_frame(cost);
        self.sent += cost;
        let in_flight = self.in_flight();
        let probing = self.is_probing();
        let under = match probing {
            true => Under::Probe,
            false if in_flight == cost => Under::Quiet,
            false => Under::Load,
        };
        self.under_way.push_back(Sent {
            end: self.sent,
            at: now,
            delivered: self.returned,
            delivered_at: self.delivered_at,
            first_sent: self.first_sent,
            app_limited: self.app_limited_until != 0 || probing,
            under,
        });
        let window = self.window();
        self.since_asked += cost;
        // Before half is used, in whole frames; and of every frame that measures, since one that
        // came back with others says how long the first of them took.
        let ask = probing || in_flight + self.largest() > window / 2 && self.since_asked >= window / 8;
        if ask {
            self.since_asked = 0;
        }
        ask
    }

    /// Takes in that nothing waits to be sent: what the hop shows from here on is the sender's
    /// rate, not its own.
    pub fn handle_starved(&mut self) {
        self.app_limited_until = self.sent.max(1);
    }

    /// Takes in that the peer's owner has taken so many bytes since the beginning.
    ///
    /// # Errors
    /// [`CreditError::MoreThanSent`] where so much was never sent.
    pub fn handle_returned(&mut self, returned: Return, now: Instant) -> Result<(), CreditError> {
        let Return { taken, held, idle } = returned;
        if taken > self.sent {
            return Err(CreditError::MoreThanSent { returned: taken, sent: self.sent });
        }
        if taken <= self.returned {
            // Said before.
            return Ok(());
        }
        // Frames may overtake one another: the first returned is not always the first sent. As
        // many were sent before it, so the round trip comes out too long at worst.
        let first = self.under_way.front().copied();
        self.returned = taken;
        let mut last = None;
        while self.under_way.front().is_some_and(|sent| sent.end <= taken) {
            last = self.under_way.pop_front();
        }
        if let Some(first) = first {
            // A peer that held it for longer than it was gone measures nothing.
            let round_trip = now.saturating_duration_since(first.at).checked_sub(held);
            if let Some(sample) = round_trip.filter(|sample| !sample.is_zero()) {
                self.take_round_trip(first, sample, now);
            }
        }
        if let Some(last) = last {
            // When it was taken counts, not when that was said.
            self.take_rate(last, now.checked_sub(idle).unwrap_or(now).max(self.delivered_at));
        }
        if self.returned > self.app_limited_until {
            self.app_limited_until = 0;
        }
        Ok(())
    }

    /// Bytes sent and not returned.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.sent - self.returned
    }

    /// Bytes that may be under way.
    #[must_use]
    pub fn window(&self) -> u64 {
        self.window_for(0)
    }

    /// What is known of the hop, while `queued` frames wait.
    #[must_use]
    pub fn stats(&self, queued: usize) -> HopStats {
        HopStats {
            in_flight: self.in_flight(),
            window: self.window(),
            rate: self.rate() as u64,
            rtt_min: self.shortest.map(|shortest| shortest.value()),
            queued,
        }
    }

    /// The highest rate lately, in bytes per second.
    fn rate(&self) -> f64 {
        self.rates.front().map_or(0.0, |&(_, rate)| rate)
    }

    fn bandwidth_delay(&self, rate: f64) -> f64 {
        self.shortest.map_or(0.0, |shortest| rate * shortest.value().max(RTT_GRAIN).as_secs_f64())
    }

    /// Whether the shortest round trip is being measured anew.
    fn is_probing(&self) -> bool {
        self.shortest.is_some_and(|shortest| shortest.is_probing())
    }

    /// So little that it makes no queue, also where the hop has just become slower.
    fn half(&self) -> u64 {
        (self.bandwidth_delay(self.rate_before) / 2.0) as u64
    }

    /// The largest of the recent frames.
    fn largest(&self) -> u64 {
        self.largest[0].max(self.largest[1])
    }

    /// The window, where a frame of this cost waits.
    fn window_for(&self, cost: u64) -> u64 {
        let largest = self.largest().max(cost);
        let probing = self.is_probing();
        let target = if !self.measured {
            self.config.initial
        } else if probing {
            self.half()
        } else {
            let target = (self.bandwidth_delay(self.rate()) * GAIN) as u64;
            // Two frames under way can't show that a third would fit.
            if target >= 2 * largest { target.max(3 * largest) } else { target }
        };
        target.min(self.config.window_max).max(2 * largest)
    }

    fn count_frame(&mut self, cost: u64) {
        if self.frames == RECENT_FRAMES {
            self.frames = 0;
            self.largest = [0, self.largest[0]];
        }
        self.frames += 1;
        self.largest[0] = self.largest[0].max(cost);
    }

    fn take_round_trip(&mut self, frame: Sent, sample: Duration, now: Instant) {
        let Some(shortest) = &mut self.shortest else {
            self.shortest = Some(Shortest::first(sample, now));
            return;
        };
        let was_probing = shortest.is_probing();
        let belief = shortest.handle_sample(sample, frame.under, (self.sent, self.returned), self.measured, now);
        if !was_probing {
            self.rate_before = self.last_rate;
        }
        if belief == Belief::Shaken {
            // The hop has become longer, or slower: of the old rates none is believed.
            let recent = self.rate_round.saturating_sub(u64::from(STALE_ROUNDS));
            self.rates.retain(|&(round, _)| round >= recent);
        }
    }

    fn take_rate(&mut self, sent: Sent, taken: Instant) {
        let sending = sent.at.saturating_duration_since(sent.first_sent);
        let returning = taken.saturating_duration_since(sent.delivered_at);
        self.first_sent = sent.at;
        self.delivered_at = taken;
        let interval = sending.max(returning);
        // No frame comes back sooner; an eighth is left to clocks. Returns that come in a heap say
        // nothing of the hop.
        let least = self.shortest.map_or(Duration::MAX, |shortest| shortest.value() * 7 / 8);
        if interval < least || interval.is_zero() {
            return;
        }
        self.last_rate = (self.returned - sent.delivered) as f64 / interval.as_secs_f64();
        // One rate a round: the highest of many would be chance.
        if sent.delivered >= self.round_end {
            self.round_end = self.returned;
            self.end_round(sent.app_limited);
        }
    }

    /// Takes in the rate of a round, and how long its round trips were.
    fn end_round(&mut self, app_limited: bool) {
        if let Some(shortest) = &mut self.shortest {
            shortest.end_round();
        }
        let rate = self.last_rate;
        if app_limited && rate < self.rate() {
            return;
        }
        while self.rates.back().is_some_and(|&(_, lower)| lower <= rate) {
            self.rates.pop_back();
        }
        self.rates.push_back((self.rate_round, rate));
        while self.rates.front().is_some_and(|&(at, _)| at + RATE_ROUNDS <= self.rate_round) {
            self.rates.pop_front();
        }
        if !app_limited {
            self.measured = true;
            self.rate_round += 1;
        }
    }
}
