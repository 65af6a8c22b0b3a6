//! Compressors, the indexer and attention against the CPU's.

use half::bf16;
use ringfence_cuda::driver::DevicePtr;
use ringfence_cuda::ops::{At, Heads, KeyList, MARKOV_BLOCKS, MarkovStep, Preparing, Row, Side, Spread, Table};
use ringfence_cuda::state::{LayerState, PooledState};
use ringfence_engine::engine::cpu::kernel::Isa;
use ringfence_engine::engine::cpu::kernel::attend::{AttendScratch, Keys, Query, Slots, attend};
use ringfence_engine::engine::cpu::kernel::compress::{Part, RingRows, compress};
use ringfence_engine::engine::cpu::kernel::indexer::{scale_weights, scores};
use ringfence_engine::engine::cpu::kernel::linear::{Bf16Matrix, Out, Rows};
use ringfence_engine::engine::cpu::kernel::quant::{KV_GROUP, act_quant_in_place, fp4_act_quant_in_place};
use ringfence_engine::engine::cpu::kernel::rope::RopeTable;
use ringfence_engine::engine::cpu::kernel::select::{argmax, top_k};
use ringfence_engine::engine::cpu::kernel::vector::{hadamard, narrow, rms_norm};

use crate::rows::{EPS, ops, rows_at, table, weights};
use crate::support::{Gpu, Memory, Outcome, Rng, Test, same_bf16, same_f32, words};

/// All of them.
pub(crate) const TESTS: &[Test] = &[
    ("compress", compressors),
    ("pick", picks),
    ("attend_window", |gpu| attention(gpu, &[Seen::Window])),
    ("attend_all_slots", |gpu| attention(gpu, &[Seen::All])),
    ("attend_picked", |gpu| attention(gpu, &[Seen::Picked])),
    ("attend_block", |gpu| attention(gpu, &[Seen::Block])),
    ("markov", markov),
];

fn isa() -> Isa {
    Isa::detect()
}

fn floats(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.normal()).collect()
}

/// Raw rows in the pass and in the ring, over the borders of blocks, for both compressors.
fn compressors(gpu: &Gpu) -> Outcome {
    for (ratio, widths) in [(4, [512, 128]), (4, [128, 128]), (128, [512, 128]), (16, [128, 64])] {
        for (first, m) in
            [(0, 9), (3, 1), (ratio - 1, 1), (2 * ratio - 1, 2), (2 * ratio - 3, 7), (3 * ratio + 1, 2 * ratio)]
        {
            compressor(gpu, ratio, widths, (first, m)).map_err(|why| format!("ratio {ratio} at {first}+{m}: {why}"))?;
        }
    }
    Ok(())
}

