//! The weights of one range, packed once for the kernels.
//!
//! Owns which tensor goes into which packed form, and the count of resident bytes.

use half::bf16;

use super::kernel::linear::{Bf16Matrix, F32Matrix, Fp4Matrix, Fp8Matrix, PackError, fp8_to_bf16};
use super::kernel::rope::{RopeTable, Stretch, frequencies};
use crate::model::config::OVERLAP_RATIO;
use crate::model::{ModelConfig, ModelError, RangeWeights};

/// All weights of a range.
#[derive(Debug)]
pub(super) struct Weights {
    /// `[vocab, dim]`, where the range embeds or drafts; else empty.
    embedding: Vec<bf16>,
    /// Of the range's layers, ascending.
    pub(super) layers: Vec<LayerWeights>,
    /// What follows the last layer.
    pub(super) tail: Option<TailWeights>,
    /// The draft stages.
    pub(super) drafter: Option<DrafterWeights>,
    /// Rotations of layers that see the window only, and of the drafter.
    pub(super) plain: RopeTable,
    /// Rotations of layers that compress.
    pub(super) scaled: RopeTable,
}

/// One layer of the target model, or one draft stage.
#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) ratio: usize,
    pub(super) hc_attn: HyperWeights,
    pub(super) attn_norm: Vec<f32>,
    pub(super) attn: AttentionWeights,
    pub(super) hc_ffn: HyperWeights,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) ffn: ExpertWeights,
}

/// Mixes of the residual streams.
#[derive(Debug)]
pub(super) struct HyperWeights {
    pub(super) mix: F32Matrix,
    pub(super) scale: Vec<f32>,
    pub(super) base: Vec<f32>,
}

/// Attention of one layer.
#[derive(Debug)]
pub(super) struct AttentionWeights {
    pub(super) wq_a: Fp8Matrix,
    pub(super) q_norm: Vec<f32>,
    pub(super) wq_b: Fp8Matrix,
    pub(super) wkv: Fp8Matrix,
    pub(super) kv_norm: Vec<f32>,
    pub(super) wo_a: Bf16Matrix,
    pub(super) wo_b: Fp8Matrix,
    pub(super) sink: Vec<f32>,
    pub(super) compressor: Option<CompressorWeights>,
    pub(super) indexer: Option<IndexerWeights>,
}

/// A compressor.
#[derive(Debug)]
pub(super) struct CompressorWeights {
    /// Values that a slot holds.
    pub(super) width: usize,
    /// `[ratio, coff · width]`.
    pub(super) ape: Vec<f32>,
    pub(super) norm: Vec<f32>,
    pub(super) wkv: Bf16Matrix,
    pub(super) wgate: Bf16Matrix,
}

/// An indexer.
#[derive(Debug)]
pub(super) struct IndexerWeights {
    pub(super) compressor: CompressorWeights,
    pub(super) weights_proj: Bf16Matrix,
    pub(super) wq_b: Fp8Matrix,
}

/// How a layer routes.
#[derive(Debug)]
pub(super) enum Routing {
    /// By score; the bias selects only, `[experts]`.
    Score(Vec<f32>),
    /// By token id, `[vocab, experts_per_token]`.
    Hash(Vec<u16>),
}

/// The experts of one layer.
#[derive(Debug)]
pub(super) struct ExpertWeights {
    pub(super) gate: Bf16Matrix,
    pub(super) routing: Routing,
    pub(super) experts: Vec<Expert<Fp4Matrix>>,
    pub(super) shared: Expert<Fp8Matrix>,
}

/// The three matrices of an expert.
#[derive(Debug)]
pub(super) struct Expert<M> {
    /// Gate.
    pub(super) w1: M,
    /// Down.
    pub(super) w2: M,
    /// Up.
    pub(super) w3: M,
}

/// The mix that ends the residual streams.
#[derive(Debug)]
pub(super) struct HeadMix {
    pub(super) mix: F32Matrix,
    pub(super) scale: f32,
    pub(super) base: Vec<f32>,
}

/// What follows the last layer.
#[derive(Debug)]
pub(super) struct TailWeights {
    pub(super) hc_head: HeadMix,
    pub(super) norm: Vec<f32>,
    pub(super) head: Bf16Matrix,
}

