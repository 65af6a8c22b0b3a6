//! A pass's ends: tokens to streams, the rows of a draft block, and what is not finite.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::params::{BlockRows, EmbedRows, FiniteFloats, FiniteRows};

use super::{Ops, Streams, int};

impl Ops<'_> {
    /// Embeddings of `m` rows in all streams: `hidden[m, hc, dim]`.
    ///
    /// # Errors
    /// [`CudaError::Driver`], as all that follow.
    pub fn embed(
        &self,
        (rows, m): (DevicePtr, usize),
        embedding: DevicePtr,
        s: &Streams,
        hidden: DevicePtr,
    ) -> Result<(), CudaError> {
        self.run((m, s.hc, 1), 256, &EmbedRows { rows, embedding, hidden, dim: int(s.dim) })
    }

    /// The rows of a draft block behind `anchor`.
    pub fn block_rows(&self, anchor: DevicePtr, rows: DevicePtr, block: usize, noise: u32) -> Result<(), CudaError> {
        let params = BlockRows { anchor, rows, block: int(block), noise: noise.cast_signed() };
        self.run((1, 1, 1), block.next_multiple_of(32), &params)
    }

    /// Marks rows of bf16 values that are not finite.
    pub fn finite(
        &self,
        (x, m, width): (DevicePtr, usize, usize),
        checks: DevicePtr,
        number: i32,
    ) -> Result<(), CudaError> {
        self.run((m, 1, 1), 256, &FiniteRows { x, width: int(width), checks, number })
    }

    /// The same of fp32 values, of the rows that `picks` names.
    pub fn finite_floats(
        &self,
        (x, m, width): (DevicePtr, usize, usize),
        picks: DevicePtr,
        checks: DevicePtr,
        number: i32,
    ) -> Result<(), CudaError> {
        self.run((m, 8, 1), 256, &FiniteFloats { x, width: int(width), picks, checks, number })
    }
}
