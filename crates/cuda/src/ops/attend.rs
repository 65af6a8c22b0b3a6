//! Attention: scores of a row's keys, then their values.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::params::{AttendScores, AttendValues, Params};

use super::{At, Heads, Ops, Table, int};

/// Threads of a block that adds values: a warp to a head, and one for the denominators.
const VALUE_THREADS: usize = 32 * (HEADS + 1);
/// List entries to a block of threads that scores.
const SCORED: usize = 32;
/// List entries to a block of attention.
const BLOCK: usize = 64;

/// Heads to a block of threads.
const HEADS: usize = 4;

/// Entries of a key list that a block of threads holds at a time.
const CHUNK: usize = 640;

/// The keys that the rows of a pass attend to.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct KeyList {
    /// Rows and their state.
    pub at: At,
    /// Window size.
    pub window: i32,
    /// Compression; 0: window only.
    pub ratio: i32,
    /// Picked slots `[m, topk]`, or null: all that are visible.
    pub picks: DevicePtr,
    /// Slots picked.
    pub topk: i32,
    /// Keys of a draft block, or null.
    pub block: DevicePtr,
    /// How many.
    pub block_rows: i32,
}

impl Ops<'_> {
    /// Attends: `out[m, heads, width]`, its rotation undone. Lists have at most `list` entries, a
    /// multiple of 64; `scores[m, heads, list]` is scratch.
    pub fn attend(
        &self,
        (q, m): (DevicePtr, usize),
        heads: Heads,
        (keys, list): (KeyList, usize),
        (sink, table): (DevicePtr, Table),
        (scores, out): (DevicePtr, DevicePtr),
    ) -> Result<(), CudaError> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a constant of the model")]
        let scale = (1.0 / (heads.width as f64).sqrt()) as f32;
        let (count, width, scores_stride) = (int(heads.heads), int(heads.width), int(list));
        let params = AttendScores { keys, q, heads: count, width, scale, scores, scores_stride };
        let groups = heads.heads.div_ceil(HEADS);
        let first = Self { dependent: self.dependent && !self.joined, ..*self };
        first.run((list / SCORED, groups, m), 128, &params)?;
        let (table, rope) = (table.at, int(table.rope));
        let chunk = list.min(CHUNK);
        let params = AttendValues {
            keys,
            scores,
            scores_stride,
            chunk: int(chunk),
            sink,
            heads: count,
            width,
            table,
            rope,
            out,
        };
        let shared = chunk * 2 * BLOCK + 8 * HEADS * (chunk + 4);
        self.run_as(AttendValues::KERNEL, (groups, heads.width / BLOCK, m), (VALUE_THREADS, shared), &params)
    }
}
