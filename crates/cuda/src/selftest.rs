//! A few products on the device against the CPU's bits, before anything is trusted to it.
//!
//! Owns the one decision that a device is refused for its arithmetic.

use std::sync::Arc;

use half::bf16;
use ringfence_engine::engine::cpu::kernel::Isa;
use ringfence_engine::engine::cpu::kernel::linear::{self, Bf16Matrix, Fp4Matrix, Fp8Matrix, PackError};
use ringfence_engine::engine::cpu::kernel::quant::QuantRows;

use crate::driver::{Arena, Device, DevicePtr};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::linear::{Format, Linear, Out, Products, Rows};
use crate::repack;

/// Outputs and inputs of the products.
const SHAPE: (usize, usize) = (192, 1152);
/// Rows of activations: one, and a few.
const ROWS: [usize; 2] = [1, 3];

/// A sequence of bits that is the same everywhere.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as u8
    }

    fn bytes(&mut self, count: usize, with: impl Fn(u8) -> u8) -> Vec<u8> {
        (0..count).map(|_| with(self.next())).collect()
    }

    /// bf16 values of magnitudes from 2^-12 to 2^3.
    fn values(&mut self, count: usize) -> Vec<bf16> {
        let value = |high: u8, low: u8| {
            let exponent = 115 + u16::from(low & 15);
            bf16::from_bits(u16::from(high & 0x80) << 8 | exponent << 7 | u16::from(high & 0x7f))
        };
        (0..count).map(|_| value(self.next(), self.next())).collect()
    }
}

/// Compares products of every format with the CPU's.
///
/// # Errors
/// [`CudaError::SelfTest`] with the first output whose bits differ; [`CudaError::Driver`].
pub fn run(device: &Device, products: &Products, kernels: &Arc<Kernels>) -> Result<(), CudaError> {
    let mut bits = Bits(0x5eed);
    for format in [Format::Fp8, Format::Fp4, Format::Bf16] {
        for m in ROWS {
            product(device, products, kernels, (format, m), &mut bits)?;
        }
    }
    Ok(())
}

fn product(
    device: &Device,
    products: &Products,
    kernels: &Kernels,
    (format, m): (Format, usize),
    bits: &mut Bits,
) -> Result<(), CudaError> {
    let (n, k) = SHAPE;
    let x = bits.values(m * k);
    let number = |code: u8| if code & 0x7f == 0x7f { code ^ 1 } else { code };
    let scale = |bits: u8| 118 + bits % 12;
    let (codes, scales) = match format {
        Format::Fp8 | Format::Wide => (bits.bytes(n * k, number), bits.bytes(n.div_ceil(128) * (k / 128), scale)),
        Format::Fp4 => (bits.bytes(n * k / 2, |code| code), bits.bytes(n * k / 32, scale)),
        Format::Bf16 | Format::F32 => (bits.values(n * k).iter().flat_map(|w| w.to_le_bytes()).collect(), Vec::new()),
    };
    let got = on_device(device, products, kernels, (format, &codes, &scales), (&x, m))?;
    let what = format!("{format:?} product of {m} row(s)");
    let expected = on_cpu((format, &codes, &scales), &x, m)
        .map_err(|error| CudaError::Driver { doing: what.clone(), why: error.to_string() })?;
    match got.iter().zip(&expected).position(|(got, expected)| got.to_bits() != expected.to_bits()) {
        None => Ok(()),
        Some(index) => {
            let (got, expected) = (got[index].to_bits(), expected[index].to_bits());
            Err(CudaError::SelfTest { what, index, got, expected })
        }
    }
}

/// The product's fp32 sums as the CPU has them.
fn on_cpu((format, codes, scales): (Format, &[u8], &[u8]), x: &[bf16], m: usize) -> Result<Vec<f32>, PackError> {
    let (n, k) = SHAPE;
    let isa = Isa::detect();
    let mut y = vec![0.0; m * n];
    let out = linear::Out::f32(&mut y, m);
    let mut rows = QuantRows::new();
    rows.quantize(isa, x, k);
    match format {
        Format::Fp8 | Format::Wide => Fp8Matrix::pack(n, k, codes, scales)?.product(isa, &rows, out),
        Format::Fp4 => Fp4Matrix::pack(n, k, codes, scales)?.product(isa, &rows, out),
        Format::Bf16 | Format::F32 => {
            let weights: Vec<bf16> = codes.as_chunks::<2>().0.iter().map(|pair| bf16::from_le_bytes(*pair)).collect();
            let wide: Vec<f32> = x.iter().map(|value| value.to_f32()).collect();
            Bf16Matrix::pack(n, k, &weights)?.product(isa, linear::Rows::new(&wide, m), out);
        }
    }
    Ok(y)
}

/// The product's fp32 sums as the device has them.
fn on_device(
    device: &Device,
    products: &Products,
    kernels: &Kernels,
    (format, codes, scales): (Format, &[u8], &[u8]),
    (x, m): (&[bf16], usize),
) -> Result<Vec<f32>, CudaError> {
    let (rows, cols) = SHAPE;
    let mut arena = device.arena("the self-test", 8 << 20)?;
    let mut weight = put(device, &mut arena, codes)?;
    let mut scale = put(device, &mut arena, scales)?;
    let at = (kernels, &**device.stream());
    if repack::moves_codes(format) {
        let to = arena.take("codes", rows * format.row_bytes(cols))?;
        // SAFETY: both are as long as the shape says.
        unsafe { repack::codes(at, format, SHAPE, weight, to) }?;
        weight = to;
    }
    if format == Format::Fp4 {
        let to = arena.take("scales", format.scale_bytes(rows, cols))?;
        // SAFETY: both are as long as the shape says.
        unsafe { repack::fp4_scales(at, SHAPE, scale, to) }?;
        scale = to;
    }
    let input = put(device, &mut arena, x)?;
    let out = arena.take("outputs", 4 * m * rows)?;
    let w = Linear { format, rows, cols, weight, scale };
    // SAFETY: all of it is as long as the shapes say and lives until it was read.
    unsafe {
        products.linear(
            device.stream(),
            (Rows { at: input, stride: cols }, m),
            &w,
            Out { at: out, stride: rows, wide: true },
        )
    }?;
    let mut y = vec![0.0; m * rows];
    // SAFETY: as many values were computed.
    unsafe { device.download(out, &mut y) }?;
    Ok(y)
}

fn put<T: bytemuck::NoUninit>(device: &Device, arena: &mut Arena, values: &[T]) -> Result<DevicePtr, CudaError> {
    let at = arena.take("the self-test", size_of_val(values).max(1))?;
    // SAFETY: the piece is as long, and nothing runs.
    unsafe { device.upload(values, at) }?;
    Ok(at)
}
