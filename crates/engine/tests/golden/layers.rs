//! Every layer fed the golden input: outputs, caches and states, picks, taps, head and drafter.

use half::bf16;
use ringfence_engine::engine::cpu::CpuEngine;
use ringfence_engine::engine::cpu::inspect::{self, Pool, Trace};
use ringfence_engine::ids::{Position, TokenId};

use crate::read::{Distance, Golden, SESSION, engine, wide};

const DIM: usize = 256;
const HC: usize = 4;
const LAYERS: u16 = 7;
const WINDOW: usize = 64;
const HEAD_DIM: usize = 128;
const BLOCK: usize = 5;
const RATIOS: [usize; 7] = [0, 0, 4, 16, 4, 16, 4];

/// A phase of the golden protocol: one pass over `ids` at `pos`.
struct Pass {
    tag: String,
    pos: usize,
    ids: Vec<TokenId>,
}

fn passes(golden: &Golden) -> Vec<Pass> {
    let prompt = golden.ids("prompt_ids");
    let greedy = golden.ids("greedy_ids");
    let decode = (0..8).map(|k| Pass { tag: format!("decode{k}"), pos: prompt.len() + k, ids: vec![greedy[k]] });
    let decode: Vec<Pass> = decode.collect();
    [Pass { tag: "prefill".to_owned(), pos: 0, ids: prompt }].into_iter().chain(decode).collect()
}

fn position(pos: usize) -> Position {
    Position(u32::try_from(pos).unwrap())
}

/// Feeds every layer its golden input, in order; calls back with each trace.
fn feed(engine: &mut CpuEngine, golden: &Golden, pass: &Pass, mut each: impl FnMut(u16, &Trace)) {
    for layer in 0..LAYERS {
        let hidden = match layer.checked_sub(1) {
            None => inspect::embed(engine, &pass.ids),
            Some(below) => golden.bf16(&format!("{}.layer{below}.out", pass.tag)),
        };
        let trace = inspect::layer(engine, SESSION, layer, position(pass.pos), &pass.ids, &hidden);
        each(layer, &trace);
    }
}

fn kind(tag: &str) -> &str {
    if tag == "prefill" { "prefill" } else { "decode" }
}

/// Bounds of a sublayer's result: it is added to streams of many times its size.
#[track_caller]
fn sublayer_within(what: &str, distance: &Distance) {
    println!(
        "{what}: {:.2e}, {:.1} % of {} rows within 1e-3, worst {:.2e}",
        distance.total(),
        100.0 * distance.share(1e-3),
        distance.count(),
        distance.worst()
    );
    assert!(distance.total() <= 1e-2, "{what}: relative L2 {}", distance.total());
    assert!(distance.share(1e-3) >= 0.95, "{what}: {} of rows within 1e-3", distance.share(1e-3));
}

/// Bounds of the goldens' README.
#[track_caller]
fn within(what: &str, distance: &Distance) {
    println!(
        "{what}: {:.2e}, {:.1} % of {} rows within 1e-3, worst {:.2e}",
        distance.total(),
        100.0 * distance.share(1e-3),
        distance.count(),
        distance.worst()
    );
    assert!(distance.total() <= 5e-3, "{what}: relative L2 {}", distance.total());
    assert!(distance.share(1e-3) >= 0.95, "{what}: {} of rows within 1e-3", distance.share(1e-3));
    assert!(distance.worst() <= 5e-2, "{what}: worst row {}", distance.worst());
}

#[test]
fn layers_fed_the_golden_input() {
    for name in ["p2-short", "p4-detail"] {
        let golden = Golden::open(name);
        let mut engine = engine(1);
        let mut all = std::collections::BTreeMap::<String, Distance>::new();
        for pass in passes(&golden) {
            feed(&mut engine, &golden, &pass, |layer, trace| {
                for (what, ours, width) in [
                    ("out", &trace.out, HC * DIM),
                    ("attn_out", &trace.attn_out, DIM),
                    ("ffn_out", &trace.ffn_out, DIM),
                ] {
                    let expected = golden.bf16(&format!("{}.layer{layer}.{what}", pass.tag));
                    let mut distance = Distance::default();
                    distance.add(&wide(ours), &wide(&expected), width);
                    assert!(distance.total() <= 5e-2, "{name} {} layer {layer} {what}: {}", pass.tag, distance.total());
                    let group = format!("{name} {} {what}", kind(&pass.tag));
                    all.entry(group).or_default().merge(&distance);
                    let group = format!("{name} {} layer {layer} {what}", kind(&pass.tag));
                    all.entry(group).or_default().merge(&distance);
                }
            });
        }
        for (what, distance) in &all {
            if what.contains("layer") {
                println!("{what}: {:.2e}, worst row {:.2e}", distance.total(), distance.worst());
                assert!(distance.total() <= 5e-3, "{what}: {}", distance.total());
            } else if what.contains("_out") {
                sublayer_within(what, distance);
            } else {
                within(what, distance);
            }
        }
    }
}

