//! exp, ln, softplus, sigmoid and silu by fixed polynomials: the same bits on every machine.
//!
//! The coefficients and the order of every operation are in `docs/numerics.md`; errors are at most
//! 2 ulp of the true value.

use super::lanes::Lanes;
use super::simd::Real;

const LOG2_E: f32 = 1.442_695;
/// ln 2 cut to 15 bits, so that its products with exponents are exact.
const LN2_HIGH: f32 = 0.693_145_75;
/// The rest of ln 2.
const LN2_LOW: f32 = 1.428_606_8e-6;
/// Below it exp is 0, above [`EXP_MAX`] infinite.
const EXP_MIN: f32 = -110.0;
const EXP_MAX: f32 = 95.0;
/// (e^r − 1 − r) / r² on |r| ≤ ln 2 / 2, by powers of r.
const EXP: [f32; 6] = [0.5, 0.166_666_67, 0.041_666_467, 0.008_333_310_5, 0.001_393_365, 0.000_198_909_91];
/// (ln(1+f) − f + f²/2) / f³ on √½ − 1 ≤ f < √2 − 1, by powers of f.
const LN: [f32; 9] = [
    0.333_333_3,
    -0.249_999_97,
    0.200_007_16,
    -0.166_678_02,
    0.142_490_58,
    -0.124_256_87,
    0.116_854_2,
    -0.114_797_34,
    0.069_716_12,
];
const SQRT_2: f32 = std::f32::consts::SQRT_2;
/// Above it softplus(x) is x.
const SOFTPLUS_LINEAR: f32 = 20.0;

/// e^x; underflows gradually to 0, overflows to infinity.
#[inline(always)]
pub(crate) fn exp_v<V: Real>(x: V) -> V {
    // The bound comes first, so that a NaN passes.
    let x = V::splat(EXP_MAX).min(V::splat(EXP_MIN).max(x));
    let n = x.mul(V::splat(LOG2_E)).round();
    let high = n.fma(V::splat(-LN2_HIGH), x);
    let r = n.fma(V::splat(-LN2_LOW), high);
    let tail = n.fma(V::splat(-LN2_LOW), high.sub(r));
    let mut p = V::splat(EXP[5]);
    p = p.fma(r, V::splat(EXP[4]));
    p = p.fma(r, V::splat(EXP[3]));
    p = p.fma(r, V::splat(EXP[2]));
    p = p.fma(r, V::splat(EXP[1]));
    p = p.fma(r, V::splat(EXP[0]));
    let y = V::splat(1.0).add(r.add(p.fma(r.mul(r), tail)));
    // Two factors, so that only the last product rounds or overflows.
    let half = n.mul(V::splat(0.5)).round();
    y.mul(half.pow2()).mul(n.sub(half).pow2())
}

/// `k·ln 2 + ln(1+f) + c` for f in [√½ − 1, √2 − 1) and a small correction c.
#[inline(always)]
fn ln_parts<V: Real>(k: V, f: V, c: V) -> V {
    let z = f.mul(f);
    let mut p = V::splat(LN[8]);
    p = p.fma(f, V::splat(LN[7]));
    p = p.fma(f, V::splat(LN[6]));
    p = p.fma(f, V::splat(LN[5]));
    p = p.fma(f, V::splat(LN[4]));
    p = p.fma(f, V::splat(LN[3]));
    p = p.fma(f, V::splat(LN[2]));
    p = p.fma(f, V::splat(LN[1]));
    p = p.fma(f, V::splat(LN[0]));
    let small = p.fma(f.mul(z), z.mul(V::splat(-0.5)));
    let low = k.fma(V::splat(LN2_LOW), c);
    k.fma(V::splat(LN2_HIGH), f.add(small.add(low)))
}

/// Splits a positive normal into (k, m) with m in [√½, √2).
#[inline(always)]
fn split_near_one<V: Real>(x: V) -> (V, V) {
    let (m, k) = x.split();
    let low = m.lt(V::splat(SQRT_2));
    (V::select(low, k, k.add(V::splat(1.0))), V::select(low, m, m.mul(V::splat(0.5))))
}

/// The natural logarithm: −∞ at 0, NaN below.
#[inline(always)]
pub(crate) fn ln_v<V: Real>(x: V) -> V {
    let tiny = x.lt(V::splat(f32::MIN_POSITIVE));
    let scaled = V::select(tiny, x.mul(V::splat(8_388_608.0)), x);
    let (k, m) = split_near_one(scaled);
    let k = V::select(tiny, k.sub(V::splat(23.0)), k);
    let y = ln_parts(k, m.sub(V::splat(1.0)), V::splat(0.0));
    let y = V::select(x.lt(V::splat(f32::INFINITY)), y, x);
    let y = V::select(x.eq(V::splat(0.0)), V::splat(f32::NEG_INFINITY), y);
    V::select(x.lt(V::splat(0.0)), V::splat(f32::NAN), y)
}

/// ln(1 + e^x), and x itself above 20.
#[inline(always)]
pub(crate) fn softplus_v<V: Real>(x: V) -> V {
    let one = V::splat(1.0);
    let e = exp_v(x);
    let d = one.add(e);
    // What the sum lost, exactly.
    let lost = V::select(e.lt(one), e.sub(d.sub(one)), one.sub(d.sub(e)));
    let (k, m) = split_near_one(d);
    let near = d.lt(V::splat(SQRT_2));
    let f = V::select(near, e, m.sub(one));
    let c = V::select(near, V::splat(0.0), lost.div(d));
    V::select(V::splat(SOFTPLUS_LINEAR).lt(x), x, ln_parts(k, f, c))
}

/// 1 / (1 + e^−x).
#[inline(always)]
pub(crate) fn sigmoid_v<V: Real>(x: V) -> V {
    let one = V::splat(1.0);
    let zero = V::splat(0.0);
    let z = exp_v(zero.sub(x.abs()));
    let d = one.add(z);
    let lost = z.sub(d.sub(one));
    let negative = x.lt(zero);
    let q = V::select(negative, z, one).div(d);
    // 1 / d is q itself, or 1 − q where q = z / d.
    let inverse = V::select(negative, one.sub(q), q);
    zero.sub(q.mul(lost)).fma(inverse, q)
}

/// x / (1 + e^−x); NaN at −∞.
#[inline(always)]
pub(crate) fn silu_v<V: Real>(x: V) -> V {
    let one = V::splat(1.0);
    let zero = V::splat(0.0);
    let z = exp_v(zero.sub(x.abs()));
    let d = one.add(z);
    let lost = z.sub(d.sub(one));
    let q = V::select(x.lt(zero), x.mul(z), x).div(d);
    let t = lost.div(d);
    V::select(t.eq(zero), q, zero.sub(q).fma(t, q))
}

/// e^x.
#[must_use]
pub fn exp(x: f32) -> f32 {
    exp_v(Lanes::one(x)).get()
}

/// The natural logarithm.
#[must_use]
pub fn ln(x: f32) -> f32 {
    ln_v(Lanes::one(x)).get()
}

/// ln(1 + e^x), and x itself above 20.
#[must_use]
pub fn softplus(x: f32) -> f32 {
    softplus_v(Lanes::one(x)).get()
}

/// 1 / (1 + e^−x).
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    sigmoid_v(Lanes::one(x)).get()
}

/// x / (1 + e^−x).
#[must_use]
pub fn silu(x: f32) -> f32 {
    silu_v(Lanes::one(x)).get()
}

/// 1 / √x, each operation correctly rounded.
#[must_use]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}
