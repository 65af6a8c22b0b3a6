//! Speed of the canonical kernels against a plain read of the same weight bytes.
//!
//! `cargo bench -p ringfence-engine --bench kernels`; throughput is weight bytes for products, so `read` of about the
//! same size is what memory allows.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use ringfence_engine::engine::cpu::kernel::attend::{AttendScratch, Keys, Query, Slots, attend};
use ringfence_engine::engine::cpu::kernel::compress::RingRows;
use ringfence_engine::engine::cpu::kernel::linear::{Bf16Matrix, F32Matrix, Fp4Matrix, Fp8Matrix, Out, Rows};
use ringfence_engine::engine::cpu::kernel::quant::QuantRows;
use ringfence_engine::engine::cpu::kernel::{Isa, hyper, indexer, vector};
use ringfence_engine::engine::wire::Wire;
use ringfence_engine::ids::{Position, WireEncoding};

/// Reproducible bytes that are no NaN code of any format.
fn bytes(n: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8 & 0xb7
    };
    (0..n).map(|_| next()).collect()
}

fn floats(n: usize) -> Vec<f32> {
    bytes(n).iter().map(|&b| f32::from(b) / 64.0 - 1.4).collect()
}

fn halves(n: usize) -> Vec<bf16> {
    floats(n).iter().map(|&x| bf16::from_f32(x)).collect()
}

fn quantized(m: usize, k: usize) -> QuantRows {
    let mut x = QuantRows::new();
    x.quantize(Isa::detect(), &halves(m * k), k);
    x
}

/// The plain read: a sum over the words.
fn read(data: &[u8]) -> u64 {
    let (words, _) = data.as_chunks::<8>();
    words.iter().fold(0, |sum, w| sum.wrapping_add(u64::from_le_bytes(*w)))
}

const SHAPES: [(usize, usize); 4] = [(128, 256), (512, 128), (256, 256), (4096, 4096)];

fn reads(c: &mut Criterion) {
    let mut group = c.benchmark_group("read");
    for size in [16 << 10, 64 << 10, 1 << 20, 16 << 20] {
        let data = bytes(size);
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(BenchmarkId::from_parameter(size), |b| b.iter(|| read(black_box(&data))));
    }
}

fn products(c: &mut Criterion) {
    let isa = Isa::detect();
    for (n, k) in SHAPES {
        let mut group = c.benchmark_group(format!("product {n}x{k}"));
        let fp8 = Fp8Matrix::pack(n, k, &bytes(n * k), &vec![127; n.div_ceil(128) * k / 128]).expect("packed");
        let fp4 = Fp4Matrix::pack(n, k, &bytes(n * k / 2), &vec![127; n * k / 32]).expect("packed");
        let half = Bf16Matrix::pack(n, k, &halves(n * k)).expect("packed");
        for m in [1, 2, 4, 6] {
            let (x, values) = (quantized(m, k), floats(m * k));
            let mut y = vec![bf16::ZERO; m * n];
            group.throughput(Throughput::Bytes(fp8.bytes() as u64));
            group.bench_function(BenchmarkId::new("fp8", m), |b| b.iter(|| fp8.product(isa, &x, Out::bf16(&mut y, m))));
            group.throughput(Throughput::Bytes(fp4.bytes() as u64));
            group.bench_function(BenchmarkId::new("fp4", m), |b| b.iter(|| fp4.product(isa, &x, Out::bf16(&mut y, m))));
            group.throughput(Throughput::Bytes(half.bytes() as u64));
            group.bench_function(BenchmarkId::new("bf16", m), |b| {
                b.iter(|| half.product(isa, Rows::new(&values, m), Out::bf16(&mut y, m)));
            });
        }
    }
    let mut group = c.benchmark_group("product 24x1024");
    let full = F32Matrix::pack(24, 1024, &floats(24 * 1024)).expect("packed");
    for m in [1, 4] {
        let (x, mut y) = (floats(m * 1024), vec![0.0; m * 24]);
        group.throughput(Throughput::Bytes(full.bytes() as u64));
        group.bench_function(BenchmarkId::new("f32", m), |b| {
            b.iter(|| full.product(isa, Rows::new(&x, m), Out::f32(&mut y, m)));
        });
    }
}

