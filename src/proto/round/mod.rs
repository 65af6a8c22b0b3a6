//! One session in the coordinator: streams truth and drafts, judges replies in position order.
//!
//! Owns the load-bearing fence: a reply is believed only if it is of the current view and epoch and
//! the frame that it answers fed exactly the committed tokens, so neither a late reply of a dead
//! speculation nor one that overtook can put a token into the stream. Every committed token is the
//! model's own. Stages fence too ([`crate::proto::fence`]), to save work.
//!
//! `judge` takes replies in, `stream` says what to send next; [`config`] and [`stats`] are what the
//! caller sets and reads.

pub mod config;
mod judge;
pub mod stats;
mod stream;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

pub use config::{Deadlines, RoundConfig, RoundConfigError};
pub use stats::RoundStats;

use super::frame::{Answer, FrameHead, Reply, Scores};
use crate::ids::{Epoch, Position, SessionId, TokenId, View};

/// What the shell is to do for a session, in this order.
#[derive(Debug, Clone, PartialEq)]
pub enum RoundOutput {
    /// Send a frame into the head.
    Send {
        /// Its fencing numbers.
        head: FrameHead,
        /// Its tokens; `head.len` of them.
        ids: Vec<TokenId>,
    },
    /// Tell every stage, out of band, that epochs below need not be computed.
    Cancel {
        /// First epoch that still matters.
        below: Epoch,
    },
    /// A token is final.
    Commit {
        /// From 0: its place among the new tokens.
        index: u32,
        /// The position where it is fed.
        position: Position,
        /// The model's token.
        token: TokenId,
        /// Its scores, where `open.want` asked for some.
        scores: Option<Scores>,
    },
    /// A prompt position is scored; ascending.
    Scored {
        /// The position.
        position: Position,
        /// The model's answer there.
        answer: Answer,
    },
    /// The session ended well; nothing follows.
    Finished(Finish),
    /// The oldest frame in flight is not answered in time. Until a reply comes, or [`Round::handle_patience`],
    /// no frame is sent and no more time is counted.
    Overdue {
        /// First position of the frame.
        pos: Position,
        /// Its positions.
        len: u32,
        /// Since when it is in flight.
        waited: Duration,
    },
    /// The session failed; what was committed stays true, nothing follows.
    Failed(RoundError),
}

/// Why a session ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The last committed token ends the sequence.
    Eos,
    /// All new tokens that were asked for are committed.
    Length,
    /// The caller stopped it.
    Stopped,
    /// Every prompt position is scored and no new token was asked for.
    Scored,
}

/// Why a session failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RoundError {
    /// The ring said something that cannot be.
    #[error("the ring contradicts the coordinator: {0}")]
    Diverged(#[from] Divergence),
}

/// What a reply says that cannot be.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Divergence {
    /// A reply for another session came here.
    #[error("a reply of session {got} came to session {expected}")]
    Session {
        /// This session.
        expected: SessionId,
        /// The reply's.
        got: SessionId,
    },
    /// A reply of a view or epoch that does not exist yet.
    #[error("reply of view {got_view} epoch {got_epoch}, the session is in view {view} epoch {epoch}")]
    Future {
        /// The session's view.
        view: View,
        /// The session's epoch.
        epoch: Epoch,
        /// The reply's view.
        got_view: View,
        /// The reply's epoch.
        got_epoch: Epoch,
    },
    /// A reply for a frame that was never sent in its epoch.
    #[error("reply at position {got} of epoch {epoch}, in flight are {first} to {end} (half-open)")]
    NeverSent {
        /// The epoch.
        epoch: Epoch,
        /// The reply's position.
        got: Position,
        /// First position in flight.
        first: Position,
        /// One past the last position in flight.
        end: Position,
    },
    /// A reply about another number of positions than were sent.
    #[error("reply at position {pos} is for {got} positions, the frame had {expected}")]
    Len {
        /// The frame's position.
        pos: Position,
        /// Positions sent.
        expected: u32,
        /// Positions answered.
        got: u32,
    },
    /// A reply with another number of answers than were asked for.
    #[error("reply at position {pos} has {got} answers, the frame asked for {expected}")]
    Answers {
        /// The frame's position.
        pos: Position,
        /// Answers asked for.
        expected: u32,
        /// Answers that came.
        got: usize,
    },
    /// A draft block without one confidence per token.
    #[error("reply at position {pos} drafts {tokens} tokens with {confidence} confidences")]
    Draft {
        /// The frame's position.
        pos: Position,
        /// Tokens.
        tokens: usize,
        /// Confidences.
        confidence: usize,
    },
    /// Two different replies for one frame.
    #[error("two replies at position {pos} of epoch {epoch} answer {first} and {second}")]
    Twice {
        /// The frame's position.
        pos: Position,
        /// The epoch.
        epoch: Epoch,
        /// Answers of the first one.
        first: String,
        /// Answers of the second one.
        second: String,
    },
}

