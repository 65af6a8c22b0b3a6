//! Activation quantization: groups of values share a power-of-two scale.
//!
//! These are part of the model, not a lossy shortcut of this engine. All of it is exact arithmetic
//! but for the one rounding to the code.

use half::bf16;

use super::isa::{Isa, Job};
use super::simd::Simd;
use crate::model::format::{E2M1_MAX, E4M3_MAX, e8m0_decode, pow2ceil};

/// Values to a scale in front of a linear layer.
pub const LINEAR_GROUP: usize = 128;
/// Values to a scale in a key or value row.
pub const KV_GROUP: usize = 64;
/// Values to a scale of FP4 activations.
pub const FP4_GROUP: usize = 32;

/// Codes are held times 2^8: the vector decoders give weights times 2^-8.
const SCALED: f32 = 256.0;
/// No group's largest value counts as smaller than this.
const AMAX_MIN: f32 = 1e-4;
/// The same for FP4: 6 · 2^-126.
const AMAX_MIN_FP4: f32 = 6.0 * f32::MIN_POSITIVE;

/// Rows quantized to E4M3 codes with a scale per 128 values; a buffer to use again and again.
#[derive(Debug, Clone, Default)]
pub struct QuantRows {
    k: usize,
    rows: usize,
    /// Code values times 2^8, `[rows, k]`: exact, and so are their products with weight codes.
    codes: Vec<f32>,
    /// `[rows, k/128]`.
    scales: Vec<f32>,
}

impl QuantRows {
    /// An empty buffer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Values to a row.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Rows held.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The value of one code.
    #[must_use]
    pub fn code(&self, row: usize, index: usize) -> f32 {
        self.codes[row * self.k + index] / SCALED
    }

    /// The scale of one group of 128.
    #[must_use]
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales[row * (self.k / LINEAR_GROUP) + group]
    }

    /// Codes times 2^8.
    pub(super) fn codes(&self) -> &[f32] {
        &self.codes
    }

    /// All scales.
    pub(super) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Quantizes rows of `k` bf16 values, replacing what was held.
    ///
    /// A NaN keeps its place as a NaN code; an infinity makes its group NaN.
    ///
    /// # Panics
    /// If `k` is not a positive multiple of 128 or `x` is not whole rows.
    pub fn quantize(&mut self, isa: Isa, x: &[bf16], k: usize) {
        assert!(k > 0 && k.is_multiple_of(LINEAR_GROUP), "rows of {k} values in groups of {LINEAR_GROUP}");
        assert!(x.len().is_multiple_of(k), "{} values in rows of {k}", x.len());
        self.k = k;
        self.rows = x.len() / k;
        self.codes.resize(x.len(), 0.0);
        self.scales.resize(x.len() / LINEAR_GROUP, 0.0);
        isa.dispatch(Quantize { x, codes: &mut self.codes, scales: &mut self.scales });
    }

    /// Takes some rows of another buffer, in the order given.
    ///
    /// # Panics
    /// If a row does not exist.
    pub fn gather(&mut self, from: &Self, rows: &[usize]) {
        let groups = from.k / LINEAR_GROUP;
        self.k = from.k;
        self.rows = rows.len();
        self.codes.clear();
        self.scales.clear();
        for &row in rows {
            self.codes.extend_from_slice(&from.codes[row * from.k..][..from.k]);
            self.scales.extend_from_slice(&from.scales[row * groups..][..groups]);
        }
    }
}

/// Quantizes groups of `group` values to E4M3 and writes back `bf16(code · scale)`.
///
/// # Panics
/// If `group` is not a positive multiple of 8 or `x` is not whole groups.
pub fn act_quant_in_place(isa: Isa, x: &mut [bf16], group: usize) {
    assert!(group > 0 && group.is_multiple_of(8) && x.len().is_multiple_of(group), "{} by {group}", x.len());
    isa.dispatch(InPlace { x, group, kind: E4M3_KIND });
}

/// Quantizes groups of 32 values to E2M1 and writes back `bf16(code · scale)`.
///
/// # Panics
/// If `x` is not whole groups.
pub fn fp4_act_quant_in_place(isa: Isa, x: &mut [bf16]) {
    assert!(x.len().is_multiple_of(FP4_GROUP), "{} values in groups of {FP4_GROUP}", x.len());
    isa.dispatch(InPlace { x, group: FP4_GROUP, kind: E2M1_KIND });
}

/// What a code can say.
#[derive(Clone, Copy)]
struct Kind {
    /// Smallest "largest value" of a group.
    amax_min: f32,
    /// Largest code value, and its inverse.
    max: f32,
    inverse: f32,
    /// The power of two from which on steps grow with the value.
    normal: f32,
    /// 2^`up` times a value's power of two is the number whose ulp is the value's step.
    up: u32,
}

const E4M3_KIND: Kind = Kind { amax_min: AMAX_MIN, max: E4M3_MAX, inverse: 1.0 / E4M3_MAX, normal: 1.0 / 64.0, up: 20 };
const E2M1_KIND: Kind = Kind { amax_min: AMAX_MIN_FP4, max: E2M1_MAX, inverse: 1.0 / E2M1_MAX, normal: 1.0, up: 22 };

/// The scale of a group.
#[inline(always)]
fn scale_of<V: Simd>(group: &[[bf16; 8]], kind: Kind) -> f32 {
    let mut largest = V::splat(kind.amax_min);
    for eight in group {
        largest = V::load_bf16(eight).abs().max(largest);
    }
    let mut lanes = [0.0; 8];
    largest.store(&mut lanes);
    let mut amax = lanes[0];
    for &lane in &lanes[1..] {
        amax = if lane > amax { lane } else { amax };
    }
    e8m0_decode(pow2ceil(amax * kind.inverse))
}