/// One slot by the CPU.
fn slot(parts: [Part<'_>; 2], (norm, index): (&[f32], bool), host: &RopeTable, first: usize) -> Vec<bf16> {
    let width = norm.len();
    let (mut pooled, mut slot, mut out) = (vec![0.0; width], vec![bf16::ZERO; width], vec![bf16::ZERO; width]);
    compress(isa(), parts, &mut pooled);
    narrow(isa(), &pooled, &mut slot);
    rms_norm(isa(), &slot, norm, EPS, &mut out);
    host.rotate(isa(), &mut out, width, first);
    if index {
        hadamard(isa(), &mut out, width);
        fp4_act_quant_in_place(isa(), &mut out);
    } else {
        act_quant_in_place(isa(), &mut out[..width - 64], KV_GROUP);
    }
    out
}

fn compressor(gpu: &Gpu, ratio: usize, widths: [usize; 2], (first, m): (usize, usize)) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new((ratio * 1000 + first) as u64);
    let overlap = ratio == 4;
    let ring = 2 * ratio + m;
    let mut memory = words(gpu.memory(64 << 20))?;
    let (host, table) = table(&mut memory, 64, first + m + 1)?;
    let (mut sides, mut pools, mut expected) = ([Side::default(); 2], [PooledState::default(); 2], Vec::new());
    for (i, width) in widths.into_iter().enumerate() {
        let raw = if overlap { 2 * width } else { width };
        // Everything up to the last position; what lies before the pass is in the ring.
        let all = (floats(&mut rng, (first + m) * raw), floats(&mut rng, (first + m) * raw));
        let (ape, norm) = (floats(&mut rng, ratio * raw), weights(&mut rng, width));
        let scored: Vec<f32> = all
            .1
            .chunks_exact(raw)
            .enumerate()
            .flat_map(|(pos, row)| row.iter().zip(&ape[pos % ratio * raw..]).map(|(s, a)| s + a).collect::<Vec<_>>())
            .collect();
        let mut rings = (vec![f32::NAN; ring * raw], vec![f32::NAN; ring * raw]);
        for pos in first.saturating_sub(ring - m)..first {
            rings.0[pos % ring * raw..][..raw].copy_from_slice(&all.0[pos * raw..][..raw]);
            rings.1[pos % ring * raw..][..raw].copy_from_slice(&scored[pos * raw..][..raw]);
        }
        let slots = (first + m) / ratio;
        pools[i] = PooledState {
            kv: words(memory.put(&rings.0))?,
            score: words(memory.put(&rings.1))?,
            slots: words(memory.room(2 * slots.max(1) * width))?,
        };
        sides[i] = Side {
            kv: words(memory.put(&all.0[first * raw..]))?,
            score: words(memory.put(&all.1[first * raw..]))?,
            stride: raw as i32,
            width: width as i32,
            ape: words(memory.put(&ape))?,
            norm: words(memory.put(&norm))?,
        };
        for j in first / ratio..slots {
            let part = |column, at| Part {
                kv: RingRows::new(&all.0, raw, column, at, ratio),
                score: RingRows::new(&scored, raw, column, at, ratio),
            };
            let none = Part { kv: RingRows::none(), score: RingRows::none() };
            let parts = match (overlap, j) {
                (false, _) => [none, part(0, j * ratio)],
                (true, 0) => [none, part(width, 0)],
                (true, _) => [part(0, (j - 1) * ratio), part(width, j * ratio)],
            };
            let out = slot(parts, (&norm, i == 1), &host, j * ratio);
            expected.push((i, j, out));
        }
    }
    let state = LayerState { attention: pools[0], index: pools[1], raw_rows: ring as i32, ..LayerState::default() };
    let states = words(memory.put(&[state]))?;
    let rows = words(memory.put(&rows_at(&(first..first + m).collect::<Vec<_>>())))?;
    let at = At { rows, states, places: 1, place: 0 };
    let compressors = Some((sides, ratio, overlap));
    words(ops.prepare(
        m,
        &Preparing { table, eps: EPS, at, queries: None, index: None, compressors, spread: Spread::none() },
    ))?;
    for (i, j, out) in expected {
        let width = widths[i];
        let got: Vec<bf16> = words(memory.get(pools[i].slots.plus(2 * j * width), width))?;
        same_bf16(&format!("compressor {i}, slot {j}"), &got, &out)?;
    }
    Ok(())
}

