//! Eight lanes in one AVX2 register, with FMA and F16C.
//!
//! Owns all `unsafe` of the vector code. Its one precondition, the processor has AVX2, FMA and
//! F16C, holds because the lanes' type is private and only named under [`run`].

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_EQ_OQ, _CMP_LT_OQ, _CMP_UNORD_Q, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _mm_and_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_or_si128, _mm_packus_epi16, _mm_set1_epi16, _mm_setr_epi8,
    _mm_srli_epi16, _mm_storel_epi64, _mm_storeu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps,
    _mm256_and_si256, _mm256_andnot_ps, _mm256_andnot_si256, _mm256_blendv_epi8, _mm256_blendv_ps,
    _mm256_broadcastsi128_si256, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps,
    _mm256_cmpeq_epi8, _mm256_cvtepi8_epi16, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_cvtps_ph, _mm256_div_ps, _mm256_extracti128_si256, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_epi32, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_or_ps,
    _mm256_or_si256, _mm256_packus_epi32, _mm256_permute2f128_ps, _mm256_permute4x64_epi64, _mm256_round_ps,
    _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_si256, _mm256_shuffle_epi8,
    _mm256_shuffle_ps, _mm256_slli_epi16, _mm256_slli_epi32, _mm256_sqrt_ps, _mm256_srli_epi16, _mm256_srli_epi32,
    _mm256_storeu_ps, _mm256_storeu_si256, _mm256_sub_epi32, _mm256_sub_ps, _mm256_unpackhi_epi8,
    _mm256_unpackhi_epi16, _mm256_unpackhi_ps, _mm256_unpacklo_epi8, _mm256_unpacklo_epi16, _mm256_unpacklo_ps,
};

use half::bf16;

use super::isa::{Isa, Job};
use super::simd::{Real, Simd};

/// Runs an operation over AVX2 lanes.
///
/// # Panics
/// If `isa` was not detected to have them, which no caller does.
#[inline]
pub(super) fn run<J: Job>(isa: Isa, job: J) -> J::Out {
    assert!(isa.has_avx2(), "AVX2 lanes were asked of {isa:?}");
    // SAFETY: the value is only made where the processor was asked and has AVX2, FMA and F16C.
    unsafe { compiled(job) }
}

/// The job's body, compiled with the instructions.
#[target_feature(enable = "avx2,fma,f16c")]
fn compiled<J: Job>(job: J) -> J::Out {
    job.run::<Avx2>()
}

/// Eight fp32 lanes in a register.
#[derive(Clone, Copy)]
struct Avx2(__m256);

/// One call of a function that needs the instructions.
macro_rules! wide {
    ($call:expr) => {{
        // SAFETY: this type is private and named only in `compiled`, which runs under `run`'s check.
        unsafe { $call }
    }};
}

