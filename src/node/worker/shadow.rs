//! The part of the worker that sends copies to the shadow of the next stage, or is a shadow itself.
//!
//! A shadow asks the stage in front for what it lacks of each session ([`Control::Shadowed`]), computes it
//! as history, and sends nothing on. Nothing that goes wrong here fails a session or is told to the
//! coordinator: a shadow that falls behind has less to offer when it is needed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::heal::copies::{Copies, REPORT_EVERY};
use crate::ids::{Epoch, Node, Position, SessionId};
use crate::node::session::Session;
use crate::node::worker::{Send, Tell, Worker};
use crate::proto::codec;
use crate::proto::control::{Control, Open};
use crate::proto::frame::FrameHead;
use crate::transport::Lane;

/// How long a shadow has nothing to compute in a session before it asks again.
const ASK_AFTER: Duration = Duration::from_millis(500);

/// Copies in one view: sent to the shadow of the next stage, or taken in as a shadow.
#[derive(Debug, Default)]
pub(super) struct Shadowing {
    /// The shadow of the next stage.
    to: Option<Node>,
    copies: Copies,
    /// The copy that is being sent, and where it ends.
    sending: Option<(SessionId, Position)>,
    /// As a shadow: what was told of each session.
    told: BTreeMap<SessionId, Told>,
    ask_at: Option<Instant>,
}

#[derive(Debug, Default)]
struct Told {
    /// The position that it had come to at the last look.
    next: Position,
    /// Frames computed since the last report.
    frames: u32,
}

impl Shadowing {
    pub(super) fn copy_to(&mut self, to: Option<Node>) {
        if self.to != to {
            *self = Self { to, ..Self::default() };
        }
    }

    pub(super) fn handle_shadowed(&mut self, session: SessionId, next: Position, again: bool) {
        if self.to.is_some() {
            self.copies.handle_shadowed(session, next, again);
        }
    }

    pub(super) fn handle_grown(&mut self, session: SessionId) {
        self.copies.handle_grown(session);
    }

    pub(super) fn remove(&mut self, session: SessionId) {
        self.copies.remove(session);
        self.told.remove(&session);
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.ask_at
    }
}

impl Worker {
    pub(super) fn is_shadow(&self) -> bool {
        self.route.is_some_and(|route| route.shadows)
    }

    /// The next copy to send, where there is room for it at once; [`Worker::handle_copied`] says how that
    /// went.
    pub(crate) fn poll_copy(&mut self) -> Option<Send> {
        let to = self.shadowing.to?;
        loop {
            let sessions = &self.sessions;
            let finals = |id| sessions.get(&id).map(Session::final_to);
            let (session, range) = self.shadowing.copies.poll(finals)?;
            match self.copy(session, range.start, range.end) {
                Ok((body, end)) => {
                    self.shadowing.sending = Some((session, end));
                    return Some(Send { to, lane: Lane::Data, body });
                }
                Err(reason) => {
                    tracing::debug!(%session, %reason, "a session can't be copied to a shadow");
                    self.shadowing.copies.remove(session);
                }
            }
        }
    }

    /// What [`Worker::poll_copy`] gave last was queued, or there was no room.
    pub(crate) fn handle_copied(&mut self, queued: bool) {
        if let Some((session, end)) = self.shadowing.sending.take() {
            self.shadowing.copies.handle_sent(session, end, queued);
        }
    }

    /// A frame of the journal, and one past its last position.
    fn copy(&mut self, session: SessionId, from: Position, to: Position) -> Result<(bytes::Bytes, Position), String> {
        let route = self.route.ok_or("outside any ring")?;
        let prompt_len = self.sessions.get(&session).map_or(0, |session| session.open.prompt_len);
        let pieces = self.journals.read(session, from, to, to.0 - from.0).map_err(|error| error.to_string())?;
        let piece = pieces.into_iter().next().ok_or("nothing is there")?;
        let len = u32::try_from(piece.ids.len()).unwrap_or(u32::MAX);
        let head = FrameHead {
            view: route.view,
            session,
            epoch: Epoch(0),
            start: Position(0),
            pos: piece.pos,
            len,
            settled: Position(0),
            answer_from: Position(prompt_len.saturating_sub(1)),
        };
        let body = codec::encode_frame(&head, &piece.ids, &piece.payload).map_err(|error| error.to_string())?;
        Ok((body, piece.pos.plus(len)))
    }

