//! The experts of many rows: pairs sorted by expert on the device, FP4 tiles of each expert's rows, the
//! shared expert by FP8 tiles. The bits are those of [`crate::experts`].
//!
//! Owns the launches and the scratch. What a tile works on is read on the device; nothing waits for the
//! host.

use cudarc::driver::CudaStream;

use crate::driver::{Arena, Device, DevicePtr, Launch, allow_shared};
use crate::error::CudaError;
use crate::experts::{Experts, Stack, SumParams};
use crate::kernels::Kernels;
use crate::linear::{Format, Linear, Out, Products, Rows, to_u32};
use crate::nvrtc::Source;
use crate::tile::{TileParams, TileScratch, segments};

/// The file of these kernels.
pub const SOURCE: Source = Source {
    file: "experts_tile.cu",
    text: include_str!("kernels/experts_tile.cu"),
    kernels: &["experts_plan", "experts_tile", "experts_gate"],
};

/// Most rows of an item, and weight rows of its tiles.
const ITEM: (usize, usize) = (16, 512);
/// Shared memory of a block: two staged pieces, the activations' rows apart, and the lowest level of the
/// fold. Two blocks to a multiprocessor.
const SHARED: usize = 2 * 4 * (16 * (ITEM.0 + 4 + ITEM.1) + ITEM.0 + ITEM.1) + 4 * ITEM.0 * ITEM.1;
/// Blocks that share a tile, where there is room for their sums.
const SPLITS: usize = 4;

/// Where the experts of many rows keep their values.
#[derive(Debug)]
pub struct ManyScratch {
    gates: DevicePtr,
    parts: DevicePtr,
    items: DevicePtr,
    order: DevicePtr,
    rows: usize,
    memory: Arena,
}

impl ManyScratch {
    /// Room for `rows` rows of `dim` values, `inner` inside an expert and `per_row` of `count` experts to
    /// a row.
    ///
    /// # Errors
    /// [`CudaError::Memory`], [`CudaError::Driver`].
    pub fn new(
        device: &Device,
        (dim, inner): (usize, usize),
        (count, per_row): (usize, usize),
        rows: usize,
    ) -> Result<Self, CudaError> {
        let (pairs, all) = (rows * per_row, rows * (per_row + 1));
        let sizes = [4 * all * inner, 2 * all * dim, 16 * (1 + items(pairs, count)), 4 * pairs];
        let bytes: usize = sizes.iter().map(|bytes| bytes.next_multiple_of(crate::driver::ALIGN)).sum();
        let mut memory = device.arena("the values of many rows' experts", bytes)?;
        Ok(Self {
            gates: memory.take("gates", sizes[0])?,
            parts: memory.take("the experts' outputs", sizes[1])?,
            items: memory.take("items", sizes[2])?,
            order: memory.take("pairs by expert", sizes[3])?,
            rows,
            memory,
        })
    }

    /// Bytes of device memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.size()
    }

    /// Codes that a [`TileScratch`] must have room for beside this.
    #[must_use]
    pub fn codes((dim, inner): (usize, usize), per_row: usize, rows: usize) -> usize {
        (rows * dim).max(rows * (per_row + 1) * inner)
    }
}

