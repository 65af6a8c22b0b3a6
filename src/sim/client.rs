//! A simulated client: asks, reads, leaves, comes back, and knows what it must be told.

use std::time::Duration;

use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::oneshot;

use crate::coordinator::attach::Found;
use crate::coordinator::handle::Command;
use crate::coordinator::job::{AttachError, Client, Event, Finish, Job, JobError, Request, SubmitError};
use crate::ids::{SessionId, TokenId};
use crate::sim::agenda::HostId;
use crate::sim::check::{Broken, Invariant, broken};
use crate::sim::disk::SimDisk;
use crate::sim::lead::LeadProcess;
use crate::sim::toy::{EOS, Reference};

/// What a client is about.
#[derive(Debug)]
enum State {
    /// It has not asked, or has to ask again.
    Asks,
    /// It reads what the coordinator says.
    Reads { host: HostId, job: Job, number: u64 },
    /// Its connection is gone; it wants to read on.
    Lost,
    /// It has asked to read on.
    Seeks { host: HostId, job: Job, found: oneshot::Receiver<Result<Found, AttachError>> },
    /// It was told the end.
    Done,
}

/// A client.
#[derive(Debug)]
pub(super) struct SimClient {
    pub(super) request: Request,
    pub(super) reference: Reference,
    pub(super) told: Vec<TokenId>,
    /// How many tokens the present connection has brought. A coordinator may have fewer than one that was
    /// frozen, came back, and told one more after this one had read its log; the service leaves out what the
    /// client says that it has.
    brought: usize,
    pub(super) session: Option<SessionId>,
    /// It hangs up behind so many tokens, once.
    pub(super) leaves_at: Option<usize>,
    state: State,
    heals: u32,
    /// The coordinator that said that it goes on elsewhere, or after a new start.
    left: Option<HostId>,
}

/// What came of a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It asked, and its session has this id.
    Asked(SessionId),
    /// It reads on from so many tokens.
    ReadsOn(usize),
    /// Something happened that is worth a line.
    Said(String),
    /// Nothing.
    Waits,
}

impl SimClient {
    pub(super) fn new(request: Request, leaves_at: Option<usize>) -> Self {
        let reference = Reference::new(&request.prompt, request.max_new, request.ignore_eos);
        Self {
            request,
            reference,
            told: Vec::new(),
            brought: 0,
            session: None,
            leaves_at,
            state: State::Asks,
            heals: 0,
            left: None,
        }
    }

    /// Whether it was told its end.
    pub(super) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Whose answer it reads or seeks.
    pub(super) fn host(&self) -> Option<HostId> {
        match &self.state {
            State::Reads { host, .. } | State::Seeks { host, .. } => Some(*host),
            State::Asks | State::Lost | State::Done => None,
        }
    }

    /// How often its session went on on another ring.
    pub(super) fn heals(&self) -> u32 {
        self.heals
    }

    /// What it is about, for a failure.
    pub(super) fn describe(&self) -> String {
        let state = match &self.state {
            State::Asks => "asks".to_owned(),
            State::Reads { host, .. } => format!("reads from process {host}"),
            State::Lost => "is to read on".to_owned(),
            State::Seeks { host, .. } => format!("asks process {host} to read on"),
            State::Done => "is done".to_owned(),
        };
        let (told, all) = (self.told.len(), self.reference.tokens.len());
        format!("session {:?}: {state}, told {told} of {all} tokens", self.session.map(|session| session.0))
    }

    /// Its next step with a coordinator that answers. `logged`: sessions outlive their coordinator.
    pub(super) fn step(&mut self, host: HostId, lead: &LeadProcess, logged: bool) -> Result<Step, Broken> {
        match &mut self.state {
            State::Asks => self.ask(host, lead),
            State::Lost if !logged => {
                // Nobody knows the session any more.
                self.told.clear();
                self.brought = 0;
                self.state = State::Asks;
                Ok(Step::Said("asks anew".to_owned()))
            }
            State::Lost => {
                let Some(session) = self.session else { return Ok(Step::Waits) };
                let (job, reader, _caller) = Job::channel(session);
                let (answer, found) = oneshot::channel();
                let authorization = None;
                lead.command(Command::Attach { session, authorization, reader, found: answer });
                self.state = State::Seeks { host, job, found };
                Ok(Step::Said(format!("asks process {host} to read on")))
            }
            State::Seeks { .. } => self.found(lead.lost_batch()),
            State::Reads { .. } | State::Done => Ok(Step::Waits),
        }
    }

    fn ask(&mut self, host: HostId, lead: &LeadProcess) -> Result<Step, Broken> {
        match lead.handle.order(self.request.clone(), Client::default()) {
            Ok((job, _caller)) => {
                let session = job.session;
                self.session = Some(session);
                self.state = State::Reads { host, job, number: 0 };
                Ok(Step::Asked(session))
            }
            Err(SubmitError::NotReady { .. } | SubmitError::Busy { .. }) => Ok(Step::Waits),
            Err(error @ (SubmitError::TooLong { .. } | SubmitError::Invalid { .. })) => {
                broken(Invariant::Process, format!("a request is refused: {error}"))
            }
        }
    }