/// Codes of `x / scale`, times `by`; `step` is 1/scale times `by`, a power of two like `by`.
#[inline(always)]
fn codes<V: Simd>(x: V, step: f32, kind: Kind, by: f32) -> V {
    let limit = kind.max * by;
    let t = x.mul(V::splat(step));
    // The bound comes first, so that a NaN passes.
    let t = V::splat(limit).min(V::splat(-limit).max(t));
    let magnitude = t.abs();
    let ruler = magnitude.quantum(kind.normal * by, kind.up);
    magnitude.add(ruler).sub(ruler).with_sign(t)
}

struct Quantize<'a> {
    x: &'a [bf16],
    codes: &'a mut [f32],
    scales: &'a mut [f32],
}

impl Job for Quantize<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (x, _) = self.x.as_chunks::<8>();
        let (out, _) = self.codes.as_chunks_mut::<8>();
        let groups = x.chunks_exact(LINEAR_GROUP / 8).zip(out.chunks_exact_mut(LINEAR_GROUP / 8));
        for ((group, codes_out), scale) in groups.zip(self.scales) {
            *scale = scale_of::<V>(group, E4M3_KIND);
            let step = SCALED / *scale;
            for (eight, out) in group.iter().zip(codes_out) {
                codes(V::load_bf16(eight), step, E4M3_KIND, SCALED).store(out);
            }
        }
    }
}

struct InPlace<'a> {
    x: &'a mut [bf16],
    group: usize,
    kind: Kind,
}

impl Job for InPlace<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (x, _) = self.x.as_chunks_mut::<8>();
        for group in x.chunks_exact_mut(self.group / 8) {
            let scale = scale_of::<V>(group, self.kind);
            for eight in group {
                let mut x = V::load_bf16(eight);
                if self.kind.max < E4M3_MAX {
                    // The FP4 quantizer takes −0 for +0; smaller magnitudes keep their sign.
                    x = x.add(V::splat(0.0));
                }
                let q = codes(x, 1.0 / scale, self.kind, 1.0);
                q.mul(V::splat(scale)).store_bf16(eight);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::kernel::golden::Golden;
    use crate::model::format::{e2m1_encode, e4m3_encode};

    fn both() -> [Isa; 2] {
        [Isa::PORTABLE, Isa::detect()]
    }

    #[test]
    fn act_quant_matches_the_official_codes_and_scales() {
        let golden = Golden::ops();
        let (x, q, s) =
            (golden.bf16("act_quant128.x"), golden.u8("act_quant128.q_bytes"), golden.u8("act_quant128.scale_bytes"));
        for isa in both() {
            let mut rows = QuantRows::new();
            rows.quantize(isa, &x, 256);
            for (i, &code) in q.iter().enumerate() {
                let got = e4m3_encode(rows.code(i / 256, i % 256));
                assert_eq!(got, code, "row {} value {}", i / 256, i % 256);
            }
            for (i, &scale) in s.iter().enumerate() {
                assert_eq!(rows.scale(i / 2, i % 2).to_bits(), e8m0_decode(scale).to_bits(), "scale {i}");
            }
        }
    }

    #[test]
    fn act_quant_in_place_matches_the_official_bits() {
        let golden = Golden::ops();
        for isa in both() {
            let mut x = golden.bf16("act_quant64_inplace.x");
            act_quant_in_place(isa, &mut x, KV_GROUP);
            assert!(bits(&x) == bits(&golden.bf16("act_quant64_inplace.y")));
        }
    }

    #[test]
    fn fp4_act_quant_matches_the_official_bits_and_codes() {
        let golden = Golden::ops();
        let (packed, scales) = (golden.u8("fp4_act_quant32.packed_bytes"), golden.u8("fp4_act_quant32.scale_bytes"));
        for isa in both() {
            let mut x = golden.bf16("fp4_act_quant32_inplace.x");
            fp4_act_quant_in_place(isa, &mut x);
            assert!(bits(&x) == bits(&golden.bf16("fp4_act_quant32_inplace.y")));
            // 4 · 2^126 overflows in the write-back, so that one value says no code.
            for (i, &value) in x.iter().enumerate().filter(|(_, v)| v.is_finite()) {
                let code = e2m1_encode(value.to_f32() / e8m0_decode(scales[i / FP4_GROUP])).unwrap();
                assert_eq!(code, packed[i / 2] >> (4 * (i % 2)) & 15, "value {i}");
            }
        }
    }

    #[test]
    fn a_nan_stays_in_place_and_an_infinity_spoils_its_group() {
        for isa in both() {
            let mut x = vec![bf16::ONE; 256];
            x[3] = bf16::NAN;
            x[200] = bf16::INFINITY;
            let mut rows = QuantRows::new();
            rows.quantize(isa, &x, 256);
            assert!(rows.code(0, 3).is_nan() && !rows.code(0, 4).is_nan());
            assert!(!rows.scale(0, 0).is_nan() && rows.scale(0, 1).is_nan());
        }
    }

    #[test]
    fn gathered_rows_are_the_rows() {
        let x: Vec<bf16> = (0..384).map(|i| bf16::from_f32(i as f32)).collect();
        let (mut rows, mut some) = (QuantRows::new(), QuantRows::new());
        rows.quantize(Isa::detect(), &x, 128);
        some.gather(&rows, &[2, 0]);
        assert_eq!((some.rows(), some.k()), (2, 128));
        assert_eq!((some.code(0, 5), some.scale(1, 0)), (rows.code(2, 5), rows.scale(0, 0)));
    }

    fn bits(x: &[bf16]) -> Vec<u16> {
        x.iter().map(|v| v.to_bits()).collect()
    }
}
