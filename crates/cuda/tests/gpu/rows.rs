//! Norms, rotations, streams, routing and the wire against the CPU's.

use half::bf16;
use ringfence_cuda::driver::DevicePtr;
use ringfence_cuda::ops::{self, At, Heads, Keys, MixWeights, Norm, Ops, Preparing, Row, Spread, Streams, Table};
use ringfence_cuda::state::LayerState;
use ringfence_engine::engine::cpu::kernel::Isa;
use ringfence_engine::engine::cpu::kernel::hyper::{self, Split};
use ringfence_engine::engine::cpu::kernel::linear::{F32Matrix, Out, Rows};
use ringfence_engine::engine::cpu::kernel::quant::{KV_GROUP, act_quant_in_place, fp4_act_quant_in_place};
use ringfence_engine::engine::cpu::kernel::rope::{RopeTable, frequencies};
use ringfence_engine::engine::cpu::kernel::select::top_k;
use ringfence_engine::engine::cpu::kernel::vector::{hadamard, head_norm, rms_factor, rms_norm, router_scores, widen};
use ringfence_engine::engine::wire::Wire;
use ringfence_engine::ids::{Position, WireEncoding};

use crate::support::{Gpu, Memory, Outcome, Rng, Test, same_bf16, same_f32, words};

/// All of them.
pub(crate) const TESTS: &[Test] = &[
    ("rms_norm", norms),
    ("store_keys", keys),
    ("queries", queries),
    ("index_queries", index_queries),
    ("streams", streams),
    ("wire", wire),
    ("route", route),
    ("finite", finite),
];

pub(crate) const EPS: f32 = 1e-6;
const ISA: fn() -> Isa = Isa::detect;

/// The kernels on the device's stream.
pub(crate) fn ops(gpu: &Gpu) -> Result<Ops<'_>, String> {
    words(ops::prepare(&gpu.device, &gpu.kernels))?;
    Ok(Ops::new(&gpu.kernels, gpu.device.stream(), true))
}

/// A rotation table on both sides.
pub(crate) fn table(memory: &mut Memory<'_>, rope: usize, positions: usize) -> Result<(RopeTable, Table), String> {
    let host = RopeTable::new(&frequencies(rope, 10_000.0, None), positions);
    let values: Vec<f32> = (0..positions).flat_map(|p| [host.row(p).0, host.row(p).1].concat()).collect();
    let at = words(memory.put(&values))?;
    Ok((host, Table { at, rope }))
}

/// Rows of one session at these positions.
pub(crate) fn rows_at(positions: &[usize]) -> Vec<Row> {
    positions.iter().map(|&pos| Row { slot: 0, pos: pos as i32, id: 0, spare: 0 }).collect()
}

/// fp32 values near one.
pub(crate) fn weights(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| bf16::from_f32(1.0 + 0.3 * rng.unit()).to_f32()).collect()
}

fn norms(gpu: &Gpu) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new(11);
    for (width, m) in [(4096, 3), (1024, 5), (512, 2), (256, 4), (128, 3), (8, 2), (264, 2)] {
        let (x, w) = (rng.activations(m * width), weights(&mut rng, width));
        let mut memory = words(gpu.memory(1 << 20))?;
        let (at, weight, out) = (words(memory.put(&x))?, words(memory.put(&w))?, words(memory.room(2 * m * width))?);
        words(ops.rms_norm((at, width, m), Norm { weight, width, eps: EPS }, out))?;
        let mut expected = vec![bf16::ZERO; m * width];
        rms_norm(ISA(), &x, &w, EPS, &mut expected);
        same_bf16(&format!("width {width}"), &words(memory.get(out, m * width))?, &expected)?;
    }
    Ok(())
}