#[test]
fn gates_pick_the_golden_experts() {
    for name in ["p2-short", "p4-detail"] {
        let golden = Golden::open(name);
        let mut engine = engine(1);
        let mut worst_weight = 0f32;
        for pass in passes(&golden) {
            feed(&mut engine, &golden, &pass, |layer, trace| {
                let prefix = format!("{}.layer{layer}", pass.tag);
                worst_weight = worst_weight.max(compare_gate(&golden, &prefix, trace));
            });
        }
        println!("{name}: worst gate weight difference {worst_weight:.2e}");
        assert!(worst_weight < 2e-2);
    }
}

/// Compares picks (they may differ only at a near tie); gives the largest difference of weights.
fn compare_gate(golden: &Golden, prefix: &str, trace: &Trace) -> f32 {
    let ids = golden.i32(&format!("{prefix}.gate_indices"));
    let weights = golden.f32(&format!("{prefix}.gate_weights"));
    let experts = trace.gate.len() / (trace.experts.len() / 2);
    let mut worst = 0f32;
    for (row, (ids, weights)) in ids.chunks_exact(2).zip(weights.chunks_exact(2)).enumerate() {
        let mut expected: Vec<(u16, f32)> =
            ids.iter().zip(weights).map(|(&id, &w)| (u16::try_from(id).unwrap(), w)).collect();
        expected.sort_by_key(|(id, _)| *id);
        let ours = &trace.experts[2 * row..2 * row + 2];
        if expected.iter().map(|(id, _)| *id).eq(ours.iter().copied()) {
            for (k, (_, weight)) in expected.iter().enumerate() {
                worst = worst.max((trace.weights[2 * row + k] - weight).abs());
            }
        } else {
            let mut scores = trace.gate[experts * row..experts * (row + 1)].to_vec();
            scores.sort_by(|a, b| b.total_cmp(a));
            assert!(scores[1] - scores[2] < 1e-3, "{prefix} row {row}: {ours:?}, golden {expected:?}, {scores:?}");
        }
    }
    worst
}

#[test]
fn the_indexer_picks_the_golden_slots() {
    for name in ["p2-short", "p4-detail"] {
        let golden = Golden::open(name);
        let mut engine = engine(1);
        let (mut rows, mut chosen, mut differing, mut worst) = (0, 0, 0, 0f32);
        for pass in passes(&golden) {
            for layer in [2, 4, 6] {
                let hidden = golden.bf16(&format!("{}.layer{}.out", pass.tag, layer - 1));
                let tensor = format!("{}.layer{layer}.indexer_topk", pass.tag);
                let (picks, width) = (golden.i32(&tensor), golden.shape(&tensor)[1]);
                let offset = if pass.tag == "prefill" { pass.ids.len() } else { WINDOW };
                for (row, id) in pass.ids.iter().enumerate() {
                    let hidden = &hidden[row * HC * DIM..(row + 1) * HC * DIM];
                    let trace = inspect::layer(&mut engine, SESSION, layer, position(pass.pos + row), &[*id], hidden);
                    let picks = picks[row * width..(row + 1) * width].iter().filter(|&&pick| pick >= 0);
                    let mut expected: Vec<u32> =
                        picks.map(|&pick| u32::try_from(pick).unwrap() - u32::try_from(offset).unwrap()).collect();
                    expected.sort_unstable();
                    rows += 1;
                    chosen += usize::from((pass.pos + row + 1) / 4 > expected.len());
                    if expected != trace.picks[0] {
                        differing += 1;
                        worst = worst.max(pick_gap(&expected, &trace.picks[0], &trace.index_scores));
                    }
                }
            }
        }
        println!("{name}: {differing} of {rows} rows of picks differ ({chosen} had a choice), worst gap {worst}");
        assert!(rows > 0 && (chosen > 0) == (name == "p4-detail"));
        assert!(differing * 20 <= chosen, "{name}: {differing} of {chosen} rows of picks differ");
        assert!(worst <= 0.05, "{name}: a slot was missed by {worst} of its row's largest score");
    }
}

/// How much worse the golden picks score in our own scores, relative to the largest one.
fn pick_gap(golden: &[u32], ours: &[u32], scores: &[f32]) -> f32 {
    assert_eq!(golden.len(), ours.len());
    let sum = |picks: &[u32]| picks.iter().map(|&slot| scores[slot as usize]).sum::<f32>();
    let largest = scores.iter().fold(1e-6f32, |max, score| max.max(score.abs()));
    (sum(ours) - sum(golden)) / largest
}