/// Why [`Round::poll_timeout`] wants to be called again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundTimeout {
    /// The oldest frame in flight becomes overdue.
    Reply,
}

/// Where a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Prompt chunks are on their way.
    Prefill,
    /// The prompt is answered; new tokens come.
    Decode,
    /// Nothing more is sent or believed.
    Done,
}

/// A frame of the current epoch that is not judged yet.
#[derive(Debug, Clone, Copy)]
struct Flight {
    pos: Position,
    len: u32,
    answer_from: Position,
    sent_at: Instant,
}

/// A token that is fed, or will be, at a position past the prompt.
#[derive(Debug, Clone, Copy)]
struct Slot {
    token: TokenId,
    /// How far ahead of the frontier it was when it was sent.
    depth: u32,
}

/// One session's machine.
#[derive(Debug, Clone)]
pub struct Round {
    config: RoundConfig,
    phase: Phase,
    epoch: Epoch,
    /// First position of the epoch.
    start: Position,
    /// Positions below it are judged: those of the prompt that were answered, then the position
    /// at which the last committed token is fed.
    settled: Position,
    /// Frames settle nothing at or above it: what is not durable may be asked again.
    durable: Position,
    /// Prompt positions sent.
    prompt_sent: u32,
    committed: u32,
    /// Past the prompt: `line[i]` is at position `settled + i`. The first one is committed, the
    /// others are drafts; the first `flights.len()` are in flight, the others wait to be sent.
    line: VecDeque<Slot>,
    /// In position order, without a hole.
    flights: VecDeque<Flight>,
    /// Replies of frames in flight that must wait for one in front of them; one a frame at most.
    early: BTreeMap<Position, Reply>,
    /// When the oldest frame in flight became the oldest.
    progressed: Instant,
    /// A frame was not answered in time.
    overdue: bool,
    outputs: VecDeque<RoundOutput>,
    stats: RoundStats,
}

impl Round {
    /// A session that is opened on every stage and has sent nothing.
    ///
    /// # Errors
    /// [`RoundConfigError`] where the settings contradict one another.
    pub fn new(config: RoundConfig, now: Instant) -> Result<Self, RoundConfigError> {
        config.check()?;
        let stats = RoundStats { prompt_tokens: config.prompt.len() as u32, ..RoundStats::default() };
        Ok(Self {
            config,
            phase: Phase::Prefill,
            epoch: Epoch(0),
            start: Position(0),
            settled: Position(0),
            durable: Position(u32::MAX),
            prompt_sent: 0,
            committed: 0,
            line: VecDeque::new(),
            flights: VecDeque::new(),
            early: BTreeMap::new(),
            progressed: now,
            overdue: false,
            outputs: VecDeque::new(),
            stats,
        })
    }

    /// Goes on at `from`, a position of the prompt: what is below is in every stage's state. Before the first
    /// frame only; at the prompt's last position at most, which is always asked.
    pub fn skip_to(&mut self, from: Position) {
        debug_assert!(self.prompt_sent == 0 && from.0 < self.config.prompt_len(), "nothing is sent yet");
        self.prompt_sent = from.0;
        self.settled = from;
    }

