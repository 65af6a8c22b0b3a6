//! Hyper-connections: the four residual streams are mixed into one row before a sublayer and the
//! sublayer's result is spread over them after it.

use half::bf16;

use super::isa::{Isa, Job};
use super::math::{exp_v, sigmoid_v};
use super::simd::Simd;

/// Most streams.
pub const STREAMS_MAX: usize = 8;

/// How the mixes of one position are read.
#[derive(Debug, Clone, Copy)]
pub struct Split<'a> {
    /// Streams.
    pub hc: usize,
    /// Sinkhorn rounds.
    pub iterations: usize,
    /// Added to every weight and every sum.
    pub eps: f32,
    /// Factors of the pre, post and combination mixes.
    pub scale: &'a [f32],
    /// Offsets `[(2 + hc) · hc]`.
    pub base: &'a [f32],
}

/// The weights of one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mix {
    /// Weight of every stream in the sublayer's input.
    pub pre: [f32; STREAMS_MAX],
    /// Weight of the sublayer's result in every stream.
    pub post: [f32; STREAMS_MAX],
    /// `comb[j][k]`: weight of stream j in the next stream k.
    pub comb: [[f32; STREAMS_MAX]; STREAMS_MAX],
}

impl Default for Mix {
    fn default() -> Self {
        Self { pre: [0.0; STREAMS_MAX], post: [0.0; STREAMS_MAX], comb: [[0.0; STREAMS_MAX]; STREAMS_MAX] }
    }
}

/// Reads the mixes `m[i] · r` of one position: sigmoid weights and a combination matrix made doubly
/// stochastic by Sinkhorn's rounds.
///
/// # Panics
/// If the sizes are not those of `split.hc` streams.
#[must_use]
pub fn split(isa: Isa, m: &[f32], r: f32, split: Split<'_>) -> Mix {
    let hc = split.hc;
    assert!((1..=STREAMS_MAX).contains(&hc), "{hc} streams, at most {STREAMS_MAX}");
    assert!(m.len() == (2 + hc) * hc && split.base.len() == m.len() && split.scale.len() == 3);
    isa.dispatch(SplitJob { m, r, split })
}

struct SplitJob<'a> {
    m: &'a [f32],
    r: f32,
    split: Split<'a>,
}

impl Job for SplitJob<'_> {
    type Out = Mix;

    #[inline(always)]
    fn run<V: Simd>(self) -> Mix {
        let Split { hc, iterations, eps, scale, base } = self.split;
        let mut mix = Mix::default();
        for j in 0..hc {
            mix.pre[j] = self.m[j] * self.r * scale[0] + base[j];
            mix.post[j] = self.m[hc + j] * self.r * scale[1] + base[hc + j];
        }
        let pre = sigmoid_v(V::load(&mix.pre)).add(V::splat(eps));
        sigmoid_v(V::load(&mix.post)).mul(V::splat(2.0)).store(&mut mix.post);
        pre.store(&mut mix.pre);
        for j in 0..hc {
            let mut row = [f32::NEG_INFINITY; STREAMS_MAX];
            let mut largest = f32::NEG_INFINITY;
            for k in 0..hc {
                let i = (2 + j) * hc + k;
                row[k] = self.m[i] * self.r * scale[2] + base[i];
                largest = if row[k] > largest { row[k] } else { largest };
            }
            exp_v(V::load(&row).sub(V::splat(largest))).store(&mut row);
            let mut sum = row[0];
            for &e in &row[1..hc] {
                sum += e;
            }
            V::load(&row).div(V::splat(sum)).add(V::splat(eps)).store(&mut mix.comb[j]);
        }
        columns::<V>(&mut mix.comb, hc, eps);
        for _ in 1..iterations {
            for row in &mut mix.comb[..hc] {
                let mut sum = row[0];
                for &c in &row[1..hc] {
                    sum += c;
                }
                V::load(row).div(V::splat(sum + eps)).store(row);
            }
            columns::<V>(&mut mix.comb, hc, eps);
        }
        mix
    }
}

/// Divides every column by its sum + eps.
#[inline(always)]
fn columns<V: Simd>(comb: &mut [[f32; STREAMS_MAX]; STREAMS_MAX], hc: usize, eps: f32) {
    let mut sum = V::load(&comb[0]);
    for row in &comb[1..hc] {
        sum = sum.add(V::load(row));
    }
    let sum = sum.add(V::splat(eps));
    for row in &mut comb[..hc] {
        V::load(row).div(sum).store(row);
    }
}

/// The head's weights: `sigmoid(m[i] · r · scale + base[i]) + eps`.
///
/// # Panics
/// If there are more than [`STREAMS_MAX`] streams or another number of offsets.
#[must_use]
pub fn head_weights(isa: Isa, m: &[f32], r: f32, scale: f32, base: &[f32], eps: f32) -> [f32; STREAMS_MAX] {
    assert!(m.len() <= STREAMS_MAX && base.len() == m.len(), "{} streams, {} offsets", m.len(), base.len());
    isa.dispatch(HeadWeights { m, r, scale, base, eps })
}

