//! Waves of many rows: one layer by tiles, experts grouped by expert.
//!
//! Owns from how many rows on that pays, the order of its launches and its scratch. A row sees the rows of
//! its wave in front of it because every row's keys and slots are stored before any row attends: sessions'
//! rings have room for a whole run.

use ringfence_engine::model::ModelConfig;
use ringfence_engine::model::config::OVERLAP_RATIO;

use crate::driver::{Device, DevicePtr};
use crate::error::CudaError;
use crate::experts_tile::ManyScratch;
use crate::layer::{Tap, bf16_out, f32_out, int};
use crate::linear::{Linear, Out, Products, Rows};
use crate::ops::{Heads, KeyList, Keys, Norm, Preparing, Side, Spread};
use crate::pass::{FEW, Pass, WAVE};
use crate::tile::{ROWS_MIN, TileScratch};
use crate::weights::{AttentionWeights, CompressorWeights, LayerWeights, MoeWeights, Routing};

/// From so many rows on experts are grouped into tiles; fewer go in passes of [`FEW`].
const EXPERT_ROWS_MIN: usize = 480;

/// The scratch of long waves.
#[derive(Debug)]
pub(crate) struct Many {
    pub(crate) tiles: TileScratch,
    pub(crate) experts: ManyScratch,
}

impl Many {
    /// Room for a wave.
    pub(crate) fn new(device: &Device, config: &ModelConfig) -> Result<Self, CudaError> {
        let targets = config.draft.as_ref().map_or(0, |draft| draft.targets.len());
        let widest = (config.dim * targets.max(1)).max(config.o_groups * config.o_rank).max(config.q_rank);
        let sizes = (config.dim, config.inner);
        let codes = ManyScratch::codes(sizes, config.experts_per_token, WAVE).max(WAVE * widest);
        Ok(Self {
            tiles: TileScratch::new(device, codes, (WAVE, config.vocab))?,
            experts: ManyScratch::new(device, sizes, (config.experts, config.experts_per_token), WAVE)?,
        })
    }

    /// Bytes of device memory.
    pub(crate) fn bytes(&self) -> usize {
        self.tiles.bytes() + self.experts.bytes()
    }
}

