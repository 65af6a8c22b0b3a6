//! The weights of one range on the device.
//!
//! Owns which tensor lies there in which form.

use ringfence_engine::model::config::OVERLAP_RATIO;
use ringfence_engine::model::{ModelConfig, RangeWeights};

use crate::driver::{Arena, Device, DevicePtr};
use crate::error::CudaError;
use crate::experts::{Experts, Stack};
use crate::kernels::Kernels;
use crate::linear::{Format, Linear};
use crate::load::{Held, Loader};
use crate::ops::MixWeights;

/// All weights of a range.
#[derive(Debug)]
pub struct Weights {
    /// bf16 `[vocab, dim]`, where the range embeds or drafts.
    pub(crate) embedding: Option<DevicePtr>,
    /// Of the range's layers, ascending.
    pub(crate) layers: Vec<LayerWeights>,
    /// What follows the last layer.
    pub(crate) tail: Option<TailWeights>,
    /// The draft stages.
    pub(crate) drafter: Option<DrafterWeights>,
    held: Vec<Held>,
    memory: Arena,
}

/// One layer of the target model, or one draft stage.
#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) ratio: usize,
    pub(crate) hc_attn: MixWeights,
    pub(crate) attn_norm: DevicePtr,
    pub(crate) attn: AttentionWeights,
    pub(crate) hc_ffn: MixWeights,
    pub(crate) ffn_norm: DevicePtr,
    pub(crate) ffn: MoeWeights,
}

/// Attention of one layer.
#[derive(Debug)]
pub(crate) struct AttentionWeights {
    pub(crate) wq_a: Linear,
    pub(crate) q_norm: DevicePtr,
    pub(crate) wq_b: Linear,
    pub(crate) wkv: Linear,
    pub(crate) kv_norm: DevicePtr,
    pub(crate) wo_a: Linear,
    pub(crate) wo_b: Linear,
    pub(crate) sink: DevicePtr,
    pub(crate) compressor: Option<CompressorWeights>,
    pub(crate) indexer: Option<IndexerWeights>,
}

/// A compressor.
#[derive(Debug)]
pub(crate) struct CompressorWeights {
    /// Values that a slot holds.
    pub(crate) width: usize,
    /// fp32 `[ratio, rows of wkv]`.
    pub(crate) ape: DevicePtr,
    pub(crate) norm: DevicePtr,
    pub(crate) wkv: Linear,
    pub(crate) wgate: Linear,
}

/// An indexer.
#[derive(Debug)]
pub(crate) struct IndexerWeights {
    pub(crate) compressor: CompressorWeights,
    pub(crate) weights_proj: Linear,
    pub(crate) wq_b: Linear,
}

/// How a layer routes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Routing {
    /// By score; the bias selects only, fp32 `[experts]`.
    Score(DevicePtr),
    /// By token id, u16 `[vocab, experts_per_token]`.
    Hash(DevicePtr),
}

/// The mixture of experts of one layer.
#[derive(Debug)]
pub(crate) struct MoeWeights {
    pub(crate) gate: Linear,
    pub(crate) routing: Routing,
    pub(crate) experts: Experts,
}

/// What follows the last layer.
#[derive(Debug)]
pub(crate) struct TailWeights {
    pub(crate) hc_head: MixWeights,
    pub(crate) norm: DevicePtr,
    pub(crate) head: Linear,
}

/// The draft stages and their ends.
#[derive(Debug)]
pub(crate) struct DrafterWeights {
    pub(crate) main_proj: Linear,
    pub(crate) main_norm: DevicePtr,
    pub(crate) stages: Vec<LayerWeights>,
    pub(crate) hc_head: MixWeights,
    pub(crate) norm: DevicePtr,
    /// bf16 `[vocab, rank]`.
    pub(crate) markov_in: DevicePtr,
    pub(crate) markov_out: Linear,
    pub(crate) confidence: Linear,
}

/// What one range is made of, before it has its memory.
struct Parts {
    embedding: Option<DevicePtr>,
    layers: Vec<LayerWeights>,
    tail: Option<TailWeights>,
    drafter: Option<DrafterWeights>,
}

