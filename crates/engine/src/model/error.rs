//! Why a checkpoint, or a part of it, was refused.

use crate::ids::LayerRange;

/// Why a checkpoint, or a part of it, was refused. Every message names the file or tensor, what
/// was expected, what came, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// A file can't be read.
    #[error("{file}: {why}: check the model's directory and its permissions")]
    Io {
        /// The file.
        file: String,
        /// The system's words.
        why: String,
    },
    /// A file that every checkpoint has is missing.
    #[error(
        "{file} is missing: --model wants a directory with config.json and model.safetensors.index.json, or `tiny`"
    )]
    Missing {
        /// The file.
        file: String,
    },
    /// A text file is too large to be what it should be.
    #[error("{file} has {got} bytes, at most {limit} are read: this is no such file")]
    TooLarge {
        /// The file.
        file: String,
        /// Bytes found.
        got: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// A text file is not the JSON it should be.
    #[error("{file}: {why}: download the file again")]
    Json {
        /// The file.
        file: String,
        /// What is wrong.
        why: String,
    },
    /// A field of the configuration is missing.
    #[error("{file}: {field} is missing: this program needs the config.json of a DeepSeek-V4-Flash checkpoint")]
    FieldMissing {
        /// The file.
        file: String,
        /// The field.
        field: &'static str,
    },
    /// A field of the configuration has a value that this program does not run.
    #[error("{file}: {field} is {got}, expected {expected}: this program runs DeepSeek-V4-Flash-shaped models only")]
    Unsupported {
        /// The file.
        file: String,
        /// The field.
        field: &'static str,
        /// The value that came.
        got: String,
        /// The values that are run.
        expected: String,
    },
    /// The range is no part of the model.
    #[error("layers {range} asked for, the model has layers 0:{layers}: choose LO:HI within them")]
    Range {
        /// The range asked for.
        range: LayerRange,
        /// Layers of the model.
        layers: u16,
    },
    /// The index sends a tensor to a file outside the model's directory.
    #[error("index: tensor {tensor} is said to be in {file:?}, expected a plain file name: download the index again")]
    ShardName {
        /// The tensor.
        tensor: String,
        /// The name that came.
        file: String,
    },
    /// Two names of the index mean the same tensor.
    #[error("index: {first} and {second} both name {tensor}: the index mixes two spellings, download it again")]
    Twice {
        /// The tensor in the project's spelling.
        tensor: String,
        /// One name.
        first: String,
        /// The other one.
        second: String,
    },
    /// The index and the configuration disagree on the draft stages.
    #[error("index: {got} draft stages (mtp.N), config.json says {expected}: index and config are of different models")]
    DraftStages {
        /// Stages in the index.
        got: usize,
        /// Stages by the configuration.
        expected: usize,
    },
    /// The range needs a tensor that the index does not list.
    #[error("tensor {tensor} is not in the index, layers {range} need it: the index is of another model or incomplete")]
    TensorUnlisted {
        /// The tensor.
        tensor: String,
        /// The range.
        range: LayerRange,
    },
    /// A shard that the range needs is missing.
    #[error(
        "{file} is missing, layers {range} need it (tensor {tensor}): fetch it (--shards lists what a range needs)"
    )]
    ShardMissing {
        /// The file.
        file: String,
        /// The range.
        range: LayerRange,
        /// A tensor in it.
        tensor: String,
    },
    /// A shard lacks a tensor that the index puts there.
    #[error("{file}: tensor {tensor} is not in the file, the index says it is: download the file again")]
    TensorMissing {
        /// The file.
        file: String,
        /// The tensor, in the file's spelling.
        tensor: String,
    },
    /// A shard ends before its header or its data does.
    #[error("{file} is truncated: {what} ends at byte {needed}, the file has {got}: download it again")]
    Truncated {
        /// The file.
        file: String,
        /// The part that is cut.
        what: String,
        /// Where it ends.
        needed: u64,
        /// Bytes of the file.
        got: u64,
    },
    /// A shard's header claims to be larger than any real one.
    #[error("{file}: header of {got} bytes, at most {limit} are read: this is no safetensors file, download it again")]
    HeaderSize {
        /// The file.
        file: String,
        /// Bytes claimed.
        got: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// A shard's header makes no sense.
    #[error("{file}: header: {why}: download the file again")]
    Header {
        /// The file.
        file: String,
        /// What is wrong, with both values.
        why: String,
    },
    /// A tensor has another element type.
    #[error("{file}: tensor {tensor} is {got}, expected {expected}: this is another checkpoint format")]
    Dtype {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The type that came.
        got: String,
        /// The types that are read.
        expected: String,
    },
    /// A tensor has another shape.
    #[error(
        "{file}: tensor {tensor} has shape {got:?}, expected {expected:?}: file and config.json are of different models"
    )]
    Shape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shape that came.
        got: Vec<u64>,
        /// The shape by the configuration.
        expected: Vec<u64>,
    },
    /// A scale is the NaN code.
    #[error("{file}: tensor {tensor}: scale {at} is the NaN code 255, expected 0 to 254: download the file again")]
    ScaleNan {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Index of the scale.
        at: usize,
    },
    /// A hash layer routes a token to an expert that does not exist.
    #[error(
        "{file}: tensor {tensor}: expert {got} for token {token}, the model has experts 0 to {last}: download the file again"
    )]
    ExpertId {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The token.
        token: usize,
        /// The expert that came.
        got: i64,
        /// The last expert.
        last: usize,
    },
    /// A tensor's values can't be held in the form that computes.
    #[error("tensor {tensor}: {why}: download its shard again")]
    Pack {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        why: String,
    },
}