impl Real for Avx2 {
    type Mask = __m256;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self(wide!(_mm256_set1_ps(x)))
    }

    #[inline(always)]
    fn add(self, o: Self) -> Self {
        Self(wide!(_mm256_add_ps(self.0, o.0)))
    }

    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        Self(wide!(_mm256_sub_ps(self.0, o.0)))
    }

    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        Self(wide!(_mm256_mul_ps(self.0, o.0)))
    }

    #[inline(always)]
    fn div(self, o: Self) -> Self {
        Self(wide!(_mm256_div_ps(self.0, o.0)))
    }

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Self(wide!(_mm256_fmadd_ps(self.0, b.0, c.0)))
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        Self(wide!(_mm256_sqrt_ps(self.0)))
    }

    #[inline(always)]
    fn max(self, o: Self) -> Self {
        Self(wide!(_mm256_max_ps(self.0, o.0)))
    }

    #[inline(always)]
    fn min(self, o: Self) -> Self {
        Self(wide!(_mm256_min_ps(self.0, o.0)))
    }

    #[inline(always)]
    fn abs(self) -> Self {
        Self(wide!(abs(self.0)))
    }

    #[inline(always)]
    fn with_sign(self, sign: Self) -> Self {
        Self(wide!(with_sign(self.0, sign.0)))
    }

    #[inline(always)]
    fn round(self) -> Self {
        Self(wide!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)))
    }

    #[inline(always)]
    fn pow2(self) -> Self {
        Self(wide!(pow2(self.0)))
    }

    #[inline(always)]
    fn quantum(self, floor: f32, up: u32) -> Self {
        Self(wide!(quantum(self.0, floor, up)))
    }

    #[inline(always)]
    fn split(self) -> (Self, Self) {
        let (m, k) = wide!(split(self.0));
        (Self(m), Self(k))
    }

    #[inline(always)]
    fn round_bf16(self) -> Self {
        Self(wide!(round_bf16(self.0)))
    }

    #[inline(always)]
    fn lt(self, o: Self) -> __m256 {
        wide!(_mm256_cmp_ps::<_CMP_LT_OQ>(self.0, o.0))
    }

    #[inline(always)]
    fn eq(self, o: Self) -> __m256 {
        wide!(_mm256_cmp_ps::<_CMP_EQ_OQ>(self.0, o.0))
    }

    #[inline(always)]
    fn select(mask: __m256, a: Self, b: Self) -> Self {
        Self(wide!(_mm256_blendv_ps(b.0, a.0, mask)))
    }
}

impl Simd for Avx2 {
    #[inline(always)]
    fn load(x: &[f32; 8]) -> Self {
        // SAFETY: eight readable values, and the instructions are there (see `wide!`).
        Self(unsafe { _mm256_loadu_ps(x.as_ptr()) })
    }

