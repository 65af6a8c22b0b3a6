//! The sizes of a model, read from its configuration, and the checks that refuse another one.
//!
//! Owns [`ModelConfig`]: once made, every size in it is positive, bounded and consistent with the
//! others, so that code behind it computes shapes without checks.

use serde::Deserialize;
use serde_json::Value;

use super::error::ModelError;

/// Longest configuration file that is read, in bytes.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The only overlapping ratio; its layers also have an indexer.
pub const OVERLAP_RATIO: usize = 4;

/// Values that share one activation scale before a linear, and the block of FP8 weights.
pub const LINEAR_GROUP: usize = 128;

/// Position scaling of the layers that compress.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Scaling of slow frequencies.
    pub factor: f32,
    /// Context of the unscaled model, in positions.
    pub original: u32,
    /// Rotations above which a frequency is kept.
    pub beta_fast: f32,
    /// Rotations below which a frequency is scaled.
    pub beta_slow: f32,
}

/// The drafter's sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftConfig {
    /// Draft stages.
    pub stages: usize,
    /// Tokens per block, as trained.
    pub block: usize,
    /// The id that fills a block behind its anchor.
    pub noise: u32,
    /// Target layers whose outputs feed the drafter, ascending.
    pub targets: Vec<u16>,
    /// Rank of the Markov head.
    pub rank: usize,
}

/// The sizes and constants of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Layers of the target model.
    pub layers: u16,
    /// Values per residual stream.
    pub dim: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Attention heads.
    pub heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Rotated values at a head's end.
    pub rope_dim: usize,
    /// Rank of the query projection.
    pub q_rank: usize,
    /// Rank of each output group.
    pub o_rank: usize,
    /// Output groups.
    pub o_groups: usize,
    /// Positions that attention sees in full.
    pub window: usize,
    /// Compression ratio per layer, `[layers]`; 0: window only.
    pub ratios: Vec<usize>,
    /// Heads of the indexer.
    pub index_heads: usize,
    /// Values per indexer head, a power of two.
    pub index_dim: usize,
    /// Compressed slots that the indexer picks.
    pub index_topk: usize,
    /// Routed experts.
    pub experts: usize,
    /// Routed experts per token.
    pub experts_per_token: usize,
    /// Inner size of an expert.
    pub inner: usize,
    /// Leading layers that route by token id.
    pub hash_layers: u16,
    /// Factor on routing weights.
    pub route_scale: f32,
    /// Bound inside experts; 0: none.
    pub swiglu_limit: f32,
    /// Residual streams.
    pub hc: usize,
    /// Sinkhorn rounds.
    pub sinkhorn_iters: usize,
    /// Epsilon of the hyper-connections.
    pub hc_eps: f32,
    /// Epsilon of every root mean square.
    pub norm_eps: f32,
    /// Rotation base of window-only layers.
    pub rope_theta: f32,
    /// Rotation base of layers that compress.
    pub compress_rope_theta: f32,
    /// Position scaling of layers that compress.
    pub yarn: Yarn,
    /// The drafter, where the checkpoint has one.
    pub draft: Option<DraftConfig>,
    /// First token of a document.
    pub bos: u32,
    /// Tokens that end a document.
    pub eos: Vec<u32>,
    /// Longest context of the model, in positions.
    pub max_positions: u32,
}

