//! Everything that travels, at random, and what may happen to its bytes.

use bytes::Bytes;
use proptest::prelude::*;
use ringfence::ids::{Epoch, LayerRange, Position, SessionId, TokenId, VIEW_MAX, View, WireEncoding};
use ringfence::proto::codec::{DRAFT_TOKENS_MAX, TOP_TOKENS_MAX};
use ringfence::proto::control::{
    Control, Digests, Hello, Join, Kept, Neighbour, Offer, Open, Rebuild, Role, Sampling, SessionReport, StageReport,
    Want,
};
use ringfence::proto::frame::{Answer, DraftBlock, Frame, FrameHead, Reply, Scores};

fn finite() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |value| value.is_finite())
}

fn view() -> impl Strategy<Value = View> {
    (0..=VIEW_MAX.0).prop_map(View)
}

fn token() -> impl Strategy<Value = TokenId> {
    any::<u32>().prop_map(TokenId)
}

pub(crate) fn any_frame() -> impl Strategy<Value = Frame> {
    let numbers = (view(), any::<u64>(), any::<u32>(), any::<u32>(), 0..1_000_000_u32, any::<u32>(), any::<u32>());
    let ids = prop::collection::vec(token(), 1..40);
    let payload = prop::collection::vec(any::<u8>(), 0..300);
    (numbers, ids, payload).prop_map(|((view, session, epoch, start, pos, settled, from), ids, payload)| Frame {
        head: FrameHead {
            view,
            session: SessionId(session),
            epoch: Epoch(epoch),
            start: Position(start),
            pos: Position(pos),
            len: ids.len() as u32,
            settled: Position(settled),
            answer_from: Position(from),
        },
        ids,
        payload: Bytes::from(payload),
    })
}

pub(crate) fn any_reply() -> impl Strategy<Value = Reply> {
    let top = prop::collection::vec((token(), finite()), 0..6);
    let scores = prop::option::of(
        (prop::option::of(finite()), prop::option::of(finite()), top).prop_map(|(fed, picked, top)| Scores {
            fed,
            picked,
            top,
        }),
    );
    let answer = (token(), scores).prop_map(|(token, scores)| Answer { token, scores });
    let draft = prop::option::of(prop::collection::vec((token(), finite()), 0..16).prop_map(|pairs| {
        let (tokens, confidence) = pairs.into_iter().unzip();
        DraftBlock { tokens, confidence }
    }));
    let numbers = (view(), any::<u64>(), any::<u32>(), 0..1_000_000_u32, 1..1000_u32);
    (numbers, prop::collection::vec(answer, 0..12), draft).prop_map(
        |((view, session, epoch, pos, len), answers, draft)| Reply {
            view,
            session: SessionId(session),
            epoch: Epoch(epoch),
            pos: Position(pos),
            len,
            answers,
            draft,
        },
    )
}

pub(crate) fn any_control() -> impl Strategy<Value = Control> {
    prop_oneof![any_hello(), any_offer(), any_join(), any_open(), any_report(), any_small()]
}

fn text() -> impl Strategy<Value = String> {
    "[ -~é€]{0,40}"
}

fn addresses() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec("/ip4/[0-9.]{7}/udp/[0-9]{2,5}/quic-v1", 0..4)
}

fn encoding() -> impl Strategy<Value = WireEncoding> {
    prop_oneof![Just(WireEncoding::Bf16), Just(WireEncoding::Fp8)]
}

fn any_hello() -> impl Strategy<Value = Control> {
    let role = prop_oneof![Just(Role::Coordinator), Just(Role::Stage)];
    (any::<u16>(), text(), any::<[u8; 32]>(), role, text()).prop_map(
        |(protocol, numerics, model_digest, role, software)| {
            Control::Hello(Hello { protocol, numerics, model_digest, role, software })
        },
    )
}

fn any_offer() -> impl Strategy<Value = Control> {
    let range = (0..60_u16, 1..10_u16).prop_map(|(lo, n)| LayerRange::new(lo, lo + n).unwrap());
    let encodings = prop::collection::vec(encoding(), 0..3);
    (range, text(), any::<[u32; 3]>(), encodings, addresses(), view()).prop_map(
        |(range, device, [max_context, max_sessions, pid], encodings, addresses, view)| {
            let draft_block = pid % (DRAFT_TOKENS_MAX + 1);
            Control::Offer(Offer {
                range,
                device,
                draft_block,
                max_context,
                max_sessions,
                encodings,
                addresses,
                pid,
                view,
                spare: pid % 2 == 1,
                shadow: pid % 3 == 1,
            })
        },
    )
}

fn any_join() -> impl Strategy<Value = Control> {
    let neighbour = || {
        prop::option::of(
            addresses().prop_map(|addresses| Neighbour { peer: ringfence::ids::Node::random(), addresses }),
        )
    };
    (view(), neighbour(), neighbour())
        .prop_map(|(view, predecessor, successor)| Control::Join(Box::new(Join { view, predecessor, successor })))
}

