//! The thread that owns the engine and every session of a stage.
//!
//! One loop: take in what has come, compute one session's next frames, take in again (a cancel may
//! have come meanwhile), ask the fence, send on. Sessions take turns. Results go to the link from
//! here, without another hop between tasks.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use half::bf16;
use tokio::sync::oneshot;

use crate::clock;
use crate::engine::wire::Wire;
use crate::engine::{Chunk, Engine, Output};
use crate::ids::{Epoch, Node, SessionId};
use crate::node::counters::Counters;
use crate::node::membership::{MEND_DEADLINE, Route};
use crate::node::session::{Session, Work};
use crate::proto::codec;
use crate::proto::control::{Control, Open, SessionReport};
use crate::proto::fence::Arrival;
use crate::proto::frame::Frame;
use crate::transport::{Lane, Link, LinkError};

/// Inputs that wait for the worker.
pub const INPUTS_MAX: usize = 4096;

/// Frames of sessions not yet opened that are kept.
const EARLY_FRAMES_MAX: usize = 64;

/// How long such a frame is kept.
const EARLY_FRAME_DEADLINE: Duration = Duration::from_secs(5);

/// Pause between looks at whether a hop is mended.
const MEND_LOOK: Duration = Duration::from_millis(5);

/// What the shell tells the worker.
#[derive(Debug)]
pub enum Input {
    /// A frame that the membership accepts.
    Frame(Frame),
    /// Open a session.
    Open(Open),
    /// Free a session.
    Close(SessionId),
    /// Frames of epochs below need not be computed.
    Cancel {
        /// The session.
        session: SessionId,
        /// First epoch that still matters.
        below: Epoch,
    },
    /// Frees every session and takes this route.
    Route(Option<Route>),
    /// Ends the thread.
    Stop,
}

/// What the worker is made of.
pub struct WorkerParts {
    /// The engine, owned by the worker from here on.
    pub engine: Box<dyn Engine>,
    /// Where results go.
    pub link: Arc<dyn Link>,
    /// Runtime on which a full send queue is waited for.
    pub runtime: tokio::runtime::Handle,
    /// Shared with the shell.
    pub counters: Arc<Counters>,
    /// Sessions held at once.
    pub max_sessions: u32,
}

/// A worker under way.
pub struct Started {
    /// What the shell tells it.
    pub inputs: SyncSender<Input>,
    /// Resolves when the thread has ended, for whatever reason.
    pub ended: oneshot::Receiver<()>,
    /// The thread.
    pub thread: std::thread::JoinHandle<()>,
}

/// Starts the worker's thread.
///
/// # Errors
/// The system's error where no thread can be started.
pub fn start(parts: WorkerParts) -> std::io::Result<Started> {
    let (inputs, receiver) = sync_channel(INPUTS_MAX);
    let (alive, ended) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        // Dropped however the thread ends, also by a panic.
        let _alive = alive;
        let runtime = parts.runtime.clone();
        // Links use the runtime's timers.
        let _entered = runtime.enter();
        let mut worker = Worker::new(parts);
        worker.run(&receiver);
    })?;
    Ok(Started { inputs, ended, thread })
}

struct Early {
    frame: Frame,
    until: Instant,
}

struct Worker {
    parts: WorkerParts,
    route: Option<Route>,
    sessions: BTreeMap<SessionId, Session>,
    /// Sessions at or below it were opened once in this view: frames without a session are dropped.
    opened: Option<SessionId>,
    early: Vec<Early>,
    /// The session that was served last.
    turn: SessionId,
    hidden: Vec<bf16>,
    output: Output,
}

impl Worker {
    fn new(parts: WorkerParts) -> Self {
        Self {
            parts,
            route: None,
            sessions: BTreeMap::new(),
            opened: None,
            early: Vec::new(),
            turn: SessionId(0),
            hidden: Vec::new(),
            output: Output::default(),
        }
    }

