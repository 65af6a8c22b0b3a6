//! The experts of a layer over routed rows: `y = bf16(Σ routed, ascending id, + shared)`.
//!
//! Owns the three launches behind the router: w1 and w3 with the activation, w2, the sum. Routing
//! stays on the device; what a launch does depends on it, how it is launched does not.

use cudarc::driver::CudaStream;
use ringfence_engine::model::ModelConfig;

use crate::driver::{Arena, Device, DevicePtr, Launch};
use crate::error::CudaError;
use crate::linear::{Format, Linear, PAST, Products, Rows, to_u32};
use crate::nvrtc::Source;

/// The kernels that take slices of experts, in the order up, down; one row, several.
pub(crate) const SLICED: [&str; 4] = ["experts_up_m1", "experts_down_m1", "experts_up_m4", "experts_down_m4"];

/// The file of these kernels.
pub const SOURCE: Source = Source {
    file: "experts.cu",
    text: include_str!("kernels/experts.cu"),
    kernels: &["experts_up_m1", "experts_down_m1", "experts_up_m4", "experts_down_m4", "experts_sum"],
};

/// Shared memory of a block that is not asked for: its plan, with room.
pub(crate) const PLAN_BYTES: usize = 4096;

/// Most pairs of a row and an expert in one launch.
pub const PAIRS_MAX: usize = 512;

/// The same matrix of all routed experts, one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stack {
    /// Codes, `[experts][rows][row bytes]`.
    pub weight: DevicePtr,
    /// Scales, `[experts][rows][lane][step]`.
    pub scale: DevicePtr,
}

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Gate matrices, FP4 `[inner, dim]`.
    pub w1: Stack,
    /// Down matrices, FP4 `[dim, inner]`.
    pub w2: Stack,
    /// Up matrices, FP4 `[inner, dim]`.
    pub w3: Stack,
    /// The shared expert's w1, w2, w3, FP8.
    pub shared: [Linear; 3],
    /// Routed experts.
    pub count: usize,
    /// Values of a row.
    pub dim: usize,
    /// Values between the matrices.
    pub inner: usize,
    /// Experts to a row.
    pub per_row: usize,
    /// Bound of the activation; infinite for none.
    pub limit: f32,
}

impl Experts {
    /// Bytes of one routed expert: codes and scales of its three matrices.
    #[must_use]
    pub fn routed_bytes(&self) -> usize {
        let matrix = |rows, cols| rows * Format::Fp4.row_bytes(cols) + Format::Fp4.scale_bytes(rows, cols);
        2 * matrix(self.inner, self.dim) + matrix(self.dim, self.inner)
    }
}

/// Where the experts' intermediate values go.
#[derive(Debug)]
pub struct Scratch {
    hidden: DevicePtr,
    parts: DevicePtr,
    rows: usize,
    _memory: Arena,
}

impl Scratch {
    /// Room for `rows` rows.
    ///
    /// # Errors
    /// [`CudaError::Shape`] if the kernels can't take as many, [`CudaError::Memory`].
    pub fn new(device: &Device, config: &ModelConfig, rows: usize) -> Result<Self, CudaError> {
        Self::with_sizes(device, (config.dim, config.inner, config.experts_per_token), rows)
    }

