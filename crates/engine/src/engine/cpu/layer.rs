//! One layer: two sublayers, each between a mix of the residual streams and their update.

use half::bf16;

use super::kernel::hyper::{self, Split};
use super::kernel::linear::Rows;
use super::kernel::vector::{rms_factor, rms_norm, widen};
use super::load::HyperWeights;
use super::ops::{Ctx, sized};
use super::pass::Parts;
use super::scratch::LayerScratch;
use super::{attention, experts};

/// Runs a wave through one layer of the range; keeps its tap where the drafter wants one.
pub(super) fn forward(parts: &mut Parts<'_>, layer: u16) {
    attend(parts, layer);
    feed_forward(parts, layer);
    tap(parts, layer);
}

/// The attention half.
pub(super) fn attend(parts: &mut Parts<'_>, layer: u16) {
    let place = usize::from(layer - parts.ctx.range.lo());
    let weights = &parts.weights.layers[place];
    let (hidden, s) = (&mut parts.scratch.hidden, &mut parts.scratch.layer);
    enter(&mut parts.ctx, &weights.hc_attn, &weights.attn_norm, hidden, s);
    let table = parts.weights.rotations(weights.ratio);
    attention::target(&mut parts.ctx, weights, table, (&parts.scratch.rows, parts.sessions, place), s);
    leave(&mut parts.ctx, hidden, s);
}

/// The expert half.
pub(super) fn feed_forward(parts: &mut Parts<'_>, layer: u16) {
    let weights = &parts.weights.layers[usize::from(layer - parts.ctx.range.lo())];
    let (hidden, s) = (&mut parts.scratch.hidden, &mut parts.scratch.layer);
    enter(&mut parts.ctx, &weights.hc_ffn, &weights.ffn_norm, hidden, s);
    let input = (s.x_wide.as_slice(), &s.codes);
    experts::experts(&mut parts.ctx, &weights.ffn, &parts.scratch.rows, input, &mut s.experts, &mut s.y);
    leave(&mut parts.ctx, hidden, s);
}

/// Keeps the stream means of a layer that the drafter looks at.
fn tap(parts: &mut Parts<'_>, layer: u16) {
    let config = parts.ctx.config;
    let (Some(draft), true) = (&config.draft, parts.weights.drafter.is_some()) else { return };
    let Some(at) = draft.targets.iter().position(|&target| target == layer) else { return };
    let (dim, targets, isa) = (config.dim, draft.targets.len(), parts.ctx.isa);
    let scratch = &mut *parts.scratch;
    let taps = sized(&mut scratch.taps, scratch.rows.len() * targets * dim);
    for (row, hidden) in taps.chunks_exact_mut(targets * dim).zip(scratch.hidden.chunks_exact(config.hc * dim)) {
        hyper::mean(isa, hidden, &mut row[at * dim..(at + 1) * dim]);
    }
}

/// Mixes the streams `[m, hc, dim]` into the sublayer's normed input, in all forms it is used in.
pub(super) fn enter(ctx: &mut Ctx<'_>, w: &HyperWeights, norm: &[f32], hidden: &[bf16], s: &mut LayerScratch) {
    let config = ctx.config;
    let (isa, width, dim) = (ctx.isa, config.hc * config.dim, config.dim);
    let m = hidden.len() / width;
    let mixes = config.mixes();
    widen(isa, hidden, sized(&mut s.wide, hidden.len()));
    ctx.mix(&w.mix, Rows::new(&s.wide, m), &mut s.mixes);
    let split =
        Split { hc: config.hc, iterations: config.sinkhorn_iters, eps: config.hc_eps, scale: &w.scale, base: &w.base };
    let (wide, raw) = (&s.wide, &s.mixes);
    ctx.each(sized(&mut s.mix, m), 1, &|row, mix| {
        let r = rms_factor(isa, &wide[row * width..(row + 1) * width], config.norm_eps);
        mix[0] = hyper::split(isa, &raw[row * mixes..(row + 1) * mixes], r, split);
    });
    let mix = &s.mix;
    ctx.each(sized(&mut s.mixed, m * dim), dim, &|row, out| {
        hyper::collapse(isa, &hidden[row * width..(row + 1) * width], &mix[row].pre[..config.hc], out);
    });
    rms_norm(isa, &s.mixed, norm, config.norm_eps, sized(&mut s.x, m * dim));
    widen(isa, &s.x, sized(&mut s.x_wide, m * dim));
    s.codes.quantize(isa, &s.x, dim);
}

/// Spreads the sublayer's result `s.y` over the streams.
pub(super) fn leave(ctx: &mut Ctx<'_>, hidden: &mut [bf16], s: &LayerScratch) {
    let (isa, dim) = (ctx.isa, ctx.config.dim);
    ctx.each(hidden, ctx.config.hc * dim, &|row, streams| {
        hyper::expand(isa, &s.y[row * dim..(row + 1) * dim], streams, &s.mix[row]);
    });
}