/// The draft stages and their ends.
#[derive(Debug)]
pub(super) struct DrafterWeights {
    pub(super) main_proj: Fp8Matrix,
    pub(super) main_norm: Vec<f32>,
    pub(super) stages: Vec<LayerWeights>,
    pub(super) hc_head: HeadMix,
    pub(super) norm: Vec<f32>,
    /// `[vocab, rank]`.
    pub(super) markov_in: Vec<bf16>,
    pub(super) markov_out: Bf16Matrix,
    pub(super) confidence: Bf16Matrix,
}

/// Reads tensors below one name prefix.
struct Loader<'a> {
    weights: &'a RangeWeights<'a>,
    prefix: String,
}

impl Loader<'_> {
    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn bad(&self, name: &str) -> impl Fn(PackError) -> ModelError {
        let tensor = self.name(name);
        move |error| ModelError::Pack { tensor: tensor.clone(), why: error.to_string() }
    }

    fn fp8(&self, name: &str) -> Result<Fp8Matrix, ModelError> {
        let bytes = self.weights.fp8(&self.name(name))?;
        Fp8Matrix::pack(bytes.n, bytes.k, bytes.codes, bytes.scales).map_err(self.bad(name))
    }

    fn fp4(&self, name: &str) -> Result<Fp4Matrix, ModelError> {
        let bytes = self.weights.fp4(&self.name(name))?;
        Fp4Matrix::pack(bytes.n, bytes.k, bytes.codes, bytes.scales).map_err(self.bad(name))
    }

    /// An FP8 tensor that the model uses as a plain bf16 product.
    fn widened(&self, name: &str) -> Result<Bf16Matrix, ModelError> {
        let bytes = self.weights.fp8(&self.name(name))?;
        let values = fp8_to_bf16(bytes.n, bytes.k, bytes.codes, bytes.scales).map_err(self.bad(name))?;
        Bf16Matrix::pack(bytes.n, bytes.k, &values).map_err(self.bad(name))
    }

    fn bf16(&self, name: &str, n: usize) -> Result<Bf16Matrix, ModelError> {
        let values = self.weights.bf16(&self.name(name))?;
        Bf16Matrix::pack(n, values.len() / n, &values).map_err(self.bad(name))
    }

    fn f32(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        self.weights.f32(&self.name(name))
    }

    fn norm(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        Ok(self.weights.bf16(&self.name(name))?.iter().map(|weight| weight.to_f32()).collect())
    }

    fn hyper(&self, half: &str) -> Result<HyperWeights, ModelError> {
        let base = self.f32(&format!("hc_{half}_base"))?;
        let mix = self.mix(&format!("hc_{half}_fn"), base.len())?;
        Ok(HyperWeights { mix, scale: self.f32(&format!("hc_{half}_scale"))?, base })
    }

    fn mix(&self, name: &str, n: usize) -> Result<F32Matrix, ModelError> {
        let values = self.f32(name)?;
        F32Matrix::pack(n, values.len() / n, &values).map_err(self.bad(name))
    }

    fn head_mix(&self) -> Result<HeadMix, ModelError> {
        let base = self.f32("hc_head_base")?;
        let mix = self.mix("hc_head_fn", base.len())?;
        let scale = self.f32("hc_head_scale")?.first().copied().unwrap_or(1.0);
        Ok(HeadMix { mix, scale, base })
    }

    fn compressor(&self, name: &str, ratio: usize, width: usize) -> Result<CompressorWeights, ModelError> {
        let ape = self.f32(&format!("{name}.ape"))?;
        let rows = ape.len() / ratio;
        Ok(CompressorWeights {
            width,
            norm: self.norm(&format!("{name}.norm"))?,
            wkv: self.bf16(&format!("{name}.wkv"), rows)?,
            wgate: self.bf16(&format!("{name}.wgate"), rows)?,
            ape,
        })
    }

    fn attention(&self, config: &ModelConfig, ratio: usize) -> Result<AttentionWeights, ModelError> {
        let compressor = (ratio > 0).then(|| self.compressor("attn.compressor", ratio, config.head_dim)).transpose()?;
        let indexer = || {
            Ok::<_, ModelError>(IndexerWeights {
                compressor: self.compressor("attn.indexer.compressor", ratio, config.index_dim)?,
                weights_proj: self.bf16("attn.indexer.weights_proj", config.index_heads)?,
                wq_b: self.fp8("attn.indexer.wq_b")?,
            })
        };
        Ok(AttentionWeights {
            wq_a: self.fp8("attn.wq_a")?,
            q_norm: self.norm("attn.q_norm")?,
            wq_b: self.fp8("attn.wq_b")?,
            wkv: self.fp8("attn.wkv")?,
            kv_norm: self.norm("attn.kv_norm")?,
            wo_a: self.widened("attn.wo_a")?,
            wo_b: self.fp8("attn.wo_b")?,
            sink: self.f32("attn.attn_sink")?,
            compressor,
            indexer: (ratio == OVERLAP_RATIO).then(indexer).transpose()?,
        })
    }

    fn experts(&self, config: &ModelConfig, hash: bool) -> Result<ExpertWeights, ModelError> {
        let routing = if hash {
            Routing::Hash(self.weights.expert_ids(&self.name("ffn.gate.tid2eid"))?)
        } else {
            Routing::Score(self.f32("ffn.gate.bias")?)
        };
        let expert = |expert| {
            let part = |part| self.fp4(&format!("ffn.experts.{expert}.{part}"));
            Ok::<_, ModelError>(Expert { w1: part("w1")?, w2: part("w2")?, w3: part("w3")? })
        };
        let shared = |part| self.fp8(&format!("ffn.shared_experts.{part}"));
        Ok(ExpertWeights {
            gate: self.bf16("ffn.gate", config.experts)?,
            routing,
            experts: (0..config.experts).map(expert).collect::<Result<_, _>>()?,
            shared: Expert { w1: shared("w1")?, w2: shared("w2")?, w3: shared("w3")? },
        })
    }

    fn layer(&self, config: &ModelConfig, ratio: usize, hash: bool) -> Result<LayerWeights, ModelError> {
        Ok(LayerWeights {
            ratio,
            hc_attn: self.hyper("attn")?,
            attn_norm: self.norm("attn_norm")?,
            attn: self.attention(config, ratio)?,
            hc_ffn: self.hyper("ffn")?,
            ffn_norm: self.norm("ffn_norm")?,
            ffn: self.experts(config, hash)?,
        })
    }
}

