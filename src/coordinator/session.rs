//! One session in the coordinator: its round, its reader and its end.
//!
//! A session outlives its ring: when a stage is lost it waits for the next ring and replays its
//! history there, and what its reader was told before must come out again.
//!
//! The reader's buffer is bounded: a reader that does not keep up loses its session, and is told so.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::coordinator::job::{Client, Event, Finish, JobError, JobSide, JobStats, Request, TokenScores};
use crate::heal::run::Run;
use crate::ids::{LayerRange, Node, Position, TokenId, WireEncoding};
use crate::proto::control::{Open, SessionReport, StageReport};
use crate::proto::frame::{Answer, Scores};
use crate::proto::round::{Round, RoundStats};

/// How long the stages may take to say what they computed, before the numbers go out without it.
pub(crate) const CLOSE_DEADLINE: Duration = Duration::from_millis(500);

/// How long the stages may take to answer the probes that localize a fault.
pub(crate) const LOCALIZE_DEADLINE: Duration = Duration::from_millis(1_000);

/// What a session is doing.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Its round goes on.
    Running,
    /// The stages get back what they lost of it.
    Rebuilding(Box<Run>),
    /// It ended well; the stages are asked what they computed.
    Closing { finish: Finish, pending: BTreeSet<Node>, until: Instant },
    /// A reply is overdue; the stages are asked how far its frames came.
    Localizing { waited: Duration, nonce: u64, pending: BTreeSet<Node>, until: Instant },
    /// Its ring is no more; it waits for the next one, and fails with `error` if none comes.
    Parked { error: JobError, until: Instant },
}

/// What a session's tokens depend on besides its request: fixed when it is first opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Arithmetic {
    /// Layers in front of which hidden states are encoded, ascending, whether a hop is there or not.
    pub(crate) boundaries: Vec<u16>,
    /// The encoding there.
    pub(crate) encoding: WireEncoding,
}

/// How much of a session is in the log and synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durable {
    /// It is not logged: its tokens are told as they are committed.
    Unlogged,
    /// Nothing yet.
    Nothing,
    /// That it was opened, and so many tokens, which its reader was told.
    Tokens(u32),
}

/// Who started a session, and who reads it.
#[derive(Debug)]
pub(crate) struct Readers {
    /// A probe round of the coordinator itself: nobody ever reads it.
    pub(crate) probe: bool,
    pub(crate) client: Client,
    /// `None`: a probe, or its reader is gone and may come back.
    pub(crate) reader: Option<JobSide>,
    /// Number of the present reader, from 0.
    pub(crate) number: u64,
    /// When a session without reader is cancelled.
    pub(crate) until: Option<Instant>,
}

impl Readers {
    /// Those of a session that begins; without reader, a probe.
    pub(crate) fn new(client: Client, reader: Option<JobSide>) -> Self {
        Self { probe: reader.is_none(), client, reader, number: 0, until: None }
    }
}

/// A session as it is opened on one ring.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) open: Open,
    pub(crate) round: Round,
    /// Head first.
    pub(crate) ring: Vec<(Node, LayerRange)>,
    pub(crate) arithmetic: Arithmetic,
    /// Committed tokens that are a part of the prompt.
    pub(crate) replayed: usize,
}

/// One session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) request: Request,
    pub(crate) round: Round,
    pub(crate) phase: Phase,
    /// What the stages were told.
    pub(crate) open: Open,
    /// The stages it is open on, head first.
    pub(crate) ring: Vec<(Node, LayerRange)>,
    pub(crate) arithmetic: Arithmetic,
    pub(crate) readers: Readers,
    pub(crate) durable: Durable,
    /// It ended well, and its reader has to be told the last tokens first.
    pub(crate) ending: bool,
    /// Final tokens; the reader is told those that are durable.
    pub(crate) committed: Vec<TokenId>,
    /// Their log-probabilities, where the request asks for them, else none.
    pub(crate) scores: Vec<TokenScores>,
    /// Those of `committed` that the present round has in its prompt.
    pub(crate) replayed: usize,
    /// Prompt positions that the reader was told, from 0.
    scored: u32,
    pub(crate) reports: BTreeMap<Node, SessionReport>,
    pub(crate) probes: BTreeMap<Node, StageReport>,
    /// Frames sent into the present ring.
    pub(crate) frames_sent: u64,
    pub(crate) wire_bytes_per_position: u64,
    /// Of the rounds before the present one.
    past: RoundStats,
    heals: u32,
    /// It is computed again, and has not answered since.
    rebuilding: bool,
    begun: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    /// When it has to be served again, if its ring was lost since the last token.
    patience: Option<Instant>,
    /// What the stages said when they were asked before, while a reply is overdue.
    pub(crate) probed: Option<BTreeMap<Node, StageReport>>,
    /// How often a reply was overdue since the last one came, and the ring moved.
    pub(crate) excused: u32,
    /// When it went on on its present ring, or began.
    resumed: Instant,
}

