//! A stage's fence: which frames are computed, held or dropped. It saves work; the load-bearing
//! fence is the coordinator's receiver ([`crate::proto::round`]).
//!
//! Owns one session's epoch, next position, settled floor and waiting frames on one stage. It is
//! asked three times: on arrival, on dequeue and before forwarding.

mod error;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub use error::FenceError;

use super::frame::FrameHead;
use crate::ids::{Epoch, Position, SessionId, View};

/// Frames of one session that wait on a stage, at most; a good value for [`FenceConfig::held_max`].
pub const HELD_FRAMES_MAX: usize = 256;

/// What is fixed about a session's fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FenceConfig {
    /// The session, for messages.
    pub session: SessionId,
    /// Membership the session was opened in.
    pub view: View,
    /// Prompt tokens; later positions are decoding.
    pub prompt_len: u32,
    /// Largest `pos + len − settled` of a frame.
    pub reach: u32,
    /// One past the last position of the session.
    pub end: Position,
    /// The first position that comes: what is below is in the stage's state.
    pub from: Position,
    /// Positions below are history: they are never re-opened, so no reach bounds them.
    pub history: Position,
    /// Results below it are kept and not forwarded: the next stage has them.
    pub forward_from: Position,
    /// How long a frame waits for a missing one in front of it.
    pub hold_for: Duration,
    /// Frames that wait, at most, whether for a missing one or for the engine.
    pub held_max: usize,
}

/// What became of a frame that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Nothing in front of it is missing: [`Fence::poll_compute`] hands it out in its turn.
    Queued,
    /// It waits for a frame in front of it.
    Held,
    /// It is gone; its credit can be returned at once.
    Dropped(DropReason),
}

/// Why a frame was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// Of an older membership.
    OldView,
    /// Of an epoch older than the adopted one.
    OldEpoch,
    /// Of a cancelled epoch.
    Cancelled,
    /// Its positions are computed or waiting in this epoch already.
    Duplicate,
}

/// Whether a computed frame's result goes on to the next stage (at the tail: back as a reply).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Forward {
    /// It is still wanted.
    Yes,
    /// It is true, and the next stage has it.
    Keep,
    /// Its epoch died while it was computed.
    No,
}

/// Why [`Fence::poll_timeout`] wants to be called again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceTimeout {
    /// A held frame's missing predecessor is overdue.
    Held,
}

/// Frames of one session on one stage, counted. Every frame received was computed, was dropped,
/// waits or is being computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FenceCounters {
    /// Frames that arrived.
    pub received: u64,
    /// Frames whose compute is complete.
    pub computed: u64,
    /// Those of `computed` that hold a single position past the prompt.
    pub decoded: u64,
    /// Those of `computed` that went on.
    pub forwarded: u64,
    /// Dropped uncomputed: older membership.
    pub old_view: u64,
    /// Dropped uncomputed: older epoch.
    pub old_epoch: u64,
    /// Dropped uncomputed: cancelled.
    pub cancelled: u64,
    /// Dropped uncomputed: duplicate.
    pub duplicate: u64,
    /// Refused with an error.
    pub refused: u64,
}

impl FenceCounters {
    /// Frames dropped uncomputed, for whatever reason.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.old_view + self.old_epoch + self.cancelled + self.duplicate
    }

    fn drop_one(&mut self, reason: DropReason) {
        match reason {
            DropReason::OldView => self.old_view += 1,
            DropReason::OldEpoch => self.old_epoch += 1,
            DropReason::Cancelled => self.cancelled += 1,
            DropReason::Duplicate => self.duplicate += 1,
        }
    }
}

/// A frame that waits.
#[derive(Debug, Clone)]
struct Waiting<T> {
    head: FrameHead,
    body: T,
    since: Instant,
}

/// One session's fence on one stage; `T` is what the frame carries besides its head.
#[derive(Debug, Clone)]
pub struct Fence<T> {
    config: FenceConfig,
    epoch: Epoch,
    /// First position of the adopted epoch.
    start: Position,
    /// Next position to compute: raised only when a compute is complete.
    next: Position,
    /// Next position to hand out; `next..handed` is being computed.
    handed: Position,
    /// One past the last waiting position that nothing is missing in front of.
    ready: Position,
    settled: Position,
    cancelled_below: Epoch,
    /// Frames of the adopted epoch at or past `handed`, and of later epochs.
    waiting: BTreeMap<(Epoch, Position), Waiting<T>>,
    counters: FenceCounters,
}

