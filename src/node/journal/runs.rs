//! Consecutive positions in memory, each run of them a slice of the frame that brought it.
//!
//! A slice keeps its whole buffer alive. So whenever a part of a run goes, what stays of it is copied,
//! in pieces small enough that a run is copied at most once and one piece after that.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::ids::TokenId;

/// Size of the pieces that what stays of a run is copied to.
const PIECE_BYTES: usize = 128 << 10;

/// What keeping a position costs besides its payload, in bytes: id, slice, and its part of a buffer's head.
const POSITION_COST: u64 = 128;

/// Consecutive positions that came together.
#[derive(Debug)]
struct Run {
    pos: u32,
    len: u32,
    payload: Bytes,
}

impl Run {
    fn end(&self) -> u32 {
        self.pos + self.len
    }

    /// The bytes of the positions from `from` (in the run) up to `to` (in it, or its end).
    fn slice(&self, from: u32, to: u32, position_bytes: usize) -> std::ops::Range<usize> {
        (from - self.pos) as usize * position_bytes..(to - self.pos) as usize * position_bytes
    }
}

/// Consecutive positions.
#[derive(Debug)]
pub(crate) struct Runs {
    position_bytes: usize,
    /// Of the first id; the position to come where there is none.
    first: u32,
    ids: VecDeque<TokenId>,
    runs: VecDeque<Run>,
}

/// What a position costs in memory, in bytes.
pub(crate) fn cost(position_bytes: usize) -> u64 {
    position_bytes as u64 + POSITION_COST
}

