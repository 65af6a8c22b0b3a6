//! Ways into an engine for tests: single layers, caches, picks, and stale state turned into NaN.
//!
//! Not part of the interface; nothing here changes what a pass computes.

use half::bf16;

pub use super::compress::Pool;
use super::pass::{Parts, Row};
use super::state::{CompressorState, Ring, SessionState, to_usize};
use super::{CpuEngine, drafter, layer as layers, tail};
use crate::engine::Drafts;
use crate::ids::{Position, SessionId, TokenId};
use crate::model::config::OVERLAP_RATIO;

/// What one layer or draft stage made of some rows.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// Attention's result, `[s, dim]`.
    pub attn_out: Vec<bf16>,
    /// The experts' result, `[s, dim]`.
    pub ffn_out: Vec<bf16>,
    /// Hidden state behind the layer, `[s, hc, dim]`.
    pub out: Vec<bf16>,
    /// Experts, ascending, `[s, k]`.
    pub experts: Vec<u16>,
    /// Their weights.
    pub weights: Vec<f32>,
    /// Routing scores, with the bias where there is one, `[s, experts]`.
    pub gate: Vec<f32>,
    /// Slots attended to, ascending; every visible one where the indexer had no choice.
    pub picks: Vec<Vec<u32>>,
    /// The indexer's scores of the last row that had a choice.
    pub index_scores: Vec<f32>,
}

fn index(engine: &CpuEngine, session: SessionId) -> usize {
    engine.slot(session).expect("the session is open")
}

fn state(engine: &CpuEngine, session: SessionId) -> &SessionState {
    engine.state(index(engine, session)).expect("the session is open")
}

fn place(engine: &CpuEngine, layer: u16) -> usize {
    usize::from(layer - engine.facts.range.lo())
}

/// Copies embeddings to all streams: `[s, hc, dim]`.
pub fn embed(engine: &mut CpuEngine, ids: &[TokenId]) -> Vec<bf16> {
    let (hc, dim) = (engine.config.hc, engine.config.dim);
    let parts = engine.parts();
    let mut hidden = Vec::new();
    for id in ids {
        for _ in 0..hc {
            hidden.extend_from_slice(parts.weights.embedding(to_usize(id.0), dim));
        }
    }
    hidden
}

fn set(parts: &mut Parts<'_>, slot: usize, pos: Position, ids: &[TokenId], hidden: &[bf16]) {
    let row = |(k, id): (usize, &TokenId)| Row { slot, pos: to_usize(pos.0) + k, id: to_usize(id.0) };
    parts.scratch.rows.clear();
    parts.scratch.rows.extend(ids.iter().enumerate().map(row));
    parts.scratch.hidden.clear();
    parts.scratch.hidden.extend_from_slice(hidden);
}

/// Runs one layer on given hidden states, storing its state in the session; `next` does not move.
pub fn layer(
    engine: &mut CpuEngine,
    session: SessionId,
    layer: u16,
    pos: Position,
    ids: &[TokenId],
    hidden: &[bf16],
) -> Trace {
    let slot = index(engine, session);
    let ratio = engine.config.ratio(layer);
    let mut parts = engine.parts();
    set(&mut parts, slot, pos, ids, hidden);
    layers::attend(&mut parts, layer);
    let mut trace = Trace { attn_out: parts.scratch.layer.y.clone(), ..Trace::default() };
    let picks = &parts.scratch.layer.attn.picks;
    let pick = |(k, of): (usize, &Option<std::ops::Range<usize>>)| match of {
        Some(of) => picks.slots[of.clone()].to_vec(),
        None if ratio == OVERLAP_RATIO => (0..(pos.0 + u32::try_from(k).unwrap_or(0) + 1) / 4).collect(),
        None => Vec::new(),
    };
    trace.picks = picks.rows.iter().enumerate().map(pick).collect();
    trace.index_scores.clone_from(&picks.scores);
    layers::feed_forward(&mut parts, layer);
    finish(&parts, trace)
}

