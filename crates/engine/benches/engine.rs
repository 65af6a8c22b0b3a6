//! Speed of the CPU engine on the embedded model: decode, prefill, drafts, single layers.
//!
//! `cargo bench -p ringfence-engine --bench engine`; elements are tokens.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use ringfence_engine::engine::cpu::{CpuEngine, CpuSettings};
use ringfence_engine::engine::{Chunk, Engine, Output, SessionShape};
use ringfence_engine::ids::{Position, SessionId, TokenId, WireEncoding};
use ringfence_engine::model::Checkpoint;

const SESSION: SessionId = SessionId(1);
/// Where decoding is measured: past the window and the first slots that the indexer leaves out.
const AT: u32 = 300;
const REACH: u32 = 256;

fn engine(range: &str, threads: usize, drafting: bool) -> CpuEngine {
    let checkpoint = Checkpoint::tiny().expect("the embedded model opens");
    let settings = CpuSettings { threads, ..CpuSettings::default() };
    let range = range.parse().expect("a range");
    let mut engine = CpuEngine::new(&checkpoint, range, &settings).expect("the engine builds");
    let shape =
        SessionShape { positions: 1024, reach: REACH, boundaries: Vec::new(), encoding: WireEncoding::Fp8, drafting };
    engine.open(SESSION, &shape).expect("the session opens");
    engine
}

/// Some ids of the vocabulary.
fn ids(n: u32) -> Vec<TokenId> {
    (0..n).map(|i| TokenId((i * 37 + 11) % 2048)).collect()
}

fn hidden(engine: &CpuEngine, rows: usize) -> Option<Vec<bf16>> {
    let facts = engine.facts();
    let value = |i: usize| bf16::from_f32(((i * 7919) % 256) as f32 / 128.0 - 1.0);
    (!facts.is_head()).then(|| (0..rows * facts.hc * facts.dim).map(value).collect())
}

/// Computes `ids` at `pos`; logits of the last position only.
fn forward(engine: &mut CpuEngine, pos: u32, ids: &[TokenId], hidden: Option<&[bf16]>, out: &mut Output) {
    let last = pos + u32::try_from(ids.len()).expect("few ids") - 1;
    let chunk = Chunk { session: SESSION, pos: Position(pos), ids, hidden, logits_from: Position(last) };
    engine.forward(&[chunk], out).expect("the pass succeeds");
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("decode");
    group.throughput(Throughput::Elements(1));
    let tokens = ids(AT + 1);
    for (range, threads) in [("0:7", 1), ("0:7", 2), ("0:1", 1), ("2:3", 1), ("3:4", 1), ("0:3", 1), ("6:7", 1)] {
        let mut engine = engine(range, threads, false);
        let mut out = Output::default();
        for pos in 0..AT {
            let hidden = hidden(&engine, 1);
            forward(&mut engine, pos, &tokens[pos as usize..=pos as usize], hidden.as_deref(), &mut out);
        }
        let hidden = hidden(&engine, 1);
        group.bench_function(BenchmarkId::new(format!("layers {range}"), format!("{threads} threads")), |b| {
            // The same position again and again: a rewind by one is free.
            b.iter(|| forward(&mut engine, AT, &tokens[AT as usize..], hidden.as_deref(), &mut out));
        });
    }
}

fn prefill(c: &mut Criterion) {
    let mut group = c.benchmark_group("prefill");
    for (rows, threads) in [(6, 1), (16, 1), (64, 1), (256, 1), (256, 2)] {
        group.throughput(Throughput::Elements(u64::from(rows)));
        let mut engine = engine("0:7", threads, true);
        let mut out = Output::default();
        let tokens = ids(rows);
        group.bench_function(BenchmarkId::new(format!("{rows} positions"), format!("{threads} threads")), |b| {
            b.iter(|| forward(&mut engine, 0, &tokens, None, &mut out));
        });
    }
}

fn draft(c: &mut Criterion) {
    let mut group = c.benchmark_group("draft");
    for threads in [1, 2] {
        let mut engine = engine("0:7", threads, true);
        let mut out = Output::default();
        forward(&mut engine, 0, &ids(AT), None, &mut out);
        group.bench_function(BenchmarkId::new("block of 5", format!("{threads} threads")), |b| {
            b.iter(|| engine.draft(SESSION, Position(AT - 1), TokenId(5)).expect("drafts"));
        });
        group.bench_function(BenchmarkId::new("decode with draft windows", format!("{threads} threads")), |b| {
            b.iter(|| forward(&mut engine, AT, &ids(1), None, &mut out));
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(2));
    targets = decode, prefill, draft
}
criterion_main!(benches);
