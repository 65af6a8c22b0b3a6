//! A checkpoint as one value: configuration, index, and the files behind them.
//!
//! Owns which part of the model a layer range holds, and in which shards it lies.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use sha2::{Digest, Sha256};

use super::config::{CONFIG_BYTES_MAX, ModelConfig};
use super::error::ModelError;
use super::layout::{TensorSpec, tensors_of};
use super::names::{Part, normalize, part_of};
use super::source::{Source, TINY};
use super::weights::RangeWeights;
use crate::ids::LayerRange;

/// Longest index that is read, in bytes.
pub const INDEX_BYTES_MAX: u64 = 64 << 20;

/// Longest tokenizer file that is read, in bytes.
pub const TOKENIZER_BYTES_MAX: u64 = 64 << 20;

/// File name of the index.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Where the index puts a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The tensor's name in its file.
    pub raw: String,
    /// The shard.
    pub file: String,
}

/// A shard that a range needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardNeed {
    /// File name.
    pub file: String,
    /// Tensors of the range in it.
    pub tensors: usize,
    /// Bytes of those tensors.
    pub tensor_bytes: u64,
    /// Bytes of the whole file; `None` where it is not there.
    pub file_bytes: Option<u64>,
}

impl ShardNeed {
    /// What a person wants to know: how much of the file is needed, and whether it is there.
    #[must_use]
    pub fn describe(&self) -> String {
        let need = format!("{} tensors, {} bytes of them needed", self.tensors, self.tensor_bytes);
        match self.file_bytes {
            Some(bytes) => format!("{bytes} bytes\t{need}"),
            None => format!("missing\t{need}"),
        }
    }
}

/// A model's files, with configuration and index read and checked.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    name: String,
    config: ModelConfig,
    digest: [u8; 32],
    index: BTreeMap<String, Place>,
    drafter: bool,
    source: Source,
}

impl Checkpoint {
    /// Opens the embedded model (`tiny`) or the directory of a checkpoint.
    ///
    /// # Errors
    /// [`ModelError`]; no shard is opened.
    pub fn open(model: &str) -> Result<Self, ModelError> {
        if model == TINY { Self::tiny() } else { Self::open_dir(model) }
    }

    /// Opens the embedded model.
    ///
    /// # Errors
    /// [`ModelError`] where the build embedded files that contradict each other.
    pub fn tiny() -> Result<Self, ModelError> {
        Self::from_source(TINY.to_owned(), Source::tiny())
    }

    /// Opens the directory of a checkpoint.
    ///
    /// # Errors
    /// [`ModelError`]; no shard is opened.
    pub fn open_dir(dir: impl Into<PathBuf>) -> Result<Self, ModelError> {
        let dir = dir.into();
        let name =
            dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
        Self::from_source(name, Source::Dir(dir))
    }

    fn from_source(name: String, source: Source) -> Result<Self, ModelError> {
        let (config_file, config_bytes) = match source.read("config.json", CONFIG_BYTES_MAX)? {
            Some(bytes) => ("config.json", bytes),
            None => match source.read("inference/config.json", CONFIG_BYTES_MAX)? {
                Some(bytes) => ("inference/config.json", bytes),
                None => return Err(ModelError::Missing { file: source.label("config.json") }),
            },
        };
        let config = ModelConfig::parse(&source.label(config_file), &config_bytes)?;
        let Some(index_bytes) = source.read(INDEX_FILE, INDEX_BYTES_MAX)? else {
            return Err(ModelError::Missing { file: source.label(INDEX_FILE) });
        };
        let index = parse_index(&source.label(INDEX_FILE), &index_bytes)?;
        let drafter = check_stages(&config, &index)?;
        let digest = Sha256::new().chain_update(&config_bytes).chain_update(&index_bytes).finalize();
        Ok(Self { name, config, digest: digest.into(), index, drafter, source })
    }

    /// The model's name, for answers and logs.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sizes and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// sha256 over the bytes of config.json, then of the index: equal on every stage of a ring.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// The files.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Where the index puts a tensor, by its normalized name.
    #[must_use]
    pub fn place(&self, tensor: &str) -> Option<&Place> {
        self.index.get(tensor)
    }

    /// The bytes of `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelError::Missing`] where the checkpoint has none.
    pub fn tokenizer_json(&self) -> Result<Vec<u8>, ModelError> {
        let bytes = self.source.read("tokenizer.json", TOKENIZER_BYTES_MAX)?;
        bytes.ok_or_else(|| ModelError::Missing { file: self.source.label("tokenizer.json") })
    }

    /// Reads a further small file of the checkpoint, like `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`ModelError::TooLarge`], [`ModelError::Io`].
    pub fn read(&self, file: &str) -> Result<Option<Vec<u8>>, ModelError> {
        self.source.read(file, CONFIG_BYTES_MAX)
    }

    /// All layers of the target model.
    ///
    /// # Panics
    /// Never: a configuration has at least one layer.
    #[must_use]
    pub fn all_layers(&self) -> LayerRange {
        #[allow(clippy::expect_used, reason = "config.layers ≥ 1 is checked when it is read")]
        LayerRange::new(0, self.config.layers).expect("a model has layers")
    }

    /// Refuses a range that is no part of the model.
    ///
    /// # Errors
    /// [`ModelError::Range`].
    pub fn check_range(&self, range: LayerRange) -> Result<(), ModelError> {
        let layers = self.config.layers;
        if range.hi() <= layers { Ok(()) } else { Err(ModelError::Range { range, layers }) }
    }

