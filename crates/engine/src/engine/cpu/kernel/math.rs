//! exp, ln, softplus, sigmoid and silu by fixed polynomials: the same bits on every machine.
//!
//! The coefficients and the order of every operation are in `docs/numerics.md`; errors are at most
//! 2 ulp of the true value.

use super::lanes::Lanes;
use super::simd::Real;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
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

/// e^x as (y, a, b): the value is `y · a · b`, where only the last product rounds or overflows.
#[inline(always)]
fn exp_parts<V: Real>(x: V) -> (V, V, V) {
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
    let half = n.mul(V::splat(0.5)).round();
    (y, half.pow2(), n.sub(half).pow2())
}

/// e^x; underflows gradually to 0, overflows to infinity.
#[inline(always)]
pub(crate) fn exp_v<V: Real>(x: V) -> V {
    let (y, a, b) = exp_parts(x);
    y.mul(a).mul(b)
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

/// x / (1 + e^−x); for negative x as x·e^x / (1 + e^x), scaled at the end, so that small results
/// keep their bits.
#[inline(always)]
pub(crate) fn silu_v<V: Real>(x: V) -> V {
    let one = V::splat(1.0);
    let zero = V::splat(0.0);
    let (y, a, b) = exp_parts(zero.sub(x.abs()));
    let z = y.mul(a).mul(b);
    let d = one.add(z);
    let lost = z.sub(d.sub(one));
    let negative = x.lt(zero);
    // Past the bound the exponential is that of the bound; −∞ · 0 would be no number.
    let bounded = V::splat(EXP_MIN).max(x);
    let factor = V::select(negative, y, one);
    let top = V::select(negative, bounded, x);
    let product = top.mul(factor);
    let product_lost = top.fma(factor, zero.sub(product));
    let q = product.div(d);
    // What the product, the quotient and the sum 1 + z lost, folded back in.
    let minus_q = zero.sub(q);
    let rest = minus_q.fma(d, product).add(product_lost);
    let fix = minus_q.fma(lost, rest).div(d);
    let q = V::select(fix.eq(fix), q.add(fix), q);
    q.mul(V::select(negative, a, one)).mul(V::select(negative, b, one))
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

/// x / (1 + e^−x); −0 at −∞.
#[must_use]
pub fn silu(x: f32) -> f32 {
    silu_v(Lanes::one(x)).get()
}

/// 1 / √x, each operation correctly rounded.
#[must_use]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, Job};
    use super::super::simd::Simd;
    use super::*;

    /// Distance of `got` from the true value, in units of the last place of its fp32 rounding.
    fn ulps(got: f32, truth: f64) -> f64 {
        let near = truth as f32;
        if got.to_bits() == near.to_bits() || got.is_nan() && truth.is_nan() {
            return 0.0;
        }
        if !got.is_finite() || !near.is_finite() {
            // Overflow may start one step early or late.
            let bound = |x: f32| x.clamp(f32::MIN, f32::MAX);
            return f64::from(bound(got).to_bits().abs_diff(bound(near).to_bits())) + 0.5;
        }
        let bits = near.abs().to_bits().max(0x0080_0000);
        let ulp = f64::from(f32::from_bits(bits)) - f64::from(f32::from_bits(bits - 1));
        let ulp = if bits & 0x007f_ffff == 0 && bits > 0x0080_0000 { ulp * 2.0 } else { ulp };
        (f64::from(got) - truth).abs() / ulp.max(f64::from(f32::from_bits(1)))
    }

    /// The largest error over every `step`-th bit pattern of both signs.
    fn worst(step: usize, f: fn(f32) -> f32, truth: fn(f64) -> f64) -> (f64, f32) {
        let mut worst = (0.0, 0.0);
        for bits in (0..=0x7f80_0000u32).step_by(step) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let error = ulps(f(x), truth(f64::from(x)));
                if error > worst.0 {
                    worst = (error, x);
                }
            }
        }
        worst
    }

    fn true_softplus(x: f64) -> f64 {
        if x > 20.0 { x } else { x.exp().ln_1p() }
    }

    fn true_sigmoid(x: f64) -> f64 {
        if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) }
    }

    fn true_silu(x: f64) -> f64 {
        x * true_sigmoid(x)
    }

    #[test]
    fn errors_are_at_most_two_ulp_over_the_whole_range() {
        for (name, f, truth) in [
            ("exp", exp as fn(f32) -> f32, f64::exp as fn(f64) -> f64),
            ("ln", ln, f64::ln),
            ("softplus", softplus, true_softplus),
            ("sigmoid", sigmoid, true_sigmoid),
            ("silu", silu, true_silu),
        ] {
            let (error, at) = worst(4_099, f, truth);
            assert!(error <= 2.0, "{name}: {error} ulp at {at}");
        }
    }

    #[test]
    fn exact_and_special_values() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(ln(1.0).to_bits(), 0);
        assert_eq!(ln(0.0), f32::NEG_INFINITY);
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
        assert_eq!(softplus(21.0), 21.0);
        assert_eq!(softplus(f32::INFINITY), f32::INFINITY);
        assert_eq!(softplus(f32::NEG_INFINITY), 0.0);
        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!((sigmoid(f32::INFINITY), sigmoid(f32::NEG_INFINITY)), (1.0, 0.0));
        assert_eq!(silu(f32::INFINITY), f32::INFINITY);
        assert_eq!((silu(0.0), silu(f32::NEG_INFINITY)), (0.0, 0.0));
        assert_eq!(rsqrt(4.0), 0.5);
        for f in [exp, ln, softplus, sigmoid, silu, rsqrt] {
            assert!(f(f32::NAN).is_nan());
        }
        assert!(ln(-1.0).is_nan());
    }

    struct Vector<'a>(usize, &'a mut [f32; 8]);

    impl Job for Vector<'_> {
        type Out = ();

        #[inline(always)]
        fn run<V: Simd>(self) {
            let x = V::load(self.1);
            let y = match self.0 {
                0 => exp_v(x),
                1 => ln_v(x),
                2 => softplus_v(x),
                3 => sigmoid_v(x),
                _ => silu_v(x),
            };
            y.store(self.1);
        }
    }

    #[test]
    fn vectors_have_the_bits_of_single_values() {
        let scalar = [exp, ln, softplus, sigmoid, silu];
        for bits in (0..u32::MAX - 8 * 30_011).step_by(8 * 30_011) {
            let x: [f32; 8] = std::array::from_fn(|i| f32::from_bits(bits + 30_011 * i as u32));
            for (which, f) in scalar.iter().enumerate() {
                for isa in [Isa::PORTABLE, Isa::detect()] {
                    let mut y = x;
                    isa.dispatch(Vector(which, &mut y));
                    for (x, y) in x.iter().zip(y) {
                        let expected = f(*x);
                        let same = y.to_bits() == expected.to_bits() || y.is_nan() && expected.is_nan();
                        assert!(same, "function {which} at {x}: {y} and {expected}");
                    }
                }
            }
        }
    }
}
