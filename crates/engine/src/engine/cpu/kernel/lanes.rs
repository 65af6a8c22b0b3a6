//! Lanes as an array: the implementation that runs everywhere, and single values as one lane.

use half::bf16;

use super::simd::{Real, Simd, unpacked_place};
use crate::model::format::{E2M1_SCALED, E4M3_SCALED, e4m3_encode};

/// `N` fp32 lanes.
#[derive(Clone, Copy)]
pub(super) struct Lanes<const N: usize>([f32; N]);

impl Lanes<1> {
    /// One value as one lane.
    #[inline(always)]
    pub(super) fn one(x: f32) -> Self {
        Self([x])
    }

    /// The value.
    #[inline(always)]
    pub(super) fn get(self) -> f32 {
        self.0[0]
    }
}

/// Applies an expression to every lane; a plain loop, which the compiler turns into vectors.
macro_rules! each {
    ($n:ident, $i:ident, $e:expr) => {{
        let mut out = [0.0; $n];
        for $i in 0..$n {
            out[$i] = $e;
        }
        Lanes(out)
    }};
}

impl<const N: usize> Real for Lanes<N> {
    type Mask = [bool; N];

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; N])
    }

    #[inline(always)]
    fn add(self, o: Self) -> Self {
        each!(N, i, self.0[i] + o.0[i])
    }

    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        each!(N, i, self.0[i] - o.0[i])
    }

    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        each!(N, i, self.0[i] * o.0[i])
    }

    #[inline(always)]
    fn div(self, o: Self) -> Self {
        each!(N, i, self.0[i] / o.0[i])
    }

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        each!(N, i, self.0[i].mul_add(b.0[i], c.0[i]))
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        each!(N, i, self.0[i].sqrt())
    }

    #[inline(always)]
    fn max(self, o: Self) -> Self {
        each!(N, i, if self.0[i] > o.0[i] { self.0[i] } else { o.0[i] })
    }

    #[inline(always)]
    fn min(self, o: Self) -> Self {
        each!(N, i, if self.0[i] < o.0[i] { self.0[i] } else { o.0[i] })
    }

    #[inline(always)]
    fn abs(self) -> Self {
        each!(N, i, self.0[i].abs())
    }

    #[inline(always)]
    fn with_sign(self, sign: Self) -> Self {
        each!(N, i, self.0[i].copysign(sign.0[i]))
    }

    #[inline(always)]
    fn round(self) -> Self {
        each!(N, i, self.0[i].round_ties_even())
    }

    #[inline(always)]
    fn pow2(self) -> Self {
        each!(N, i, f32::from_bits(((self.0[i] as i32).wrapping_add(127) as u32) << 23))
    }

    #[inline(always)]
    fn quantum(self, floor: f32, up: u32) -> Self {
        each!(N, i, {
            let power = (self.0[i].to_bits() & 0x7f80_0000).max(floor.to_bits());
            f32::from_bits(power.wrapping_add(up << 23))
        })
    }

    #[inline(always)]
    fn split(self) -> (Self, Self) {
        let m = each!(N, i, f32::from_bits(self.0[i].to_bits() & 0x007f_ffff | 0x3f80_0000));
        let k = each!(N, i, ((self.0[i].to_bits() >> 23) as i32 - 127) as f32);
        (m, k)
    }

    #[inline(always)]
    fn round_bf16(self) -> Self {
        each!(N, i, f32::from_bits(u32::from(bf16_bits(self.0[i])) << 16))
    }

    #[inline(always)]
    fn lt(self, o: Self) -> Self::Mask {
        let mut mask = [false; N];
        for i in 0..N {
            mask[i] = self.0[i] < o.0[i];
        }
        mask
    }

    #[inline(always)]
    #[allow(clippy::float_cmp, reason = "an exact comparison is the operation")]
    fn eq(self, o: Self) -> Self::Mask {
        let mut mask = [false; N];
        for i in 0..N {
            mask[i] = self.0[i] == o.0[i];
        }
        mask
    }

    #[inline(always)]
    fn select(mask: Self::Mask, a: Self, b: Self) -> Self {
        each!(N, i, if mask[i] { a.0[i] } else { b.0[i] })
    }
}

/// Bits of `x` rounded to bf16: nearest, ties to even, NaN quieted.
#[inline(always)]
pub(super) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded as u16 }
}

