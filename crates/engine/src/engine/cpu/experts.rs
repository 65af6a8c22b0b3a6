//! The mixture of experts of one layer: routing, routed experts, the shared one.
//!
//! Owns the order in which expert outputs are added: ascending expert id, the shared expert last.

use half::bf16;

use super::kernel::linear::Rows;
use super::kernel::quant::QuantRows;
use super::kernel::select::top_k;
use super::kernel::vector::{add_to, narrow, router_scores, swiglu};
use super::load::{Expert, ExpertWeights, Routing};
use super::ops::{Ctx, Quantized, sized};
use super::pass::Row;

/// Buffers of the experts.
#[derive(Debug, Default)]
pub(super) struct ExpertScratch {
    /// Routing scores, with the bias where there is one, `[m, experts]`.
    pub(super) biased: Vec<f32>,
    /// Experts of each row, ascending, `[m, k]`.
    pub(super) picks: Vec<u16>,
    /// Their weights, `[m, k]`.
    pub(super) weights: Vec<f32>,
    scores: Vec<f32>,
    best: Vec<u32>,
    rows: Vec<usize>,
    row_weights: Vec<f32>,
    gathered: QuantRows,
    gate: Vec<bf16>,
    up: Vec<bf16>,
    inner: Vec<bf16>,
    inner_codes: QuantRows,
    out: Vec<bf16>,
    sum: Vec<f32>,
}

/// Computes `y[m, dim] = bf16(Σ routed + shared)` of normed rows.
///
/// `x` is the input as fp32 `[m, dim]`, `codes` the same quantized.
pub(super) fn experts(
    ctx: &mut Ctx<'_>,
    weights: &ExpertWeights,
    rows: &[Row],
    (x, codes): (&[f32], &QuantRows),
    s: &mut ExpertScratch,
    y: &mut Vec<bf16>,
) {
    let m = rows.len();
    route(ctx, weights, rows, x, s);
    let dim = ctx.config.dim;
    s.sum.clear();
    s.sum.resize(m * dim, 0.0);
    for (id, expert) in weights.experts.iter().enumerate() {
        take_rows(s, id, ctx.config.experts_per_token);
        if s.rows.is_empty() {
            continue;
        }
        s.gathered.gather(codes, &s.rows);
        let gathered = std::mem::take(&mut s.gathered);
        run(ctx, expert, &gathered, true, s);
        s.gathered = gathered;
        for (row, out) in s.rows.iter().zip(s.out.chunks_exact(dim)) {
            add_to(ctx.isa, &mut s.sum[row * dim..(row + 1) * dim], out);
        }
    }
    run(ctx, &weights.shared, codes, false, s);
    add_to(ctx.isa, &mut s.sum, &s.out);
    narrow(ctx.isa, &s.sum, sized(y, m * dim));
}

/// Picks each row's experts and weighs them.
fn route(ctx: &mut Ctx<'_>, weights: &ExpertWeights, rows: &[Row], x: &[f32], s: &mut ExpertScratch) {
    let (experts, k) = (ctx.config.experts, ctx.config.experts_per_token);
    ctx.wide(&weights.gate, Rows::new(x, rows.len()), &mut s.scores);
    router_scores(ctx.isa, &mut s.scores);
    s.biased.clear();
    s.biased.extend_from_slice(&s.scores);
    s.picks.clear();
    s.weights.clear();
    for (at, row) in rows.iter().enumerate() {
        let scores = &s.scores[at * experts..(at + 1) * experts];
        let first = s.picks.len();
        match &weights.routing {
            Routing::Hash(ids) => s.picks.extend_from_slice(&ids[row.id * k..(row.id + 1) * k]),
            Routing::Score(bias) => {
                let biased = &mut s.biased[at * experts..(at + 1) * experts];
                for (score, bias) in biased.iter_mut().zip(bias) {
                    *score += bias;
                }
                top_k(biased, k, &mut s.best);
                #[allow(clippy::cast_possible_truncation, reason = "experts are below 2^14")]
                s.picks.extend(s.best.iter().map(|&id| id as u16));
            }
        }
        s.picks[first..].sort_unstable();
        let score = |id: &u16| scores[usize::from(*id)];
        let sum = s.picks[first..].iter().map(score).fold(0.0, |sum: f32, score| sum + score);
        let scale = ctx.config.route_scale;
        s.weights.extend(s.picks[first..].iter().map(|id| score(id) / sum * scale));
    }
}

/// Lists the rows that chose an expert, with their weights; a row that lists it twice comes twice.
fn take_rows(s: &mut ExpertScratch, id: usize, k: usize) {
    s.rows.clear();
    s.row_weights.clear();
    for (at, (pick, weight)) in s.picks.iter().zip(&s.weights).enumerate() {
        if usize::from(*pick) == id {
            s.rows.push(at / k);
            s.row_weights.push(*weight);
        }
    }
}

/// One expert on some rows, into `s.out`.
fn run<M: Quantized>(ctx: &mut Ctx<'_>, expert: &Expert<M>, x: &QuantRows, routed: bool, s: &mut ExpertScratch) {
    let inner = ctx.config.inner;
    ctx.linear(&expert.w1, x, &mut s.gate);
    ctx.linear(&expert.w3, x, &mut s.up);
    let out = sized(&mut s.inner, x.rows() * inner);
    for (row, out) in out.chunks_exact_mut(inner).enumerate() {
        let of = row * inner..(row + 1) * inner;
        let weight = if routed { s.row_weights[row] } else { 1.0 };
        swiglu(ctx.isa, &s.gate[of.clone()], &s.up[of], ctx.config.swiglu_limit, weight, out);
    }
    s.inner_codes.quantize(ctx.isa, &s.inner, inner);
    ctx.linear(&expert.w2, &s.inner_codes, &mut s.out);
}