    #[inline(always)]
    fn store(self, out: &mut [f32; 8]) {
        // SAFETY: eight writable values, and the instructions are there (see `wide!`).
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn load_bf16(x: &[bf16; 8]) -> Self {
        Self(wide!(load_bf16(x)))
    }

    #[inline(always)]
    fn store_bf16(self, out: &mut [bf16; 8]) {
        wide!(store_bf16(self.0, out));
    }

    #[inline(always)]
    fn load_pairs(x: &[bf16; 16]) -> [Self; 2] {
        let [a, b] = wide!(load_pairs(x));
        [Self(a), Self(b)]
    }

    #[inline(always)]
    fn store_pairs(pairs: [Self; 2], out: &mut [bf16; 16]) {
        wide!(store_pairs(pairs[0].0, pairs[1].0, out));
    }

    #[inline(always)]
    fn load_e4m3(codes: &[u8; 16]) -> [Self; 2] {
        let [a, b] = wide!(load_e4m3(codes));
        [Self(a), Self(b)]
    }

    #[inline(always)]
    fn load_swapped<const PLAIN: bool>(codes: &[u8; 32]) -> [Self; 4] {
        wide!(load_swapped::<PLAIN>(codes))
    }

    #[inline(always)]
    fn store_e4m3(self, codes: &mut [u8; 8]) {
        wide!(store_e4m3(self.0, codes));
    }

    #[inline(always)]
    fn load_e2m1(pairs: &[u8; 32]) -> [Self; 8] {
        wide!(load_e2m1(pairs))
    }

    #[inline(always)]
    fn load_bf16_pairs(pairs: &[u32; 8]) -> [Self; 2] {
        let [a, b] = wide!(load_bf16_pairs(pairs));
        [Self(a), Self(b)]
    }

    #[inline(always)]
    fn load_e8m0(codes: &[u8; 8]) -> Self {
        Self(wide!(load_e8m0(codes)))
    }

    #[inline(always)]
    fn transpose(r: [Self; 8]) -> [Self; 8] {
        wide!(transpose(r))
    }

    #[inline(always)]
    fn load_runs4(x: &[f32; 32]) -> [Self; 4] {
        wide!(load_runs4(x))
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn abs(x: __m256) -> __m256 {
    _mm256_andnot_ps(_mm256_set1_ps(-0.0), x)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_sign(x: __m256, sign: __m256) -> __m256 {
    let bit = _mm256_set1_ps(-0.0);
    _mm256_or_ps(_mm256_andnot_ps(bit, x), _mm256_and_ps(bit, sign))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pow2(n: __m256) -> __m256 {
    let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantum(x: __m256, floor: f32, up: u32) -> __m256 {
    let power = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7f80_0000));
    let power = _mm256_max_epi32(power, _mm256_set1_epi32(floor.to_bits() as i32));
    _mm256_castsi256_ps(_mm256_add_epi32(power, _mm256_set1_epi32((up << 23) as i32)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn split(x: __m256) -> (__m256, __m256) {
    let bits = _mm256_castps_si256(x);
    let mantissa = _mm256_and_si256(bits, _mm256_set1_epi32(0x007f_ffff));
    let m = _mm256_or_si256(mantissa, _mm256_set1_epi32(0x3f80_0000));
    let k = _mm256_sub_epi32(_mm256_srli_epi32::<23>(bits), _mm256_set1_epi32(127));
    (_mm256_castsi256_ps(m), _mm256_cvtepi32_ps(k))
}

/// The bits of bf16 values, each in the low half of its lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn bf16_halves(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let high = _mm256_srli_epi32::<16>(bits);
    let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    let rounded = _mm256_srli_epi32::<16>(rounded);
    let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
    _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn round_bf16(x: __m256) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bf16_halves(x)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_bf16(x: &[bf16; 8]) -> __m256 {
    // SAFETY: sixteen readable bytes; the load takes any alignment.
    let halves = unsafe { _mm_loadu_si128(x.as_ptr().cast::<__m128i>()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_bf16(x: __m256, out: &mut [bf16; 8]) {
    let halves = bf16_halves(x);
    let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(halves, halves));
    let packed = _mm256_castsi256_si128(packed);
    // SAFETY: sixteen writable bytes; the store takes any alignment.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast::<__m128i>(), packed) }
}

/// First and second values of eight pairs held in 32-bit words.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpair(words: __m256i) -> [__m256; 2] {
    let second = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(second)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_pairs(x: &[bf16; 16]) -> [__m256; 2] {
    // SAFETY: 32 readable bytes; the load takes any alignment.
    let words = unsafe { _mm256_loadu_si256(x.as_ptr().cast::<__m256i>()) };
    unpair(words)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_pairs(first: __m256, second: __m256, out: &mut [bf16; 16]) {
    let words = _mm256_or_si256(bf16_halves(first), _mm256_slli_epi32::<16>(bf16_halves(second)));
    // SAFETY: 32 writable bytes; the store takes any alignment.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast::<__m256i>(), words) }
}

/// E4M3 to half precision by moving the bits: exponent and mantissa land in the half's fields, and
/// the two biases differ by 8. Subnormal codes become subnormal halves, which convert at full speed.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_e4m3(codes: &[u8; 16]) -> [__m256; 2] {
    // SAFETY: sixteen readable bytes; the load takes any alignment.
    let bytes = unsafe { _mm_loadu_si128(codes.as_ptr().cast::<__m128i>()) };
    // The sign comes twice, at bits 15 and 14; the mask drops the second.
    let halves = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(bytes));
    let halves = _mm256_and_si256(halves, _mm256_set1_epi16(0xbf80_u16 as i16));
    [_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))]
}

/// Swapped E4M3 codes to bf16 by bytes: the low four bits (sign and upper exponent) give the high
/// byte by a table, the high four (last exponent bit and mantissa) are the low byte. Below 2^-5
/// codes are multiples of 2^-9, and both bytes come from tables by the high four bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_swapped<const PLAIN: bool>(codes: &[u8; 32]) -> [Avx2; 4] {
    // SAFETY: 32 readable bytes; the load takes any alignment.
    let bytes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast::<__m256i>()) };
    let nibble = _mm256_set1_epi8(15);
    let table = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0x38, 0x39, 0x3a, 0x3b, 0x3c, 0x3d, 0x3e, 0x3f, -0x48, -0x47, -0x46, -0x45, -0x44, -0x43, -0x42, -0x41,
    ));
    let mut high = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, nibble));
    let mut low = _mm256_andnot_si256(nibble, bytes);
    if !PLAIN {
        // n · 2^-17 for n from 0 to 15, without its sign.
        let tiny_high = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0x00, 0x37, 0x37, 0x37, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38, 0x38,
        ));
        let tiny_low = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0x00, 0x00, -0x80, -0x40, 0x00, 0x20, 0x40, 0x60, -0x80, -0x70, -0x60, -0x50, -0x40, -0x30, -0x20, -0x10,
        ));
        let n = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble);
        let exponent = _mm256_and_si256(bytes, _mm256_set1_epi8(7));
        let tiny = _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
        let sign = _mm256_and_si256(high, _mm256_set1_epi8(-0x80));
        high = _mm256_blendv_epi8(high, _mm256_or_si256(sign, _mm256_shuffle_epi8(tiny_high, n)), tiny);
        low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(tiny_low, n), tiny);
    }
    let (first, second) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
    let zero = _mm256_setzero_si256();
    [
        Avx2(_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, first))),
        Avx2(_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, first))),
        Avx2(_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, second))),
        Avx2(_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, second))),
    ]
}