    fn run(&mut self, inputs: &Receiver<Input>) {
        loop {
            if !self.take_in(inputs) {
                return;
            }
            self.expire();
            let Some((session, work)) = self.next_work() else {
                if !self.wait(inputs) {
                    return;
                }
                continue;
            };
            if !self.pass(session, work, inputs) {
                return;
            }
        }
    }

    /// Takes in everything that has come; `false` to end.
    fn take_in(&mut self, inputs: &Receiver<Input>) -> bool {
        loop {
            match inputs.try_recv() {
                Ok(input) => {
                    if !self.handle(input) {
                        return false;
                    }
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Waits for one input or the next deadline; `false` to end.
    fn wait(&mut self, inputs: &Receiver<Input>) -> bool {
        let deadline = self.sessions.values().filter_map(Session::poll_timeout);
        let deadline = deadline.chain(self.early.iter().map(|early| early.until)).min();
        let input = match deadline {
            None => inputs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => inputs.recv_timeout(at.saturating_duration_since(clock::now())),
        };
        match input {
            Ok(input) => self.handle(input),
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    fn expire(&mut self) {
        let now = clock::now();
        self.early.retain(|early| early.until > now);
        let failed: Vec<(SessionId, String)> = self
            .sessions
            .iter_mut()
            .filter(|(_, session)| session.poll_timeout().is_some_and(|at| at <= now))
            .filter_map(|(id, session)| session.handle_timeout(now).err().map(|error| (*id, error.to_string())))
            .collect();
        for (session, reason) in failed {
            self.fail(session, reason);
        }
    }

    fn handle(&mut self, input: Input) -> bool {
        match input {
            Input::Frame(frame) => self.frame(frame),
            Input::Open(open) => {
                self.open(open);
                self.parts.counters.opening.fetch_sub(1, Ordering::AcqRel);
            }
            Input::Close(session) => self.close(session),
            Input::Cancel { session, below } => {
                if let Some(session) = self.sessions.get_mut(&session) {
                    session.handle_cancel(below);
                }
            }
            Input::Route(route) => self.reroute(route),
            Input::Stop => return false,
        }
        true
    }

    fn reroute(&mut self, route: Option<Route>) {
        for session in std::mem::take(&mut self.sessions).into_keys() {
            self.parts.engine.close(session);
            self.parts.counters.close(session);
        }
        self.early.clear();
        self.opened = None;
        self.route = route;
    }

    fn frame(&mut self, frame: Frame) {
        let id = frame.head.session;
        if let Some(session) = self.sessions.get_mut(&id) {
            match session.handle_frame(frame, clock::now()) {
                Ok(Arrival::Queued | Arrival::Held) => {}
                Ok(Arrival::Dropped(reason)) => tracing::trace!(session = %id, ?reason, "frame dropped"),
                Err(error) => self.fail(id, error.to_string()),
            }
        } else if self.opened.is_none_or(|opened| id > opened) && self.early.len() < EARLY_FRAMES_MAX {
            self.early.push(Early { frame, until: clock::now() + EARLY_FRAME_DEADLINE });
        }
    }

    fn open(&mut self, open: Open) {
        let id = open.session;
        let Some(route) = self.route else { return };
        if open.view != route.view || self.opened.is_some_and(|opened| id <= opened) {
            return;
        }
        self.opened = Some(id);
        if let Err(reason) = self.try_open(open, route) {
            return self.fail(id, reason);
        }
        self.tell(Control::Opened { session: id });
        let (now_open, still_early): (Vec<Early>, Vec<Early>) =
            std::mem::take(&mut self.early).into_iter().partition(|early| early.frame.head.session == id);
        self.early = still_early;
        for early in now_open {
            self.frame(early.frame);
        }
    }

    fn try_open(&mut self, open: Open, route: Route) -> Result<(), String> {
        let limit = self.parts.max_sessions;
        if self.sessions.len() >= limit as usize {
            return Err(format!("{limit} sessions are open here, which is this stage's limit (--max-sessions)"));
        }
        let facts = self.parts.engine.facts().clone();
        if open.prompt_len == 0 || open.prompt_len > open.positions {
            return Err(format!("prompt of {} positions in a session of {}", open.prompt_len, open.positions));
        }
        self.parts.engine.open(open.session, &Session::shape(&open, &facts)).map_err(|error| error.to_string())?;
        let counters = self.parts.counters.open(open.session);
        let id = open.session;
        self.sessions.insert(id, Session::new(open, route.view, facts.is_tail(), counters));
        Ok(())
    }

    fn close(&mut self, id: SessionId) {
        self.early.retain(|early| early.frame.head.session != id);
        self.opened = self.opened.max(Some(id));
        let report = match self.sessions.remove(&id) {
            Some(session) => session.counters.report(id),
            None => SessionReport { session: id, ..SessionReport::default() },
        };
        self.parts.engine.close(id);
        self.tell(Control::Closed { report });
        // Last: a stage that drains ends when no session is counted.
        self.parts.counters.close(id);
    }

    /// Ends a session here and tells the coordinator why.
    fn fail(&mut self, id: SessionId, reason: String) {
        self.sessions.remove(&id);
        self.parts.engine.close(id);
        self.parts.counters.close(id);
        if let Some(route) = self.route {
            tracing::warn!(session = %id, %reason, "session failed");
            self.tell(Control::Failed { view: route.view, session: id, reason });
        }
    }

    /// The session after the one served last that has work.
    fn next_work(&mut self) -> Option<(SessionId, Work)> {
        let after = (Bound::Excluded(self.turn), Bound::Unbounded);
        let order: Vec<SessionId> =
            self.sessions.range(after).chain(self.sessions.range(..=self.turn)).map(|(id, _)| *id).collect();
        for id in order {
            if let Some(work) = self.sessions.get_mut(&id).and_then(Session::poll_work) {
                self.turn = id;
                return Some((id, work));
            }
        }
        None
    }

    /// Computes and sends on; `false` to end.
    fn pass(&mut self, id: SessionId, work: Work, inputs: &Receiver<Input>) -> bool {
        let begun = clock::now();
        let result = self.compute(id, &work);
        let us = u64::try_from(clock::now().duration_since(begun).as_micros()).unwrap_or(u64::MAX);
        self.parts.counters.pass(work.ids.len() == 1, us);
        let results = match result {
            Ok(results) => results,
            Err(reason) => {
                self.fail(id, reason);
                return true;
            }
        };
        if !self.take_in(inputs) {
            return false;
        }
        // A session goes on in the next view under its id: what an older view computed is not its own.
        let view = work.heads.first().map(|head| head.view);
        if self.route.map(|route| route.view) != view {
            return true;
        }
        let Some(session) = self.sessions.get_mut(&id) else { return true };
        let alive = work.heads.iter().map(|head| session.handle_computed(head));
        let bodies: Vec<Bytes> = alive.zip(results).filter(|(alive, _)| *alive).map(|(_, body)| body).collect();
        self.forward(bodies, inputs)
    }

    /// Sends bodies to the next hop; `false` to end. While the hop is being mended they wait for it:
    /// it died idle, so they are the first on it.
    fn forward(&mut self, bodies: Vec<Bytes>, inputs: &Receiver<Input>) -> bool {
        let Some(route) = self.route else { return true };
        let (to, lane) = match route.successor {
            Some(successor) => (successor, Lane::Data),
            None => (route.coordinator, Lane::Reply),
        };
        let until = clock::now() + MEND_DEADLINE;
        for body in bodies {
            let mut sent = send(&self.parts, to, lane, body.clone());
            while matches!(sent, Err(LinkError::NotConnected { .. })) && clock::now() < until {
                std::thread::sleep(MEND_LOOK);
                if !self.take_in(inputs) {
                    return false;
                }
                if self.route != Some(route) {
                    return true;
                }
                sent = send(&self.parts, to, lane, body.clone());
            }
            if let Err(error) = sent {
                self.tell(Control::NeighbourLost { view: route.view, peer: to, reason: error.to_string() });
                break;
            }
        }
        true
    }

    /// Bodies for the next hop, one per frame.
    fn compute(&mut self, id: SessionId, work: &Work) -> Result<Vec<Bytes>, String> {
        let session = self.sessions.get_mut(&id).ok_or("the session was closed")?;
        let engine = self.parts.engine.as_mut();
        let (hc, dim) = (engine.facts().hc, engine.facts().dim);
        let range = engine.facts().range;
        let wire = |layer| Wire::new(session.open.encoding_at(layer), hc, dim);
        let (wire_in, wire_out) = (wire(range.lo()), wire(range.hi()));
        let hidden = if engine.facts().is_head() {
            for payload in &work.payloads {
                if !payload.is_empty() {
                    return Err(format!(
                        "{} payload bytes came to the head, which takes token ids alone",
                        payload.len()
                    ));
                }
            }
            None
        } else {
            decode_payloads(work, &wire_in, &mut self.hidden)?;
            Some(&self.hidden[..])
        };
        let chunk = Chunk { session: id, pos: work.pos(), ids: &work.ids, hidden, logits_from: work.logits_from() };
        engine.forward(&[chunk], &mut self.output).map_err(|error| error.to_string())?;
        match &mut session.tail {
            Some(tail) => {
                let replies = tail.answer(engine, &work.heads, &work.ids, &self.output.logits);
                let replies = replies.map_err(|error| error.to_string())?;
                replies.iter().map(|reply| codec::encode_reply(reply).map_err(|error| error.to_string())).collect()
            }
            None => encode_frames(work, &wire_out, hc * dim, &self.output.hidden),
        }
    }

    fn tell(&self, message: Control) {
        let Some(route) = self.route else { return };
        let body = match codec::encode_control(&message) {
            Ok(body) => body,
            Err(error) => return tracing::error!(%error, "a control message can't be written"),
        };
        if let Err(error) = send(&self.parts, route.coordinator, Lane::Control, body) {
            tracing::warn!(%error, "the coordinator can't be told");
        }
    }
}

fn decode_payloads(work: &Work, wire: &Wire, hidden: &mut Vec<bf16>) -> Result<(), String> {
    hidden.clear();
    for (head, payload) in work.heads.iter().zip(&work.payloads) {
        let expected = head.len as usize * wire.position_bytes();
        if payload.len() != expected {
            return Err(format!(
                "frame of {} positions with {} payload bytes, expected {expected}",
                head.len,
                payload.len()
            ));
        }
        wire.decode(head.pos, payload, hidden).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn encode_frames(work: &Work, wire: &Wire, row: usize, hidden: &[bf16]) -> Result<Vec<Bytes>, String> {
    let mut bodies = Vec::with_capacity(work.heads.len());
    let mut at = 0;
    for head in &work.heads {
        let len = head.len as usize;
        let ids = &work.ids[at..at + len];
        let mut buffer =
            codec::FrameBuffer::begin(head, ids, len * wire.position_bytes()).map_err(|error| error.to_string())?;
        let values = &hidden[at * row..(at + len) * row];
        wire.encode_into(head.pos, values, buffer.payload_mut()).map_err(|error| error.to_string())?;
        bodies.push(buffer.finish());
        at += len;
    }
    Ok(bodies)
}

/// Sends, waiting for room in the queue only where it is full.
fn send(parts: &WorkerParts, to: Node, lane: Lane, body: Bytes) -> Result<(), LinkError> {
    match parts.link.try_send(to, lane, body.clone()) {
        Err(LinkError::Stalled { .. }) => parts.runtime.block_on(parts.link.send(to, lane, body)),
        sent => sent,
    }
}

/// Counts what the engine loaded, once.
pub fn count_loaded(counters: &Counters, bytes: u64) {
    counters.loaded_bytes.store(bytes, Ordering::Relaxed);
}
