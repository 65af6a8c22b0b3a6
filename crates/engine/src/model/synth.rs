//! Checkpoints of random weights: the official layout and true shapes of any range, to measure and
//! test without a release.
//!
//! Owns what the random values are: seeded, the same for every number of threads, of sizes that
//! keep activations finite. They mean nothing.

mod fill;
mod write;

use std::path::Path;

use sha2::{Digest, Sha256};

use super::config::ModelConfig;
use super::layout::{TensorSpec, tensors_of};
use super::names::Part;
use super::{Checkpoint, ModelError};
use crate::ids::LayerRange;

/// The configuration of DeepSeek-V4-Flash with its three draft stages.
pub const V4_FLASH: &str = include_str!("synth/v4-flash.json");

/// What is written.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    /// `config.json`, as it goes to the directory.
    pub config: &'a str,
    /// Layers.
    pub range: LayerRange,
    /// Same seed, same bytes.
    pub seed: u64,
    /// Threads that write, at least one.
    pub threads: usize,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Shards.
    pub shards: usize,
    /// Tensors in them.
    pub tensors: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
}

/// One shard to be.
struct Shard {
    file: String,
    /// Tensors with their places behind the header.
    tensors: Vec<(TensorSpec, u64)>,
    header: Vec<u8>,
}

/// Writes a checkpoint of random weights into `dir`, which is made if it is missing: the tensors that
/// `range` needs, `config.json` and the index. One shard holds one part of the model.
///
/// # Errors
/// [`ModelError`] for a configuration or range that can't be, [`ModelError::Io`] where writing fails.
pub fn write(plan: &Plan<'_>, dir: &Path) -> Result<Written, ModelError> {
    let config = config(plan)?;
    let shards = shards(&config, plan.range)?;
    std::fs::create_dir_all(dir).map_err(|error| io(dir, &error))?;
    write::text(&dir.join("config.json"), plan.config.as_bytes())?;
    write::shards(plan, &config, &shards, dir)?;
    write::text(&dir.join("model.safetensors.index.json"), index(&shards).as_bytes())?;
    // What was written is what is read.
    Checkpoint::open_dir(dir)?.weights(plan.range)?;
    let tensors = shards.iter().map(|shard| shard.tensors.len()).sum();
    let bytes = shards.iter().flat_map(|shard| &shard.tensors).map(|(spec, _)| spec.bytes()).sum();
    Ok(Written { shards: shards.len(), tensors, bytes })
}

/// Bytes of the tensors that [`write()`] would write.
///
/// # Errors
/// [`ModelError`] for a configuration or range that can't be.
pub fn bytes(plan: &Plan<'_>) -> Result<u64, ModelError> {
    let config = config(plan)?;
    Ok(parts(&config, plan.range).into_iter().flat_map(|part| tensors_of(&config, part)).map(|spec| spec.bytes()).sum())
}

/// The configuration, which must have the range.
fn config(plan: &Plan<'_>) -> Result<ModelConfig, ModelError> {
    let config = ModelConfig::parse("config.json", plan.config.as_bytes())?;
    if plan.range.hi() > config.layers {
        return Err(ModelError::Range { range: plan.range, layers: config.layers });
    }
    Ok(config)
}

fn io(path: &Path, error: &std::io::Error) -> ModelError {
    ModelError::Io { file: path.display().to_string(), why: error.to_string() }
}

/// The parts that a stage of the range holds, with the drafter where it has all its targets.
fn parts(config: &ModelConfig, range: LayerRange) -> Vec<Part> {
    let tail = range.hi() == config.layers;
    let draft = config.draft.as_ref().filter(|draft| tail && draft.targets.iter().all(|&layer| range.contains(layer)));
    let mut parts = Vec::new();
    if range.lo() == 0 || draft.is_some() {
        parts.push(Part::Embed);
    }
    parts.extend(range.layers().map(Part::Layer));
    if tail {
        parts.push(Part::Tail);
    }
    let stages = draft.map_or(0, |draft| draft.stages);
    parts.extend((0..stages).map(|stage| Part::Draft(u16::try_from(stage).unwrap_or(u16::MAX))));
    parts
}

fn shards(config: &ModelConfig, range: LayerRange) -> Result<Vec<Shard>, ModelError> {
    let parts = parts(config, range);
    let count = parts.len();
    parts
        .into_iter()
        .enumerate()
        .map(|(i, part)| {
            let file = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
            let mut place = 0;
            let mut tensors = Vec::new();
            let mut header = serde_json::Map::new();
            for spec in tensors_of(config, part) {
                let end = place + spec.bytes();
                let entry = serde_json::json!({
                    "dtype": spec.kind.dtypes()[0].to_string(),
                    "shape": spec.shape,
                    "data_offsets": [place, end],
                });
                header.insert(spec.name.clone(), entry);
                tensors.push((spec, place));
                place = end;
            }
            let mut header = serde_json::to_vec(&header)
                .map_err(|error| ModelError::Json { file: file.clone(), why: error.to_string() })?;
            header.resize(header.len().next_multiple_of(64) + 56, b' ');
            Ok(Shard { file, tensors, header })
        })
        .collect()
}

fn index(shards: &[Shard]) -> String {
    let map: serde_json::Map<_, _> = shards
        .iter()
        .flat_map(|shard| shard.tensors.iter().map(|(spec, _)| (spec.name.clone(), shard.file.clone().into())))
        .collect();
    let total: u64 = shards.iter().flat_map(|shard| &shard.tensors).map(|(spec, _)| spec.bytes()).sum();
    serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map }).to_string()
}

/// The seed of one tensor.
fn tensor_seed(seed: u64, name: &str) -> u64 {
    let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name).finalize();
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&digest[..8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests;
