//! The slots that rows of a compressed layer pick.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::params::{IndexPicks, IndexScores};

use super::{At, Heads, Ops, int};

/// Slots that a block of threads scores at a time.
const SCORED: usize = 16;
/// Values between heads in a block's memory.
const APART: usize = 4;

impl Ops<'_> {
    /// The slots that `m` rows pick, of at most `slots`: `picks[m, topk]`; `keys[m, slots]` is scratch.
    pub fn pick(
        &self,
        (q, w, m): (DevicePtr, DevicePtr, usize),
        heads: Heads,
        (topk, ratio, slots): (usize, usize, usize),
        at: At,
        (keys, picks): (DevicePtr, DevicePtr),
    ) -> Result<(), CudaError> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a constant of the model")]
        let factor = (1.0 / (heads.width as f64).sqrt() * (1.0 / (heads.heads as f64).sqrt())) as f32;
        let params = IndexScores {
            q,
            w,
            factor,
            heads: int(heads.heads),
            topk: int(topk),
            ratio: int(ratio),
            at,
            keys,
            keys_stride: int(slots),
        };
        let kernel = match heads.width {
            64 => "index_scores_64",
            128 => "index_scores_128",
            _ => "index_scores_256",
        };
        let shared = 4 * heads.heads * (heads.width + APART + 1 + SCORED);
        let blocks = slots.div_ceil(SCORED).clamp(1, 512);
        self.run_as(kernel, (blocks, m, 1), (256, shared), &params)?;
        let params =
            IndexPicks { keys, keys_stride: int(slots), topk: int(topk), ratio: int(ratio), rows: at.rows, picks };
        self.run((m, 1, 1), 1024, &params)
    }
}
