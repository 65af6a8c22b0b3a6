//! What stands between products and attention: queries, indexer queries, compressors.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::params::{CompressParams, HeadNormRotate, IndexQueries, Prepare};

use super::{At, Heads, Ops, Spread, Table, int};

/// Threads of a block that prepares queries, a warp to a head.
const PREPARE_THREADS: usize = 512;

/// What one compressor takes of a pass; `width` 0 is no compressor.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Side {
    /// Raw values, fp32 `[m, stride]`.
    pub kv: DevicePtr,
    /// Raw scores, as many.
    pub score: DevicePtr,
    /// Values from one row to the next.
    pub stride: i32,
    /// Values to a slot.
    pub width: i32,
    /// Added to the scores, `[ratio, raw width]`.
    pub ape: DevicePtr,
    /// Weights of the slot's norm.
    pub norm: DevicePtr,
}

/// What stands between products and attention, for some rows.
#[derive(Debug, Clone, Copy)]
pub struct Preparing {
    /// Rotations.
    pub table: Table,
    /// Added to means of squares.
    pub eps: f32,
    /// Whose rows they are.
    pub at: At,
    /// Queries, normed and rotated in place.
    pub queries: Option<(DevicePtr, Heads)>,
    /// Indexer queries in place, of rows that see more than so many slots of so many positions.
    pub index: Option<(DevicePtr, Heads, usize, usize)>,
    /// Attention's compressor and, if it has a width, the indexer's; positions to a slot; whether slots
    /// overlap.
    pub compressors: Option<([Side; 2], usize, bool)>,
    /// How the streams are spread behind the sublayer, or [`Spread::none`].
    pub spread: Spread,
}

impl Ops<'_> {
    /// Queries, indexer queries and compressors of `m` rows, as far as there are any.
    pub fn prepare(&self, m: usize, parts: &Preparing) -> Result<(), CudaError> {
        let Preparing { table, eps, at, queries, index, compressors, spread } = *parts;
        let (q, heads) = queries.unwrap_or((DevicePtr::NULL, Heads { heads: 0, width: 32 }));
        let queries = HeadNormRotate {
            q,
            heads: int(heads.heads),
            width: int(heads.width),
            eps,
            table: table.at,
            rope: int(table.rope),
            rows: at.rows,
        };
        let (index_q, index_heads, topk, ratio) =
            index.unwrap_or((DevicePtr::NULL, Heads { heads: 0, width: 32 }, 0, 1));
        let index = IndexQueries {
            q: index_q,
            heads: int(index_heads.heads),
            width: int(index_heads.width),
            table: table.at,
            rope: int(table.rope),
            rows: at.rows,
            topk: int(topk),
            ratio: int(ratio),
            factor: hadamard(index_heads.width),
        };
        let (sides, ratio, overlap) = compressors.unwrap_or(([Side::default(); 2], 1, false));
        let compress = CompressParams {
            attention: sides[0],
            index: sides[1],
            ratio: int(ratio),
            overlap: i32::from(overlap),
            table: table.at,
            rope: int(table.rope),
            eps,
            hadamard: hadamard(usize::try_from(sides[1].width).unwrap_or(0).max(1)),
            at,
        };
        let warps = PREPARE_THREADS / 32;
        let (query_blocks, index_blocks) = (heads.heads.div_ceil(warps), index_heads.heads.div_ceil(warps));
        let sides = sides.iter().filter(|side| side.width > 0).count();
        let params = Prepare {
            queries,
            index,
            compress,
            query_blocks: int(query_blocks),
            index_blocks: int(index_blocks),
            spread,
        };
        let spreads = usize::from(spread.mix != DevicePtr::NULL);
        self.run((m, query_blocks + index_blocks + sides + spreads, 1), PREPARE_THREADS, &params)
    }
}

/// fp32 width^-½.
#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a constant of the model")]
fn hadamard(width: usize) -> f32 {
    (1.0 / (width as f64).sqrt()) as f32
}
