//! What a checkpoint says: its sizes, its tensors and their bytes, of one layer range.
//!
//! Owns everything that reads a model's files: [`config`] the sizes and the checks that refuse
//! another model, [`names`] one spelling of tensor names, [`layout`] which tensors a range needs
//! with their shapes, [`shard`] the safetensors header read without trust, [`source`] files of a
//! directory or of the embedded model, [`checkpoint`] all of it behind one value, [`weights`] the
//! bytes of one range, [`mod@format`] the number formats in them, [`synth`] checkpoints of random weights. It decides nothing about how an
//! engine holds them.
//!
//! Shards are mapped, not copied: a file that is cut or rewritten while a stage loads it ends that
//! stage, so replace files by renaming new ones over them.

pub mod checkpoint;
pub mod config;
pub mod error;
pub mod format;
pub mod layout;
pub mod names;
pub mod shard;
pub mod source;
pub mod synth;
pub mod weights;

pub use checkpoint::{Checkpoint, ShardNeed};
pub use config::{DraftConfig, ModelConfig, Yarn};
pub use error::ModelError;
pub use weights::{Fp4Bytes, Fp8Bytes, RangeWeights};
