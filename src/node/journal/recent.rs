//! The last inputs of a session: what its predecessor's outputs must equal after a rebuild.

use bytes::Bytes;

use crate::ids::{Position, TokenId};
use crate::node::journal::digest::position_digest;
use crate::node::journal::runs::Runs;

/// The last positions that a stage took in, newest epoch.
///
/// Memory: `capacity` positions and the rest of the oldest frame among them. Nothing is hashed until
/// digests are asked for.
pub struct Recent {
    capacity: u32,
    tag: u8,
    position_bytes: usize,
    runs: Runs,
}

impl Recent {
    /// Keeps the last `capacity` positions; `tag` is that of their encoding.
    #[must_use]
    pub fn new(capacity: u32, tag: u8) -> Self {
        Self { capacity, tag, position_bytes: 0, runs: Runs::new(0) }
    }

    /// Records inputs of the positions `pos..pos + ids.len()`, `position_bytes` each. What was at or above
    /// `pos` is dropped; a hole in front of `pos` drops all.
    ///
    /// The payload is a reference to the frame's buffer. Returns whether the payload had the right size;
    /// with another one nothing is held afterwards.
    pub fn record(&mut self, pos: Position, ids: &[TokenId], payload: Bytes, position_bytes: usize) -> bool {
        if position_bytes != self.position_bytes {
            self.runs = Runs::new(position_bytes);
            self.position_bytes = position_bytes;
        }
        if payload.len() != ids.len() * position_bytes || !fits(pos, ids) {
            self.runs.clear();
            return false;
        }
        if pos.0 > self.runs.end() {
            self.runs.clear();
        }
        self.runs.truncate(pos.0);
        if !ids.is_empty() {
            self.runs.push(pos.0, ids, payload);
        }
        self.runs.drop_runs_below(self.runs.end().saturating_sub(self.capacity));
        true
    }

    /// Bytes in memory.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.runs.held()
    }

    /// The first position of which a digest can be had, and the digests from there on.
    #[must_use]
    pub fn digests(&self) -> (Position, Vec<[u8; 32]>) {
        let end = self.runs.end();
        let first = self.runs.first().max(end.saturating_sub(self.capacity));
        let digest = |(pos, id, wire): (u32, TokenId, &[u8])| position_digest(Position(pos), id, self.tag, wire);
        (Position(first), self.runs.positions(first, end).map(digest).collect())
    }
}

/// Whether the end of a frame is a position.
pub(crate) fn fits(pos: Position, ids: &[TokenId]) -> bool {
    u32::try_from(ids.len()).is_ok_and(|len| pos.0.checked_add(len).is_some())
}
