//! The experts of a layer against the CPU's arithmetic.

use half::bf16;
use ringfence_cuda::driver::DevicePtr;
use ringfence_cuda::experts::{Experts, Scratch, Stack};
use ringfence_cuda::experts_tile::ManyScratch;
use ringfence_cuda::linear::{Format, Products, Rows, Tuning};
use ringfence_cuda::tile::TileScratch;
use ringfence_engine::engine::cpu::kernel::Isa;
use ringfence_engine::engine::cpu::kernel::vector::{add_to, narrow, swiglu};

use crate::products::Stored;
use crate::support::{Gpu, Memory, Outcome, Rng, Test, same_bf16, words};

/// All of them.
pub(crate) const TESTS: &[Test] = &[("experts", experts), ("experts_tiled", tiled)];

/// Sizes of one case.
#[derive(Clone, Copy, Debug)]
struct Case {
    dim: usize,
    inner: usize,
    count: usize,
    per_row: usize,
    limit: f32,
    rows: &'static [usize],
}

const CASES: [Case; 4] = [
    Case { dim: 256, inner: 128, count: 8, per_row: 2, limit: 10.0, rows: &[1, 2, 3, 5, 8, 16, 64] },
    Case { dim: 4096, inner: 2048, count: 8, per_row: 6, limit: 10.0, rows: &[1, 2, 6] },
    Case { dim: 640, inner: 384, count: 70, per_row: 6, limit: 0.0, rows: &[1, 4, 33] },
    Case { dim: 1024, inner: 1280, count: 5, per_row: 3, limit: 0.5, rows: &[1, 7] },
];

/// The CPU's matrices of one expert.
struct Expert {
    w1: Stored,
    w2: Stored,
    w3: Stored,
}

impl Expert {
    fn random(rng: &mut Rng, format: Format, dim: usize, inner: usize) -> Self {
        let mut matrix = |rows, cols| {
            let mut stored = Stored::random(rng, format, rows, cols);
            // Outputs of a size that the activation bends.
            let scale = if format == Format::Fp4 { 117 } else { 112 };
            stored.scales.iter_mut().for_each(|s| *s = scale + *s % 4);
            stored
        };
        Self { w1: matrix(inner, dim), w2: matrix(dim, inner), w3: matrix(inner, dim) }
    }

    /// One row.
    fn row(&self, x: &[bf16], limit: f32, weight: f32) -> Vec<bf16> {
        let (gate, up) = (self.w1.bf16(x, 1), self.w3.bf16(x, 1));
        let mut inner = vec![bf16::ZERO; gate.len()];
        swiglu(Isa::detect(), &gate, &up, limit, weight, &mut inner);
        self.w2.bf16(&inner, 1)
    }
}

/// Of many rows: items of every size, experts that nobody takes, one that all take.
const MANY: [Case; 3] = [
    Case { dim: 256, inner: 128, count: 8, per_row: 2, limit: 10.0, rows: &[1, 24, 70, 200] },
    Case { dim: 640, inner: 384, count: 70, per_row: 6, limit: 0.0, rows: &[65, 129] },
    Case { dim: 1024, inner: 640, count: 5, per_row: 3, limit: 0.5, rows: &[100] },
];

fn experts(gpu: &Gpu) -> Outcome {
    cases(gpu, &CASES, false)
}

fn tiled(gpu: &Gpu) -> Outcome {
    cases(gpu, &MANY, true)
}

fn cases(gpu: &Gpu, cases: &[Case], tiled: bool) -> Outcome {
    let mut rng = Rng::new(4242);
    for &case in cases {
        let Case { dim, inner, count, .. } = case;
        let routed: Vec<Expert> = (0..count).map(|_| Expert::random(&mut rng, Format::Fp4, dim, inner)).collect();
        let shared = Expert::random(&mut rng, Format::Fp8, dim, inner);
        for &m in case.rows {
            one(gpu, case, (&routed, &shared), (m, tiled), &mut rng)
                .map_err(|why| format!("{case:?}, {m} rows: {why}"))?;
        }
    }
    Ok(())
}

