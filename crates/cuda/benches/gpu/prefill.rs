//! Prefill: tiles of every format at the real model's shapes, the experts of many rows, and a block's
//! tokens per second with what each step of a layer takes.

use std::error::Error;
use std::time::Instant;

use half::bf16;
use ringfence_cuda::driver::DevicePtr;
use ringfence_cuda::experts::Scratch;
use ringfence_cuda::experts_tile::ManyScratch;
use ringfence_cuda::linear::{Format, Linear, Out, Products, Rows, Tuning};
use ringfence_cuda::ops::Row;
use ringfence_cuda::repack::{Random, fill_random};
use ringfence_cuda::tile::TileScratch;
use ringfence_cuda::{CudaEngine, CudaError, CudaSettings};
use ringfence_engine::engine::{Chunk, Engine, Output, SessionShape};
use ringfence_engine::ids::{Position, SessionId, TokenId, WireEncoding};

use crate::experts::{DIM, INNER, PER_ROW, Routings, Setup as Experts};
use crate::products::Setup;
use crate::support::{Bench, folders};
use crate::synthetic::Synthetic;

/// Products of a layer: name, format, outputs, inputs, and groups with inputs of their own.
const SHAPES: [(&str, Format, usize, usize, usize); 8] = [
    ("4096x4096", Format::Fp8, 4096, 4096, 1),
    ("wq_b", Format::Fp8, 32_768, 1024, 1),
    ("wo_b", Format::Fp8, 4096, 8192, 1),
    ("wq_a + wkv", Format::Fp8, 1536, 4096, 1),
    ("shared w1, w3", Format::Fp8, 4096, 4096, 1),
    ("wo_a", Format::Wide, 8192, 4096, 8),
    ("compress", Format::Bf16, 2624, 4096, 1),
    ("gate", Format::Bf16, 256, 4096, 1),
];

/// The block, and what its layers are.
const BLOCK: (&str, [&str; 2]) = ("40:43", ["ratio 4", "ratio 128"]);
/// Positions of a session.
const POSITIONS: usize = 4096;

/// Measures and prints.
///
/// # Errors
/// The words of what failed.
pub(crate) fn run(bench: &Bench) -> Result<(), Box<dyn Error>> {
    if bench.wants("prefill") {
        println!("products of many rows, canonical order      M       µs  TFLOP/s   (in passes of few rows, µs)");
        for (name, format, rows, cols, groups) in SHAPES {
            for m in [24, 32, 64, 128, 256, 512] {
                let us = product(bench, (format, rows, cols, groups), m, true)?;
                let rate = 2.0 * (m * rows * cols) as f64 / us / 1e6;
                let few = if m <= 64 { product(bench, (format, rows, cols, groups), m, false)? } else { f64::NAN };
                println!("{name:14} {format:?} {rows:6}x{cols:5} {m:5} {us:9.1} {rate:7.1}   ({few:.1})");
            }
        }
        for m in [32, 64, 128, 256, 512] {
            let us = experts(bench, m, true)?;
            let rate = 6.0 * (m * (PER_ROW + 1) * INNER * DIM) as f64 / us / 1e6;
            let few = if m <= 64 { experts(bench, m, false)? } else { f64::NAN };
            println!("experts, 6 of 256 and the shared one    {m:5} {us:9.1} {rate:7.1}   ({few:.1})");
        }
    }
    if bench.wants("long") {
        block()?;
    }
    Ok(())
}

/// Microseconds of one product, by tiles or in passes of few rows.
fn product(
    bench: &Bench,
    (format, rows, cols, groups): (Format, usize, usize, usize),
    m: usize,
    tiles: bool,
) -> Result<f64, CudaError> {
    let setup = Setup::new(bench, format, (rows, cols), m * cols * groups, m * rows)?;
    let products = Products::new(&bench.device, bench.kernels.clone(), Tuning::default())?;
    let scratch = TileScratch::new(&bench.device, m * cols, (m, rows))?;
    let weights = &setup.weights[..setup.weights.len().min(6)];
    let (size, stream) = (rows / groups, bench.device.stream());
    let us = bench.time(|| {
        for w in weights {
            let out = Out { at: setup.out, stride: rows, wide: false };
            let x = (Rows { at: setup.x, stride: cols * groups }, m);
            let part = |g: usize| (w.part(g * size, size), Out { at: out.at.plus(2 * g * size), ..out });
            let list: Vec<(Linear, Out)> = (0..groups).map(part).collect();
            let step = (groups > 1).then_some(cols);
            match (tiles, groups) {
                // SAFETY: the buffers are as long as the shapes say and outlive the stream's work.
                (true, _) => unsafe { products.tiled(stream, x, (&list, step), &scratch) },
                // SAFETY: as above.
                (false, 1) => unsafe { products.linear(stream, x, w, out) },
                // SAFETY: as above.
                (false, _) => unsafe { products.grouped(stream, x, (w, groups), out) },
            }?;
        }
        Ok(())
    })?;
    Ok(us / weights.len() as f64)
}