fn keys(gpu: &Gpu) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new(12);
    for width in [512, 128, 256] {
        let positions = [5, 6, 7, 130, 131];
        let m = positions.len();
        let (x, w) = (rng.activations(m * width), weights(&mut rng, width));
        let mut memory = words(gpu.memory(2 << 20))?;
        let (host, table) = table(&mut memory, 64, 200)?;
        let (at, weight, out) = (words(memory.put(&x))?, words(memory.put(&w))?, words(memory.room(2 * m * width))?);
        let window = words(memory.room(2 * 11 * width))?;
        let state = LayerState { window, window_rows: 11, ..LayerState::default() };
        let states = words(memory.put(&[LayerState::default(), state]))?;
        let rows = words(memory.put(&rows_at(&positions)))?;
        let here = At { rows, states, places: 2, place: 1 };
        let norm = Norm { weight, width, eps: EPS };
        let keys = Keys { x: at, norm, table, at: here, store: true, out };
        words(ops.store_keys(m, &keys))?;
        let mut expected = vec![bf16::ZERO; m * width];
        rms_norm(ISA(), &x, &w, EPS, &mut expected);
        for (row, &pos) in expected.chunks_exact_mut(width).zip(&positions) {
            host.rotate(ISA(), row, width, pos);
            act_quant_in_place(ISA(), &mut row[..width - 64], KV_GROUP);
        }
        same_bf16(&format!("width {width}"), &words(memory.get(out, m * width))?, &expected)?;
        let ring: Vec<bf16> = words(memory.get(window, 11 * width))?;
        for (row, &pos) in expected.chunks_exact(width).zip(&positions) {
            same_bf16(&format!("window at {pos}"), &ring[pos % 11 * width..][..width], row)?;
        }
    }
    Ok(())
}

fn queries(gpu: &Gpu) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new(13);
    for (heads, width) in [(64, 512), (4, 128), (5, 256)] {
        let positions = [0, 17, 199];
        let m = positions.len();
        let mut x = rng.activations(m * heads * width);
        let mut memory = words(gpu.memory(2 << 20))?;
        let (host, table) = table(&mut memory, 64, 200)?;
        let q = words(memory.put(&x))?;
        let rows = words(memory.put(&rows_at(&positions)))?;
        let at = At { rows, states: DevicePtr::NULL, places: 1, place: 0 };
        let queries = Some((q, Heads { heads, width }));
        words(ops.prepare(
            m,
            &Preparing { table, eps: EPS, at, queries, index: None, compressors: None, spread: Spread::none() },
        ))?;
        for (row, &pos) in x.chunks_exact_mut(heads * width).zip(&positions) {
            head_norm(ISA(), row, width, EPS);
            host.rotate(ISA(), row, width, pos);
        }
        same_bf16(&format!("{heads} heads of {width}"), &words(memory.get(q, x.len()))?, &x)?;
    }
    Ok(())
}

fn index_queries(gpu: &Gpu) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new(14);
    for (heads, width) in [(64, 128), (4, 64), (3, 256)] {
        // The first row takes every slot it sees and is left alone.
        let positions = [3, 100, 199];
        let m = positions.len();
        let mut x = rng.activations(m * heads * width);
        let mut memory = words(gpu.memory(1 << 20))?;
        let (host, table) = table(&mut memory, 64, 200)?;
        let q = words(memory.put(&x))?;
        let rows = words(memory.put(&rows_at(&positions)))?;
        let at = At { rows, states: DevicePtr::NULL, places: 1, place: 0 };
        let index = Some((q, Heads { heads, width }, 4, 4));
        words(ops.prepare(
            m,
            &Preparing { table, eps: EPS, at, queries: None, index, compressors: None, spread: Spread::none() },
        ))?;
        for (row, &pos) in x.chunks_exact_mut(heads * width).zip(&positions).skip(1) {
            host.rotate(ISA(), row, width, pos);
            hadamard(ISA(), row, width);
            fp4_act_quant_in_place(ISA(), row);
        }
        same_bf16(&format!("{heads} heads of {width}"), &words(memory.get(q, x.len()))?, &x)?;
    }
    Ok(())
}

fn streams(gpu: &Gpu) -> Outcome {
    let mut rng = Rng::new(15);
    for (hc, dim, m, quiet) in
        [(4, 4096, 3, 1.0), (4, 256, 5, 1.0), (2, 128, 3, 1e-20), (5, 64, 2, 1.0), (1, 128, 2, 1.0)]
    {
        one_stream(gpu, &mut rng, (hc, dim), m, quiet).map_err(|why| format!("{hc} streams of {dim}: {why}"))?;
    }
    Ok(())
}