fn finish(parts: &Parts<'_>, mut trace: Trace) -> Trace {
    let s = &parts.scratch.layer;
    trace.ffn_out.clone_from(&s.y);
    trace.out.clone_from(&parts.scratch.hidden);
    trace.experts.clone_from(&s.experts.picks);
    trace.weights.clone_from(&s.experts.weights);
    trace.gate.clone_from(&s.experts.biased);
    trace
}

/// A layer's window row of a position.
#[must_use]
pub fn window(engine: &CpuEngine, session: SessionId, layer: u16, pos: Position) -> Vec<bf16> {
    state(engine, session).layers[place(engine, layer)].window.row(to_usize(pos.0)).to_vec()
}

fn pool(engine: &CpuEngine, session: SessionId, layer: u16, pool: Pool) -> &CompressorState {
    let layer = &state(engine, session).layers[place(engine, layer)];
    let state = match pool {
        Pool::Attention => &layer.compressor,
        Pool::Indexer => &layer.indexer,
    };
    state.as_ref().expect("the layer has this compressor")
}

/// A finished slot.
#[must_use]
pub fn slot(engine: &CpuEngine, session: SessionId, layer: u16, which: Pool, j: usize) -> Vec<bf16> {
    let width = match which {
        Pool::Attention => engine.config.head_dim,
        Pool::Indexer => engine.config.index_dim,
    };
    pool(engine, session, layer, which).slot(j, width).to_vec()
}

/// A position's raw values and scores.
#[must_use]
pub fn raw(engine: &CpuEngine, session: SessionId, layer: u16, which: Pool, pos: Position) -> (Vec<f32>, Vec<f32>) {
    let state = pool(engine, session, layer, which);
    let pos = to_usize(pos.0);
    (state.kv.row(pos).to_vec(), state.score.row(pos).to_vec())
}

/// A draft stage's window row of a position.
#[must_use]
pub fn draft_window(engine: &CpuEngine, session: SessionId, stage: usize, pos: Position) -> Vec<bf16> {
    state(engine, session).draft[stage].row(to_usize(pos.0)).to_vec()
}

/// Stream means, `[s, dim]`.
pub fn tap(engine: &mut CpuEngine, hidden: &[bf16]) -> Vec<bf16> {
    let (width, dim) = (engine.config.hc * engine.config.dim, engine.config.dim);
    let mut taps = vec![bf16::ZERO; hidden.len() / engine.config.hc];
    for (tap, hidden) in taps.chunks_exact_mut(dim).zip(hidden.chunks_exact(width)) {
        super::kernel::hyper::mean(engine.isa, hidden, tap);
    }
    taps
}

/// The end of the residual streams, `[s, dim]`.
pub fn hc_head(engine: &mut CpuEngine, hidden: &[bf16]) -> Vec<bf16> {
    let mut parts = engine.parts();
    let s = &mut parts.scratch.head;
    s.hidden.clear();
    s.hidden.extend_from_slice(hidden);
    let tail = parts.weights.tail.as_ref().expect("a tail");
    tail::close(&mut parts.ctx, &tail.hc_head, s);
    s.y.clone()
}

/// Final norm and logits of rows behind [`hc_head`].
pub fn logits(engine: &mut CpuEngine, y: &[bf16]) -> (Vec<bf16>, Vec<f32>) {
    let mut parts = engine.parts();
    let s = &mut parts.scratch.head;
    s.y.clear();
    s.y.extend_from_slice(y);
    let tail = parts.weights.tail.as_ref().expect("a tail");
    tail::logits(&mut parts.ctx, &tail.norm, &tail.head, s);
    (s.norm.clone(), s.logits.clone())
}

