//! The bytes that each step of a layer must read, for measurements: weights, and the keys that it sees.
//!
//! Activations are left out: they are small and come from the cache.

use ringfence_engine::model::ModelConfig;

use crate::linear::Linear;
use crate::weights::{AttentionWeights, CompressorWeights, LayerWeights, MoeWeights};

/// What decides how much is read beside the layer itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// Positions that the rows see.
    pub(crate) positions: usize,
    /// Different experts that the rows go to.
    pub(crate) experts: usize,
}

fn sum<'a>(linears: impl IntoIterator<Item = &'a Linear>) -> usize {
    linears.into_iter().map(Linear::bytes).sum()
}

fn compressor(c: &CompressorWeights) -> usize {
    sum([&c.wkv, &c.wgate])
}

/// The mixes in front of a sublayer, fp32.
pub(crate) fn mixes(config: &ModelConfig) -> usize {
    4 * config.mixes() * config.hc * config.dim
}

/// Products of the sublayer's input.
pub(crate) fn inputs(w: &AttentionWeights) -> usize {
    let indexer = w.indexer.as_ref().map_or(0, |i| compressor(&i.compressor) + i.weights_proj.bytes());
    sum([&w.wq_a, &w.wkv]) + w.compressor.as_ref().map_or(0, compressor) + indexer
}

/// Products of the low-rank queries.
pub(crate) fn queries(w: &AttentionWeights) -> usize {
    w.wq_b.bytes() + w.indexer.as_ref().map_or(0, |i| i.wq_b.bytes())
}

/// Keys of the indexer, bf16, where there are more slots than it picks.
pub(crate) fn index_keys(config: &ModelConfig, layer: &LayerWeights, seen: Seen) -> usize {
    let slots = seen.positions.checked_div(layer.ratio).unwrap_or(0);
    if layer.attn.indexer.is_some() && slots > config.index_topk { 2 * slots * config.index_dim } else { 0 }
}

/// Keys of one row's list, bf16.
pub(crate) fn keys(config: &ModelConfig, layer: &LayerWeights, seen: Seen) -> usize {
    let slots = crate::layer::slots_seen(config, seen.positions, layer.ratio);
    2 * (config.window.min(seen.positions) + slots) * config.head_dim
}

/// The output projection.
pub(crate) fn output(w: &AttentionWeights) -> usize {
    sum([&w.wo_a, &w.wo_b])
}

/// The router and the experts.
pub(crate) fn feed_forward(w: &MoeWeights, seen: Seen) -> usize {
    w.gate.bytes() + sum(&w.experts.shared) + seen.experts * w.experts.routed_bytes()
}

/// All of a layer.
pub(crate) fn layer(config: &ModelConfig, w: &LayerWeights, seen: Seen) -> usize {
    let attention = inputs(&w.attn) + queries(&w.attn) + output(&w.attn);
    let kept = index_keys(config, w, seen) + keys(config, w, seen);
    2 * mixes(config) + attention + kept + feed_forward(&w.ffn, seen)
}
