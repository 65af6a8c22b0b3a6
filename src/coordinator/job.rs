//! A request as the coordinator takes it and the events it gives back: the seam between
//! [`crate::api`] and the ring.

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use crate::coordinator::heals::HealStatus;
use crate::ids::{SessionId, TokenId, View, WireEncoding};
use crate::proto::control::Sampling;
use crate::proto::frame::Answer;

/// Events that wait for a slow reader before its session, alone, is cancelled.
pub const JOB_EVENTS_MAX: usize = 4096;

/// Whether drafts are streamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Drafts are streamed through the ring without waiting.
    #[default]
    Pipelined,
    /// One position at a time.
    Plain,
}

/// One request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Prompt tokens, at least one, all below the vocabulary.
    pub prompt: Vec<TokenId>,
    /// New tokens at most; 0 only with `score`.
    pub max_new: u32,
    /// How tokens are picked.
    pub sampling: Sampling,
    /// Whether drafts are streamed; `None`: pipelined where the ring's tail drafts.
    pub mode: Option<Mode>,
    /// Wire encoding; `None`: the coordinator's default.
    pub encoding: Option<WireEncoding>,
    /// Scores every prompt position, with this many top tokens.
    pub score: Option<u32>,
    /// Log-probabilities of the new tokens, with this many top tokens; not with `score`.
    pub logprobs: Option<u32>,
    /// Goes on past the end-of-sequence token.
    pub ignore_eos: bool,
}

/// Natural log-probabilities of a new token, at temperature 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenScores {
    /// Of the token.
    pub logprob: f32,
    /// The most likely tokens, descending (ties: lowest id first).
    pub top: Vec<(TokenId, f32)>,
}

/// Who asked, as far as it matters when the answer is read on over another connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Client {
    /// The answer can be read on: the client chose a name, or learns the request's id before it has read all
    /// of it.
    pub resumable: bool,
    /// What it calls the request, if it chose to; of several with one name and authorization, the newest has it.
    pub name: Option<String>,
    /// Digest of the authorization that came with the request; whoever reads on needs the same.
    pub authorization: Option<[u8; 32]>,
    /// How the API writes the answer, in its own words.
    pub form: Vec<u8>,
}

impl Default for Client {
    /// One without authorization that may come back.
    fn default() -> Self {
        Self { resumable: true, name: None, authorization: None, form: Vec::new() }
    }
}

/// A session that is read on.
#[derive(Debug)]
pub struct Attached {
    /// What it says from here on.
    pub job: Job,
    /// What was asked.
    pub request: Request,
    /// [`Client::form`] of the request.
    pub form: Vec<u8>,
    /// The tokens said before, from the first on.
    pub tokens: Vec<TokenId>,
    /// Their log-probabilities, where the request asks for them, else none.
    pub scores: Vec<TokenScores>,
    /// Nothing but the end is still to come.
    pub ended: bool,
}

/// Why a session ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// The end-of-sequence token came (it is the last committed token), or the caller stopped it.
    Stop,
    /// `max_new` tokens were committed, or every prompt position was scored.
    Length,
}

/// What a session measured; definitions in `docs/protocol.md`.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct JobStats {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Committed tokens.
    pub committed: u32,
    /// From submission to the first committed token, in milliseconds.
    pub ttft_ms: f64,
    /// Decode speed: committed tokens after the first, by the time since the first, per second.
    pub tokens_per_second: f64,
    /// Committed decode tokens / (rejections + 1); `None` in plain mode.
    pub acceptance_length: Option<f64>,
    /// Confirmed / judged drafts streamed `d` ahead of the frontier, depth 1 first; `None` in plain mode.
    pub accept_by_depth: Option<Vec<f64>>,
    /// Single-position frames sent into the head / committed tokens.
    pub frames_per_token: f64,
    /// Single-position frames computed / committed tokens, per stage in ring order.
    pub frames_computed_per_token: Vec<f64>,
    /// Most frames in flight at once.
    pub max_in_flight: u32,
    /// Bytes of a single-position frame between two stages, header and payload.
    pub wire_bytes_per_position: u64,
    /// Times that its ring was lost and it went on on another one.
    pub heals: u32,
}

