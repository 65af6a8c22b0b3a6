//! The indexer's scores: how much a position wants each compressed slot.

use half::bf16;

use super::attend::{score8, to_lanes};
use super::isa::{Isa, Job};
use super::simd::Simd;

/// Most values to an indexer head.
pub const WIDTH_MAX: usize = 256;
/// Most indexer heads.
pub const HEADS_MAX: usize = 128;

/// Multiplies head weights by a constant in bf16: `w = bf16(w · factor)`.
pub fn scale_weights(w: &mut [bf16], factor: f32) {
    for w in w {
        *w = bf16::from_f32(w.to_f32() * factor);
    }
}

/// Scores slots `[slots, width]` for one position's query `[heads, width]` and head weights
/// `[heads]`: `d = bf16(q · k)`, `a = bf16(relu(d) · w)`, `score = bf16(Σ a)`, heads ascending.
///
/// # Panics
/// If the width is not a multiple of 64 up to [`WIDTH_MAX`], there are more than [`HEADS_MAX`]
/// heads, or sizes differ.
pub fn scores(isa: Isa, q: &[bf16], w: &[bf16], slots: &[bf16], out: &mut [f32]) {
    assert!(!w.is_empty() && w.len() <= HEADS_MAX && q.len().is_multiple_of(w.len()), "{} heads", w.len());
    let width = q.len() / w.len();
    assert!(width > 0 && width.is_multiple_of(64) && width <= WIDTH_MAX, "indexer heads of {width} values");
    assert!(slots.len() == out.len() * width, "{} values in {} slots", slots.len(), out.len());
    isa.dispatch(Scores { q, w, slots, out, width });
}

struct Scores<'a> {
    q: &'a [bf16],
    w: &'a [bf16],
    slots: &'a [bf16],
    out: &'a mut [f32],
    width: usize,
}

impl Job for Scores<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let eights = self.width / 8;
        let mut k = [[0.0; 8]; 8 * WIDTH_MAX / 8];
        let mut head = [[0.0; 8]; WIDTH_MAX / 8];
        let zero = V::splat(0.0);
        for (slots, out) in self.slots.chunks(8 * self.width).zip(self.out.chunks_mut(8)) {
            for (slot, row) in slots.chunks_exact(self.width).zip(k.chunks_exact_mut(eights)) {
                to_lanes::<V>(slot, row);
            }
            let mut sum = zero;
            for (q, w) in self.q.chunks_exact(self.width).zip(self.w) {
                to_lanes::<V>(q, &mut head[..eights]);
                let d = score8::<V>(&head[..eights], &k[..8 * eights]).round_bf16();
                // The zero comes first, so that a NaN passes.
                let a = zero.max(d).mul(V::splat(w.to_f32())).round_bf16();
                sum = sum.add(a);
            }
            let mut scores = [0.0; 8];
            sum.round_bf16().store(&mut scores);
            out.copy_from_slice(&scores[..out.len()]);
        }
    }
}
