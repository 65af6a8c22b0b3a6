//! One layer on the device: two sublayers, each between a mix of the residual streams and their
//! update.
//!
//! Owns the order of launches in a layer: on the device's stream, and on a branch that leaves it behind the
//! sublayer's input and meets it in front of attention. Nothing waits for the host.

use ringfence_engine::model::config::OVERLAP_RATIO;

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::linear::{Linear, Out, Rows};
use crate::ops::{Heads, KeyList, Keys, MixWeights, Norm, Preparing, Side, Spread, Table};
use crate::pass::Pass;
use crate::weights::{AttentionWeights, CompressorWeights, LayerWeights, Routing};

/// Where a layer's stream means go: places for the drafter's target layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tap {
    /// First value of a row's mean.
    pub(crate) at: usize,
    /// Values of a row of taps.
    pub(crate) stride: usize,
}

/// What a sublayer's attention sees beside the rows' own state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sees {
    /// A target layer: window and compressed slots; keys are stored.
    Target,
    /// A draft stage: the window in front of the block and all its rows; keys are not stored.
    Block,
}

pub(crate) fn bf16_out(at: DevicePtr, w: &Linear) -> Out {
    Out { at, stride: w.rows, wide: false }
}

pub(crate) fn f32_out(at: DevicePtr, w: &Linear) -> Out {
    Out { at, stride: w.rows, wide: true }
}