/// Microseconds of a layer's experts, by tiles or by slices.
fn experts(bench: &Bench, m: usize, tiles: bool) -> Result<f64, CudaError> {
    let setup = Experts::new(bench)?;
    let products = Products::new(&bench.device, bench.kernels.clone(), Tuning::default())?;
    let mut arena = bench.device.arena("rows", 4 * m * DIM + 16 * m * PER_ROW * 8 + (1 << 20))?;
    let (x, y) = (arena.take("x", 2 * m * DIM)?, arena.take("y", 2 * m * DIM)?);
    // SAFETY: the piece is as long.
    unsafe { fill_random((&*bench.kernels, bench.device.stream()), Random::Bf16, 9, x, 2 * m * DIM) }?;
    let routings = Routings::new(bench, &mut arena, m, 2)?;
    let few = if tiles { None } else { Some(Scratch::with_sizes(&bench.device, (DIM, INNER, PER_ROW), m)?) };
    let many = ManyScratch::new(&bench.device, (DIM, INNER), (setup.experts.count, PER_ROW), m)?;
    let scratch = TileScratch::new(&bench.device, ManyScratch::codes((DIM, INNER), PER_ROW, m), (m, 8 * DIM))?;
    let (stream, rows) = (bench.device.stream(), (Rows { at: x, stride: DIM }, m));
    let us = bench.time(|| {
        for &picks in &routings.picks {
            let routing: (DevicePtr, DevicePtr) = (picks, routings.weights);
            match &few {
                // SAFETY: the buffers are as long as the shapes say and outlive the stream's work.
                Some(few) => unsafe { products.experts(stream, rows, &setup.experts, routing, (few, y)) },
                // SAFETY: as above.
                None => unsafe { products.experts_tiled(stream, rows, &setup.experts, routing, (&many, &scratch, y)) },
            }?;
        }
        Ok(())
    })?;
    Ok(us / routings.picks.len() as f64)
}

fn token(pos: usize) -> TokenId {
    TokenId((pos * 104_729 % 129_280) as u32)
}

/// A block's prefill, then the steps of its layers.
fn block() -> Result<(), Box<dyn Error>> {
    let made = Synthetic::write(BLOCK.0)?;
    let settings = CudaSettings {
        max_context: Some(32_768),
        graph_bytes: 0,
        cuda_folders: folders(),
        kernel_cache: Some(std::env::temp_dir().join("ringfence-kernels")),
        ..CudaSettings::default()
    };
    let mut engine = CudaEngine::new(&made.open()?, made.range(), &settings)?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!("{}: a pass works in {:.1} MiB", made.range(), mib(engine.pass_bytes()));
    let width = engine.facts().hc * engine.facts().dim;
    let mut state = 1u64;
    let mut value = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d);
        bf16::from_f32(((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 2.0)
    };
    let hidden: Vec<bf16> = (0..POSITIONS * width).map(|_| value()).collect();
    let mut session = 0;
    for (chunk, positions) in [(512, 512), (512, 512), (512, POSITIONS), (64, 512), (128, 512), (512, POSITIONS)] {
        session += 1;
        let shape = SessionShape {
            positions: 8_192,
            reach: 512,
            boundaries: Vec::new(),
            encoding: WireEncoding::Fp8,
            drafting: false,
        };
        engine.open(SessionId(session), &shape)?;
        let start = Instant::now();
        for pos in (0..positions).step_by(chunk) {
            let ids: Vec<TokenId> = (pos..pos + chunk).map(token).collect();
            let chunk = Chunk {
                session: SessionId(session),
                pos: Position(pos as u32),
                ids: &ids,
                hidden: Some(&hidden[pos * width..(pos + chunk) * width]),
                logits_from: Position(positions as u32 - 1),
            };
            engine.forward(&[chunk], &mut Output::default())?;
        }
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "prefill, {}, {positions} positions in chunks of {chunk}: {:.0} tokens/s, {:.2} µs a position and layer",
            made.range(),
            positions as f64 / seconds,
            1e6 * seconds / (positions * made.range().count()) as f64
        );
    }
    for (place, kind) in BLOCK.1.iter().enumerate() {
        for (from, m) in [(POSITIONS - 512, 512), (0, 512), (POSITIONS - 64, 64)] {
            let rows: Vec<Row> = (from..from + m)
                .map(|pos| Row { slot: session as i32 - 1, pos: pos as i32, id: token(pos).0 as i32, spare: 0 })
                .collect();
            for time in engine.time_many(place, &rows)? {
                println!(
                    "{kind}, {m} rows at {from}: {:30} {:9.1} µs, {:6.2} a row",
                    time.what,
                    time.us,
                    time.us / m as f64
                );
            }
        }
    }
    Ok(())
}