impl Pass<'_> {
    /// Whether a layer of so many rows goes by tiles.
    pub(crate) fn is_many(m: usize) -> bool {
        m >= ROWS_MIN
    }

    /// Products of the same `m` rows by matrices of one format, by what pays for as many.
    pub(crate) fn products(&self, (x, m): (Rows, usize), list: &[(Linear, Out)]) -> Result<(), CudaError> {
        let stream = self.ops.stream();
        if list.first().is_some_and(|(w, _)| Products::tiles(w, m)) {
            // SAFETY: the buffers have room for a wave of each.
            return unsafe { self.products.tiled(stream, (x, m), (list, None), &self.many.tiles) };
        }
        // SAFETY: as above.
        unsafe { self.products.linears(stream, (x, m), list) }
    }

    /// One layer of `m` rows.
    pub(crate) fn many_layer(
        &self,
        m: usize,
        w: &LayerWeights,
        place: usize,
        tap: Option<Tap>,
    ) -> Result<(), CudaError> {
        self.enter(m, w.hc_attn, w.attn_norm)?;
        self.many_inputs(m, &w.attn)?;
        self.many_queries(m, w, place)?;
        let picks = self.many_prepared(m, w, place)?;
        self.many_attend(m, w, place, picks)?;
        self.many_output(m, &w.attn)?;
        self.leave(m, None)?;
        self.enter(m, w.hc_ffn, w.ffn_norm)?;
        self.many_experts(m, w)?;
        self.leave(m, tap)
    }

    /// All products of the attention's input.
    pub(crate) fn many_inputs(&self, m: usize, w: &AttentionWeights) -> Result<(), CudaError> {
        let b = self.buffers;
        let x = (Self::rows(b.x, self.config.dim), m);
        self.products(x, &[(w.wq_a, bf16_out(b.qa, &w.wq_a)), (w.wkv, bf16_out(b.kv_raw, &w.wkv))])?;
        let mut plain = Vec::with_capacity(5);
        if let Some(c) = &w.compressor {
            plain.extend([(c.wkv, f32_out(b.raw_kv, &c.wkv)), (c.wgate, f32_out(b.raw_score, &c.wgate))]);
        }
        if let Some(indexer) = &w.indexer {
            let c = &indexer.compressor;
            plain.extend([(c.wkv, f32_out(b.index_kv, &c.wkv)), (c.wgate, f32_out(b.index_score, &c.wgate))]);
            plain.push((indexer.weights_proj, bf16_out(b.index_w, &indexer.weights_proj)));
        }
        self.products(x, &plain)
    }

    /// Keys of the rows, which are stored, and raw queries.
    pub(crate) fn many_queries(&self, m: usize, layer: &LayerWeights, place: usize) -> Result<(), CudaError> {
        let (w, b, config) = (&layer.attn, self.buffers, self.config);
        let norm = Norm { weight: w.q_norm, width: config.q_rank, eps: config.norm_eps };
        let keys = Keys {
            x: b.kv_raw,
            norm: Norm { weight: w.kv_norm, width: config.head_dim, eps: config.norm_eps },
            table: self.table(layer.ratio),
            at: self.at(place),
            store: true,
            out: DevicePtr::NULL,
        };
        self.ops.norm_keys(m, (b.qa, config.q_rank), (norm, b.qr), &keys)?;
        let mut products = vec![(w.wq_b, bf16_out(b.q, &w.wq_b))];
        products.extend(w.indexer.as_ref().map(|indexer| (indexer.wq_b, bf16_out(b.index_q, &indexer.wq_b))));
        self.products((Self::rows(b.qr, config.q_rank), m), &products)
    }

    /// Norms and rotates the queries, moves the compressors on and lets the indexer pick; gives the picks, or
    /// null without any.
    pub(crate) fn many_prepared(&self, m: usize, layer: &LayerWeights, place: usize) -> Result<DevicePtr, CudaError> {
        let (w, ratio, b, config) = (&layer.attn, layer.ratio, self.buffers, self.config);
        let at = self.at(place);
        let side = |c: &CompressorWeights, kv, score| Side {
            kv,
            score,
            stride: int(c.wkv.rows),
            width: int(c.width),
            ape: c.ape,
            norm: c.norm,
        };
        let compressors = w.compressor.as_ref().map(|c| {
            let index = w.indexer.as_ref().map(|indexer| side(&indexer.compressor, b.index_kv, b.index_score));
            ([side(c, b.raw_kv, b.raw_score), index.unwrap_or_default()], ratio, ratio == OVERLAP_RATIO)
        });
        let slots = self.positions.checked_div(ratio).unwrap_or(0);
        // Else no row can see more slots than it takes.
        let picks = w.indexer.is_some() && slots > config.index_topk;
        let heads = Heads { heads: config.index_heads, width: config.index_dim };
        let parts = Preparing {
            table: self.table(ratio),
            eps: config.norm_eps,
            at,
            queries: Some((b.q, self.heads())),
            index: picks.then_some((b.index_q, heads, config.index_topk, ratio)),
            compressors,
            spread: Spread::none(),
        };
        self.ops.prepare(m, &parts)?;
        if !picks {
            return Ok(DevicePtr::NULL);
        }
        let sizes = (config.index_topk, ratio, slots);
        self.ops.pick((b.index_q, b.index_w, m), heads, sizes, at, (b.keys, b.slot_picks))?;
        Ok(b.slot_picks)
    }

    /// Attends with the slots that were picked, or all where `picks` is null.
    pub(crate) fn many_attend(
        &self,
        m: usize,
        layer: &LayerWeights,
        place: usize,
        picks: DevicePtr,
    ) -> Result<(), CudaError> {
        let (ratio, b, config) = (layer.ratio, self.buffers, self.config);
        let keys = KeyList {
            at: self.at(place),
            window: int(config.window),
            ratio: int(ratio),
            picks,
            topk: int(config.index_topk),
            block: DevicePtr::NULL,
            block_rows: 0,
        };
        let list = (config.window + self.slots_seen(ratio)).next_multiple_of(64);
        let ends = (layer.attn.sink, self.table(ratio), self.spread(layer.hc_attn));
        self.ops.attend_many((b.q, m), self.heads(), (keys, list), ends, (b.scores, b.o))
    }

    /// The output projection of attended values.
    pub(crate) fn many_output(&self, m: usize, w: &AttentionWeights) -> Result<(), CudaError> {
        let (b, config) = (self.buffers, self.config);
        let (a, groups) = (&w.wo_a, config.o_groups);
        let size = a.rows / groups;
        let part = |g: usize| {
            let out = bf16_out(b.z, a);
            (a.part(g * size, size), Out { at: out.at.plus(2 * g * size), ..out })
        };
        let list: Vec<_> = (0..groups).map(part).collect();
        let x = (Self::rows(b.o, config.heads * config.head_dim), m);
        // SAFETY: the buffers have room for a wave of each.
        unsafe { self.products.tiled(self.ops.stream(), x, (&list, Some(a.cols)), &self.many.tiles) }?;
        self.products((Self::rows(b.z, a.rows), m), &[(w.wo_b, bf16_out(b.y, &w.wo_b))])
    }

    /// The router and the experts, into `y`.
    pub(crate) fn many_experts(&self, m: usize, layer: &LayerWeights) -> Result<(), CudaError> {
        let w = &layer.ffn;
        let (b, config, stream) = (self.buffers, self.config, self.ops.stream());
        let x = (Self::rows(b.x, config.dim), m);
        self.products(x, &[(w.gate, f32_out(b.gate, &w.gate))])?;
        let routing = match w.routing {
            Routing::Score(bias) => (bias, DevicePtr::NULL),
            Routing::Hash(ids) => (DevicePtr::NULL, ids),
        };
        let out = (b.expert_picks, b.expert_weights, self.spread(layer.hc_ffn));
        let logits = (b.gate, config.experts, m);
        self.ops.route(logits, config.experts_per_token, routing, (config.route_scale, b.rows), out)?;
        self.routed(m, w, stream)
    }

    fn routed(&self, m: usize, w: &MoeWeights, stream: &cudarc::driver::CudaStream) -> Result<(), CudaError> {
        let b = self.buffers;
        let (dim, each) = (self.config.dim, self.config.experts_per_token);
        let (x, routing) = ((Self::rows(b.x, dim), m), (b.expert_picks, b.expert_weights));
        if m < EXPERT_ROWS_MIN {
            for from in (0..m).step_by(FEW) {
                let x = (Self::rows(b.x.plus(2 * from * dim), dim), FEW.min(m - from));
                let routing = (b.expert_picks.plus(4 * from * each), b.expert_weights.plus(4 * from * each));
                let to = (self.scratch, b.y.plus(2 * from * dim));
                // SAFETY: the buffers have room for a wave of each.
                unsafe { self.products.experts(stream, x, &w.experts, routing, to) }?;
            }
            return Ok(());
        }
        let scratch = (&self.many.experts, &self.many.tiles, b.y);
        // SAFETY: as above.
        unsafe { self.products.experts_tiled(stream, x, &w.experts, routing, scratch) }
    }
}
