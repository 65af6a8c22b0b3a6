//! Bytes of a checkpoint to the device: mapped files through two page-locked buffers into one arena.
//!
//! Owns the peak: one arena of the exact size, planned before it is taken, and two staging buffers
//! on the device for formats whose codes move. Codes are refused as the CPU engine refuses them.

use cudarc::driver::{CudaEvent, result};
use ringfence_engine::model::{ModelError, RangeWeights};
use sha2::{Digest, Sha256};

use crate::driver::{ALIGN, Arena, Device, DevicePtr, Direction, Pinned};
use crate::error::{CudaError, Doing};
use crate::kernels::Kernels;
use crate::linear::{Format, Linear};
use crate::nvrtc::hex;
use crate::repack;

/// Bytes of a staging buffer.
const STAGING: usize = 32 << 20;
/// Threads that copy from the mapped files.
const COPIERS: usize = 8;

/// One tensor that the device holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The tensor's name in the checkpoint, as this project spells it.
    pub name: String,
    /// How it lies on the device.
    pub form: &'static str,
    /// Bytes there.
    pub bytes: u64,
}

/// A tensor that the device holds, with the digest of the bytes that it was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// What is held.
    pub held: Held,
    /// Bytes in the checkpoint.
    pub stored: u64,
    /// SHA-256 of them, in hexadecimal.
    pub sha256: String,
}

/// Reads the official bytes of all that the device holds and gives their digests.
///
/// # Errors
/// [`CudaError::Model`] if a tensor is not in the range.
pub fn inventory(weights: &RangeWeights<'_>, held: &[Held]) -> Result<Vec<Line>, CudaError> {
    let parts: Vec<&[Held]> = held.chunks(held.len().div_ceil(COPIERS).max(1)).collect();
    let lines = |part: &[Held]| {
        let line = |held: &Held| {
            let bytes = weights.stored(&held.name)?;
            Ok(Line { held: held.clone(), stored: bytes.len() as u64, sha256: hex(&Sha256::digest(bytes)) })
        };
        part.iter().map(line).collect::<Result<Vec<_>, ModelError>>()
    };
    let done: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = parts.iter().map(|part| scope.spawn(|| lines(part))).collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let mut all = Vec::with_capacity(held.len());
    for part in done {
        let lost = |_| CudaError::Driver { doing: "read the checkpoint".to_owned(), why: "a thread ended".to_owned() };
        all.extend(part.map_err(lost)??);
    }
    Ok(all)
}

/// Plans the arena, then fills it.
pub(crate) struct Loader<'a> {
    device: &'a Device,
    kernels: &'a Kernels,
    weights: &'a RangeWeights<'a>,
    /// `None` while only sizes are counted.
    filling: Option<Filling>,
    planned: usize,
    held: Vec<Held>,
}

struct Filling {
    arena: Arena,
    _staging: Arena,
    slots: [Slot; 2],
    next: usize,
}

struct Slot {
    pinned: Pinned,
    staging: DevicePtr,
    free: CudaEvent,
}

impl<'a> Loader<'a> {
    /// Counts what `build` takes, then lets it fill an arena of that size.
    pub(crate) fn run<T>(
        device: &'a Device,
        kernels: &'a Kernels,
        weights: &'a RangeWeights<'a>,
        build: impl Fn(&mut Self) -> Result<T, CudaError>,
    ) -> Result<(T, Arena, Vec<Held>), CudaError> {
        let mut loader = Self { device, kernels, weights, filling: None, planned: 0, held: Vec::new() };
        build(&mut loader)?;
        loader.filling = Some(Filling::new(device, loader.planned)?);
        loader.held.clear();
        let built = build(&mut loader)?;
        device.synchronize()?;
        let lost = || CudaError::Driver { doing: "load weights".to_owned(), why: "no arena".to_owned() };
        let filling = loader.filling.ok_or_else(lost)?;
        Ok((built, filling.arena, loader.held))
    }

    /// Room on the device; null while sizes are counted.
    fn take(&mut self, what: &str, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.planned += bytes.next_multiple_of(ALIGN);
        match &mut self.filling {
            Some(filling) => filling.arena.take(what, bytes),
            None => Ok(DevicePtr::NULL),
        }
    }

