//! The coordinator as the API sees it: submits requests, tells the ring's state.
//!
//! Refuses what can be refused without the loop; everything else is said as an event.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use crate::clock;
use crate::coordinator::attach::Found;
use crate::coordinator::job::{
    AttachError, Attached, Client, Job, JobSide, Mode, ModelFacts, Request, RingStatus, Serve, SubmitError,
};
use crate::ids::SessionId;

/// Requests that wait for the loop.
pub(crate) const COMMANDS_MAX: usize = 256;

/// Who wants to read on is told this; dropped: the session is unknown.
pub(crate) type Answer = oneshot::Sender<Result<Found, AttachError>>;

/// What the loop is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// Start a session.
    Submit { session: SessionId, request: Request, client: Client, reader: JobSide },
    /// Let another reader read a session on.
    Attach { session: SessionId, authorization: Option<[u8; 32]>, reader: JobSide, found: Answer },
    /// Say which session a client calls so.
    Find { name: String, authorization: Option<[u8; 32]>, found: oneshot::Sender<Result<SessionId, AttachError>> },
    /// Its reader, the so-many-th, has enough.
    Enough { session: SessionId, reader: u64 },
    /// Its reader, the so-many-th, is gone.
    Gone { session: SessionId, reader: u64 },
}

/// What the loop publishes.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) status: Mutex<RingStatus>,
    pub(crate) last_round: Mutex<Option<Instant>>,
    pub(crate) begun: Instant,
    pub(crate) rejections: AtomicU64,
    pub(crate) settled: AtomicU64,
    pub(crate) in_flight: AtomicU32,
    /// Sessions of readers, from submission until they are freed on every stage.
    pub(crate) open: AtomicU32,
    pub(crate) next_session: AtomicU64,
    /// Context and session limit of the whole ring; 0 while there is none.
    pub(crate) context: AtomicU32,
    pub(crate) session_limit: AtomicU32,
    /// Draft tokens per block that the ring's tail makes.
    pub(crate) draft_block: AtomicU32,
}

/// A coordinator under way.
#[derive(Debug, Clone)]
pub struct Coordinator {
    pub(crate) shared: Arc<Shared>,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) model: Arc<ModelFacts>,
    pub(crate) ready_for: Duration,
}

impl Coordinator {
    fn check(&self, request: &Request) -> Result<(), SubmitError> {
        let status = self.status();
        if !status.ready {
            let why = status.missing.unwrap_or_else(|| "no token went round lately".to_owned());
            return Err(SubmitError::NotReady { why });
        }
        let invalid = |field, why| Err(SubmitError::Invalid { field, why });
        if request.prompt.is_empty() {
            return invalid("prompt", "expected at least one token, none came".to_owned());
        }
        if let Some(id) = request.prompt.iter().find(|id| id.0 >= self.model.vocab) {
            return invalid("prompt", format!("token id {id}: the vocabulary ends at {}", self.model.vocab));
        }
        if request.max_new == 0 && request.score.is_none() {
            return invalid("max_tokens", "expected at least 1, or a prompt to score".to_owned());
        }
        if request.score.is_some() && request.logprobs.is_some() {
            return invalid("logprobs", "expected none where the prompt is scored".to_owned());
        }
        let context = self.shared.context.load(Ordering::Relaxed);
        let prompt = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        if prompt.saturating_add(request.max_new) > context {
            return Err(SubmitError::TooLong { prompt, max_new: request.max_new, context });
        }
        let drafts = self.shared.draft_block.load(Ordering::Relaxed);
        if request.mode == Some(Mode::Pipelined) && drafts == 0 {
            let why = "this ring's tail holds no drafter: its range must contain every draft target layer".to_owned();
            return invalid("mode", why);
        }
        Ok(())
    }

