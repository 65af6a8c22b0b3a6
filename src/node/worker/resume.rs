//! The part of the worker that goes on with sessions of an older view.
//!
//! A new route puts every session on the shelf. A session that is opened again tells what was kept of
//! it and waits; the coordinator, who heard that of every stage, says from where on it goes on.

use std::time::Instant;

use bytes::Bytes;

use crate::heal::run::CHECKED_POSITIONS;
use crate::ids::{Epoch, Position, SessionId};
use crate::node::journal::Recent;
use crate::node::journal::digest::{encoding_tag, position_digest};
use crate::node::membership::Route;
use crate::node::session::{Session, Work};
use crate::node::worker::Worker;
use crate::node::worker::shelf::Shelved;
use crate::proto::codec;
use crate::proto::control::{Control, Digests, Kept, Open, Rebuild, ids_digest};
use crate::proto::frame::FrameHead;

/// Positions of a frame that is sent again, at most.
const REPLAY_CHUNK: u32 = 64;

/// Inputs that are remembered besides those that may be taken back: as many can be compared.
const RECENT_MORE: u32 = CHECKED_POSITIONS;

/// A session that was opened again and waits for the coordinator's word.
pub(super) struct Waiting {
    open: Open,
    shelved: Option<Shelved>,
}

impl Worker {
    /// Every session leaves its ring; a later one may go on with it.
    pub(super) fn shelve_all(&mut self, now: Instant) {
        for (id, waiting) in std::mem::take(&mut self.waiting) {
            match waiting.shelved {
                Some(shelved) => self.shelf.put(id, shelved, now),
                None => self.forget(id),
            }
        }
        for (id, session) in std::mem::take(&mut self.sessions) {
            self.counters.close(id);
            let shape = Session::shape(&session.open, self.desk.engine.facts());
            self.shelf.put(id, session.shelve(shape), now);
        }
    }

    /// Frees what is left of a session.
    pub(super) fn forget(&mut self, id: SessionId) {
        self.shelf.take(id);
        self.shadowing.remove(id);
        self.desk.engine.close(id);
        self.journals.close(id);
    }

    pub(super) fn forget_expired(&mut self, now: Instant) {
        for id in self.shelf.expired(now) {
            tracing::info!(session = %id, "no ring went on with a session: its state is freed");
            self.forget(id);
        }
    }

    /// Makes room for one more session, at the cost of those that wait for a ring.
    pub(super) fn make_room(&mut self) -> Result<(), String> {
        let limit = self.max_sessions as usize;
        while self.sessions.len() + self.waiting.len() + self.shelf.len() >= limit {
            let Some(oldest) = self.shelf.oldest() else {
                return Err(format!("{limit} sessions are open here, which is this stage's limit (--max-sessions)"));
            };
            self.forget(oldest);
        }
        Ok(())
    }

    /// A session is opened again: it waits for [`Control::Rebuild`].
    pub(super) fn open_again(&mut self, open: Open, route: &Route) -> Result<(), String> {
        let id = open.session;
        let shape = Session::shape(&open, self.desk.engine.facts());
        // State beyond the reach can't be re-opened: it is another session's of that number.
        let most = Position(open.prompt_len.saturating_sub(1)).plus(open.reach);
        let shelved = self.shelf.take(id).filter(|shelved| shelved.fits(&shape) && shelved.next() <= most);
        if shelved.is_none() {
            self.forget(id);
            self.make_room()?;
        }
        let kept = shelved.as_ref().map(|shelved| Box::new(self.kept(id, shelved, open.prompt_len)));
        self.waiting.insert(id, Waiting { open, shelved });
        self.tell(Control::Opened { view: route.view, session: id, kept });
        Ok(())
    }

    /// What is there of a session whose history has `history` tokens.
    fn kept(&mut self, id: SessionId, shelved: &Shelved, history: u32) -> Kept {
        let next = shelved.next().min(Position(history));
        let journal = self.journals.span(id);
        let (from, list) = shelved.recent.digests();
        let beyond = list.len().saturating_sub(codec::DIGESTS_MAX);
        let from = from.plus(u32::try_from(beyond).unwrap_or(u32::MAX));
        let inputs = Digests { from, list: list[beyond..].to_vec() };
        let ids = ids_digest(&shelved.ids[..next.0 as usize]);
        let first = Position(next.0.saturating_sub(CHECKED_POSITIONS)).max(journal.start);
        // A journal that can't be read is found out when it is needed.
        let list = self.journals.digests(id, first, next.min(journal.end)).unwrap_or_default();
        Kept { next, ids, journal: (journal.start, journal.end), inputs, outputs: Digests { from: first, list } }
    }

