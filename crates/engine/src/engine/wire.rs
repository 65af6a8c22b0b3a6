//! Hidden states on the wire: `[s, hc, dim]` bf16 to bytes and back.
//!
//! The bytes of a position depend on that position only. fp8 has one bf16 scale per position and
//! stream, in front of the position's E4M3 codes:
//!
//! | encoding | bytes of a position |
//! |---|---|
//! | bf16 | `hc · dim` values, 2 bytes each, little-endian |
//! | fp8  | `hc` scales, 2 bytes each, then `hc · dim` codes |
//!
//! `s = min(bf16(max(max|x|, 1e-8) · fp32(1/448)), bf16 max)`, code = E4M3 of `clamp(x / s, ±448)`
//! with one fp32 division, decoded value = `bf16(code · s)`.

use half::bf16;

use super::cpu::kernel::simd::Simd;
use super::cpu::kernel::{Isa, Job};
use crate::ids::{Position, WireEncoding};
use crate::model::format::E4M3_MAX;

/// Why a hidden state was not encoded or decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The values or bytes are not whole positions.
    #[error("{got} {unit} of hidden state, expected {expected} or, for several positions, a multiple of it")]
    Length {
        /// What is counted.
        unit: &'static str,
        /// Items expected: of a position, or of all.
        expected: usize,
        /// Items that came.
        got: usize,
    },
    /// A value to be sent is NaN.
    #[error("hidden state of position {position}, stream {stream} holds a NaN: it can't be sent")]
    Nan {
        /// The position.
        position: Position,
        /// The residual stream.
        stream: usize,
    },
    /// A peer sent something that no encoder makes.
    #[error("hidden state of position {position}, stream {stream} came with {what}: the peer or the link is broken")]
    Invalid {
        /// The position.
        position: Position,
        /// The residual stream.
        stream: usize,
        /// What is wrong.
        what: &'static str,
    },
}

/// One encoding for one shape of hidden state.
#[derive(Debug, Clone, Copy)]
pub struct Wire {
    encoding: WireEncoding,
    hc: usize,
    dim: usize,
    isa: Isa,
}

impl Wire {
    /// The encoding of `hc` streams of `dim` values per position.
    ///
    /// # Panics
    /// If there is no stream or `dim` is not a positive multiple of 8.
    #[must_use]
    pub fn new(encoding: WireEncoding, hc: usize, dim: usize) -> Self {
        assert!(hc > 0 && dim > 0 && dim.is_multiple_of(8), "{hc} streams of {dim} values");
        Self { encoding, hc, dim, isa: Isa::detect() }
    }

    /// Bytes of one position.
    #[must_use]
    pub fn position_bytes(&self) -> usize {
        self.encoding.position_bytes(self.hc, self.dim)
    }

    /// Appends the bytes of positions `first …` to `out`.
    ///
    /// # Errors
    /// [`WireError::Length`] or [`WireError::Nan`]; `out` is as before then.
    pub fn encode(&self, first: Position, hidden: &[bf16], out: &mut Vec<u8>) -> Result<(), WireError> {
        let positions = self.positions("values", hidden.len(), self.hc * self.dim)?;
        let start = out.len();
        out.resize(start + positions * self.position_bytes(), 0);
        let outcome = self.encode_into(first, hidden, &mut out[start..]);
        if outcome.is_err() {
            out.truncate(start);
        }
        outcome
    }

    /// Writes the bytes of positions `first …`, as many as `hidden` holds, to all of `out`.
    ///
    /// # Errors
    /// [`WireError::Length`] or [`WireError::Nan`]; `out` is undefined then.
    pub fn encode_into(&self, first: Position, hidden: &[bf16], out: &mut [u8]) -> Result<(), WireError> {
        let positions = self.positions("values", hidden.len(), self.hc * self.dim)?;
        self.exactly("bytes", out.len(), positions * self.position_bytes())?;
        let rows = hidden.chunks_exact(self.hc * self.dim);
        for (p, (row, bytes)) in rows.zip(out.chunks_exact_mut(self.position_bytes())).enumerate() {
            let nan = |stream| WireError::Nan { position: first.plus(p as u32), stream };
            match self.encoding {
                WireEncoding::Bf16 => {
                    let (pairs, _) = bytes.as_chunks_mut::<2>();
                    for (j, (x, out)) in row.chunks_exact(self.dim).zip(pairs.chunks_exact_mut(self.dim)).enumerate() {
                        if largest(x).is_nan() {
                            return Err(nan(j));
                        }
                        for (x, out) in x.iter().zip(out) {
                            *out = x.to_le_bytes();
                        }
                    }
                }
                WireEncoding::Fp8 => {
                    let (scales, codes) = bytes.split_at_mut(2 * self.hc);
                    let (scales, _) = scales.as_chunks_mut::<2>();
                    let streams = row.chunks_exact(self.dim).zip(codes.chunks_exact_mut(self.dim)).zip(scales);
                    for (j, ((x, codes), scale_out)) in streams.enumerate() {
                        let scale = scale_of(x).ok_or_else(|| nan(j))?;
                        *scale_out = scale.to_le_bytes();
                        self.isa.dispatch(EncodeRow { x, scale: scale.to_f32(), codes });
                    }
                }
            }
        }
        Ok(())
    }

