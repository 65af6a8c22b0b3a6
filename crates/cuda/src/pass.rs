//! A wave of rows through all layers of the range: what is put on the stream, in which order, and the
//! buffers it works in.
//!
//! Owns the buffers. All places are fixed when the engine is built, so a wave of some shape can be
//! captured once and replayed at any position.

use ringfence_engine::ids::LayerRange;
use ringfence_engine::model::ModelConfig;

use crate::branch::Branch;
use crate::driver::{Arena, Device, DevicePtr};
use crate::error::CudaError;
use crate::layer::{Sees, Tap, slots_seen};
use crate::linear::{Linear, Out, Products};
use crate::many::Many;
use crate::ops::{At, MARKOV_BLOCKS, MixWeights, Norm, Ops, Streams, Table};
use crate::state::to_i32;
use crate::weights::Weights;

/// Most rows of a wave.
pub(crate) const WAVE: usize = 512;

/// Most rows whose logits are computed at once, and most rows of what knows few rows only: drafts, the
/// experts of [`crate::experts`].
pub(crate) const FEW: usize = 64;

/// The check of a row's hidden state at the end of a wave; lower numbers are boundaries.
pub(crate) const CHECK_END: i32 = 1 << 20;
/// The check of a row's logits.
pub(crate) const CHECK_LOGITS: i32 = CHECK_END + 1;

/// Scratch for the experts of a wave.
pub(crate) use crate::experts::Scratch as ExpertScratch;

