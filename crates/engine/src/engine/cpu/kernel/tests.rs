//! Row operations and attention: against the goldens, against loops that spell their order, and the
//! vector lanes against the plain ones.

use half::bf16;

use super::attend::{AttendScratch, Keys, Query, Slots, attend};
use super::compress::{Part, RingRows, compress};
use super::golden::Golden;
use super::linear::{Bf16Matrix, Out, Rows};
use super::{Isa, hyper, indexer, math, select, vector};

fn isas() -> [Isa; 2] {
    [Isa::PORTABLE, Isa::detect()]
}

/// Reproducible numbers.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn f32(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| 3.0 * self.next()).collect()
    }

    fn bf16(&mut self, n: usize) -> Vec<bf16> {
        (0..n).map(|_| bf16::from_f32(2.0 * self.next())).collect()
    }
}

/// The canonical dot of one row, runs of `run`.
fn canonical(run: usize, w: &[f32], x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 32];
    for (i, (w, x)) in w.chunks(run).zip(x.chunks(run)).enumerate() {
        lanes[i % 32] += w.iter().zip(x).fold(0.0, |s, (w, x)| w.mul_add(*x, s));
    }
    for o in [16, 8, 4, 2, 1] {
        let before = lanes;
        (0..32).for_each(|l| lanes[l] = before[l] + before[l ^ o]);
    }
    lanes[0]
}

fn wide(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|v| v.to_f32()).collect()
}

