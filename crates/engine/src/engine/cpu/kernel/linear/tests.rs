//! The canonical order against a loop that spells it, on every instruction set and shape.

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::engine::cpu::kernel::golden::Golden;
use crate::engine::cpu::kernel::isa::Isa;
use crate::engine::cpu::kernel::quant::QuantRows;
use crate::model::format::{e2m1_decode, e4m3_decode, e8m0_decode};

/// The order of `docs/numerics.md`, literally: `w` and `x` are codes of one row, `scale(i)` the
/// scale product of run i.
fn canonical(run: usize, w: &[f32], x: &[f32], scale: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; 32];
    for (i, (w, x)) in w.chunks(run).zip(x.chunks(run)).enumerate() {
        let mut s = 0.0f32;
        for (&w, &x) in w.iter().zip(x) {
            s = w.mul_add(x, s);
        }
        lanes[i % 32] = s.mul_add(scale(i), lanes[i % 32]);
    }
    for o in [16, 8, 4, 2, 1] {
        let before = lanes;
        for l in 0..32 {
            lanes[l] = before[l] + before[l ^ o];
        }
    }
    lanes[0]
}

fn isas() -> [Isa; 2] {
    [Isa::PORTABLE, Isa::detect()]
}

/// A small generator: reproducible bytes from a seed.
struct Bytes(u64);

impl Bytes {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn e4m3(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).map(|c| if c & 0x7f == 0x7f { c & 0x80 } else { c }).collect()
    }

    fn near_one(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| 117 + (self.next() % 20) as u8).collect()
    }

    fn bf16(&mut self, n: usize) -> Vec<bf16> {
        (0..n)
            .map(|_| bf16::from_f32((self.next() as f32 / 1e9 - 1.07) * 2f32.powi(self.next() as i32 % 9 - 4)))
            .collect()
    }

    fn f32(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() as f32 / 1e9 - 1.07) * 2f32.powi(self.next() as i32 % 9 - 4)).collect()
    }
}

fn quantized(x: &[bf16], k: usize) -> QuantRows {
    let mut rows = QuantRows::new();
    rows.quantize(Isa::PORTABLE, x, k);
    rows
}

