//! DSpark on the tail: windows fed by the target's taps, and blocks drafted from them.
//!
//! Owns when a block can be drafted. Drafting stores nothing: a block's own keys live in scratch.

use half::bf16;

use super::kernel::attend::{Keys, Slots};
use super::kernel::linear::Rows;
use super::kernel::select::argmax;
use super::kernel::vector::rms_norm;
use super::load::{DrafterWeights, Weights};
use super::ops::sized;
use super::pass::{Parts, Row};
use super::scratch::Scratch;
use super::state::to_usize;
use super::{CpuEngine, attention, experts, layer, position, tail};
use crate::engine::{Drafts, EngineError};
use crate::ids::{Position, SessionId, TokenId};

/// Moves the draft windows of a wave's sessions on, from the wave's taps.
pub(super) fn take_in(parts: &mut Parts<'_>) {
    let Some(drafter) = &parts.weights.drafter else { return };
    let drafting = |row: &Row| parts.sessions[row.slot].as_ref().is_some_and(|state| !state.draft.is_empty());
    if parts.scratch.rows.iter().any(drafting) {
        project(parts, drafter);
        store(parts, drafter);
    }
}

/// `main_x = main_norm(main_proj(taps))` of all rows.
pub(super) fn project(parts: &mut Parts<'_>, drafter: &DrafterWeights) {
    let (isa, config) = (parts.ctx.isa, parts.ctx.config);
    let Scratch { rows, taps, draft, .. } = &mut *parts.scratch;
    let width = taps.len() / rows.len();
    draft.tap_codes.quantize(isa, taps, width);
    parts.ctx.linear(&drafter.main_proj, &draft.tap_codes, &mut draft.projected);
    let main_x = sized(&mut draft.main_x, draft.projected.len());
    rms_norm(isa, &draft.projected, &drafter.main_norm, config.norm_eps, main_x);
}

/// Every stage's key of every row, into its window.
pub(super) fn store(parts: &mut Parts<'_>, drafter: &DrafterWeights) {
    let (isa, config) = (parts.ctx.isa, parts.ctx.config);
    let Scratch { rows, layer, draft, .. } = &mut *parts.scratch;
    layer.codes.quantize(isa, &draft.main_x, config.dim);
    for (stage, weights) in drafter.stages.iter().enumerate() {
        attention::keys(&mut parts.ctx, &weights.attn, &parts.weights.plain, rows, layer);
        for (row, kv) in rows.iter().zip(layer.attn.kv.chunks_exact(config.head_dim)) {
            if let Some(window) = Parts::state(parts.sessions, row.slot).draft.get_mut(stage) {
                window.row_mut(row.pos).copy_from_slice(kv);
            }
        }
    }
}

/// The block's rows behind position `at`, and their embeddings in all streams.
pub(super) fn block_input(parts: &mut Parts<'_>, slot: usize, at: usize, (anchor, block): (usize, usize)) {
    let config = parts.ctx.config;
    let noise = config.draft.as_ref().map_or(0, |draft| to_usize(draft.noise));
    let scratch = &mut *parts.scratch;
    scratch.rows.clear();
    let id = |k| if k == 0 { anchor } else { noise };
    scratch.rows.extend((0..block).map(|k| Row { slot, pos: at + 1 + k, id: id(k) }));
    sized::<bf16>(&mut scratch.hidden, block * config.hc * config.dim);
    super::pass::embed(parts);
}

/// The attention half of a draft stage: the window up to `at` in full, then all rows of the block.
pub(super) fn attend(parts: &mut Parts<'_>, drafter: &DrafterWeights, stage: usize, at: usize) {
    let config = parts.ctx.config;
    let weights = &drafter.stages[stage];
    let table = &parts.weights.plain;
    let Scratch { rows, hidden, layer: s, .. } = &mut *parts.scratch;
    let Some(row) = rows.first() else { return };
    let window = &Parts::state(parts.sessions, row.slot).draft[stage];
    layer::enter(&mut parts.ctx, &weights.hc_attn, &weights.attn_norm, hidden, s);
    attention::queries(&mut parts.ctx, &weights.attn, table, rows, s);
    attention::keys(&mut parts.ctx, &weights.attn, table, rows, s);
    let a = &mut s.attn;
    let keys = Keys {
        window: attention::window(window, at, config.window),
        window_size: config.window,
        compressed: &[],
        slots: Slots::All(0),
        block: &a.kv,
    };
    let q = (a.q.as_slice(), weights.attn.sink.as_slice(), rows.len());
    let o = sized(&mut a.o, a.q.len());
    attention::attend_all(parts.ctx.pool, parts.ctx.isa, q, &|_| keys, (&mut a.attend, o));
    attention::output(&mut parts.ctx, &weights.attn, table, rows, s);
    layer::leave(&mut parts.ctx, hidden, s);
}

