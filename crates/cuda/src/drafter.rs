//! DSpark on the device: windows fed by the target's taps, and blocks drafted from them.
//!
//! Owns the order of launches of a draft, the Markov loop included: every token is chosen on the
//! device, and the next step reads it there. Drafting stores nothing.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::layer::Sees;
use crate::linear::Out;
use crate::ops::{Keys, MarkovStep, Norm};
use crate::pass::{CHECK_LOGITS, FEW, Pass};

impl Pass<'_> {
    /// Moves the draft windows of `m` rows on, from their taps; rows of sessions without them are left
    /// out on the device.
    pub(crate) fn take_in(&self, m: usize) -> Result<(), CudaError> {
        let Some(drafter) = &self.weights.drafter else { return Ok(()) };
        let (b, config) = (self.buffers, self.config);
        let w = &drafter.main_proj;
        let out = Out { at: b.y, stride: config.dim, wide: false };
        self.products((Self::rows(b.taps, w.cols), m), &[(*w, out)])?;
        self.ops.rms_norm((b.y, config.dim, m), self.norm(drafter.main_norm), b.x)?;
        for (stage, weights) in drafter.stages.iter().enumerate() {
            let (w, at) = (&weights.attn, self.at(self.range.count() + stage));
            let out = Out { at: b.kv_raw, stride: config.head_dim, wide: false };
            self.products((Self::rows(b.x, config.dim), m), &[(w.wkv, out)])?;
            let norm = Norm { weight: w.kv_norm, width: config.head_dim, eps: config.norm_eps };
            let keys = Keys { x: b.kv_raw, norm, table: self.plain, at, store: true, out: DevicePtr::NULL };
            self.ops.store_keys(m, &keys)?;
        }
        Ok(())
    }

    /// A block of `block` tokens behind the anchor in its buffer: tokens and confidence.
    pub(crate) fn draft(&self, block: usize) -> Result<(), CudaError> {
        let (Some(drafter), Some(tail)) = (&self.weights.drafter, &self.weights.tail) else { return Ok(()) };
        let (Some(embedding), Some(draft)) = (self.weights.embedding, &self.config.draft) else { return Ok(()) };
        let (b, config) = (self.buffers, self.config);
        self.ops.block_rows(b.anchor, b.rows, block, draft.noise)?;
        self.ops.embed((b.rows, block), embedding, &self.streams, b.hidden)?;
        for (stage, weights) in drafter.stages.iter().enumerate() {
            self.layer(block, weights, self.range.count() + stage, (Sees::Block, None))?;
        }
        self.close((DevicePtr::NULL, block), drafter.hc_head, drafter.norm, &tail.head)?;
        let step = MarkovStep {
            anchor: b.anchor,
            tokens: b.drafted,
            markov_in: drafter.markov_in,
            markov_out: drafter.markov_out.weight,
            rank: draft.rank,
            vocab: config.vocab,
            logits: b.logits,
            y: b.y,
            dim: config.dim,
            confidence_weights: drafter.confidence.weight,
            confidence: self.confidence(),
            best: b.best,
        };
        for k in 0..block {
            self.ops.markov(&step, k)?;
        }
        self.ops.finite_floats((b.logits, block, config.vocab), DevicePtr::NULL, b.checks, CHECK_LOGITS)?;
        self.ops.finite_floats((step.confidence, 1, block), DevicePtr::NULL, b.checks, CHECK_LOGITS)
    }

    /// Where the confidence of draft tokens is.
    pub(crate) fn confidence(&self) -> DevicePtr {
        self.buffers.drafted.plus(4 * FEW)
    }
}