impl Weights {
    /// Packs the weights of a range; rotations for `positions` positions.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub(super) fn load(weights: &RangeWeights<'_>, positions: u32) -> Result<Self, ModelError> {
        let config = weights.checkpoint().config();
        let range = weights.range();
        let drafts = weights.checkpoint().drafts(range);
        let at = |prefix: String| Loader { weights, prefix };
        let root = at(String::new());
        let layer =
            |layer| at(format!("layers.{layer}.")).layer(config, config.ratio(layer), layer < config.hash_layers);
        let tail = || {
            Ok::<_, ModelError>(TailWeights {
                hc_head: root.head_mix()?,
                norm: root.norm("norm")?,
                head: root.bf16("head", config.vocab)?,
            })
        };
        let embeds = range.lo() == 0 || drafts;
        let positions = super::to_usize(positions);
        let stretch = Stretch {
            original: f64::from(config.yarn.original),
            factor: config.yarn.factor,
            beta_fast: f64::from(config.yarn.beta_fast),
            beta_slow: f64::from(config.yarn.beta_slow),
        };
        Ok(Self {
            embedding: if embeds { weights.bf16("embed")? } else { Vec::new() },
            layers: range.layers().map(layer).collect::<Result<_, _>>()?,
            tail: (range.hi() == config.layers).then(tail).transpose()?,
            drafter: if drafts { load_drafter(weights, config)? } else { None },
            plain: RopeTable::new(&frequencies(config.rope_dim, config.rope_theta, None), positions),
            scaled: RopeTable::new(&frequencies(config.rope_dim, config.compress_rope_theta, Some(stretch)), positions),
        })
    }

    /// A token's embedding, `[dim]`.
    pub(super) fn embedding(&self, id: usize, dim: usize) -> &[bf16] {
        &self.embedding[id * dim..(id + 1) * dim]
    }

    /// The rotations of a layer with this ratio.
    pub(super) fn rotations(&self, ratio: usize) -> &RopeTable {
        if ratio == 0 { &self.plain } else { &self.scaled }
    }

    /// Resident bytes, rotations not counted.
    pub(super) fn bytes(&self) -> u64 {
        let layers: usize = self.layers.iter().map(LayerWeights::bytes).sum();
        let tail = self.tail.as_ref().map_or(0, |tail| tail.hc_head.bytes() + 4 * tail.norm.len() + tail.head.bytes());
        let drafter = self.drafter.as_ref().map_or(0, DrafterWeights::bytes);
        (2 * self.embedding.len() + layers + tail + drafter) as u64
    }
}