impl Session {
    /// Whether another connection can read it on, of this coordinator or of the next one.
    pub(crate) fn can_be_read_on(&self) -> bool {
        self.durable != Durable::Unlogged && self.readers.client.resumable
    }

    pub(crate) fn new(request: Request, opening: Opening, readers: Readers, now: Instant) -> Self {
        let Opening { open, round, ring, arithmetic, replayed } = opening;
        Self {
            request,
            round,
            phase: Phase::Running,
            open,
            ring,
            arithmetic,
            readers,
            durable: Durable::Unlogged,
            ending: false,
            committed: Vec::new(),
            scores: Vec::new(),
            replayed,
            scored: 0,
            reports: BTreeMap::new(),
            probes: BTreeMap::new(),
            frames_sent: 0,
            wire_bytes_per_position: 0,
            past: RoundStats::default(),
            heals: 0,
            rebuilding: false,
            begun: now,
            first: None,
            last: None,
            patience: None,
            probed: None,
            excused: 0,
            resumed: now,
        }
    }

    /// Its ring is lost: it waits. Rings that are lost again before a token came extend the wait by no more
    /// than they spent on getting its state back.
    pub(crate) fn park(&mut self, error: JobError, until: Instant) {
        let spent = match &self.phase {
            Phase::Rebuilding(run) => run.progressed().saturating_duration_since(self.resumed),
            Phase::Running | Phase::Closing { .. } | Phase::Localizing { .. } | Phase::Parked { .. } => Duration::ZERO,
        };
        let until = *self.patience.get_or_insert(until) + spent;
        self.patience = Some(until);
        self.phase = Phase::Parked { error, until };
    }

    /// Goes on on another ring, when `run` is over.
    pub(crate) fn resume(&mut self, opening: Opening, run: Run, now: Instant) {
        let Opening { open, round, ring, replayed, .. } = opening;
        self.resumed = now;
        self.past.absorb(self.round.stats());
        (self.open, self.round, self.ring, self.replayed) = (open, round, ring, replayed);
        self.phase = Phase::Rebuilding(Box::new(run));
        self.bound_floor();
        self.reports.clear();
        self.probes.clear();
        self.frames_sent = 0;
        self.heals += 1;
        self.rebuilding = true;
        tracing::debug!(after = ?self.last.map(|last| now.duration_since(last)), "round replaced");
    }

    /// The first position whose answer the next ring has to give, where scores are wanted; the one before
    /// it comes with it, for the score of the token that is fed there.
    pub(crate) fn asked_again_from(&self) -> u32 {
        if self.request.score.is_some() { self.scored.saturating_sub(1) } else { u32::MAX }
    }

    /// A token is final: the `index`-th new one of the present round.
    ///
    /// # Errors
    /// [`JobError::Diverged`] where another one was committed there before, or with other log-probabilities.
    pub(crate) fn commit(
        &mut self,
        index: u32,
        token: TokenId,
        scores: Option<Scores>,
        now: Instant,
    ) -> Result<(), JobError> {
        self.rebuilding = false;
        let at = self.replayed + index as usize;
        let scores = self.token_scores(at, scores)?;
        if let Some(told) = self.committed.get(at) {
            if *told == token && self.scores.get(at) == scores.as_ref() {
                return Ok(());
            }
            let why = format!(
                "the healed ring puts token {token} at new token {at}, where {told} was committed before, or gives \
                 it another probability: a stage computes differently, and nothing more is sent"
            );
            return Err(JobError::Diverged { why });
        }
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.patience = None;
        self.committed.push(token);
        self.scores.extend(scores);
        match self.durable {
            Durable::Unlogged => self.tell(at),
            Durable::Nothing | Durable::Tokens(_) => Ok(()),
        }
    }