/// Scores with many ties, few and many slots.
fn picks(gpu: &Gpu) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new(21);
    for (heads, width, topk, positions) in [
        (64, 128, 512, vec![2047, 2053, 4099, 9000, 100]),
        (4, 128, 16, vec![66, 67, 68, 300, 40]),
        (3, 64, 5, vec![30, 23]),
        (2, 256, 7, vec![99]),
    ] {
        let m = positions.len();
        let slots = (positions.iter().max().map_or(0, |p| p + 1)) / 4;
        let q: Vec<bf16> = rng.activations(m * heads * width);
        let mut w: Vec<bf16> = (0..m * heads).map(|_| bf16::from_f32(rng.normal())).collect();
        let mut k: Vec<bf16> =
            (0..slots * width).map(|_| bf16::from_f32([0.0, -0.5, 1.0, 1.5, -2.0][rng.below(5)])).collect();
        // Equal slots.
        for j in 1..slots {
            if rng.below(4) == 0 {
                k.copy_within((j - 1) * width..j * width, j * width);
            }
        }
        let mut memory = words(gpu.memory(64 << 20))?;
        let index = PooledState { slots: words(memory.put(&k))?, ..PooledState::default() };
        let states = words(memory.put(&[LayerState { index, ..LayerState::default() }]))?;
        let rows = words(memory.put(&rows_at(&positions)))?;
        let (q_at, w_at) = (words(memory.put(&q))?, words(memory.put(&w))?);
        let (keys, picks) = (words(memory.room(2 * m * slots))?, words(memory.room(4 * m * topk))?);
        let at = At { rows, states, places: 1, place: 0 };
        words(ops.pick((q_at, w_at, m), Heads { heads, width }, (topk, 4, slots), at, (keys, picks)))?;
        let got: Vec<i32> = words(memory.get(picks, m * topk))?;
        let factor = (1.0 / (width as f64).sqrt() * (1.0 / (heads as f64).sqrt())) as f32;
        scale_weights(&mut w, factor);
        for (row, pos) in positions.iter().enumerate() {
            let visible = (pos + 1) / 4;
            if visible <= topk {
                continue;
            }
            let mut out = vec![0.0; visible];
            let of = row * heads * width..(row + 1) * heads * width;
            scores(isa(), &q[of], &w[row * heads..(row + 1) * heads], &k[..visible * width], &mut out);
            let mut best = Vec::new();
            top_k(&out, topk, &mut best);
            best.sort_unstable();
            let got: Vec<u32> = got[row * topk..(row + 1) * topk].iter().map(|&j| j as u32).collect();
            if got != best {
                let at = got.iter().zip(&best).position(|(a, b)| a != b).unwrap_or(0);
                return Err(format!("{visible} slots: pick {at} is {} for {}", got[at], best[at]));
            }
        }
    }
    Ok(())
}

/// What rows see beside their window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    Window,
    All,
    Picked,
    Block,
}

fn attention(gpu: &Gpu, kinds: &[Seen]) -> Outcome {
    for &seen in kinds {
        for (heads, width, window) in [(64, 512, 128), (4, 128, 64), (5, 256, 96)] {
            let positions: &[usize] = match seen {
                Seen::Block => &[90, 91, 92, 93, 94],
                _ if heads == 64 => &[0, 126, 127, 700],
                Seen::Window | Seen::All | Seen::Picked => &[0, 3, 15, 63, 64, 65, 95, 96, 127, 300, 511],
            };
            one_attention(gpu, (heads, width, window), seen, positions)
                .map_err(|why| format!("{heads} heads of {width}, {seen:?}: {why}"))?;
        }
        // Few keys, and more than a block of threads holds at a time.
        one_attention(gpu, (4, 128, 64), seen, &[1, 2, 3])?;
        if seen == Seen::All {
            one_attention(gpu, (4, 128, 64), seen, &[2_303, 2_307, 2_560, 5_200, 5_210])?;
        }
    }
    Ok(())
}

/// Slots that each row picks.
const TOPK: usize = 24;

/// Some slots of each row, ascending.
fn picked_slots(rng: &mut Rng, positions: &[usize]) -> Vec<Vec<u32>> {
    let pick = |pos: &usize| {
        let mut picks: Vec<u32> = (0..((pos + 1) / 4) as u32).collect();
        while picks.len() > TOPK {
            picks.remove(rng.below(picks.len()));
        }
        picks
    };
    positions.iter().map(pick).collect()
}

/// A session for each end of a window, which holds the positions in front of it.
fn windows(
    memory: &mut Memory<'_>,
    (all, width): (&[bf16], usize),
    window: usize,
    slots: DevicePtr,
    ends: &[usize],
) -> Result<DevicePtr, String> {
    let ring = window + 37;
    let mut entries = Vec::new();
    for &end in ends {
        let mut kept = vec![bf16::NAN; ring * width];
        for pos in end.saturating_sub(window)..end {
            kept[pos % ring * width..][..width].copy_from_slice(&all[pos * width..][..width]);
        }
        let attention = PooledState { slots, ..PooledState::default() };
        let window = words(memory.put(&kept))?;
        entries.push(LayerState { window, window_rows: ring as i32, attention, ..LayerState::default() });
    }
    words(memory.put(&entries))
}

