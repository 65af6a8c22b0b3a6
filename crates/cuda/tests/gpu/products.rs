//! Products of every format against the CPU's.

use half::bf16;
use ringfence_cuda::linear::{Format, Linear, Out, Products, Rows, Tuning};
use ringfence_cuda::tile::TileScratch;
use ringfence_engine::engine::cpu::kernel::Isa;
use ringfence_engine::engine::cpu::kernel::linear::{self, Bf16Matrix, F32Matrix, Fp4Matrix, Fp8Matrix, fp8_to_bf16};
use ringfence_engine::engine::cpu::kernel::quant::QuantRows;

use crate::support::{Gpu, Outcome, Rng, Test, same_bf16, same_f32, words};

/// All of them.
pub(crate) const TESTS: &[Test] = &[
    ("products_fp8", |gpu| shapes(gpu, Format::Fp8)),
    ("products_fp4", |gpu| shapes(gpu, Format::Fp4)),
    ("products_wide", |gpu| shapes(gpu, Format::Wide)),
    ("products_bf16", |gpu| shapes(gpu, Format::Bf16)),
    ("products_f32", |gpu| shapes(gpu, Format::F32)),
    ("products_grouped", grouped),
    ("products_many", many),
    ("products_tiled", tiled),
];

/// A random matrix as stored.
pub(crate) struct Stored {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<u8>,
}

impl Stored {
    pub(crate) fn random(rng: &mut Rng, format: Format, rows: usize, cols: usize) -> Self {
        let blocks = rows.div_ceil(128) * cols.div_ceil(128);
        let (codes, scales) = match format {
            Format::Fp8 | Format::Wide => (rng.e4m3(rows * cols), rng.e8m0(blocks)),
            Format::Fp4 => (rng.bytes(rows * cols / 2), rng.e8m0(rows * cols / 32)),
            Format::Bf16 => (rng.activations(rows * cols).iter().flat_map(|v| v.to_le_bytes()).collect(), Vec::new()),
            Format::F32 => ((0..rows * cols).flat_map(|_| rng.normal().to_le_bytes()).collect(), Vec::new()),
        };
        // Where codes become bf16 weights, far scales would leave its range.
        let scales =
            if format == Format::Wide { scales.iter().map(|s| (*s).clamp(100, 130)).collect() } else { scales };
        Self { format, rows, cols, codes, scales }
    }

    /// The CPU's product as fp32 or bf16.
    pub(crate) fn product(&self, x: &[bf16], m: usize, out: linear::Out<'_>) {
        let isa = Isa::detect();
        let (n, k) = (self.rows, self.cols);
        let wide: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
        let floats = linear::Rows::new(&wide, m);
        let mut codes = QuantRows::new();
        match self.format {
            Format::Fp8 => {
                codes.quantize(isa, x, k);
                Fp8Matrix::pack(n, k, &self.codes, &self.scales).expect("packs").product(isa, &codes, out);
            }
            Format::Fp4 => {
                codes.quantize(isa, x, k);
                Fp4Matrix::pack(n, k, &self.codes, &self.scales).expect("packs").product(isa, &codes, out);
            }
            Format::Wide => {
                let values = fp8_to_bf16(n, k, &self.codes, &self.scales).expect("widens");
                Bf16Matrix::pack(n, k, &values).expect("packs").product(isa, floats, out);
            }
            Format::Bf16 => {
                let values: Vec<bf16> = self.codes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
                Bf16Matrix::pack(n, k, &values).expect("packs").product(isa, floats, out);
            }
            Format::F32 => {
                let values: Vec<f32> = self.codes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                F32Matrix::pack(n, k, &values).expect("packs").product(isa, floats, out);
            }
        }
    }

    pub(crate) fn f32(&self, x: &[bf16], m: usize) -> Vec<f32> {
        let mut y = vec![0.0; m * self.rows];
        self.product(x, m, linear::Out::f32(&mut y, m));
        y
    }

    pub(crate) fn bf16(&self, x: &[bf16], m: usize) -> Vec<bf16> {
        let mut y = vec![bf16::ZERO; m * self.rows];
        self.product(x, m, linear::Out::bf16(&mut y, m));
        y
    }
}

