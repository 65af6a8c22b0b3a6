//! Products at the real model's shapes.

use ringfence_cuda::CudaError;
use ringfence_cuda::driver::DevicePtr;
use ringfence_cuda::linear::{Format, Linear, Out, Products, Rows, Tuning};
use ringfence_cuda::repack::{Random, fill_random};

use crate::support::Bench;

/// Weights of this many bytes are gone through, so that no cache helps.
const COLD: usize = 600 << 20;

const SHAPES: [(&str, Format, usize, usize); 9] = [
    ("wq_b", Format::Fp8, 32_768, 1024),
    ("wo_b", Format::Fp8, 4096, 8192),
    ("4096x4096", Format::Fp8, 4096, 4096),
    ("wq_a", Format::Fp8, 1024, 4096),
    ("wkv", Format::Fp8, 512, 4096),
    ("6 x w1", Format::Fp4, 12_288, 4096),
    ("6 x w2", Format::Fp4, 24_576, 2048),
    ("compress", Format::Bf16, 2624, 4096),
    ("gate", Format::Bf16, 256, 4096),
];

pub(crate) fn run(bench: &Bench) -> Result<(), CudaError> {
    if bench.wants("products") {
        println!("product            MB     M     µs   GB/s  % of copy  (+P: dependent launches)");
        for shape in SHAPES {
            for m in [1, 2, 4, 6, 8, 16] {
                let plain = one(bench, shape, m, Tuning { dependent: false, ..Tuning::default() })?;
                let after = one(bench, shape, m, Tuning::default())?;
                show(bench, shape, m, plain, after);
            }
        }
        grouped(bench)?;
    }
    if bench.wants("tuning") {
        for shape in [SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[3], SHAPES[5]] {
            for blocks in [1, 2] {
                for single_rows in [0, 16, 1 << 20] {
                    let tuning = Tuning { blocks, single_rows, ..Tuning::default() };
                    let us = one(bench, shape, 1, tuning)?;
                    println!("{:10} blocks {blocks} single {single_rows:8} {us:7.2} µs", shape.0);
                }
            }
        }
    }
    Ok(())
}

fn show(bench: &Bench, (name, format, rows, cols): (&str, Format, usize, usize), m: usize, plain: f64, after: f64) {
    let bytes = (rows * format.row_bytes(cols) + format.scale_bytes(rows, cols)) as f64;
    let rate = |us: f64| bytes / us / 1e3;
    println!(
        "{name:10} {:5.1} {m:5}  {plain:6.2} {:6.0} {:5.0} %   +P {after:6.2} {:6.0} {:5.0} %",
        bytes / 1e6,
        rate(plain),
        100.0 * rate(plain) / bench.copy,
        rate(after),
        100.0 * rate(after) / bench.copy,
    );
}

/// Microseconds of one product, over copies of its weights.
fn one(
    bench: &Bench,
    (_, format, rows, cols): (&str, Format, usize, usize),
    m: usize,
    tuning: Tuning,
) -> Result<f64, CudaError> {
    let setup = Setup::new(bench, format, (rows, cols), m * cols, m * rows)?;
    let products = Products::new(&bench.device, bench.kernels.clone(), tuning)?;
    let us = bench.time(|| {
        for w in &setup.weights {
            let out = Out { at: setup.out, stride: rows, wide: false };
            // SAFETY: the buffers are as long as the shapes say and outlive the stream's work.
            unsafe { products.linear(bench.device.stream(), (Rows { at: setup.x, stride: cols }, m), w, out) }?;
        }
        Ok(())
    })?;
    Ok(us / setup.weights.len() as f64)
}

fn grouped(bench: &Bench) -> Result<(), CudaError> {
    let (rows, cols, groups) = (8192, 4096, 8);
    for m in [1, 2, 4, 6, 8] {
        let mut us = [0.0; 2];
        for (us, dependent) in us.iter_mut().zip([false, true]) {
            let setup = Setup::new(bench, Format::Wide, (rows, cols), m * groups * cols, m * rows)?;
            let products =
                Products::new(&bench.device, bench.kernels.clone(), Tuning { dependent, ..Tuning::default() })?;
            let all = bench.time(|| {
                for w in &setup.weights {
                    let x = Rows { at: setup.x, stride: groups * cols };
                    let out = Out { at: setup.out, stride: rows, wide: false };
                    // SAFETY: the buffers are as long as the shapes say and outlive the stream's work.
                    unsafe { products.grouped(bench.device.stream(), (x, m), (w, groups), out) }?;
                }
                Ok(())
            })?;
            *us = all / setup.weights.len() as f64;
        }
        show(bench, ("wo_a", Format::Wide, rows, cols), m, us[0], us[1]);
    }
    Ok(())
}

/// Copies of a random matrix, activations and room for a result.
pub(crate) struct Setup {
    pub(crate) weights: Vec<Linear>,
    pub(crate) x: DevicePtr,
    pub(crate) out: DevicePtr,
    _arena: ringfence_cuda::driver::Arena,
}

impl Setup {
    pub(crate) fn new(
        bench: &Bench,
        format: Format,
        (rows, cols): (usize, usize),
        inputs: usize,
        outputs: usize,
    ) -> Result<Self, CudaError> {
        let (codes, scales) = (rows * format.row_bytes(cols), format.scale_bytes(rows, cols).next_multiple_of(4));
        let copies = (COLD / codes).clamp(2, 40);
        let mut arena =
            bench.device.arena("weights", copies * (codes + scales + 1024) + 4 * (inputs + outputs) + (1 << 20))?;
        let at = (&*bench.kernels, &**bench.device.stream());
        let kind = match format {
            Format::Fp8 | Format::Wide => Random::E4m3,
            Format::Fp4 => Random::Bits,
            Format::Bf16 => Random::Bf16,
            Format::F32 => Random::F32,
        };
        let mut weights = Vec::new();
        for seed in 0..copies {
            let (weight, scale) = (arena.take("weights", codes)?, arena.take("scales", scales.max(4))?);
            // SAFETY: the arena's pieces are as long.
            unsafe { fill_random(at, kind, seed as u32, weight, codes) }?;
            // SAFETY: as above.
            unsafe { fill_random(at, Random::Scales, seed as u32, scale, scales) }?;
            weights.push(Linear { format, rows, cols, weight, scale });
        }
        let (x, out) = (arena.take("x", 2 * inputs)?, arena.take("out", 4 * outputs)?);
        // SAFETY: the arena's piece is as long.
        unsafe { fill_random(at, Random::Bf16, 99, x, 2 * inputs) }?;
        Ok(Self { weights, x, out, _arena: arena })
    }
}