    /// The coordinator says from where on a session goes on.
    pub(super) fn rebuild(&mut self, id: SessionId, rebuild: Rebuild) {
        let (Some(route), Some(Waiting { open, shelved })) = (self.route, self.waiting.remove(&id)) else { return };
        let result = match shelved.filter(|_| rebuild.from > Position(0)) {
            Some(shelved) if rebuild.from <= shelved.next() => Ok(shelved),
            None if rebuild.from == Position(0) => self.start_state(&open),
            Some(_) | None => Err(format!("asked to go on at position {}, which this stage has not", rebuild.from)),
        };
        let shelved = match result {
            Ok(shelved) => shelved,
            Err(reason) => return self.fail(id, reason),
        };
        let counters = self.counters.open(id);
        let is_tail = self.desk.engine.facts().is_tail();
        self.sessions.insert(id, Session::resumed(open, (is_tail, counters), shelved, rebuild));
        self.tell(Control::Rebuilt { view: route.view, session: id, next: rebuild.from, outputs: Digests::default() });
    }

    /// A fresh state in the engine and a fresh journal.
    pub(super) fn start_state(&mut self, open: &Open) -> Result<Shelved, String> {
        let facts = self.desk.engine.facts().clone();
        let shape = Session::shape(open, &facts);
        self.forget(open.session);
        self.desk.engine.open(open.session, &shape).map_err(|error| error.to_string())?;
        let at = |layer| open.encoding_at(layer);
        if !facts.is_tail() {
            let out = at(facts.range.hi());
            self.journals.open(open.session, out.position_bytes(facts.hc, facts.dim), encoding_tag(out));
        }
        let recent = Recent::new(open.reach.saturating_add(RECENT_MORE), encoding_tag(at(facts.range.lo())));
        Ok(Shelved { shape, final_to: Position(0), ids: Vec::new(), recent })
    }

    /// Sends results of the journal to the next stage again.
    pub(super) fn replay(
        &mut self,
        id: SessionId,
        (from, to): (Position, Position),
        answer_from: Position,
        now: Instant,
    ) {
        let (Some(route), Some(session)) = (self.route, self.sessions.get_mut(&id)) else { return };
        let bodies = self.journals.read(id, from, to, REPLAY_CHUNK).map_err(|error| error.to_string());
        let bodies = bodies.and_then(|pieces| {
            let frame = |piece: crate::node::journal::Piece| {
                let head = FrameHead {
                    view: route.view,
                    session: id,
                    epoch: Epoch(0),
                    start: Position(0),
                    pos: piece.pos,
                    len: u32::try_from(piece.ids.len()).unwrap_or(u32::MAX),
                    settled: Position(0),
                    answer_from,
                };
                codec::encode_frame(&head, &piece.ids, &piece.payload).map_err(|error| error.to_string())
            };
            pieces.into_iter().map(frame).collect::<Result<Vec<Bytes>, String>>()
        });
        match bodies {
            Ok(bodies) => {
                session.handle_replayed(bodies.len() as u64);
                self.outbox.put(&route, bodies, now);
            }
            Err(reason) => {
                tracing::warn!(session = %id, %reason, "a journal can't be replayed");
                self.journals.close(id);
                self.tell(Control::ReplayFailed { view: route.view, session: id, reason });
            }
        }
    }

    /// Tells of a pass over the history, with the digests of results that are asked for.
    pub(super) fn tell_rebuilt(&mut self, id: SessionId, work: &Work, bodies: &[Bytes]) {
        let (Some(route), Some(session)) = (self.route, self.sessions.get(&id)) else { return };
        let Some(first) = work.heads.first().filter(|head| head.pos < session.history()) else { return };
        let next = session.next();
        let facts = self.desk.engine.facts();
        let mut outputs = Digests { from: first.pos.max(session.digests_from()), list: Vec::new() };
        if !facts.is_tail() && outputs.from < next {
            let encoding = session.open.encoding_at(facts.range.hi());
            let (bytes, tag) = (encoding.position_bytes(facts.hc, facts.dim), encoding_tag(encoding));
            let mut ids = work.ids.iter();
            for (head, body) in work.heads.iter().zip(bodies) {
                let payload = body.slice(codec::frame_header_bytes(head.len as usize)..);
                let rows = payload.chunks_exact(bytes);
                for ((pos, row), id) in (head.pos.0..).map(Position).zip(rows).zip(ids.by_ref()) {
                    if pos >= outputs.from {
                        outputs.list.push(position_digest(pos, *id, tag, row));
                    }
                }
            }
        }
        self.tell(Control::Rebuilt { view: route.view, session: id, next, outputs });
    }
}