    /// The log-probabilities of new token `at`, where the request asks for them.
    fn token_scores(&self, at: usize, scores: Option<Scores>) -> Result<Option<TokenScores>, JobError> {
        if self.request.logprobs.is_none() {
            return Ok(None);
        }
        match scores {
            Some(Scores { picked: Some(logprob), top, .. }) => Ok(Some(TokenScores { logprob, top })),
            Some(_) | None => {
                let why = format!("the tail gives new token {at} no log-probability, which was asked for");
                Err(JobError::Diverged { why })
            }
        }
    }

    /// The log has the session and its first `count` tokens: tells the reader those that are new to it.
    ///
    /// # Errors
    /// [`JobError::SlowReader`].
    pub(crate) fn synced(&mut self, count: u32) -> Result<(), JobError> {
        let told = self.told();
        self.durable = Durable::Tokens(count);
        self.bound_floor();
        (told..count as usize).try_for_each(|at| self.tell(at))
    }

    /// Whether tokens of it are still to be logged.
    pub(crate) fn has_news(&self) -> bool {
        self.durable != Durable::Unlogged && self.committed.len() > self.told()
    }

    /// Tokens that the reader was told.
    pub(crate) fn told(&self) -> usize {
        match self.durable {
            Durable::Unlogged => self.committed.len(),
            Durable::Nothing => 0,
            Durable::Tokens(count) => count as usize,
        }
    }

    /// Frames settle no more than what a coordinator that is started again knows.
    pub(crate) fn bound_floor(&mut self) {
        let floor = match self.durable {
            Durable::Unlogged => return,
            Durable::Nothing => 0,
            Durable::Tokens(count) => (self.request.prompt.len() + count as usize).saturating_sub(1),
        };
        self.round.handle_durable(Position(u32::try_from(floor).unwrap_or(u32::MAX)));
    }

    fn tell(&self, at: usize) -> Result<(), JobError> {
        let (Some(reader), Some(token)) = (&self.readers.reader, self.committed.get(at)) else { return Ok(()) };
        let index = u32::try_from(at).unwrap_or(u32::MAX);
        reader.send(Event::Token { index, token: *token, scores: self.scores.get(at).cloned() })
    }

    /// A prompt position is scored; what was told before is not told again.
    pub(crate) fn score(&mut self, pos: u32, answer: Answer) -> Result<(), JobError> {
        self.rebuilding = false;
        if pos < self.scored || pos as usize >= self.request.prompt.len() {
            return Ok(());
        }
        self.scored = pos + 1;
        self.patience = None;
        self.readers.reader.as_ref().map_or(Ok(()), |reader| reader.send(Event::Scored { pos, answer }))
    }

    /// Whether it is computed again and has not answered since.
    pub(crate) fn rebuilding(&self) -> bool {
        self.rebuilding
    }

    /// What was measured; definitions in `docs/protocol.md`.
    pub(crate) fn stats(&self) -> JobStats {
        let mut round = self.past.clone();
        round.absorb(self.round.stats());
        let tokens = u32::try_from(self.committed.len()).unwrap_or(u32::MAX);
        let drafted = self.open.draft_block > 0;
        let committed = f64::from(tokens.max(1));
        let seconds = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64();
        let decode = self.first.zip(self.last).map_or(0.0, |(first, last)| seconds(first, last));
        let after_first = f64::from(tokens.saturating_sub(1));
        let computed = |peer: &Node| self.reports.get(peer).map_or(f64::NAN, |report| as_f64(report.decoded));
        JobStats {
            prompt_tokens: u32::try_from(self.request.prompt.len()).unwrap_or(u32::MAX),
            committed: tokens,
            ttft_ms: self.first.map_or(0.0, |first| seconds(self.begun, first) * 1e3),
            tokens_per_second: if decode > 0.0 { after_first / decode } else { 0.0 },
            acceptance_length: drafted.then(|| round.acceptance_length()),
            accept_by_depth: drafted.then(|| round.accept_by_depth()),
            frames_per_token: round.frames_per_token(),
            frames_computed_per_token: self.ring.iter().map(|(peer, _)| computed(peer) / committed).collect(),
            max_in_flight: round.max_in_flight,
            wire_bytes_per_position: self.wire_bytes_per_position,
            heals: self.heals,
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "counters of one session stay far below 2^52")]
fn as_f64(count: u64) -> f64 {
    count as f64
}