/// Real and tiny shapes (rows cut where only their count would grow).
fn shapes(gpu: &Gpu, format: Format) -> Outcome {
    let mut rng = Rng::new(format as u64 + 1);
    let shapes: &[(usize, usize)] = match format {
        Format::Fp8 => &[(512, 4096), (2048, 1024), (520, 8192), (260, 12_288), (128, 256), (256, 128), (136, 640)],
        Format::Fp4 => &[(512, 4096), (520, 2048), (128, 256), (256, 128), (129, 1152)],
        Format::Wide => &[(2304, 4096), (128, 256), (130, 384), (256, 1024)],
        Format::Bf16 => &[(256, 4096), (2624, 4096), (64, 4096), (8, 256), (1, 4352), (1, 320), (600, 72)],
        Format::F32 => &[(24, 16_384), (4, 16_384), (24, 1024), (700, 260), (513, 4)],
    };
    for &(rows, cols) in shapes {
        let stored = Stored::random(&mut rng, format, rows, cols);
        for (i, tuning) in
            [Tuning::default(), Tuning { single_rows: 0, split_rows: 0, dependent: false, ..Tuning::default() }]
                .iter()
                .enumerate()
        {
            let products = words(Products::new(&gpu.device, gpu.kernels.clone(), *tuning))?;
            for m in [1, 2, 3, 4, 6, 8, 11, 16] {
                if i == 1 && format == Format::F32 && cols > 8192 {
                    continue;
                }
                one(gpu, &products, &stored, m, &mut rng)
                    .map_err(|why| format!("{rows}×{cols}, {m} rows, tuning {i}: {why}"))?;
            }
        }
    }
    Ok(())
}

fn one(gpu: &Gpu, products: &Products, stored: &Stored, m: usize, rng: &mut Rng) -> Outcome {
    let (rows, cols) = (stored.rows, stored.cols);
    let x = rng.activations(m * cols);
    let mut memory =
        words(gpu.memory(2 * stored.codes.len() + 4 * stored.rows * 512 + 8 * m * (rows + cols) + (1 << 20)))?;
    let w = words(memory.matrix(stored.format, (rows, cols), &stored.codes, &stored.scales))?;
    let at = words(memory.put(&x))?;
    let (narrow, wide) = (words(memory.room(2 * m * rows))?, words(memory.room(4 * m * rows))?);
    let rows_in = (Rows { at, stride: cols }, m);
    let stream = gpu.device.stream();
    // SAFETY: every buffer is as long as the shapes say and lives until it was read.
    words(unsafe { products.linear(stream, rows_in, &w, Out { at: narrow, stride: rows, wide: false }) })?;
    // SAFETY: as above.
    words(unsafe { products.linear(stream, rows_in, &w, Out { at: wide, stride: rows, wide: true }) })?;
    same_f32("fp32", &words(memory.get(wide, m * rows))?, &stored.f32(&x, m))?;
    same_bf16("bf16", &words(memory.get(narrow, m * rows))?, &stored.bf16(&x, m))
}

fn grouped(gpu: &Gpu) -> Outcome {
    let products = words(Products::new(&gpu.device, gpu.kernels.clone(), Tuning::default()))?;
    let mut rng = Rng::new(77);
    for (groups, size, cols) in [(8, 1024, 4096), (2, 128, 256), (3, 128, 512)] {
        let stored = Stored::random(&mut rng, Format::Wide, groups * size, cols);
        let values = fp8_to_bf16(stored.rows, cols, &stored.codes, &stored.scales).map_err(|e| e.to_string())?;
        let packed = Bf16Matrix::pack(stored.rows, cols, &values).map_err(|e| e.to_string())?;
        for m in [1, 5, 8] {
            let x = rng.activations(m * groups * cols);
            let wide: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
            let mut expected = vec![bf16::ZERO; m * stored.rows];
            packed.grouped(Isa::detect(), groups, linear::Rows::new(&wide, m), linear::Out::bf16(&mut expected, m));
            let mut memory =
                words(gpu.memory(3 * stored.codes.len() + 4 * m * (stored.rows + groups * cols) + (1 << 20)))?;
            let w = words(memory.matrix(Format::Wide, (stored.rows, cols), &stored.codes, &stored.scales))?;
            let at = words(memory.put(&x))?;
            let out = words(memory.room(2 * m * stored.rows))?;
            let rows = (Rows { at, stride: groups * cols }, m);
            // SAFETY: every buffer is as long as the shapes say and lives until it was read.
            words(unsafe {
                products.grouped(
                    gpu.device.stream(),
                    rows,
                    (&w, groups),
                    Out { at: out, stride: stored.rows, wide: false },
                )
            })?;
            same_bf16(&format!("{groups} groups, {m} rows"), &words(memory.get(out, m * stored.rows))?, &expected)?;
        }
    }
    Ok(())
}