    fn hold(&mut self, name: &str, form: &'static str, bytes: usize) {
        self.held.push(Held { name: name.to_owned(), form, bytes: bytes as u64 });
    }

    /// Small values that were changed on the host.
    pub(crate) fn values<T: bytemuck::NoUninit>(
        &mut self,
        name: &str,
        form: &'static str,
        read: impl FnOnce(&RangeWeights<'_>) -> Result<Vec<T>, ModelError>,
    ) -> Result<(DevicePtr, usize), CudaError> {
        let values = read(self.weights)?;
        let at = self.take(name, size_of_val(values.as_slice()))?;
        self.hold(name, form, size_of_val(values.as_slice()));
        self.send(bytemuck::cast_slice(&values), at)?;
        Ok((at, values.len()))
    }

    /// fp32 values as stored, by the tensor's whole name.
    pub(crate) fn f32(&mut self, name: &str) -> Result<(DevicePtr, usize), CudaError> {
        self.values(name, "fp32", |weights| weights.f32(name))
    }

    /// A norm's bf16 weights as fp32.
    pub(crate) fn norm(&mut self, name: &str) -> Result<DevicePtr, CudaError> {
        let widened = |weights: &RangeWeights<'_>| {
            Ok(weights.bf16(name)?.iter().map(|weight| weight.to_f32()).collect::<Vec<f32>>())
        };
        Ok(self.values(&format!("{name}.weight"), "bf16 widened to fp32", widened)?.0)
    }

    /// A matrix of plain values with `rows` rows.
    pub(crate) fn plain(&mut self, tensor: &str, format: Format, rows: usize) -> Result<Linear, CudaError> {
        let (weights, width) = (self.weights, if format == Format::F32 { 4 } else { 2 });
        let bytes = weights.stored(tensor)?;
        if self.filling.is_some() {
            refuse_nan(tensor, format, bytes)?;
        }
        let weight = self.take(tensor, bytes.len())?;
        self.hold(tensor, if width == 4 { "fp32" } else { "bf16" }, bytes.len());
        self.send(bytes, weight)?;
        Ok(Linear { format, rows, cols: bytes.len() / width / rows.max(1), weight, scale: DevicePtr::NULL })
    }

    /// An FP8 matrix, as codes or as the bf16 weights that they stand for.
    pub(crate) fn fp8(&mut self, name: &str, format: Format) -> Result<Linear, CudaError> {
        let weights = self.weights;
        let stored = weights.fp8(name)?;
        let (rows, cols) = (stored.n, stored.k);
        let tensor = format!("{name}.weight");
        let bytes = rows * format.row_bytes(cols);
        let weight = self.take(&tensor, bytes)?;
        let scale = self.take(name, stored.scales.len())?;
        self.hold(&tensor, if format == Format::Wide { "E4M3, runs in pairs" } else { "E4M3" }, bytes);
        self.hold(&format!("{name}.scale"), "E8M0", stored.scales.len());
        if self.filling.is_some() {
            refuse_nan(&tensor, format, stored.codes)?;
            if format == Format::Wide {
                refuse_inexact(&tensor, stored.scales)?;
            }
        }
        self.codes(stored.codes, format, (rows, cols), weight)?;
        self.send(stored.scales, scale)?;
        Ok(Linear { format, rows, cols, weight, scale })
    }