    /// Appends the values of positions `first …` to `out`.
    ///
    /// # Errors
    /// [`WireError::Length`], or [`WireError::Invalid`] for a NaN or a scale that no encoder makes;
    /// `out` is as before then.
    pub fn decode(&self, first: Position, bytes: &[u8], out: &mut Vec<bf16>) -> Result<(), WireError> {
        let positions = self.positions("bytes", bytes.len(), self.position_bytes())?;
        let start = out.len();
        out.resize(start + positions * self.hc * self.dim, bf16::ZERO);
        let outcome = self.decode_into(first, bytes, &mut out[start..]);
        if outcome.is_err() {
            out.truncate(start);
        }
        outcome
    }

    /// Writes the values of positions `first …`, as many as `bytes` holds, to all of `out`.
    ///
    /// # Errors
    /// As [`Wire::decode`]; `out` is undefined then.
    pub fn decode_into(&self, first: Position, bytes: &[u8], out: &mut [bf16]) -> Result<(), WireError> {
        let positions = self.positions("bytes", bytes.len(), self.position_bytes())?;
        self.exactly("values", out.len(), positions * self.hc * self.dim)?;
        let rows = out.chunks_exact_mut(self.hc * self.dim);
        for (p, (row, bytes)) in rows.zip(bytes.chunks_exact(self.position_bytes())).enumerate() {
            let invalid = |stream, what| WireError::Invalid { position: first.plus(p as u32), stream, what };
            match self.encoding {
                WireEncoding::Bf16 => {
                    let (pairs, _) = bytes.as_chunks::<2>();
                    for (j, (x, out)) in pairs.chunks_exact(self.dim).zip(row.chunks_exact_mut(self.dim)).enumerate() {
                        for (x, out) in x.iter().zip(out.iter_mut()) {
                            *out = bf16::from_le_bytes(*x);
                        }
                        if largest(out).is_nan() {
                            return Err(invalid(j, "a NaN value"));
                        }
                    }
                }
                WireEncoding::Fp8 => {
                    let (scales, codes) = bytes.split_at(2 * self.hc);
                    let (scales, _) = scales.as_chunks::<2>();
                    let streams = row.chunks_exact_mut(self.dim).zip(codes.chunks_exact(self.dim)).zip(scales);
                    for (j, ((out, codes), scale)) in streams.enumerate() {
                        let scale = bf16::from_le_bytes(*scale).to_f32();
                        if !(scale > 0.0 && scale < f32::INFINITY) {
                            return Err(invalid(j, "a scale that is not a positive number"));
                        }
                        if has_nan_code(codes) {
                            return Err(invalid(j, "a NaN code"));
                        }
                        self.isa.dispatch(DecodeRow { codes, scale, out });
                    }
                }
            }
        }
        Ok(())
    }

    /// Does to positions `first …` what crossing a ring boundary does, without the bytes.
    ///
    /// # Errors
    /// As [`Wire::encode`]; the values are undefined from the named position on.
    pub fn roundtrip(&self, first: Position, hidden: &mut [bf16]) -> Result<(), WireError> {
        self.positions("values", hidden.len(), self.hc * self.dim)?;
        for (i, x) in hidden.chunks_exact_mut(self.dim).enumerate() {
            let scale = scale_of(x)
                .ok_or(WireError::Nan { position: first.plus((i / self.hc) as u32), stream: i % self.hc })?;
            if self.encoding == WireEncoding::Fp8 {
                self.isa.dispatch(RoundtripRow { x, scale: scale.to_f32() });
            }
        }
        Ok(())
    }

    fn exactly(&self, unit: &'static str, got: usize, expected: usize) -> Result<(), WireError> {
        if got == expected { Ok(()) } else { Err(WireError::Length { unit, expected, got }) }
    }

    fn positions(&self, unit: &'static str, got: usize, each: usize) -> Result<usize, WireError> {
        if got.is_multiple_of(each) { Ok(got / each) } else { Err(WireError::Length { unit, expected: each, got }) }
    }
}

