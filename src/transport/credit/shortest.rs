//! The shortest round trip of a hop: what it takes where nothing waits.
//!
//! It is believed for a while. Then it is measured anew: from frames that found the hop quiet, if
//! there were any; else the window is made small until the queue has emptied and frames sent into
//! the empty hop have come back.

use std::time::{Duration, Instant};

use super::RTT_GRAIN;

/// How long the shortest round trip is believed.
pub(super) const LIFE: Duration = Duration::from_secs(10);

/// How long that of a hop that has just come up is: both ends were busy with making it.
const FIRST_LIFE: Duration = Duration::from_secs(1);

/// A round trip so many times the shortest is not of this hop's own making.
const STALE: f64 = 1.5;

/// A round trip measured anew that is so much of the one before shows a shorter hop.
const SHORTER: f64 = 0.9;

/// Rounds of such round trips after which the shortest one is measured anew.
pub(super) const STALE_ROUNDS: u32 = 3;

/// What a frame found under way when it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Under {
    /// Other frames, which may make it wait.
    Load,
    /// Nothing.
    Quiet,
    /// So little that it waits for none, or what was left of more: the shortest round trip was
    /// being measured.
    Probe,
}

/// Whether what was known of the hop still holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Belief {
    Holds,
    /// Round trips are so long that the hop must have become another.
    Shaken,
}

/// The shortest round trip, and how it is kept fresh.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shortest {
    value: Duration,
    /// It is believed until then.
    until: Instant,
    /// Whether it was never measured anew.
    first: bool,
    /// The shortest of longer ones, of frames that found the hop quiet.
    quiet: Option<Duration>,
    /// The shortest of this round.
    round: Option<Duration>,
    /// Rounds on end in which every round trip was far longer than `value`.
    stale: u32,
    probe: Probe,
}

/// How far the shortest round trip is from being measured anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    None,
    /// The queue empties: of what is sent after the first `after` bytes, no frame finds one.
    /// `shortest` is what this probe found before.
    Drain {
        after: u64,
        shortest: Duration,
    },
    /// Frames sent into the empty hop come back, the last of them when so much is returned.
    Measure {
        until: u64,
        shortest: Duration,
    },
}

impl Shortest {
    /// Of the first sample of a hop.
    pub(super) fn first(value: Duration, now: Instant) -> Self {
        Self { until: now + FIRST_LIFE, first: true, ..Self::new(value, now) }
    }

    /// Measured anew.
    fn new(value: Duration, now: Instant) -> Self {
        Self { value, until: now + LIFE, first: false, quiet: None, round: None, stale: 0, probe: Probe::None }
    }

    /// The shortest round trip.
    pub(super) fn value(&self) -> Duration {
        self.value
    }

    /// Whether it is being measured anew, and the window is to be small.
    pub(super) fn is_probing(&self) -> bool {
        self.probe != Probe::None
    }

    /// Takes in the round trip of a frame, while so many bytes are sent and returned in all. Only
    /// where the window can be made small (`may_probe`) it is measured anew by that.
    pub(super) fn handle_sample(
        &mut self,
        sample: Duration,
        under: Under,
        (sent, returned): (u64, u64),
        may_probe: bool,
        now: Instant,
    ) -> Belief {
        if self.is_probing() {
            self.probe(sample, under, (sent, returned), now);
            return Belief::Holds;
        }
        if sample <= self.value {
            let (until, first) = (self.until, self.first);
            *self = Self::new(sample, now);
            if first {
                (self.until, self.first) = (until, true);
            }
            return Belief::Holds;
        }
        let least = |known: Option<Duration>| Some(known.map_or(sample, |known| known.min(sample)));
        self.round = least(self.round);
        if under == Under::Quiet {
            self.quiet = least(self.quiet);
        }
        self.doubt(may_probe, now)
    }

    /// Goes on with a probe.
    fn probe(&mut self, sample: Duration, under: Under, (sent, returned): (u64, u64), now: Instant) {
        match self.probe {
            Probe::Drain { after, shortest } if under == Under::Probe && returned > after => {
                self.probe = Probe::Measure { until: sent, shortest: sample.min(shortest) };
            }
            Probe::Measure { until, shortest } => {
                let shortest = sample.min(shortest);
                if returned < until {
                    self.probe = Probe::Measure { until, shortest };
                    return;
                }
                let again = shortest < self.value.mul_f64(SHORTER);
                *self = Self::new(shortest, now);
                if again {
                    // What was little on the old hop may have filled this one.
                    self.probe = Probe::Drain { after: sent, shortest };
                }
            }
            Probe::None | Probe::Drain { .. } => {}
        }
    }

    /// Measures anew what is too old, or can't be.
    fn doubt(&mut self, may_probe: bool, now: Instant) -> Belief {
        let stale = self.stale >= STALE_ROUNDS;
        if stale || now > self.until {
            match self.quiet {
                Some(quiet) => *self = Self::new(quiet, now),
                None if may_probe => self.probe = Probe::Drain { after: 0, shortest: Duration::MAX },
                None => {}
            }
        }
        if stale { Belief::Shaken } else { Belief::Holds }
    }

    /// A round of frames has come back.
    pub(super) fn end_round(&mut self) {
        if let Some(round) = self.round.take() {
            let far = self.value.max(RTT_GRAIN).mul_f64(STALE);
            self.stale = if round > far { self.stale + 1 } else { 0 };
        }
    }
}
