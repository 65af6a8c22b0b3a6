//! Sessions of older views whose state is still in the engine, pure: a healed ring goes on with them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::engine::SessionShape;
use crate::ids::{Position, SessionId, TokenId};
use crate::node::journal::Recent;

/// How long a session waits for the next ring. Longer than a coordinator lets its clients wait by default.
const KEPT_FOR: Duration = Duration::from_secs(180);

/// What a stage has of a session besides the engine's state and the journal.
pub(crate) struct Shelved {
    pub(crate) shape: SessionShape,
    /// Positions below are final, the others may be of a speculation that came to nothing.
    pub(crate) final_to: Position,
    /// Token ids of the positions in the state, from 0.
    pub(crate) ids: Vec<TokenId>,
    /// The last inputs.
    pub(crate) recent: Recent,
}

impl Shelved {
    /// One past the last position of the state.
    pub(crate) fn next(&self) -> Position {
        Position(u32::try_from(self.ids.len()).unwrap_or(u32::MAX))
    }

    /// Whether a session of this shape can go on with the state.
    pub(crate) fn fits(&self, shape: &SessionShape) -> bool {
        let ours = &self.shape;
        (&ours.boundaries, ours.encoding) == (&shape.boundaries, shape.encoding)
            && (ours.drafting || !shape.drafting)
            && ours.positions >= shape.positions
            && ours.reach >= shape.reach
    }
}

/// The sessions that wait.
#[derive(Default)]
pub(super) struct Shelf {
    sessions: BTreeMap<SessionId, (Shelved, Instant)>,
}

impl Shelf {
    pub(super) fn put(&mut self, id: SessionId, session: Shelved, now: Instant) {
        self.sessions.insert(id, (session, now + KEPT_FOR));
    }

    pub(super) fn take(&mut self, id: SessionId) -> Option<Shelved> {
        self.sessions.remove(&id).map(|(session, _)| session)
    }

    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// The session that has waited longest, to make room.
    pub(super) fn oldest(&self) -> Option<SessionId> {
        self.sessions.iter().min_by_key(|(_, (_, until))| *until).map(|(id, _)| *id)
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.sessions.values().map(|(_, until)| *until).min()
    }

    /// Sessions whose time is over; they are still to be taken.
    pub(super) fn expired(&self, now: Instant) -> Vec<SessionId> {
        self.sessions.iter().filter(|(_, (_, until))| *until <= now).map(|(id, _)| *id).collect()
    }
}
