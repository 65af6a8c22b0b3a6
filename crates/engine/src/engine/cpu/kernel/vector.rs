//! Row operations: sums of squares, norms, activations of the experts, Hadamard.
//!
//! Sums are fp32 dots in the canonical order with runs of four values.

use half::bf16;

use super::isa::{Isa, Job};
use super::math::{exp_v, silu_v, softplus_v};
use super::simd::{Simd, butterfly};

/// Longest row of [`hadamard`].
pub const HADAMARD_MAX: usize = 1024;

/// Adds up four-value runs into the 32 canonical lanes.
struct Lanes32<V> {
    acc: [V; 4],
    next: usize,
}

impl<V: Simd> Lanes32<V> {
    #[inline(always)]
    fn new() -> Self {
        Self { acc: [V::splat(0.0); 4], next: 0 }
    }

    /// Adds the chain sums of the next eight runs.
    #[inline(always)]
    fn add(&mut self, s: V) {
        let lane = self.next % 4;
        self.acc[lane] = s.add(self.acc[lane]);
        self.next += 1;
    }

    #[inline(always)]
    fn finish(self) -> f32 {
        butterfly(self.acc)
    }
}

/// The next 32 values of a row, zeros past its end: absent runs are lanes of +0.
#[inline(always)]
fn padded(rest: &[f32]) -> [f32; 32] {
    let mut last = [0.0; 32];
    last[..rest.len()].copy_from_slice(rest);
    last
}

struct SumSquares<'a>(&'a [f32]);

impl Job for SumSquares<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<V: Simd>(self) -> f32 {
        sum_squares_v::<V>(self.0)
    }
}

/// Σ x², runs of four.
#[inline(always)]
fn sum_squares_v<V: Simd>(x: &[f32]) -> f32 {
    let (blocks, rest) = x.as_chunks::<32>();
    let mut sum = Lanes32::<V>::new();
    for block in blocks {
        sum.add(squares::<V>(block));
    }
    if !rest.is_empty() {
        sum.add(squares::<V>(&padded(rest)));
    }
    sum.finish()
}

#[inline(always)]
fn squares<V: Simd>(block: &[f32; 32]) -> V {
    let [a, b, c, d] = V::load_runs4(block);
    d.fma(d, c.fma(c, b.fma(b, a.fma(a, V::splat(0.0)))))
}

/// Σ x² of an fp32 row in the canonical order.
#[must_use]
pub fn sum_squares(isa: Isa, x: &[f32]) -> f32 {
    isa.dispatch(SumSquares(x))
}

struct Dot<'a>(&'a [f32], &'a [f32]);

impl Job for Dot<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<V: Simd>(self) -> f32 {
        let (w, w_rest) = self.0.as_chunks::<32>();
        let (x, x_rest) = self.1.as_chunks::<32>();
        let mut sum = Lanes32::<V>::new();
        for (w, x) in w.iter().zip(x) {
            sum.add(products::<V>(w, x));
        }
        if !w_rest.is_empty() {
            sum.add(products::<V>(&padded(w_rest), &padded(x_rest)));
        }
        sum.finish()
    }
}

#[inline(always)]
fn products<V: Simd>(w: &[f32; 32], x: &[f32; 32]) -> V {
    let w = V::load_runs4(w);
    let x = V::load_runs4(x);
    let s = w[0].fma(x[0], V::splat(0.0));
    w[3].fma(x[3], w[2].fma(x[2], w[1].fma(x[1], s)))
}

/// Σ w · x of two fp32 rows in the canonical order.
///
/// # Panics
/// If the rows differ in length.
#[must_use]
pub fn dot(isa: Isa, w: &[f32], x: &[f32]) -> f32 {
    assert_eq!(w.len(), x.len(), "rows of a dot product");
    isa.dispatch(Dot(w, x))
}

/// `1 / √(Σ x² / n + eps)` of an fp32 row: the factor of its RMS norm.
#[must_use]
pub fn rms_factor(isa: Isa, x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_squares(isa, x) / x.len() as f32 + eps).sqrt()
}

struct Widen<'a> {
    x: &'a [bf16],
    out: &'a mut [f32],
}

impl Job for Widen<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (x, x_rest) = self.x.as_chunks::<8>();
        let (out, out_rest) = self.out.as_chunks_mut::<8>();
        for (x, out) in x.iter().zip(out) {
            V::load_bf16(x).store(out);
        }
        for (x, out) in x_rest.iter().zip(out_rest) {
            *out = x.to_f32();
        }
    }
}

/// bf16 values as fp32, exactly.
///
/// # Panics
/// If the lengths differ.
pub fn widen(isa: Isa, x: &[bf16], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "values widened");
    isa.dispatch(Widen { x, out });
}

struct Narrow<'a> {
    x: &'a [f32],
    out: &'a mut [bf16],
}

impl Job for Narrow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (x, x_rest) = self.x.as_chunks::<8>();
        let (out, out_rest) = self.out.as_chunks_mut::<8>();
        for (x, out) in x.iter().zip(out) {
            V::load(x).store_bf16(out);
        }
        for (x, out) in x_rest.iter().zip(out_rest) {
            *out = bf16::from_f32(*x);
        }
    }
}