/// A head: rows picked, only the first mixes, another scale.
fn head(
    ops: &Ops<'_>,
    memory: &mut Memory<'_>,
    (at, h, m): (DevicePtr, &[bf16], usize),
    (w, raw, norm): (MixWeights, DevicePtr, DevicePtr),
    (s, wide, products): (&Streams, &[f32], &[f32]),
    (scale, base): (&[f32], &[f32]),
) -> Outcome {
    let (isa, hc, dim) = (ISA(), s.hc, s.dim);
    let (width, mixes) = (hc * dim, (2 + hc) * hc);
    let (entered, x) = (words(memory.room(4 * dim))?, words(memory.room(4 * dim))?);
    let picks = words(memory.put(&[(m - 1) as i32, 0]))?;
    let head = MixWeights { scale: w.scale.plus(4), ..w };
    words(ops.mix((at, picks, 2), head, hc, s, raw))?;
    words(ops.enter((at, picks, 2), (raw, head, hc), s, norm, (entered, x)))?;
    let got: Vec<bf16> = words(memory.get(entered, 2 * dim))?;
    for (row, got) in [m - 1, 0].into_iter().zip(got.chunks_exact(dim)) {
        let of = row * width..(row + 1) * width;
        let r = rms_factor(isa, &wide[of.clone()], EPS);
        let pre = hyper::head_weights(isa, &products[row * mixes..][..hc], r, scale[1], &base[..hc], EPS);
        let mut expected = vec![bf16::ZERO; dim];
        hyper::collapse(isa, &h[of], &pre[..hc], &mut expected);
        same_bf16("head", got, &expected)?;
    }
    Ok(())
}

fn one_stream(gpu: &Gpu, rng: &mut Rng, (hc, dim): (usize, usize), m: usize, quiet: f32) -> Outcome {
    let ops = ops(gpu)?;
    let (isa, width, mixes) = (ISA(), hc * dim, (2 + hc) * hc);
    let mut h: Vec<bf16> = rng.activations(m * width).iter().map(|v| bf16::from_f32(v.to_f32() * quiet)).collect();
    let function: Vec<f32> = (0..mixes * width).map(|_| rng.normal() * 0.02).collect();
    let scale: Vec<f32> = (0..3).map(|_| rng.normal()).collect();
    let base: Vec<f32> = (0..mixes).map(|_| rng.normal() * 3.0).collect();
    let (norm, y) = (weights(rng, dim), rng.activations(m * dim));
    let s = Streams { hc, dim, iterations: 20, hc_eps: EPS, norm_eps: EPS };

    let mut memory = words(gpu.memory((4 << 20) + 8 * mixes * width))?;
    let at = words(memory.put(&h))?;
    let w = MixWeights {
        mix: words(memory.put(&function))?,
        scale: words(memory.put(&scale))?,
        base: words(memory.put(&base))?,
    };
    let (norm_at, y_at) = (words(memory.put(&norm))?, words(memory.put(&y))?);
    let raw = words(memory.room(4 * m * (mixes + 1)))?;
    let mix = words(memory.room(4 * m * hc * (hc + 1)))?;
    let (x, entered) = (words(memory.room(2 * m * dim))?, words(memory.room(2 * m * dim))?);
    let taps = words(memory.room(2 * m * 3 * dim))?;
    let none = DevicePtr::NULL;
    words(ops.mix((at, none, m), w, mixes, &s, raw))?;
    words(ops.enter((at, none, m), (raw, w, mixes), &s, norm_at, (entered, x)))?;
    // A router says how they are spread.
    let (logits, ids) = (words(memory.put(&vec![0.5f32; m * 8]))?, words(memory.put(&vec![Row::default(); m]))?);
    let (bias, room) = (words(memory.put(&[0.0f32; 8]))?, words(memory.room(8 * m))?);
    let spread = (room, room, Spread::new(raw, w, &s, mix));
    words(ops.route((logits, 8, m), 1, (bias, none), (1.0, ids), spread))?;

    let mut wide = vec![0.0; m * width];
    widen(isa, &h, &mut wide);
    let mut products = vec![0.0; m * mixes];
    let matrix = F32Matrix::pack(mixes, width, &function).map_err(|e| e.to_string())?;
    matrix.product(isa, Rows::new(&wide, m), Out::f32(&mut products, m));
    let split = Split { hc, iterations: 20, eps: EPS, scale: &scale, base: &base };
    let got_raw: Vec<f32> = words(memory.get(raw, m * (mixes + 1)))?;
    let got_mix: Vec<f32> = words(memory.get(mix, m * hc * (hc + 1)))?;
    let mut collapsed = vec![bf16::ZERO; m * dim];
    let mut mixed = Vec::new();
    for row in 0..m {
        let of = row * width..(row + 1) * width;
        same_f32("mixes", &got_raw[row * (mixes + 1)..][..mixes], &products[row * mixes..][..mixes])?;
        let r = rms_factor(isa, &wide[of.clone()], EPS);
        let expected = hyper::split(isa, &products[row * mixes..][..mixes], r, split);
        let got = &got_mix[row * hc * (hc + 1)..][..hc * (hc + 1)];
        same_f32("post", &got[..hc], &expected.post[..hc])?;
        for j in 0..hc {
            same_f32("comb", &got[hc + j * hc..][..hc], &expected.comb[j][..hc])?;
        }
        hyper::collapse(isa, &h[of], &expected.pre[..hc], &mut collapsed[row * dim..(row + 1) * dim]);
        mixed.push(expected);
    }
    same_bf16("collapsed", &words(memory.get(entered, m * dim))?, &collapsed)?;
    let mut normed = vec![bf16::ZERO; m * dim];
    rms_norm(isa, &collapsed, &norm, EPS, &mut normed);
    same_bf16("entered", &words(memory.get(x, m * dim))?, &normed)?;

    head(&ops, &mut memory, (at, &h, m), (w, raw, norm_at), (&s, &wide, &products), (&scale, &base))?;

    words(ops.leave((at, m), y_at, mix, &s, (taps, 3 * dim, dim)))?;
    let means = leave(&mut h, &y, &mixed);
    same_bf16("left", &words(memory.get(at, m * width))?, &h)?;
    let got: Vec<bf16> = words(memory.get(taps, m * 3 * dim))?;
    for (row, mean) in means.chunks_exact(dim).enumerate() {
        same_bf16("tap", &got[row * 3 * dim + dim..][..dim], mean)?;
    }
    Ok(())
}