fn load_drafter(weights: &RangeWeights<'_>, config: &ModelConfig) -> Result<Option<DrafterWeights>, ModelError> {
    let Some(draft) = &config.draft else { return Ok(None) };
    let at = |stage: usize| Loader { weights, prefix: format!("mtp.{stage}.") };
    let (first, last) = (at(0), at(draft.stages - 1));
    Ok(Some(DrafterWeights {
        main_proj: first.fp8("main_proj")?,
        main_norm: first.norm("main_norm")?,
        stages: (0..draft.stages).map(|stage| at(stage).layer(config, 0, false)).collect::<Result<_, _>>()?,
        hc_head: last.head_mix()?,
        norm: last.norm("norm")?,
        markov_in: weights.bf16(&last.name("markov_head.markov_w1"))?,
        markov_out: last.bf16("markov_head.markov_w2", config.vocab)?,
        confidence: last.bf16("confidence_head.proj", 1)?,
    }))
}

impl LayerWeights {
    fn bytes(&self) -> usize {
        let norms = self.attn_norm.len() + self.ffn_norm.len();
        self.hc_attn.bytes() + self.hc_ffn.bytes() + self.attn.bytes() + self.ffn.bytes() + 4 * norms
    }
}

impl HyperWeights {
    fn bytes(&self) -> usize {
        self.mix.bytes() + 4 * (self.scale.len() + self.base.len())
    }
}

impl HeadMix {
    fn bytes(&self) -> usize {
        self.mix.bytes() + 4 * (1 + self.base.len())
    }
}

impl CompressorWeights {
    fn bytes(&self) -> usize {
        self.wkv.bytes() + self.wgate.bytes() + 4 * (self.ape.len() + self.norm.len())
    }
}

impl AttentionWeights {
    fn bytes(&self) -> usize {
        let matrices = self.wq_a.bytes() + self.wq_b.bytes() + self.wkv.bytes() + self.wo_a.bytes() + self.wo_b.bytes();
        let vectors = 4 * (self.q_norm.len() + self.kv_norm.len() + self.sink.len());
        let indexer = self
            .indexer
            .as_ref()
            .map_or(0, |indexer| indexer.compressor.bytes() + indexer.weights_proj.bytes() + indexer.wq_b.bytes());
        matrices + vectors + indexer + self.compressor.as_ref().map_or(0, CompressorWeights::bytes)
    }
}

impl ExpertWeights {
    fn bytes(&self) -> usize {
        let routing = match &self.routing {
            Routing::Score(bias) => 4 * bias.len(),
            Routing::Hash(ids) => 2 * ids.len(),
        };
        let routed: usize = self.experts.iter().map(|e| e.w1.bytes() + e.w2.bytes() + e.w3.bytes()).sum();
        let shared = self.shared.w1.bytes() + self.shared.w2.bytes() + self.shared.w3.bytes();
        self.gate.bytes() + routing + routed + shared
    }
}

impl DrafterWeights {
    fn bytes(&self) -> usize {
        let stages: usize = self.stages.iter().map(LayerWeights::bytes).sum();
        let ends = self.hc_head.bytes() + self.markov_out.bytes() + self.confidence.bytes();
        let vectors = 4 * (self.main_norm.len() + self.norm.len()) + 2 * self.markov_in.len();
        self.main_proj.bytes() + stages + ends + vectors
    }
}
