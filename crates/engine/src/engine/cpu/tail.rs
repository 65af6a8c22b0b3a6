//! What follows the last layer: taps into the drafter's windows, and logits where they are asked.

use half::bf16;

use super::kernel::hyper::{collapse, head_weights};
use super::kernel::linear::Rows;
use super::kernel::vector::{rms_factor, rms_norm, widen};
use super::load::HeadMix;
use super::ops::{Ctx, sized};
use super::pass::{Parts, finite};
use super::scratch::HeadScratch;
use super::{drafter, position};
use crate::engine::{EngineError, Output};

/// Ends a wave at the tail: appends the logits asked for and moves the drafter's windows on.
pub(super) fn finish(parts: &mut Parts<'_>, out: &mut Output) -> Result<(), EngineError> {
    finite(parts)?;
    drafter::take_in(parts);
    let Some(tail) = &parts.weights.tail else { return Ok(()) };
    let scratch = &mut *parts.scratch;
    if scratch.logit_rows.is_empty() {
        return Ok(());
    }
    let width = parts.ctx.config.hc * parts.ctx.config.dim;
    let s = &mut scratch.head;
    s.hidden.clear();
    for row in &scratch.logit_rows {
        s.hidden.extend_from_slice(&scratch.hidden[row * width..(row + 1) * width]);
    }
    close(&mut parts.ctx, &tail.hc_head, s);
    logits(&mut parts.ctx, &tail.norm, &tail.head, s);
    let vocab = parts.ctx.config.vocab;
    for (row, logits) in scratch.logit_rows.iter().zip(s.logits.chunks_exact(vocab)) {
        if !logits.iter().all(|logit| logit.is_finite()) {
            let pos = position(scratch.rows[*row].pos);
            return Err(EngineError::NotFinite { range: parts.ctx.range, pos });
        }
    }
    out.logits.extend_from_slice(&s.logits);
    Ok(())
}

/// Ends the residual streams `s.hidden`: `s.y[n, dim]`.
pub(super) fn close(ctx: &mut Ctx<'_>, head: &HeadMix, s: &mut HeadScratch) {
    let config = ctx.config;
    let (isa, hc, dim) = (ctx.isa, config.hc, config.dim);
    let n = s.hidden.len() / (hc * dim);
    widen(isa, &s.hidden, sized(&mut s.wide, n * hc * dim));
    ctx.mix(&head.mix, Rows::new(&s.wide, n), &mut s.mixes);
    let (hidden, wide, mixes) = (&s.hidden, &s.wide, &s.mixes);
    ctx.each(sized(&mut s.y, n * dim), dim, &|row, out| {
        let of = row * hc * dim..(row + 1) * hc * dim;
        let r = rms_factor(isa, &wide[of.clone()], config.norm_eps);
        let mixes = &mixes[row * hc..(row + 1) * hc];
        let pre = head_weights(isa, mixes, r, head.scale, &head.base, config.hc_eps);
        collapse(isa, &hidden[of], &pre[..hc], out);
    });
}

/// Norms `s.y` and multiplies by the head: `s.logits[n, vocab]`.
pub(super) fn logits(ctx: &mut Ctx<'_>, norm: &[f32], head: &super::kernel::linear::Bf16Matrix, s: &mut HeadScratch) {
    let (isa, eps) = (ctx.isa, ctx.config.norm_eps);
    let n = s.y.len() / ctx.config.dim;
    sized::<bf16>(&mut s.norm, s.y.len());
    rms_norm(isa, &s.y, norm, eps, &mut s.norm);
    widen(isa, &s.norm, sized(&mut s.norm_wide, s.y.len()));
    ctx.wide(head, Rows::new(&s.norm_wide, n), &mut s.logits);
}