/// The expert half of a draft stage.
pub(super) fn feed_forward(parts: &mut Parts<'_>, drafter: &DrafterWeights, stage: usize) {
    let weights = &drafter.stages[stage];
    let Scratch { rows, hidden, layer: s, .. } = &mut *parts.scratch;
    layer::enter(&mut parts.ctx, &weights.hc_ffn, &weights.ffn_norm, hidden, s);
    let input = (s.x_wide.as_slice(), &s.codes);
    experts::experts(&mut parts.ctx, &weights.ffn, rows, input, &mut s.experts, &mut s.y);
    layer::leave(&mut parts.ctx, hidden, s);
}

/// Ends the block: logits with the Markov head's bias, one token after the other.
pub(super) fn propose(parts: &mut Parts<'_>, drafter: &DrafterWeights, anchor: usize) -> Drafts {
    let Weights { tail: Some(target), .. } = parts.weights else {
        return Drafts { tokens: vec![], confidence: vec![] };
    };
    let Scratch { hidden, head: s, draft, .. } = &mut *parts.scratch;
    s.hidden.clear();
    s.hidden.extend_from_slice(hidden);
    tail::close(&mut parts.ctx, &drafter.hc_head, s);
    tail::logits(&mut parts.ctx, &drafter.norm, &target.head, s);
    let (dim, vocab) = (parts.ctx.config.dim, parts.ctx.config.vocab);
    let rank = drafter.markov_out.k();
    let block = s.y.len() / dim;
    let mut drafts = Drafts { tokens: Vec::with_capacity(block), confidence: Vec::with_capacity(block) };
    let mut previous = anchor;
    for k in 0..block {
        let markov = &drafter.markov_in[previous * rank..(previous + 1) * rank];
        draft.markov.clear();
        draft.markov.extend(markov.iter().map(|value| value.to_f32()));
        parts.ctx.wide(&drafter.markov_out, Rows::new(&draft.markov, 1), &mut draft.bias);
        let logits = &mut s.logits[k * vocab..(k + 1) * vocab];
        for (logit, bias) in logits.iter_mut().zip(&draft.bias) {
            *logit += bias;
        }
        draft.confidence_in.clear();
        draft.confidence_in.extend(s.y[k * dim..(k + 1) * dim].iter().map(|value| value.to_f32()));
        draft.confidence_in.extend_from_slice(&draft.markov);
        parts.ctx.wide(&drafter.confidence, Rows::new(&draft.confidence_in, 1), &mut draft.confidence);
        drafts.confidence.push(draft.confidence[0]);
        previous = argmax(logits);
        drafts.tokens.push(TokenId(u32::try_from(previous).unwrap_or(u32::MAX)));
    }
    drafts
}

impl CpuEngine {
    /// Drafts a block behind position `at`, whose next token is `anchor`.
    pub(super) fn draft_block(
        &mut self,
        session: SessionId,
        at: Position,
        anchor: TokenId,
    ) -> Result<Drafts, EngineError> {
        let slot = self.slot(session)?;
        let (block, range, vocab) = (to_usize(self.facts.draft_block), self.facts.range, self.config.vocab);
        let state = self.state(slot).ok_or(EngineError::NotOpen { session })?;
        let (pos, anchor_id) = (to_usize(at.0), to_usize(anchor.0));
        let refuse = |why| Err(EngineError::Draft { pos: at, why });
        if block == 0 || state.draft.is_empty() {
            return refuse("the session was opened without drafting, or this stage has no drafter");
        }
        if pos >= state.next {
            return refuse("the position is not computed yet");
        }
        if pos + state.reach + 1 < state.next {
            return refuse("the position lies further back than the session's reach");
        }
        if anchor_id >= vocab {
            return Err(EngineError::Token { pos: at.plus(1), got: anchor, vocab });
        }
        let mut parts = self.parts();
        let Some(drafter) = &parts.weights.drafter else { return refuse("this stage has no drafter") };
        block_input(&mut parts, slot, pos, (anchor_id, block));
        for stage in 0..drafter.stages.len() {
            attend(&mut parts, drafter, stage, pos);
            feed_forward(&mut parts, drafter, stage);
        }
        let drafts = propose(&mut parts, drafter, anchor_id);
        if parts.scratch.head.logits.iter().chain(&drafts.confidence).all(|value| value.is_finite()) {
            Ok(drafts)
        } else {
            Err(EngineError::NotFinite { range, pos: position(pos) })
        }
    }
}
