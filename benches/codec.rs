//! Frames and replies to bytes and back, against a copy of the same bytes.
//!
//! `cargo bench --bench codec`; sizes are those of the full model's wire, 4 streams of 4096 values
//! in fp8: 16 392 bytes a position. `encode` fills the payload in place as a stage does.

use std::hint::black_box;

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringfence::ids::{Epoch, Position, SessionId, TokenId, View, WireEncoding};
use ringfence::proto::codec::{Data, FrameBuffer, decode_data, encode_reply};
use ringfence::proto::frame::{Answer, DraftBlock, FrameHead, Reply};

const HC: usize = 4;
const DIM: usize = 4096;

fn frame(positions: usize) -> (FrameHead, Vec<TokenId>, Vec<u8>) {
    let head = FrameHead {
        view: View(1),
        session: SessionId(2),
        epoch: Epoch(3),
        start: Position(100),
        pos: Position(120),
        len: u32::try_from(positions).unwrap_or(1),
        settled: Position(110),
        answer_from: Position(120),
    };
    let ids = (0..head.len).map(TokenId).collect();
    let payload = vec![0x5a; positions * WireEncoding::Fp8.position_bytes(HC, DIM)];
    (head, ids, payload)
}

fn encode(head: &FrameHead, ids: &[TokenId], payload: &[u8]) -> Bytes {
    match FrameBuffer::begin(head, ids, payload.len()) {
        Ok(mut buffer) => {
            buffer.payload_mut().copy_from_slice(payload);
            buffer.finish()
        }
        Err(error) => unreachable!("the bench's own frame: {error}"),
    }
}

fn frames(c: &mut Criterion) {
    let mut group = c.benchmark_group("frame");
    for positions in [1, 16, 256] {
        let (head, ids, payload) = frame(positions);
        let bytes = encode(&head, &ids, &payload);
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(BenchmarkId::new("memcpy", positions), |b| b.iter(|| black_box(bytes.to_vec())));
        group.bench_function(BenchmarkId::new("encode", positions), |b| {
            b.iter(|| encode(black_box(&head), black_box(&ids), black_box(&payload)));
        });
        group.bench_function(BenchmarkId::new("decode", positions), |b| {
            b.iter(|| match decode_data(black_box(bytes.clone())) {
                Ok(Data::Frame(frame)) => frame.payload.len(),
                Ok(Data::Reply(_)) | Err(_) => 0,
            });
        });
    }
    group.finish();
}

fn replies(c: &mut Criterion) {
    let reply = Reply {
        view: View(1),
        session: SessionId(2),
        epoch: Epoch(3),
        pos: Position(120),
        len: 1,
        answers: vec![Answer { token: TokenId(7), scores: None }],
        draft: Some(DraftBlock { tokens: vec![TokenId(1); 5], confidence: vec![0.5; 5] }),
    };
    let Ok(bytes) = encode_reply(&reply) else { unreachable!("the bench's own reply") };
    let mut group = c.benchmark_group("reply");
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    group.bench_function("memcpy", |b| b.iter(|| black_box(bytes.to_vec())));
    group.bench_function("encode", |b| b.iter(|| encode_reply(black_box(&reply))));
    group.bench_function("decode", |b| b.iter(|| decode_data(black_box(bytes.clone()))));
    group.finish();
}

criterion_group!(benches, frames, replies);
criterion_main!(benches);