fn rows(c: &mut Criterion) {
    let isa = Isa::detect();
    let mut group = c.benchmark_group("row");
    let (x, w) = (halves(1024), floats(256));
    let mut out = vec![bf16::ZERO; 256];
    group.bench_function("rms_norm 256", |b| b.iter(|| vector::rms_norm(isa, &x[..256], &w, 1e-6, &mut out)));
    let mut quant = QuantRows::new();
    group.bench_function("act_quant 256", |b| b.iter(|| quant.quantize(isa, &x[..256], 256)));
    let values = floats(1024);
    group.bench_function("rms_factor 1024", |b| b.iter(|| vector::rms_factor(isa, &values, 1e-6)));
    let split = hyper::Split { hc: 4, iterations: 20, eps: 1e-6, scale: &values[..3], base: &values[..24] };
    group.bench_function("sinkhorn 4x20", |b| b.iter(|| hyper::split(isa, black_box(&values[24..48]), 0.1, split)));
    let mix = hyper::split(isa, &values[24..48], 0.1, split);
    let mut h = x.clone();
    group.bench_function("collapse 4x256", |b| b.iter(|| hyper::collapse(isa, &x, &mix.pre[..4], &mut out)));
    group.bench_function("expand 4x256", |b| b.iter(|| hyper::expand(isa, &x[..256], &mut h, &mix)));
    let mut t = vec![bf16::ZERO; 128];
    group.bench_function("swiglu 128", |b| {
        b.iter(|| vector::swiglu(isa, &x[..128], &x[128..256], 10.0, 0.4, &mut t));
    });
    for encoding in [WireEncoding::Bf16, WireEncoding::Fp8] {
        let wire = Wire::new(encoding, 4, 256);
        let (mut bytes, mut back) = (vec![0; wire.position_bytes()], vec![bf16::ZERO; 1024]);
        group.bench_function(format!("wire {encoding} encode"), |b| {
            b.iter(|| wire.encode_into(Position(0), &x, &mut bytes).expect("encoded"));
        });
        group.bench_function(format!("wire {encoding} decode"), |b| {
            b.iter(|| wire.decode_into(Position(0), &bytes, &mut back).expect("decoded"));
        });
    }
}

fn attention(c: &mut Criterion) {
    let isa = Isa::detect();
    let mut group = c.benchmark_group("attend");
    for (heads, width, window, slots) in [(4, 128, 64, 16), (4, 128, 64, 128), (64, 512, 128, 512)] {
        let (ring, compressed) = (halves(window * width), halves(slots * width));
        let (q, sink) = (halves(heads * width), vec![0.1; heads]);
        let keys = Keys {
            window: RingRows::new(&ring, width, 0, 3, window),
            window_size: window,
            compressed: &compressed,
            slots: Slots::All(slots),
            block: &[],
        };
        let (mut scratch, mut out) = (AttendScratch::new(), vec![bf16::ZERO; heads * width]);
        let query = Query { q: &q, sink: &sink, scale: 0.08 };
        group.bench_function(format!("{heads}x{width}, {window}+{slots} keys"), |b| {
            b.iter(|| attend(isa, query, &keys, &mut scratch, &mut out));
        });
    }
    let (q, w, slots) = (halves(4 * 128), halves(4), halves(128 * 128));
    let mut scores = vec![0.0; 128];
    group.bench_function("indexer 4x128, 128 slots", |b| {
        b.iter(|| indexer::scores(isa, &q, &w, &slots, &mut scores));
    });
}

criterion_group!(benches, reads, products, rows, attention);
criterion_main!(benches);