/// Compares all live rows of caches and states after `n` positions.
fn compare_caches(engine: &CpuEngine, golden: &Golden, tag: &str, n: usize, all: &mut Distance) {
    let window = |ring: &dyn Fn(usize) -> Vec<bf16>, tensor: &str, all: &mut Distance| {
        let expected = golden.bf16(tensor);
        for pos in n.saturating_sub(WINDOW)..n {
            let row = pos % WINDOW * HEAD_DIM;
            all.add(&wide(&ring(pos)), &wide(&expected[row..row + HEAD_DIM]), HEAD_DIM);
        }
    };
    for layer in 0..LAYERS {
        let read = |pos| inspect::window(engine, SESSION, layer, position(pos));
        window(&read, &format!("{tag}.layer{layer}.window_kv"), all);
        let ratio = RATIOS[usize::from(layer)];
        if ratio > 0 {
            let prefix = format!("{tag}.layer{layer}");
            compare_pool(engine, golden, (layer, Pool::Attention), (&prefix, "compressed_kv", "comp"), n, all);
        }
        if ratio == 4 {
            let prefix = format!("{tag}.layer{layer}");
            compare_pool(engine, golden, (layer, Pool::Indexer), (&prefix, "indexer_kv", "indexer"), n, all);
        }
    }
    for stage in 0..3 {
        let read = |pos| inspect::draft_window(engine, SESSION, stage, position(pos));
        window(&read, &format!("{tag}.mtp{stage}.window_kv"), all);
    }
}

fn compare_pool(
    engine: &CpuEngine,
    golden: &Golden,
    (layer, pool): (u16, Pool),
    (prefix, slots, state): (&str, &str, &str),
    n: usize,
    all: &mut Distance,
) {
    let ratio = RATIOS[usize::from(layer)];
    let expected = golden.bf16(&format!("{prefix}.{slots}"));
    for (j, row) in expected.chunks_exact(HEAD_DIM).enumerate().take(n / ratio) {
        all.add(&wide(&inspect::slot(engine, SESSION, layer, pool, j)), &wide(row), HEAD_DIM);
    }
    let kv = golden.f32(&format!("{prefix}.{state}_kv_state"));
    let score = golden.f32(&format!("{prefix}.{state}_score_state"));
    let width = if ratio == 4 { 2 * HEAD_DIM } else { HEAD_DIM };
    let block = n - n % ratio;
    let mut live: Vec<(usize, usize)> = Vec::new();
    if ratio == 4 {
        if block >= 4 {
            live.extend((0..4).map(|row| (row, block - 4 + row)));
        }
        live.extend((0..n % 4).map(|row| (4 + row, block + row)));
    } else {
        live.extend((0..n % ratio).map(|row| (row, block + row)));
    }
    for (row, pos) in live {
        let (our_kv, our_score) = inspect::raw(engine, SESSION, layer, pool, position(pos));
        all.add(&our_kv, &kv[row * width..(row + 1) * width], width);
        all.add(&our_score, &score[row * width..(row + 1) * width], width);
    }
}

#[test]
fn caches_and_states_after_the_golden_input() {
    for name in ["p2-short", "p4-detail"] {
        let golden = Golden::open(name);
        let mut engine = engine(1);
        let prompt = golden.ids("prompt_ids").len();
        for pass in passes(&golden) {
            feed(&mut engine, &golden, &pass, |_, _| {});
            let taps = golden.bf16(&format!("{}.main_hidden", pass.tag));
            let main_x = inspect::draft_windows(&mut engine, SESSION, position(pass.pos), &taps);
            let tensor = match pass.tag.strip_prefix("decode") {
                None => "prefill.main_x".to_owned(),
                Some(k) => format!("draft{k}.main_x"),
            };
            let mut distance = Distance::default();
            distance.add(&wide(&main_x), &wide(&golden.bf16(&tensor)), DIM);
            assert!(distance.total() <= 5e-3, "{name} {tensor}: {}", distance.total());
            let after = match pass.tag.as_str() {
                "prefill" => Some(("after_prefill", prompt)),
                "decode7" => Some(("after_decode7", prompt + 8)),
                _ => None,
            };
            if let Some((tag, n)) = after {
                let mut all = Distance::default();
                compare_caches(&engine, &golden, tag, n, &mut all);
                within(&format!("{name} {tag}"), &all);
            }
        }
    }
}

