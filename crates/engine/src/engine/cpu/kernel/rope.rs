//! Rotary positions: frequencies, tables of cos and sin, and the rotation of row ends.
//!
//! Frequencies are rounded to fp32 at every step the model's definition rounds; cos and sin are
//! evaluated in fp64 by series of our own and rounded once, so that no system library decides bits.

use half::bf16;

use super::isa::{Isa, Job};
use super::simd::Simd;

/// The stretch of frequencies for contexts past the trained length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stretch {
    /// Trained positions.
    pub original: f64,
    /// How many times longer.
    pub factor: f32,
    /// Rotations over the trained length above which a frequency stays as it is.
    pub beta_fast: f64,
    /// Rotations below which it is divided by the whole factor.
    pub beta_slow: f64,
}

/// The fp32 frequencies of `dims` rotary dimensions (pairs (2i, 2i+1), one frequency each).
///
/// # Panics
/// If `dims` is odd or 0.
#[must_use]
pub fn frequencies(dims: usize, base: f32, stretch: Option<Stretch>) -> Vec<f32> {
    assert!(dims > 0 && dims.is_multiple_of(2), "{dims} rotary dimensions");
    let mut out: Vec<f32> = (0..dims / 2)
        .map(|i| {
            let exponent = (2 * i) as f32 / dims as f32;
            1.0 / (exp64(f64::from(exponent) * ln64(f64::from(base))) as f32)
        })
        .collect();
    if let Some(stretch) = stretch {
        let (low, high) = ramp(dims, f64::from(base), stretch);
        for (i, f) in out.iter_mut().enumerate() {
            let t = ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
            let keep = 1.0 - t;
            *f = *f / stretch.factor * (1.0 - keep) + *f * keep;
        }
    }
    out
}

/// Between which pairs the stretch goes from nothing to the whole factor.
fn ramp(dims: usize, base: f64, s: Stretch) -> (f32, f32) {
    let pair =
        |rotations: f64| dims as f64 * ln64(s.original / (2.0 * std::f64::consts::PI * rotations)) / (2.0 * ln64(base));
    let low = pair(s.beta_fast).floor().max(0.0);
    let high = pair(s.beta_slow).ceil().min(dims as f64 - 1.0);
    let high = if (high - low).abs() > 0.0 { high } else { high + 0.001 };
    (low as f32, high as f32)
}

/// cos and sin of positions 0 to n − 1.
#[derive(Debug, Clone)]
pub struct RopeTable {
    pairs: usize,
    /// `[positions][cos of every pair, then sin of every pair]`.
    rows: Vec<f32>,
}

impl RopeTable {
    /// The table of `positions` positions.
    #[must_use]
    pub fn new(frequencies: &[f32], positions: usize) -> Self {
        let pairs = frequencies.len();
        let mut rows = vec![0.0; 2 * pairs * positions];
        for (position, row) in rows.chunks_exact_mut(2 * pairs).enumerate() {
            let (cos, sin) = row.split_at_mut(pairs);
            for (i, &f) in frequencies.iter().enumerate() {
                let angle = f64::from(position as f32 * f);
                (sin[i], cos[i]) = sin_cos(angle);
            }
        }
        Self { pairs, rows }
    }

    /// Positions held.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.rows.len() / (2 * self.pairs)
    }

    /// cos and sin of one position, one value per pair.
    ///
    /// # Panics
    /// If the position is not held.
    #[must_use]
    pub fn row(&self, position: usize) -> (&[f32], &[f32]) {
        self.rows[position * 2 * self.pairs..][..2 * self.pairs].split_at(self.pairs)
    }

    /// Rotates the last dimensions of every row of `width` values, all at `position`.
    ///
    /// # Panics
    /// If the position is not held, rows are shorter than the rotary dimensions, or these are not a
    /// multiple of 16.
    pub fn rotate(&self, isa: Isa, x: &mut [bf16], width: usize, position: usize) {
        self.turn(isa, x, width, (position, false));
    }

    /// Undoes [`RopeTable::rotate`]: the rotation by the opposite angle.
    ///
    /// # Panics
    /// As [`RopeTable::rotate`].
    pub fn rotate_back(&self, isa: Isa, x: &mut [bf16], width: usize, position: usize) {
        self.turn(isa, x, width, (position, true));
    }

    fn turn(&self, isa: Isa, x: &mut [bf16], width: usize, (position, back): (usize, bool)) {
        let dims = 2 * self.pairs;
        assert!(dims.is_multiple_of(16) && width >= dims && x.len().is_multiple_of(width), "{dims} of {width}");
        let (cos, sin) = self.row(position);
        isa.dispatch(Rotate { x, width, cos, sin, back });
    }
}

struct Rotate<'a> {
    x: &'a mut [bf16],
    width: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    back: bool,
}

impl Job for Rotate<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (cos, _) = self.cos.as_chunks::<8>();
        let (sin, _) = self.sin.as_chunks::<8>();
        let sign = V::splat(if self.back { -1.0 } else { 1.0 });
        for row in self.x.chunks_exact_mut(self.width) {
            let from = self.width - 2 * self.cos.len();
            let (pairs, _) = row[from..].as_chunks_mut::<16>();
            for ((pair, cos), sin) in pairs.iter_mut().zip(cos).zip(sin) {
                let [a, b] = V::load_pairs(pair);
                let c = V::load(cos);
                let s = V::load(sin).mul(sign);
                let x = a.mul(c).sub(b.mul(s));
                let y = a.mul(s).add(b.mul(c));
                V::store_pairs([x, y], pair);
            }
        }
    }
}