/// The largest magnitude; NaN if there is one. Magnitudes are ordered as their bits are.
fn largest(x: &[bf16]) -> bf16 {
    let mut bits = 0;
    for v in x {
        bits = bits.max(v.to_bits() & 0x7fff);
    }
    bf16::from_bits(bits)
}

/// The scale of one stream of one position, unless it holds a NaN.
fn scale_of(x: &[bf16]) -> Option<bf16> {
    let largest = largest(x);
    if largest.is_nan() {
        return None;
    }
    let scale = bf16::from_f32(largest.to_f32().max(1e-8) * (1.0 / E4M3_MAX));
    Some(if scale < bf16::MAX { scale } else { bf16::MAX })
}

fn has_nan_code(codes: &[u8]) -> bool {
    let mut found = false;
    for &code in codes {
        found |= code & 0x7f == 0x7f;
    }
    found
}

/// The E4M3 value nearest to `x / scale`, saturated, times 2^-8.
#[inline(always)]
fn quantize<V: Simd>(x: V, scale: V) -> V {
    let t = V::splat(E4M3_MAX).min(V::splat(-E4M3_MAX).max(x.div(scale))).mul(V::splat(1.0 / 256.0));
    let magnitude = t.abs();
    // The number whose ulp is the step of the codes around `magnitude`.
    let ruler = magnitude.quantum(1.0 / 16384.0, 20);
    magnitude.add(ruler).sub(ruler).with_sign(t)
}

struct EncodeRow<'a> {
    x: &'a [bf16],
    scale: f32,
    codes: &'a mut [u8],
}

impl Job for EncodeRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (x, _) = self.x.as_chunks::<8>();
        let (codes, _) = self.codes.as_chunks_mut::<8>();
        for (x, codes) in x.iter().zip(codes) {
            quantize(V::load_bf16(x), V::splat(self.scale)).store_e4m3(codes);
        }
    }
}

/// `bf16(code · scale)` from a code's value times 2^-8.
#[inline(always)]
fn restore<V: Simd>(value: V, scale: f32, out: &mut [bf16; 8]) {
    value.mul(V::splat(256.0)).mul(V::splat(scale)).store_bf16(out);
}

struct DecodeRow<'a> {
    codes: &'a [u8],
    scale: f32,
    out: &'a mut [bf16],
}

impl Job for DecodeRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (codes, _) = self.codes.as_chunks::<8>();
        let (out, _) = self.out.as_chunks_mut::<8>();
        for (codes, out) in codes.iter().zip(out) {
            let mut wide = [0; 16];
            wide[..8].copy_from_slice(codes);
            restore(V::load_e4m3(&wide)[0], self.scale, out);
        }
    }
}

struct RoundtripRow<'a> {
    x: &'a mut [bf16],
    scale: f32,
}