/// Several matrices in one launch, of different heights and kinds of output.
fn many(gpu: &Gpu) -> Outcome {
    let products = words(Products::new(&gpu.device, gpu.kernels.clone(), Tuning::default()))?;
    let mut rng = Rng::new(78);
    for (format, cols) in [(Format::Fp8, 1024), (Format::Bf16, 2048), (Format::Fp4, 1024)] {
        let all: Vec<Stored> =
            [1024, 513, 64, 130, 1024].map(|rows| Stored::random(&mut rng, format, rows, cols)).into();
        for m in [1, 2, 7] {
            let x = rng.activations(m * cols);
            let mut memory = words(gpu.memory(64 << 20))?;
            let at = words(memory.put(&x))?;
            let mut list: Vec<(Linear, Out)> = Vec::new();
            for (i, stored) in all.iter().enumerate() {
                let w = words(memory.matrix(format, (stored.rows, cols), &stored.codes, &stored.scales))?;
                let stride = stored.rows + 8;
                list.push((w, Out { at: words(memory.room(4 * m * stride))?, stride, wide: i % 2 == 0 }));
            }
            // SAFETY: every buffer is as long as the shapes say and lives until it was read.
            words(unsafe { products.linears(gpu.device.stream(), (Rows { at, stride: cols }, m), &list) })?;
            for (i, (stored, (w, out))) in all.iter().zip(&list).enumerate() {
                let what = format!("matrix {i} of {format:?}, {m} rows");
                for row in 0..m {
                    let from = row * w.rows..(row + 1) * w.rows;
                    if out.wide {
                        let got: Vec<f32> = words(memory.get(out.at.plus(4 * row * out.stride), w.rows))?;
                        same_f32(&what, &got, &stored.f32(&x, m)[from])?;
                    } else {
                        let got: Vec<bf16> = words(memory.get(out.at.plus(2 * row * out.stride), w.rows))?;
                        same_bf16(&what, &got, &stored.bf16(&x, m)[from])?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Tiles of many rows: every format, shape and split; rows, activations and lanes that don't fill them.
fn tiled(gpu: &Gpu) -> Outcome {
    let mut rng = Rng::new(79);
    let coded = [
        (256, 512, 64),
        (1024, 1024, 128),
        (136, 2048, 200),
        (4096, 512, 300),
        (64, 4096, 129),
        (130, 640, 33),
        (600, 128, 70),
        (8, 256, 24),
        (2048, 1152, 512),
    ];
    let plain = [(256, 4096, 64), (130, 384, 40), (1, 320, 30), (600, 72, 130), (64, 8, 65), (1024, 1024, 257)];
    for format in [Format::Fp8, Format::Wide, Format::Bf16] {
        let shapes = if format == Format::Bf16 { &plain[..] } else { &coded[..] };
        for &(rows, cols, m) in shapes {
            let stored = Stored::random(&mut rng, format, rows, cols);
            tiles(gpu, &[&stored], m, &mut rng).map_err(|why| format!("{format:?} {rows}×{cols}, {m} rows: {why}"))?;
        }
        let several: Vec<Stored> =
            [512, 130, 64, 1, 257].map(|rows| Stored::random(&mut rng, format, rows, 1024)).into();
        let several: Vec<&Stored> = several.iter().collect();
        for m in [40, 64, 400] {
            tiles(gpu, &several, m, &mut rng).map_err(|why| format!("several of {format:?}, {m} rows: {why}"))?;
        }
    }
    tiled_groups(gpu, &mut rng)
}

/// Matrices of the same inputs in one launch, in fp32 and bf16 in turn, without and with room for splits.
fn tiles(gpu: &Gpu, all: &[&Stored], m: usize, rng: &mut Rng) -> Outcome {
    let products = words(Products::new(&gpu.device, gpu.kernels.clone(), Tuning::default()))?;
    let (cols, format) = (all[0].cols, all[0].format);
    let outputs: usize = all.iter().map(|stored| stored.rows).sum();
    let x = rng.activations(m * cols);
    let bytes: usize = all.iter().map(|stored| 3 * stored.codes.len()).sum();
    let mut memory = words(gpu.memory(bytes + 16 * m * (outputs + cols) + (4 << 20)))?;
    let at = words(memory.put(&x))?;
    for room in [0, outputs] {
        let scratch = words(TileScratch::new(&gpu.device, m * cols, (m, room)))?;
        let mut list: Vec<(Linear, Out)> = Vec::new();
        for (i, stored) in all.iter().enumerate() {
            let w = words(memory.matrix(format, (stored.rows, cols), &stored.codes, &stored.scales))?;
            let stride = stored.rows + if i == 2 { 3 } else { 0 };
            list.push((w, Out { at: words(memory.room(4 * m * stride))?, stride, wide: (i + room) % 2 == 0 }));
        }
        let input = (Rows { at, stride: cols }, m);
        // SAFETY: every buffer is as long as the shapes say and lives until it was read.
        words(unsafe { products.tiled(gpu.device.stream(), input, (&list, None), &scratch) })?;
        for (i, (stored, (w, out))) in all.iter().zip(&list).enumerate() {
            let (wide, narrow) = (stored.f32(&x, m), stored.bf16(&x, m));
            for row in 0..m {
                let (what, from) = (format!("matrix {i}, room {room}, row {row}"), row * w.rows..(row + 1) * w.rows);
                if out.wide {
                    let got: Vec<f32> = words(memory.get(out.at.plus(4 * row * out.stride), w.rows))?;
                    same_f32(&what, &got, &wide[from])?;
                } else {
                    let got: Vec<bf16> = words(memory.get(out.at.plus(2 * row * out.stride), w.rows))?;
                    same_bf16(&what, &got, &narrow[from])?;
                }
            }
        }
    }
    Ok(())
}

/// Matrices with inputs of their own.
fn tiled_groups(gpu: &Gpu, rng: &mut Rng) -> Outcome {
    let products = words(Products::new(&gpu.device, gpu.kernels.clone(), Tuning::default()))?;
    for (groups, size, cols, m) in [(8, 1024, 512, 70), (2, 128, 256, 200), (3, 128, 640, 25)] {
        let stored = Stored::random(rng, Format::Wide, groups * size, cols);
        let values = fp8_to_bf16(stored.rows, cols, &stored.codes, &stored.scales).map_err(|e| e.to_string())?;
        let packed = Bf16Matrix::pack(stored.rows, cols, &values).map_err(|e| e.to_string())?;
        let x = rng.activations(m * groups * cols);
        let wide: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
        let mut expected = vec![bf16::ZERO; m * stored.rows];
        packed.grouped(Isa::detect(), groups, linear::Rows::new(&wide, m), linear::Out::bf16(&mut expected, m));
        let mut memory = words(gpu.memory(3 * stored.codes.len() + 4 * m * (stored.rows + groups * cols) + (1 << 20)))?;
        let w = words(memory.matrix(Format::Wide, (stored.rows, cols), &stored.codes, &stored.scales))?;
        let at = words(memory.put(&x))?;
        let out = words(memory.room(2 * m * stored.rows))?;
        let part = |g: usize| {
            let to = Out { at: out.plus(2 * g * size), stride: stored.rows, wide: false };
            (w.part(g * size, size), to)
        };
        let list: Vec<_> = (0..groups).map(part).collect();
        let scratch = words(TileScratch::new(&gpu.device, 0, (m, stored.rows)))?;
        let rows = (Rows { at, stride: groups * cols }, m);
        // SAFETY: every buffer is as long as the shapes say and lives until it was read.
        words(unsafe { products.tiled(gpu.device.stream(), rows, (&list, Some(cols)), &scratch) })?;
        same_bf16(&format!("{groups} groups, {m} rows"), &words(memory.get(out, m * stored.rows))?, &expected)?;
    }
    Ok(())
}