impl Simd for Lanes<8> {
    #[inline(always)]
    fn load(x: &[f32; 8]) -> Self {
        Self(*x)
    }

    #[inline(always)]
    fn store(self, out: &mut [f32; 8]) {
        *out = self.0;
    }

    #[inline(always)]
    fn load_bf16(x: &[bf16; 8]) -> Self {
        let mut out = [0.0; 8];
        for i in 0..8 {
            out[i] = f32::from_bits(u32::from(x[i].to_bits()) << 16);
        }
        Self(out)
    }

    #[inline(always)]
    fn store_bf16(self, out: &mut [bf16; 8]) {
        for i in 0..8 {
            out[i] = bf16::from_bits(bf16_bits(self.0[i]));
        }
    }

    #[inline(always)]
    fn load_pairs(x: &[bf16; 16]) -> [Self; 2] {
        let mut out = [[0.0; 8]; 2];
        for i in 0..8 {
            out[0][i] = f32::from_bits(u32::from(x[2 * i].to_bits()) << 16);
            out[1][i] = f32::from_bits(u32::from(x[2 * i + 1].to_bits()) << 16);
        }
        [Self(out[0]), Self(out[1])]
    }

    #[inline(always)]
    fn store_pairs(pairs: [Self; 2], out: &mut [bf16; 16]) {
        for i in 0..8 {
            out[2 * i] = bf16::from_bits(bf16_bits(pairs[0].0[i]));
            out[2 * i + 1] = bf16::from_bits(bf16_bits(pairs[1].0[i]));
        }
    }

    #[inline(always)]
    fn load_e4m3(codes: &[u8; 16]) -> [Self; 2] {
        let mut out = [[0.0; 8]; 2];
        for i in 0..16 {
            out[i / 8][i % 8] = E4M3_SCALED[usize::from(codes[i])];
        }
        [Self(out[0]), Self(out[1])]
    }

    #[inline(always)]
    fn load_swapped<const PLAIN: bool>(codes: &[u8; 32]) -> [Self; 4] {
        let mut out = [Self([0.0; 8]); 4];
        for e in 0..2 {
            for r in 0..16 {
                let code = codes[unpacked_place(e, r)].rotate_left(4);
                out[2 * e + r / 8].0[r % 8] = E4M3_SCALED[usize::from(code)];
            }
        }
        out
    }

    #[inline(always)]
    fn store_e4m3(self, codes: &mut [u8; 8]) {
        for i in 0..8 {
            codes[i] = e4m3_encode(self.0[i] * 256.0);
        }
    }

    #[inline(always)]
    fn load_e2m1(pairs: &[u8; 32]) -> [Self; 8] {
        let mut out = [Self([0.0; 8]); 8];
        for p in 0..2 {
            for r in 0..16 {
                let pair = pairs[unpacked_place(p, r)];
                out[4 * p + r / 8].0[r % 8] = E2M1_SCALED[usize::from(pair & 15)];
                out[4 * p + 2 + r / 8].0[r % 8] = E2M1_SCALED[usize::from(pair >> 4)];
            }
        }
        out
    }

    #[inline(always)]
    fn load_bf16_pairs(pairs: &[u32; 8]) -> [Self; 2] {
        let mut out = [[0.0; 8]; 2];
        for i in 0..8 {
            out[0][i] = f32::from_bits(pairs[i] << 16);
            out[1][i] = f32::from_bits(pairs[i] & 0xffff_0000);
        }
        [Self(out[0]), Self(out[1])]
    }

    #[inline(always)]
    fn load_e8m0(codes: &[u8; 8]) -> Self {
        let mut out = [0.0; 8];
        for i in 0..8 {
            out[i] = f32::from_bits((u32::from(codes[i]) << 23).max(0x0040_0000));
        }
        Self(out)
    }

    #[inline(always)]
    fn transpose(rows: [Self; 8]) -> [Self; 8] {
        let mut out = [Self([0.0; 8]); 8];
        for i in 0..8 {
            for j in 0..8 {
                out[i].0[j] = rows[j].0[i];
            }
        }
        out
    }

    #[inline(always)]
    fn load_runs4(x: &[f32; 32]) -> [Self; 4] {
        let mut out = [Self([0.0; 8]); 4];
        for i in 0..32 {
            out[i % 4].0[i / 4] = x[i];
        }
        out
    }
}
