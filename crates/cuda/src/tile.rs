//! Products of many rows, in the canonical order: tiles instead of streams.
//!
//! Owns the shape of a tile, how many blocks share one, and the scratch; the bits are those of
//! [`crate::linear`].

use cudarc::driver::CudaStream;

use crate::driver::{Arena, Device, DevicePtr, Launch, allow_shared};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::linear::{Format, Linear, Out, Products, Rows, to_u32};
use crate::nvrtc::Source;

/// The files of these kernels.
pub const SOURCES: [Source; 2] = [
    Source {
        file: "tile.cu",
        text: include_str!("kernels/tile.cu"),
        kernels: &["tile_codes", "tile_sum", "tile_fp8_32", "tile_fp8_64", "tile_fp8_128"],
    },
    Source {
        file: "tile_plain.cu",
        text: include_str!("kernels/tile_plain.cu"),
        kernels: &["tile_wide_32", "tile_wide_64", "tile_wide_128", "tile_bf16_32", "tile_bf16_64", "tile_bf16_128"],
    },
];

/// From so many rows on tiles pay.
pub const ROWS_MIN: usize = 48;

/// Matrices that one launch takes at most.
const SEGMENTS: usize = 8;
/// Most blocks that share a tile.
const SPLITS_MAX: usize = 32;
/// Threads of a block.
const THREADS: u32 = 256;
/// Sums that a launch may leave for its second kernel.
pub(crate) const SUMS: usize = 24 << 20;

/// A tile: its rows of activations and of weights, their product the same for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    m: usize,
    n: usize,
    /// What it takes beside its products, in percent: every weight is decoded once a tile.
    cost: usize,
}

const SHAPES: [Shape; 3] =
    [Shape { m: 32, n: 512, cost: 112 }, Shape { m: 64, n: 256, cost: 104 }, Shape { m: 128, n: 128, cost: 100 }];

/// Shared memory of a block with tiles of so many rows: two staged pieces, two levels of the fold.
pub(crate) const fn shared(m: usize, n: usize) -> usize {
    2 * 4 * (16 * (m + n) + 4 * m + n) + 2 * 4 * 128 * 128
}

/// Where tiles keep codes, scales and the sums of shared tiles.
#[derive(Debug)]
pub struct TileScratch {
    pub(crate) codes: DevicePtr,
    pub(crate) scales: DevicePtr,
    pub(crate) partial: DevicePtr,
    values: usize,
    pub(crate) sums: usize,
    memory: Arena,
}

impl TileScratch {
    /// Room for `values` codes of activations, and for the sums of products of `rows` rows with at most
    /// `outputs` outputs, of all experts of a row together where there are some.
    ///
    /// # Errors
    /// [`CudaError::Memory`], [`CudaError::Driver`].
    pub fn new(device: &Device, values: usize, (rows, outputs): (usize, usize)) -> Result<Self, CudaError> {
        let sums = (SPLITS_MAX * rows * outputs).min(SUMS);
        let bytes = [values, values / 32, 4 * sums];
        let all: usize = bytes.iter().map(|bytes| bytes.next_multiple_of(crate::driver::ALIGN)).sum();
        let mut memory = device.arena("the tiles' codes and sums", all)?;
        Ok(Self {
            codes: memory.take("codes", bytes[0])?,
            scales: memory.take("scales", bytes[1])?,
            partial: memory.take("sums", bytes[2])?,
            values,
            sums,
            memory,
        })
    }

    /// Bytes of device memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.size()
    }
}

/// Lets the tile kernels have their shared memory.
pub(crate) fn prepare(kernels: &Kernels) -> Result<(), CudaError> {
    for format in [Format::Fp8, Format::Wide, Format::Bf16] {
        for (at, shape) in SHAPES.iter().enumerate() {
            allow_shared(kernels.get(kernel(format, at))?, shared(shape.m, shape.n))?;
        }
    }
    Ok(())
}

/// The kernel of a format that has tiles, by the shape's place.
fn kernel(format: Format, shape: usize) -> &'static str {
    let names = match format {
        Format::Wide => ["tile_wide_32", "tile_wide_64", "tile_wide_128"],
        Format::Bf16 => ["tile_bf16_32", "tile_bf16_64", "tile_bf16_128"],
        Format::Fp8 | Format::Fp4 | Format::F32 => ["tile_fp8_32", "tile_fp8_64", "tile_fp8_128"],
    };
    names[shape]
}

