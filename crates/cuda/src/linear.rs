//! Matrix products of few rows: `y[m, n] = bf16(Σ_k w[n, k] · x[m, k])` in the canonical order.
//!
//! Owns which kernel computes a product and how it is launched. Activations come as bf16 rows; FP8
//! and FP4 weights quantize them on the way, as the model says.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::driver::{Device, DevicePtr, Launch, allow_shared};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::nvrtc::Source;

/// The file of these kernels.
pub const SOURCE: Source =
    Source { file: "linear.cu", text: include_str!("kernels/linear.cu"), kernels: &LINEAR_KERNELS };

/// Matrices that one launch takes at most.
pub const SEGMENTS: usize = 8;

/// How weights lie on the device; rows are `cols` values, each row a multiple of 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// E4M3 codes as stored; scales of 128 × 128 blocks as stored.
    Fp8,
    /// E2M1 codes, words repacked; scales `[row][lane][step]`.
    Fp4,
    /// E4M3 codes that stand for bf16 weights, runs of eight repacked in pairs, rows padded to 512
    /// bytes; scales as for [`Format::Fp8`].
    Wide,
    /// bf16 as stored.
    Bf16,
    /// fp32 as stored.
    F32,
}

impl Format {
    /// Bytes of a row of `cols` values on the device.
    #[must_use]
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::Fp8 => cols,
            Self::Fp4 => cols / 2,
            Self::Wide => cols.next_multiple_of(512),
            Self::Bf16 => 2 * cols,
            Self::F32 => 4 * cols,
        }
    }

    /// Bytes of the scales of a matrix on the device.
    #[must_use]
    pub fn scale_bytes(self, rows: usize, cols: usize) -> usize {
        match self {
            Self::Fp8 | Self::Wide => rows.div_ceil(128) * cols.div_ceil(128),
            Self::Fp4 => rows * 32 * self.steps(cols),
            Self::Bf16 | Self::F32 => 0,
        }
    }

    /// Values of a row that 32 lanes take in one step.
    fn per_step(self) -> usize {
        match self {
            Self::Fp8 | Self::Wide => 512,
            Self::Fp4 => 1024,
            Self::Bf16 => 256,
            Self::F32 => 128,
        }
    }

    /// Steps of a row.
    #[must_use]
    pub fn steps(self, cols: usize) -> usize {
        cols.div_ceil(self.per_step())
    }

    /// Runs of a row.
    fn runs(self, cols: usize) -> usize {
        match self {
            Self::Fp8 => cols / 16,
            Self::Fp4 => cols / 32,
            Self::Wide | Self::Bf16 => cols / 8,
            Self::F32 => cols / 4,
        }
    }

    /// What `cols` must be a multiple of.
    fn granule(self) -> usize {
        match self {
            Self::Fp8 | Self::Fp4 | Self::Wide => 128,
            Self::Bf16 => 8,
            Self::F32 => 4,
        }
    }

    /// Whether activations are quantized.
    fn coded(self) -> bool {
        matches!(self, Self::Fp8 | Self::Fp4)
    }

    /// Whether its scales go to shared memory.
    fn block_scaled(self) -> bool {
        matches!(self, Self::Fp8 | Self::Wide)
    }
}

/// A matrix on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Linear {
    /// How it lies there.
    pub format: Format,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Its rows.
    pub weight: DevicePtr,
    /// Its scales; [`DevicePtr::NULL`] for plain formats.
    pub scale: DevicePtr,
}

impl Linear {
    /// Bytes that a product must read: weights and scales.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.rows * self.format.row_bytes(self.cols) + self.format.scale_bytes(self.rows, self.cols)
    }

    /// The same rows from `first` on, `rows` of them; both multiples of 128 where blocks are scaled.
    #[must_use]
    pub fn part(&self, first: usize, rows: usize) -> Self {
        let scale = self.format.scale_bytes(first, self.cols);
        Self {
            rows,
            weight: self.weight.plus(first * self.format.row_bytes(self.cols)),
            scale: if self.scale == DevicePtr::NULL { self.scale } else { self.scale.plus(scale) },
            ..*self
        }
    }
}

