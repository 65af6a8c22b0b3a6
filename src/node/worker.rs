//! What owns the engine and every session of a stage: a machine without thread, clock or link.
//!
//! Whoever drives it hands inputs in (`Worker::handle_input`), tells the coordinator what
//! `Worker::poll_tell` says after each of them, and while there is work (`Worker::poll_work`)
//! computes a pass over the next frames of some sessions, takes in what has come meanwhile (a cancel may be
//! among it), asks the fence (`Worker::handle_computed`) and sends on what `Worker::poll_send` says. Whose
//! frames go together says `turns`. In production that is a thread ([`thread`]); the simulator drives the
//! same machine.

mod ended;
mod outbox;
mod pass;
mod resume;
mod serve;
mod shadow;
pub(crate) mod shelf;
pub mod thread;
mod turns;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::engine::Engine;
use crate::ids::{Epoch, Node, Position, SessionId, View};
use crate::node::counters::Counters;
use crate::node::journal::Journals;
use crate::node::membership::Route;
use crate::node::session::{Session, Work};
use crate::node::worker::ended::Ended;
use crate::node::worker::outbox::Outbox;
use crate::node::worker::pass::Desk;
use crate::node::worker::resume::Waiting;
use crate::node::worker::shadow::Shadowing;
use crate::node::worker::shelf::Shelf;
pub(crate) use crate::node::worker::turns::Kind;
use crate::node::worker::turns::Turns;
use crate::proto::codec;
use crate::proto::control::{Control, Open, Rebuild, SessionReport};
use crate::proto::fence::Arrival;
use crate::proto::frame::Frame;
use crate::transport::{Lane, LinkError};

/// Inputs that wait for the worker.
pub const INPUTS_MAX: usize = 4096;

/// Frames of sessions not yet opened that are kept.
const EARLY_FRAMES_MAX: usize = 64;

/// Positions of a pass over several sessions, at most.
const PASS_POSITIONS_MAX: usize = 64;

/// How long such a frame is kept.
const EARLY_FRAME_DEADLINE: Duration = Duration::from_secs(5);

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
    /// Go on with a session of an older view.
    Rebuild {
        /// The session.
        session: SessionId,
        /// How.
        rebuild: Rebuild,
    },
    /// Send results of the journal to the next stage again.
    Replay {
        /// The session.
        session: SessionId,
        /// First position.
        from: Position,
        /// One past the last one.
        to: Position,
        /// The tail answers from this position on.
        answer_from: Position,
    },
    /// As a shadow: the source of copies can be asked.
    Ask,
    /// Send final positions to this shadow of the next stage, too.
    Copy(Option<Node>),
    /// How far the shadow of the next stage came.
    Shadowed {
        /// The session.
        session: SessionId,
        /// The first position that it lacks.
        next: Position,
        /// Nothing above is on the way to it.
        again: bool,
    },
    /// Takes this route; every session waits to be opened again in it.
    Route(Option<Route>),
    /// Ends the worker.
    Stop,
}

/// Something for the coordinator to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tell {
    /// The coordinator.
    pub(crate) to: Node,
    /// A control message.
    pub(crate) body: Bytes,
}

/// A result on its way to the next hop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Send {
    /// The successor; at the tail the coordinator.
    pub(crate) to: Node,
    /// For frames or for replies.
    pub(crate) lane: Lane,
    /// A frame or a reply.
    pub(crate) body: Bytes,
}

/// Next frames of some sessions, to be computed together.
#[derive(Debug)]
pub(crate) struct Pass {
    parts: Vec<Part>,
}

/// One session's frames in a pass.
#[derive(Debug)]
pub(crate) struct Part {
    session: SessionId,
    work: Work,
}

/// Bodies for the next hop, one per frame of a part, or why its session fails.
pub(crate) type Computed = Result<Vec<Bytes>, String>;

impl Pass {
    /// Positions that it computes.
    pub(crate) fn positions(&self) -> usize {
        self.parts.iter().map(|part| part.work.ids.len()).sum()
    }
}

struct Early {
    frame: Frame,
    until: Instant,
}

/// The worker of a stage.
pub(crate) struct Worker {
    desk: Desk,
    counters: Arc<Counters>,
    max_sessions: u32,
    route: Option<Route>,
    /// A pass that was computed, and what came of its parts.
    computed: Option<(Pass, Vec<Computed>)>,
    journals: Journals,
    sessions: BTreeMap<SessionId, Session>,
    /// Sessions of an older view that were opened again.
    waiting: BTreeMap<SessionId, Waiting>,
    /// Sessions of older views that were not.
    shelf: Shelf,
    /// Sessions that ended in this view: what still comes of them is dropped.
    ended: Ended,
    early: Vec<Early>,
    turns: Turns,
    /// Sessions that have work, of the last look.
    ready: Vec<(SessionId, Kind)>,
    /// What the coordinator is to know, with the session that counts until it does.
    tells: VecDeque<(Tell, Option<SessionId>)>,
    /// The session that is counted until the last tell is sent.
    telling: Option<SessionId>,
    outbox: Outbox,
    shadowing: Shadowing,
}