fn bf(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

fn bits(x: &[bf16]) -> Vec<u16> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn close(got: &[f32], golden: &[f32], bound: f32) {
    assert_eq!(got.len(), golden.len());
    for (i, (a, b)) in got.iter().zip(golden).enumerate() {
        assert!((a - b).abs() <= bound * b.abs().max(1.0), "value {i}: {a}, golden {b}");
    }
}

#[test]
fn dots_and_sums_of_squares_have_the_canonical_bits() {
    let mut numbers = Numbers(1);
    for n in [4, 8, 24, 32, 64, 100, 128, 256, 1024, 1028] {
        let (w, x) = (numbers.f32(n), numbers.f32(n));
        for isa in isas() {
            assert_eq!(vector::dot(isa, &w, &x).to_bits(), canonical(4, &w, &x).to_bits(), "{n}");
            assert_eq!(vector::sum_squares(isa, &x).to_bits(), canonical(4, &x, &x).to_bits(), "{n}");
        }
    }
}

#[test]
fn rms_norm_is_the_formula_and_matches_the_golden() {
    let golden = Golden::ops();
    let (x, w) = (golden.bf16("rmsnorm.x"), wide(&golden.bf16("rmsnorm.w")));
    for isa in isas() {
        let mut y = vec![bf16::ZERO; x.len()];
        vector::rms_norm(isa, &x, &w, 1e-6, &mut y);
        for (row, out) in x.chunks(256).zip(y.chunks(256)) {
            let row = wide(row);
            let r = 1.0 / (canonical(4, &row, &row) / 256.0 + 1e-6).sqrt();
            assert_eq!(vector::rms_factor(isa, &row, 1e-6).to_bits(), r.to_bits());
            assert!(out.iter().zip(row.iter().zip(&w)).all(|(o, (x, w))| *o == bf16::from_f32(x * r * w)));
        }
        close(&wide(&y), &wide(&golden.bf16("rmsnorm.y")), 0.01);
    }
}

#[test]
fn head_norm_rounds_every_step_to_bf16() {
    let q = Numbers(2).bf16(3 * 128);
    for isa in isas() {
        let mut y = q.clone();
        vector::head_norm(isa, &mut y, 128, 1e-6);
        for (row, out) in q.chunks(128).zip(y.chunks(128)) {
            let squares: Vec<f32> = row.iter().map(|v| bf(v.to_f32() * v.to_f32())).collect();
            let v = bf(bf(canonical(4, &squares, &[1.0; 128]) / 128.0) + 1e-6);
            let r = bf(1.0 / v.sqrt());
            assert!(out.iter().zip(row).all(|(o, x)| o.to_f32() == bf(x.to_f32() * r)));
        }
    }
}

#[test]
fn hadamard_matches_the_official_bits() {
    let golden = Golden::ops();
    for width in [64, 128] {
        for isa in isas() {
            let mut x = golden.bf16(&format!("hadamard{width}.x"));
            vector::hadamard(isa, &mut x, width);
            assert_eq!(bits(&x), bits(&golden.bf16(&format!("hadamard{width}.y"))));
        }
    }
}

#[test]
fn swiglu_and_router_scores_are_the_formulas() {
    let mut numbers = Numbers(3);
    let (g, u) = (numbers.bf16(64), numbers.bf16(64));
    for isa in isas() {
        for (limit, weight) in [(0.0, 1.0), (1.0, 0.37)] {
            let bound = if limit > 0.0 { limit } else { f32::INFINITY };
            let mut y = vec![bf16::ZERO; 64];
            vector::swiglu(isa, &g, &u, limit, weight, &mut y);
            for ((g, u), y) in g.iter().zip(&u).zip(&y) {
                let t = math::silu(g.to_f32().min(bound)) * u.to_f32().clamp(-bound, bound) * weight;
                assert_eq!(*y, bf16::from_f32(t));
            }
        }
        let x = numbers.f32(11);
        let mut scores = x.clone();
        vector::router_scores(isa, &mut scores);
        assert!(scores.iter().zip(&x).all(|(s, x)| s.to_bits() == math::softplus(*x).sqrt().to_bits()));
    }
}

#[test]
fn widths_that_fill_no_vector_are_converted_too() {
    let x = Numbers(4).f32(21);
    for isa in isas() {
        let (mut half, mut back) = (vec![bf16::ZERO; 21], vec![0.0; 21]);
        vector::narrow(isa, &x, &mut half);
        vector::widen(isa, &half, &mut back);
        assert!(back.iter().zip(&x).all(|(b, x)| *b == bf(*x)));
        vector::add_to(isa, &mut back, &half);
        assert!(back.iter().zip(&half).all(|(b, h)| *b == 2.0 * h.to_f32()));
        let mut exps = x.clone();
        vector::exp_minus(isa, &mut exps, 1.5);
        assert!(exps.iter().zip(&x).all(|(e, x)| e.to_bits() == math::exp(x - 1.5).to_bits()));
    }
}

#[test]
fn sinkhorn_matches_the_golden() {
    let golden = Golden::ops();
    let (scale, base) = (golden.f32("sinkhorn.scale"), golden.f32("sinkhorn.base"));
    let split = hyper::Split { hc: 4, iterations: 20, eps: 1e-6, scale: &scale, base: &base };
    let mixes: Vec<Vec<hyper::Mix>> = isas()
        .iter()
        .map(|&isa| golden.f32("sinkhorn.mixes").chunks(24).map(|m| hyper::split(isa, m, 1.0, split)).collect())
        .collect();
    assert_eq!(mixes[0], mixes[1]);
    let flat = |f: &dyn Fn(&hyper::Mix) -> Vec<f32>| -> Vec<f32> { mixes[0].iter().flat_map(f).collect() };
    close(&flat(&|m| m.pre[..4].to_vec()), &golden.f32("sinkhorn.pre"), 1e-6);
    close(&flat(&|m| m.post[..4].to_vec()), &golden.f32("sinkhorn.post"), 1e-6);
    close(&flat(&|m| m.comb[..4].iter().flat_map(|r| r[..4].to_vec()).collect()), &golden.f32("sinkhorn.comb"), 1e-6);
}

#[test]
fn streams_are_mixed_in_the_written_order() {
    // Wide enough that an fma in the wrong place shows through the rounding to bf16.
    let (hc, dim) = (4, 8192);
    let mut numbers = Numbers(5);
    let (h, y) = (numbers.bf16(hc * dim), numbers.bf16(dim));
    let mut mix = hyper::Mix::default();
    for j in 0..hc {
        (mix.pre[j], mix.post[j]) = (numbers.next(), numbers.next());
        (0..hc).for_each(|k| mix.comb[j][k] = numbers.next());
    }
    let at = |j: usize, d: usize| h[j * dim + d].to_f32();
    for isa in isas() {
        let (mut low, mut mean, mut next) = (vec![bf16::ZERO; dim], vec![bf16::ZERO; dim], h.clone());
        hyper::collapse(isa, &h, &mix.pre[..hc], &mut low);
        hyper::mean(isa, &h, &mut mean);
        hyper::expand(isa, &y, &mut next, &mix);
        for d in 0..dim {
            let sum = (0..hc).fold(0.0, |s, j| s + mix.pre[j] * at(j, d));
            assert_eq!(low[d].to_f32(), bf(sum));
            assert_eq!(mean[d].to_f32(), bf((((at(0, d) + at(1, d)) + at(2, d)) + at(3, d)) / 4.0));
            for k in 0..hc {
                let sum = (0..hc).fold(0.0, |s, j| s + mix.comb[j][k] * at(j, d));
                assert_eq!(next[k * dim + d].to_f32(), bf(mix.post[k] * y[d].to_f32() + sum));
            }
        }
    }
}

#[test]
fn head_weights_are_the_formula() {
    let m = [0.3, -2.0, 5.0, 0.0];
    for isa in isas() {
        let got = hyper::head_weights(isa, &m, 0.7, 1.3, &[0.1, 0.2, 0.3, 0.4], 1e-6);
        for (j, m) in m.iter().enumerate() {
            assert_eq!(got[j], math::sigmoid(m * 0.7 * 1.3 + [0.1, 0.2, 0.3, 0.4][j]) + 1e-6);
        }
    }
}

#[test]
fn a_slot_is_a_softmax_per_dimension_in_row_order() {
    let (stride, width) = (32, 16);
    let mut numbers = Numbers(6);
    let (kv, score) = (numbers.f32(6 * stride), numbers.f32(6 * stride));
    // A ring of six rows: rows 4, 5, 0 by their first columns, rows 1, 2 by their last.
    let part = |column, first, count| Part {
        kv: RingRows::new(&kv, stride, column, first, count),
        score: RingRows::new(&score, stride, column, first, count),
    };
    let none = Part { kv: RingRows::none(), score: RingRows::none() };
    let rows = |column: usize, list: &[usize]| list.iter().map(|r| r * stride + column).collect::<Vec<_>>();
    for isa in isas() {
        for (parts, list) in [
            ([part(0, 4, 3), part(16, 1, 2)], [rows(0, &[4, 5, 0]), rows(16, &[1, 2])].concat()),
            ([none, part(16, 5, 4)], rows(16, &[5, 0, 1, 2])),
        ] {
            let mut out = vec![0.0; width];
            compress(isa, parts, &mut out);
            for (d, got) in out.iter().enumerate() {
                let max = list.iter().fold(f32::NEG_INFINITY, |m, at| m.max(score[at + d]));
                let e: Vec<f32> = list.iter().map(|at| math::exp(score[at + d] - max)).collect();
                let sum = e.iter().fold(0.0, |s, e| s + e);
                let expected = list.iter().zip(&e).fold(0.0, |s, (at, e)| (e / sum).mul_add(kv[at + d], s));
                assert_eq!(got.to_bits(), expected.to_bits());
            }
        }
    }
}

/// Attention as `docs/numerics.md` says it, one head, over entries that may be absent.
fn attention(q: &[f32], list: &[Option<Vec<f32>>], sink: f32, scale: f32) -> Vec<bf16> {
    let (mut max, mut sum, mut acc) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; q.len()]);
    for block in list.chunks(64) {
        let keys: Vec<&Vec<f32>> = block.iter().flatten().collect();
        if keys.is_empty() {
            continue;
        }
        let scores: Vec<f32> = keys.iter().map(|k| canonical(8, k, q) * scale).collect();
        let new = scores.iter().fold(max, |m, s| m.max(*s));
        let alpha = math::exp(max - new);
        max = new;
        sum *= alpha;
        acc.iter_mut().for_each(|a| *a *= alpha);
        for (k, s) in keys.iter().zip(&scores) {
            let p = math::exp(s - max);
            sum += p;
            acc.iter_mut().zip(*k).for_each(|(a, k)| *a = bf(p).mul_add(*k, *a));
        }
    }
    sum += math::exp(sink - max);
    acc.iter().map(|a| bf16::from_f32(a / sum)).collect()
}

