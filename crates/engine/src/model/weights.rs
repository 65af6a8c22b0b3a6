//! The tensors of one range, checked before they are read and counted as they are.
//!
//! Owns the opened shards of a range. Every accessor returns bytes of a type and shape that
//! were compared with the configuration when the range was opened.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;

use super::checkpoint::Checkpoint;
use super::error::ModelError;
use super::layout::{Kind, TensorSpec};
use super::shard::{Dtype, Entry, ShardHeader};
use super::source::ShardBytes;
use crate::ids::LayerRange;

/// An FP8 matrix as stored.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Bytes<'a> {
    /// Rows (outputs).
    pub n: usize,
    /// Columns (inputs).
    pub k: usize,
    /// E4M3 codes `[n, k]`.
    pub codes: &'a [u8],
    /// E8M0 scales `[ceil(n/128), ceil(k/128)]`, none of them 255.
    pub scales: &'a [u8],
}

/// An FP4 matrix as stored.
#[derive(Debug, Clone, Copy)]
pub struct Fp4Bytes<'a> {
    /// Rows (outputs).
    pub n: usize,
    /// Columns (inputs).
    pub k: usize,
    /// Pairs of E2M1 codes `[n, k/2]`, the even input in the low half.
    pub codes: &'a [u8],
    /// E8M0 scales `[n, k/32]`, none of them 255.
    pub scales: &'a [u8],
}

#[derive(Debug)]
struct Shard {
    label: String,
    bytes: ShardBytes,
    header: ShardHeader,
}

#[derive(Debug)]
struct Located {
    file: String,
    raw: String,
    entry: Entry,
    spec: TensorSpec,
}

/// The opened shards of one range.
#[derive(Debug)]
pub struct RangeWeights<'a> {
    checkpoint: &'a Checkpoint,
    range: LayerRange,
    shards: BTreeMap<String, Shard>,
    tensors: BTreeMap<String, Located>,
    tensor_bytes: AtomicU64,
}

impl<'a> RangeWeights<'a> {
    pub(super) fn open(checkpoint: &'a Checkpoint, range: LayerRange) -> Result<Self, ModelError> {
        let mut shards: BTreeMap<String, Shard> = BTreeMap::new();
        let mut tensors = BTreeMap::new();
        for spec in checkpoint.tensors(range) {
            let place = checkpoint.listed(&spec.name, range)?;
            if !shards.contains_key(&place.file) {
                let shard = open_shard(checkpoint, &place.file)?.ok_or_else(|| ModelError::ShardMissing {
                    file: checkpoint.source().label(&place.file),
                    range,
                    tensor: place.raw.clone(),
                })?;
                shards.insert(place.file.clone(), shard);
            }
            let shard = &shards[&place.file];
            let entry = shard
                .header
                .tensors
                .get(&place.raw)
                .ok_or_else(|| ModelError::TensorMissing { file: shard.label.clone(), tensor: place.raw.clone() })?;
            check_tensor(&shard.label, &place.raw, entry, &spec)?;
            let located =
                Located { file: place.file.clone(), raw: place.raw.clone(), entry: entry.clone(), spec: spec.clone() };
            tensors.insert(spec.name, located);
        }
        Ok(Self { checkpoint, range, shards, tensors, tensor_bytes: AtomicU64::new(0) })
    }

    /// The layers held.
    #[must_use]
    pub fn range(&self) -> LayerRange {
        self.range
    }

    /// The checkpoint behind.
    #[must_use]
    pub fn checkpoint(&self) -> &Checkpoint {
        self.checkpoint
    }

    /// Names of the shards that were opened, ascending.
    pub fn opened(&self) -> impl Iterator<Item = &str> {
        self.shards.keys().map(String::as_str)
    }