/// bf16 activation rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// The first.
    pub at: DevicePtr,
    /// Values from one to the next.
    pub stride: usize,
}

/// Where a product goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Out {
    /// The first row.
    pub at: DevicePtr,
    /// Values from one row to the next.
    pub stride: usize,
    /// fp32 sums instead of bf16.
    pub wide: bool,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Segment {
    w: u64,
    scale: u64,
    out: u64,
    rows: u32,
    first: u32,
    out_stride: u32,
    out_fp32: u32,
    x_offset: u32,
    scale_at: u32,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct LinearParams {
    segment: [Segment; SEGMENTS],
    x: u64,
    segments: u32,
    groups: u32,
    k: u32,
    m: u32,
    x_stride: u32,
    runs: u32,
    steps: u32,
    row_bytes: u32,
    scale_bytes: u32,
    split: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct SplitParams {
    w: u64,
    x: u64,
    out: u64,
    rows: u32,
    k: u32,
    x_stride: u32,
    out_stride: u32,
    out_fp32: u32,
}

/// Lanes without a run may read scales this far past the last.
pub(crate) const PAST: usize = 64;

/// Shared memory of which three blocks don't fit in a multiprocessor.
pub(crate) const TWO_BLOCKS: usize = 77 << 10;

/// Shared memory of which two blocks fit in a multiprocessor.
const DEEP: usize = 113 << 10;

/// Shared memory of which two blocks don't fit in a multiprocessor.
const ONE_BLOCK: usize = 115 << 10;

/// A kernel's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Variant {
    /// Weight rows of a warp.
    r: usize,
    /// Activation rows.
    m: usize,
    stages: usize,
}

impl Variant {
    /// Threads of a block: several rows need many registers, and one-row kernels leave some for the
    /// blocks of the next kernel.
    fn threads(self, format: Format) -> usize {
        if self.m == 1 && format == Format::Fp4 { 384 } else { 512 }
    }
}

const VARIANTS: [Variant; 10] = [
    Variant { r: 1, m: 1, stages: 4 },
    Variant { r: 2, m: 1, stages: 6 },
    Variant { r: 2, m: 1, stages: 4 },
    Variant { r: 1, m: 2, stages: 3 },
    Variant { r: 1, m: 4, stages: 3 },
    Variant { r: 1, m: 8, stages: 3 },
    Variant { r: 4, m: 2, stages: 3 },
    Variant { r: 4, m: 4, stages: 3 },
    Variant { r: 4, m: 6, stages: 3 },
    Variant { r: 4, m: 8, stages: 3 },
];

const FORMATS: [Format; 5] = [Format::Fp8, Format::Fp4, Format::Wide, Format::Bf16, Format::F32];

macro_rules! names {
    ($($format:literal),*) => {
        [$(
            concat!("linear_", $format, "_r1_m1"),
            concat!("linear_", $format, "_r2_m1_deep"), concat!("linear_", $format, "_r2_m1"),
            concat!("linear_", $format, "_r1_m2"), concat!("linear_", $format, "_r1_m4"),
            concat!("linear_", $format, "_r1_m8"), concat!("linear_", $format, "_r4_m2"),
            concat!("linear_", $format, "_r4_m4"), concat!("linear_", $format, "_r4_m6"),
            concat!("linear_", $format, "_r4_m8"),
        )* "split_bf16", "split_f32"]
    };
}

/// `FORMATS` by `VARIANTS`, then the split kernels.
const LINEAR_KERNELS: [&str; 52] = names!("fp8", "fp4", "wide", "bf16", "f32");

/// How products are launched; the bits of a result don't depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Blocks of a one-row kernel to a multiprocessor, at most.
    pub blocks: u32,
    /// Fewer weight rows than this to a multiprocessor are taken one by one.
    pub single_rows: usize,
    /// Products of at most this many weight rows share a row's steps among warps.
    pub split_rows: usize,
    /// Starts a kernel's loads while the kernel before still runs.
    pub dependent: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { blocks: 1, single_rows: 16, split_rows: 512, dependent: true }
    }
}