/// Streams behind a sublayer by the CPU, in place, and their means.
fn leave(h: &mut [bf16], y: &[bf16], mixed: &[hyper::Mix]) -> Vec<bf16> {
    let (dim, width) = (y.len() / mixed.len(), h.len() / mixed.len());
    let mut means = vec![bf16::ZERO; y.len()];
    for (row, streams) in h.chunks_exact_mut(width).enumerate() {
        let of = row * dim..(row + 1) * dim;
        hyper::expand(ISA(), &y[of.clone()], streams, &mixed[row]);
        hyper::mean(ISA(), streams, &mut means[of]);
    }
    means
}

fn wire(gpu: &Gpu) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new(16);
    for (hc, dim) in [(4, 4096), (2, 256), (1, 8)] {
        let m = 4;
        let mut x = rng.activations(m * hc * dim);
        x[3] = bf16::INFINITY;
        x[dim * hc + 1] = bf16::MAX;
        let mut memory = words(gpu.memory(1 << 20))?;
        let crossing = LayerState { crossing: 1, ..LayerState::default() };
        let states = words(memory.put(&[crossing, LayerState::default()]))?;
        let mut rows = rows_at(&[0, 1, 2, 3]);
        rows[2].slot = 1;
        let rows = words(memory.put(&rows))?;
        let (at, checks) = (words(memory.put(&x))?, words(memory.put(&[0i32; 4]))?);
        let s = Streams { hc, dim, iterations: 1, hc_eps: EPS, norm_eps: EPS };
        words(ops.roundtrip((at, m), &s, At { rows, states, places: 1, place: 0 }, checks))?;
        let got: Vec<bf16> = words(memory.get(at, x.len()))?;
        let wire = Wire::new(WireEncoding::Fp8, hc, dim);
        for row in [0, 1, 3] {
            let of = row * hc * dim..(row + 1) * hc * dim;
            wire.roundtrip(Position(0), &mut x[of]).map_err(|e| e.to_string())?;
        }
        same_bf16(&format!("{hc} streams of {dim}"), &got, &x)?;
        x[dim * hc * 3] = bf16::NAN;
        let at = words(memory.put(&x))?;
        words(ops.roundtrip((at, m), &s, At { rows, states, places: 1, place: 0 }, checks))?;
        let marks: Vec<i32> = words(memory.get(checks, 4))?;
        if marks != [0, 0, 0, 1] {
            return Err(format!("marks {marks:?}"));
        }
    }
    Ok(())
}