/// What the device attended to against the CPU's, row by row.
fn same_rows(what: &str, memory: &Memory<'_>, (out, expected): (DevicePtr, &[bf16]), positions: &[usize]) -> Outcome {
    let got: Vec<bf16> = words(memory.get(out, expected.len()))?;
    let each = expected.len() / positions.len();
    for (at, pos) in positions.iter().enumerate() {
        let of = at * each..(at + 1) * each;
        same_bf16(&format!("{what}, position {pos}"), &got[of.clone()], &expected[of])?;
    }
    Ok(())
}

fn one_attention(gpu: &Gpu, (heads, width, window): (usize, usize, usize), seen: Seen, positions: &[usize]) -> Outcome {
    let mut rng = Rng::new((heads * width) as u64 + seen as u64);
    let (m, last) = (positions.len(), positions[positions.len() - 1]);
    let ratio = if seen == Seen::Window || seen == Seen::Block { 0 } else { 4 };
    let all = rng.activations((last + 1) * width);
    let compressed = rng.activations((last + 1) / 4 * width + width);
    let (q, block) = (rng.activations(m * heads * width), rng.activations(m * width));
    let sink = floats(&mut rng, heads);
    let picks = picked_slots(&mut rng, positions);
    let flat: Vec<i32> = picks.iter().flat_map(|row| (0..TOPK).map(|i| row.get(i).map_or(-1, |&j| j as i32))).collect();

    let mut memory = words(gpu.memory(64 << 20))?;
    let (host, table) = table(&mut memory, 64, last + 1)?;
    let sees_to = |pos: usize| if seen == Seen::Block { positions[0] - 1 } else { pos };
    let mut expected = vec![bf16::ZERO; q.len()];
    let list = (window + (last + 1) / 4 + m).next_multiple_of(64);
    let (q_at, sink_at) = (words(memory.put(&q))?, words(memory.put(&sink))?);
    let slots_at = words(memory.put(&compressed))?;
    let out = words(memory.room(2 * q.len()))?;
    let scores = words(memory.room(4 * m * heads * list))?;
    let block_at = words(memory.put(&block))?;
    // Each row has a session of its own, so that windows end where it is.
    let ends: Vec<usize> = positions.iter().map(|&pos| sees_to(pos) + 1).collect();
    let states = windows(&mut memory, (&all, width), window, slots_at, &ends)?;
    let mut rows = rows_at(positions);
    rows.iter_mut().enumerate().for_each(|(at, row)| row.slot = at as i32);
    let rows_at = words(memory.put(&rows))?;
    let picks_at = words(memory.put(&flat))?;
    let keys = KeyList {
        at: At { rows: rows_at, states, places: 1, place: 0 },
        window: window as i32,
        ratio: ratio as i32,
        picks: if seen == Seen::Picked { picks_at } else { DevicePtr::NULL },
        topk: TOPK as i32,
        block: if seen == Seen::Block { block_at } else { DevicePtr::NULL },
        block_rows: if seen == Seen::Block { m as i32 } else { 0 },
    };
    let scale = (1.0 / (width as f64).sqrt()) as f32;
    let mut scratch = AttendScratch::new();
    for (at, &pos) in positions.iter().enumerate() {
        let end = sees_to(pos) + 1;
        let count = window.min(end);
        let visible = (pos + 1).checked_div(ratio).unwrap_or(0);
        let keys = Keys {
            window: RingRows::new(&all, width, 0, end - count, count),
            window_size: window,
            compressed: &compressed,
            slots: if seen == Seen::Picked { Slots::These(&picks[at]) } else { Slots::All(visible) },
            block: if seen == Seen::Block { &block } else { &[] },
        };
        let of = at * heads * width..(at + 1) * heads * width;
        let query = Query { q: &q[of.clone()], sink: &sink, scale };
        attend(isa(), query, &keys, &mut scratch, &mut expected[of.clone()]);
        host.rotate_back(isa(), &mut expected[of], width, pos);
    }
    for many in [false, true] {
        let places = (scores, out, q.len());
        attended((gpu, many), (q_at, m), Heads { heads, width }, (keys, list), (sink_at, table), places)?;
        same_rows(if many { "many rows" } else { "few rows" }, &memory, (out, &expected), positions)?;
    }
    Ok(())
}

