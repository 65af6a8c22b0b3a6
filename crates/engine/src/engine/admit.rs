//! What every engine refuses before anything is computed, and how it cuts chunks into waves: the same words
//! and the same rows on every device.

use super::{Chunk, EngineError, EngineFacts, OpenError, SessionShape};
use crate::ids::{Position, SessionId};

/// How far a session has come on an engine.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// What it was opened with.
    pub shape: &'a SessionShape,
    /// Next position to compute.
    pub next: usize,
    /// Positions that its state reaches back.
    pub reach: usize,
}

/// Consecutive rows of a chunk in a wave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Which chunk of the batch.
    pub chunk: usize,
    /// Its first token.
    pub from: usize,
    /// Its tokens.
    pub len: usize,
    /// Nothing more goes into this wave.
    ends_wave: bool,
}

fn wide(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn position(pos: usize) -> Position {
    Position(u32::try_from(pos).unwrap_or(u32::MAX))
}

/// Refuses a session that can't be opened, whatever memory there is; `open`: it is open already.
///
/// # Errors
/// [`OpenError`] with what came and what is possible.
pub fn session(facts: &EngineFacts, (session, open): (SessionId, bool), shape: &SessionShape) -> Result<(), OpenError> {
    if open {
        return Err(OpenError::AlreadyOpen { session });
    }
    let limit = facts.max_context;
    if shape.positions > limit {
        return Err(OpenError::TooLong { asked: shape.positions, limit });
    }
    let last = facts.layers.saturating_sub(1);
    if let Some(&got) = shape.boundaries.iter().find(|&&layer| layer == 0 || layer > last) {
        return Err(OpenError::Boundary { got, last });
    }
    if shape.drafting && facts.is_tail() && facts.draft_block == 0 {
        return Err(OpenError::NoDrafter { range: facts.range });
    }
    Ok(())
}

/// Refuses the chunk at `at` of a batch, whose session has come so far.
///
/// # Errors
/// [`EngineError`] with what came and what is possible.
pub fn chunk(facts: &EngineFacts, batch: &[Chunk<'_>], at: usize, progress: Progress<'_>) -> Result<(), EngineError> {
    let (chunk, Progress { shape, next, reach }) = (&batch[at], progress);
    let session = chunk.session;
    if batch[..at].iter().any(|other| other.session == session) {
        return Err(EngineError::Twice { session });
    }
    let expected = if facts.is_head() { 0 } else { chunk.ids.len() * facts.hc * facts.dim };
    let got = chunk.hidden.map_or(0, <[_]>::len);
    if chunk.ids.is_empty() || got != expected || chunk.hidden.is_some() == facts.is_head() {
        return Err(EngineError::Shape { ids: chunk.ids.len(), got, expected });
    }
    let (pos, len, end) = (wide(chunk.pos.0), chunk.ids.len(), wide(shape.positions));
    if pos > next || pos + len > end {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        return Err(EngineError::Range { pos: chunk.pos, len, next: position(next), end: position(end) });
    }
    if pos + reach < next {
        return Err(EngineError::Reach { pos: chunk.pos, next: position(next), reach: shape.reach });
    }
    let vocab = facts.vocab;
    match chunk.ids.iter().position(|id| wide(id.0) >= vocab) {
        Some(k) => Err(EngineError::Token { pos: position(pos + k), got: chunk.ids[k], vocab }),
        None => Ok(()),
    }
}

/// Cuts chunks of so many tokens, in runs of at most so many each, into waves of at most `rows` rows. A chunk
/// of which more is to come ends its wave: its next run builds on this one.
///
/// # Errors
/// The first one among the chunks.
pub fn cut<E>(chunks: impl Iterator<Item = Result<(usize, usize), E>>, rows: usize) -> Result<Vec<Run>, E> {
    let (mut runs, mut filled) = (Vec::new(), 0);
    for (chunk, sizes) in chunks.enumerate() {
        let (tokens, most) = sizes?;
        let mut from = 0;
        while from < tokens {
            let len = (tokens - from).min(most.max(1)).min(rows - filled);
            filled += len;
            let ends_wave = filled == rows || from + len < tokens;
            runs.push(Run { chunk, from, len, ends_wave });
            if ends_wave {
                filled = 0;
            }
            from += len;
        }
    }
    Ok(runs)
}

/// The waves of what was cut, in order.
pub fn waves(runs: &[Run]) -> impl Iterator<Item = &[Run]> {
    runs.chunk_by(|before, _| !before.ends_wave)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_that_is_cut_ends_its_wave_and_whole_ones_share_one() {
        let sizes = [(2, 9), (7, 3), (1, 9), (8, 9), (1, 9)];
        let runs = cut(sizes.into_iter().map(Ok::<_, ()>), 8).unwrap();
        let waves: Vec<Vec<(usize, usize, usize)>> =
            waves(&runs).map(|wave| wave.iter().map(|run| (run.chunk, run.from, run.len)).collect()).collect();
        let expected: [&[(usize, usize, usize)]; 5] =
            [&[(0, 0, 2), (1, 0, 3)], &[(1, 3, 3)], &[(1, 6, 1), (2, 0, 1), (3, 0, 6)], &[(3, 6, 2), (4, 0, 1)], &[]];
        assert_eq!(waves, expected[..4]);
        assert_eq!(cut([Ok((1, 1)), Err("no such session")].into_iter(), 8), Err("no such session"));
    }
}