/// Most items of so many pairs: a whole one for each [`ITEM`] of them, and a rest of each expert.
fn items(pairs: usize, count: usize) -> usize {
    pairs.min(pairs / ITEM.0 + count)
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct PlanParams {
    picks: u64,
    items: u64,
    order: u64,
    pairs: u32,
    experts: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct GateParams {
    gates: u64,
    weights: u64,
    codes: u64,
    scales: u64,
    rows: u32,
    routed: u32,
    inner: u32,
    limit: f32,
}

/// Lets the kernel have its shared memory.
pub(crate) fn prepare(kernels: &Kernels) -> Result<(), CudaError> {
    allow_shared(kernels.get("experts_tile")?, SHARED)
}

/// A matrix of the first routed expert.
fn first(stack: Stack, rows: usize, cols: usize) -> Linear {
    Linear { format: Format::Fp4, rows, cols, weight: stack.weight, scale: stack.scale }
}

impl Products {
    /// The experts of `m` rows into `y`, as [`Products::experts`] computes them.
    ///
    /// # Safety
    /// As for [`Products::experts`]; both scratches are used until the stream has run this.
    ///
    /// # Errors
    /// [`CudaError::Shape`] for a smaller scratch, [`CudaError::Driver`].
    pub unsafe fn experts_tiled(
        &self,
        stream: &CudaStream,
        (x, m): (Rows, usize),
        w: &Experts,
        (picks, weights): (DevicePtr, DevicePtr),
        (scratch, tiles, y): (&ManyScratch, &TileScratch, DevicePtr),
    ) -> Result<(), CudaError> {
        if m == 0 || m > scratch.rows {
            let expected = format!("1 to {}", scratch.rows);
            return Err(CudaError::Shape { what: "rows of the experts".to_owned(), got: m, expected });
        }
        if [w.dim, w.inner].iter().any(|k| *k == 0 || !k.is_multiple_of(128) || *k > 4096) {
            let expected = "values of a row and inside an expert in multiples of 128, at most 4096".to_owned();
            return Err(CudaError::Shape { what: "values of an expert".to_owned(), got: w.dim.max(w.inner), expected });
        }
        if w.count > 1024 || w.shared.iter().any(|shared| shared.format != Format::Fp8) {
            let expected = "at most 1024, and a shared one of FP8".to_owned();
            return Err(CudaError::Shape { what: "experts".to_owned(), got: w.count, expected });
        }
        let pairs = m * w.per_row;
        // SAFETY: the caller's promise; the scratch has room for the pairs.
        unsafe { self.by_expert(stream, (picks, pairs), w, scratch) }?;
        let gate = |row: usize, column: usize| Out {
            at: scratch.gates.plus(2 * (row * 2 * w.inner + column)),
            stride: 2 * w.inner,
            wide: false,
        };
        let [s1, s2, s3] = w.shared;
        // SAFETY: as above; the codes of `x` stay in the tiles' scratch for the routed experts.
        unsafe { self.tiled(stream, (x, m), (&[(s1, gate(pairs, 0)), (s3, gate(pairs, w.inner))], None), tiles) }?;
        let up = [(first(w.w1, w.inner, w.dim), gate(0, 0)), (first(w.w3, w.inner, w.dim), gate(0, w.inner))];
        // SAFETY: as above.
        unsafe { self.items(stream, (w, m), &up, (scratch, tiles), w.per_row) }?;
        // SAFETY: as above.
        unsafe { self.gated(stream, (weights, m), w, (scratch, tiles)) }?;
        let part = |row: usize| Out { at: scratch.parts.plus(2 * row * w.dim), stride: w.dim, wide: false };
        // SAFETY: as above.
        unsafe { self.items(stream, (w, m), &[(first(w.w2, w.dim, w.inner), part(0))], (scratch, tiles), 1) }?;
        // SAFETY: as above.
        unsafe { self.tiled_codes(stream, (pairs, m), &[(s2, part(pairs))], tiles) }?;
        let params = SumParams {
            parts: scratch.parts.0,
            out: y.0,
            m: to_u32(m),
            per_row: to_u32(w.per_row),
            dim: to_u32(w.dim),
        };
        let (function, grid) = (self.kernels.get("experts_sum")?, (to_u32(w.dim.div_ceil(512)), to_u32(m), 1));
        let launch = Launch { function, grid, threads: 128, shared: 0, dependent: self.tuning.dependent };
        // SAFETY: as above.
        unsafe { launch.run(stream, &params) }
    }

    /// Sorts pairs by expert and cuts them into items.
    unsafe fn by_expert(
        &self,
        stream: &CudaStream,
        (picks, pairs): (DevicePtr, usize),
        w: &Experts,
        scratch: &ManyScratch,
    ) -> Result<(), CudaError> {
        let params = PlanParams {
            picks: picks.0,
            items: scratch.items.0,
            order: scratch.order.0,
            pairs: to_u32(pairs),
            experts: to_u32(w.count),
        };
        let launch = Launch {
            function: self.kernels.get("experts_plan")?,
            grid: (1, 1, 1),
            threads: to_u32(w.count.next_multiple_of(32)),
            shared: 0,
            dependent: self.tuning.dependent,
        };
        // SAFETY: the caller's promise.
        unsafe { launch.run(stream, &params) }
    }

    /// The activation of `m` rows' gates, all experts', as codes.
    unsafe fn gated(
        &self,
        stream: &CudaStream,
        (weights, m): (DevicePtr, usize),
        w: &Experts,
        (scratch, tiles): (&ManyScratch, &TileScratch),
    ) -> Result<(), CudaError> {
        let rows = m * (w.per_row + 1);
        let params = GateParams {
            gates: scratch.gates.0,
            weights: weights.0,
            codes: tiles.codes.0,
            scales: tiles.scales.0,
            rows: to_u32(rows),
            routed: to_u32(m * w.per_row),
            inner: to_u32(w.inner),
            limit: w.limit,
        };
        let grid = (to_u32((rows * w.inner / 128).div_ceil(8)), 1, 1);
        // SAFETY: the caller's promise.
        unsafe { self.tile_launch("experts_gate", grid, 0, stream, &params) }
    }

    /// FP4 products of all items, as many weight rows at a time as there is room for the sums of their
    /// parts; a row of the codes has `per_row` pairs.
    unsafe fn items(
        &self,
        stream: &CudaStream,
        (w, m): (&Experts, usize),
        list: &[(Linear, Out)],
        (scratch, tiles): (&ManyScratch, &TileScratch),
        per_row: usize,
    ) -> Result<(), CudaError> {
        let pairs = m * w.per_row;
        let room = tiles.sums / (SPLITS * pairs) / ITEM.1 * ITEM.1;
        let (splits, room) = if room == 0 { (1, usize::MAX) } else { (SPLITS, room) };
        for &(matrix, out) in list {
            for from in (0..matrix.rows).step_by(room.min(matrix.rows)) {
                let part = matrix.part(from, room.min(matrix.rows - from));
                let (segment, count) = segments(&[(part, Out { at: out.at.plus(2 * from), ..out })], ITEM.1, 0);
                let params = TileParams {
                    segment,
                    x: tiles.codes.0,
                    x_scale: tiles.scales.0,
                    partial: tiles.partial.0,
                    items: scratch.items.0,
                    order: scratch.order.0,
                    expert_codes: (matrix.rows * matrix.format.row_bytes(matrix.cols)) as u64,
                    expert_scales: matrix.format.scale_bytes(matrix.rows, matrix.cols) as u64,
                    segments: 1,
                    k: to_u32(matrix.cols),
                    m: to_u32(pairs),
                    x_stride: to_u32(matrix.cols),
                    splits: to_u32(splits),
                    columns: to_u32(part.rows),
                    per_row: to_u32(per_row),
                };
                let grid = (to_u32(splits * count), to_u32(items(pairs, w.count)), 1);
                // SAFETY: the caller's promise.
                unsafe { self.tile_launch("experts_tile", grid, SHARED, stream, &params) }?;
                if splits > 1 {
                    // SAFETY: as above.
                    unsafe { self.tile_sum(stream, &params) }?;
                }
            }
        }
        Ok(())
    }
}