/// Attends on the device as few rows or as those of a long wave do, over what was there before.
fn attended(
    (gpu, many): (&Gpu, bool),
    rows: (DevicePtr, usize),
    heads: Heads,
    keys: (KeyList, usize),
    (sink, table): (DevicePtr, Table),
    (scores, out, values): (DevicePtr, DevicePtr, usize),
) -> Outcome {
    let ops = ops(gpu)?;
    // SAFETY: the buffer is that long.
    words(unsafe { gpu.device.fill(out, 0xcd, 2 * values) })?;
    let places = (scores, out);
    words(if many {
        ops.attend_many(rows, heads, keys, (sink, table, Spread::none()), places)
    } else {
        ops.attend(rows, heads, keys, (sink, table), places)
    })
}

fn markov(gpu: &Gpu) -> Outcome {
    let ops = ops(gpu)?;
    let mut rng = Rng::new(31);
    for (vocab, rank, dim, block) in [(2048, 64, 256, 5), (20_000, 256, 4096, 3), (77, 8, 64, 4)] {
        let bf = |rng: &mut Rng, n: usize| -> Vec<bf16> { (0..n).map(|_| bf16::from_f32(rng.normal())).collect() };
        let (markov_in, markov_out) = (bf(&mut rng, vocab * rank), bf(&mut rng, vocab * rank));
        let (confidence, y) = (bf(&mut rng, dim + rank), bf(&mut rng, block * dim));
        let mut logits = floats(&mut rng, block * vocab);
        let anchor = Row { id: (vocab / 2) as i32, ..Row::default() };
        let mut memory = words(gpu.memory(64 << 20))?;
        let step = MarkovStep {
            anchor: words(memory.put(&[anchor]))?,
            tokens: words(memory.room(4 * block))?,
            markov_in: words(memory.put(&markov_in))?,
            markov_out: words(memory.put(&markov_out))?,
            rank,
            vocab,
            logits: words(memory.put(&logits))?,
            y: words(memory.put(&y))?,
            dim,
            confidence_weights: words(memory.put(&confidence))?,
            confidence: words(memory.room(4 * block))?,
            best: words(memory.room(8 * MARKOV_BLOCKS as usize))?,
        };
        for k in 0..block {
            words(ops.markov(&step, k))?;
        }
        let out = Bf16Matrix::pack(vocab, rank, &markov_out).map_err(|e| e.to_string())?;
        let proj = Bf16Matrix::pack(1, dim + rank, &confidence).map_err(|e| e.to_string())?;
        let mut before = vocab / 2;
        let (mut tokens, mut confident) = (Vec::new(), Vec::new());
        for (k, logits) in logits.chunks_exact_mut(vocab).enumerate() {
            let x: Vec<f32> = markov_in[before * rank..(before + 1) * rank].iter().map(|v| v.to_f32()).collect();
            let mut bias = vec![0.0; vocab];
            out.product(isa(), Rows::new(&x, 1), Out::f32(&mut bias, 1));
            logits.iter_mut().zip(&bias).for_each(|(logit, bias)| *logit += bias);
            let input: Vec<f32> = y[k * dim..(k + 1) * dim].iter().map(|v| v.to_f32()).chain(x).collect();
            let mut c = [0.0];
            proj.product(isa(), Rows::new(&input, 1), Out::f32(&mut c, 1));
            confident.push(c[0]);
            before = argmax(logits);
            tokens.push(before as i32);
        }
        same_f32("logits", &words(memory.get(step.logits, logits.len()))?, &logits)?;
        same_f32("confidence", &words(memory.get(step.confidence, block))?, &confident)?;
        let got: Vec<i32> = words(memory.get(step.tokens, block))?;
        if got != tokens {
            return Err(format!("tokens {got:?} for {tokens:?}"));
        }
    }
    Ok(())
}