    /// Bytes read so far: headers of opened shards and every tensor asked for.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        let headers: u64 = self.shards.values().map(|shard| shard.header.header_bytes).sum();
        headers + self.tensor_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of all tensors of the range, as stored.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.tensors.values().map(|located| located.entry.bytes.len() as u64).sum()
    }

    /// Reads every scale and every expert id of the range and refuses the ones that can't be.
    ///
    /// # Errors
    /// [`ModelError::ScaleNan`], [`ModelError::ExpertId`].
    pub fn check_values(&self) -> Result<(), ModelError> {
        for located in self.tensors.values() {
            let name = &located.spec.name;
            if located.spec.kind.is_scale() {
                self.scales(name)?;
            } else if located.spec.kind == Kind::Ids {
                self.expert_ids(name)?;
            }
        }
        Ok(())
    }

    /// An FP8 matrix; `name` is without `.weight`.
    ///
    /// # Errors
    /// [`ModelError::ScaleNan`]; [`ModelError::TensorUnlisted`] for a tensor outside the range.
    pub fn fp8(&self, name: &str) -> Result<Fp8Bytes<'_>, ModelError> {
        let weight = format!("{name}.weight");
        let [n, k] = self.matrix(&weight)?;
        Ok(Fp8Bytes { n, k, codes: self.bytes(&weight)?, scales: self.scales(&format!("{name}.scale"))? })
    }

    /// An FP4 matrix; `name` is without `.weight`.
    ///
    /// # Errors
    /// [`ModelError::ScaleNan`]; [`ModelError::TensorUnlisted`] for a tensor outside the range.
    pub fn fp4(&self, name: &str) -> Result<Fp4Bytes<'_>, ModelError> {
        let weight = format!("{name}.weight");
        let [n, half] = self.matrix(&weight)?;
        Ok(Fp4Bytes { n, k: 2 * half, codes: self.bytes(&weight)?, scales: self.scales(&format!("{name}.scale"))? })
    }

    /// A bf16 tensor; `name` is without `.weight`.
    ///
    /// # Errors
    /// [`ModelError::TensorUnlisted`] for a tensor outside the range.
    pub fn bf16(&self, name: &str) -> Result<Vec<bf16>, ModelError> {
        let bytes = self.bytes(&format!("{name}.weight"))?;
        Ok(bytes.as_chunks::<2>().0.iter().map(|pair| bf16::from_le_bytes(*pair)).collect())
    }

    /// An fp32 tensor, by its whole name.
    ///
    /// # Errors
    /// [`ModelError::TensorUnlisted`] for a tensor outside the range.
    pub fn f32(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let bytes = self.bytes(name)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|quad| f32::from_le_bytes(*quad)).collect())
    }

    /// Expert ids `[vocab, experts_per_token]`, by the tensor's whole name.
    ///
    /// # Errors
    /// [`ModelError::ExpertId`] where one is no expert.
    pub fn expert_ids(&self, name: &str) -> Result<Vec<u16>, ModelError> {
        let located = self.located(name)?;
        let bytes = self.bytes(name)?;
        let ids: Vec<i64> = if located.entry.dtype == Dtype::I64 {
            bytes.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id)).collect()
        } else {
            bytes.as_chunks::<4>().0.iter().map(|id| i64::from(i32::from_le_bytes(*id))).collect()
        };
        let config = self.checkpoint.config();
        let check = |(at, id): (usize, i64)| match u16::try_from(id) {
            Ok(expert) if usize::from(expert) < config.experts => Ok(expert),
            _ => Err(ModelError::ExpertId {
                file: self.label(located),
                tensor: located.raw.clone(),
                token: at / config.experts_per_token,
                got: id,
                last: config.experts - 1,
            }),
        };
        ids.into_iter().enumerate().map(check).collect()
    }

    /// The bytes of a tensor as stored, by its whole name.
    ///
    /// # Errors
    /// [`ModelError::TensorUnlisted`] for a tensor outside the range.
    pub fn stored(&self, name: &str) -> Result<&[u8], ModelError> {
        self.bytes(name)
    }

    fn scales(&self, name: &str) -> Result<&[u8], ModelError> {
        let located = self.located(name)?;
        let bytes = self.bytes(name)?;
        match bytes.iter().position(|&scale| scale == 255) {
            None => Ok(bytes),
            Some(at) => Err(ModelError::ScaleNan { file: self.label(located), tensor: located.raw.clone(), at }),
        }
    }

    fn located(&self, name: &str) -> Result<&Located, ModelError> {
        self.tensors.get(name).ok_or_else(|| ModelError::TensorUnlisted { tensor: name.to_owned(), range: self.range })
    }

    fn label(&self, located: &Located) -> String {
        self.checkpoint.source().label(&located.file)
    }

    fn matrix(&self, name: &str) -> Result<[usize; 2], ModelError> {
        let located = self.located(name)?;
        let size = |at: usize| located.entry.shape.get(at).and_then(|&size| usize::try_from(size).ok()).unwrap_or(0);
        Ok([size(0), size(1)])
    }

    fn bytes(&self, name: &str) -> Result<&[u8], ModelError> {
        let located = self.located(name)?;
        let shard = &self.shards[&located.file];
        let bytes = &shard.bytes.as_slice()[located.entry.bytes.clone()];
        self.tensor_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

fn open_shard(checkpoint: &Checkpoint, file: &str) -> Result<Option<Shard>, ModelError> {
    let label = checkpoint.source().label(file);
    let Some(bytes) = checkpoint.source().map(file)? else { return Ok(None) };
    let header = ShardHeader::parse(&label, bytes.as_slice())?;
    Ok(Some(Shard { label, bytes, header }))
}

fn check_tensor(file: &str, raw: &str, entry: &Entry, spec: &TensorSpec) -> Result<(), ModelError> {
    let (file, tensor) = (file.to_owned(), raw.to_owned());
    if !spec.kind.dtypes().contains(&entry.dtype) {
        let names: Vec<_> = spec.kind.dtypes().iter().map(ToString::to_string).collect();
        return Err(ModelError::Dtype { file, tensor, got: entry.dtype.to_string(), expected: names.join(" or ") });
    }
    if entry.shape != spec.shape {
        return Err(ModelError::Shape { file, tensor, got: entry.shape.clone(), expected: spec.shape.clone() });
    }
    Ok(())
}