#[test]
fn attention_has_the_written_bits_for_every_list() {
    let mut numbers = Numbers(7);
    for width in [64, 128, 192, 512] {
        let heads = 3;
        let (ring, slots, block) = (numbers.bf16(80 * width), numbers.bf16(90 * width), numbers.bf16(5 * width));
        let (q, sink) = (numbers.bf16(heads * width), numbers.f32(heads));
        let picks: Vec<u32> = (0..16).map(|i| i * 5 + 2).collect();
        for (first, count, chosen, drafts) in [
            (0, 1, Slots::All(0), 0),
            (70, 20, Slots::All(77), 0),
            (33, 64, Slots::These(&picks), 0),
            (5, 3, Slots::All(0), 5),
        ] {
            let row = |data: &[bf16], i: usize| Some(wide(&data[i * width..][..width]));
            let mut list: Vec<Option<Vec<f32>>> =
                (0..64).map(|i| if i < count { row(&ring, (first + i) % 80) } else { None }).collect();
            match chosen {
                Slots::All(n) => list.extend((0..n).map(|i| row(&slots, i))),
                Slots::These(p) => list.extend(p.iter().map(|&i| row(&slots, i as usize))),
            }
            list.extend((0..drafts).map(|i| row(&block, i)));
            let keys = Keys {
                window: RingRows::new(&ring, width, 0, first, count),
                window_size: 64,
                compressed: &slots,
                slots: chosen,
                block: &block[..drafts * width],
            };
            let mut scratch = AttendScratch::new();
            for isa in isas() {
                let mut out = vec![bf16::ZERO; heads * width];
                let query = Query { q: &q, sink: &sink, scale: 0.09 };
                attend(isa, query, &keys, &mut scratch, &mut out);
                for h in 0..heads {
                    let expected = attention(&wide(&q[h * width..][..width]), &list, sink[h], 0.09);
                    assert_eq!(bits(&out[h * width..][..width]), bits(&expected), "{width} wide, {count} in window");
                }
            }
        }
    }
}

