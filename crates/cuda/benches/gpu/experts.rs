//! The experts of a layer at the real model's sizes.

use ringfence_cuda::CudaError;
use ringfence_cuda::driver::{Arena, DevicePtr};
use ringfence_cuda::experts::{Experts, Scratch, Stack};
use ringfence_cuda::linear::{Format, Linear, Products, Rows, Tuning};
use ringfence_cuda::repack::{Random, fill_random};

use crate::support::Bench;

pub(crate) const DIM: usize = 4096;
pub(crate) const INNER: usize = 2048;
const COUNT: usize = 256;
pub(crate) const PER_ROW: usize = 6;
/// Routings that are gone through, each with other experts.
const ROUTINGS: usize = 12;

pub(crate) fn run(bench: &Bench) -> Result<(), CudaError> {
    if !bench.wants("experts") {
        return Ok(());
    }
    println!("experts (6 of 256 and the shared one)    M  experts     MB      µs   GB/s  % of copy");
    for m in [1, 2, 4, 6, 8, 16, 32] {
        for dependent in [false, true] {
            one(bench, m, Tuning { dependent, ..Tuning::default() })?;
        }
    }
    Ok(())
}

fn one(bench: &Bench, m: usize, tuning: Tuning) -> Result<(), CudaError> {
    let setup = Setup::new(bench)?;
    let products = Products::new(&bench.device, bench.kernels.clone(), tuning)?;
    let scratch = Scratch::with_sizes(&bench.device, (DIM, INNER, PER_ROW), m)?;
    let mut arena = bench.device.arena("rows", 4 * m * DIM + ROUTINGS * m * PER_ROW * 8 + (1 << 20))?;
    let (x, y) = (arena.take("x", 2 * m * DIM)?, arena.take("y", 2 * m * DIM)?);
    // SAFETY: the piece is as long.
    unsafe { fill_random((&*bench.kernels, bench.device.stream()), Random::Bf16, 9, x, 2 * m * DIM) }?;
    let routings = Routings::new(bench, &mut arena, m, ROUTINGS)?;
    let (weights, distinct) = (routings.weights, routings.distinct);
    let us = bench.time(|| {
        for &picks in &routings.picks {
            let rows = (Rows { at: x, stride: DIM }, m);
            // SAFETY: the buffers are as long as the shapes say and outlive the stream's work.
            unsafe { products.experts(bench.device.stream(), rows, &setup.experts, (picks, weights), (&scratch, y)) }?;
        }
        Ok(())
    })?;
    let (us, distinct) = (us / ROUTINGS as f64, distinct as f64 / ROUTINGS as f64);
    let routed = 3.0 * (INNER * DIM / 2 + INNER * DIM / 32) as f64;
    let bytes = distinct * routed + setup.experts.shared.iter().map(|w| w.bytes() as f64).sum::<f64>();
    let rate = bytes / us / 1e3;
    println!(
        "dependent {:5}          {m:10} {distinct:8.1} {:6.1} {us:7.2} {rate:6.0} {:5.0} %",
        tuning.dependent,
        bytes / 1e6,
        100.0 * rate / bench.copy
    );
    Ok(())
}

/// Routings of rows: other experts in each.
pub(crate) struct Routings {
    /// i32 `[m, PER_ROW]` of each.
    pub(crate) picks: Vec<DevicePtr>,
    /// fp32, the same for all.
    pub(crate) weights: DevicePtr,
    /// Different experts of all of them together.
    distinct: usize,
}

impl Routings {
    /// `count` of them for `m` rows.
    pub(crate) fn new(bench: &Bench, arena: &mut Arena, m: usize, count: usize) -> Result<Self, CudaError> {
        let weights = arena.take("weights", 4 * m * PER_ROW)?;
        // SAFETY: the piece is as long, and nothing runs.
        unsafe { bench.device.upload(&vec![0.25f32; m * PER_ROW], weights) }?;
        let (mut all, mut distinct) = (Vec::new(), 0);
        let mut state = 12_345u32;
        for _ in 0..count {
            let mut picks: Vec<i32> = Vec::new();
            for _ in 0..m {
                let mut row: Vec<i32> = Vec::new();
                while row.len() < PER_ROW {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let pick = (state >> 16) as i32 % COUNT as i32;
                    if !row.contains(&pick) {
                        row.push(pick);
                    }
                }
                row.sort_unstable();
                picks.extend(row);
            }
            let at = arena.take("picks", 4 * picks.len())?;
            // SAFETY: the piece is as long, and nothing runs.
            unsafe { bench.device.upload(&picks, at) }?;
            picks.sort_unstable();
            picks.dedup();
            distinct += picks.len();
            all.push(at);
        }
        Ok(Self { picks: all, weights, distinct })
    }
}

/// Random experts.
pub(crate) struct Setup {
    pub(crate) experts: Experts,
    _arena: Arena,
}

impl Setup {
    pub(crate) fn new(bench: &Bench) -> Result<Self, CudaError> {
        let at = (&*bench.kernels, &**bench.device.stream());
        let (codes, scales) = (COUNT * INNER * DIM / 2, COUNT * INNER * DIM / 32);
        let mut arena = bench.device.arena("experts", 3 * (codes + scales + INNER * DIM) + (16 << 20))?;
        let mut fill = |kind, bytes: usize| {
            let place = arena.take("experts", bytes)?;
            // SAFETY: the piece is as long.
            unsafe { fill_random(at, kind, place.0 as u32, place, bytes) }?;
            Ok::<DevicePtr, CudaError>(place)
        };
        let mut stack =
            || Ok::<_, CudaError>(Stack { weight: fill(Random::Bits, codes)?, scale: fill(Random::Scales, scales)? });
        let (w1, w2, w3) = (stack()?, stack()?, stack()?);
        let mut shared = |rows: usize, cols: usize| {
            let (weight, scale) = (fill(Random::E4m3, rows * cols)?, fill(Random::Scales, rows * cols / 16_384)?);
            Ok::<_, CudaError>(Linear { format: Format::Fp8, rows, cols, weight, scale })
        };
        let shared = [shared(INNER, DIM)?, shared(DIM, INNER)?, shared(INNER, DIM)?];
        bench.device.synchronize()?;
        let experts =
            Experts { w1, w2, w3, shared, count: COUNT, dim: DIM, inner: INNER, per_row: PER_ROW, limit: 10.0 };
        Ok(Self { experts, _arena: arena })
    }
}
