//! Which tensors a range needs, with types and shapes, by the configuration alone.
//!
//! Owns the one list that checking, planning and loading share.

use super::config::{LINEAR_GROUP, ModelConfig, OVERLAP_RATIO};
use super::names::Part;
use super::shard::Dtype;

/// Inputs that share one FP4 weight scale.
pub const FP4_GROUP: usize = 32;

/// What a tensor holds; decides its element types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// E4M3 codes `[n, k]`.
    Fp8,
    /// E8M0 scales of 128×128 blocks, `[ceil(n/128), ceil(k/128)]`.
    Fp8Scale,
    /// Pairs of E2M1 codes `[n, k/2]`.
    Fp4,
    /// E8M0 scales of 32 inputs, `[n, k/32]`.
    Fp4Scale,
    /// bf16.
    Bf16,
    /// fp32.
    F32,
    /// Expert ids.
    Ids,
}

impl Kind {
    /// The element types that are read as this kind.
    #[must_use]
    pub fn dtypes(self) -> &'static [Dtype] {
        match self {
            Self::Fp8 => &[Dtype::E4m3],
            Self::Fp8Scale | Self::Fp4Scale => &[Dtype::E8m0, Dtype::U8],
            Self::Fp4 => &[Dtype::I8, Dtype::U8],
            Self::Bf16 => &[Dtype::Bf16],
            Self::F32 => &[Dtype::F32],
            Self::Ids => &[Dtype::I64, Dtype::I32],
        }
    }

    /// Whether the tensor holds E8M0 scales.
    #[must_use]
    pub fn is_scale(self) -> bool {
        matches!(self, Self::Fp8Scale | Self::Fp4Scale)
    }
}

/// A tensor that a range needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Normalized name.
    pub name: String,
    /// What it holds.
    pub kind: Kind,
    /// Its stored shape.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// Elements as stored.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes as stored, ids counted as their longer type.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.elements() * self.kind.dtypes()[0].size()
    }
}

/// Collects the tensors below one name prefix.
struct List {
    prefix: String,
    specs: Vec<TensorSpec>,
}

impl List {
    fn push(&mut self, name: &str, kind: Kind, shape: &[usize]) {
        let shape = shape.iter().map(|&size| size as u64).collect();
        self.specs.push(TensorSpec { name: format!("{}{name}", self.prefix), kind, shape });
    }

    fn bf16(&mut self, name: &str, shape: &[usize]) {
        self.push(&format!("{name}.weight"), Kind::Bf16, shape);
    }

    fn fp8(&mut self, name: &str, n: usize, k: usize) {
        self.push(&format!("{name}.weight"), Kind::Fp8, &[n, k]);
        let blocks = [n.div_ceil(LINEAR_GROUP), k.div_ceil(LINEAR_GROUP)];
        self.push(&format!("{name}.scale"), Kind::Fp8Scale, &blocks);
    }

    fn fp4(&mut self, name: &str, n: usize, k: usize) {
        self.push(&format!("{name}.weight"), Kind::Fp4, &[n, k / 2]);
        self.push(&format!("{name}.scale"), Kind::Fp4Scale, &[n, k / FP4_GROUP]);
    }

    fn compressor(&mut self, name: &str, config: &ModelConfig, ratio: usize, width: usize) {
        let rows = if ratio == OVERLAP_RATIO { 2 * width } else { width };
        self.push(&format!("{name}.ape"), Kind::F32, &[ratio, rows]);
        self.bf16(&format!("{name}.norm"), &[width]);
        self.bf16(&format!("{name}.wkv"), &[rows, config.dim]);
        self.bf16(&format!("{name}.wgate"), &[rows, config.dim]);
    }

    fn hc_head(&mut self, config: &ModelConfig) {
        self.push("hc_head_fn", Kind::F32, &[config.hc, config.hc * config.dim]);
        self.push("hc_head_base", Kind::F32, &[config.hc]);
        self.push("hc_head_scale", Kind::F32, &[1]);
    }

