//! What random values a tensor gets.
//!
//! Weights of a product are about 1/√inputs in size, so that products keep the size of their inputs;
//! norms are about 1.

use half::bf16;

use crate::model::config::ModelConfig;
use crate::model::format::E8M0_NAN;
use crate::model::layout::{Kind, TensorSpec};

/// Bytes that are made from one state, a multiple of every row of ids and of all element sizes.
pub(super) const PIECE: usize = 4 << 20;

/// Root of the mean square of an E4M3 code of random bits without bit 3.
const E4M3_SIZE: f64 = 95.0;
/// The same of an E2M1 code.
const E2M1_SIZE: f64 = 2.93;

/// How one tensor is filled.
#[derive(Debug, Clone)]
pub(super) struct Fill {
    seed: u64,
    rule: Rule,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    /// Any bits.
    Bits,
    /// E4M3 codes that are numbers.
    E4m3,
    /// E8M0 codes: this one, one less, or one more.
    Scale(u8),
    /// bf16 in (middle − spread, middle + spread).
    Bf16 { middle: f32, spread: f32 },
    /// fp32 likewise.
    F32 { middle: f32, spread: f32 },
    /// Rows of different ids below `experts`, as 64-bit integers.
    Ids { experts: u64, per_row: u64 },
}

/// A fast generator: one multiplication and a few shifts for 64 bits.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
}

impl Fill {
    /// The rule of a tensor, by its kind and name.
    pub(super) fn new(spec: &TensorSpec, config: &ModelConfig, seed: u64) -> Self {
        let last = spec.shape.last().copied().unwrap_or(1);
        let spread = |inputs: u64| (3.0 / inputs as f64).sqrt() as f32;
        let scale = |size: f64, inputs: u64| {
            // The power of two nearest to 1 / (size · √inputs).
            let exponent = -(size * (inputs as f64).sqrt()).log2().round();
            (127.0 + exponent).clamp(1.0, f64::from(E8M0_NAN) - 2.0) as u8
        };
        let rule = match spec.kind {
            Kind::Fp8 => Rule::E4m3,
            Kind::Fp4 => Rule::Bits,
            Kind::Fp8Scale => Rule::Scale(scale(E4M3_SIZE, 128 * last)),
            Kind::Fp4Scale => Rule::Scale(scale(E2M1_SIZE, 32 * last)),
            Kind::Bf16 if spec.name.ends_with("norm.weight") => Rule::Bf16 { middle: 1.0, spread: 0.25 },
            Kind::Bf16 if spec.name == "embed.weight" => Rule::Bf16 { middle: 0.0, spread: 1.0 },
            Kind::Bf16 => Rule::Bf16 { middle: 0.0, spread: spread(last) },
            Kind::F32 if spec.name.ends_with("_fn") => Rule::F32 { middle: 0.0, spread: spread(last) },
            Kind::F32 if spec.name.ends_with("_scale") => Rule::F32 { middle: 0.5, spread: 0.25 },
            Kind::F32 => Rule::F32 { middle: 0.0, spread: 0.25 },
            Kind::Ids => Rule::Ids { experts: config.experts as u64, per_row: config.experts_per_token as u64 },
        };
        Self { seed, rule }
    }

    /// Piece `number` of the tensor.
    pub(super) fn piece(&self, number: u64, out: &mut [u8]) {
        let mut bits = Bits(self.seed ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93));
        match self.rule {
            Rule::Bits => words(out, || bits.next()),
            // Without bit 3 no code is 0x7f or 0xff.
            Rule::E4m3 => words(out, || bits.next() & 0xf7f7_f7f7_f7f7_f7f7),
            Rule::Scale(middle) => {
                for byte in out {
                    let step = (bits.next() >> 60) as u8;
                    *byte = if step == 0 {
                        middle - 1
                    } else if step == 1 {
                        middle + 1
                    } else {
                        middle
                    };
                }
            }
            Rule::Bf16 { middle, spread } => {
                for eight in out.chunks_mut(8) {
                    let word = bits.next();
                    for (i, two) in eight.chunks_exact_mut(2).enumerate() {
                        let unit = f32::from((word >> (16 * i)) as u16 as i16) / 32_768.0;
                        two.copy_from_slice(&bf16::from_f32(middle + spread * unit).to_le_bytes());
                    }
                }
            }
            Rule::F32 { middle, spread } => {
                for four in out.chunks_exact_mut(4) {
                    let unit = (bits.next() >> 40) as f32 / 8_388_608.0 - 1.0;
                    four.copy_from_slice(&(middle + spread * unit).to_le_bytes());
                }
            }
            Rule::Ids { experts, per_row } => ids(&mut bits, self.seed, number, (experts, per_row), out),
        }
    }
}

fn words(out: &mut [u8], mut next: impl FnMut() -> u64) {
    for eight in out.chunks_mut(8) {
        let word = next().to_le_bytes();
        eight.copy_from_slice(&word[..eight.len()]);
    }
}

/// Ids by their place in the whole tensor: a row's are neighbours from a random first on, a random
/// odd step apart, so that none comes twice where the number of experts is a power of two; the step
/// is 1 elsewhere.
fn ids(_: &mut Bits, seed: u64, number: u64, (experts, per_row): (u64, u64), out: &mut [u8]) {
    let first = number * (PIECE as u64 / 8);
    for (i, id) in out.chunks_exact_mut(8).enumerate() {
        let at = first + i as u64;
        let row = Bits(seed ^ (at / per_row)).next();
        let step = if experts.is_power_of_two() { row >> 40 | 1 } else { 1 };
        let value = (row & 0xffff_ffff).wrapping_add((at % per_row).wrapping_mul(step)) % experts;
        id.copy_from_slice(&value.to_le_bytes());
    }
}