macro_rules! buffers {
    ($($(#[$meta:meta])* $name:ident: $size:expr,)*) => {
        /// The buffers of a wave, `m` up to [`WAVE`] rows each.
        #[derive(Debug)]
        pub(crate) struct Buffers {
            $($(#[$meta])* pub(crate) $name: DevicePtr,)*
            memory: Arena,
        }

        impl Buffers {
            /// Takes all of them from one arena.
            pub(crate) fn new(device: &Device, sizes: &WaveSizes<'_>) -> Result<Self, CudaError> {
                let bytes: usize = [$($size(sizes),)*].iter().map(|bytes| bytes.next_multiple_of(crate::driver::ALIGN)).sum();
                let mut memory = device.arena("the buffers of a pass", bytes)?;
                $(let $name = memory.take(stringify!($name), $size(sizes))?;)*
                Ok(Self { $($name,)* memory })
            }

            /// Bytes of device memory.
            pub(crate) fn bytes(&self) -> usize {
                self.memory.size()
            }
        }
    };
}

/// What sizes the buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaveSizes<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) range: LayerRange,
    /// Longest session.
    pub(crate) positions: usize,
    /// Draft tokens per block; 0 where nothing drafts.
    pub(crate) block: usize,
}

impl WaveSizes<'_> {
    /// Entries of the longest key list, a multiple of 64.
    fn list(&self) -> usize {
        let slots = self.range.layers().map(|layer| slots_seen(self.config, self.positions, self.config.ratio(layer)));
        (self.config.window + slots.max().unwrap_or(0).max(self.block)).next_multiple_of(64)
    }

    /// Layers of the range may have a compressor.
    fn compresses(&self) -> bool {
        self.range.layers().any(|layer| self.config.ratio(layer) > 0)
    }

    fn is_tail(&self) -> bool {
        self.range.hi() == self.config.layers
    }

    fn taps(&self) -> usize {
        let targets = self.config.draft.as_ref().map_or(0, |draft| draft.targets.len());
        if self.block > 0 { targets * self.config.dim } else { 0 }
    }

    fn if_compressing(&self, bytes: usize) -> usize {
        if self.compresses() { bytes } else { 0 }
    }
}

buffers! {
    /// [`crate::ops::Row`] `[m]`.
    rows: |_: &WaveSizes<'_>| 16 * WAVE,
    /// Rows whose logits are asked for, i32 `[n]`.
    logit_rows: |_: &WaveSizes<'_>| 4 * WAVE,
    /// Failed checks, i32 `[m]`.
    checks: |_: &WaveSizes<'_>| 4 * WAVE,
    /// The anchor of a draft, one row.
    anchor: |_: &WaveSizes<'_>| 16,
    /// bf16 `[m, hc, dim]`.
    hidden: |s: &WaveSizes<'_>| 2 * WAVE * s.config.hc * s.config.dim,
    /// fp32 `[m, mixes + 1]`.
    raw: |s: &WaveSizes<'_>| 4 * WAVE * (s.config.mixes() + 1),
    /// fp32 `[m, hc + hc · hc]`.
    mix: |s: &WaveSizes<'_>| 4 * WAVE * s.config.hc * (s.config.hc + 1),
    /// A sublayer's input, bf16 `[m, dim]`.
    x: |s: &WaveSizes<'_>| 2 * WAVE * s.config.dim,
    /// A sublayer's result, bf16 `[m, dim]`.
    y: |s: &WaveSizes<'_>| 2 * WAVE * s.config.dim,
    /// Low-rank queries before their norm, bf16 `[m, q_rank]`.
    qa: |s: &WaveSizes<'_>| 2 * WAVE * s.config.q_rank,
    /// And after it.
    qr: |s: &WaveSizes<'_>| 2 * WAVE * s.config.q_rank,
    /// bf16 `[m, heads, head_dim]`.
    q: |s: &WaveSizes<'_>| 2 * WAVE * s.config.heads * s.config.head_dim,
    /// Keys before their norm, bf16 `[m, head_dim]`.
    kv_raw: |s: &WaveSizes<'_>| 2 * WAVE * s.config.head_dim,
    /// And after it.
    kv: |s: &WaveSizes<'_>| 2 * WAVE * s.config.head_dim,
    /// Attended values, bf16 `[m, heads, head_dim]`.
    o: |s: &WaveSizes<'_>| 2 * WAVE * s.config.heads * s.config.head_dim,
    /// Low-rank output, bf16 `[m, o_groups · o_rank]`.
    z: |s: &WaveSizes<'_>| 2 * WAVE * s.config.o_groups * s.config.o_rank,
    /// Raw inputs of attention's compressor, fp32 `[m, raw width]`.
    raw_kv: |s: &WaveSizes<'_>| s.if_compressing(8 * WAVE * s.config.head_dim),
    /// As many scores.
    raw_score: |s: &WaveSizes<'_>| s.if_compressing(8 * WAVE * s.config.head_dim),
    /// The indexer's.
    index_kv: |s: &WaveSizes<'_>| s.if_compressing(8 * WAVE * s.config.index_dim),
    /// As many scores.
    index_score: |s: &WaveSizes<'_>| s.if_compressing(8 * WAVE * s.config.index_dim),
    /// bf16 `[m, index_heads, index_dim]`.
    index_q: |s: &WaveSizes<'_>| s.if_compressing(2 * WAVE * s.config.index_heads * s.config.index_dim),
    /// bf16 `[m, index_heads]`.
    index_w: |s: &WaveSizes<'_>| s.if_compressing(2 * WAVE * s.config.index_heads),
    /// Scores of slots as keys, u16 `[m, slots]`.
    keys: |s: &WaveSizes<'_>| s.if_compressing(2 * WAVE * (s.positions / 4)),
    /// Picked slots, i32 `[m, topk]`.
    slot_picks: |s: &WaveSizes<'_>| s.if_compressing(4 * WAVE * s.config.index_topk),
    /// Scores of keys, fp32 `[m, heads, list]`.
    scores: |s: &WaveSizes<'_>| 4 * WAVE * s.config.heads * s.list(),
    /// Router logits, fp32 `[m, experts]`.
    gate: |s: &WaveSizes<'_>| 4 * WAVE * s.config.experts,
    /// Experts of rows, i32 `[m, k]`, ascending.
    expert_picks: |s: &WaveSizes<'_>| 4 * WAVE * s.config.experts_per_token,
    /// Their weights, fp32.
    expert_weights: |s: &WaveSizes<'_>| 4 * WAVE * s.config.experts_per_token,
    /// Stream means behind the drafter's targets, bf16 `[m, targets, dim]`.
    taps: |s: &WaveSizes<'_>| 2 * WAVE * s.taps(),
    /// Logits of the rows asked for, fp32 `[n, vocab]`.
    logits: |s: &WaveSizes<'_>| if s.is_tail() { 4 * FEW * s.config.vocab } else { 0 },
    /// Draft tokens, i32 `[block]`, then their confidence, fp32 `[block]`.
    drafted: |_: &WaveSizes<'_>| 8 * FEW,
    /// Best of each block of a Markov step.
    best: |_: &WaveSizes<'_>| 8 * MARKOV_BLOCKS as usize,
}

/// What a wave is, to the kernels: everything else is read on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Shape {
    /// Rows.
    pub(crate) rows: usize,
    /// Rows whose logits are computed, at most [`FEW`]; 0 but on a tail.
    pub(crate) logits: usize,
    /// Whether the drafter's windows move on.
    pub(crate) drafting: bool,
}

/// An engine's parts, as a pass needs them.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    pub(crate) ops: Ops<'a>,
    pub(crate) products: &'a Products,
    /// The same for launches behind a fork.
    pub(crate) apart: &'a Products,
    pub(crate) branch: &'a Branch,
    pub(crate) config: &'a ModelConfig,
    pub(crate) range: LayerRange,
    pub(crate) streams: Streams,
    pub(crate) positions: usize,
    pub(crate) weights: &'a Weights,
    pub(crate) buffers: &'a Buffers,
    pub(crate) scratch: &'a ExpertScratch,
    pub(crate) many: &'a Many,
    pub(crate) states: (DevicePtr, usize),
    pub(crate) plain: Table,
    pub(crate) scaled: Table,
}