impl Runs {
    pub(crate) fn new(position_bytes: usize) -> Self {
        Self { position_bytes, first: 0, ids: VecDeque::new(), runs: VecDeque::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    pub(crate) fn first(&self) -> u32 {
        self.first
    }

    pub(crate) fn end(&self) -> u32 {
        self.first + self.ids.len() as u32
    }

    /// End of the first run.
    pub(crate) fn front_end(&self) -> Option<u32> {
        self.runs.front().map(Run::end)
    }

    /// What all positions cost, in bytes.
    pub(crate) fn held(&self) -> u64 {
        self.ids.len() as u64 * cost(self.position_bytes)
    }

    pub(crate) fn clear(&mut self) {
        self.ids.clear();
        self.runs.clear();
    }

    /// Adds positions at the end, which `pos` is unless there are none.
    pub(crate) fn push(&mut self, pos: u32, ids: &[TokenId], payload: Bytes) {
        debug_assert!(self.is_empty() || pos == self.end(), "a hole in front of {pos}");
        debug_assert_eq!(payload.len(), ids.len() * self.position_bytes);
        if self.is_empty() {
            self.first = pos;
        }
        self.ids.extend(ids);
        self.runs.push_back(Run { pos, len: ids.len() as u32, payload });
    }

    /// Drops the positions at or above `end`.
    pub(crate) fn truncate(&mut self, end: u32) {
        while self.runs.back().is_some_and(|run| run.pos >= end) {
            self.runs.pop_back();
        }
        if let Some(run) = self.runs.pop_back_if(|run| run.end() > end) {
            let pieces = self.copies(&run, run.pos, end);
            self.runs.extend(pieces);
        }
        self.ids.truncate(end.saturating_sub(self.first) as usize);
    }

    /// Drops the positions below `from`.
    pub(crate) fn drop_below(&mut self, from: u32) {
        self.drop_runs_below(from);
        if let Some(run) = self.runs.pop_front_if(|run| run.pos < from) {
            for piece in self.copies(&run, from, run.end()).into_iter().rev() {
                self.runs.push_front(piece);
            }
        }
        self.forget_ids(from);
    }

    /// Drops the runs that lie below `from` as a whole.
    pub(crate) fn drop_runs_below(&mut self, from: u32) {
        while self.runs.front().is_some_and(|run| run.end() <= from) {
            self.runs.pop_front();
        }
        self.forget_ids(self.runs.front().map_or_else(|| from.min(self.end()), |run| run.pos));
    }

    fn forget_ids(&mut self, from: u32) {
        let gone = from.clamp(self.first, self.end()) - self.first;
        self.ids.drain(..gone as usize);
        self.first += gone;
    }

    /// A part of a run in buffers of its own.
    fn copies(&self, run: &Run, from: u32, to: u32) -> Vec<Run> {
        let most = (PIECE_BYTES / self.position_bytes.max(1)).max(1) as u32;
        let mut pieces = Vec::new();
        let mut pos = from;
        while pos < to {
            let len = most.min(to - pos);
            let payload = Bytes::copy_from_slice(&run.payload[run.slice(pos, pos + len, self.position_bytes)]);
            pieces.push(Run { pos, len, payload });
            pos += len;
        }
        pieces
    }

    /// The runs' parts within `from..to`, which are held.
    fn parts(&self, from: u32, to: u32) -> impl Iterator<Item = (&Run, u32, u32)> {
        let at = self.runs.partition_point(|run| run.end() <= from);
        self.runs.range(at..).take_while(move |run| run.pos < to).map(move |run| {
            let end = run.end().min(to);
            (run, run.pos.max(from).min(end), end)
        })
    }

    /// Token ids of the positions `from..to`, which are held.
    pub(crate) fn ids(&self, from: u32, to: u32) -> Vec<TokenId> {
        self.ids.range((from - self.first) as usize..(to - self.first) as usize).copied().collect()
    }

    /// The bytes of the positions `from..to`, which are held: a slice where they came together.
    pub(crate) fn payload(&self, from: u32, to: u32) -> Bytes {
        let mut parts = self.parts(from, to);
        if let (Some((run, from, to)), None) = (parts.next(), parts.next()) {
            return run.payload.slice(run.slice(from, to, self.position_bytes));
        }
        let mut bytes = Vec::with_capacity((to - from) as usize * self.position_bytes);
        for (run, from, to) in self.parts(from, to) {
            bytes.extend_from_slice(&run.payload[run.slice(from, to, self.position_bytes)]);
        }
        Bytes::from(bytes)
    }

    /// Position, token id and bytes of each of `from..to`, which are held.
    pub(crate) fn positions(&self, from: u32, to: u32) -> impl Iterator<Item = (u32, TokenId, &[u8])> {
        self.parts(from, to).flat_map(move |(run, from, to)| (from..to).map(move |pos| (run, pos))).map(|(run, pos)| {
            let bytes = &run.payload[run.slice(pos, pos + 1, self.position_bytes)];
            (pos, self.ids[(pos - self.first) as usize], bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts the buffers that live.
    struct Counted {
        bytes: Vec<u8>,
        alive: Arc<AtomicUsize>,
    }

    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.alive.fetch_sub(1, Ordering::Relaxed);
        }
    }

    const EACH: usize = 1 << 10;

    fn counted(len: u32, alive: &Arc<AtomicUsize>) -> (Vec<TokenId>, Bytes) {
        alive.fetch_add(1, Ordering::Relaxed);
        let bytes = (0..len as usize * EACH).map(|i| (i / EACH * 7 + i) as u8).collect();
        let owner = Counted { bytes, alive: Arc::clone(alive) };
        ((0..len).map(TokenId).collect(), Bytes::from_owner(owner))
    }

    #[test]
    fn what_is_recorded_is_not_copied() {
        let alive = Arc::default();
        let mut runs = Runs::new(EACH);
        let (ids, payload) = counted(8, &alive);
        runs.push(3, &ids, payload.clone());
        assert_eq!(runs.payload(3, 11).as_ptr(), payload.as_ptr());
        assert_eq!(runs.payload(5, 7).as_ptr(), payload[2 * EACH..].as_ptr());
    }

    #[test]
    fn a_part_that_stays_lets_the_buffer_of_the_whole_go() {
        for (below, end) in [(0, 1), (999, 1000), (400, 401), (1, 1000), (0, 999), (300, 700)] {
            let alive = Arc::default();
            let mut runs = Runs::new(EACH);
            let (ids, payload) = counted(1000, &alive);
            let expected = payload[below * EACH..end * EACH].to_vec();
            runs.push(0, &ids, payload);
            runs.truncate(end as u32);
            runs.drop_below(below as u32);
            assert_eq!(alive.load(Ordering::Relaxed), 0, "{below}..{end}");
            assert_eq!((runs.first(), runs.end()), (below as u32, end as u32));
            assert_eq!(runs.payload(below as u32, end as u32), expected);
            assert!(runs.runs.iter().all(|run| run.payload.len() <= PIECE_BYTES));
        }
    }

    #[test]
    fn positions_without_bytes_are_kept_too() {
        let mut runs = Runs::new(0);
        runs.push(5, &[TokenId(1), TokenId(2), TokenId(3)], Bytes::new());
        runs.push(8, &[TokenId(4)], Bytes::new());
        runs.drop_below(6);
        runs.truncate(8);
        let all: Vec<_> = runs.positions(6, 8).collect();
        assert_eq!(all, [(6, TokenId(2), &[][..]), (7, TokenId(3), &[][..])]);
        assert_eq!(runs.payload(6, 8), Bytes::new());
    }

    #[test]
    fn whole_runs_go_without_a_copy() {
        let alive = Arc::default();
        let mut runs = Runs::new(EACH);
        let (ids, payload) = counted(4, &alive);
        runs.push(0, &ids, payload);
        let (ids, payload) = counted(4, &alive);
        let second = payload.as_ptr();
        runs.push(4, &ids, payload);
        runs.drop_runs_below(3);
        assert_eq!((runs.first(), runs.end(), alive.load(Ordering::Relaxed)), (0, 8, 2));
        runs.drop_runs_below(4);
        assert_eq!((runs.first(), runs.end(), alive.load(Ordering::Relaxed)), (4, 8, 1));
        runs.drop_runs_below(6);
        assert_eq!(runs.payload(4, 8).as_ptr(), second);
    }
}
