//! The compressor's arithmetic: many positions into one slot, a softmax per dimension.

use super::isa::{Isa, Job};
use super::math::exp_v;
use super::simd::Simd;

/// Some columns of consecutive rows of a ring buffer: row i is ring row `(first + i) mod rows`.
#[derive(Debug, Clone, Copy)]
pub struct RingRows<'a, T> {
    data: &'a [T],
    stride: usize,
    column: usize,
    first: usize,
    count: usize,
}

impl<'a, T> RingRows<'a, T> {
    /// Rows `first …` of a ring of rows `stride` long, `count` of them, from `column` on.
    ///
    /// # Panics
    /// If the data is not whole rows, or there are fewer rows than `count`.
    #[must_use]
    pub fn new(data: &'a [T], stride: usize, column: usize, first: usize, count: usize) -> Self {
        assert!(stride > 0 && data.len().is_multiple_of(stride), "{} values in rows of {stride}", data.len());
        assert!(count <= data.len() / stride && column < stride, "{count} rows of {}", data.len() / stride);
        Self { data, stride, column, first, count }
    }

    /// No rows.
    #[must_use]
    pub fn none() -> Self {
        Self { data: &[], stride: 1, column: 0, first: 0, count: 0 }
    }

    /// How many rows.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// `width` values of row `i`.
    ///
    /// # Panics
    /// If there is no such row, or it is shorter.
    #[inline(always)]
    #[must_use]
    pub fn row(&self, i: usize, width: usize) -> &'a [T] {
        assert!(i < self.count, "row {i} of {}", self.count);
        let rows = self.data.len() / self.stride;
        &self.data[(self.first + i) % rows * self.stride + self.column..][..width]
    }
}

/// What becomes one slot: values and scores, row by row in ascending position.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// Values.
    pub kv: RingRows<'a, f32>,
    /// Scores, as many rows.
    pub score: RingRows<'a, f32>,
}

/// Compresses rows into one, dimension by dimension: `m = max score`, `e_i = exp(score_i − m)`,
/// `S = Σ e_i` ascending from the first, `out = Σ (e_i / S) · kv_i` as one fma chain from +0.
///
/// Rows come from `parts` one after the other; a part without rows is left out.
///
/// # Panics
/// If there is no row at all, rows are shorter than `out`, or `out` is not a multiple of 8.
pub fn compress(isa: Isa, parts: [Part<'_>; 2], out: &mut [f32]) {
    assert!(out.len().is_multiple_of(8), "{} values to a slot", out.len());
    let rows: usize = parts.iter().map(|p| p.kv.count()).sum();
    assert!(rows > 0 && parts.iter().all(|p| p.kv.count() == p.score.count()), "{rows} rows to a slot");
    isa.dispatch(Compress { parts, out });
}

struct Compress<'a> {
    parts: [Part<'a>; 2],
    out: &'a mut [f32],
}

impl Job for Compress<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (out, _) = self.out.as_chunks_mut::<8>();
        for (d, out) in out.iter_mut().enumerate() {
            let mut largest = V::splat(f32::NEG_INFINITY);
            for part in &self.parts {
                for i in 0..part.score.count() {
                    largest = largest.max(load(&part.score, i, d));
                }
            }
            let mut sum = V::splat(0.0);
            for part in &self.parts {
                for i in 0..part.score.count() {
                    sum = sum.add(exp_v(load::<V>(&part.score, i, d).sub(largest)));
                }
            }
            let mut value = V::splat(0.0);
            for part in &self.parts {
                for i in 0..part.score.count() {
                    let p = exp_v(load::<V>(&part.score, i, d).sub(largest)).div(sum);
                    value = p.fma(load(&part.kv, i, d), value);
                }
            }
            value.store(out);
        }
    }
}

/// Dimensions 8d to 8d + 7 of row `i`.
#[inline(always)]
fn load<V: Simd>(rows: &RingRows<'_, f32>, i: usize, d: usize) -> V {
    let (eights, _) = rows.row(i, 8 * d + 8)[8 * d..].as_chunks::<8>();
    V::load(&eights[0])
}