#[test]
fn taps_head_and_logits() {
    for name in ["p2-short", "p4-detail"] {
        let golden = Golden::open(name);
        let mut engine = engine(1);
        let mut all = std::collections::BTreeMap::<&str, Distance>::new();
        for pass in passes(&golden) {
            let tag = &pass.tag;
            let mut taps = vec![bf16::ZERO; pass.ids.len() * 3 * DIM];
            for (k, layer) in [4, 5, 6].into_iter().enumerate() {
                let tap = inspect::tap(&mut engine, &golden.bf16(&format!("{tag}.layer{layer}.out")));
                for (row, tap) in tap.chunks_exact(DIM).enumerate() {
                    taps[(3 * row + k) * DIM..][..DIM].copy_from_slice(tap);
                }
            }
            all.entry("taps").or_default().add(
                &wide(&taps),
                &wide(&golden.bf16(&format!("{tag}.main_hidden"))),
                3 * DIM,
            );
            let y = inspect::hc_head(&mut engine, &golden.bf16(&format!("{tag}.layer6.out")));
            let expected = golden.bf16(&format!("{tag}.hc_head"));
            all.entry("hc_head").or_default().add(&wide(&y), &wide(&expected), DIM);
            let (norm, logits) = inspect::logits(&mut engine, &expected);
            all.entry("norm").or_default().add(&wide(&norm), &wide(&golden.bf16(&format!("{tag}.final_norm"))), DIM);
            let vocab = logits.len() / pass.ids.len();
            let expected = match tag.strip_prefix("decode") {
                None => golden.f32("prefill.last_logits"),
                Some(k) => golden.f32("decode.logits_first8")[k.parse::<usize>().unwrap() * vocab..][..vocab].to_vec(),
            };
            all.entry("logits").or_default().add(&logits[logits.len() - vocab..], &expected, vocab);
        }
        for (what, distance) in &all {
            within(&format!("{name} {what}"), distance);
        }
    }
}

#[test]
fn draft_blocks_fed_the_golden_taps_and_windows() {
    for name in ["p2-short", "p4-detail"] {
        let golden = Golden::open(name);
        let mut engine = engine(1);
        let greedy = golden.ids("greedy_ids");
        let mut all = std::collections::BTreeMap::<&str, Distance>::new();
        let (mut equal, mut confidence_off) = (0, 0f32);
        for pass in passes(&golden) {
            let taps = golden.bf16(&format!("{}.main_hidden", pass.tag));
            inspect::draft_windows(&mut engine, SESSION, position(pass.pos), &taps);
            let Some(k) = pass.tag.strip_prefix("decode").map(|k| k.parse::<usize>().unwrap()) else { continue };
            let anchor = greedy[k + 1];
            let at = position(pass.pos);
            let mut hidden = inspect::block_input(&mut engine, anchor);
            for stage in 0..3 {
                let trace = inspect::draft_stage(&mut engine, SESSION, stage, at, &hidden);
                let prefix = format!("draft{k}.mtp{stage}");
                for (what, ours, width) in [
                    ("out", &trace.out, HC * DIM),
                    ("attn_out", &trace.attn_out, DIM),
                    ("ffn_out", &trace.ffn_out, DIM),
                ] {
                    let expected = golden.bf16(&format!("{prefix}.{what}"));
                    all.entry(what).or_default().add(&wide(ours), &wide(&expected), width);
                }
                compare_gate(&golden, &prefix, &trace);
                hidden = golden.bf16(&format!("{prefix}.out"));
            }
            let (y, logits, drafts) = inspect::draft_head(&mut engine, &hidden, anchor);
            all.entry("hc_head").or_default().add(&wide(&y), &wide(&golden.bf16(&format!("draft{k}.hc_head"))), DIM);
            let vocab = logits.len() / BLOCK;
            let expected = &golden.f32("draft.logits_first8")[k * BLOCK * vocab..(k + 1) * BLOCK * vocab];
            let ids = &golden.i32("draft.output_ids")[6 * k + 1..6 * k + 6];
            let same = drafts.tokens.iter().zip(ids).take_while(|(a, b)| i64::from(a.0) == i64::from(**b)).count();
            equal += same;
            // A slot's bias depends on the token before it: compare as far as those agree.
            let rows = (same + 1).min(BLOCK) * vocab;
            all.entry("logits").or_default().add(&logits[..rows], &expected[..rows], vocab);
            let golden_confidence = &golden.f32("draft.confidence")[BLOCK * k..BLOCK * (k + 1)];
            for (ours, golden) in drafts.confidence.iter().zip(golden_confidence).take((same + 1).min(BLOCK)) {
                confidence_off = confidence_off.max((ours - golden).abs());
            }
        }
        for (what, distance) in &all {
            // A block has few rows: one scale that falls on the other side of a power of two shows.
            let check = if what.contains("out") { sublayer_within } else { within };
            check(&format!("{name} draft {what}"), distance);
            assert!(distance.worst() <= 0.1, "{name} draft {what}: worst row {}", distance.worst());
        }
        println!("{name}: {equal} of 40 draft tokens equal, confidence off by {confidence_off:.2e}");
        assert!(equal >= 36, "{name}: {equal} of 40 draft tokens equal");
        assert!(confidence_off <= 2e-2);
    }
}