/// (sin, cos) of an angle up to some millions, each rounded to fp32.
fn sin_cos(angle: f64) -> (f32, f32) {
    /// π/2 in three parts; products of the first two with 20-bit numbers are exact.
    const PARTS: [f64; 3] = [1.570_796_326_734_125_6, 6.077_100_506_303_966e-11, 2.022_266_248_795_951e-21];
    let n = (angle * std::f64::consts::FRAC_2_PI).round_ties_even();
    let r = n.mul_add(-PARTS[2], n.mul_add(-PARTS[1], n.mul_add(-PARTS[0], angle)));
    let z = r * r;
    let (sin, cos) = (r * series(z, 1), series(z, 0));
    let (sin, cos) = match (n as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    };
    (sin as f32, cos as f32)
}

/// Σ (−z)^j / (2j + first)! for |z| ≤ (π/4)²: sin r / r with first = 1, cos r with first = 0.
fn series(z: f64, first: u32) -> f64 {
    let mut sum = 1.0;
    for j in (1..=9).rev() {
        let m = f64::from(2 * j + first);
        sum = (-z / (m * (m - 1.0))).mul_add(sum, 1.0);
    }
    sum
}

/// ln of a positive normal fp64.
fn ln64(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut k = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & 0x000f_ffff_ffff_ffff | 0x3ff0_0000_0000_0000);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        k += 1;
    }
    // 2 artanh(s), s at most 0.172.
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut sum = 0.0;
    for j in (1..=11).rev() {
        sum = f64::mul_add(sum, z, 1.0 / f64::from(2 * j + 1));
    }
    (2.0 * s).mul_add(sum * z, 2.0 * s) + k as f64 * std::f64::consts::LN_2
}

/// e^x of a moderate fp64.
fn exp64(x: f64) -> f64 {
    /// ln 2 in two parts; products of the first with small integers are exact.
    const PARTS: [f64; 2] = [0.693_147_180_369_123_8, 1.908_214_929_270_587_7e-10];
    let n = (x * std::f64::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-PARTS[1], n.mul_add(-PARTS[0], x));
    let mut sum = 1.0;
    for j in (1..=14).rev() {
        sum = (r / f64::from(j)).mul_add(sum, 1.0);
    }
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::kernel::golden::Golden;

    const TINY: Stretch = Stretch { original: 512.0, factor: 4.0, beta_fast: 32.0, beta_slow: 1.0 };
    const REAL: Stretch = Stretch { original: 65536.0, factor: 16.0, beta_fast: 32.0, beta_slow: 1.0 };

    #[test]
    fn series_agree_with_the_system_library() {
        for i in 0..200_000u32 {
            let x = f64::from(i) * 0.7 + f64::from(i % 977) * 1e-4;
            let (s, c) = sin_cos(x);
            assert_eq!((s, c), (x.sin() as f32, x.cos() as f32), "at {x}");
        }
        for i in 1..10_000 {
            let x = f64::from(i) * 0.37;
            assert!((ln64(x) - x.ln()).abs() <= 4e-16 * x.ln().abs().max(1.0), "ln {x}");
            let y = f64::from(i) * 0.002;
            assert!((exp64(y) / y.exp() - 1.0).abs() < 1e-15, "exp {y}");
        }
    }

    #[test]
    fn the_stretch_ramps_between_the_documented_pairs() {
        assert_eq!(ramp(64, 160_000.0, TINY), (2.0, 12.0));
        assert_eq!(ramp(64, 160_000.0, REAL), (15.0, 25.0));
    }

    #[test]
    fn tables_match_the_golden_rows() {
        let golden = Golden::ops();
        let cases = [
            ("rope_plain", 10_000.0, None),
            ("rope_plain_real_model", 10_000.0, None),
            ("rope_yarn", 160_000.0, Some(TINY)),
            ("rope_yarn_real_model", 160_000.0, Some(REAL)),
        ];
        for (name, base, stretch) in cases {
            let f = frequencies(64, base, stretch);
            let positions = golden.i32(&format!("{name}.positions"));
            let (cos, sin) = (golden.f32(&format!("{name}.cos")), golden.f32(&format!("{name}.sin")));
            for (row, &p) in positions.iter().enumerate() {
                for i in 0..32 {
                    let (s, c) = sin_cos(f64::from(p as f32 * f[i]));
                    assert!((c - cos[row * 32 + i]).abs() <= 1e-6, "{name} cos {p} {i}");
                    assert!((s - sin[row * 32 + i]).abs() <= 1e-6, "{name} sin {p} {i}");
                }
            }
        }
    }

    #[test]
    fn rotation_and_its_inverse_match_the_official_bits() {
        let golden = Golden::ops();
        let table = RopeTable::new(&frequencies(64, 160_000.0, Some(TINY)), 520);
        assert_eq!(table.positions(), 520);
        for isa in [Isa::PORTABLE, Isa::detect()] {
            let mut x = golden.bf16("rope_apply.x");
            for (t, row) in x.chunks_exact_mut(4 * 128).enumerate() {
                table.rotate(isa, row, 128, 509 + t);
            }
            assert_eq!(x, golden.bf16("rope_apply.y_pos509_yarn"));
            for (t, row) in x.chunks_exact_mut(4 * 128).enumerate() {
                table.rotate_back(isa, row, 128, 509 + t);
            }
            assert_eq!(x, golden.bf16("rope_apply.back"));
        }
    }
}