#[derive(Debug, Deserialize)]
struct Raw {
    model_type: Option<String>,
    #[serde(alias = "n_layers")]
    num_hidden_layers: Option<u64>,
    #[serde(alias = "dim")]
    hidden_size: Option<u64>,
    vocab_size: Option<u64>,
    #[serde(alias = "n_heads")]
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    #[serde(alias = "rope_head_dim")]
    qk_rope_head_dim: Option<u64>,
    q_lora_rank: Option<u64>,
    o_lora_rank: Option<u64>,
    o_groups: Option<u64>,
    #[serde(alias = "window_size")]
    sliding_window: Option<u64>,
    compress_ratios: Option<Vec<u64>>,
    index_n_heads: Option<u64>,
    index_head_dim: Option<u64>,
    index_topk: Option<u64>,
    n_routed_experts: Option<u64>,
    #[serde(alias = "n_activated_experts")]
    num_experts_per_tok: Option<u64>,
    n_shared_experts: Option<u64>,
    #[serde(alias = "moe_inter_dim")]
    moe_intermediate_size: Option<u64>,
    #[serde(alias = "n_hash_layers")]
    num_hash_layers: Option<u64>,
    #[serde(alias = "score_func")]
    scoring_func: Option<String>,
    norm_topk_prob: Option<bool>,
    topk_method: Option<String>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    #[serde(alias = "route_scale")]
    routed_scaling_factor: Option<f64>,
    swiglu_limit: Option<f64>,
    hc_mult: Option<u64>,
    hc_sinkhorn_iters: Option<u64>,
    hc_eps: Option<f64>,
    #[serde(alias = "norm_eps")]
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    compress_rope_theta: Option<f64>,
    rope_scaling: Option<RawYarn>,
    rope_factor: Option<f64>,
    original_seq_len: Option<u64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    expert_dtype: Option<String>,
    quantization_config: Option<RawQuant>,
    dtype: Option<String>,
    scale_fmt: Option<String>,
    dspark_block_size: Option<u64>,
    dspark_noise_token_id: Option<u64>,
    dspark_target_layer_ids: Option<Vec<u64>>,
    dspark_markov_rank: Option<u64>,
    bos_token_id: Option<u64>,
    eos_token_id: Option<Value>,
    #[serde(alias = "max_seq_len")]
    max_position_embeddings: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct RawYarn {
    #[serde(rename = "type", alias = "rope_type")]
    kind: Option<String>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<u64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct RawQuant {
    quant_method: Option<String>,
    fmt: Option<String>,
    scale_fmt: Option<String>,
    weight_block_size: Option<Vec<u64>>,
}

/// Reads fields of one file, with errors that name it.
struct Reader<'a> {
    file: &'a str,
}

impl Reader<'_> {
    fn refuse(&self, field: &'static str, got: impl ToString, expected: impl ToString) -> ModelError {
        ModelError::Unsupported {
            file: self.file.to_owned(),
            field,
            got: got.to_string(),
            expected: expected.to_string(),
        }
    }

    fn need<T>(&self, field: &'static str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::FieldMissing { file: self.file.to_owned(), field })
    }

    fn size(&self, field: &'static str, value: Option<u64>, lo: u64, hi: u64) -> Result<usize, ModelError> {
        let value = self.need(field, value)?;
        if (lo..=hi).contains(&value) {
            // `hi` is far below usize::MAX for every field.
            Ok(usize::try_from(value).unwrap_or(usize::MAX))
        } else {
            Err(self.refuse(field, value, format!("{lo} to {hi}")))
        }
    }

    fn number(&self, field: &'static str, value: Option<f64>, lo: f64, hi: f64) -> Result<f32, ModelError> {
        let value = self.need(field, value)?;
        if value >= lo && value <= hi {
            #[allow(clippy::cast_possible_truncation, reason = "constants of the model are fp32")]
            Ok(value as f32)
        } else {
            Err(self.refuse(field, value, format!("{lo} to {hi}")))
        }
    }

    fn word(&self, field: &'static str, value: Option<&str>, expected: &str) -> Result<(), ModelError> {
        match value {
            Some(got) if got == expected => Ok(()),
            Some(got) => Err(self.refuse(field, got, expected)),
            None => Err(self.refuse(field, "missing", expected)),
        }
    }

    fn word_if(&self, field: &'static str, value: Option<&str>, expected: &str) -> Result<(), ModelError> {
        if value.is_some() { self.word(field, value, expected) } else { Ok(()) }
    }

    fn flag_if(&self, field: &'static str, value: Option<bool>, expected: bool) -> Result<(), ModelError> {
        match value {
            Some(got) if got != expected => Err(self.refuse(field, got, expected)),
            _ => Ok(()),
        }
    }

    fn multiple(&self, field: &'static str, value: usize, of: usize) -> Result<(), ModelError> {
        if value.is_multiple_of(of) { Ok(()) } else { Err(self.refuse(field, value, format!("a multiple of {of}"))) }
    }
}