    /// `waits`: the coordinator says itself that it has to be started again.
    fn found(&mut self, waits: bool) -> Result<Step, Broken> {
        let State::Seeks { host, job, mut found } = std::mem::replace(&mut self.state, State::Lost) else {
            return Ok(Step::Waits);
        };
        match found.try_recv() {
            Ok(Err(_)) => Ok(Step::Said("is told to wait for another coordinator".to_owned())),
            Ok(Ok(there)) => {
                // The two agree as far as both go: each is a part of the one text.
                if !self.reference.tokens.starts_with(&there.tokens) {
                    let why = format!(
                        "session {}: {:?} were told, {:?} are read on from",
                        job.session, self.told, there.tokens
                    );
                    return broken(Invariant::Text, why);
                }
                self.brought = there.tokens.len();
                if self.told.len() < there.tokens.len() {
                    self.told = there.tokens;
                }
                self.state = State::Reads { host, job, number: there.number };
                Ok(Step::ReadsOn(self.brought))
            }
            Err(oneshot::error::TryRecvError::Empty) => {
                self.state = State::Seeks { host, job, found };
                Ok(Step::Waits)
            }
            Err(oneshot::error::TryRecvError::Closed) if waits || self.left == Some(host) => {
                Ok(Step::Said("is told to wait for another coordinator".to_owned()))
            }
            Err(oneshot::error::TryRecvError::Closed) if self.told.is_empty() => {
                self.state = State::Asks;
                Ok(Step::Said("its session is not there, and nothing was told: asks anew".to_owned()))
            }
            Err(oneshot::error::TryRecvError::Closed) => broken(
                Invariant::Durable,
                format!("session {} is not there, and {} tokens were told", job.session, self.told.len()),
            ),
        }
    }

    /// The connection is given up, and the coordinator hears of it if it can.
    pub(super) fn hang_up(&mut self, lead: Option<&LeadProcess>) {
        if let (State::Reads { job, number, .. }, Some(lead)) = (&self.state, lead) {
            lead.command(Command::Gone { session: job.session, reader: *number });
        }
        if !self.is_done() && !matches!(self.state, State::Asks) {
            self.state = State::Lost;
        }
    }

    /// Reads what there is; says what happened last.
    pub(super) fn read(&mut self, disk: Option<&SimDisk>) -> Result<Option<String>, Broken> {
        let mut said = None;
        while let State::Reads { job, .. } = &mut self.state {
            let session = job.session;
            match job.events.try_recv() {
                Ok(Event::Token { index, token, .. }) => {
                    self.told(session, index as usize, token, disk)?;
                    said = Some(format!("is told token {index}"));
                }
                Ok(last @ (Event::Finished { .. } | Event::Failed(_))) => {
                    if !matches!(job.events.try_recv(), Err(TryRecvError::Disconnected)) {
                        return broken(Invariant::End, format!("session {session}: something follows the end"));
                    }
                    said = Some(self.ended(session, last)?);
                }
                Ok(Event::Scored { .. }) => {}
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.state = State::Lost;
                    said = Some("its connection broke".to_owned());
                }
            }
        }
        Ok(said)
    }

    fn told(&mut self, session: SessionId, at: usize, token: TokenId, disk: Option<&SimDisk>) -> Result<(), Broken> {
        if at != self.brought || self.reference.tokens.get(at) != Some(&token) {
            let why = format!("session {session}: told token {token} at {at}, {} were told before", self.brought);
            return broken(Invariant::Text, why);
        }
        if let Some(disk) = disk {
            let durable = disk.lock().durable(session).len();
            if durable <= at {
                let why = format!("session {session}: token {at} is told, {durable} tokens are synced");
                return broken(Invariant::Durable, why);
            }
        }
        self.brought += 1;
        if at == self.told.len() {
            self.told.push(token);
        }
        Ok(())
    }

    fn ended(&mut self, session: SessionId, last: Event) -> Result<String, Broken> {
        match last {
            Event::Finished { reason, stats } => {
                let whole = self.told == self.reference.tokens;
                let right = if self.told.last() == Some(&EOS) && !self.request.ignore_eos {
                    Finish::Stop
                } else {
                    Finish::Length
                };
                if !whole || reason != right {
                    let why = format!(
                        "session {session}: ends with {reason:?} behind {} tokens of {}",
                        self.told.len(),
                        self.reference.tokens.len()
                    );
                    return broken(Invariant::End, why);
                }
                self.heals = stats.heals;
                self.state = State::Done;
                Ok("is told the end".to_owned())
            }
            Event::Failed(error @ (JobError::Detached { .. } | JobError::NotLogged { .. })) => {
                self.left = self.host();
                self.state = State::Lost;
                Ok(error.to_string())
            }
            Event::Failed(error) => broken(Invariant::End, format!("session {session} fails: {error}")),
            Event::Token { .. } | Event::Scored { .. } => Ok(String::new()),
        }
    }

    /// Whether it is time to hang up as it planned.
    pub(super) fn leaves(&mut self) -> bool {
        let due = self.leaves_at.is_some_and(|at| self.told.len() >= at) && matches!(self.state, State::Reads { .. });
        if due {
            self.leaves_at = None;
        }
        due
    }

    /// When it looks again.
    pub(super) fn pause(&self) -> Duration {
        match self.state {
            State::Asks | State::Lost => Duration::from_millis(200),
            State::Seeks { .. } => Duration::from_millis(30),
            State::Reads { .. } | State::Done => Duration::from_secs(1),
        }
    }
}