    /// The same FP4 matrix of all experts, one behind the other.
    pub(crate) fn stack(
        &mut self,
        names: impl Iterator<Item = String> + Clone,
    ) -> Result<(DevicePtr, DevicePtr), CudaError> {
        let (weights, format) = (self.weights, Format::Fp4);
        let (mut codes, mut scales) = (0, 0);
        for name in names.clone() {
            let stored = weights.fp4(&name)?;
            codes += stored.codes.len();
            scales += format.scale_bytes(stored.n, stored.k);
            self.hold(&format!("{name}.weight"), "E2M1, words repacked", stored.codes.len());
            self.hold(&format!("{name}.scale"), "E8M0 by lane", format.scale_bytes(stored.n, stored.k));
        }
        let (weight, scale) = (self.take("experts", codes)?, self.take("experts", scales)?);
        let (mut code_at, mut scale_at) = (weight, scale);
        for name in names {
            let stored = weights.fp4(&name)?;
            let shape = (stored.n, stored.k);
            self.codes(stored.codes, format, shape, code_at)?;
            self.fp4_scales(stored.scales, shape, scale_at)?;
            code_at = code_at.plus(stored.codes.len());
            scale_at = scale_at.plus(format.scale_bytes(stored.n, stored.k));
        }
        Ok((weight, scale))
    }

    /// Codes of a matrix, moved on the device where the format wants it.
    fn codes(
        &mut self,
        bytes: &[u8],
        format: Format,
        (rows, cols): (usize, usize),
        to: DevicePtr,
    ) -> Result<(), CudaError> {
        if !repack::moves_codes(format) {
            return self.send(bytes, to);
        }
        let (stored, row_bytes) = (bytes.len() / rows.max(1), format.row_bytes(cols));
        self.pieces(bytes, stored, |at, piece, from| {
            let (first, rows) = (piece.start / stored, piece.len() / stored);
            // SAFETY: the staging buffer holds the piece's rows, and the arena has room for them.
            unsafe { repack::codes(at, format, (rows, cols), from, to.plus(first * row_bytes)) }
        })
    }

    fn fp4_scales(&mut self, bytes: &[u8], (rows, cols): (usize, usize), to: DevicePtr) -> Result<(), CudaError> {
        let (stored, row_bytes) = (bytes.len() / rows.max(1), Format::Fp4.scale_bytes(1, cols));
        self.pieces(bytes, stored, |at, piece, from| {
            let (first, rows) = (piece.start / stored, piece.len() / stored);
            // SAFETY: as for codes.
            unsafe { repack::fp4_scales(at, (rows, cols), from, to.plus(first * row_bytes)) }
        })
    }

    /// Bytes as they are.
    fn send(&mut self, bytes: &[u8], to: DevicePtr) -> Result<(), CudaError> {
        self.transfer(bytes, 1, |piece, _| to.plus(piece.start), |_, _, _| Ok(()))
    }

    /// Whole rows through the staging buffers, each piece given to `work` there.
    fn pieces(
        &mut self,
        bytes: &[u8],
        row: usize,
        work: impl Fn((&Kernels, &cudarc::driver::CudaStream), std::ops::Range<usize>, DevicePtr) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.transfer(bytes, row, |_, staging| staging, work)
    }

    fn transfer(
        &mut self,
        bytes: &[u8],
        row: usize,
        place: impl Fn(&std::ops::Range<usize>, DevicePtr) -> DevicePtr,
        work: impl Fn((&Kernels, &cudarc::driver::CudaStream), std::ops::Range<usize>, DevicePtr) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let Some(filling) = &mut self.filling else { return Ok(()) };
        let stream = self.device.stream();
        let step = STAGING / row.max(1) * row.max(1);
        if step == 0 {
            return Err(CudaError::Shape {
                what: "bytes of a row".to_owned(),
                got: row,
                expected: format!("at most {STAGING}"),
            });
        }
        for start in (0..bytes.len()).step_by(step) {
            let piece = start..(start + step).min(bytes.len());
            let slot = &mut filling.slots[filling.next % 2];
            filling.next += 1;
            slot.free.synchronize().doing("wait for a staging buffer")?;
            let host = &mut slot.pinned.bytes_mut()[..piece.len()];
            copy(&bytes[piece.clone()], host);
            let to = place(&piece, slot.staging);
            // SAFETY: the target has room for the piece; the buffer is kept until the event says so.
            unsafe { result::memcpy_htod_async(to.0, host, stream.cu_stream()) }.doing("copy weights to the device")?;
            work((self.kernels, stream), piece, slot.staging)?;
            slot.free.record(stream).doing("mark a staging buffer")?;
        }
        Ok(())
    }
}