impl Pass<'_> {
    /// The rows of the pass at one layer or draft stage.
    pub(crate) fn at(&self, place: usize) -> At {
        let (states, places) = self.states;
        At { rows: self.buffers.rows, states, places: to_i32(places), place: to_i32(place) }
    }

    /// A wave through the range, from rows and hidden states in the buffers to hidden states or logits
    /// there.
    pub(crate) fn wave(&self, shape: Shape) -> Result<(), CudaError> {
        let (b, m) = (self.buffers, shape.rows);
        if let (0, Some(embedding)) = (self.range.lo(), self.weights.embedding) {
            self.ops.embed((b.rows, m), embedding, &self.streams, b.hidden)?;
        }
        for (place, layer) in self.range.layers().enumerate() {
            if place > 0 {
                self.ops.roundtrip((b.hidden, m), &self.streams, self.at(place), b.checks)?;
            }
            self.layer(m, &self.weights.layers[place], place, (Sees::Target, self.tap(layer)))?;
        }
        self.ops.finite((b.hidden, m, self.config.hc * self.config.dim), b.checks, CHECK_END)?;
        if shape.drafting {
            self.take_in(m)?;
        }
        self.logits(0, shape.logits)
    }

    /// Logits of `n` of the rows asked for, at most [`FEW`], from the `from`-th on; nothing but on a tail.
    pub(crate) fn logits(&self, from: usize, n: usize) -> Result<(), CudaError> {
        let b = self.buffers;
        let (true, Some(tail)) = (n > 0, &self.weights.tail) else { return Ok(()) };
        let picks = b.logit_rows.plus(4 * from);
        self.close((picks, n), tail.hc_head, tail.norm, &tail.head)?;
        self.ops.finite_floats((b.logits, n, self.config.vocab), picks, b.checks, CHECK_LOGITS)
    }

    /// Where the drafter's tap behind a layer goes.
    fn tap(&self, layer: u16) -> Option<Tap> {
        let draft = self.config.draft.as_ref().filter(|_| self.weights.drafter.is_some())?;
        let at = draft.targets.iter().position(|&target| target == layer)?;
        Some(Tap { at: at * self.config.dim, stride: draft.targets.len() * self.config.dim })
    }

    /// Ends the streams of `n` rows (those in `picks`, or the first) and computes their logits; the
    /// head's input before its norm stays in `y`.
    pub(crate) fn close(
        &self,
        (picks, n): (DevicePtr, usize),
        mix: MixWeights,
        norm: DevicePtr,
        head: &Linear,
    ) -> Result<(), CudaError> {
        let b = self.buffers;
        self.ops.mix((b.hidden, picks, n), mix, self.config.hc, &self.streams, b.raw)?;
        let raw = (b.raw, mix, self.config.hc);
        self.ops.enter((b.hidden, picks, n), raw, &self.streams, norm, (b.y, b.x))?;
        let out = Out { at: b.logits, stride: self.config.vocab, wide: true };
        self.products((Self::rows(b.x, self.config.dim), n), &[(*head, out)])
    }

    /// A norm of `dim` values.
    pub(crate) fn norm(&self, weight: DevicePtr) -> Norm {
        Norm { weight, width: self.config.dim, eps: self.config.norm_eps }
    }
}