/// What a session says, in order. Exactly one `Finished` or `Failed` comes last.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A committed token, final.
    Token {
        /// From 0.
        index: u32,
        /// The token.
        token: TokenId,
        /// Its log-probabilities, where the request asks for them.
        scores: Option<TokenScores>,
    },
    /// A scored prompt position, ascending.
    Scored {
        /// The position, from 0.
        pos: u32,
        /// The model's answer there, with scores.
        answer: Answer,
    },
    /// The session ended well.
    Finished {
        /// Why.
        reason: Finish,
        /// What was measured.
        stats: JobStats,
    },
    /// The session failed; what was committed stays true.
    Failed(JobError),
}

/// Why a session failed after it had begun.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// A member of the ring is gone or frozen.
    #[error("stage {range} ({peer}) failed: {why}; the request can be sent again once the ring is whole")]
    StageLost {
        /// Its layers.
        range: String,
        /// Its name.
        peer: String,
        /// What was seen.
        why: String,
    },
    /// No reply came in time and no single stage can be blamed.
    #[error("no reply for {waited_ms} ms: {why}; the request can be sent again")]
    Deadline {
        /// How long.
        waited_ms: u64,
        /// What the stages reported.
        why: String,
    },
    /// A stage refused or failed this session.
    #[error("stage {range} ({peer}) refused the session: {why}")]
    Refused {
        /// Its layers.
        range: String,
        /// Its name.
        peer: String,
        /// Its words.
        why: String,
    },
    /// Coordinator and tail disagree: output would be wrong.
    #[error("the ring contradicts itself: {why}")]
    Diverged {
        /// What was expected, what came.
        why: String,
    },
    /// The reader did not keep up.
    #[error("the reader left {events} events unread: the session was cancelled")]
    SlowReader {
        /// Bound of the buffer.
        events: usize,
    },
    /// The ring was lost between the request and its start.
    #[error("the ring is not ready: {why}; the request can be sent again")]
    NotReady {
        /// What is missing.
        why: String,
    },
    /// The session goes on, and not for this reader.
    #[error("this stream ends here: {why}; read on with GET /v1/streams/REQUEST and Last-Event-ID")]
    Detached {
        /// Why.
        why: String,
    },
    /// The log can't be written.
    #[error(
        "the coordinator's log can't be written: {why}; what was sent is in it, and the request goes on when the \
         coordinator is started again"
    )]
    NotLogged {
        /// What the system said.
        why: String,
    },
    /// The coordinator stops.
    #[error("the coordinator is shutting down")]
    Shutdown,
}

impl JobError {
    /// The session may go on, here or in another coordinator: its stream has no end yet.
    #[must_use]
    pub fn leaves_open(&self) -> bool {
        matches!(self, Self::Detached { .. } | Self::NotLogged { .. })
    }
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The ring is not whole.
    #[error("the ring is not ready: {why}")]
    NotReady {
        /// What is missing.
        why: String,
    },
    /// Too long.
    #[error(
        "prompt of {prompt} tokens + max_tokens {max_new} is more than the context of {context}: shorten one of them"
    )]
    TooLong {
        /// Prompt tokens.
        prompt: u32,
        /// New tokens asked for.
        max_new: u32,
        /// The context.
        context: u32,
    },
    /// Not to be served as asked.
    #[error("{field}: {why}")]
    Invalid {
        /// The field of the request.
        field: &'static str,
        /// What was expected, what came.
        why: String,
    },
    /// Too many sessions.
    #[error("{open} sessions are open, {limit} is the limit: try again later")]
    Busy {
        /// Open sessions.
        open: u32,
        /// The limit.
        limit: u32,
    },
}

/// Why a session is not read on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// It is not there for this authorization.
    #[error("it is unknown, was cancelled, or has ended and was read")]
    Unknown,
    /// A coordinator that was started later with the same log has it, if anyone.
    #[error("a coordinator that was started later has it: ask that one, or start it again")]
    Elsewhere,
}