    /// Starts a session; what its caller says is for whoever asked to pass on.
    pub(crate) fn order(&self, request: Request, client: Client) -> Result<(Job, oneshot::Receiver<()>), SubmitError> {
        self.check(&request)?;
        self.admit()?;
        let session = SessionId(self.shared.next_session.fetch_add(1, Ordering::Relaxed));
        let (job, reader, caller) = Job::channel(session);
        if self.commands.try_send(Command::Submit { session, request, client, reader }).is_err() {
            let open = self.shared.open.fetch_sub(1, Ordering::AcqRel);
            return Err(SubmitError::Busy { open, limit: self.shared.session_limit.load(Ordering::Relaxed) });
        }
        Ok((job, caller))
    }

    /// Passes on what the `number`-th reader of a session says, or that it is gone.
    fn watch(&self, session: SessionId, number: u64, caller: oneshot::Receiver<()>) {
        let commands = self.commands.clone();
        tokio::spawn(async move {
            let said = match caller.await {
                Ok(()) => Command::Enough { session, reader: number },
                Err(_) => Command::Gone { session, reader: number },
            };
            let _ = commands.send(said).await;
        });
    }

    /// Counts a session in, unless the ring is full.
    fn admit(&self) -> Result<(), SubmitError> {
        let limit = self.shared.session_limit.load(Ordering::Relaxed);
        let admit = |open: u32| (open < limit).then_some(open + 1);
        match self.shared.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, admit) {
            Ok(_) => Ok(()),
            Err(open) => Err(SubmitError::Busy { open, limit }),
        }
    }
}

impl Serve for Coordinator {
    fn submit(&self, request: Request) -> Result<Job, SubmitError> {
        self.submit_as(request, Client::default())
    }

    fn submit_as(&self, request: Request, client: Client) -> Result<Job, SubmitError> {
        let (job, caller) = self.order(request, client)?;
        self.watch(job.session, 0, caller);
        Ok(job)
    }

    fn find(&self, name: &str, authorization: Option<[u8; 32]>) -> BoxFuture<'_, Result<SessionId, AttachError>> {
        let (found, finding) = oneshot::channel();
        let asked = Command::Find { name: name.to_owned(), authorization, found };
        Box::pin(async move {
            self.commands.send(asked).await.map_err(|_| AttachError::Unknown)?;
            finding.await.map_err(|_| AttachError::Unknown)?
        })
    }

    fn attach(
        &self,
        session: SessionId,
        authorization: Option<[u8; 32]>,
    ) -> BoxFuture<'_, Result<Attached, AttachError>> {
        Box::pin(async move {
            let (job, reader, caller) = Job::channel(session);
            let (found, finding) = oneshot::channel();
            let asked = self.commands.send(Command::Attach { session, authorization, reader, found }).await;
            asked.map_err(|_| AttachError::Unknown)?;
            let Found { number, request, form, tokens, scores, ended } =
                finding.await.map_err(|_| AttachError::Unknown)??;
            self.watch(session, number, caller);
            Ok(Attached { job, request, form, tokens, scores, ended })
        })
    }

    fn status(&self) -> RingStatus {
        let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let last = *self.shared.last_round.lock().unwrap_or_else(PoisonError::into_inner);
        let age = last.map(|at| clock::now().saturating_duration_since(at));
        status.last_round_ms = age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
        status.ready = status.missing.is_none() && age.is_some_and(|age| age <= self.ready_for);
        if !status.ready && status.missing.is_none() {
            status.missing = Some("no token went round lately".to_owned());
        }
        status.sessions = self.shared.open.load(Ordering::Relaxed);
        let up = clock::now().saturating_duration_since(self.shared.begun);
        status.uptime_ms = u64::try_from(up.as_millis()).unwrap_or(u64::MAX);
        status.rejections = self.shared.rejections.load(Ordering::Relaxed);
        status.settled = self.shared.settled.load(Ordering::Relaxed);
        status.in_flight = self.shared.in_flight.load(Ordering::Relaxed);
        status
    }

    fn model(&self) -> ModelFacts {
        let mut model = (*self.model).clone();
        let context = self.shared.context.load(Ordering::Relaxed);
        if context > 0 {
            model.context = context;
        }
        model
    }
}
