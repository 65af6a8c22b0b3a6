//! The part of the worker that computes: whose frames, and what becomes of the results.

use std::time::Instant;

use bytes::Bytes;

use crate::ids::Position;
use crate::node::membership::Route;
use crate::node::session::Session;
use crate::node::worker::{PASS_POSITIONS_MAX, Part, Pass, Worker};
use crate::proto::codec;
use crate::proto::fence::Forward;

impl Worker {
    /// What to compute next. Nothing while results wait to be sent.
    pub(crate) fn poll_work(&mut self) -> Option<Pass> {
        if !self.outbox.is_empty() {
            return None;
        }
        self.ready.clear();
        let ready = self.sessions.iter_mut().filter_map(|(id, session)| Some((*id, session.waits()?)));
        self.ready.extend(ready);
        let (kind, order) = self.turns.next(&self.ready)?;
        let mut pass = Pass { parts: Vec::with_capacity(self.ready.len()) };
        let mut room = PASS_POSITIONS_MAX;
        for session in order {
            let Some(work) = self.sessions.get_mut(&session).and_then(|session| session.poll_work(room)) else { break };
            room = room.saturating_sub(work.ids.len());
            pass.parts.push(Part { session, work });
            if room == 0 {
                break;
            }
        }
        let last = pass.parts.last()?.session;
        self.turns.handle_served(kind, last);
        Some(pass)
    }

    /// Computes a pass. What came meanwhile is to be taken in before [`Worker::handle_computed`].
    pub(crate) fn compute(&mut self, pass: Pass) {
        let results = self.desk.compute(&mut self.sessions, &pass.parts);
        self.computed = Some((pass, results));
    }

    /// The pass took `us` microseconds, and what came meanwhile is taken in: its results are to be sent, but
    /// those that the fence holds back. Nothing where the route has changed.
    pub(crate) fn handle_computed(&mut self, us: u64, now: Instant) {
        let Some((pass, results)) = self.computed.take() else { return };
        self.counters.pass(pass.positions() == 1, us);
        let Some(route) = self.route else { return };
        for (part, results) in pass.parts.iter().zip(results) {
            match results {
                Ok(results) => self.part_computed(&route, part, results, now),
                Err(reason) => self.fail(part.session, reason),
            }
        }
    }

    /// The route ends while a pass is computed: the state of its sessions holds its positions, so they count,
    /// and what came of them is kept as if it had been sent. A part that failed has no state.
    pub(super) fn keep_computed(&mut self) {
        let Some((pass, results)) = self.computed.take() else { return };
        for (part, results) in pass.parts.iter().zip(results) {
            match results {
                Ok(results) => drop(self.part_kept(part, &results)),
                Err(reason) => {
                    tracing::warn!(session = %part.session, %reason, "a session's state is lost with its ring");
                    self.sessions.remove(&part.session);
                    self.forget(part.session);
                }
            }
        }
    }

    fn part_kept(&mut self, part: &Part, results: &[Bytes]) -> Option<Vec<Forward>> {
        let session = self.sessions.get_mut(&part.session)?;
        let input = self.desk.input_bytes(&session.open);
        let fates = session.handle_computed(&part.work, input);
        self.journal(part, &fates, results);
        Some(fates)
    }

    fn part_computed(&mut self, route: &Route, part: &Part, results: Vec<Bytes>, now: Instant) {
        let Some(fates) = self.part_kept(part, &results) else { return };
        match route.shadows {
            true => self.tell_shadowed(part.session, part.work.heads.len()),
            false => self.tell_rebuilt(part.session, &part.work, &results),
        }
        self.shadowing.handle_grown(part.session);
        let bodies = fates.into_iter().zip(results).filter(|(fate, _)| *fate == Forward::Yes).map(|(_, body)| body);
        self.outbox.put(route, bodies, now);
    }

    /// Keeps what the next stage got, or has, in case it is lost there.
    fn journal(&mut self, part: &Part, fates: &[Forward], bodies: &[Bytes]) {
        if self.desk.engine.facts().is_tail() {
            return;
        }
        let history = self.sessions.get(&part.session).map_or(Position(0), Session::history);
        let mut ids = &part.work.ids[..];
        for ((head, fate), body) in part.work.heads.iter().zip(fates).zip(bodies) {
            let (of_frame, rest) = ids.split_at(head.len as usize);
            ids = rest;
            if *fate != Forward::No {
                let payload = body.slice(codec::frame_header_bytes(of_frame.len())..);
                let end = head.pos.plus(head.len);
                self.journals.settle(part.session, head.settled.max(end.min(history)));
                self.journals.record(part.session, head.pos, of_frame, payload);
            }
        }
    }
}