/// The shape of the tiles of a launch, and how many blocks share each: the fewest rounds of blocks, by
/// the part of a tile that each takes.
fn plan(m: usize, list: &[(Linear, Out)], processors: usize, sums: usize) -> (usize, usize) {
    let columns: usize = list.iter().map(|(w, _)| w.rows).sum();
    let (mut best, mut chosen) = (usize::MAX, (SHAPES.len() - 1, 1));
    for (at, shape) in SHAPES.iter().enumerate() {
        let tiles = m.div_ceil(shape.m) * list.iter().map(|(w, _)| w.rows.div_ceil(shape.n)).sum::<usize>();
        let mut splits = 1;
        while splits <= SPLITS_MAX && (splits == 1 || splits * m * columns <= sums) {
            let rounds = (splits * tiles).div_ceil(processors.max(1));
            // Beside its products a block costs about those of 40 inputs.
            let cost = rounds * shape.cost * (list[0].0.cols / splits + 40);
            if cost < best {
                (best, chosen) = (cost, (at, splits));
            }
            splits *= 2;
        }
    }
    chosen
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

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct TileSegment {
    pub(crate) w: u64,
    pub(crate) scale: u64,
    pub(crate) out: u64,
    pub(crate) rows: u32,
    pub(crate) first: u32,
    pub(crate) column: u32,
    pub(crate) out_stride: u32,
    pub(crate) out_fp32: u32,
    pub(crate) x_offset: u32,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct TileParams {
    pub(crate) segment: [TileSegment; SEGMENTS],
    pub(crate) x: u64,
    pub(crate) x_scale: u64,
    pub(crate) partial: u64,
    pub(crate) items: u64,
    pub(crate) order: u64,
    pub(crate) expert_codes: u64,
    pub(crate) expert_scales: u64,
    pub(crate) segments: u32,
    pub(crate) k: u32,
    pub(crate) m: u32,
    pub(crate) x_stride: u32,
    pub(crate) splits: u32,
    pub(crate) columns: u32,
    pub(crate) per_row: u32,
}

/// The segments of a launch whose tiles have `n` weight rows, and how many tiles there are; `step` as
/// for [`Products::tiled`], in bytes.
pub(crate) fn segments(list: &[(Linear, Out)], n: usize, step: usize) -> ([TileSegment; SEGMENTS], usize) {
    let (mut all, mut tiles, mut column) = ([TileSegment::default(); SEGMENTS], 0, 0);
    for (i, ((w, out), segment)) in list.iter().zip(&mut all).enumerate() {
        *segment = TileSegment {
            w: w.weight.0,
            scale: w.scale.0,
            out: out.at.0,
            rows: to_u32(w.rows),
            first: to_u32(tiles),
            column: to_u32(column),
            out_stride: to_u32(out.stride),
            out_fp32: u32::from(out.wide),
            x_offset: to_u32(i * step),
        };
        tiles += w.rows.div_ceil(n);
        column += w.rows;
    }
    (all, tiles)
}

fn refused(what: &str, got: usize, expected: &str) -> CudaError {
    CudaError::Shape { what: what.to_owned(), got, expected: expected.to_owned() }
}

impl Products {
    /// Whether [`Products::tiled`] takes products of `m` rows by such a matrix, and pays.
    #[must_use]
    pub fn tiles(w: &Linear, m: usize) -> bool {
        let granule = if w.format == Format::Bf16 { 8 } else { 128 };
        let format = matches!(w.format, Format::Fp8 | Format::Wide | Format::Bf16);
        m >= ROWS_MIN && format && w.cols.is_multiple_of(granule)
    }

    /// `out[m, rows] = Σ_k x[m, k] · w[n, k]` of `m` rows by tiles, for several matrices of one format and
    /// as many inputs, FP8, [`Format::Wide`] or bf16; the bits are those of [`Products::linears`]. With
    /// `step`, each matrix has inputs of its own, so many values behind those of the one before.
    ///
    /// # Safety
    /// As for [`Products::linears`]; the scratch is used until the stream has run this.
    ///
    /// # Errors
    /// [`CudaError::Shape`] for other weights or a smaller scratch, [`CudaError::Driver`].
    pub unsafe fn tiled(
        &self,
        stream: &CudaStream,
        (x, m): (Rows, usize),
        (list, step): (&[(Linear, Out)], Option<usize>),
        scratch: &TileScratch,
    ) -> Result<(), CudaError> {
        let Some((first, _)) = list.first() else { return Ok(()) };
        let (format, k) = (first.format, first.cols);
        if list.len() > SEGMENTS || list.iter().any(|(w, _)| w.format != format || w.cols != k) {
            return Err(refused("matrices of a tiled product", list.len(), "at most 8, alike"));
        }
        if !Self::tiles(first, ROWS_MIN) {
            return Err(refused(
                "inputs of a tiled product",
                k,
                "a multiple of 128 (8 of bf16), of a format with tiles",
            ));
        }
        if format == Format::Fp8 && (m * k > scratch.values || step.is_some()) {
            return Err(refused("values of a tiled product", m * k, &format!("at most {}", scratch.values)));
        }
        if format == Format::Fp8 {
            // SAFETY: the caller's promise; the scratch has room for the codes.
            unsafe { self.codes(stream, (x, m), k, scratch) }?;
            // SAFETY: as above.
            return unsafe { self.tiled_codes(stream, (0, m), list, scratch) };
        }
        let params = TileParams { x: x.at.0, x_stride: to_u32(2 * x.stride), ..TileParams::default() };
        // SAFETY: as above.
        unsafe { self.tiles_of(stream, (params, m), (list, 2 * step.unwrap_or(0)), scratch) }
    }

    /// FP8 products of the `m` rows of codes in the scratch from row `first` on.
    ///
    /// # Safety
    /// As for [`Products::tiled`], with codes for inputs.
    pub(crate) unsafe fn tiled_codes(
        &self,
        stream: &CudaStream,
        (first, m): (usize, usize),
        list: &[(Linear, Out)],
        scratch: &TileScratch,
    ) -> Result<(), CudaError> {
        let k = list[0].0.cols;
        let params = TileParams {
            x: scratch.codes.plus(first * k).0,
            x_scale: scratch.scales.plus(first * (k / 32)).0,
            x_stride: to_u32(k),
            ..TileParams::default()
        };
        // SAFETY: the caller's promise.
        unsafe { self.tiles_of(stream, (params, m), (list, 0), scratch) }
    }

    /// The tiles of a launch whose inputs are in `inputs`, `step` bytes apart from matrix to matrix.
    unsafe fn tiles_of(
        &self,
        stream: &CudaStream,
        (inputs, m): (TileParams, usize),
        (list, step): (&[(Linear, Out)], usize),
        scratch: &TileScratch,
    ) -> Result<(), CudaError> {
        let (format, k) = (list[0].0.format, list[0].0.cols);
        let (shape, splits) = plan(m, list, self.processors as usize, scratch.sums);
        let Shape { m: rows, n, .. } = SHAPES[shape];
        let (segment, tiles) = segments(list, n, step);
        let columns: usize = list.iter().map(|(w, _)| w.rows).sum();
        let params = TileParams {
            segment,
            partial: scratch.partial.0,
            segments: to_u32(list.len()),
            k: to_u32(k),
            m: to_u32(m),
            splits: to_u32(splits),
            columns: to_u32(columns),
            per_row: 1,
            ..inputs
        };
        let grid = (to_u32(m.div_ceil(rows)), to_u32(tiles), to_u32(splits));
        // SAFETY: as above.
        unsafe { self.tile_launch(kernel(format, shape), grid, shared(rows, n), stream, &params) }?;
        if splits > 1 {
            // SAFETY: as above.
            unsafe { self.tile_sum(stream, &params) }?;
        }
        Ok(())
    }

    /// Adds up the parts of shared tiles.
    ///
    /// # Safety
    /// As for the launch that left them.
    pub(crate) unsafe fn tile_sum(&self, stream: &CudaStream, params: &TileParams) -> Result<(), CudaError> {
        let grid = (params.columns.div_ceil(256), params.m, 1);
        // SAFETY: the caller's promise.
        unsafe { self.tile_launch("tile_sum", grid, 0, stream, params) }
    }

    /// Codes and scales of `m` rows of `k` values into the scratch.
    ///
    /// # Safety
    /// The rows must be there, and the scratch have room for their codes.
    pub(crate) unsafe fn codes(
        &self,
        stream: &CudaStream,
        (x, m): (Rows, usize),
        k: usize,
        scratch: &TileScratch,
    ) -> Result<(), CudaError> {
        let params = CodeParams {
            x: x.at.0,
            codes: scratch.codes.0,
            scales: scratch.scales.0,
            m: to_u32(m),
            k: to_u32(k),
            x_stride: to_u32(x.stride),
        };
        let grid = (to_u32((m * k / 128).div_ceil(8)), 1, 1);
        // SAFETY: the caller's promise.
        unsafe { self.tile_launch("tile_codes", grid, 0, stream, &params) }
    }

    /// # Safety
    /// As for [`Launch::run`].
    pub(crate) unsafe fn tile_launch<P: Copy>(
        &self,
        name: &'static str,
        grid: (u32, u32, u32),
        shared: usize,
        stream: &CudaStream,
        params: &P,
    ) -> Result<(), CudaError> {
        let launch = Launch {
            function: self.kernels.get(name)?,
            grid,
            threads: THREADS,
            shared: to_u32(shared),
            dependent: self.tuning.dependent,
        };
        // SAFETY: the caller's promise.
        unsafe { launch.run(stream, params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fill_the_multiprocessors_in_whole_rounds() {
        let out = Out { at: DevicePtr::NULL, stride: 0, wide: false };
        let matrix = |rows, cols| {
            let w = Linear { format: Format::Fp8, rows, cols, weight: DevicePtr::NULL, scale: DevicePtr::NULL };
            [(w, out)]
        };
        let shape = |m, rows, cols| {
            let (at, splits) = plan(m, &matrix(rows, cols), 132, SUMS);
            (SHAPES[at].m, splits)
        };
        assert_eq!(shape(512, 4096, 4096), (128, 1));
        assert_eq!(shape(512, 32_768, 1024), (128, 1));
        assert_eq!(shape(128, 4096, 4096), (128, 4));
        assert_eq!(shape(64, 4096, 4096), (64, 8));
        assert_eq!(shape(32, 32_768, 1024), (32, 2));
        // No more blocks share a tile than there is room for their sums.
        assert_eq!(plan(128, &matrix(4096, 4096), 132, 0).1, 1);
    }
}