    fn layer(&mut self, config: &ModelConfig, ratio: usize, hash: bool) {
        self.attention(config, ratio);
        self.bf16("attn_norm", &[config.dim]);
        self.bf16("ffn_norm", &[config.dim]);
        for half in ["attn", "ffn"] {
            self.push(&format!("hc_{half}_fn"), Kind::F32, &[config.mixes(), config.hc * config.dim]);
            self.push(&format!("hc_{half}_base"), Kind::F32, &[config.mixes()]);
            self.push(&format!("hc_{half}_scale"), Kind::F32, &[3]);
        }
        self.experts(config, hash);
    }

    fn attention(&mut self, config: &ModelConfig, ratio: usize) {
        let (heads, head_dim) = (config.heads, config.head_dim);
        self.fp8("attn.wq_a", config.q_rank, config.dim);
        self.bf16("attn.q_norm", &[config.q_rank]);
        self.fp8("attn.wq_b", heads * head_dim, config.q_rank);
        self.fp8("attn.wkv", head_dim, config.dim);
        self.bf16("attn.kv_norm", &[head_dim]);
        self.fp8("attn.wo_a", config.o_groups * config.o_rank, heads / config.o_groups * head_dim);
        self.fp8("attn.wo_b", config.dim, config.o_groups * config.o_rank);
        self.push("attn.attn_sink", Kind::F32, &[heads]);
        if ratio > 0 {
            self.compressor("attn.compressor", config, ratio, head_dim);
        }
        if ratio == OVERLAP_RATIO {
            self.compressor("attn.indexer.compressor", config, ratio, config.index_dim);
            self.bf16("attn.indexer.weights_proj", &[config.index_heads, config.dim]);
            self.fp8("attn.indexer.wq_b", config.index_heads * config.index_dim, config.q_rank);
        }
    }

    fn experts(&mut self, config: &ModelConfig, hash: bool) {
        let (dim, inner) = (config.dim, config.inner);
        self.bf16("ffn.gate", &[config.experts, dim]);
        if hash {
            self.push("ffn.gate.tid2eid", Kind::Ids, &[config.vocab, config.experts_per_token]);
        } else {
            self.push("ffn.gate.bias", Kind::F32, &[config.experts]);
        }
        for expert in 0..config.experts {
            self.fp4(&format!("ffn.experts.{expert}.w1"), inner, dim);
            self.fp4(&format!("ffn.experts.{expert}.w2"), dim, inner);
            self.fp4(&format!("ffn.experts.{expert}.w3"), inner, dim);
        }
        self.fp8("ffn.shared_experts.w1", inner, dim);
        self.fp8("ffn.shared_experts.w2", dim, inner);
        self.fp8("ffn.shared_experts.w3", inner, dim);
    }

    fn draft(&mut self, config: &ModelConfig, stage: usize) {
        let Some(draft) = &config.draft else { return };
        self.layer(config, 0, false);
        if stage == 0 {
            self.fp8("main_proj", config.dim, draft.targets.len() * config.dim);
            self.bf16("main_norm", &[config.dim]);
        }
        if stage + 1 == draft.stages {
            self.hc_head(config);
            self.bf16("norm", &[config.dim]);
            self.bf16("markov_head.markov_w1", &[config.vocab, draft.rank]);
            self.bf16("markov_head.markov_w2", &[config.vocab, draft.rank]);
            self.bf16("confidence_head.proj", &[1, config.dim + draft.rank]);
        }
    }
}

/// The tensors of one part of the model.
#[must_use]
pub fn tensors_of(config: &ModelConfig, part: Part) -> Vec<TensorSpec> {
    let mut list = List { prefix: prefix(part), specs: Vec::new() };
    match part {
        Part::Embed => list.bf16("embed", &[config.vocab, config.dim]),
        Part::Layer(layer) => list.layer(config, config.ratio(layer), layer < config.hash_layers),
        Part::Tail => {
            list.hc_head(config);
            list.bf16("norm", &[config.dim]);
            list.bf16("head", &[config.vocab, config.dim]);
        }
        Part::Draft(stage) => list.draft(config, usize::from(stage)),
        Part::Other => {}
    }
    list.specs
}

/// What the names of a part start with.
#[must_use]
pub fn prefix(part: Part) -> String {
    match part {
        Part::Layer(layer) => format!("layers.{layer}."),
        Part::Draft(stage) => format!("mtp.{stage}."),
        Part::Embed | Part::Tail | Part::Other => String::new(),
    }
}