/// fp32 values rounded to bf16.
///
/// # Panics
/// If the lengths differ.
pub fn narrow(isa: Isa, x: &[f32], out: &mut [bf16]) {
    assert_eq!(x.len(), out.len(), "values narrowed");
    isa.dispatch(Narrow { x, out });
}

struct AddTo<'a> {
    sum: &'a mut [f32],
    x: &'a [bf16],
}

impl Job for AddTo<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (x, x_rest) = self.x.as_chunks::<8>();
        let (sum, sum_rest) = self.sum.as_chunks_mut::<8>();
        for (x, sum) in x.iter().zip(sum) {
            V::load(sum).add(V::load_bf16(x)).store(sum);
        }
        for (x, sum) in x_rest.iter().zip(sum_rest) {
            *sum += x.to_f32();
        }
    }
}

/// Adds bf16 values to fp32 sums.
///
/// # Panics
/// If the lengths differ.
pub fn add_to(isa: Isa, sum: &mut [f32], x: &[bf16]) {
    assert_eq!(x.len(), sum.len(), "values added");
    isa.dispatch(AddTo { sum, x });
}

struct RmsNorm<'a> {
    x: &'a [bf16],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [bf16],
}

impl Job for RmsNorm<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let (blocks, rest) = x.as_chunks::<32>();
            let mut sum = Lanes32::<V>::new();
            for block in blocks {
                sum.add(squares::<V>(&wide(block)));
            }
            if !rest.is_empty() {
                let mut last = [bf16::ZERO; 32];
                last[..rest.len()].copy_from_slice(rest);
                sum.add(squares::<V>(&wide(&last)));
            }
            let r = V::splat(1.0 / (sum.finish() / width as f32 + self.eps).sqrt());
            let (eights, _) = x.as_chunks::<8>();
            let (weights, _) = self.weight.as_chunks::<8>();
            let (outs, _) = out.as_chunks_mut::<8>();
            for ((x, w), out) in eights.iter().zip(weights).zip(outs) {
                V::load_bf16(x).mul(r).mul(V::load(w)).store_bf16(out);
            }
        }
    }
}

/// 32 bf16 values as fp32.
#[inline(always)]
fn wide(block: &[bf16; 32]) -> [f32; 32] {
    let mut out = [0.0; 32];
    for (o, x) in out.iter_mut().zip(block) {
        *o = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
    out
}

/// RMS norm of rows: `bf16((x · r) · weight)` with `r = 1 / √(Σ x² / n + eps)`, n the length of
/// `weight`.
///
/// # Panics
/// If `x` is not whole rows, `out` is of another size, or a row is not a multiple of 8.
pub fn rms_norm(isa: Isa, x: &[bf16], weight: &[f32], eps: f32, out: &mut [bf16]) {
    assert!(x.len() == out.len() && x.len().is_multiple_of(weight.len()) && weight.len().is_multiple_of(8));
    isa.dispatch(RmsNorm { x, weight, eps, out });
}

struct HeadNorm<'a> {
    q: &'a mut [bf16],
    width: usize,
    eps: f32,
}

impl Job for HeadNorm<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        for head in self.q.chunks_exact_mut(self.width) {
            let (blocks, _) = head.as_chunks::<32>();
            let mut sum = Lanes32::<V>::new();
            for block in blocks {
                let [a, b, c, d] = V::load_runs4(&wide(block));
                let s = a.mul(a).round_bf16().add(V::splat(0.0));
                let s = s.add(b.mul(b).round_bf16()).add(c.mul(c).round_bf16());
                sum.add(s.add(d.mul(d).round_bf16()));
            }
            let mean = bf16::from_f32(sum.finish() / self.width as f32);
            let v = bf16::from_f32(mean.to_f32() + self.eps);
            let r = V::splat(bf16::from_f32(1.0 / v.to_f32().sqrt()).to_f32());
            let (eights, _) = head.as_chunks_mut::<8>();
            for eight in eights {
                V::load_bf16(eight).mul(r).store_bf16(eight);
            }
        }
    }
}

/// Normalizes every head of `width` values in bf16 steps: `v = bf16(bf16(Σ bf16(q²) / n) + eps)`,
/// `q = bf16(q · bf16(1 / √v))`.
///
/// # Panics
/// If `q` is not whole heads or a head is not a multiple of 32.
pub fn head_norm(isa: Isa, q: &mut [bf16], width: usize, eps: f32) {
    assert!(width > 0 && width.is_multiple_of(32) && q.len().is_multiple_of(width), "{} by {width}", q.len());
    isa.dispatch(HeadNorm { q, width, eps });
}

struct Hadamard<'a> {
    x: &'a mut [bf16],
    width: usize,
    scale: f32,
}