    /// Opens a session as a shadow and asks for all that it lacks. One that has no room does without.
    pub(super) fn open_as_shadow(&mut self, open: Open, now: Instant) {
        let id = open.session;
        let facts = self.desk.engine.facts();
        let (shape, is_tail) = (Session::shape(&open, facts), facts.is_tail());
        let shelved = self.shelf.take(id).filter(|shelved| shelved.fits(&shape));
        let state = match shelved {
            Some(shelved) => Ok(shelved),
            None => {
                self.forget(id);
                self.make_room().and_then(|()| self.start_state(&open))
            }
        };
        match state {
            Ok(state) => {
                let from = state.final_to;
                self.sessions.insert(id, Session::shadow(open, is_tail, state, from));
                self.shadowing.told.insert(id, Told { next: from, frames: 0 });
                self.shadowing.ask_at.get_or_insert(now + ASK_AFTER);
                self.tell_source(id, from, true);
            }
            Err(reason) => tracing::warn!(session = %id, %reason, "a session can't be shadowed"),
        }
    }

    /// A frame can't be taken in: that fails its session, and at a shadow costs time.
    pub(super) fn refuse_frame(&mut self, id: SessionId, reason: String) {
        if !self.is_shadow() {
            return self.fail(id, reason);
        }
        tracing::debug!(session = %id, %reason, "a shadow drops what waits, and will ask again");
        if let Some(session) = self.sessions.get_mut(&id) {
            session.begin_anew();
        }
    }

    /// A shadow has computed so many frames.
    pub(super) fn tell_shadowed(&mut self, id: SessionId, frames: usize) {
        let Some(next) = self.sessions.get(&id).map(Session::next) else { return };
        let told = self.shadowing.told.entry(id).or_default();
        told.frames = told.frames.saturating_add(u32::try_from(frames).unwrap_or(u32::MAX));
        if told.frames >= REPORT_EVERY {
            told.frames = 0;
            self.tell_source(id, next, false);
        }
    }

    /// A shadow asks again where nothing has come for a while.
    pub(super) fn ask_for_copies(&mut self, now: Instant) {
        if self.shadowing.ask_at.is_none_or(|at| at > now) {
            return;
        }
        let mut asks = Vec::new();
        for (id, session) in &mut self.sessions {
            let told = self.shadowing.told.entry(*id).or_default();
            let next = session.next();
            if std::mem::replace(&mut told.next, next) == next && session.is_starved() {
                told.frames = 0;
                asks.push((*id, next));
            }
        }
        self.shadowing.ask_at = (!self.sessions.is_empty()).then(|| now + ASK_AFTER);
        for (id, next) in asks {
            self.tell_source(id, next, true);
        }
    }

    /// The source is there: a shadow asks for all that it lacks.
    pub(super) fn ask_for_all(&mut self, now: Instant) {
        for (id, told) in &mut self.shadowing.told {
            told.next = self.sessions.get(id).map_or(told.next, Session::next);
        }
        self.shadowing.ask_at = self.is_shadow().then_some(now);
        self.ask_for_copies(now);
    }

    fn tell_source(&mut self, session: SessionId, next: Position, again: bool) {
        let Some(route) = self.route else { return };
        match codec::encode_control(&Control::Shadowed { view: route.view, session, next, again }) {
            Ok(body) => self.tells.push_back((Tell { to: route.predecessor, body }, None)),
            Err(error) => tracing::error!(%error, "a control message can't be written"),
        }
    }
}