fn route(gpu: &Gpu) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new(17);
    for (experts, k) in [(256, 6), (8, 2), (1024, 32), (33, 1), (6, 6)] {
        let m = 6;
        // Some equal scores.
        let mut logits: Vec<f32> = (0..m * experts)
            .map(|_| match rng.below(8) {
                0 => [0.0, -0.0, 30.0, -90.0, 25.0][rng.below(5)],
                _ => rng.normal() * 8.0,
            })
            .collect();
        let bias: Vec<f32> = (0..experts).map(|_| if rng.below(3) == 0 { 0.0 } else { rng.unit() }).collect();
        let hash: Vec<u16> = (0..m * k).map(|_| rng.below(experts) as u16).collect();
        let mut rows = rows_at(&[0; 6]);
        rows.iter_mut().enumerate().for_each(|(i, row)| row.id = (m - 1 - i) as i32);
        let mut memory = words(gpu.memory(1 << 20))?;
        let (at, rows_at) = (words(memory.put(&logits))?, words(memory.put(&rows))?);
        let (bias_at, hash_at) = (words(memory.put(&bias))?, words(memory.put(&hash))?);
        let (picks, weights) = (words(memory.room(4 * m * k))?, words(memory.room(4 * m * k))?);
        router_scores(ISA(), &mut logits);
        for by_hash in [false, true] {
            let none = DevicePtr::NULL;
            let routing = if by_hash { (none, hash_at) } else { (bias_at, none) };
            words(ops.route((at, experts, m), k, routing, (1.5, rows_at), (picks, weights, Spread::none())))?;
            let (got_picks, got_weights): (Vec<i32>, Vec<f32>) =
                (words(memory.get(picks, m * k))?, words(memory.get(weights, m * k))?);
            for row in 0..m {
                let scores = &logits[row * experts..(row + 1) * experts];
                let biased: Vec<f32> = scores.iter().zip(&bias).map(|(s, b)| s + b).collect();
                let mut expected = Vec::new();
                top_k(&biased, k, &mut expected);
                if by_hash {
                    let id = m - 1 - row;
                    expected = hash[id * k..(id + 1) * k].iter().map(|&e| u32::from(e)).collect();
                }
                expected.sort_unstable();
                let got: Vec<u32> = got_picks[row * k..(row + 1) * k].iter().map(|&e| e as u32).collect();
                if got != expected {
                    return Err(format!("row {row} of {experts} experts: {got:?} for {expected:?}"));
                }
                let sum = expected.iter().fold(0.0f32, |sum, &e| sum + scores[e as usize]);
                let weights: Vec<f32> = expected.iter().map(|&e| scores[e as usize] / sum * 1.5).collect();
                same_f32("weights", &got_weights[row * k..(row + 1) * k], &weights)?;
            }
        }
    }
    Ok(())
}

fn finite(gpu: &Gpu) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new(18);
    let (m, width) = (5, 1000);
    let mut x = rng.activations(m * width);
    let mut floats: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
    (x[width + 1], x[3 * width + 998]) = (bf16::NAN, bf16::NEG_INFINITY);
    (floats[999], floats[4 * width]) = (f32::INFINITY, f32::NAN);
    let mut memory = words(gpu.memory(1 << 20))?;
    let (at, wide, checks) =
        (words(memory.put(&x))?, words(memory.put(&floats))?, words(memory.put(&[0i32, 0, 0, 7, 0]))?);
    words(ops.finite((at, m, width), checks, 9))?;
    let picks = words(memory.put(&[4i32, 3, 2, 1, 0]))?;
    words(ops.finite_floats((wide, m, width), picks, checks, 10))?;
    let got: Vec<i32> = words(memory.get(checks, m))?;
    if got == [10, 9, 0, 7, 10] { Ok(()) } else { Err(format!("marks {got:?}")) }
}
