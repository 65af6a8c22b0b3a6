//! FP8 products of many rows, in the canonical order: tiles instead of streams.
//!
//! Owns the scratch and the choice of how many blocks share a tile; the bits are those of
//! [`crate::linear`].

use cudarc::driver::CudaStream;

use crate::driver::{Arena, Device, DevicePtr, Launch, allow_shared};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::linear::{Format, Linear, Out, Products, Rows, to_u32};
use crate::nvrtc::Source;

/// The file of these kernels.
pub const SOURCE: Source =
    Source { file: "tile.cu", text: include_str!("kernels/tile.cu"), kernels: &["tile_codes", "tile_fp8", "tile_sum"] };

/// From so many rows on tiles pay.
pub const ROWS_MIN: usize = 48;

/// Activations and weight rows of a tile.
const TILE: (usize, usize) = (128, 64);
/// Most blocks that share a tile.
const SPLITS_MAX: usize = 8;
/// Shared memory of a block: four staged runs and the waiting levels.
const SHARED: usize = 4 * 4 * (16 * (TILE.0 + TILE.1) + TILE.0) + 3 * 32 * 256 * 4;

/// Where tiles keep codes, scales and the sums of shared tiles.
#[derive(Debug)]
pub struct TileScratch {
    codes: DevicePtr,
    scales: DevicePtr,
    partial: DevicePtr,
    rows: usize,
    cols: usize,
    sums: usize,
    _memory: Arena,
}

impl TileScratch {
    /// Room for `rows` rows of `cols` inputs and `outputs` outputs.
    ///
    /// # Errors
    /// [`CudaError::Memory`], [`CudaError::Driver`].
    pub fn new(device: &Device, rows: usize, cols: usize, outputs: usize) -> Result<Self, CudaError> {
        let sums = splits(rows, outputs, usize::try_from(device.facts().processors).unwrap_or(1)) * rows * outputs;
        let bytes = [rows * cols, rows * cols / 32, 4 * sums];
        let all: usize = bytes.iter().map(|bytes| bytes.next_multiple_of(crate::driver::ALIGN)).sum();
        let mut memory = device.arena("the tiles' codes and sums", all)?;
        Ok(Self {
            codes: memory.take("codes", bytes[0])?,
            scales: memory.take("scales", bytes[1])?,
            partial: memory.take("sums", bytes[2])?,
            rows,
            cols,
            sums,
            _memory: memory,
        })
    }
}

/// Lets the tile kernel have its shared memory.
pub(crate) fn prepare(kernels: &Kernels) -> Result<(), CudaError> {
    allow_shared(kernels.get("tile_fp8")?, SHARED)
}

/// How many blocks share a tile: enough to have one for every multiprocessor, nearly.
fn splits(m: usize, rows: usize, processors: usize) -> usize {
    let tiles = m.div_ceil(TILE.0) * rows.div_ceil(TILE.1);
    let mut splits = 1;
    while splits < SPLITS_MAX && 2 * splits * tiles <= processors + processors / 8 {
        splits *= 2;
    }
    splits
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CodeParams {
    x: u64,
    codes: u64,
    scales: u64,
    m: u32,
    k: u32,
    x_stride: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct TileParams {
    w: u64,
    scale: u64,
    x: u64,
    x_scale: u64,
    partial: u64,
    out: u64,
    rows: u32,
    k: u32,
    m: u32,
    out_stride: u32,
    out_fp32: u32,
    splits: u32,
}

impl Products {
    /// Whether [`Products::tiled`] takes products of `m` rows by such a matrix.
    #[must_use]
    pub fn tiles(w: &Linear, m: usize) -> bool {
        m >= ROWS_MIN && w.format == Format::Fp8 && w.cols.is_multiple_of(512)
    }

    /// `out[m, rows] = Σ_k x[m, k] · w[n, k]` of `m` rows by tiles, for FP8 weights whose inputs are a
    /// multiple of 512; the bits are those of [`Products::linear`].
    ///
    /// # Safety
    /// As for [`Products::linear`]; the scratch is used until the stream has run this.
    ///
    /// # Errors
    /// [`CudaError::Shape`] for other weights or a smaller scratch, [`CudaError::Driver`].
    pub unsafe fn tiled(
        &self,
        stream: &CudaStream,
        (x, m): (Rows, usize),
        w: &Linear,
        out: Out,
        scratch: &TileScratch,
    ) -> Result<(), CudaError> {
        let splits = splits(m, w.rows, self.processors as usize);
        if w.format != Format::Fp8 || !w.cols.is_multiple_of(512) {
            let expected = "a multiple of 512, FP8".to_owned();
            return Err(CudaError::Shape { what: "inputs of a tiled product".to_owned(), got: w.cols, expected });
        }
        if m > scratch.rows || w.cols > scratch.cols || splits * m * w.rows > scratch.sums && splits > 1 {
            let expected = format!("at most {} of {} inputs", scratch.rows, scratch.cols);
            return Err(CudaError::Shape { what: "rows of a tiled product".to_owned(), got: m, expected });
        }
        let codes = CodeParams {
            x: x.at.0,
            codes: scratch.codes.0,
            scales: scratch.scales.0,
            m: to_u32(m),
            k: to_u32(w.cols),
            x_stride: to_u32(x.stride),
        };
        let tiles = TileParams {
            w: w.weight.0,
            scale: w.scale.0,
            x: scratch.codes.0,
            x_scale: scratch.scales.0,
            partial: scratch.partial.0,
            out: out.at.0,
            rows: to_u32(w.rows),
            k: to_u32(w.cols),
            m: to_u32(m),
            out_stride: to_u32(out.stride),
            out_fp32: u32::from(out.wide),
            splits: to_u32(splits),
        };
        let groups = m * w.cols / 128;
        let grid = (to_u32(w.rows.div_ceil(TILE.1)), to_u32(m.div_ceil(TILE.0)), to_u32(splits));
        // SAFETY: the caller's promise; the scratch has room for the codes.
        unsafe { self.tile_launch("tile_codes", (to_u32(groups.div_ceil(8)), 1, 1), 0, stream, &codes) }?;
        // SAFETY: as above.
        unsafe { self.tile_launch("tile_fp8", grid, to_u32(SHARED), stream, &tiles) }?;
        if splits > 1 {
            let grid = (to_u32(w.rows.div_ceil(256)), to_u32(m), 1);
            // SAFETY: as above.
            unsafe { self.tile_launch("tile_sum", grid, 0, stream, &tiles) }?;
        }
        Ok(())
    }

    unsafe fn tile_launch<P: Copy>(
        &self,
        name: &'static str,
        grid: (u32, u32, u32),
        shared: u32,
        stream: &CudaStream,
        params: &P,
    ) -> Result<(), CudaError> {
        let launch =
            Launch { function: self.kernels.get(name)?, grid, threads: 256, shared, dependent: self.tuning.dependent };
        // SAFETY: the caller's promise.
        unsafe { launch.run(stream, params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_tiles_are_shared_and_many_are_not() {
        assert_eq!(splits(512, 4096, 132), 1);
        assert_eq!(splits(128, 4096, 132), 2);
        assert_eq!(splits(128, 1024, 132), 8);
        assert_eq!(splits(1, 64, 132), SPLITS_MAX);
    }
}