/// Products on one device.
#[derive(Debug, Clone)]
pub struct Products {
    pub(crate) kernels: Arc<Kernels>,
    pub(crate) processors: u32,
    shared_max: usize,
    pub(crate) tuning: Tuning,
}

impl Products {
    /// Products by `kernels` of `device`.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if a kernel can't have the shared memory it needs.
    pub fn new(device: &Device, kernels: Arc<Kernels>, tuning: Tuning) -> Result<Self, CudaError> {
        let facts = device.facts();
        for name in LINEAR_KERNELS {
            allow_shared(kernels.get(name)?, facts.shared_max)?;
        }
        for name in crate::experts::SLICED {
            allow_shared(kernels.get(name)?, facts.shared_max - crate::experts::PLAN_BYTES)?;
        }
        crate::tile::prepare(&kernels)?;
        crate::experts_tile::prepare(&kernels)?;
        Ok(Self { kernels, processors: facts.processors, shared_max: facts.shared_max, tuning })
    }

    /// The same, each launch behind the whole of what it follows.
    #[must_use]
    pub fn apart(&self) -> Self {
        Self { tuning: Tuning { dependent: false, ..self.tuning }, ..self.clone() }
    }

    /// `out[m, rows] = Σ_k x[m, k] · w[n, k]` of `m` rows.
    ///
    /// # Safety
    /// `x` must hold `m` rows of `w.cols` values, `out` have room for `m` rows of `w.rows`, `w`
    /// hold a matrix of its format, all of them until the stream has run the product.
    ///
    /// # Errors
    /// [`CudaError::Shape`], [`CudaError::Driver`].
    pub unsafe fn linear(
        &self,
        stream: &CudaStream,
        (x, m): (Rows, usize),
        w: &Linear,
        out: Out,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.linears(stream, (x, m), &[(*w, out)]) }
    }

    /// Several products of the same rows: one launch, if they share a format and `cols`.
    ///
    /// # Safety
    /// As for [`Products::linear`], for each product.
    ///
    /// # Errors
    /// [`CudaError::Shape`], [`CudaError::Driver`].
    pub unsafe fn linears(
        &self,
        stream: &CudaStream,
        (x, m): (Rows, usize),
        list: &[(Linear, Out)],
    ) -> Result<(), CudaError> {
        let Some((first, _)) = list.first() else { return Ok(()) };
        let rows: usize = list.iter().map(|(w, _)| w.rows).sum();
        if matches!(first.format, Format::Bf16 | Format::F32) && rows <= self.tuning.split_rows {
            for (w, out) in list {
                // SAFETY: the caller's promise.
                unsafe { self.split(stream, (x, m), w, *out) }?;
            }
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.passes(stream, (x, m), list, None) }
    }

    /// A block-diagonal product: outputs `g · rows / groups …` take inputs `g · cols …` of rows of
    /// `groups · cols` values.
    ///
    /// # Safety
    /// As for [`Products::linear`], with the longer input rows.
    ///
    /// # Errors
    /// [`CudaError::Shape`], [`CudaError::Driver`].
    pub unsafe fn grouped(
        &self,
        stream: &CudaStream,
        (x, m): (Rows, usize),
        (w, groups): (&Linear, usize),
        out: Out,
    ) -> Result<(), CudaError> {
        let size = w.rows / groups;
        if groups > SEGMENTS || size * groups != w.rows || (w.format.block_scaled() && !size.is_multiple_of(128)) {
            return Err(shape("groups of a product", groups, format!("at most {SEGMENTS} of whole blocks")));
        }
        let width = if out.wide { 4 } else { 2 };
        let part = |g: usize| (w.part(g * size, size), Out { at: out.at.plus(g * size * width), ..out });
        let list: Vec<_> = (0..groups).map(part).collect();
        // SAFETY: the caller's promise.
        unsafe { self.passes(stream, (x, m), &list, Some(w.cols)) }
    }

    /// All rows, a launch for as many as a kernel takes; `step` is set where segments have inputs
    /// of their own, that many values apart.
    unsafe fn passes(
        &self,
        stream: &CudaStream,
        (x, m): (Rows, usize),
        list: &[(Linear, Out)],
        step: Option<usize>,
    ) -> Result<(), CudaError> {
        check(list)?;
        let mut done = 0;
        while done < m {
            let (index, variant) = self.variant(list, m - done, step.is_some())?;
            let rows = variant.m.min(m - done);
            let x = Rows { at: x.at.plus(2 * done * x.stride), ..x };
            let params = self.params((x, rows), list, (variant, done), step);
            let (w, _) = list[0];
            let format = FORMATS.iter().position(|&format| format == w.format).unwrap_or(0);
            let launch = Launch {
                function: self.kernels.get(LINEAR_KERNELS[format * VARIANTS.len() + index])?,
                grid: (self.blocks(variant, &params, list), if step.is_some() { to_u32(list.len()) } else { 1 }, 1),
                threads: to_u32(variant.threads(w.format)),
                shared: to_u32(if step.is_some() {
                    // Fewer blocks than multiprocessors: two of them must not meet in one.
                    shared(variant, w, params.scale_bytes as usize).max(ONE_BLOCK)
                } else {
                    shared(variant, w, params.scale_bytes as usize)
                }),
                dependent: self.tuning.dependent,
            };
            // SAFETY: the caller's promise; the parameters are those of the kernel.
            unsafe { launch.run(stream, &params) }?;
            done += rows;
        }
        Ok(())
    }

    /// The kernel for up to `m` rows: the widest that shared memory allows.
    fn variant(&self, list: &[(Linear, Out)], m: usize, split: bool) -> Result<(usize, Variant), CudaError> {
        let (w, _) = list[0];
        let rows: usize = list.iter().map(|(w, _)| w.rows).sum();
        let scales = scale_bytes(list, split);
        let single = rows < self.tuning.single_rows * self.processors as usize;
        // A deeper ring only where a block of the next kernel still fits beside it.
        let most = |v: &Variant| if v.stages > 4 { DEEP } else { self.shared_max };
        let fits = |v: &Variant| shared(*v, w, scales) <= most(v);
        let wanted = |v: &Variant| if single { v.r == 1 } else { v.r == if v.m == 1 { 2 } else { 4 } };
        let usable = VARIANTS.iter().enumerate().filter(|(_, v)| wanted(v) && fits(v));
        let enough = usable.clone().filter(|(_, v)| v.m >= m).min_by_key(|(_, v)| v.m);
        enough
            .or_else(|| usable.max_by_key(|(_, v)| v.m))
            .map(|(index, v)| (index, *v))
            .ok_or_else(|| shape("inputs of a product", w.cols, "rows that fit in shared memory".to_owned()))
    }

    fn blocks(&self, variant: Variant, params: &LinearParams, list: &[(Linear, Out)]) -> u32 {
        let per = if variant.m == 1 { self.tuning.blocks } else { 1 };
        let most = self.processors * per;
        if params.split == 0 {
            return params.groups.min(most).max(1);
        }
        let segments = to_u32(list.len());
        params.groups.div_ceil(segments).min(most / segments).max(1)
    }

    fn params(
        &self,
        (x, m): (Rows, usize),
        list: &[(Linear, Out)],
        (variant, done): (Variant, usize),
        step: Option<usize>,
    ) -> LinearParams {
        let (w, _) = list[0];
        let mut params = LinearParams {
            x: x.at.0,
            segments: to_u32(list.len()),
            k: to_u32(w.cols),
            m: to_u32(m),
            x_stride: to_u32(x.stride),
            runs: to_u32(w.format.runs(w.cols)),
            steps: to_u32(w.format.steps(w.cols)),
            row_bytes: to_u32(w.format.row_bytes(w.cols)),
            scale_bytes: to_u32(scale_bytes(list, step.is_some())),
            split: u32::from(step.is_some()),
            ..LinearParams::default()
        };
        let mut scale_at = 0;
        for (i, ((w, out), segment)) in list.iter().zip(&mut params.segment).enumerate() {
            let width = if out.wide { 4 } else { 2 };
            *segment = Segment {
                w: w.weight.0,
                scale: w.scale.0,
                out: out.at.plus(done * out.stride * width).0,
                rows: to_u32(w.rows),
                first: if step.is_some() { 0 } else { params.groups },
                out_stride: to_u32(out.stride),
                out_fp32: u32::from(out.wide),
                x_offset: to_u32(step.map_or(0, |step| i * step)),
                scale_at: if step.is_some() { 0 } else { to_u32(scale_at) },
            };
            params.groups += to_u32(w.rows.div_ceil(variant.r));
            scale_at += w.format.scale_bytes(w.rows, w.cols);
        }
        params
    }

    /// One product whose steps are shared among warps.
    unsafe fn split(&self, stream: &CudaStream, (x, m): (Rows, usize), w: &Linear, out: Out) -> Result<(), CudaError> {
        check(&[(*w, out)])?;
        let steps = w.format.steps(w.cols);
        let name = if w.format == Format::Bf16 { "split_bf16" } else { "split_f32" };
        let params = SplitParams {
            w: w.weight.0,
            x: x.at.0,
            out: out.at.0,
            rows: to_u32(w.rows),
            k: to_u32(w.cols),
            x_stride: to_u32(x.stride),
            out_stride: to_u32(out.stride),
            out_fp32: u32::from(out.wide),
        };
        let launch = Launch {
            function: self.kernels.get(name)?,
            grid: (to_u32(w.rows), to_u32(m), 1),
            threads: to_u32(32 * steps.div_ceil(4).clamp(1, 32)),
            shared: to_u32(steps * 128),
            dependent: self.tuning.dependent,
        };
        // SAFETY: the caller's promise; the parameters are those of the kernel.
        unsafe { launch.run(stream, &params) }
    }
}