impl Weights {
    /// Moves the weights of a range to the device.
    ///
    /// # Errors
    /// [`CudaError::Model`] naming the tensor, [`CudaError::Memory`], [`CudaError::Driver`].
    pub fn load(device: &Device, kernels: &Kernels, weights: &RangeWeights<'_>) -> Result<Self, CudaError> {
        let (parts, memory, held) = Loader::run(device, kernels, weights, |loader| parts(loader, weights))?;
        let Parts { embedding, layers, tail, drafter } = parts;
        Ok(Self { embedding, layers, tail, drafter, held, memory })
    }

    /// Bytes of device memory.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.memory.size() as u64
    }

    /// What the device holds, tensor by tensor.
    #[must_use]
    pub fn held(&self) -> &[Held] {
        &self.held
    }
}

fn parts(loader: &mut Loader<'_>, weights: &RangeWeights<'_>) -> Result<Parts, CudaError> {
    let config = weights.checkpoint().config();
    let range = weights.range();
    let drafts = weights.checkpoint().drafts(range);
    let embeds = range.lo() == 0 || drafts;
    let embedding = if embeds { Some(loader.plain("embed.weight", Format::Bf16, config.vocab)?.weight) } else { None };
    let mut layers = Vec::new();
    for layer in range.layers() {
        let part = Part { prefix: format!("layers.{layer}."), config };
        layers.push(part.layer(loader, config.ratio(layer), layer < config.hash_layers)?);
    }
    let root = Part { prefix: String::new(), config };
    let tail = if range.hi() == config.layers {
        Some(TailWeights {
            hc_head: root.mix(loader, "hc_head")?,
            norm: loader.norm("norm")?,
            head: loader.plain("head.weight", Format::Bf16, config.vocab)?,
        })
    } else {
        None
    };
    let drafter = if drafts { drafter(loader, config)? } else { None };
    Ok(Parts { embedding, layers, tail, drafter })
}

fn drafter(loader: &mut Loader<'_>, config: &ModelConfig) -> Result<Option<DrafterWeights>, CudaError> {
    let Some(draft) = &config.draft else { return Ok(None) };
    let at = |stage: usize| Part { prefix: format!("mtp.{stage}."), config };
    let (first, last) = (at(0), at(draft.stages - 1));
    let mut stages = Vec::new();
    for stage in 0..draft.stages {
        stages.push(at(stage).layer(loader, 0, false)?);
    }
    Ok(Some(DrafterWeights {
        main_proj: loader.fp8(&first.name("main_proj"), Format::Fp8)?,
        main_norm: loader.norm(&first.name("main_norm"))?,
        stages,
        hc_head: last.mix(loader, "hc_head")?,
        norm: loader.norm(&last.name("norm"))?,
        markov_in: loader.plain(&last.name("markov_head.markov_w1.weight"), Format::Bf16, config.vocab)?.weight,
        markov_out: loader.plain(&last.name("markov_head.markov_w2.weight"), Format::Bf16, config.vocab)?,
        confidence: loader.plain(&last.name("confidence_head.proj.weight"), Format::Bf16, 1)?,
    }))
}

/// Tensors below one name prefix.
struct Part<'a> {
    prefix: String,
    config: &'a ModelConfig,
}

