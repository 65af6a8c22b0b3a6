//! Which final positions of each session are sent to the shadow of the next stage: pure.
//!
//! A shadow asks for what it lacks and says how far it came; it gets positions that are final, in order, so
//! many frames ahead of what it computed and no more. One that is slow, full or gone is not waited for: what
//! could not be sent is sent later, from the journal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use crate::ids::{Position, SessionId};

/// Frames that a shadow has not computed, at most. Below what its fence holds.
pub const COPIES_UNDER_WAY: usize = 16;

/// Positions of a copy, at most.
pub const COPY_POSITIONS_MAX: u32 = 64;

/// Positions of a copy, at least: fewer wait for more. A shadow lacks so many more, and costs the stage in
/// front a frame less for each.
pub const COPY_POSITIONS_MIN: u32 = 16;

/// Frames that a shadow computes between two reports.
pub const REPORT_EVERY: u32 = 4;

/// Sessions that a shadow may ask for, at most.
const SESSIONS_MAX: usize = 4096;

/// One session on the way to a shadow.
#[derive(Debug)]
struct Progress {
    /// Positions below were sent.
    sent: Position,
    /// The ends of frames that were sent and not yet computed.
    under_way: VecDeque<Position>,
}

/// Copies for one shadow.
#[derive(Debug, Default)]
pub struct Copies {
    sessions: BTreeMap<SessionId, Progress>,
    /// Sessions in which something may be sent.
    due: BTreeSet<SessionId>,
}

impl Copies {
    /// The shadow has the positions below `next`; with `again`, nothing above is on the way to it.
    pub fn handle_shadowed(&mut self, session: SessionId, next: Position, again: bool) {
        if again && (self.sessions.len() < SESSIONS_MAX || self.sessions.contains_key(&session)) {
            self.sessions.insert(session, Progress { sent: next, under_way: VecDeque::new() });
        } else if let Some(progress) = self.sessions.get_mut(&session) {
            while progress.under_way.front().is_some_and(|end| *end <= next) {
                progress.under_way.pop_front();
            }
        }
        self.handle_grown(session);
    }

    /// More of a session may be final.
    pub fn handle_grown(&mut self, session: SessionId) {
        if self.sessions.contains_key(&session) {
            self.due.insert(session);
        }
    }

    /// Whether nothing is to be sent.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.due.is_empty()
    }

    /// The session is no more, or can't be copied: until the shadow asks again.
    pub fn remove(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        self.due.remove(&session);
    }

    /// The positions to send next, of which those below `finals` of their session are final.
    pub fn poll(&mut self, finals: impl Fn(SessionId) -> Option<Position>) -> Option<(SessionId, Range<Position>)> {
        while let Some(session) = self.due.first().copied() {
            let room = self.sessions.get(&session).filter(|progress| progress.under_way.len() < COPIES_UNDER_WAY);
            if let (Some(progress), Some(end)) = (room, finals(session)) {
                let to = end.min(progress.sent.plus(COPY_POSITIONS_MAX));
                if to.0.saturating_sub(progress.sent.0) >= COPY_POSITIONS_MIN {
                    return Some((session, progress.sent..to));
                }
            }
            self.due.remove(&session);
        }
        None
    }

    /// What [`Copies::poll`] gave last is on its way; or it is not, and is tried again when more of its
    /// session is final or the shadow asks.
    pub fn handle_sent(&mut self, session: SessionId, to: Position, sent: bool) {
        match self.sessions.get_mut(&session).filter(|_| sent) {
            Some(progress) => {
                progress.sent = to;
                progress.under_way.push_back(to);
            }
            None => {
                self.due.remove(&session);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: SessionId = SessionId(7);

    fn sent(copies: &mut Copies, finals: u32) -> Vec<(u32, u32)> {
        let mut all = Vec::new();
        while let Some((session, range)) = copies.poll(|_| Some(Position(finals))) {
            copies.handle_sent(session, range.end, true);
            all.push((range.start.0, range.end.0));
        }
        all
    }

    #[test]
    fn a_shadow_gets_what_is_final_and_not_more_than_it_keeps_up_with() {
        let mut copies = Copies::default();
        copies.handle_grown(S);
        assert_eq!(sent(&mut copies, 10), [], "it has not asked");
        copies.handle_shadowed(S, Position(0), true);
        assert_eq!(sent(&mut copies, 70), [(0, 64)], "fewer than a copy wait for more");
        assert_eq!(sent(&mut copies, 80), [], "nothing was said to have grown");
        copies.handle_grown(S);
        assert_eq!(sent(&mut copies, 80), [(64, 80)]);
        let room = (COPIES_UNDER_WAY as u32 - 2) * COPY_POSITIONS_MIN;
        for more in 1..2 * room {
            copies.handle_grown(S);
            let got = sent(&mut copies, 80 + more);
            let goes = more <= room && more % COPY_POSITIONS_MIN == 0;
            assert_eq!(!got.is_empty(), goes, "{more}: {got:?}");
        }
        copies.handle_shadowed(S, Position(80), false);
        let (from, to) = (80 + room, 80 + room + 54);
        assert_eq!(sent(&mut copies, to), [(from, to)], "what waited goes in one frame");
    }

    #[test]
    fn what_could_not_be_sent_or_was_lost_is_sent_later() {
        let mut copies = Copies::default();
        copies.handle_shadowed(S, Position(3), true);
        let (session, range) = copies.poll(|_| Some(Position(29))).unwrap();
        copies.handle_sent(session, range.end, false);
        assert_eq!(copies.poll(|_| Some(Position(29))), None, "not at once");
        copies.handle_grown(S);
        assert_eq!(sent(&mut copies, 30), [(3, 30)]);
        copies.handle_shadowed(S, Position(4), true);
        assert_eq!(sent(&mut copies, 30), [(4, 30)]);
        copies.remove(S);
        copies.handle_grown(S);
        assert_eq!(sent(&mut copies, 59), []);
    }
}