fn any_open() -> impl Strategy<Value = Control> {
    let sampling = (0.0..100.0_f32, any::<u32>(), 0.001..1.0_f32, 0.0..=1.0_f32, any::<u64>())
        .prop_map(|(temperature, top_k, top_p, min_p, seed)| Sampling { temperature, top_k, top_p, min_p, seed });
    let want = prop::option::of((0..=u32::from(TOP_TOKENS_MAX), any::<bool>())).prop_map(|want| match want {
        None => Want::default(),
        Some((top, true)) => Want { scores: Some(top), logprobs: None },
        Some((top, false)) => Want { scores: None, logprobs: Some(top) },
    });
    let numbers = (view(), any::<u64>(), 1..10_000_u32, 0..10_000_u32, 1..10_000_u32, 0..=DRAFT_TOKENS_MAX);
    let boundaries = prop::collection::btree_set(1..60_u16, 0..5).prop_map(|set| set.into_iter().collect::<Vec<u16>>());
    (numbers, boundaries, encoding(), sampling, want).prop_map(
        |((view, session, prompt_len, more, reach, draft_block), boundaries, encoding, sampling, want)| {
            Control::Open(Open {
                view,
                session: SessionId(session),
                prompt_len,
                positions: prompt_len + more,
                reach,
                boundaries,
                encoding,
                sampling,
                draft_block,
                want,
                resumes: reach % 2 == 1,
            })
        },
    )
}

fn any_report() -> impl Strategy<Value = Control> {
    let session =
        any::<[u64; 7]>().prop_map(|[id, epoch, next, received, computed, forwarded, dropped]| SessionReport {
            session: SessionId(id),
            epoch: Epoch(epoch as u32),
            next: Position(next as u32),
            received,
            computed,
            decoded: computed / 2,
            forwarded,
            dropped,
        });
    (any::<[u64; 5]>(), view(), any::<u32>(), prop::collection::vec(session, 0..5)).prop_map(
        |([nonce, passes, busy_us, service_us, loaded_bytes], view, queued, sessions)| Control::Report {
            nonce,
            report: Box::new(StageReport {
                view,
                sessions,
                passes,
                busy_us,
                service_us,
                queued,
                loaded_bytes,
                hop: None,
            }),
        },
    )
}

fn any_small() -> impl Strategy<Value = Control> {
    (any::<[u64; 3]>(), view(), view(), text(), 0..20_u8).prop_map(|([a, b, c], view, current, reason, which)| {
        let session = SessionId(b);
        match which {
            0 => Control::Refused { reason },
            1 => Control::Joined { view },
            2 => Control::JoinRefused { view, current, reason },
            3 => Control::Opened { view, session, kept: Some(Box::new(kept(c))) },
            11 => Control::Rebuilt { view, session, next: Position(c as u32), outputs: digests(c) },
            12 => Control::Replay {
                session,
                from: Position(0),
                to: Position(c as u32 | 1),
                answer_from: Position(a as u32),
            },
            13 => Control::ReplayFailed { view, session, reason },
            14 => Control::Rebuild { session, rebuild: rebuild(a as u32, c as u32) },
            15 => Control::Shadow { view, source: (b % 2 == 0).then(ringfence::ids::Node::random) },
            16 => Control::Copy { view, to: (b % 2 == 0).then(|| neighbour(reason)) },
            17 => Control::Shadowed { view, session, next: Position(c as u32), again: a % 2 == 0 },
            4 => Control::Failed { view, session, reason },
            5 => Control::Close { session, settled: Position(c as u32) },
            6 => Control::Cancel { session, below: Epoch(c as u32) },
            7 => Control::Probe { nonce: a },
            8 => Control::Heartbeat { seq: a },
            9 => Control::HeartbeatAck { seq: a },
            10 => Control::Draining,
            _ => Control::NeighbourLost { view, peer: ringfence::ids::Node::random(), reason },
        }
    })
}

fn neighbour(address: String) -> Neighbour {
    Neighbour { peer: ringfence::ids::Node::random(), addresses: vec![address] }
}

fn digests(seed: u64) -> Digests {
    Digests { from: Position(seed as u32), list: vec![[seed as u8; 32]; (seed % 5) as usize] }
}

fn kept(seed: u64) -> Kept {
    let at = Position(seed as u32);
    Kept {
        next: at,
        ids: [seed as u8; 32],
        journal: (Position(1), at),
        inputs: digests(seed),
        outputs: digests(seed / 5),
    }
}

fn rebuild(from: u32, history: u32) -> Rebuild {
    let (from, history) = (Position(from.min(history)), Position(history));
    Rebuild { from, history, forward_from: from, digests_from: Position(from.0 / 2) }
}

/// What a hostile or broken peer does to bytes.
#[derive(Debug, Clone)]
pub(crate) enum Damage {
    Flip(usize, u8),
    Cut(usize),
    Append(Vec<u8>),
    /// Writes an extreme number somewhere.
    Number(usize, u32),
}

pub(crate) fn damage() -> impl Strategy<Value = Vec<Damage>> {
    let number = prop_oneof![Just(0_u32), Just(u32::MAX), Just(u32::MAX - 1), Just(1 << 31), any::<u32>()];
    let one = prop_oneof![
        (any::<usize>(), 1..=255_u8).prop_map(|(at, mask)| Damage::Flip(at, mask)),
        any::<usize>().prop_map(Damage::Cut),
        prop::collection::vec(any::<u8>(), 1..9).prop_map(Damage::Append),
        (any::<usize>(), number).prop_map(|(at, number)| Damage::Number(at, number)),
    ];
    prop::collection::vec(one, 1..4)
}

pub(crate) fn damaged(bytes: &[u8], damage: &[Damage]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for one in damage {
        let len = bytes.len().max(1);
        match one {
            Damage::Flip(at, mask) => bytes.iter_mut().skip(at % len).take(1).for_each(|byte| *byte ^= mask),
            Damage::Cut(at) => bytes.truncate(at % len),
            Damage::Append(more) => bytes.extend(more),
            Damage::Number(at, number) => {
                let at = (at % len) & !3;
                for (byte, new) in bytes.iter_mut().skip(at).zip(number.to_le_bytes()) {
                    *byte = new;
                }
            }
        }
    }
    bytes
}