/// Dynamic shared memory of a block.
fn shared(variant: Variant, w: Linear, scales: usize) -> usize {
    let ring = variant.threads(w.format) * variant.stages * variant.r * 16;
    let x = 4 * variant.m * w.format.steps(w.cols) * w.format.per_step();
    let x_scales = if w.format.coded() { 4 * variant.m * (w.cols / 128) } else { 0 };
    let past = if w.cols.is_multiple_of(w.format.per_step()) { 0 } else { PAST };
    let all = ring + x + x_scales + scales + past;
    // Two blocks to a multiprocessor at most: one that runs and one of the next kernel that waits, so
    // that no multiprocessor gets two of one kernel.
    if variant.m == 1 { all.max(TWO_BLOCKS) } else { all }
}

/// Bytes of the FP8 scales that a block holds.
fn scale_bytes(list: &[(Linear, Out)], split: bool) -> usize {
    let bytes =
        list.iter().map(|(w, _)| if w.format.block_scaled() { w.format.scale_bytes(w.rows, w.cols) } else { 0 });
    let bytes = if split { bytes.max().unwrap_or(0) } else { bytes.sum() };
    bytes.next_multiple_of(16)
}

fn check(list: &[(Linear, Out)]) -> Result<(), CudaError> {
    let (first, _) = list[0];
    if list.len() > SEGMENTS {
        return Err(shape("matrices of a launch", list.len(), format!("at most {SEGMENTS}")));
    }
    for (w, _) in list {
        if w.format != first.format || w.cols != first.cols {
            return Err(shape("inputs of a product", w.cols, format!("{} as of the first matrix", first.cols)));
        }
        if w.cols == 0 || !w.cols.is_multiple_of(w.format.granule()) || (w.format == Format::Fp4 && w.cols > 4096) {
            let expected = format!("a multiple of {}, at most 4096 for FP4", w.format.granule());
            return Err(shape("inputs of a product", w.cols, expected));
        }
    }
    Ok(())
}

fn shape(what: &str, got: usize, expected: String) -> CudaError {
    CudaError::Shape { what: what.to_owned(), got, expected }
}

/// A size as the kernels take it; sizes were checked when they were loaded.
pub(crate) fn to_u32(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}
