//! Parameters of the kernels that are no products, as the device reads them.
//!
//! Each mirrors the struct of the same name beside its kernel, field by field.

use crate::driver::DevicePtr;
use crate::ops::{At, KeyList, Side, Spread};

/// A kernel's parameter.
pub(crate) trait Params: Copy {
    /// The kernel.
    const KERNEL: &'static str;
}

macro_rules! params {
    ($(#[$meta:meta])* $name:ident, $kernel:literal, { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type),* }

        impl Params for $name {
            const KERNEL: &'static str = $kernel;
        }
    };
}

params!(EmbedRows, "embed_rows", { rows: DevicePtr, embedding: DevicePtr, hidden: DevicePtr, dim: i32 });
params!(BlockRows, "block_rows", { anchor: DevicePtr, rows: DevicePtr, block: i32, noise: i32 });
params!(FiniteRows, "finite_rows", { x: DevicePtr, width: i32, checks: DevicePtr, number: i32 });
params!(FiniteFloats, "finite_floats", {
    x: DevicePtr, width: i32, picks: DevicePtr, checks: DevicePtr, number: i32,
});
params!(RmsNorm, "rms_norm", {
    x: DevicePtr, stride: i32, weight: DevicePtr, width: i32, eps: f32, out: DevicePtr,
});
params!(StoreKeys, "store_keys", {
    x: DevicePtr, stride: i32, weight: DevicePtr, width: i32, eps: f32, table: DevicePtr, rope: i32,
    rows: DevicePtr, states: DevicePtr, places: i32, place: i32, out: DevicePtr,
});
params!(NormKeys, "norm_keys", { norm: RmsNorm, keys: StoreKeys });
params!(Prepare, "prepare", {
    queries: HeadNormRotate, index: IndexQueries, compress: CompressParams, query_blocks: i32, index_blocks: i32,
    spread: Spread,
});
params!(HeadNormRotate, "", {
    q: DevicePtr, heads: i32, width: i32, eps: f32, table: DevicePtr, rope: i32, rows: DevicePtr,
});
params!(IndexQueries, "", {
    q: DevicePtr, heads: i32, width: i32, table: DevicePtr, rope: i32, rows: DevicePtr, topk: i32, ratio: i32,
    factor: f32,
});
params!(HyperMix, "hyper_mix", { x: DevicePtr, picks: DevicePtr, mix: DevicePtr, width: i32, raw: DevicePtr });
params!(HyperEnter, "hyper_enter", {
    h: DevicePtr, picks: DevicePtr, raw: DevicePtr, scale: DevicePtr, base: DevicePtr, hc: i32, dim: i32,
    mixes: i32, hc_eps: f32, norm_eps: f32, weight: DevicePtr, y: DevicePtr, x: DevicePtr,
});
params!(HyperLeave, "hyper_leave", {
    h: DevicePtr, y: DevicePtr, mix: DevicePtr, hc: i32, dim: i32, taps: DevicePtr, tap_stride: i32, tap_at: i32,
});
params!(WireRoundtrip, "wire_roundtrip", {
    x: DevicePtr, dim: i32, rows: DevicePtr, states: DevicePtr, places: i32, place: i32, checks: DevicePtr,
});
params!(Route, "route", {
    logits: DevicePtr, experts: i32, k: i32, bias: DevicePtr, hash: DevicePtr, route_scale: f32, rows: DevicePtr,
    picks: DevicePtr, weights: DevicePtr, spread: Spread,
});
params!(CompressParams, "", {
    attention: Side, index: Side, ratio: i32, overlap: i32, table: DevicePtr, rope: i32, eps: f32, hadamard: f32,
    at: At,
});
params!(IndexScores, "index_scores_128", {
    q: DevicePtr, w: DevicePtr, factor: f32, heads: i32, topk: i32, ratio: i32, at: At, keys: DevicePtr,
    keys_stride: i32,
});
params!(IndexPicks, "index_picks", {
    keys: DevicePtr, keys_stride: i32, topk: i32, ratio: i32, rows: DevicePtr, picks: DevicePtr,
});
params!(AttendScores, "attend_scores", {
    keys: KeyList, q: DevicePtr, heads: i32, width: i32, scale: f32, scores: DevicePtr, scores_stride: i32,
});
params!(AttendValues, "attend_values", {
    keys: KeyList, scores: DevicePtr, scores_stride: i32, chunk: i32, sink: DevicePtr, heads: i32, width: i32,
    table: DevicePtr, rope: i32, out: DevicePtr,
});
params!(ManyScores, "many_scores", {
    keys: KeyList, q: DevicePtr, heads: i32, width: i32, scale: f32, scores: DevicePtr, scores_stride: i32,
    spread: Spread,
});
params!(ManyValues, "many_values", {
    keys: KeyList, scores: DevicePtr, scores_stride: i32, sink: DevicePtr, heads: i32, width: i32, table: DevicePtr,
    rope: i32, out: DevicePtr,
});
params!(MarkovLogits, "markov_logits", {
    anchor: DevicePtr, tokens: DevicePtr, k: i32, markov_in: DevicePtr, markov_out: DevicePtr, rank: i32, vocab: i32,
    logits: DevicePtr, y: DevicePtr, dim: i32, confidence_weights: DevicePtr, confidence: DevicePtr,
    best: DevicePtr,
});
params!(MarkovToken, "markov_token", { best: DevicePtr, blocks: i32, k: i32, tokens: DevicePtr });
