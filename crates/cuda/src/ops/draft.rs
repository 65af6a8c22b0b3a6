//! The Markov head of a draft block, a token at a time.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::params::{MarkovLogits, MarkovToken};

use super::{Ops, int};

/// Blocks that share the vocabulary in a Markov step.
pub const MARKOV_BLOCKS: u32 = 264;

/// What the Markov head works on.
#[derive(Debug, Clone, Copy)]
pub struct MarkovStep {
    /// The block's anchor, one [`Row`](super::Row).
    pub anchor: DevicePtr,
    /// Tokens so far and to come, i32 `[block]`.
    pub tokens: DevicePtr,
    /// bf16 `[vocab, rank]`.
    pub markov_in: DevicePtr,
    /// bf16 `[vocab, rank]`.
    pub markov_out: DevicePtr,
    /// Values of a Markov embedding.
    pub rank: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// fp32 `[block, vocab]`.
    pub logits: DevicePtr,
    /// The head's input before its norm, bf16 `[block, dim]`.
    pub y: DevicePtr,
    /// Values of a row of it.
    pub dim: usize,
    /// bf16 `[dim + rank]`.
    pub confidence_weights: DevicePtr,
    /// fp32 `[block]`.
    pub confidence: DevicePtr,
    /// u64 `[MARKOV_BLOCKS]`.
    pub best: DevicePtr,
}

impl Ops<'_> {
    /// One token of a draft block: the bias of the token before, the confidence, the best.
    pub fn markov(&self, step: &MarkovStep, k: usize) -> Result<(), CudaError> {
        let params = MarkovLogits {
            anchor: step.anchor,
            tokens: step.tokens,
            k: int(k),
            markov_in: step.markov_in,
            markov_out: step.markov_out,
            rank: int(step.rank),
            vocab: int(step.vocab),
            logits: step.logits,
            y: step.y,
            dim: int(step.dim),
            confidence_weights: step.confidence_weights,
            confidence: step.confidence,
            best: step.best,
        };
        self.run((MARKOV_BLOCKS as usize + 1, 1, 1), 256, &params)?;
        let params =
            MarkovToken { best: step.best, blocks: MARKOV_BLOCKS.cast_signed(), k: int(k), tokens: step.tokens };
        self.run((1, 1, 1), 32, &params)
    }
}