/// A session under way. Dropping it cancels the session and frees it on every stage.
#[derive(Debug)]
pub struct Job {
    /// Its id, also the request's id in the API.
    pub session: SessionId,
    /// What it says.
    pub events: mpsc::Receiver<Event>,
    /// Dropped with the job: the session is cancelled. A message on it: the caller has enough (a stop
    /// string came), and the session ends with [`Event::Finished`] and [`Finish::Stop`], or hangs up.
    pub alive: oneshot::Sender<()>,
}

/// The coordinator's side of a [`Job`].
#[derive(Debug)]
pub struct JobSide {
    events: mpsc::Sender<Event>,
    last: Option<mpsc::OwnedPermit<Event>>,
}

impl Job {
    /// Makes both ends of a session's channel: [`JOB_EVENTS_MAX`] events, and one place kept for
    /// the last one. The receiver resolves when the caller says something: `Ok`, it has enough
    /// (the session ends with [`Finish::Stop`]); `Err`, it is gone (the session is cancelled).
    #[must_use]
    pub fn channel(session: SessionId) -> (Self, JobSide, oneshot::Receiver<()>) {
        let (sender, events) = mpsc::channel(JOB_EVENTS_MAX + 1);
        let last = sender.clone().try_reserve_owned().ok();
        let (alive, caller) = oneshot::channel();
        (Self { session, events, alive }, JobSide { events: sender, last }, caller)
    }
}

impl JobSide {
    /// Hands an event to the caller without waiting.
    ///
    /// # Errors
    /// What the session must end with: [`JobError::SlowReader`] where the caller has left [`JOB_EVENTS_MAX`] events unread. A caller that is gone is no error here.
    pub fn send(&self, event: Event) -> Result<(), JobError> {
        match self.events.try_send(event) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(JobError::SlowReader { events: JOB_EVENTS_MAX }),
        }
    }

    /// Says the last event, for which a place is always free, and hangs up.
    pub fn end(mut self, event: Event) {
        if let Some(permit) = self.last.take() {
            drop(permit.send(event));
        }
    }
}

/// A member of the ring, for `/ring`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemberStatus {
    /// Its name.
    pub peer: String,
    /// Its layers, like `0:3`.
    pub range: String,
    /// Device and kernels.
    pub device: String,
    /// Process id, where it runs on this host.
    pub pid: Option<u32>,
    /// Whether it is in the ring or waits outside.
    pub in_ring: bool,
    /// Whether it answers.
    pub alive: bool,
    /// Whether it only replaces other stages of its range.
    pub spare: bool,
    /// Whom it shadows.
    pub shadow_of: Option<String>,
    /// Who shadows it.
    pub shadowed_by: Option<String>,
    /// Where its neighbours dial it.
    pub addresses: Vec<String>,
    /// Round trip of the coordinator's heartbeats to it, in microseconds; `None` before the first
    /// answer.
    pub rtt_us: Option<u64>,
    /// Median time of a single-position pass, in microseconds.
    pub service_us: u64,
    /// Engine passes since start.
    pub passes: u64,
    /// Draft tokens per block; 0 where it does not draft.
    pub draft_block: u32,
    /// Sessions that it held when it last reported.
    pub sessions: u32,
    /// Bytes of weights that it loaded since it was started; 0 before its first report.
    pub loaded_bytes: u64,
}

/// A hop of the ring, for `/ring`, as its sender measured it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HopStatus {
    /// Who sends.
    pub from: String,
    /// Who receives.
    pub to: String,
    /// Smoothed round trip of heartbeats, in microseconds; `None` before the first answer.
    pub rtt_us: Option<u64>,
    /// Smoothed distance of single round trips from it, in microseconds.
    pub jitter_us: Option<u64>,
    /// Bytes of frames sent and not yet taken in at the other end.
    pub in_flight: u64,
    /// Bytes of frames that may be: what the other end's credits allow.
    pub window: u64,
    /// Bytes per second that get through at most; 0 before anything did.
    pub rate: u64,
    /// Frames that wait to be sent.
    pub queued: u32,
}