impl Part<'_> {
    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn norm(&self, loader: &mut Loader<'_>, name: &str) -> Result<DevicePtr, CudaError> {
        loader.norm(&self.name(name))
    }

    fn f32(&self, loader: &mut Loader<'_>, name: &str) -> Result<DevicePtr, CudaError> {
        Ok(loader.f32(&self.name(name))?.0)
    }

    fn fp8(&self, loader: &mut Loader<'_>, name: &str) -> Result<Linear, CudaError> {
        loader.fp8(&self.name(name), Format::Fp8)
    }

    fn bf16(&self, loader: &mut Loader<'_>, name: &str, rows: usize) -> Result<Linear, CudaError> {
        loader.plain(&self.name(&format!("{name}.weight")), Format::Bf16, rows)
    }

    fn mix(&self, loader: &mut Loader<'_>, name: &str) -> Result<MixWeights, CudaError> {
        let (base, rows) = loader.f32(&self.name(&format!("{name}_base")))?;
        let mix = loader.plain(&self.name(&format!("{name}_fn")), Format::F32, rows)?.weight;
        Ok(MixWeights { mix, scale: self.f32(loader, &format!("{name}_scale"))?, base })
    }

    fn layer(&self, loader: &mut Loader<'_>, ratio: usize, hash: bool) -> Result<LayerWeights, CudaError> {
        Ok(LayerWeights {
            ratio,
            hc_attn: self.mix(loader, "hc_attn")?,
            attn_norm: self.norm(loader, "attn_norm")?,
            attn: self.attention(loader, ratio)?,
            hc_ffn: self.mix(loader, "hc_ffn")?,
            ffn_norm: self.norm(loader, "ffn_norm")?,
            ffn: self.moe(loader, hash)?,
        })
    }

    fn attention(&self, loader: &mut Loader<'_>, ratio: usize) -> Result<AttentionWeights, CudaError> {
        let config = self.config;
        let compressor =
            if ratio > 0 { Some(self.compressor(loader, "attn.compressor", ratio, config.head_dim)?) } else { None };
        let indexer = if ratio == OVERLAP_RATIO {
            Some(IndexerWeights {
                compressor: self.compressor(loader, "attn.indexer.compressor", ratio, config.index_dim)?,
                weights_proj: self.bf16(loader, "attn.indexer.weights_proj", config.index_heads)?,
                wq_b: self.fp8(loader, "attn.indexer.wq_b")?,
            })
        } else {
            None
        };
        Ok(AttentionWeights {
            wq_a: self.fp8(loader, "attn.wq_a")?,
            q_norm: self.norm(loader, "attn.q_norm")?,
            wq_b: self.fp8(loader, "attn.wq_b")?,
            wkv: self.fp8(loader, "attn.wkv")?,
            kv_norm: self.norm(loader, "attn.kv_norm")?,
            wo_a: loader.fp8(&self.name("attn.wo_a"), Format::Wide)?,
            wo_b: self.fp8(loader, "attn.wo_b")?,
            sink: self.f32(loader, "attn.attn_sink")?,
            compressor,
            indexer,
        })
    }

    fn compressor(
        &self,
        loader: &mut Loader<'_>,
        name: &str,
        ratio: usize,
        width: usize,
    ) -> Result<CompressorWeights, CudaError> {
        let (ape, values) = loader.f32(&self.name(&format!("{name}.ape")))?;
        let rows = values / ratio;
        Ok(CompressorWeights {
            width,
            ape,
            norm: self.norm(loader, &format!("{name}.norm"))?,
            wkv: self.bf16(loader, &format!("{name}.wkv"), rows)?,
            wgate: self.bf16(loader, &format!("{name}.wgate"), rows)?,
        })
    }

    fn moe(&self, loader: &mut Loader<'_>, hash: bool) -> Result<MoeWeights, CudaError> {
        let config = self.config;
        let routing = if hash {
            let name = self.name("ffn.gate.tid2eid");
            Routing::Hash(loader.values(&name, "u16", |weights| weights.expert_ids(&name))?.0)
        } else {
            Routing::Score(self.f32(loader, "ffn.gate.bias")?)
        };
        let gate = self.bf16(loader, "ffn.gate", config.experts)?;
        let mut stack = |part: &str| {
            let names = (0..config.experts).map(|expert| self.name(&format!("ffn.experts.{expert}.{part}")));
            let (weight, scale) = loader.stack(names)?;
            Ok::<_, CudaError>(Stack { weight, scale })
        };
        let (w1, w2, w3) = (stack("w1")?, stack("w2")?, stack("w3")?);
        let mut shared = |part: &str| self.fp8(loader, &format!("ffn.shared_experts.{part}"));
        let experts = Experts {
            w1,
            w2,
            w3,
            shared: [shared("w1")?, shared("w2")?, shared("w3")?],
            count: config.experts,
            dim: config.dim,
            inner: config.inner,
            per_row: config.experts_per_token,
            limit: if config.swiglu_limit > 0.0 { config.swiglu_limit } else { f32::INFINITY },
        };
        Ok(MoeWeights { gate, routing, experts })
    }
}