    /// The same for rows of `dim` values, `inner` inside an expert and `per_row` experts to a row.
    ///
    /// # Errors
    /// As for [`Scratch::new`].
    pub fn with_sizes(
        device: &Device,
        (dim, inner, per_row): (usize, usize, usize),
        rows: usize,
    ) -> Result<Self, CudaError> {
        let pairs = rows * per_row;
        if pairs > PAIRS_MAX {
            let expected = format!("at most {PAIRS_MAX} with their experts");
            return Err(CudaError::Shape { what: "rows of a pass".to_owned(), got: rows, expected });
        }
        let all = pairs + rows;
        let (hidden, parts) = (2 * all * inner, 2 * all * dim);
        let mut memory = device.arena("the experts' values", hidden + parts + 2 * crate::driver::ALIGN)?;
        Ok(Self {
            hidden: memory.take("gates", hidden)?,
            parts: memory.take("the experts' outputs", parts)?,
            rows,
            _memory: memory,
        })
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ExpertParams {
    w: [u64; 2],
    scale: [u64; 2],
    shared_w: [u64; 2],
    shared_scale: [u64; 2],
    x: u64,
    picks: u64,
    weights: u64,
    out: u64,
    k: u32,
    rows: u32,
    m: u32,
    per_row: u32,
    x_stride: u32,
    limit: f32,
    x_bytes: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct SumParams {
    pub(crate) parts: u64,
    pub(crate) out: u64,
    pub(crate) m: u32,
    pub(crate) per_row: u32,
    pub(crate) dim: u32,
}

impl Products {
    /// The experts of `m` rows into `y`, bf16 `[m, dim]`; `picks` are the rows' experts, i32
    /// `[m, per_row]` ascending in each row, `weights` fp32 beside them.
    ///
    /// # Safety
    /// `x` must hold `m` rows, `y` have room for them, `picks` name experts, and all of them and the
    /// weights live until the stream has run this.
    ///
    /// # Errors
    /// [`CudaError::Shape`], [`CudaError::Driver`].
    pub unsafe fn experts(
        &self,
        stream: &CudaStream,
        (x, m): (Rows, usize),
        w: &Experts,
        (picks, weights): (DevicePtr, DevicePtr),
        (scratch, y): (&Scratch, DevicePtr),
    ) -> Result<(), CudaError> {
        check(w, m, scratch)?;
        let kinds = if m == 1 { [SLICED[0], SLICED[1]] } else { [SLICED[2], SLICED[3]] };
        for (name, params) in kinds.into_iter().zip(products(w, (x, m), (picks, weights), scratch)) {
            let ring = if m == 1 { 128 } else { 96 };
            let scales = 2 * (params.rows as usize).div_ceil(128) * (params.k as usize / 128);
            let shared = (ring << 10) + params.x_bytes as usize + 4 * 4 * (params.k as usize / 128) + scales + PAST;
            let launch = Launch {
                function: self.kernels.get(name)?,
                grid: (self.processors, 1, 1),
                threads: 512,
                shared: to_u32(shared),
                dependent: self.tuning.dependent,
            };
            // SAFETY: the caller's promise; the scratch has room for the rows.
            unsafe { launch.run(stream, &params) }?;
        }
        let params = SumParams {
            parts: scratch.parts.0,
            out: y.0,
            m: to_u32(m),
            per_row: to_u32(w.per_row),
            dim: to_u32(w.dim),
        };
        let launch = Launch {
            function: self.kernels.get("experts_sum")?,
            grid: (to_u32(w.dim.div_ceil(512)), to_u32(m), 1),
            threads: 128,
            shared: 0,
            dependent: self.tuning.dependent,
        };
        // SAFETY: the caller's promise.
        unsafe { launch.run(stream, &params) }
    }
}

/// What the two launches of an expert's products work on: w1 and w3 together, then w2.
fn products(
    w: &Experts,
    (x, m): (Rows, usize),
    (picks, weights): (DevicePtr, DevicePtr),
    scratch: &Scratch,
) -> [ExpertParams; 2] {
    let [s1, s2, s3] = w.shared;
    let up = ExpertParams {
        w: [w.w1.weight.0, w.w3.weight.0],
        scale: [w.w1.scale.0, w.w3.scale.0],
        shared_w: [s1.weight.0, s3.weight.0],
        shared_scale: [s1.scale.0, s3.scale.0],
        x: x.at.0,
        picks: picks.0,
        weights: weights.0,
        out: scratch.hidden.0,
        k: to_u32(w.dim),
        rows: to_u32(w.inner),
        m: to_u32(m),
        per_row: to_u32(w.per_row),
        x_stride: to_u32(x.stride),
        limit: w.limit,
        x_bytes: x_bytes(w.dim, m),
    };
    let down = ExpertParams {
        w: [w.w2.weight.0; 2],
        scale: [w.w2.scale.0; 2],
        shared_w: [s2.weight.0; 2],
        shared_scale: [s2.scale.0; 2],
        x: scratch.hidden.0,
        x_stride: to_u32(w.inner),
        out: scratch.parts.0,
        k: to_u32(w.inner),
        rows: to_u32(w.dim),
        x_bytes: x_bytes(w.inner, m),
        ..up
    };
    [up, down]
}

/// Bytes of staged activations of an item.
fn x_bytes(k: usize, m: usize) -> u32 {
    to_u32(4 * if m == 1 { 1 } else { 4 } * k.next_multiple_of(1024))
}

fn check(w: &Experts, m: usize, scratch: &Scratch) -> Result<(), CudaError> {
    let shape = |what: &str, got, expected: &str| {
        Err(CudaError::Shape { what: what.to_owned(), got, expected: expected.to_owned() })
    };
    if m == 0 || m > scratch.rows {
        return shape("rows of the experts", m, &format!("1 to {}", scratch.rows));
    }
    for (what, k) in [("values of a row", w.dim), ("values inside an expert", w.inner)] {
        if k == 0 || !k.is_multiple_of(128) || k > 4096 {
            return shape(what, k, "a multiple of 128, at most 4096");
        }
    }
    if w.shared.iter().any(|shared| shared.format != Format::Fp8) {
        return shape("the shared expert's bits", 0, "FP8");
    }
    Ok(())
}