#[test]
fn attention_matches_the_golden() {
    let golden = Golden::ops();
    for (name, rows, window) in [("sparse_attn", 5, 0), ("sparse_attn_long", 3, 128)] {
        let (q, kv) = (golden.bf16(&format!("{name}.q")), golden.bf16(&format!("{name}.kv")));
        let (idx, sink) = (golden.i32(&format!("{name}.idx")), golden.f32(&format!("{name}.sink")));
        let o = golden.bf16(&format!("{name}.o"));
        let mut compared = 0;
        for (t, idx) in idx.chunks(idx.len() / rows).enumerate() {
            let (near, far) = idx.split_at(window);
            let count = near.iter().take_while(|&&i| i >= 0).count();
            let picks: Vec<u32> = far.iter().take_while(|&&i| i >= 0).map(|&i| i as u32).collect();
            // Lists with holes, which the layout of the model never has, are left out.
            let present = idx.iter().filter(|&&i| i >= 0).count();
            let run = near[..count].iter().zip(0..).all(|(&i, n)| i == near[0] + n);
            if !run || present != count + picks.len() {
                continue;
            }
            let first = near.first().map_or(0, |&i| i as usize);
            let keys = Keys {
                window: RingRows::new(&kv, 128, 0, first, count),
                window_size: window,
                compressed: &kv,
                slots: Slots::These(&picks),
                block: &[],
            };
            let mut out = vec![bf16::ZERO; 4 * 128];
            let query = Query { q: &q[t * 512..][..512], sink: &sink, scale: (128f64.powf(-0.5)) as f32 };
            attend(Isa::detect(), query, &keys, &mut AttendScratch::new(), &mut out);
            close(&wide(&out), &wide(&o[t * 512..][..512]), 0.008);
            compared += 1;
        }
        assert!(compared >= 2, "{name}: {compared} lists compared");
    }
}

#[test]
fn slot_scores_are_the_formula() {
    let mut numbers = Numbers(8);
    let (heads, width) = (4, 128);
    let (q, slots) = (numbers.bf16(heads * width), numbers.bf16(13 * width));
    let mut w = numbers.bf16(heads);
    indexer::scale_weights(&mut w, 0.044);
    for isa in isas() {
        let mut scores = vec![0.0; 13];
        indexer::scores(isa, &q, &w, &slots, &mut scores);
        for (slot, got) in slots.chunks(width).zip(&scores) {
            let mut sum = 0.0;
            for (q, w) in q.chunks(width).zip(&w) {
                sum += bf(bf(canonical(8, &wide(slot), &wide(q))).max(0.0) * w.to_f32());
            }
            assert_eq!(*got, bf(sum));
        }
    }
}

#[test]
fn gates_match_the_golden() {
    let golden = Golden::ops();
    for (name, experts, k) in [("gate_score", 8, 2), ("gate_k6", 32, 6), ("gate_hash", 8, 2)] {
        let get = |what: &str| format!("{name}.{what}");
        let (w, x) = (golden.bf16(&get("w")), wide(&golden.bf16(&get("x"))));
        let matrix = Bf16Matrix::pack(experts, 256, &w).unwrap();
        let mut scores = vec![0.0; 9 * experts];
        matrix.product(Isa::detect(), Rows::new(&x, 9), Out::f32(&mut scores, 9));
        vector::router_scores(Isa::detect(), &mut scores);
        let (indices, weights) = (golden.i32(&get("indices")), golden.f32(&get("weights")));
        for (t, scores) in scores.chunks(experts).enumerate() {
            let mut picks: Vec<u32> = Vec::new();
            if name == "gate_hash" {
                let row = golden.i32(&get("ids"))[t] as usize;
                picks.extend(golden.i32(&get("tid2eid"))[row * k..][..k].iter().map(|&e| e as u32));
            } else {
                let biased: Vec<f32> = scores.iter().zip(golden.f32(&get("bias"))).map(|(s, b)| s + b).collect();
                select::top_k(&biased, k, &mut picks);
            }
            picks.sort_unstable();
            let total = picks.iter().fold(0.0, |sum, &e| sum + scores[e as usize]);
            for (&expert, &weight) in indices[t * k..][..k].iter().zip(&weights[t * k..][..k]) {
                assert!(picks.contains(&(expert as u32)), "{name} row {t}: expert {expert} of {picks:?}");
                let got = scores[expert as usize] / total * 1.5;
                assert!((got - weight).abs() <= 1e-6, "{name} row {t}: {got}, golden {weight}");
            }
        }
    }
}