    /// Whether a stage of this range drafts: it ends the model, holds every layer that feeds the
    /// drafter, and the checkpoint has one.
    #[must_use]
    pub fn drafts(&self, range: LayerRange) -> bool {
        let Some(draft) = self.config.draft.as_ref().filter(|_| self.drafter) else { return false };
        range.hi() == self.config.layers && draft.targets.iter().all(|&layer| range.contains(layer))
    }

    /// The parts of the model that a range holds, in model order, each once.
    #[must_use]
    pub fn parts(&self, range: LayerRange) -> Vec<Part> {
        let drafts = self.drafts(range);
        let mut parts = Vec::new();
        if range.lo() == 0 || drafts {
            parts.push(Part::Embed);
        }
        parts.extend(range.layers().map(Part::Layer));
        if range.hi() == self.config.layers {
            parts.push(Part::Tail);
        }
        if let Some(draft) = self.config.draft.as_ref().filter(|_| drafts) {
            parts.extend((0..draft.stages).map(|stage| Part::Draft(u16::try_from(stage).unwrap_or(u16::MAX))));
        }
        parts
    }

    /// The tensors that a range needs, with types and shapes; made part by part, so that a
    /// configuration which claims too much meets the index before it fills memory.
    pub fn tensors(&self, range: LayerRange) -> impl Iterator<Item = TensorSpec> {
        self.parts(range).into_iter().flat_map(|part| tensors_of(&self.config, part))
    }

    /// Bytes of a range's tensors as stored.
    ///
    /// # Errors
    /// [`ModelError::Range`].
    pub fn stored_bytes(&self, range: LayerRange) -> Result<u64, ModelError> {
        self.check_range(range)?;
        Ok(self.tensors(range).map(|spec| spec.bytes()).sum())
    }

    /// The shards that a range needs, by name; no shard is opened.
    ///
    /// # Errors
    /// [`ModelError::Range`], [`ModelError::TensorUnlisted`], [`ModelError::Io`].
    pub fn shards(&self, range: LayerRange) -> Result<Vec<ShardNeed>, ModelError> {
        self.check_range(range)?;
        let mut needs: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
        for spec in self.tensors(range) {
            let place = self.listed(&spec.name, range)?;
            let need = needs.entry(&place.file).or_default();
            need.0 += 1;
            need.1 += spec.bytes();
        }
        let need = |(file, (tensors, tensor_bytes)): (&str, (usize, u64))| {
            let file_bytes = self.source.size(file)?;
            Ok(ShardNeed { file: file.to_owned(), tensors, tensor_bytes, file_bytes })
        };
        needs.into_iter().map(need).collect()
    }

    /// Opens the shards of a range and checks every tensor's place, type and shape.
    ///
    /// # Errors
    /// [`ModelError`] naming file, tensor and both values; no tensor's bytes are read.
    pub fn weights(&self, range: LayerRange) -> Result<RangeWeights<'_>, ModelError> {
        self.check_range(range)?;
        RangeWeights::open(self, range)
    }

    pub(super) fn listed(&self, tensor: &str, range: LayerRange) -> Result<&Place, ModelError> {
        self.place(tensor).ok_or_else(|| ModelError::TensorUnlisted { tensor: tensor.to_owned(), range })
    }
}

/// Whether the index has draft stages; they must be as many as the configuration says.
fn check_stages(config: &ModelConfig, index: &BTreeMap<String, Place>) -> Result<bool, ModelError> {
    let stages: BTreeSet<u16> = index
        .keys()
        .filter_map(|name| match part_of(name) {
            Part::Draft(stage) => Some(stage),
            Part::Embed | Part::Layer(_) | Part::Tail | Part::Other => None,
        })
        .collect();
    let expected = config.draft.as_ref().map_or(0, |draft| draft.stages);
    if stages.is_empty() || expected == 0 {
        return Ok(false);
    }
    if stages.len() == expected && stages.last().is_some_and(|&last| usize::from(last) + 1 == expected) {
        Ok(true)
    } else {
        Err(ModelError::DraftStages { got: stages.len(), expected })
    }
}

#[derive(Debug, Deserialize)]
struct RawIndex {
    weight_map: Pairs,
}

/// The index's object in its own order, so that a name which comes twice is seen.
#[derive(Debug)]
struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensor and file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Reads an index: normalized tensor name to place.
///
/// # Errors
/// [`ModelError::Json`], [`ModelError::ShardName`], [`ModelError::Twice`].
pub fn parse_index(file: &str, bytes: &[u8]) -> Result<BTreeMap<String, Place>, ModelError> {
    let raw: RawIndex = serde_json::from_slice(bytes)
        .map_err(|error| ModelError::Json { file: file.to_owned(), why: error.to_string() })?;
    let mut index: BTreeMap<String, Place> = BTreeMap::new();
    for (tensor, file) in raw.weight_map.0 {
        let plain = !file.is_empty() && file != "." && file != ".." && !file.contains(['/', '\\', '\0']);
        if !plain {
            return Err(ModelError::ShardName { tensor, file });
        }
        let name = normalize(&tensor);
        if part_of(&name) == Part::Other {
            continue;
        }
        if let Some(first) = index.get(&name) {
            return Err(ModelError::Twice { first: first.raw.clone(), second: tensor, tensor: name });
        }
        index.insert(name, Place { raw: tensor, file });
    }
    Ok(index)
}