impl<T> Fence<T> {
    /// A session's fence before its first frame: epoch 0, which starts at position 0.
    #[must_use]
    pub fn new(config: FenceConfig) -> Self {
        Self {
            config,
            epoch: Epoch(0),
            start: Position(0),
            next: config.from,
            handed: config.from,
            ready: config.from,
            settled: Position(0),
            cancelled_below: Epoch(0),
            waiting: BTreeMap::new(),
            counters: FenceCounters::default(),
        }
    }

    /// Takes in a frame that arrived.
    ///
    /// # Errors
    /// [`FenceError`]: the session has failed on this stage.
    pub fn handle_frame(&mut self, head: FrameHead, body: T, now: Instant) -> Result<Arrival, FenceError> {
        self.counters.received += 1;
        let arrival = match self.dead(&head) {
            Some(reason) => Ok(Arrival::Dropped(reason)),
            None => self.check(&head).and_then(|()| self.admit(Waiting { head, body, since: now })),
        };
        match arrival {
            Ok(Arrival::Dropped(reason)) => self.counters.drop_one(reason),
            Ok(Arrival::Queued | Arrival::Held) => {}
            Err(_) => self.counters.refused += 1,
        }
        arrival
    }

    /// Takes in that epochs below `below` need not be computed. Idempotent, in any order.
    pub fn handle_cancel(&mut self, below: Epoch) {
        self.cancelled_below = self.cancelled_below.max(below);
        self.drop_dead();
    }

    /// Hands out the next frame to compute, in order of position, until `None`.
    ///
    /// Several may be handed out before the first is computed; each must be given back to
    /// [`Self::handle_computed`], in the same order.
    pub fn poll_compute(&mut self) -> Option<(FrameHead, T)> {
        let Waiting { head, body, .. } = self.waiting.remove(&(self.epoch, self.handed))?;
        self.handed = head.pos.plus(head.len);
        self.ready = self.ready.max(self.handed);
        Some((head, body))
    }

