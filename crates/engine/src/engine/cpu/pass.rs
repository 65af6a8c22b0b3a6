//! One pass: chunks cut into waves of rows, each wave through all layers of the range.
//!
//! Owns the order of things in a pass and the check that nothing but numbers leaves it.

use half::bf16;

use super::load::Weights;
use super::ops::Ctx;
use super::scratch::Scratch;
use super::state::{SessionState, to_usize};
use super::{CpuEngine, layer, position, tail};
use crate::engine::admit::{self, Run};
use crate::engine::wire::Wire;
use crate::engine::{Chunk, EngineError, Output};
use crate::ids::WireEncoding;

/// Rows that go through a layer together. More would only cost scratch: weights are decoded once
/// for several rows at a time anyway.
pub(super) const WAVE_ROWS_MAX: usize = 64;

/// One position of one session in a wave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// The session's place in the engine.
    pub(super) slot: usize,
    /// Absolute position.
    pub(super) pos: usize,
    /// Token id, below the vocabulary.
    pub(super) id: usize,
}

/// A pass's parts, borrowed from the engine side by side.
pub(super) struct Parts<'a> {
    /// See [`Ctx`].
    pub(super) ctx: Ctx<'a>,
    /// Packed weights.
    pub(super) weights: &'a Weights,
    /// Buffers.
    pub(super) scratch: &'a mut Scratch,
    /// Sessions by slot.
    pub(super) sessions: &'a mut [Option<SessionState>],
}

impl Parts<'_> {
    /// The state behind a row.
    ///
    /// # Panics
    /// If the row's session is not open, which a checked chunk's always is.
    pub(super) fn state(sessions: &mut [Option<SessionState>], slot: usize) -> &mut SessionState {
        #[allow(clippy::expect_used, reason = "rows are made of checked chunks, whose sessions are open")]
        sessions[slot].as_mut().expect("a row's session is open")
    }
}

impl CpuEngine {
    pub(super) fn parts(&mut self) -> Parts<'_> {
        Parts {
            ctx: Ctx { config: &self.config, pool: &mut self.pool, isa: self.isa, range: self.facts.range },
            weights: &self.weights,
            scratch: &mut self.scratch,
            sessions: &mut self.sessions,
        }
    }

    /// Runs checked chunks.
    pub(super) fn run(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        out.hidden.clear();
        out.logits.clear();
        for chunk in batch {
            let slot = self.slot(chunk.session)?;
            // From here on nothing at or above the chunk counts until it is rewritten.
            Parts::state(&mut self.sessions, slot).next = to_usize(chunk.pos.0);
        }
        // Rings have room for `reach` rows ahead of what a row reads.
        let sizes = |chunk: &Chunk<'_>| {
            let session = chunk.session;
            let state = self.state(self.slot(session)?).ok_or(EngineError::NotOpen { session })?;
            Ok((chunk.ids.len(), state.reach))
        };
        let runs = admit::cut(batch.iter().map(sizes), WAVE_ROWS_MAX)?;
        for wave in admit::waves(&runs) {
            self.wave(batch, wave, out)?;
        }
        for chunk in batch {
            let slot = self.slot(chunk.session)?;
            Parts::state(&mut self.sessions, slot).next = to_usize(chunk.pos.0) + chunk.ids.len();
        }
        Ok(())
    }

    /// Runs one wave.
    fn wave(&mut self, batch: &[Chunk<'_>], wave: &[Run], out: &mut Output) -> Result<(), EngineError> {
        self.fill(batch, wave)?;
        let (head, is_tail) = (self.facts.is_head(), self.facts.is_tail());
        let mut parts = self.parts();
        if head {
            embed(&mut parts);
        }
        for layer in parts.ctx.range.layers() {
            if layer > parts.ctx.range.lo() {
                boundary(&mut parts, layer)?;
            }
            layer::forward(&mut parts, layer);
        }
        if is_tail {
            tail::finish(&mut parts, out)?;
        } else {
            finite(&parts)?;
            out.hidden.extend_from_slice(&parts.scratch.hidden);
        }
        Ok(())
    }

    /// Fills the scratch with a wave's rows and, past the head, their hidden states.
    fn fill(&mut self, batch: &[Chunk<'_>], wave: &[Run]) -> Result<(), EngineError> {
        let width = self.config.hc * self.config.dim;
        let scratch = &mut self.scratch;
        scratch.rows.clear();
        scratch.hidden.clear();
        scratch.logit_rows.clear();
        for run in wave {
            let chunk = &batch[run.chunk];
            let session = chunk.session;
            let slot = self.ids.get(&session).copied().ok_or(EngineError::NotOpen { session })?;
            for k in run.from..run.from + run.len {
                let pos = to_usize(chunk.pos.0) + k;
                if pos >= to_usize(chunk.logits_from.0) {
                    scratch.logit_rows.push(scratch.rows.len());
                }
                scratch.rows.push(Row { slot, pos, id: to_usize(chunk.ids[k].0) });
            }
            if let Some(hidden) = chunk.hidden {
                scratch.hidden.extend_from_slice(&hidden[run.from * width..(run.from + run.len) * width]);
            }
        }
        let rows = scratch.rows.len();
        scratch.hidden.resize(rows * width, bf16::ZERO);
        Ok(())
    }
}

/// Copies every row's embedding to all of its streams.
pub(super) fn embed(parts: &mut Parts<'_>) {
    let (hc, dim) = (parts.ctx.config.hc, parts.ctx.config.dim);
    let scratch = &mut *parts.scratch;
    for (row, hidden) in scratch.rows.iter().zip(scratch.hidden.chunks_exact_mut(hc * dim)) {
        let embedding = parts.weights.embedding(row.id, dim);
        for stream in hidden.chunks_exact_mut(dim) {
            stream.copy_from_slice(embedding);
        }
    }
}

/// Writes and reads back the rows whose session has a stage boundary in front of `layer`.
fn boundary(parts: &mut Parts<'_>, layer: u16) -> Result<(), EngineError> {
    let (hc, dim) = (parts.ctx.config.hc, parts.ctx.config.dim);
    let scratch = &mut *parts.scratch;
    for (row, hidden) in scratch.rows.iter().zip(scratch.hidden.chunks_exact_mut(hc * dim)) {
        let shape = &Parts::state(parts.sessions, row.slot).shape;
        if shape.encoding == WireEncoding::Bf16 || !shape.boundaries.contains(&layer) {
            continue;
        }
        let pos = position(row.pos);
        if Wire::new(shape.encoding, hc, dim).roundtrip(pos, hidden).is_err() {
            return Err(EngineError::NotFinite { range: parts.ctx.range, pos });
        }
    }
    Ok(())
}

/// Refuses a hidden state that holds anything but numbers.
pub(super) fn finite(parts: &Parts<'_>) -> Result<(), EngineError> {
    let width = parts.ctx.config.hc * parts.ctx.config.dim;
    for (row, hidden) in parts.scratch.rows.iter().zip(parts.scratch.hidden.chunks_exact(width)) {
        if !hidden.iter().all(|value| value.is_finite()) {
            return Err(EngineError::NotFinite { range: parts.ctx.range, pos: position(row.pos) });
        }
    }
    Ok(())
}