impl Worker {
    /// A worker in no ring, which holds `max_sessions` at once.
    pub(crate) fn new(engine: Box<dyn Engine>, journals: Journals, counters: Arc<Counters>, max_sessions: u32) -> Self {
        // Here, where no engine gets past without its weights being counted.
        counters.loaded_bytes.fetch_add(engine.facts().weight_bytes, Ordering::Relaxed);
        Self {
            desk: Desk::new(engine),
            counters,
            max_sessions,
            route: None,
            computed: None,
            journals,
            sessions: BTreeMap::new(),
            waiting: BTreeMap::new(),
            shelf: Shelf::default(),
            ended: Ended::default(),
            early: Vec::new(),
            turns: Turns::default(),
            ready: Vec::new(),
            tells: VecDeque::new(),
            telling: None,
            outbox: Outbox::default(),
            shadowing: Shadowing::default(),
        }
    }

    /// The sessions open on it, and the view that they are open in.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = (SessionId, View, &Session)> {
        let view = self.route.map_or(View(0), |route| route.view);
        self.sessions.iter().map(move |(id, session)| (*id, view, session))
    }

    /// Takes an input; `false` to end.
    pub(crate) fn handle_input(&mut self, input: Input, now: Instant) -> bool {
        match input {
            Input::Frame(frame) => self.frame(frame, now),
            Input::Open(open) => {
                self.open(open, now);
                self.counters.opening.fetch_sub(1, Ordering::AcqRel);
            }
            Input::Close(session) => self.close(session),
            Input::Cancel { session, below } => {
                if let Some(session) = self.sessions.get_mut(&session) {
                    session.handle_cancel(below);
                }
            }
            Input::Rebuild { session, rebuild } => self.rebuild(session, rebuild),
            Input::Replay { session, from, to, answer_from } => self.replay(session, (from, to), answer_from, now),
            Input::Ask => self.ask_for_all(now),
            Input::Copy(to) => self.shadowing.copy_to(to),
            Input::Shadowed { session, next, again } => self.shadowing.handle_shadowed(session, next, again),
            Input::Route(route) => self.reroute(route, now),
            Input::Stop => return false,
        }
        true
    }

    /// What the coordinator is to know next. It is asked until it has nothing after every call that
    /// changes something: asked again, it takes what it gave before for sent.
    pub(crate) fn poll_tell(&mut self) -> Option<Tell> {
        // A stage that drains ends when no session is counted: only after its end was told.
        if let Some(session) = self.telling.take() {
            self.counters.close(session);
        }
        let (tell, session) = self.tells.pop_front()?;
        self.telling = session;
        Some(tell)
    }

    /// The result to send next; [`Worker::handle_sent`] says how that went.
    pub(crate) fn poll_send(&mut self, now: Instant) -> Option<Send> {
        self.outbox.poll_send(now)
    }

    /// What [`Worker::poll_send`] gave last was queued, or could not be. While the hop is being mended
    /// results wait for it: it died idle, so they are the first on it.
    pub(crate) fn handle_sent(&mut self, sent: Result<(), LinkError>, now: Instant) {
        if let (Err(lost), Some(route)) = (self.outbox.handle_sent(sent, now), self.route) {
            self.tell(Control::NeighbourLost { view: route.view, peer: lost.to, reason: lost.why });
        }
    }

    /// When to call [`Worker::handle_timeout`], or to ask [`Worker::poll_send`] again.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let sessions = self.sessions.values().filter_map(Session::poll_timeout);
        sessions
            .chain(self.early.iter().map(|early| early.until))
            .chain(self.outbox.poll_timeout())
            .chain(self.shelf.poll_timeout())
            .chain(self.shadowing.poll_timeout())
            .min()
    }

    /// Time has come: what waited too long for a frame before it fails.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        self.early.retain(|early| early.until > now);
        self.forget_expired(now);
        self.ask_for_copies(now);
        let failed: Vec<(SessionId, String)> = self
            .sessions
            .iter_mut()
            .filter(|(_, session)| session.poll_timeout().is_some_and(|at| at <= now))
            .filter_map(|(id, session)| session.handle_timeout(now).err().map(|error| (*id, error.to_string())))
            .collect();
        for (session, reason) in failed {
            self.refuse_frame(session, reason);
        }
    }

    fn reroute(&mut self, route: Option<Route>, now: Instant) {
        let former = self.route.map(|route| route.coordinator.peer);
        self.keep_computed();
        self.shelve_all(now);
        // Another coordinator's sessions are others, whatever their numbers.
        if let (Some(former), Some(route)) = (former, route)
            && former != route.coordinator.peer
        {
            while let Some(id) = self.shelf.oldest() {
                self.forget(id);
            }
        }
        self.shadowing = Shadowing::default();
        self.early.clear();
        self.outbox.clear();
        self.ended = Ended::default();
        self.route = route;
    }

    fn frame(&mut self, frame: Frame, now: Instant) {
        let id = frame.head.session;
        if let Some(session) = self.sessions.get_mut(&id) {
            match session.handle_frame(frame, now) {
                Ok(Arrival::Queued | Arrival::Held) => {}
                Ok(Arrival::Dropped(reason)) => tracing::trace!(session = %id, ?reason, "frame dropped"),
                Err(error) => self.refuse_frame(id, error.to_string()),
            }
        } else if !self.waiting.contains_key(&id) && !self.ended.has(id) && self.early.len() < EARLY_FRAMES_MAX {
            self.early.push(Early { frame, until: now + EARLY_FRAME_DEADLINE });
        }
    }

    fn open(&mut self, open: Open, now: Instant) {
        let id = open.session;
        let Some(route) = self.route else { return };
        if open.view != route.view || self.sessions.contains_key(&id) || self.waiting.contains_key(&id) {
            return;
        }
        if self.ended.has(id) {
            return self.fail(id, format!("session {id} ended here in view {}", route.view));
        }
        if open.prompt_len == 0 || open.prompt_len > open.positions {
            let (prompt, positions) = (open.prompt_len, open.positions);
            return self.fail(id, format!("prompt of {prompt} positions in a session of {positions}"));
        }
        if route.shadows {
            return self.open_as_shadow(open, now);
        }
        if open.resumes {
            if let Err(reason) = self.open_again(open, &route) {
                self.fail(id, reason);
            }
            return;
        }
        if let Err(reason) = self.try_open(open) {
            return self.fail(id, reason);
        }
        self.tell(Control::Opened { view: route.view, session: id, kept: None });
        let (now_open, still_early): (Vec<Early>, Vec<Early>) =
            std::mem::take(&mut self.early).into_iter().partition(|early| early.frame.head.session == id);
        self.early = still_early;
        for early in now_open {
            self.frame(early.frame, now);
        }
    }

    fn try_open(&mut self, open: Open) -> Result<(), String> {
        let id = open.session;
        self.make_room()?;
        let state = self.start_state(&open)?;
        let counters = self.counters.open(id);
        let is_tail = self.desk.engine.facts().is_tail();
        self.sessions.insert(id, Session::new(open, (is_tail, counters), state));
        Ok(())
    }

    fn close(&mut self, id: SessionId) {
        self.early.retain(|early| early.frame.head.session != id);
        self.ended.put(id);
        let report = match self.sessions.remove(&id) {
            Some(session) => session.counters.report(id),
            None => SessionReport { session: id, ..SessionReport::default() },
        };
        self.waiting.remove(&id);
        self.forget(id);
        if self.is_shadow() {
            return;
        }
        self.tell_end(Control::Closed { report }, id);
    }

    /// Ends a session here and tells the coordinator why.
    fn fail(&mut self, id: SessionId, reason: String) {
        self.sessions.remove(&id);
        self.waiting.remove(&id);
        self.ended.put(id);
        self.forget(id);
        let Some(route) = self.route else { return self.counters.close(id) };
        tracing::warn!(session = %id, %reason, "session failed");
        if route.shadows {
            return;
        }
        self.tell_end(Control::Failed { view: route.view, session: id, reason }, id);
    }

    fn tell(&mut self, message: Control) {
        self.tells.extend(self.tell_of(&message).map(|tell| (tell, None)));
    }

    /// Tells of a session's end, which counts until then.
    fn tell_end(&mut self, message: Control, session: SessionId) {
        match self.tell_of(&message) {
            Some(tell) => self.tells.push_back((tell, Some(session))),
            None => self.counters.close(session),
        }
    }

    fn tell_of(&self, message: &Control) -> Option<Tell> {
        let to = self.route?.coordinator;
        match codec::encode_control(message) {
            Ok(body) => Some(Tell { to, body }),
            Err(error) => {
                tracing::error!(%error, "a control message can't be written");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
