//! The number formats of a checkpoint: E4M3, E2M1 and E8M0 codes to values and back.
//!
//! Owns every exact decode table and the round-to-nearest-even encoders. All of it is exact integer
//! work on bit patterns, so it gives the same bits everywhere.

/// Largest finite E4M3 magnitude.
pub const E4M3_MAX: f32 = 448.0;

/// Largest E2M1 magnitude.
pub const E2M1_MAX: f32 = 6.0;

/// The E8M0 code that means "not a number".
pub const E8M0_NAN: u8 = 255;

/// The E2M1 values of codes 0 to 7; bit 3 of a code is the sign.
const E2M1_MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Gives the value of an E4M3 code (bias 7, no infinities, `0x7f` and `0xff` are NaN).
#[must_use]
pub const fn e4m3_decode(code: u8) -> f32 {
    let sign = (code as u32 & 0x80) << 24;
    let magnitude = code as u32 & 0x7f;
    let bits = match (magnitude >> 3, magnitude & 7) {
        (15, 7) => 0x7fc0_0000,
        (0, mantissa) => (mantissa as f32 * (1.0 / 512.0)).to_bits(),
        (exponent, mantissa) => ((exponent + 120) << 23) | (mantissa << 20),
    };
    f32::from_bits(bits | sign)
}

/// All 256 E4M3 values by code.
pub const E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3_decode(code as u8);
        code += 1;
    }
    table
};

/// 2^-8 times every E4M3 value by code, with NaN codes as ±1.875: what the half-precision trick of
/// the vector decoders gives, so that every decoder agrees. Checkpoints with NaN codes are refused.
pub(crate) const E4M3_SCALED: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let value = if code & 0x7f == 0x7f { 480.0 } else { e4m3_decode(code as u8 & 0x7f) } / 256.0;
        table[code] = if code < 128 { value } else { -value };
        code += 1;
    }
    table
};

/// 2^-8 times every E2M1 value by code.
pub(crate) const E2M1_SCALED: [f32; 16] = {
    let mut table = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        table[code] = e2m1_decode(code as u8) / 256.0;
        code += 1;
    }
    table
};

/// Rounds to the nearest E4M3 code, ties to even. It does not saturate: magnitudes that round past
/// 448, infinities and NaN give the NaN code with the sign of `x`.
///
/// Callers that saturate clamp to ±[`E4M3_MAX`] first.
#[must_use]
pub fn e4m3_encode(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    let magnitude = x.abs();
    if magnitude.is_nan() || magnitude > 464.0 {
        return sign | 0x7f;
    }
    let code = if magnitude < 1.0 / 64.0 {
        // Subnormal codes are multiples of 2^-9; 8 of them round up into the first normal code.
        (magnitude * 512.0).round_ties_even() as u32
    } else {
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_ffff + ((bits >> 20) & 1);
        (rounded >> 20) - (120 << 3)
    };
    sign | code as u8
}

/// Gives the value of an E2M1 code; only the low four bits count.
#[must_use]
pub const fn e2m1_decode(code: u8) -> f32 {
    let magnitude = E2M1_MAGNITUDES[(code & 7) as usize];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Rounds to the nearest E2M1 code, ties to even, saturating at ±[`E2M1_MAX`]. `None` for NaN,
/// which the format can't say.
#[must_use]
pub fn e2m1_encode(x: f32) -> Option<u8> {
    if x.is_nan() {
        return None;
    }
    let magnitude = x.abs();
    // Half-way points; at those below an even code the tie goes up.
    let code = u8::from(magnitude > 0.25)
        + u8::from(magnitude >= 0.75)
        + u8::from(magnitude > 1.25)
        + u8::from(magnitude >= 1.75)
        + u8::from(magnitude > 2.5)
        + u8::from(magnitude >= 3.5)
        + u8::from(magnitude > 5.0);
    Some(code | if x.is_sign_negative() { 8 } else { 0 })
}

/// Gives the value of an E8M0 code, 2^(code − 127); code 0 is subnormal, 255 is NaN.
#[must_use]
pub const fn e8m0_decode(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        E8M0_NAN => f32::NAN,
        exponent => f32::from_bits((exponent as u32) << 23),
    }
}

/// Gives the E8M0 code of 2^⌈log2 x⌉ for a positive normal `x`, from its bits: the exponent, plus
/// one where the mantissa is not zero. What is past the format, infinite or NaN gives
/// [`E8M0_NAN`].
#[must_use]
pub const fn pow2ceil(x: f32) -> u8 {
    let bits = x.to_bits() & 0x7fff_ffff;
    let exponent = (bits >> 23) + (bits & 0x7f_ffff != 0) as u32;
    if exponent >= 255 { E8M0_NAN } else { exponent as u8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_code_of_every_value_is_the_code() {
        for code in 0..=255u8 {
            let value = e4m3_decode(code);
            if value.is_nan() {
                assert!(matches!(code, 0x7f | 0xff));
                assert_eq!(e4m3_encode(value) & 0x7f, 0x7f);
            } else {
                assert_eq!(e4m3_encode(value), code);
            }
        }
        assert_eq!(e4m3_decode(0x7e), E4M3_MAX);
    }

    #[test]
    fn e4m3_rounds_half_way_points_to_the_even_code() {
        for code in 0..0x7eu8 {
            let (low, high) = (e4m3_decode(code), e4m3_decode(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(e4m3_encode(middle), even);
            assert_eq!(e4m3_encode(-middle), even | 0x80);
            assert_eq!(e4m3_encode(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(e4m3_encode(f32::from_bits(middle.to_bits() + 1)), code + 1);
        }
    }

    #[test]
    fn e4m3_past_the_range_is_the_nan_code() {
        assert_eq!(e4m3_encode(464.0), 0x7e);
        for x in [464.1, 1e30, f32::INFINITY, f32::NAN] {
            assert_eq!(e4m3_encode(x), 0x7f);
        }
        assert_eq!(e4m3_encode(f32::NEG_INFINITY), 0xff);
    }

    #[test]
    fn e2m1_rounds_to_nearest_even_and_saturates() {
        for code in 0..16u8 {
            assert_eq!(e2m1_encode(e2m1_decode(code)), Some(code));
        }
        for (x, value) in
            [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (1e9, 6.0)]
        {
            assert_eq!(e2m1_encode(x).map(e2m1_decode), Some(value));
            assert_eq!(e2m1_encode(-x).map(e2m1_decode), Some(-value));
        }
        assert_eq!(e2m1_encode(f32::NAN), None);
    }

    #[test]
    fn e8m0_is_a_power_of_two_or_nan() {
        for code in 0..255u8 {
            assert_eq!(f64::from(e8m0_decode(code)), 2f64.powi(i32::from(code) - 127));
        }
        assert!(e8m0_decode(E8M0_NAN).is_nan());
    }

    #[test]
    fn pow2ceil_rounds_the_exponent_up() {
        for (x, value) in
            [(1.0, 1.0), (1.000_000_1, 2.0), (0.75, 1.0), (3.0, 4.0), (f32::MIN_POSITIVE, f32::MIN_POSITIVE)]
        {
            assert_eq!(e8m0_decode(pow2ceil(x)), value);
        }
        for x in [f32::MAX, f32::INFINITY, f32::NAN] {
            assert_eq!(pow2ceil(x), E8M0_NAN);
        }
    }
}