/// Codes of one row.
fn codes(x: &QuantRows, row: usize) -> Vec<f32> {
    (0..x.k()).map(|i| x.code(row, i)).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn fp8_reference(n: usize, k: usize, w: &[u8], s: &[u8], x: &QuantRows) -> Vec<f32> {
    let mut y = Vec::new();
    for m in 0..x.rows() {
        let xs = codes(x, m);
        for row in 0..n {
            let ws: Vec<f32> = w[row * k..][..k].iter().map(|&c| e4m3_decode(c)).collect();
            let scale = |i: usize| e8m0_decode(s[row / 128 * (k / 128) + i / 8]) * x.scale(m, i / 8);
            y.push(canonical(16, &ws, &xs, scale));
        }
    }
    y
}

fn fp4_reference(n: usize, k: usize, w: &[u8], s: &[u8], x: &QuantRows) -> Vec<f32> {
    let mut y = Vec::new();
    for m in 0..x.rows() {
        let xs = codes(x, m);
        for row in 0..n {
            let ws: Vec<f32> = (0..k).map(|i| e2m1_decode(w[(row * k + i) / 2] >> (4 * (i % 2)))).collect();
            let scale = |i: usize| e8m0_decode(s[row * (k / 32) + i]) * x.scale(m, i / 4);
            y.push(canonical(32, &ws, &xs, scale));
        }
    }
    y
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn fp8_has_the_canonical_bits(n in 1usize..150, blocks in 1usize..10, m in 1usize..10, seed: u64) {
        let (k, mut bytes) = (blocks * 128, Bytes(seed));
        let (w, s) = (bytes.e4m3(n * k), bytes.near_one(n.div_ceil(128) * blocks));
        let x = quantized(&bytes.bf16(m * k), k);
        let matrix = Fp8Matrix::pack(n, k, &w, &s).unwrap();
        let expected = fp8_reference(n, k, &w, &s, &x);
        for isa in isas() {
            let mut y = vec![0.0; m * n];
            matrix.product(isa, &x, Out::f32(&mut y, m));
            prop_assert_eq!(bits(&y), bits(&expected));
            let mut rounded = vec![bf16::ZERO; m * n];
            matrix.product(isa, &x, Out::bf16(&mut rounded, m));
            prop_assert!(rounded.iter().zip(&expected).all(|(r, &e)| r.to_bits() == bf16::from_f32(e).to_bits()));
        }
    }

    #[test]
    fn fp4_has_the_canonical_bits(n in 1usize..100, blocks in 1usize..12, m in 1usize..10, seed: u64) {
        let (k, mut bytes) = (blocks * 128, Bytes(seed));
        let w: Vec<u8> = (0..n * k / 2).map(|_| bytes.next() as u8).collect();
        let s = bytes.near_one(n * k / 32);
        let x = quantized(&bytes.bf16(m * k), k);
        let matrix = Fp4Matrix::pack(n, k, &w, &s).unwrap();
        let expected = fp4_reference(n, k, &w, &s, &x);
        for isa in isas() {
            let mut y = vec![0.0; m * n];
            matrix.product(isa, &x, Out::f32(&mut y, m));
            prop_assert_eq!(bits(&y), bits(&expected));
        }
    }

    #[test]
    fn float_weights_have_the_canonical_bits(n in 1usize..70, eights in 1usize..150, m in 1usize..10, seed: u64) {
        let (k, mut bytes) = (eights * 8, Bytes(seed));
        let (w, x) = (bytes.bf16(n * k), bytes.f32(m * k));
        let wf: Vec<f32> = bytes.f32(n * k);
        let wide: Vec<f32> = w.iter().map(|v| v.to_f32()).collect();
        let reference = |w: &[f32], run: usize| -> Vec<f32> {
            let row = |m: usize, n: usize| canonical(run, &w[n * k..][..k], &x[m * k..][..k], |_| 1.0);
            (0..m).flat_map(|m| (0..n).map(move |n| (m, n))).map(|(m, n)| row(m, n)).collect()
        };
        let (half, full) = (Bf16Matrix::pack(n, k, &w).unwrap(), F32Matrix::pack(n, k, &wf).unwrap());
        for isa in isas() {
            let mut y = vec![0.0; m * n];
            half.product(isa, Rows::new(&x, m), Out::f32(&mut y, m));
            prop_assert_eq!(bits(&y), bits(&reference(&wide, 8)));
            full.product(isa, Rows::new(&x, m), Out::f32(&mut y, m));
            prop_assert_eq!(bits(&y), bits(&reference(&wf, 4)));
        }
    }
}

#[test]
fn products_match_the_official_bits() {
    let golden = Golden::ops();
    for isa in isas() {
        let w = Fp8Matrix::pack(256, 256, &golden.u8("fp8_linear.w_bytes"), &golden.u8("fp8_linear.scale_bytes"));
        let x = quantized(&golden.bf16("fp8_linear.x"), 256);
        let mut y = vec![bf16::ZERO; 7 * 256];
        w.unwrap().product(isa, &x, Out::bf16(&mut y, 7));
        assert_eq!(y, golden.bf16("fp8_linear.y"));
        let w = Fp4Matrix::pack(128, 256, &golden.u8("fp4_linear.w_bytes"), &golden.u8("fp4_linear.scale_bytes"));
        let x = quantized(&golden.bf16("fp4_linear.x"), 256);
        let mut y = vec![bf16::ZERO; 7 * 128];
        w.unwrap().product(isa, &x, Out::bf16(&mut y, 7));
        assert_eq!(y, golden.bf16("fp4_linear.y"));
    }
}

#[test]
fn extreme_codes_and_scales_have_the_canonical_bits() {
    let (n, k) = (20, 256);
    let mut bytes = Bytes(7);
    // ±448, ±2^-9, ±0 in the weights; scales whose products over- and underflow.
    let w: Vec<u8> = (0..n * k).map(|_| [0x7e, 0xfe, 0x01, 0x81, 0x00, 0x80][bytes.next() as usize % 6]).collect();
    let pairs: Vec<u8> =
        (0..n * k / 2).map(|_| [0x7f, 0x11, 0x99, 0x00, 0x88, 0xf1][bytes.next() as usize % 6]).collect();
    for scale in [0u8, 1, 30, 127, 200, 254] {
        for magnitude in [0.0, 1e-38, 1e-4, 1.0, 3e38] {
            let x: Vec<bf16> =
                bytes.bf16(2 * k).iter().map(|v| bf16::from_f32(v.to_f32().signum() * magnitude)).collect();
            let x = quantized(&x, k);
            let (s8, s4) = (vec![scale; 2], vec![scale; n * k / 32]);
            for isa in isas() {
                let mut y = vec![0.0; 2 * n];
                Fp8Matrix::pack(n, k, &w, &s8).unwrap().product(isa, &x, Out::f32(&mut y, 2));
                let expected = fp8_reference(n, k, &w, &s8, &x);
                assert!(same(&y, &expected), "fp8 scale {scale} x {magnitude}");
                Fp4Matrix::pack(n, k, &pairs, &s4).unwrap().product(isa, &x, Out::f32(&mut y, 2));
                let expected = fp4_reference(n, k, &pairs, &s4, &x);
                assert!(same(&y, &expected), "fp4 scale {scale} x {magnitude}");
            }
        }
    }
}

/// Equal bits; any NaN equals any NaN.
fn same(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
}

#[test]
fn a_range_of_outputs_and_groups_have_the_same_bits() {
    let (n, k, m) = (96, 64, 5);
    let mut bytes = Bytes(3);
    let (w, x) = (bytes.bf16(n * k), bytes.f32(m * 3 * k));
    let matrix = Bf16Matrix::pack(n, k, &w).unwrap();
    let mut whole = vec![0.0; m * n];
    matrix.grouped(Isa::detect(), 3, Rows::new(&x, m), Out::f32(&mut whole, m));
    let mut parts = vec![0.0; m * n];
    let (low, high) = Columns::all(&mut parts, m).split_at(48);
    matrix.grouped(Isa::PORTABLE, 3, Rows::new(&x, m), Out::F32(low));
    matrix.grouped(Isa::detect(), 3, Rows::new(&x, m), Out::F32(high));
    assert_eq!(bits(&whole), bits(&parts));
    for row in 0..m {
        for out in 0..n {
            let xs = &x[row * 3 * k + out / 32 * k..][..k];
            let ws: Vec<f32> = w[out * k..][..k].iter().map(|v| v.to_f32()).collect();
            assert_eq!(whole[row * n + out].to_bits(), canonical(8, &ws, xs, |_| 1.0).to_bits());
        }
    }
}

#[test]
fn bytes_of_another_shape_or_with_nan_are_refused() {
    assert!(matches!(Fp8Matrix::pack(16, 100, &[0; 1600], &[127; 1]), Err(PackError::Inputs { k: 100, .. })));
    assert!(matches!(Fp8Matrix::pack(0, 128, &[], &[]), Err(PackError::Outputs)));
    assert!(matches!(Fp8Matrix::pack(1, 128, &[0; 127], &[127]), Err(PackError::Size { expected: 128, got: 127, .. })));
    assert!(matches!(Fp8Matrix::pack(1, 128, &[0; 128], &[255]), Err(PackError::Nan { what: "scale", index: 0 })));
    assert!(matches!(Fp8Matrix::pack(1, 128, &[0xff; 128], &[127]), Err(PackError::Nan { what: "code", .. })));
    assert!(matches!(Fp4Matrix::pack(1, 128, &[0; 64], &[1, 2, 3, 255]), Err(PackError::Nan { index: 3, .. })));
    assert!(matches!(Bf16Matrix::pack(1, 8, &[bf16::NAN; 8]), Err(PackError::Nan { .. })));
    assert!(matches!(F32Matrix::pack(1, 6, &[0.0; 6]), Err(PackError::Inputs { multiple: 4, .. })));
}

#[test]
fn fp8_as_bf16_is_exact() {
    let values = fp8_to_bf16(1, 128, &[0x35; 128], &[130]).unwrap();
    assert_eq!(values[0].to_f32(), e4m3_decode(0x35) * 8.0);
}
