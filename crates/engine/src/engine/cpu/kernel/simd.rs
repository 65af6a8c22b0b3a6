//! What an operation may do with eight fp32 lanes.
//!
//! Every method is one IEEE operation per lane, or exact; none reorders or contracts. So an
//! operation written over [`Simd`] gives the same bits with every implementation.

use half::bf16;

/// fp32 arithmetic, lane by lane.
pub(crate) trait Real: Copy {
    /// The outcome of a comparison, per lane.
    type Mask: Copy;

    /// `x` in every lane.
    fn splat(x: f32) -> Self;
    /// Sum, rounded once.
    fn add(self, o: Self) -> Self;
    /// Difference, rounded once.
    fn sub(self, o: Self) -> Self;
    /// Product, rounded once.
    fn mul(self, o: Self) -> Self;
    /// Quotient, rounded once.
    fn div(self, o: Self) -> Self;
    /// `self · b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    /// Square root, rounded once.
    fn sqrt(self) -> Self;
    /// `self > o ? self : o`: a NaN on either side gives `o`.
    fn max(self, o: Self) -> Self;
    /// `self < o ? self : o`: a NaN on either side gives `o`.
    fn min(self, o: Self) -> Self;
    /// The magnitude.
    fn abs(self) -> Self;
    /// The magnitude of `self` with the sign of `sign`.
    fn with_sign(self, sign: Self) -> Self;
    /// The nearest integer, ties to even.
    fn round(self) -> Self;
    /// 2^n for integral lanes from −126 to 127; other lanes give some value.
    fn pow2(self) -> Self;
    /// 2^`up` times the power of two at or below |lane|, or at or below `floor` if that is larger;
    /// `floor` is a power of two and the result must stay finite.
    fn quantum(self, floor: f32, up: u32) -> Self;
    /// Positive normal lanes as (m, k), `lane = m · 2^k`, m in [1, 2).
    fn split(self) -> (Self, Self);
    /// Rounds to bf16 and back: nearest, ties to even; a NaN stays one.
    fn round_bf16(self) -> Self;
    /// `self < o`.
    fn lt(self, o: Self) -> Self::Mask;
    /// `self == o`.
    fn eq(self, o: Self) -> Self::Mask;
    /// `mask ? a : b`.
    fn select(mask: Self::Mask, a: Self, b: Self) -> Self;
}

/// Eight fp32 lanes with the loads and stores of the engine's formats.
pub(crate) trait Simd: Real {
    /// Loads eight values.
    fn load(x: &[f32; 8]) -> Self;
    /// Stores eight values.
    fn store(self, out: &mut [f32; 8]);
    /// Loads eight bf16 values.
    fn load_bf16(x: &[bf16; 8]) -> Self;
    /// Rounds to bf16 as [`Real::round_bf16`] and stores.
    fn store_bf16(self, out: &mut [bf16; 8]);
    /// Loads eight pairs: first values, second values.
    fn load_pairs(x: &[bf16; 16]) -> [Self; 2];
    /// Rounds as [`Real::round_bf16`] and stores eight pairs.
    fn store_pairs(pairs: [Self; 2], out: &mut [bf16; 16]);
    /// Two times eight E4M3 codes to **2^-8 times** their values, exactly. NaN codes give ±1.875.
    fn load_e4m3(codes: &[u8; 16]) -> [Self; 2];
    /// Two elements of 16 rows of E4M3 codes with their halves swapped, to **2^-8 times** their
    /// values: elements 0 and 1, each for rows 0–7 and 8–15. Element e of row r is byte
    /// [`unpacked_place`]`(e, r)`. `PLAIN` promises that no code is zero or subnormal.
    fn load_swapped<const PLAIN: bool>(codes: &[u8; 32]) -> [Self; 4];
    /// Stores E4M3 codes of lanes that are 2^-8 times E4M3 values.
    fn store_e4m3(self, codes: &mut [u8; 8]);
    /// Two E2M1 pairs of 16 rows, the first element of a pair in the low nibble, to **2^-8 times**
    /// their values: elements 0 to 3, each for rows 0–7 and 8–15. Pair p of row r is byte
    /// [`unpacked_place`]`(p, r)`.
    fn load_e2m1(pairs: &[u8; 32]) -> [Self; 8];
    /// bf16 pairs of 8 rows, the first element in the low half: first elements, second elements.
    fn load_bf16_pairs(pairs: &[u32; 8]) -> [Self; 2];
    /// Eight E8M0 codes but 255 to their values.
    fn load_e8m0(codes: &[u8; 8]) -> Self;
    /// Rows to columns: lane j of result i is lane i of row j.
    fn transpose(rows: [Self; 8]) -> [Self; 8];
    /// Eight runs of four values: lane i of result e is element e of run i.
    fn load_runs4(x: &[f32; 32]) -> [Self; 4];
}

/// Where [`Simd::load_e2m1`] and [`Simd::load_swapped`] find byte `b` (0 or 1) of row `r` (of 16):
/// unpacking bytes to words to double words within half registers then leaves rows in order.
pub(crate) const fn unpacked_place(b: usize, r: usize) -> usize {
    r % 8 / 4 * 16 + b * 8 + r / 8 * 4 + r % 4
}

/// Sums of eight vectors over their lanes, each in the order of the xor butterfly 4, 2, 1: lane j
/// of the result is the sum of vector j.
#[inline(always)]
pub(crate) fn sum_lanes<V: Simd>(rows: [V; 8]) -> V {
    let c = V::transpose(rows);
    // c[l] holds lane l of every vector, so the butterfly is vertical.
    let (a0, a1) = (c[0].add(c[4]), c[1].add(c[5]));
    let (a2, a3) = (c[2].add(c[6]), c[3].add(c[7]));
    a0.add(a2).add(a1.add(a3))
}

/// The sum over the lanes of one vector by the xor butterfly 4, 2, 1.
#[inline(always)]
pub(crate) fn sum8<V: Simd>(v: V) -> f32 {
    let mut x = [0.0; 8];
    v.store(&mut x);
    ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
}

/// Folds 32 canonical lanes (four vectors, lanes in order) by the xor butterfly 16, 8, 4, 2, 1.
#[inline(always)]
pub(crate) fn butterfly<V: Simd>(lanes: [V; 4]) -> f32 {
    sum8(lanes[0].add(lanes[2]).add(lanes[1].add(lanes[3])))
}