fn one(
    gpu: &Gpu,
    case: Case,
    (routed, shared): (&[Expert], &Expert),
    (m, tiled): (usize, bool),
    rng: &mut Rng,
) -> Outcome {
    let Case { dim, inner, count, per_row, limit, .. } = case;
    let x: Vec<bf16> = (0..m * dim).map(|_| bf16::from_f32(rng.normal())).collect();
    let mut picks: Vec<i32> = Vec::new();
    for row in 0..m {
        // Rows choose by chance, or all the same, or one expert twice.
        let mut row_picks: Vec<i32> = match row % 4 {
            0 => (0..per_row).map(|j| (j * 3 % count) as i32).collect(),
            _ => (0..per_row).map(|_| rng.below(count) as i32).collect(),
        };
        row_picks.sort_unstable();
        picks.extend(row_picks);
    }
    let weights: Vec<f32> = (0..m * per_row).map(|_| rng.unit().abs() + 0.01).collect();
    let mut memory = words(gpu.memory(((count + 8) * 3 * dim * inner) + 16 * m * (dim + inner) + (64 << 20)))?;
    let stack = |memory: &mut Memory<'_>, pick: fn(&Expert) -> &Stored| stack(memory, routed, pick);
    let (w1, w2, w3) = (stack(&mut memory, |e| &e.w1)?, stack(&mut memory, |e| &e.w2)?, stack(&mut memory, |e| &e.w3)?);
    let fp8 =
        |memory: &mut Memory<'_>, s: &Stored| words(memory.matrix(Format::Fp8, (s.rows, s.cols), &s.codes, &s.scales));
    let all = Experts {
        w1,
        w2,
        w3,
        shared: [fp8(&mut memory, &shared.w1)?, fp8(&mut memory, &shared.w2)?, fp8(&mut memory, &shared.w3)?],
        count,
        dim,
        inner,
        per_row,
        limit: if limit > 0.0 { limit } else { f32::INFINITY },
    };
    let at = words(memory.put(&x))?;
    let routing = (words(memory.put(&picks))?, words(memory.put(&weights))?);
    let y = words(memory.room(2 * m * dim))?;
    let products = words(Products::new(&gpu.device, gpu.kernels.clone(), Tuning::default()))?;
    let (stream, rows) = (gpu.device.stream(), (Rows { at, stride: dim }, m));
    if tiled {
        let many = words(ManyScratch::new(&gpu.device, (dim, inner), (count, per_row), m))?;
        let codes = ManyScratch::codes((dim, inner), per_row, m);
        // With no room for shared tiles, with room for some rows of a matrix, for all of them.
        for room in [0, 256 * per_row, 8 * dim] {
            let tiles = words(TileScratch::new(&gpu.device, codes, (m, room)))?;
            // SAFETY: every buffer is as long as the shapes say and lives until the device was waited for.
            words(unsafe { products.experts_tiled(stream, rows, &all, routing, (&many, &tiles, y)) })?;
            words(gpu.device.synchronize())?;
            check(&memory, case, (routed, shared), (m, y), (&x, &picks, &weights))?;
        }
        return Ok(());
    }
    let scratch = words(Scratch::with_sizes(&gpu.device, (dim, inner, per_row), m))?;
    // SAFETY: as above.
    words(unsafe { products.experts(stream, rows, &all, routing, (&scratch, y)) })?;
    check(&memory, case, (routed, shared), (m, y), (&x, &picks, &weights))
}

/// All rows at `y` against the CPU's.
fn check(
    memory: &Memory<'_>,
    case: Case,
    (routed, shared): (&[Expert], &Expert),
    (m, y): (usize, DevicePtr),
    (x, picks, weights): (&[bf16], &[i32], &[f32]),
) -> Outcome {
    let Case { dim, per_row, limit, .. } = case;
    let isa = Isa::detect();
    for row in 0..m {
        let x = &x[row * dim..(row + 1) * dim];
        let mut sum = vec![0.0; dim];
        for j in row * per_row..(row + 1) * per_row {
            add_to(isa, &mut sum, &routed[picks[j] as usize].row(x, limit, weights[j]));
        }
        add_to(isa, &mut sum, &shared.row(x, limit, 1.0));
        let mut expected = vec![bf16::ZERO; dim];
        narrow(isa, &sum, &mut expected);
        let got: Vec<bf16> = words(memory.get(y.plus(2 * row * dim), dim))?;
        same_bf16(&format!("row {row}"), &got, &expected)?;
        if got.iter().all(|v| *v == bf16::ZERO) {
            return Err("all outputs are zero".to_owned());
        }
    }
    Ok(())
}

/// A matrix of all experts, one behind the other.
fn stack(memory: &mut Memory<'_>, routed: &[Expert], pick: fn(&Expert) -> &Stored) -> Result<Stack, String> {
    let first = pick(&routed[0]);
    let codes: Vec<u8> = routed.iter().flat_map(|e| pick(e).codes.clone()).collect();
    let scales: Vec<u8> = routed.iter().flat_map(|e| pick(e).scales.clone()).collect();
    let w = words(memory.matrix(Format::Fp4, (routed.len() * first.rows, first.cols), &codes, &scales))?;
    let none = w.weight == DevicePtr::NULL;
    if none { Err("no weights".to_owned()) } else { Ok(Stack { weight: w.weight, scale: w.scale }) }
}