/// The reverse of [`load_e4m3`]: the halves are exact, so their fields are the code's.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_e4m3(x: __m256, codes: &mut [u8; 8]) {
    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
    let magnitude = _mm_and_si128(_mm_srli_epi16::<7>(halves), _mm_set1_epi16(0x7f));
    let sign = _mm_and_si128(_mm_srli_epi16::<8>(halves), _mm_set1_epi16(0x80));
    let words = _mm_or_si128(magnitude, sign);
    let bytes = _mm_packus_epi16(words, words);
    // SAFETY: eight writable bytes; the store takes any alignment.
    unsafe { _mm_storel_epi64(codes.as_mut_ptr().cast::<__m128i>(), bytes) }
}

/// E2M1 to bf16 by two tables of bytes, and bf16 to fp32 by a zero below.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_e2m1(pairs: &[u8; 32]) -> [Avx2; 8] {
    // 2^-8 · (0, .5, 1, 1.5, 2, 3, 4, 6) and their negatives: high and low bytes.
    let high = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, -0x80, -0x45, -0x45, -0x45, -0x44, -0x44, -0x44, -0x44,
    ));
    let low = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40, 0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40,
    ));
    // SAFETY: 32 readable bytes; the load takes any alignment.
    let bytes = unsafe { _mm256_loadu_si256(pairs.as_ptr().cast::<__m256i>()) };
    let nibble = _mm256_set1_epi8(15);
    let first = _mm256_and_si256(bytes, nibble);
    let second = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble);
    let (fh, fl) = (_mm256_shuffle_epi8(high, first), _mm256_shuffle_epi8(low, first));
    let (sh, sl) = (_mm256_shuffle_epi8(high, second), _mm256_shuffle_epi8(low, second));
    // Words of pair 0 in the low halves of the lanes, of pair 1 in the high halves.
    let (f0, f1) = (_mm256_unpacklo_epi8(fl, fh), _mm256_unpackhi_epi8(fl, fh));
    let (s0, s1) = (_mm256_unpacklo_epi8(sl, sh), _mm256_unpackhi_epi8(sl, sh));
    let zero = _mm256_setzero_si256();
    let low = |words| Avx2(_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words)));
    let high = |words| Avx2(_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words)));
    [low(f0), high(f0), low(s0), high(s0), low(f1), high(f1), low(s1), high(s1)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_bf16_pairs(pairs: &[u32; 8]) -> [__m256; 2] {
    // SAFETY: 32 readable bytes; the load takes any alignment.
    let words = unsafe { _mm256_loadu_si256(pairs.as_ptr().cast::<__m256i>()) };
    unpair(words)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_e8m0(codes: &[u8; 8]) -> __m256 {
    // SAFETY: eight readable bytes; the load takes any alignment.
    let bytes = unsafe { _mm_loadl_epi64(codes.as_ptr().cast::<__m128i>()) };
    let bits = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(bytes));
    // Code 0 is the subnormal 2^-127.
    _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x0040_0000)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose(r: [Avx2; 8]) -> [Avx2; 8] {
    let t0 = _mm256_unpacklo_ps(r[0].0, r[1].0);
    let t1 = _mm256_unpackhi_ps(r[0].0, r[1].0);
    let t2 = _mm256_unpacklo_ps(r[2].0, r[3].0);
    let t3 = _mm256_unpackhi_ps(r[2].0, r[3].0);
    let t4 = _mm256_unpacklo_ps(r[4].0, r[5].0);
    let t5 = _mm256_unpackhi_ps(r[4].0, r[5].0);
    let t6 = _mm256_unpacklo_ps(r[6].0, r[7].0);
    let t7 = _mm256_unpackhi_ps(r[6].0, r[7].0);
    let u0 = _mm256_shuffle_ps::<0x44>(t0, t2);
    let u1 = _mm256_shuffle_ps::<0xee>(t0, t2);
    let u2 = _mm256_shuffle_ps::<0x44>(t1, t3);
    let u3 = _mm256_shuffle_ps::<0xee>(t1, t3);
    let u4 = _mm256_shuffle_ps::<0x44>(t4, t6);
    let u5 = _mm256_shuffle_ps::<0xee>(t4, t6);
    let u6 = _mm256_shuffle_ps::<0x44>(t5, t7);
    let u7 = _mm256_shuffle_ps::<0xee>(t5, t7);
    [
        Avx2(_mm256_permute2f128_ps::<0x20>(u0, u4)),
        Avx2(_mm256_permute2f128_ps::<0x20>(u1, u5)),
        Avx2(_mm256_permute2f128_ps::<0x20>(u2, u6)),
        Avx2(_mm256_permute2f128_ps::<0x20>(u3, u7)),
        Avx2(_mm256_permute2f128_ps::<0x31>(u0, u4)),
        Avx2(_mm256_permute2f128_ps::<0x31>(u1, u5)),
        Avx2(_mm256_permute2f128_ps::<0x31>(u2, u6)),
        Avx2(_mm256_permute2f128_ps::<0x31>(u3, u7)),
    ]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_runs4(x: &[f32; 32]) -> [Avx2; 4] {
    let (eights, _) = x.as_chunks::<8>();
    let v = [Avx2::load(&eights[0]), Avx2::load(&eights[1]), Avx2::load(&eights[2]), Avx2::load(&eights[3])];
    // Runs 0 and 4, 1 and 5, 2 and 6, 3 and 7 side by side; then 4 × 4 within each half.
    let r0 = _mm256_permute2f128_ps::<0x20>(v[0].0, v[2].0);
    let r1 = _mm256_permute2f128_ps::<0x31>(v[0].0, v[2].0);
    let r2 = _mm256_permute2f128_ps::<0x20>(v[1].0, v[3].0);
    let r3 = _mm256_permute2f128_ps::<0x31>(v[1].0, v[3].0);
    let t0 = _mm256_unpacklo_ps(r0, r1);
    let t1 = _mm256_unpackhi_ps(r0, r1);
    let t2 = _mm256_unpacklo_ps(r2, r3);
    let t3 = _mm256_unpackhi_ps(r2, r3);
    [
        Avx2(_mm256_shuffle_ps::<0x44>(t0, t2)),
        Avx2(_mm256_shuffle_ps::<0xee>(t0, t2)),
        Avx2(_mm256_shuffle_ps::<0x44>(t1, t3)),
        Avx2(_mm256_shuffle_ps::<0xee>(t1, t3)),
    ]
}