struct HeadWeights<'a> {
    m: &'a [f32],
    r: f32,
    scale: f32,
    base: &'a [f32],
    eps: f32,
}

impl Job for HeadWeights<'_> {
    type Out = [f32; STREAMS_MAX];

    #[inline(always)]
    fn run<V: Simd>(self) -> [f32; STREAMS_MAX] {
        let mut pre = [0.0; STREAMS_MAX];
        for j in 0..self.m.len() {
            pre[j] = self.m[j] * self.r * self.scale + self.base[j];
        }
        sigmoid_v(V::load(&pre)).add(V::splat(self.eps)).store(&mut pre);
        pre
    }
}

struct Collapse<'a> {
    h: &'a [bf16],
    pre: &'a [f32],
    out: &'a mut [bf16],
}

impl Job for Collapse<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let dim = self.out.len();
        let (out, _) = self.out.as_chunks_mut::<8>();
        for (i, out) in out.iter_mut().enumerate() {
            let mut sum = V::splat(0.0);
            for (j, &weight) in self.pre.iter().enumerate() {
                sum = sum.add(V::splat(weight).mul(V::load_bf16(eight(self.h, j * dim + 8 * i))));
            }
            sum.store_bf16(out);
        }
    }
}

/// Eight values from `at` on.
#[inline(always)]
fn eight(x: &[bf16], at: usize) -> &[bf16; 8] {
    let (eights, _) = x[at..at + 8].as_chunks::<8>();
    &eights[0]
}

/// The sublayer's input from the streams `h[hc, dim]` of one position: `bf16(Σ_j pre_j · h_j)`, each
/// product and each sum rounded, from +0, streams ascending.
///
/// # Panics
/// If the sizes differ or `out` is not a multiple of 8.
pub fn collapse(isa: Isa, h: &[bf16], pre: &[f32], out: &mut [bf16]) {
    assert!(h.len() == pre.len() * out.len() && out.len().is_multiple_of(8), "{} streams of {}", pre.len(), out.len());
    isa.dispatch(Collapse { h, pre, out });
}

struct Mean<'a> {
    h: &'a [bf16],
    hc: usize,
    out: &'a mut [bf16],
}

impl Job for Mean<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let dim = self.out.len();
        let (out, _) = self.out.as_chunks_mut::<8>();
        for (i, out) in out.iter_mut().enumerate() {
            let mut sum = V::load_bf16(eight(self.h, 8 * i));
            for j in 1..self.hc {
                sum = sum.add(V::load_bf16(eight(self.h, j * dim + 8 * i)));
            }
            sum.div(V::splat(self.hc as f32)).store_bf16(out);
        }
    }
}

/// The mean of the streams `h[hc, dim]` of one position: the fp32 sum, ascending, over hc.
///
/// # Panics
/// If the sizes differ or `out` is not a multiple of 8.
pub fn mean(isa: Isa, h: &[bf16], out: &mut [bf16]) {
    assert!(h.len().is_multiple_of(out.len()) && out.len().is_multiple_of(8), "{} into {}", h.len(), out.len());
    let hc = h.len() / out.len();
    isa.dispatch(Mean { h, hc, out });
}

struct Expand<'a> {
    y: &'a [bf16],
    h: &'a mut [bf16],
    hc: usize,
    mix: &'a Mix,
}

impl Job for Expand<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let dim = self.y.len();
        let (y, _) = self.y.as_chunks::<8>();
        for (i, y) in y.iter().enumerate() {
            let y = V::load_bf16(y);
            let mut streams = [V::splat(0.0); STREAMS_MAX];
            for j in 0..self.hc {
                streams[j] = V::load_bf16(eight(self.h, j * dim + 8 * i));
            }
            for k in 0..self.hc {
                let mut sum = V::splat(0.0);
                for j in 0..self.hc {
                    sum = sum.add(V::splat(self.mix.comb[j][k]).mul(streams[j]));
                }
                let next = V::splat(self.mix.post[k]).mul(y).add(sum);
                let (out, _) = self.h[k * dim + 8 * i..][..8].as_chunks_mut::<8>();
                next.store_bf16(&mut out[0]);
            }
        }
    }
}

/// The streams after a sublayer, in place: `h_k = bf16(post_k · y + Σ_j comb[j][k] · h_j)`, each
/// product and each sum rounded, from +0 over j ascending, the product with y last.
///
/// # Panics
/// If the sizes differ or `y` is not a multiple of 8.
pub fn expand(isa: Isa, y: &[bf16], h: &mut [bf16], mix: &Mix) {
    assert!(y.len().is_multiple_of(8) && h.len().is_multiple_of(y.len()), "{} values, rows of {}", h.len(), y.len());
    let hc = h.len() / y.len();
    assert!(hc <= STREAMS_MAX, "{hc} streams, at most {STREAMS_MAX}");
    isa.dispatch(Expand { y, h, hc, mix });
}
