//! Compressors: what a position leaves for pooling, and the slots that a last position finishes.

use super::kernel::compress::{Part, RingRows, compress};
use super::kernel::linear::Rows;
use super::kernel::quant::{KV_GROUP, act_quant_in_place, fp4_act_quant_in_place};
use super::kernel::rope::RopeTable;
use super::kernel::vector::{hadamard, narrow, rms_norm};
use super::load::CompressorWeights;
use super::ops::{Ctx, sized};
use super::pass::{Parts, Row};
use super::scratch::AttentionScratch;
use super::state::{CompressorState, SessionState};
use crate::model::config::OVERLAP_RATIO;

/// Which of a layer's compressors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// Attention's.
    Attention,
    /// The indexer's.
    Indexer,
}

/// A compressor with what it works on.
pub(super) struct Compressor<'a> {
    pub(super) weights: &'a CompressorWeights,
    pub(super) table: &'a RopeTable,
    pub(super) ratio: usize,
    pub(super) pool: Pool,
    /// The layer's place in the range.
    pub(super) place: usize,
}

impl Compressor<'_> {
    /// Takes in a wave: stores every row's raw inputs, then computes the slots that rows finish.
    ///
    /// `x` is the sublayer's input as fp32, `[m, dim]`. A row may read slots finished by earlier
    /// rows of its wave; which ones it may is decided by its position alone.
    pub(super) fn advance(
        &self,
        ctx: &mut Ctx<'_>,
        x: &[f32],
        (rows, sessions): (&[Row], &mut [Option<SessionState>]),
        s: &mut AttentionScratch,
    ) {
        ctx.wide(&self.weights.wkv, Rows::new(x, rows.len()), &mut s.raw_kv);
        ctx.wide(&self.weights.wgate, Rows::new(x, rows.len()), &mut s.raw_score);
        let width = self.weights.wkv.n();
        for (at, row) in rows.iter().enumerate() {
            let state = self.state(sessions, row.slot);
            let of = at * width..(at + 1) * width;
            state.kv.row_mut(row.pos).copy_from_slice(&s.raw_kv[of.clone()]);
            let ape = &self.weights.ape[row.pos % self.ratio * width..][..width];
            let scores = s.raw_score[of].iter().zip(ape).map(|(score, ape)| score + ape);
            for (stored, score) in state.score.row_mut(row.pos).iter_mut().zip(scores) {
                *stored = score;
            }
        }
        for row in rows.iter().filter(|row| (row.pos + 1) % self.ratio == 0) {
            self.finish(ctx, self.state(sessions, row.slot), row.pos / self.ratio, s);
        }
    }

    fn state<'s>(&self, sessions: &'s mut [Option<SessionState>], slot: usize) -> &'s mut CompressorState {
        let layer = &mut Parts::state(sessions, slot).layers[self.place];
        let state = match self.pool {
            Pool::Attention => &mut layer.compressor,
            Pool::Indexer => &mut layer.indexer,
        };
        #[allow(clippy::expect_used, reason = "state and weights are made by the same ratios")]
        state.as_mut().expect("a layer that compresses has state for it")
    }

    /// Computes slot `j` from the raw inputs of its block and, with overlap, the block before.
    fn finish(&self, ctx: &mut Ctx<'_>, state: &mut CompressorState, j: usize, s: &mut AttentionScratch) {
        let (isa, width, ratio) = (ctx.isa, self.weights.width, self.ratio);
        let stride = self.weights.wkv.n();
        let part = |column: usize, first: usize| Part {
            kv: RingRows::new(state.kv.data(), stride, column, first, ratio),
            score: RingRows::new(state.score.data(), stride, column, first, ratio),
        };
        let none = Part { kv: RingRows::none(), score: RingRows::none() };
        let first = j * ratio;
        let parts = match (ratio == OVERLAP_RATIO, j) {
            (false, _) => [none, part(0, first)],
            (true, 0) => [none, part(width, first)],
            (true, _) => [part(0, first - ratio), part(width, first)],
        };
        compress(isa, parts, sized(&mut s.pooled, width));
        narrow(isa, &s.pooled, sized(&mut s.slot, width));
        let out = &mut state.slots[j * width..(j + 1) * width];
        rms_norm(isa, &s.slot, &self.weights.norm, ctx.config.norm_eps, out);
        self.table.rotate(isa, out, width, first);
        match self.pool {
            Pool::Attention => act_quant_in_place(isa, &mut out[..width - ctx.config.rope_dim], KV_GROUP),
            Pool::Indexer => {
                hadamard(isa, out, width);
                fp4_act_quant_in_place(isa, out);
            }
        }
    }
}