impl Filling {
    fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let arena = device.arena("weights", bytes)?;
        let mut staging = device.arena("staging", 2 * STAGING)?;
        let mut slot = || {
            Ok::<_, CudaError>(Slot {
                pinned: device.pinned(STAGING, Direction::ToDevice)?,
                staging: staging.take("staging", STAGING)?,
                free: device.context().new_event(None).doing("make an event")?,
            })
        };
        let slots = [slot()?, slot()?];
        Ok(Self { arena, _staging: staging, slots, next: 0 })
    }
}

/// Copies with several threads: mapped pages may have to come from the disk.
fn copy(from: &[u8], to: &mut [u8]) {
    let part = from.len().div_ceil(COPIERS).next_multiple_of(1 << 16);
    if part >= from.len() {
        return to.copy_from_slice(from);
    }
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}

/// Refuses codes that are no numbers.
fn refuse_nan(tensor: &str, format: Format, bytes: &[u8]) -> Result<(), CudaError> {
    let found = match format {
        Format::Fp8 | Format::Wide => find(bytes, 1, |code| code[0] & 0x7f == 0x7f),
        Format::Bf16 => find(bytes, 2, |w| u16::from_le_bytes([w[0], w[1]]) & 0x7fff > 0x7f80),
        Format::F32 => find(bytes, 4, |w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]) & 0x7fff_ffff > 0x7f80_0000),
        Format::Fp4 => None,
    };
    match found {
        None => Ok(()),
        Some(at) => Err(refused(tensor, format!("code {at} is NaN: the checkpoint is damaged"))),
    }
}

/// Refuses scales with which a product of code and scale is not exact as bf16.
fn refuse_inexact(tensor: &str, scales: &[u8]) -> Result<(), CudaError> {
    match scales.iter().position(|scale| !(16..=240).contains(scale)) {
        None => Ok(()),
        Some(at) => {
            Err(refused(tensor, format!("scale {at} is 2^{}, expected 2^-111 to 2^113", i32::from(scales[at]) - 127)))
        }
    }
}

fn refused(tensor: &str, why: String) -> CudaError {
    CudaError::Model(ModelError::Pack { tensor: tensor.to_owned(), why })
}

/// The first item of `width` bytes that is `bad`, looked for with several threads.
fn find(bytes: &[u8], width: usize, bad: impl Fn(&[u8]) -> bool + Sync) -> Option<usize> {
    let part = bytes.len().div_ceil(COPIERS).next_multiple_of(1 << 16);
    let search = |part: &[u8]| {
        let any = part.chunks_exact(width).fold(false, |any, item| any | bad(item));
        if any { part.chunks_exact(width).position(&bad) } else { None }
    };
    if part >= bytes.len() {
        return search(bytes);
    }
    let found: Vec<Option<usize>> = std::thread::scope(|scope| {
        let threads: Vec<_> = bytes.chunks(part).map(|part| scope.spawn(|| search(part))).collect();
        threads.into_iter().map(|thread| thread.join().ok().flatten()).collect()
    });
    found.iter().enumerate().find_map(|(i, at)| at.map(|at| i * (part / width) + at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_are_no_numbers_are_refused_by_place() {
        let mut bytes = vec![0x3c_u8; 1 << 20];
        assert!(refuse_nan("t", Format::Fp8, &bytes).is_ok());
        bytes[700_001] = 0xff;
        let why = refuse_nan("t", Format::Fp8, &bytes).unwrap_err().to_string();
        assert!(why.contains("code 700001"), "{why}");
        bytes[700_000] = 0xff;
        let why = refuse_nan("t", Format::Bf16, &bytes).unwrap_err().to_string();
        assert!(why.contains("code 350000"), "{why}");
        assert!(refuse_nan("t", Format::Fp4, &bytes).is_ok());
    }

    #[test]
    fn scales_that_bf16_cant_follow_are_refused() {
        assert!(refuse_inexact("t", &[16, 127, 240]).is_ok());
        assert!(refuse_inexact("t", &[127, 15]).is_err());
        assert!(refuse_inexact("t", &[241]).is_err());
    }
}
