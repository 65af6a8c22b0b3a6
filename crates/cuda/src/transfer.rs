//! What goes between host and device at the ends of a wave: where it lies in the page-locked buffers.
//!
//! Owns these two layouts. Places are fixed, so that copies can be captured with a wave.

use cudarc::driver::{CudaStream, result};
use half::bf16;
use ringfence_engine::engine::Drafts;
use ringfence_engine::ids::{LayerRange, TokenId};
use ringfence_engine::model::ModelConfig;

use crate::driver::{DevicePtr, Pinned};
use crate::error::{CudaError, Doing};
use crate::ops::Row;
use crate::pass::{FEW, WAVE};

/// Where things lie in the input, in bytes.
pub(crate) const ROWS: usize = 0;
pub(crate) const LOGIT_ROWS: usize = ROWS + 16 * WAVE;
pub(crate) const ANCHOR: usize = LOGIT_ROWS + 4 * WAVE;
pub(crate) const HIDDEN: usize = ANCHOR + 256;

/// And in the output.
pub(crate) const CHECKS: usize = 0;
pub(crate) const DRAFTED: usize = CHECKS + 4 * WAVE;
pub(crate) const RESULT: usize = DRAFTED + 8 * FEW;

/// Bytes of the input buffer.
pub(crate) fn input_bytes(config: &ModelConfig) -> usize {
    HIDDEN + 2 * WAVE * config.hc * config.dim
}

/// Bytes of the output buffer.
pub(crate) fn output_bytes(config: &ModelConfig, range: LayerRange) -> usize {
    RESULT + if range.hi() == config.layers { 4 * FEW * config.vocab } else { 2 * WAVE * config.hc * config.dim }
}

fn write<T: bytemuck::NoUninit>(input: &mut Pinned, at: usize, values: &[T]) {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    input.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Writes a wave's rows and which of them have logits.
pub(crate) fn rows(input: &mut Pinned, rows: &[Row], picks: &[i32]) {
    write(input, ROWS, rows);
    write(input, LOGIT_ROWS, picks);
}

/// Writes a draft's anchor: the session's slot, the position in front of it and the token.
pub(crate) fn anchor(input: &mut Pinned, row: Row) {
    write(input, ANCHOR, &[row]);
}

/// Writes hidden states from value `first` on.
pub(crate) fn hidden(input: &mut Pinned, first: usize, values: &[bf16]) {
    write(input, HIDDEN + 2 * first, values);
}

fn read<T: bytemuck::AnyBitPattern>(output: &Pinned, at: usize, count: usize) -> &[T] {
    bytemuck::cast_slice(&output.bytes()[at..at + count * size_of::<T>()])
}

/// fp32 values of the output.
pub(crate) fn floats(output: &Pinned, at: usize, count: usize) -> &[f32] {
    read(output, at, count)
}

/// bf16 values of the output.
pub(crate) fn halves(output: &Pinned, at: usize, count: usize) -> &[bf16] {
    read(output, at, count)
}

/// The row of the check that failed first, and of equals the first row.
pub(crate) fn failed(output: &Pinned, rows: usize) -> Option<usize> {
    let checks: &[i32] = read(output, CHECKS, rows);
    let failed = checks.iter().enumerate().filter(|&(_, &check)| check != 0);
    failed.min_by_key(|&(row, &check)| (check, row)).map(|(row, _)| row)
}

/// The tokens of a draft and their confidence.
pub(crate) fn drafts(output: &Pinned, block: usize) -> Drafts {
    let tokens: &[u32] = read(output, DRAFTED, block);
    let confidence = floats(output, DRAFTED + 4 * FEW, block);
    Drafts { tokens: tokens.iter().map(|&token| TokenId(token)).collect(), confidence: confidence.to_vec() }
}

/// Copies on the stream.
#[derive(Debug)]
pub(crate) struct Copies<'a> {
    pub(crate) stream: &'a CudaStream,
    pub(crate) input: &'a Pinned,
    pub(crate) output: &'a Pinned,
}

impl Copies<'_> {
    /// Bytes of the input to the device.
    pub(crate) fn to_device(&self, from: usize, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let source = &self.input.bytes()[from..from + bytes];
        // SAFETY: the engine's buffers live as long as its stream runs, and `to` has room.
        unsafe { result::memcpy_htod_async(to.0, source, self.stream.cu_stream()) }.doing("copy to the device")
    }

    /// Bytes of the device to the output; they are there when the stream has run.
    pub(crate) fn to_host(&self, from: DevicePtr, to: usize, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let place = &self.output.bytes()[to..to + bytes];
        let status = {
            use cudarc::driver::sys;
            let target = place.as_ptr().cast_mut().cast();
            // SAFETY: page-locked memory of the engine, which reads it only after the stream has run.
            unsafe { sys::cuMemcpyDtoHAsync_v2(target, from.0, bytes, self.stream.cu_stream()) }
        };
        status.result().doing("copy from the device")
    }
}