/// The ring, for `/ring`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RingStatus {
    /// The coordinator's name.
    pub coordinator: String,
    /// Current view; 0 before the first.
    pub view: View,
    /// Whether a token went round lately.
    pub ready: bool,
    /// What is missing, where not ready.
    pub missing: Option<String>,
    /// Milliseconds since a token last went round.
    pub last_round_ms: Option<u64>,
    /// Members in ring order, then those outside.
    pub members: Vec<MemberStatus>,
    /// Hops in the order of a frame's way: coordinator to head, stage to stage, tail to coordinator;
    /// empty unless whole.
    pub hops: Vec<HopStatus>,
    /// Breaks of the ring and their heals, oldest first; at most [`HEALS_MAX`](crate::coordinator::heals::HEALS_MAX).
    pub heals: Vec<HealStatus>,
    /// Milliseconds since the coordinator started: the clock of `heals`.
    pub uptime_ms: u64,
    /// Drafts that were rejected in the open sessions since they were last opened on a ring.
    pub rejections: u64,
    /// Positions that are settled in the open sessions: of the prompt the answered ones, and one a
    /// committed token after the first.
    pub settled: u64,
    /// Open sessions.
    pub sessions: u32,
    /// Frames in flight over all sessions.
    pub in_flight: u32,
    /// Wire encoding by default.
    pub encoding: WireEncoding,
}

/// What the API needs to know of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// Name, for `model` in answers.
    pub name: String,
    /// Size of the vocabulary.
    pub vocab: u32,
    /// End-of-sequence tokens.
    pub eos: Vec<TokenId>,
    /// Longest session of this ring, in positions.
    pub context: u32,
}

/// What the API asks of a coordinator; [`crate::api`] is tested against a scripted one.
pub trait Serve: Send + Sync + 'static {
    /// Starts a session.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was started then.
    fn submit(&self, request: Request) -> Result<Job, SubmitError>;

    /// Starts a session whose client may come back.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was started then.
    fn submit_as(&self, request: Request, client: Client) -> Result<Job, SubmitError> {
        let _ = client;
        self.submit(request)
    }

    /// The newest session of a client that calls it so.
    fn find(&self, name: &str, authorization: Option<[u8; 32]>) -> BoxFuture<'_, Result<SessionId, AttachError>> {
        let _ = (name, authorization);
        Box::pin(std::future::ready(Err(AttachError::Unknown)))
    }

    /// Reads a session on; whoever read it before is told so.
    ///
    /// # Errors
    /// [`AttachError`]; another reader's session is unknown.
    fn attach(
        &self,
        session: SessionId,
        authorization: Option<[u8; 32]>,
    ) -> BoxFuture<'_, Result<Attached, AttachError>> {
        let _ = (session, authorization);
        Box::pin(std::future::ready(Err(AttachError::Unknown)))
    }

    /// The ring as it stands.
    fn status(&self) -> RingStatus;

    /// The model served.
    fn model(&self) -> ModelFacts;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slow_reader_ends_its_session_and_is_told_so() {
        let (mut job, side, caller) = Job::channel(SessionId(1));
        for index in 0..=JOB_EVENTS_MAX {
            let index = u32::try_from(index).unwrap();
            let sent = side.send(Event::Token { index, token: TokenId(0), scores: None });
            if index as usize == JOB_EVENTS_MAX {
                assert_eq!(sent, Err(JobError::SlowReader { events: JOB_EVENTS_MAX }));
            } else {
                assert_eq!(sent, Ok(()));
            }
        }
        let verdict = Event::Failed(JobError::SlowReader { events: JOB_EVENTS_MAX });
        side.end(verdict.clone());
        let mut last = None;
        while let Some(event) = job.events.recv().await {
            last = Some(event);
        }
        assert_eq!(last, Some(verdict), "the last event has a place of its own");
        drop(job);
        assert!(caller.await.is_err(), "a dropped job is a caller that is gone");
    }
}