impl Pass<'_> {
    /// One layer of `m` rows.
    pub(crate) fn layer(
        &self,
        m: usize,
        w: &LayerWeights,
        place: usize,
        (sees, tap): (Sees, Option<Tap>),
    ) -> Result<(), CudaError> {
        if sees == Sees::Target && Self::is_many(m) {
            return self.many_layer(m, w, place, tap);
        }
        self.enter(m, w.hc_attn, w.attn_norm)?;
        self.attention(m, w, place, sees)?;
        self.leave(m, None)?;
        self.enter(m, w.hc_ffn, w.ffn_norm)?;
        self.feed_forward(m, w)?;
        self.leave(m, tap)
    }

    /// From the streams to the sublayer's input `x`.
    pub(crate) fn enter(&self, m: usize, w: MixWeights, norm: DevicePtr) -> Result<(), CudaError> {
        let b = &self.buffers;
        let none = DevicePtr::NULL;
        self.ops.mix((b.hidden, none, m), w, self.config.mixes(), &self.streams, b.raw)?;
        let raw = (b.raw, w, self.config.mixes());
        self.ops.enter((b.hidden, none, m), raw, &self.streams, norm, (none, b.x))
    }

    /// Spreads the sublayer's result `y` over the streams.
    pub(crate) fn leave(&self, m: usize, tap: Option<Tap>) -> Result<(), CudaError> {
        let b = &self.buffers;
        let taps = tap.map_or((DevicePtr::NULL, 0, 0), |tap| (b.taps, tap.stride, tap.at));
        self.ops.leave((b.hidden, m), b.y, b.mix, &self.streams, taps)
    }

    /// bf16 rows in a buffer.
    pub(crate) fn rows(at: DevicePtr, stride: usize) -> Rows {
        Rows { at, stride }
    }

    /// The rotations of a layer with this ratio.
    pub(crate) fn table(&self, ratio: usize) -> Table {
        if ratio == 0 { self.plain } else { self.scaled }
    }

    fn attention(&self, m: usize, layer: &LayerWeights, place: usize, sees: Sees) -> Result<(), CudaError> {
        let picks = self.projected(m, layer, place, sees)?;
        self.attend(m, layer, place, (sees, picks))?;
        self.output(m, &layer.attn)
    }

    /// From the sublayer's input to queries, stored keys, compressed slots and the indexer's picks, which it
    /// gives, or null without any. Compressors and indexer run beside the queries.
    pub(crate) fn projected(
        &self,
        m: usize,
        layer: &LayerWeights,
        place: usize,
        sees: Sees,
    ) -> Result<DevicePtr, CudaError> {
        let (w, b, config) = (&layer.attn, self.buffers, self.config);
        let main = self.ops.stream();
        let beside = w.compressor.is_some();
        if beside {
            self.branch.fork(main)?;
            self.compressor_inputs(m, w)?;
        }
        let coded = [(w.wq_a, bf16_out(b.qa, &w.wq_a)), (w.wkv, bf16_out(b.kv_raw, &w.wkv))];
        // SAFETY: the buffers have room for a wave of each.
        unsafe { self.products.linears(main, (Self::rows(b.x, config.dim), m), &coded) }?;
        self.norms_and_keys(m, layer, place, sees)?;
        let picks = if beside { self.slots(m, layer, place)? } else { DevicePtr::NULL };
        let rows = (Self::rows(b.qr, config.q_rank), m);
        // SAFETY: as above.
        unsafe { self.products.linear(main, rows, &w.wq_b, bf16_out(b.q, &w.wq_b)) }?;
        let spread = self.spread(layer.hc_attn);
        let parts = Preparing { queries: Some((b.q, self.heads())), spread, ..self.preparing(layer, place) };
        self.ops.prepare(m, &parts)?;
        if beside {
            self.branch.join(main)?;
        }
        Ok(picks)
    }

    /// Norms of the low-rank queries, and the rows' keys, which a target layer stores.
    fn norms_and_keys(&self, m: usize, layer: &LayerWeights, place: usize, sees: Sees) -> Result<(), CudaError> {
        let (w, b, config) = (&layer.attn, self.buffers, self.config);
        let norm = Norm { weight: w.q_norm, width: config.q_rank, eps: config.norm_eps };
        let keys = Keys {
            x: b.kv_raw,
            norm: Norm { weight: w.kv_norm, width: config.head_dim, eps: config.norm_eps },
            table: self.table(layer.ratio),
            at: self.at(place),
            store: sees == Sees::Target,
            out: if sees == Sees::Block { b.kv } else { DevicePtr::NULL },
        };
        self.ops.norm_keys(m, (b.qa, config.q_rank), (norm, b.qr), &keys)
    }

    /// Raw inputs of the compressors and of the indexer's weights, on the branch.
    fn compressor_inputs(&self, m: usize, w: &AttentionWeights) -> Result<(), CudaError> {
        let b = &self.buffers;
        let mut plain = Vec::with_capacity(5);
        if let Some(c) = &w.compressor {
            plain.extend([(c.wkv, f32_out(b.raw_kv, &c.wkv)), (c.wgate, f32_out(b.raw_score, &c.wgate))]);
        }
        if let Some(indexer) = &w.indexer {
            let c = &indexer.compressor;
            plain.extend([(c.wkv, f32_out(b.index_kv, &c.wkv)), (c.wgate, f32_out(b.index_score, &c.wgate))]);
            plain.push((indexer.weights_proj, bf16_out(b.index_w, &indexer.weights_proj)));
        }
        let rows = (Self::rows(b.x, self.config.dim), m);
        // SAFETY: the buffers have room for a wave of each.
        unsafe { self.apart.linears(self.branch.stream(), rows, &plain) }
    }

    /// Moves the compressors on and lets the indexer pick, on the branch, where its queries wait for their
    /// norm; gives the picks, or null without any.
    fn slots(&self, m: usize, layer: &LayerWeights, place: usize) -> Result<DevicePtr, CudaError> {
        let (w, ratio, b, config) = (&layer.attn, layer.ratio, self.buffers, self.config);
        let (side, at) = (self.ops.on(self.branch.stream()), self.at(place));
        let slots = self.positions.checked_div(ratio).unwrap_or(0);
        // Else no row can see more slots than it takes.
        let picking = w.indexer.as_ref().filter(|_| slots > config.index_topk);
        if let Some(indexer) = picking {
            self.branch.fork(self.ops.stream())?;
            let rows = (Self::rows(b.qr, config.q_rank), m);
            // SAFETY: the buffers have room for a wave of each.
            unsafe { self.apart.linear(side.stream(), rows, &indexer.wq_b, bf16_out(b.index_q, &indexer.wq_b)) }?;
        }
        let side_of = |c: &CompressorWeights, kv, score| Side {
            kv,
            score,
            stride: int(c.wkv.rows),
            width: int(c.width),
            ape: c.ape,
            norm: c.norm,
        };
        let compressors = w.compressor.as_ref().map(|c| {
            let index = w.indexer.as_ref().map(|indexer| side_of(&indexer.compressor, b.index_kv, b.index_score));
            ([side_of(c, b.raw_kv, b.raw_score), index.unwrap_or_default()], ratio, ratio == OVERLAP_RATIO)
        });
        let heads = Heads { heads: config.index_heads, width: config.index_dim };
        let index = picking.map(|_| (b.index_q, heads, config.index_topk, ratio));
        side.prepare(m, &Preparing { index, compressors, ..self.preparing(layer, place) })?;
        if picking.is_none() {
            return Ok(DevicePtr::NULL);
        }
        let sizes = (config.index_topk, ratio, slots);
        side.pick((b.index_q, b.index_w, m), heads, sizes, at, (b.keys, b.slot_picks))?;
        Ok(b.slot_picks)
    }

    /// Nothing to prepare yet, at a layer.
    fn preparing(&self, layer: &LayerWeights, place: usize) -> Preparing {
        let (table, eps, at) = (self.table(layer.ratio), self.config.norm_eps, self.at(place));
        Preparing { table, eps, at, queries: None, index: None, compressors: None, spread: Spread::none() }
    }

    pub(crate) fn heads(&self) -> Heads {
        Heads { heads: self.config.heads, width: self.config.head_dim }
    }

    /// Attends with the slots that were picked, or all where `picks` is null.
    pub(crate) fn attend(
        &self,
        m: usize,
        layer: &LayerWeights,
        place: usize,
        (sees, picks): (Sees, DevicePtr),
    ) -> Result<(), CudaError> {
        let (ratio, b, config) = (layer.ratio, self.buffers, self.config);
        let block = sees == Sees::Block;
        let keys = KeyList {
            at: self.at(place),
            window: int(config.window),
            ratio: int(ratio),
            picks,
            topk: int(config.index_topk),
            block: if block { b.kv } else { DevicePtr::NULL },
            block_rows: if block { int(m) } else { 0 },
        };
        let entries = config.window + self.slots_seen(ratio) + if block { m } else { 0 };
        let list = entries.next_multiple_of(64);
        let ends = (layer.attn.sink, self.table(ratio));
        let ops = if layer.attn.compressor.is_some() { self.ops.joined() } else { self.ops };
        ops.attend((b.q, m), self.heads(), (keys, list), ends, (b.scores, b.o))
    }

    /// The output projection of attended values.
    pub(crate) fn output(&self, m: usize, w: &AttentionWeights) -> Result<(), CudaError> {
        let (b, config, stream) = (self.buffers, self.config, self.ops.stream());
        let rows = (Self::rows(b.o, config.heads * config.head_dim), m);
        // SAFETY: the buffers have room for a wave of each.
        unsafe { self.products.grouped(stream, rows, (&w.wo_a, config.o_groups), bf16_out(b.z, &w.wo_a)) }?;
        let rows = (Self::rows(b.z, w.wo_a.rows), m);
        // SAFETY: as above.
        unsafe { self.products.linear(stream, rows, &w.wo_b, bf16_out(b.y, &w.wo_b)) }
    }

    /// Most compressed slots that a row of a layer with this ratio attends to.
    pub(crate) fn slots_seen(&self, ratio: usize) -> usize {
        slots_seen(self.config, self.positions, ratio)
    }

    /// How the streams are spread behind the sublayer that was entered with these weights.
    pub(crate) fn spread(&self, w: MixWeights) -> Spread {
        Spread::new(self.buffers.raw, w, &self.streams, self.buffers.mix)
    }

    /// The router and the experts.
    pub(crate) fn feed_forward(&self, m: usize, layer: &LayerWeights) -> Result<(), CudaError> {
        let w = &layer.ffn;
        let (b, config, stream) = (&self.buffers, self.config, self.ops.stream());
        let x = Self::rows(b.x, config.dim);
        // SAFETY: the buffers have room for a wave of each.
        unsafe { self.products.linear(stream, (x, m), &w.gate, f32_out(b.gate, &w.gate)) }?;
        let none = DevicePtr::NULL;
        let routing = match w.routing {
            Routing::Score(bias) => (bias, none),
            Routing::Hash(ids) => (none, ids),
        };
        let logits = (b.gate, config.experts, m);
        let out = (b.expert_picks, b.expert_weights, self.spread(layer.hc_ffn));
        self.ops.route(logits, config.experts_per_token, routing, (config.route_scale, b.rows), out)?;
        let routing = (b.expert_picks, b.expert_weights);
        // SAFETY: as above.
        unsafe { self.products.experts(stream, (x, m), &w.experts, routing, (self.scratch, b.y)) }
    }
}

/// Most compressed slots that a row of a layer with this ratio attends to.
pub(crate) fn slots_seen(config: &ringfence_engine::model::ModelConfig, positions: usize, ratio: usize) -> usize {
    let slots = positions.checked_div(ratio).unwrap_or(0);
    if ratio == OVERLAP_RATIO { slots.min(config.index_topk) } else { slots }
}

pub(crate) fn int(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}