impl Job for Hadamard<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let mut values = [[0.0; 8]; HADAMARD_MAX / 8];
        let values = &mut values[..self.width / 8];
        for row in self.x.chunks_exact_mut(self.width) {
            let (eights, _) = row.as_chunks_mut::<8>();
            for (x, value) in eights.iter().zip(values.iter_mut()) {
                inner_stages(V::load_bf16(x)).store(value);
            }
            let mut half = 1;
            while half < values.len() {
                for pair in values.chunks_exact_mut(2 * half) {
                    let (low, high) = pair.split_at_mut(half);
                    for (a, b) in low.iter_mut().zip(high) {
                        let (x, y) = (V::load(a), V::load(b));
                        x.add(y).store(a);
                        x.sub(y).store(b);
                    }
                }
                half *= 2;
            }
            for (x, value) in eights.iter_mut().zip(values.iter()) {
                V::load(value).mul(V::splat(self.scale)).store_bf16(x);
            }
        }
    }
}

/// The butterflies at distance 1, 2 and 4, within eight values.
#[inline(always)]
fn inner_stages<V: Simd>(v: V) -> V {
    let mut x = [0.0; 8];
    v.store(&mut x);
    let a = [x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3], x[4] + x[5], x[4] - x[5], x[6] + x[7], x[6] - x[7]];
    let b = [a[0] + a[2], a[1] + a[3], a[0] - a[2], a[1] - a[3], a[4] + a[6], a[5] + a[7], a[4] - a[6], a[5] - a[7]];
    V::load(&[b[0] + b[4], b[1] + b[5], b[2] + b[6], b[3] + b[7], b[0] - b[4], b[1] - b[5], b[2] - b[6], b[3] - b[7]])
}

/// Rotates rows by the orthonormal Hadamard matrix in Sylvester order: fp32 butterflies at distance
/// 1, 2, 4, …, one product with fp32 width^-½, one rounding to bf16.
///
/// # Panics
/// If `width` is not a power of two from 8 to [`HADAMARD_MAX`] or `x` is not whole rows.
pub fn hadamard(isa: Isa, x: &mut [bf16], width: usize) {
    assert!(width.is_power_of_two() && (8..=HADAMARD_MAX).contains(&width) && x.len().is_multiple_of(width));
    let scale = (1.0 / (width as f64).sqrt()) as f32;
    isa.dispatch(Hadamard { x, width, scale });
}

struct SwiGlu<'a> {
    gate: &'a [bf16],
    up: &'a [bf16],
    limit: f32,
    weight: f32,
    out: &'a mut [bf16],
}

impl Job for SwiGlu<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let limit = if self.limit > 0.0 { self.limit } else { f32::INFINITY };
        let (gate, _) = self.gate.as_chunks::<8>();
        let (up, _) = self.up.as_chunks::<8>();
        let (out, _) = self.out.as_chunks_mut::<8>();
        for ((g, u), out) in gate.iter().zip(up).zip(out) {
            // The bounds come first, so that a NaN passes.
            let g = V::splat(limit).min(V::load_bf16(g));
            let u = V::splat(limit).min(V::splat(-limit).max(V::load_bf16(u)));
            silu_v(g).mul(u).mul(V::splat(self.weight)).store_bf16(out);
        }
    }
}

/// The expert's activation: `bf16((silu(min(gate, limit)) · clamp(up, ±limit)) · weight)`; a limit
/// of 0 is none, the shared expert's weight is 1.
///
/// # Panics
/// If the lengths differ or are not a multiple of 8.
pub fn swiglu(isa: Isa, gate: &[bf16], up: &[bf16], limit: f32, weight: f32, out: &mut [bf16]) {
    assert!(gate.len() == up.len() && gate.len() == out.len() && gate.len().is_multiple_of(8));
    isa.dispatch(SwiGlu { gate, up, limit, weight, out });
}

struct RouterScores<'a>(&'a mut [f32]);

impl Job for RouterScores<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (eights, rest) = self.0.as_chunks_mut::<8>();
        for eight in eights {
            softplus_v(V::load(eight)).sqrt().store(eight);
        }
        if !rest.is_empty() {
            let mut last = [0.0; 8];
            last[..rest.len()].copy_from_slice(rest);
            softplus_v(V::load(&last)).sqrt().store(&mut last);
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }
}

/// Router logits to scores in place: √softplus(x).
pub fn router_scores(isa: Isa, x: &mut [f32]) {
    isa.dispatch(RouterScores(x));
}

struct ExpMinus<'a> {
    x: &'a mut [f32],
    max: f32,
}

impl Job for ExpMinus<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let max = V::splat(self.max);
        let (eights, rest) = self.x.as_chunks_mut::<8>();
        for eight in eights {
            exp_v(V::load(eight).sub(max)).store(eight);
        }
        if !rest.is_empty() {
            let mut last = [0.0; 8];
            last[..rest.len()].copy_from_slice(rest);
            exp_v(V::load(&last).sub(max)).store(&mut last);
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }
}

/// e^(x − max) in place.
pub fn exp_minus(isa: Isa, x: &mut [f32], max: f32) {
    isa.dispatch(ExpMinus { x, max });
}