impl Job for RoundtripRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let (x, _) = self.x.as_chunks_mut::<8>();
        for x in x {
            restore(quantize(V::load_bf16(x), V::splat(self.scale)), self.scale, x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::format::{e4m3_decode, e4m3_encode};
    use proptest::prelude::*;

    /// The definition, value by value.
    fn reference(x: &[bf16]) -> (bf16, Vec<u8>, Vec<bf16>) {
        let a = x.iter().fold(0.0f32, |a, v| a.max(v.to_f32().abs()));
        let s = bf16::from_f32(a.max(1e-8) * (1.0f32 / 448.0)).to_f32().min(bf16::MAX.to_f32());
        let codes: Vec<u8> = x.iter().map(|v| e4m3_encode((v.to_f32() / s).clamp(-448.0, 448.0))).collect();
        let values = codes.iter().map(|&c| bf16::from_f32(e4m3_decode(c) * s)).collect();
        (bf16::from_f32(s), codes, values)
    }

    fn wires(encoding: WireEncoding, hc: usize, dim: usize) -> [Wire; 2] {
        let wire = Wire::new(encoding, hc, dim);
        [wire, Wire { isa: Isa::PORTABLE, ..wire }]
    }

    proptest! {
        #[test]
        fn fp8_is_the_definition(bits in proptest::collection::vec(any::<u16>(), 64), shift in 0u16..3) {
            // NaN has its own test; shifts bring the exponents nearer to each other.
            let x: Vec<bf16> = bits
                .iter()
                .map(|&b| bf16::from_bits(b & 0x8000 | (b & 0x7fff) >> shift | if shift > 0 { 0x2000 } else { 0 }))
                .map(|v| if v.is_nan() { bf16::ZERO } else { v })
                .collect();
            for wire in wires(WireEncoding::Fp8, 2, 16) {
                let mut bytes = vec![9];
                wire.encode(Position(5), &x, &mut bytes).unwrap();
                prop_assert_eq!(bytes.len(), 1 + 2 * wire.position_bytes());
                let mut expected = vec![9];
                let mut values = Vec::new();
                for position in x.chunks(32) {
                    let streams: Vec<_> = position.chunks(16).map(reference).collect();
                    streams.iter().for_each(|s| expected.extend(s.0.to_le_bytes()));
                    streams.iter().for_each(|s| expected.extend(&s.1));
                    streams.iter().for_each(|s| values.extend(s.2.iter().map(|v| v.to_bits())));
                }
                prop_assert_eq!(&bytes, &expected);
                let mut back = Vec::new();
                wire.decode(Position(5), &bytes[1..], &mut back).unwrap();
                prop_assert_eq!(back.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), values.clone());
                let mut here = x.clone();
                wire.roundtrip(Position(5), &mut here).unwrap();
                prop_assert_eq!(here.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), values);
            }
        }

        #[test]
        fn no_bytes_panic_and_what_decodes_is_no_nan(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            for encoding in [WireEncoding::Fp8, WireEncoding::Bf16] {
                for wire in wires(encoding, 2, 8) {
                    let mut out = Vec::new();
                    if wire.decode(Position(0), &bytes, &mut out).is_ok() {
                        prop_assert!(out.iter().all(|v| !v.is_nan()));
                    } else {
                        prop_assert!(out.is_empty());
                    }
                }
            }
        }
    }

    #[test]
    fn bf16_is_the_values() {
        let x: Vec<bf16> = (0..32).map(|i| bf16::from_f32(i as f32 - 7.5)).collect();
        for wire in wires(WireEncoding::Bf16, 2, 8) {
            let (mut bytes, mut back, mut here) = (Vec::new(), Vec::new(), x.clone());
            wire.encode(Position(0), &x, &mut bytes).unwrap();
            assert_eq!(bytes[2..4], x[1].to_le_bytes());
            wire.decode(Position(0), &bytes, &mut back).unwrap();
            wire.roundtrip(Position(0), &mut here).unwrap();
            assert_eq!((&back, &here), (&x, &x));
        }
    }

    #[test]
    fn an_infinity_stays_one_and_spoils_no_other_stream() {
        let mut x = vec![bf16::ONE; 32];
        x[3] = bf16::NEG_INFINITY;
        Wire::new(WireEncoding::Fp8, 2, 16).roundtrip(Position(0), &mut x).unwrap();
        assert_eq!(x[3], bf16::NEG_INFINITY);
        assert!(x[..16].iter().all(|v| !v.is_nan()));
        assert!(x[16..].iter().all(|v| *v == bf16::ONE));
    }

    #[test]
    fn a_nan_is_named_and_nothing_is_sent() {
        for encoding in [WireEncoding::Fp8, WireEncoding::Bf16] {
            let mut x = vec![bf16::ONE; 3 * 16];
            x[16 + 8 + 2] = bf16::NAN;
            let wire = Wire::new(encoding, 2, 8);
            let mut bytes = vec![1, 2];
            let error = WireError::Nan { position: Position(11), stream: 1 };
            assert_eq!(wire.encode(Position(10), &x, &mut bytes), Err(error.clone()));
            assert_eq!(bytes, [1, 2]);
            assert_eq!(wire.roundtrip(Position(10), &mut x), Err(error));
        }
    }

    #[test]
    fn a_peer_that_sends_nan_or_a_wrong_length_is_refused() {
        let wire = Wire::new(WireEncoding::Fp8, 1, 8);
        let mut out = Vec::new();
        let good = [&bf16::ONE.to_le_bytes()[..], &[0x38; 8]].concat();
        wire.decode(Position(0), &good, &mut out).unwrap();
        assert_eq!(out, [bf16::ONE; 8]);
        assert!(matches!(wire.decode(Position(0), &good[1..], &mut out), Err(WireError::Length { .. })));
        for scale in [bf16::NAN, bf16::INFINITY, bf16::ZERO, bf16::NEG_ONE] {
            let bytes = [&scale.to_le_bytes()[..], &[0x38; 8]].concat();
            assert!(matches!(wire.decode(Position(0), &bytes, &mut out), Err(WireError::Invalid { .. })));
        }
        for code in [0x7f, 0xff] {
            let bytes = [&good[..9], &[code]].concat();
            assert!(matches!(wire.decode(Position(0), &bytes, &mut out), Err(WireError::Invalid { .. })));
        }
        assert_eq!(out.len(), 8);
    }
}