impl ModelConfig {
    /// Reads a configuration in the spelling of `config.json` or of `inference/config.json`.
    ///
    /// # Errors
    /// [`ModelError`] naming `file`, the field, the value found and the values that are run.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, ModelError> {
        let raw: Raw = serde_json::from_slice(bytes)
            .map_err(|error| ModelError::Json { file: file.to_owned(), why: error.to_string() })?;
        let reader = Reader { file };
        check_family(&reader, &raw)?;
        let config = Self { draft: None, ..read_sizes(&reader, &raw)? };
        let draft = read_draft(&reader, &raw, &config)?;
        let config = Self { draft, ..config };
        check_relations(&reader, &config)?;
        Ok(config)
    }

    /// The compression ratio of a layer; 0 past the target model (draft stages).
    #[must_use]
    pub fn ratio(&self, layer: u16) -> usize {
        self.ratios.get(usize::from(layer)).copied().unwrap_or(0)
    }

    /// Width of the Sinkhorn mixes: `(2 + hc) · hc`.
    #[must_use]
    pub fn mixes(&self) -> usize {
        (2 + self.hc) * self.hc
    }
}

fn check_family(reader: &Reader<'_>, raw: &Raw) -> Result<(), ModelError> {
    // The inference spelling has no model_type and no quantization_config: `dtype` tells it.
    let inference = raw.model_type.is_none() && raw.dtype.is_some() && raw.quantization_config.is_none();
    if inference {
        reader.word("dtype", raw.dtype.as_deref(), "fp8")?;
        reader.word("scale_fmt", raw.scale_fmt.as_deref(), "ue8m0")?;
        reader.flag_if("norm_topk_prob", raw.norm_topk_prob, true)?;
    } else {
        reader.word("model_type", raw.model_type.as_deref(), "deepseek_v4")?;
        if raw.norm_topk_prob != Some(true) {
            let got = raw.norm_topk_prob.map_or_else(|| "missing".to_owned(), |got| got.to_string());
            return Err(reader.refuse("norm_topk_prob", got, true));
        }
        let quant = reader.need("quantization_config", raw.quantization_config.as_ref())?;
        reader.word("quantization_config.quant_method", quant.quant_method.as_deref(), "fp8")?;
        reader.word("quantization_config.fmt", quant.fmt.as_deref(), "e4m3")?;
        reader.word("quantization_config.scale_fmt", quant.scale_fmt.as_deref(), "ue8m0")?;
        let block = quant.weight_block_size.as_deref().unwrap_or_default();
        if block != [128, 128] {
            return Err(reader.refuse("quantization_config.weight_block_size", format!("{block:?}"), "[128, 128]"));
        }
    }
    reader.word("expert_dtype", raw.expert_dtype.as_deref(), "fp4")?;
    reader.word("scoring_func", raw.scoring_func.as_deref(), "sqrtsoftplus")?;
    reader.word_if("topk_method", raw.topk_method.as_deref(), "noaux_tc")?;
    reader.word_if("hidden_act", raw.hidden_act.as_deref(), "silu")?;
    reader.flag_if("attention_bias", raw.attention_bias, false)?;
    reader.flag_if("tie_word_embeddings", raw.tie_word_embeddings, false)?;
    if let Some(got) = raw.num_key_value_heads.filter(|&got| got != 1) {
        return Err(reader.refuse("num_key_value_heads", got, 1));
    }
    Ok(())
}

