//! From the checkpoint's bytes to the kernels' layout, on the device.
//!
//! Owns how the bytes of each [`Format`] are laid out; nothing is rounded.

use cudarc::driver::CudaStream;

use crate::driver::{DevicePtr, Launch};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::linear::{Format, to_u32};
use crate::nvrtc::Source;

/// The file of these kernels.
pub const SOURCE: Source = Source {
    file: "repack.cu",
    text: include_str!("kernels/repack.cu"),
    kernels: &["repack_fp4", "repack_fp4_scales", "repack_wide", "fill_random", "copy_all"],
};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RepackParams {
    from: u64,
    to: u64,
    count: u64,
    runs: u32,
    steps: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct FillParams {
    to: u64,
    count: u64,
    seed: u32,
    kind: u32,
}

/// What [`fill_random`] writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Random {
    /// Any bits: E2M1 codes.
    Bits,
    /// E4M3 codes that are numbers.
    E4m3,
    /// E8M0 scales from 2^-8 to 2^-5.
    Scales,
    /// bf16 of magnitude below 2.
    Bf16,
    /// fp32 of magnitude below 2.
    F32,
}

/// Whether a format's codes change their places.
#[must_use]
pub fn moves_codes(format: Format) -> bool {
    matches!(format, Format::Fp4 | Format::Wide)
}

/// Moves whole rows of codes from the stored layout at `from` to the kernels' at `to`.
///
/// # Safety
/// `from` must hold `rows` stored rows and `to` have room for as many of the device's, apart from
/// each other.
///
/// # Errors
/// [`CudaError::Driver`].
pub unsafe fn codes(
    (kernels, stream): (&Kernels, &CudaStream),
    format: Format,
    (rows, cols): (usize, usize),
    from: DevicePtr,
    to: DevicePtr,
) -> Result<(), CudaError> {
    let steps = format.steps(cols);
    let (name, count) = match format {
        Format::Fp4 => ("repack_fp4", rows * cols / 8),
        Format::Wide => ("repack_wide", rows * steps * 64),
        Format::Fp8 | Format::Bf16 | Format::F32 => return Ok(()),
    };
    let params =
        RepackParams { from: from.0, to: to.0, count: count as u64, runs: to_u32(cols / 8), steps: to_u32(steps) };
    // SAFETY: the caller's promise.
    unsafe { launch(kernels, stream, name, count, &params) }
}

/// Moves whole rows of FP4 scales.
///
/// # Safety
/// As for [`codes`].
///
/// # Errors
/// [`CudaError::Driver`].
pub unsafe fn fp4_scales(
    (kernels, stream): (&Kernels, &CudaStream),
    (rows, cols): (usize, usize),
    from: DevicePtr,
    to: DevicePtr,
) -> Result<(), CudaError> {
    let steps = Format::Fp4.steps(cols);
    let count = rows * 32 * steps;
    let params =
        RepackParams { from: from.0, to: to.0, count: count as u64, runs: to_u32(cols / 32), steps: to_u32(steps) };
    // SAFETY: the caller's promise.
    unsafe { launch(kernels, stream, "repack_fp4_scales", count, &params) }
}

/// Fills `bytes` bytes, a multiple of four, with random weights; for measurements.
///
/// # Safety
/// `to` must have as many bytes.
///
/// # Errors
/// [`CudaError::Driver`].
pub unsafe fn fill_random(
    (kernels, stream): (&Kernels, &CudaStream),
    what: Random,
    seed: u32,
    to: DevicePtr,
    bytes: usize,
) -> Result<(), CudaError> {
    let params = FillParams { to: to.0, count: (bytes / 4) as u64, seed, kind: what as u32 };
    // SAFETY: the caller's promise.
    unsafe { launch(kernels, stream, "fill_random", bytes / 4, &params) }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CopyParams {
    from: u64,
    to: u64,
    count: u64,
}

/// Copies `bytes` bytes, a multiple of 16; for measurements.
///
/// # Safety
/// Both places must have as many bytes, apart from each other.
///
/// # Errors
/// [`CudaError::Driver`].
pub unsafe fn copy(
    (kernels, stream): (&Kernels, &CudaStream),
    from: DevicePtr,
    to: DevicePtr,
    bytes: usize,
) -> Result<(), CudaError> {
    let params = CopyParams { from: from.0, to: to.0, count: (bytes / 16) as u64 };
    let function = kernels.get("copy_all")?;
    let launch =
        Launch { function, grid: (to_u32(bytes.div_ceil(32_768)), 1, 1), threads: 512, shared: 0, dependent: false };
    // SAFETY: the caller's promise.
    unsafe { launch.run(stream, &params) }
}

unsafe fn launch<P: Copy>(
    kernels: &Kernels,
    stream: &CudaStream,
    name: &'static str,
    count: usize,
    params: &P,
) -> Result<(), CudaError> {
    let blocks = to_u32(count.div_ceil(256).clamp(1, 4096));
    let launch =
        Launch { function: kernels.get(name)?, grid: (blocks, 1, 1), threads: 256, shared: 0, dependent: false };
    // SAFETY: the caller's promise.
    unsafe { launch.run(stream, params) }
}