    /// Takes in that the caller wants nothing more: a stop string came, or the client is gone.
    ///
    /// Commits that were judged before still go out, then the end; no further frame does.
    pub fn handle_stop(&mut self) {
        if self.phase != Phase::Done {
            self.end(RoundOutput::Finished(Finish::Stopped));
        }
    }

    /// Takes in how far the session is durable: a coordinator that is started again re-opens it at `durable`
    /// at the lowest. Frames settle no more than that; a caller without a log never says it.
    pub fn handle_durable(&mut self, durable: Position) {
        self.durable = durable;
    }

    /// Takes in that time has passed; says so if the oldest frame is overdue.
    pub fn handle_timeout(&mut self, now: Instant) {
        let Some((due, RoundTimeout::Reply)) = self.poll_timeout() else { return };
        let Some(oldest) = self.flights.front() else { return };
        if now >= due {
            let waited = now.saturating_duration_since(oldest.sent_at);
            self.outputs.push_back(RoundOutput::Overdue { pos: oldest.pos, len: oldest.len, waited });
            self.overdue = true;
        }
    }

    /// The ring is slow and moves: the oldest frame has its time once more.
    pub fn handle_patience(&mut self, now: Instant) {
        self.overdue = false;
        self.progressed = now;
    }

    /// Whether a frame was not answered in time, and none since.
    #[must_use]
    pub fn is_overdue(&self) -> bool {
        self.overdue
    }

    /// When [`Self::handle_timeout`] is due and why; `None` while nothing is in flight.
    ///
    /// The oldest frame's deadline runs from when it was sent, or from when the frame in front of
    /// it was answered: a ring that is slow but answers is not overdue.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<(Instant, RoundTimeout)> {
        let oldest = self.flights.front().filter(|_| !self.overdue)?;
        Some((oldest.sent_at.max(self.progressed) + self.deadline(), RoundTimeout::Reply))
    }

    /// What to do next, until `None`. Frames count as sent at `now`.
    pub fn poll_output(&mut self, now: Instant) -> Option<RoundOutput> {
        self.outputs.pop_front().or_else(|| self.next_frame(now))
    }

    /// What the session was set to.
    #[must_use]
    pub fn config(&self) -> &RoundConfig {
        &self.config
    }

    /// The current epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The position at which the last committed token is fed; before the first one, the prompt
    /// positions that are answered. Never falls.
    #[must_use]
    pub fn frontier(&self) -> Position {
        self.settled
    }

    /// The settled floor that every frame carries: the frontier, as far as it is durable.
    #[must_use]
    pub fn floor(&self) -> Position {
        self.settled.min(self.durable)
    }

    /// Tokens committed.
    #[must_use]
    pub fn committed(&self) -> u32 {
        self.committed
    }

    /// Frames of the current epoch that are not judged yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Replies that wait for one in front of them.
    #[must_use]
    pub fn early(&self) -> usize {
        self.early.len()
    }

    /// Whether the session has ended, well or not; outputs may still wait.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }

    /// What was measured so far.
    #[must_use]
    pub fn stats(&self) -> &RoundStats {
        &self.stats
    }

    fn deadline(&self) -> Duration {
        match self.phase {
            Phase::Prefill => self.config.deadlines.prefill,
            Phase::Decode | Phase::Done => self.config.deadlines.reply,
        }
    }

    /// Ends the session with its last output; what is in flight is cancelled first.
    fn end(&mut self, last: RoundOutput) {
        if !self.flights.is_empty() {
            self.cancel();
        }
        self.phase = Phase::Done;
        self.outputs.push_back(last);
    }

    /// Gives up everything in flight and opens the next epoch at the frontier.
    fn cancel(&mut self) {
        self.stats.cancelled += self.flights.len() as u64;
        self.epoch = self.epoch.next();
        self.start = self.settled;
        self.flights.clear();
        self.early.clear();
        self.line.clear();
        self.outputs.push_back(RoundOutput::Cancel { below: self.epoch });
    }
}