fn read_sizes(reader: &Reader<'_>, raw: &Raw) -> Result<ModelConfig, ModelError> {
    let layers = reader.size("num_hidden_layers", raw.num_hidden_layers, 1, 4096)?;
    let hash = reader.size("num_hash_layers", raw.num_hash_layers, 0, layers as u64)?;
    let vocab = reader.size("vocab_size", raw.vocab_size, 2, 1 << 24)?;
    let shared = reader.size("n_shared_experts", raw.n_shared_experts, 0, 1 << 20)?;
    if shared != 1 {
        return Err(reader.refuse("n_shared_experts", shared, 1));
    }
    let experts = reader.size("n_routed_experts", raw.n_routed_experts, 1, 1 << 14)?;
    let max_positions = reader.size("max_position_embeddings", raw.max_position_embeddings, 1, 1 << 24)?;
    Ok(ModelConfig {
        layers: narrow(layers),
        dim: reader.size("hidden_size", raw.hidden_size, 1, 1 << 16)?,
        vocab,
        heads: reader.size("num_attention_heads", raw.num_attention_heads, 1, 1024)?,
        head_dim: reader.size("head_dim", raw.head_dim, 1, 4096)?,
        rope_dim: reader.size("qk_rope_head_dim", raw.qk_rope_head_dim, 2, 4096)?,
        q_rank: reader.size("q_lora_rank", raw.q_lora_rank, 1, 1 << 16)?,
        o_rank: reader.size("o_lora_rank", raw.o_lora_rank, 1, 1 << 16)?,
        o_groups: reader.size("o_groups", raw.o_groups, 1, 1024)?,
        window: reader.size("sliding_window", raw.sliding_window, 1, 1 << 20)?,
        ratios: read_ratios(reader, raw, layers)?,
        index_heads: reader.size("index_n_heads", raw.index_n_heads, 1, 128)?,
        index_dim: reader.size("index_head_dim", raw.index_head_dim, 1, 4096)?,
        index_topk: reader.size("index_topk", raw.index_topk, 1, 1 << 20)?,
        experts,
        experts_per_token: reader.size("num_experts_per_tok", raw.num_experts_per_tok, 1, experts as u64)?,
        inner: reader.size("moe_intermediate_size", raw.moe_intermediate_size, 1, 1 << 16)?,
        hash_layers: narrow(hash),
        route_scale: reader.number("routed_scaling_factor", raw.routed_scaling_factor, 0.0, 1e6)?,
        swiglu_limit: reader.number("swiglu_limit", raw.swiglu_limit.or(Some(0.0)), 0.0, 1e6)?,
        hc: reader.size("hc_mult", raw.hc_mult, 1, 8)?,
        sinkhorn_iters: reader.size("hc_sinkhorn_iters", raw.hc_sinkhorn_iters, 1, 1000)?,
        hc_eps: reader.number("hc_eps", raw.hc_eps.or(Some(1e-6)), 0.0, 1.0)?,
        norm_eps: reader.number("rms_norm_eps", raw.rms_norm_eps.or(Some(1e-6)), 0.0, 1.0)?,
        rope_theta: reader.number("rope_theta", raw.rope_theta, 1.0, 1e12)?,
        compress_rope_theta: reader.number("compress_rope_theta", raw.compress_rope_theta, 1.0, 1e12)?,
        yarn: read_yarn(reader, raw)?,
        draft: None,
        bos: token(reader, "bos_token_id", raw.bos_token_id.unwrap_or(0), vocab)?,
        eos: read_eos(reader, raw.eos_token_id.as_ref(), vocab)?,
        max_positions: u32::try_from(max_positions).unwrap_or(u32::MAX),
    })
}

fn narrow(layers: usize) -> u16 {
    u16::try_from(layers).unwrap_or(u16::MAX)
}

fn token(reader: &Reader<'_>, field: &'static str, id: u64, vocab: usize) -> Result<u32, ModelError> {
    match u32::try_from(id) {
        Ok(token) if id < vocab as u64 => Ok(token),
        _ => Err(reader.refuse(field, id, format!("a token id below vocab_size {vocab}"))),
    }
}

fn read_eos(reader: &Reader<'_>, value: Option<&Value>, vocab: usize) -> Result<Vec<u32>, ModelError> {
    let one = |value: &Value| {
        let Some(id) = value.as_u64() else {
            return Err(reader.refuse("eos_token_id", value, "a token id or a list of them"));
        };
        token(reader, "eos_token_id", id, vocab)
    };
    match value {
        None => Ok(vec![token(reader, "eos_token_id", 1, vocab)?]),
        Some(Value::Array(ids)) => ids.iter().map(one).collect(),
        Some(id) => Ok(vec![one(id)?]),
    }
}

fn read_ratios(reader: &Reader<'_>, raw: &Raw, layers: usize) -> Result<Vec<usize>, ModelError> {
    let all = reader.need("compress_ratios", raw.compress_ratios.as_deref())?;
    if all.len() < layers || all.len() > layers + 64 {
        let expected = format!("one per layer and draft stage: {layers} to {}", layers + 64);
        return Err(reader.refuse("compress_ratios", format!("{} ratios", all.len()), expected));
    }
    for &ratio in &all[..layers] {
        if ratio == 1 || ratio > 1 << 16 {
            return Err(reader.refuse("compress_ratios", ratio, "0 or 2 to 65536"));
        }
    }
    if let Some(ratio) = all[layers..].iter().find(|&&ratio| ratio != 0) {
        return Err(reader.refuse("compress_ratios", ratio, "0 for every draft stage"));
    }
    Ok(all[..layers].iter().map(|&ratio| usize::try_from(ratio).unwrap_or(0)).collect())
}

