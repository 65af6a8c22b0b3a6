//! Attention of many rows: a block of threads takes all heads of a row, which share its keys.

use crate::driver::{Device, DevicePtr, allow_shared};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::params::{ManyScores, ManyValues, Params};
use crate::tile::shared;

use super::{Heads, KeyList, Ops, Spread, Table, int};

/// Heads and keys of a block that scores.
const TILE: (usize, usize) = (64, 256);
/// Dimensions of a block that adds values up.
const SLICE: usize = 256;
/// Shared memory of such a block: values of two blocks of 64 entries, each warp's probabilities.
const VALUES: usize = 2 * 64 * 2 * SLICE + 8 * 4 * (64 * 8 + 8 * 68);

/// Lets the kernels have the shared memory they ask for.
pub(super) fn prepare(device: &Device, kernels: &Kernels) -> Result<(), CudaError> {
    let most = device.facts().shared_max - 4096;
    allow_shared(kernels.get(ManyScores::KERNEL)?, shared(TILE.0, TILE.1).min(most))?;
    allow_shared(kernels.get(ManyValues::KERNEL)?, VALUES)
}

impl Ops<'_> {
    /// What [`Ops::attend`] computes, bit for bit, for many rows.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn attend_many(
        &self,
        (q, m): (DevicePtr, usize),
        heads: Heads,
        (keys, list): (KeyList, usize),
        (sink, table, spread): (DevicePtr, Table, Spread),
        (scores, out): (DevicePtr, DevicePtr),
    ) -> Result<(), CudaError> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a constant of the model")]
        let scale = (1.0 / (heads.width as f64).sqrt()) as f32;
        let (count, width, scores_stride) = (int(heads.heads), int(heads.width), int(list));
        let params = ManyScores { keys, q, heads: count, width, scale, scores, scores_stride, spread };
        let groups = heads.heads.div_ceil(TILE.0);
        let tiles = list.div_ceil(TILE.1) + usize::from(spread.mix != DevicePtr::NULL);
        self.run_as(ManyScores::KERNEL, (tiles, groups, m), (256, shared(TILE.0, TILE.1)), &params)?;
        let (table, rope) = (table.at, int(table.rope));
        let params = ManyValues { keys, scores, scores_stride, sink, heads: count, width, table, rope, out };
        self.run_as(ManyValues::KERNEL, (heads.width.div_ceil(SLICE), groups, m), (256, VALUES), &params)
    }
}
