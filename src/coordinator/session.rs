//! One session in the coordinator: its round, its reader and its end.
//!
//! The reader's buffer is bounded: a reader that does not keep up loses its session, and is told so.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::coordinator::job::{Event, Finish, JobError, JobSide, JobStats};
use crate::ids::{LayerRange, Node, TokenId};
use crate::proto::control::{SessionReport, StageReport};
use crate::proto::frame::Answer;
use crate::proto::round::Round;

/// How long the stages may take to say what they computed, before the numbers go out without it.
pub(crate) const CLOSE_DEADLINE: Duration = Duration::from_millis(500);

/// How long the stages may take to answer the probes that localize a fault.
pub(crate) const LOCALIZE_DEADLINE: Duration = Duration::from_millis(1_000);

/// What a session is doing.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Its round goes on.
    Running,
    /// It ended well; the stages are asked what they computed.
    Closing { finish: Finish, pending: BTreeSet<Node>, until: Instant },
    /// A reply is overdue; the stages are asked how far its frames came.
    Localizing { waited: Duration, nonce: u64, pending: BTreeSet<Node>, until: Instant },
}

/// One session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) round: Round,
    pub(crate) phase: Phase,
    /// The stages it was opened on, head first.
    pub(crate) ring: Vec<(Node, LayerRange)>,
    /// Probe rounds of the coordinator itself have no reader.
    pub(crate) reader: Option<JobSide>,
    pub(crate) reports: BTreeMap<Node, SessionReport>,
    pub(crate) probes: BTreeMap<Node, StageReport>,
    pub(crate) frames_sent: u64,
    pub(crate) wire_bytes_per_position: u64,
    pub(crate) prompt_len: u32,
    pub(crate) drafted: bool,
    begun: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    committed: u32,
}

impl Session {
    pub(crate) fn new(round: Round, ring: Vec<(Node, LayerRange)>, reader: Option<JobSide>, now: Instant) -> Self {
        Self {
            round,
            phase: Phase::Running,
            ring,
            reader,
            reports: BTreeMap::new(),
            probes: BTreeMap::new(),
            frames_sent: 0,
            wire_bytes_per_position: 0,
            prompt_len: 0,
            drafted: false,
            begun: now,
            first: None,
            last: None,
            committed: 0,
        }
    }

    /// A token is final.
    pub(crate) fn commit(&mut self, index: u32, token: TokenId, now: Instant) -> Result<(), JobError> {
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.committed += 1;
        self.tell(Event::Token { index, token })
    }

    /// A prompt position is scored.
    pub(crate) fn score(&mut self, pos: u32, answer: Answer) -> Result<(), JobError> {
        self.tell(Event::Scored { pos, answer })
    }

    fn tell(&self, event: Event) -> Result<(), JobError> {
        self.reader.as_ref().map_or(Ok(()), |reader| reader.send(event))
    }

    /// What was measured; definitions in `docs/protocol.md`.
    pub(crate) fn stats(&self) -> JobStats {
        let round = self.round.stats();
        let committed = f64::from(self.committed.max(1));
        let seconds = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64();
        let decode = self.first.zip(self.last).map_or(0.0, |(first, last)| seconds(first, last));
        let after_first = f64::from(self.committed.saturating_sub(1));
        let computed = |peer: &Node| self.reports.get(peer).map_or(f64::NAN, |report| as_f64(report.decoded));
        JobStats {
            prompt_tokens: self.prompt_len,
            committed: self.committed,
            ttft_ms: self.first.map_or(0.0, |first| seconds(self.begun, first) * 1e3),
            tokens_per_second: if decode > 0.0 { after_first / decode } else { 0.0 },
            acceptance_length: self.drafted.then(|| round.acceptance_length()),
            accept_by_depth: self.drafted.then(|| round.accept_by_depth()),
            frames_per_token: round.frames_per_token(),
            frames_computed_per_token: self.ring.iter().map(|(peer, _)| computed(peer) / committed).collect(),
            max_in_flight: round.max_in_flight,
            wire_bytes_per_position: self.wire_bytes_per_position,
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "counters of one session stay far below 2^52")]
fn as_f64(count: u64) -> f64 {
    count as f64
}