    /// Whether [`Self::poll_compute`] would hand out a frame.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.waiting.contains_key(&(self.epoch, self.handed))
    }

    /// Takes in that a frame's compute is complete and says whether its result is still wanted.
    ///
    /// # Panics
    /// If the frame is of the adopted epoch and not the next one that was handed out.
    pub fn handle_computed(&mut self, head: &FrameHead) -> Forward {
        self.counters.computed += 1;
        self.counters.decoded += u64::from(head.len == 1 && head.pos.0 >= self.config.prompt_len);
        if head.epoch != self.epoch {
            return Forward::No;
        }
        assert_eq!(head.pos, self.next, "session {}: frames are computed in order", self.config.session);
        self.next = head.pos.plus(head.len);
        if self.dead(head).is_some() {
            return Forward::No;
        }
        if self.next <= self.config.forward_from {
            return Forward::Keep;
        }
        self.counters.forwarded += 1;
        Forward::Yes
    }

    /// Takes in that so many frames of the history were sent to the next stage once more.
    pub fn handle_replayed(&mut self, frames: u64) {
        self.counters.forwarded += frames;
    }

    /// Positions below are history.
    #[must_use]
    pub fn history(&self) -> Position {
        self.config.history
    }

    /// When [`Self::handle_timeout`] is due and why.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<(Instant, FenceTimeout)> {
        let since = self.held().map(|frame| frame.since).min()?;
        Some((since + self.config.hold_for, FenceTimeout::Held))
    }

    /// Takes in that time has passed.
    ///
    /// # Errors
    /// [`FenceError::Gap`] where a held frame waited too long for the one in front of it.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), FenceError> {
        let Some(frame) = self.held().min_by_key(|frame| frame.since) else { return Ok(()) };
        let waited = now.saturating_duration_since(frame.since);
        if waited < self.config.hold_for {
            return Ok(());
        }
        Err(FenceError::Gap {
            session: self.config.session,
            epoch: frame.head.epoch,
            expected: if frame.head.epoch == self.epoch { self.ready } else { frame.head.start },
            got: frame.head.pos,
            waited,
        })
    }

    /// The adopted epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Next position to compute.
    #[must_use]
    pub fn next(&self) -> Position {
        self.next
    }

    /// Positions below it are never re-opened.
    #[must_use]
    pub fn settled(&self) -> Position {
        self.settled
    }

    /// What was counted.
    #[must_use]
    pub fn counters(&self) -> FenceCounters {
        self.counters
    }

    /// Frames that wait, whether for a missing one or for the engine.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Why a frame is not to be computed or forwarded, whatever else it says.
    fn dead(&self, head: &FrameHead) -> Option<DropReason> {
        if head.view < self.config.view {
            Some(DropReason::OldView)
        } else if head.view > self.config.view {
            None
        } else if head.epoch < self.epoch {
            Some(DropReason::OldEpoch)
        } else if head.epoch < self.cancelled_below {
            Some(DropReason::Cancelled)
        } else {
            None
        }
    }

    /// Checks a live frame's numbers against one another and against the session.
    fn check(&self, head: &FrameHead) -> Result<(), FenceError> {
        let FenceConfig { session, view, reach, end, .. } = self.config;
        let FrameHead { epoch, start, pos, len, settled, .. } = *head;
        if head.view != view {
            return Err(FenceError::View { session, expected: view, got: head.view });
        }
        if len == 0 {
            return Err(FenceError::Empty { session, pos });
        }
        let frame_end = u64::from(pos.0) + u64::from(len);
        if frame_end > u64::from(end.0) {
            return Err(FenceError::PastEnd { session, pos, len, end });
        }
        let floor = self.settled.max(settled);
        if epoch > self.epoch && start < floor {
            return Err(FenceError::BelowFloor { session, epoch, start, floor });
        }
        if pos < start {
            return Err(FenceError::Start { session, epoch, pos, expected: pos, got: start });
        }
        if pos < settled {
            return Err(FenceError::Settled { session, pos, settled });
        }
        let history = frame_end <= u64::from(self.config.history.0);
        if !history && frame_end - u64::from(settled.0) > u64::from(reach) {
            return Err(FenceError::Reach { session, pos, len, settled, reach });
        }
        if epoch == self.epoch && start != self.start {
            return Err(FenceError::Start { session, epoch, pos, expected: self.start, got: start });
        }
        if epoch > self.epoch && start > self.next {
            let waited = Duration::ZERO;
            return Err(FenceError::Gap { session, epoch, expected: self.next, got: start, waited });
        }
        if settled > self.next {
            return Err(FenceError::Unsettled { session, settled, next: self.next });
        }
        Ok(())
    }

    /// Puts a live, checked frame where it belongs.
    fn admit(&mut self, frame: Waiting<T>) -> Result<Arrival, FenceError> {
        let FrameHead { epoch, pos, start, settled, .. } = frame.head;
        if (epoch == self.epoch && pos < self.ready) || self.waiting.contains_key(&(epoch, pos)) {
            return Ok(Arrival::Dropped(DropReason::Duplicate));
        }
        self.settled = self.settled.max(settled);
        if epoch > self.epoch && pos == start {
            self.adopt(epoch, start)?;
        }
        if self.waiting.len() >= self.config.held_max {
            return Err(FenceError::HeldFull { session: self.config.session, limit: self.config.held_max });
        }
        self.waiting.insert((epoch, pos), frame);
        self.extend_ready();
        Ok(if epoch == self.epoch && pos < self.ready { Arrival::Queued } else { Arrival::Held })
    }

    /// Makes a later epoch the current one, from its first position on.
    fn adopt(&mut self, epoch: Epoch, start: Position) -> Result<(), FenceError> {
        self.epoch = epoch;
        self.start = start;
        self.next = start;
        self.handed = start;
        self.ready = start;
        self.drop_dead();
        // Frames that came before their epoch's first one are believed about its start only now.
        let early = self.waiting.range((epoch, Position(0))..=(epoch, Position(u32::MAX)));
        for (_, Waiting { head, .. }) in early {
            if head.start != start {
                let (session, pos) = (self.config.session, head.pos);
                return Err(FenceError::Start { session, epoch, pos, expected: start, got: head.start });
            }
        }
        Ok(())
    }

    /// Follows the run of frames that nothing is missing in front of, and drops what it covers twice.
    fn extend_ready(&mut self) {
        while let Some(frame) = self.waiting.get(&(self.epoch, self.ready)) {
            let from = self.ready;
            self.ready = from.plus(frame.head.len);
            let covered = (self.epoch, from.plus(1))..(self.epoch, self.ready);
            let covered: Vec<_> = self.waiting.range(covered).map(|(&key, _)| key).collect();
            for key in covered {
                self.waiting.remove(&key);
                self.counters.drop_one(DropReason::Duplicate);
            }
        }
    }

    fn drop_dead(&mut self) {
        let (epoch, below) = (self.epoch, self.cancelled_below);
        let counters = &mut self.counters;
        self.waiting.retain(|&(frame, _), _| {
            if frame < epoch {
                counters.drop_one(DropReason::OldEpoch);
            } else if frame < below {
                counters.drop_one(DropReason::Cancelled);
            }
            frame >= epoch && frame >= below
        });
    }

    /// Frames that wait for a missing one.
    fn held(&self) -> impl Iterator<Item = &Waiting<T>> {
        self.waiting.values().filter(|frame| frame.head.epoch != self.epoch || frame.head.pos >= self.ready)
    }
}