fn read_yarn(reader: &Reader<'_>, raw: &Raw) -> Result<Yarn, ModelError> {
    let (factor, original, fast, slow) = match &raw.rope_scaling {
        Some(yarn) => {
            reader.word("rope_scaling.type", yarn.kind.as_deref(), "yarn")?;
            (yarn.factor, yarn.original_max_position_embeddings, yarn.beta_fast, yarn.beta_slow)
        }
        None => (raw.rope_factor, raw.original_seq_len, raw.beta_fast, raw.beta_slow),
    };
    let original = reader.size("rope_scaling.original_max_position_embeddings", original, 1, 1 << 24)?;
    Ok(Yarn {
        factor: reader.number("rope_scaling.factor", factor, 1.0, 1e6)?,
        original: u32::try_from(original).unwrap_or(u32::MAX),
        beta_fast: reader.number("rope_scaling.beta_fast", fast, 1e-3, 1e6)?,
        beta_slow: reader.number("rope_scaling.beta_slow", slow, 1e-3, 1e6)?,
    })
}

fn read_draft(reader: &Reader<'_>, raw: &Raw, config: &ModelConfig) -> Result<Option<DraftConfig>, ModelError> {
    let layers = usize::from(config.layers);
    let stages = raw.compress_ratios.as_ref().map_or(0, |all| all.len() - layers);
    if stages == 0 {
        return Ok(None);
    }
    let targets = reader.need("dspark_target_layer_ids", raw.dspark_target_layer_ids.as_deref())?;
    let ascending = targets.windows(2).all(|pair| pair[0] < pair[1]);
    if targets.is_empty() || !ascending || targets.iter().any(|&layer| layer >= layers as u64) {
        let expected = format!("ascending layers below {layers}");
        return Err(reader.refuse("dspark_target_layer_ids", format!("{targets:?}"), expected));
    }
    let noise = reader.need("dspark_noise_token_id", raw.dspark_noise_token_id)?;
    Ok(Some(DraftConfig {
        stages,
        block: reader.size("dspark_block_size", raw.dspark_block_size, 1, 64)?,
        noise: token(reader, "dspark_noise_token_id", noise, config.vocab)?,
        targets: targets.iter().map(|&layer| u16::try_from(layer).unwrap_or(u16::MAX)).collect(),
        rank: reader.size("dspark_markov_rank", raw.dspark_markov_rank, 1, 1 << 16)?,
    }))
}

/// Quantized products need inputs in whole groups, rotations and Hadamard their own sizes.
fn check_relations(reader: &Reader<'_>, config: &ModelConfig) -> Result<(), ModelError> {
    reader.multiple("hidden_size", config.dim, LINEAR_GROUP)?;
    reader.multiple("q_lora_rank", config.q_rank, LINEAR_GROUP)?;
    reader.multiple("o_groups · o_lora_rank", config.o_groups * config.o_rank, LINEAR_GROUP)?;
    reader.multiple("moe_intermediate_size", config.inner, LINEAR_GROUP)?;
    reader.multiple("qk_rope_head_dim", config.rope_dim, 16)?;
    reader.multiple("head_dim", config.head_dim, 64)?;
    if !config.heads.is_multiple_of(config.o_groups) {
        return Err(reader.refuse("o_groups", config.o_groups, format!("a divisor of {} heads", config.heads)));
    }
    if config.head_dim < config.rope_dim {
        return Err(reader.refuse(
            "qk_rope_head_dim",
            config.rope_dim,
            format!("at most head_dim {}", config.head_dim),
        ));
    }
    // Products run over tiles of 16 outputs and, for attention's output, whole scale blocks.
    reader.multiple("o_lora_rank", config.o_rank, 16)?;
    reader.multiple(
        "num_attention_heads / o_groups · head_dim",
        config.heads / config.o_groups * config.head_dim,
        LINEAR_GROUP,
    )?;
    reader.multiple("head_dim − qk_rope_head_dim", config.head_dim - config.rope_dim, 64)?;
    if config.ratios.contains(&OVERLAP_RATIO) {
        let (least, most) = (config.rope_dim.max(64), 256);
        if !(least..=most).contains(&config.index_dim) || !config.index_dim.is_power_of_two() {
            let expected = format!("a power of two, {least} to {most}");
            return Err(reader.refuse("index_head_dim", config.index_dim, expected));
        }
    }
    Ok(())
}