/// Fills the draft windows from taps `[s, targets · dim]`; gives `main_x`.
pub fn draft_windows(engine: &mut CpuEngine, session: SessionId, pos: Position, taps: &[bf16]) -> Vec<bf16> {
    let slot = index(engine, session);
    let targets = engine.config.draft.as_ref().expect("a drafter").targets.len();
    let ids = vec![TokenId(0); taps.len() / (targets * engine.config.dim)];
    let mut parts = engine.parts();
    set(&mut parts, slot, pos, &ids, &[]);
    parts.scratch.taps.clear();
    parts.scratch.taps.extend_from_slice(taps);
    drafter::take_in(&mut parts);
    parts.scratch.draft.main_x.clone()
}

/// The input of a draft block, `[block, hc, dim]`.
pub fn block_input(engine: &mut CpuEngine, anchor: TokenId) -> Vec<bf16> {
    let block = to_usize(engine.facts.draft_block);
    let mut parts = engine.parts();
    drafter::block_input(&mut parts, 0, 0, (to_usize(anchor.0), block));
    parts.scratch.hidden.clone()
}

/// Runs one draft stage behind position `at` on given hidden states.
pub fn draft_stage(engine: &mut CpuEngine, session: SessionId, stage: usize, at: Position, hidden: &[bf16]) -> Trace {
    let slot = index(engine, session);
    let ids = vec![TokenId(0); hidden.len() / (engine.config.hc * engine.config.dim)];
    let mut parts = engine.parts();
    set(&mut parts, slot, at.plus(1), &ids, hidden);
    let drafter = parts.weights.drafter.as_ref().expect("a drafter");
    drafter::attend(&mut parts, drafter, stage, to_usize(at.0));
    let trace = Trace { attn_out: parts.scratch.layer.y.clone(), ..Trace::default() };
    drafter::feed_forward(&mut parts, drafter, stage);
    finish(&parts, trace)
}

/// Ends a block: `hc_head` output, biased logits, drafts.
pub fn draft_head(engine: &mut CpuEngine, hidden: &[bf16], anchor: TokenId) -> (Vec<bf16>, Vec<f32>, Drafts) {
    let mut parts = engine.parts();
    parts.scratch.hidden.clear();
    parts.scratch.hidden.extend_from_slice(hidden);
    let drafter = parts.weights.drafter.as_ref().expect("a drafter");
    let drafts = drafter::propose(&mut parts, drafter, to_usize(anchor.0));
    let s = &parts.scratch.head;
    (s.y.clone(), s.logits.clone(), drafts)
}

/// Writes NaN over all state that a pass from `pos` on must not read before it rewrites it.
pub fn poison(engine: &mut CpuEngine, session: SessionId, pos: Position) {
    let slot = index(engine, session);
    let pos = to_usize(pos.0);
    let (window, range) = (engine.config.window, engine.facts.range);
    let config = engine.config.clone();
    let state = engine.sessions[slot].as_mut().expect("the session is open");
    let seen = pos.saturating_sub(window - 1)..pos;
    for ring in &mut state.draft {
        keep(ring, seen.clone(), bf16::NAN);
    }
    for (layer, state) in range.layers().zip(&mut state.layers) {
        keep(&mut state.window, seen.clone(), bf16::NAN);
        let ratio = config.ratio(layer);
        for (pool, width) in [(&mut state.compressor, config.head_dim), (&mut state.indexer, config.index_dim)] {
            let Some(pool) = pool else { continue };
            let block = pos / ratio * ratio;
            let first = if ratio == OVERLAP_RATIO { block.saturating_sub(ratio) } else { block };
            keep(&mut pool.kv, first..pos, f32::NAN);
            keep(&mut pool.score, first..pos, f32::NAN);
            let finished = (pos / ratio * width).min(pool.slots.len());
            pool.slots[finished..].fill(bf16::NAN);
        }
    }
}

/// Overwrites all rows but those of some positions.
fn keep<T: Copy>(ring: &mut Ring<T>, positions: std::ops::Range<usize>, with: T) {
    let kept: Vec<Vec<T>> = positions.clone().map(|pos| ring.row(pos).to_vec()).collect();
    ring.fill(with);
    for (pos, row) in positions.zip(kept) {
        ring.row_mut(pos).copy_from_slice(&row);
    }
}
