//! Equal bits: a position's result depends on its history only. Not on chunks, batches, threads,
//! vector instructions, rewinds, or on where the layers are cut into stages.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::BTreeMap;

use half::bf16;
use ringfence_engine::engine::cpu::inspect;
use ringfence_engine::engine::cpu::{CpuEngine, CpuSettings};
use ringfence_engine::engine::wire::Wire;
use ringfence_engine::engine::{Chunk, Drafts, Engine, EngineError, OpenError, Output, SessionShape};
use ringfence_engine::ids::{LayerRange, Position, SessionId, TokenId, WireEncoding};
use ringfence_engine::model::Checkpoint;

const LAYERS: u16 = 7;
const ONE: SessionId = SessionId(1);
const TWO: SessionId = SessionId(2);

fn build(range: &str, settings: &CpuSettings) -> CpuEngine {
    let checkpoint = Checkpoint::tiny().unwrap();
    CpuEngine::new(&checkpoint, range.parse().unwrap(), settings).unwrap()
}

fn shape(reach: u32) -> SessionShape {
    SessionShape { positions: 320, reach, boundaries: Vec::new(), encoding: WireEncoding::Bf16, drafting: true }
}

/// Ids that look like text to nobody but exercise every expert.
fn ids(seed: u32, n: usize) -> Vec<TokenId> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        TokenId((state >> 16) % 2048)
    };
    (0..n).map(next).collect()
}

fn bits32(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn bits16(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Everything that a position shows: hidden state or logits, and a draft.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    hidden: Vec<u16>,
    logits: Vec<u32>,
    draft: Option<(Vec<TokenId>, Vec<u32>)>,
}

fn drafted(drafts: &Drafts) -> (Vec<TokenId>, Vec<u32>) {
    (drafts.tokens.clone(), bits32(&drafts.confidence))
}

/// Feeds `ids` at `pos` of a head engine and gives what each position shows; a draft is made at the
/// last one.
fn feed(engine: &mut CpuEngine, session: SessionId, pos: usize, ids: &[TokenId]) -> Vec<Seen> {
    let mut seen = feed_only(engine, session, pos, ids);
    if engine.facts().draft_block > 0 {
        let last = Position(u32::try_from(pos + ids.len() - 1).unwrap());
        let drafts = engine.draft(session, last, TokenId(77)).unwrap();
        seen.last_mut().unwrap().draft = Some(drafted(&drafts));
    }
    seen
}

/// As [`feed`], without a draft.
fn feed_only(engine: &mut CpuEngine, session: SessionId, pos: usize, ids: &[TokenId]) -> Vec<Seen> {
    let mut out = Output::default();
    let at = Position(u32::try_from(pos).unwrap());
    engine.forward(&[Chunk { session, pos: at, ids, hidden: None, logits_from: at }], &mut out).unwrap();
    let facts = engine.facts().clone();
    let row = facts.hc * facts.dim;
    let see = |k: usize| Seen {
        hidden: out.hidden.get(k * row..(k + 1) * row).map(bits16).unwrap_or_default(),
        logits: out.logits.get(k * facts.vocab..(k + 1) * facts.vocab).map(bits32).unwrap_or_default(),
        draft: None,
    };
    (0..ids.len()).map(see).collect()
}

/// What every position shows, fed one at a time.
fn singles(engine: &mut CpuEngine, ids: &[TokenId]) -> Vec<Seen> {
    engine.open(ONE, &shape(8)).unwrap();
    let seen = (0..ids.len()).flat_map(|pos| feed(engine, ONE, pos, &ids[pos..=pos])).collect();
    engine.close(ONE);
    seen
}

#[track_caller]
fn assert_seen(got: &[Seen], expected: &[Seen], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (k, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(got.hidden == expected.hidden, "{what}: hidden state of row {k}");
        assert!(got.logits == expected.logits, "{what}: logits of row {k}");
        if got.draft.is_some() {
            assert_eq!(got.draft, expected.draft, "{what}: draft of row {k}");
        }
    }
}

#[test]
fn a_chunk_equals_its_positions_across_every_boundary() {
    let ids = ids(1, 200);
    for range in ["0:7", "0:6"] {
        let mut engine = build(range, &CpuSettings::default());
        let expected = singles(&mut engine, &ids);
        let mut session = 100;
        for size in [2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 129, 200] {
            // The first chunk is shorter, so that boundaries fall on every place within a chunk.
            for first in [size, 1 + size / 2] {
                session += 1;
                engine.open(SessionId(session), &shape(200)).unwrap();
                let mut pos = 0;
                while pos < ids.len() {
                    let end = (pos + if pos == 0 { first } else { size }).min(ids.len());
                    let seen = feed(&mut engine, SessionId(session), pos, &ids[pos..end]);
                    assert_seen(&seen, &expected[pos..end], &format!("{range}: chunks of {size}, at {pos}"));
                    pos = end;
                }
                engine.close(SessionId(session));
            }
        }
    }
}

#[test]
fn a_chunk_longer_than_the_reach_equals_its_positions() {
    let ids = ids(1, 150);
    let mut engine = build("0:7", &CpuSettings::default());
    let expected = singles(&mut engine, &ids);
    engine.open(TWO, &shape(3)).unwrap();
    assert_seen(&feed(&mut engine, TWO, 0, &ids), &expected, "150 positions with reach 3");
}

#[test]
fn reopening_reads_nothing_stale() {
    const REACH: u32 = 16;
    let (truth, garbage) = (ids(2, 220), ids(3, 400));
    let mut engine = build("0:7", &CpuSettings::default());
    let expected = singles(&mut engine, &truth);
    engine.open(TWO, &shape(REACH)).unwrap();
    let mut next = 0;
    // Around the ends of blocks, the window, the first row that needs the indexer, and a ring's end.
    let near =
        |p: usize| (1..20).contains(&p) || (60..70).contains(&p) || (78..82).contains(&p) || (126..130).contains(&p);
    for pos in (1..200).filter(|&p| near(p)) {
        if next < pos {
            feed(&mut engine, TWO, next, &truth[next..pos]);
        }
        for depth in 1..=REACH as usize {
            feed_only(&mut engine, TWO, pos, &garbage[pos + depth..pos + 2 * depth]);
            inspect::poison(&mut engine, TWO, Position(u32::try_from(pos).unwrap()));
            next = if depth % 2 == 0 {
                let seen = feed_only(&mut engine, TWO, pos, &truth[pos..pos + 5]);
                assert_seen(&seen, &expected[pos..pos + 5], &format!("chunk at {pos} after {depth} stale positions"));
                pos + 5
            } else {
                let what = format!("re-opened at {pos} after {depth} stale ones");
                assert_seen(&feed(&mut engine, TWO, pos, &truth[pos..=pos]), &expected[pos..=pos], &what);
                let p = pos + 1;
                assert_seen(&feed_only(&mut engine, TWO, p, &truth[p..=p]), &expected[p..=p], &what);
                pos + 2
            };
        }
    }
}

#[test]
fn poison_reaches_the_result_where_it_may_be_read() {
    let truth = ids(2, 100);
    let mut engine = build("0:7", &CpuSettings::default());
    engine.open(ONE, &shape(16)).unwrap();
    feed(&mut engine, ONE, 0, &truth);
    // Poisoned as if re-opened at 90, but fed on from 100: rows 90..100 are read.
    inspect::poison(&mut engine, ONE, Position(90));
    let chunk = Chunk { session: ONE, pos: Position(100), ids: &truth[..1], hidden: None, logits_from: Position(100) };
    let error = engine.forward(&[chunk], &mut Output::default()).unwrap_err();
    assert_eq!(error, EngineError::NotFinite { range: "0:7".parse().unwrap(), pos: Position(100) });
}

#[test]
fn threads_and_vector_instructions_change_no_bit() {
    let ids = ids(4, 150);
    let mut reference: Option<Vec<Seen>> = None;
    for (threads, force_portable) in [(1, false), (2, false), (4, false), (1, true), (2, true)] {
        let mut engine = build("0:7", &CpuSettings { threads, force_portable, ..CpuSettings::default() });
        engine.open(ONE, &shape(100)).unwrap();
        let mut seen = feed(&mut engine, ONE, 0, &ids[..100]);
        for pos in 100..120 {
            seen.extend(feed(&mut engine, ONE, pos, &ids[pos..=pos]));
        }
        seen.extend(feed(&mut engine, ONE, 120, &ids[120..]));
        match &reference {
            None => reference = Some(seen),
            Some(expected) => assert_seen(&seen, expected, &format!("{threads} threads, portable {force_portable}")),
        }
    }
}

#[test]
fn sessions_do_not_touch_each_other() {
    let (first, second) = (ids(5, 120), ids(6, 120));
    let mut engine = build("0:7", &CpuSettings::default());
    let (alone_one, alone_two) = (singles(&mut engine, &first), singles(&mut engine, &second));
    let vocab = engine.facts().vocab;

    // Interleaved, in chunks of different sizes.
    engine.open(ONE, &shape(40)).unwrap();
    engine.open(TWO, &shape(40)).unwrap();
    for at in (0..120).step_by(20) {
        assert_seen(&feed(&mut engine, ONE, at, &first[at..at + 20]), &alone_one[at..at + 20], "interleaved one");
        for p in (at..at + 20).step_by(4) {
            assert_seen(&feed(&mut engine, TWO, p, &second[p..p + 4]), &alone_two[p..p + 4], "interleaved two");
        }
    }
    engine.close(ONE);
    engine.close(TWO);

    // Batched, at different positions.
    engine.open(ONE, &shape(40)).unwrap();
    engine.open(TWO, &shape(40)).unwrap();
    feed(&mut engine, TWO, 0, &second[..30]);
    let mut out = Output::default();
    for step in 0..30 {
        let (a, b) = (3 * step, 30 + step);
        let at = |pos: usize| Position(u32::try_from(pos).unwrap());
        let one = Chunk { session: ONE, pos: at(a), ids: &first[a..a + 3], hidden: None, logits_from: at(a) };
        let two = Chunk { session: TWO, pos: at(b), ids: &second[b..=b], hidden: None, logits_from: at(b) };
        engine.forward(&[one, two], &mut out).unwrap();
        let rows: Vec<Vec<u32>> = out.logits.chunks_exact(vocab).map(bits32).collect();
        let expected: Vec<&Seen> = alone_one[a..a + 3].iter().chain(&alone_two[b..=b]).collect();
        assert_eq!(rows.len(), 4);
        assert!(rows.iter().zip(expected).all(|(row, seen)| *row == seen.logits), "batched at step {step}");
    }
}

/// Every way to cut the layers into at most `most` stages, as cuts.
fn splits(most: usize) -> Vec<Vec<u16>> {
    let cuts = |mask: u32| (1..LAYERS).filter(|layer| mask & (1 << layer) != 0).collect::<Vec<_>>();
    (0..1u32 << LAYERS).filter(|mask| mask & 1 == 0).map(cuts).filter(|cuts| cuts.len() < most).collect()
}

/// Runs a chunk through chained stages, hidden states crossing as encoded bytes.
fn chained(
    stages: &mut BTreeMap<(u16, u16), CpuEngine>,
    cuts: &[u16],
    encoding: WireEncoding,
    pos: usize,
    ids: &[TokenId],
) -> Output {
    let ends: Vec<u16> = [0].into_iter().chain(cuts.iter().copied()).chain([LAYERS]).collect();
    let at = Position(u32::try_from(pos).unwrap());
    let mut hidden: Option<Vec<bf16>> = None;
    let mut out = Output::default();
    for pair in ends.windows(2) {
        let engine = stages.get_mut(&(pair[0], pair[1])).unwrap();
        let chunk = Chunk { session: ONE, pos: at, ids, hidden: hidden.as_deref(), logits_from: at };
        engine.forward(&[chunk], &mut out).unwrap();
        let wire = Wire::new(encoding, engine.facts().hc, engine.facts().dim);
        let (mut bytes, mut decoded) = (Vec::new(), Vec::new());
        wire.encode(at, &out.hidden, &mut bytes).unwrap();
        wire.decode(at, &bytes, &mut decoded).unwrap();
        hidden = Some(decoded);
    }
    out
}

#[test]
fn every_split_equals_one_process_with_the_boundaries_emulated() {
    let ids = ids(7, 90);
    let mut stages = BTreeMap::new();
    for lo in 0..LAYERS {
        for hi in lo + 1..=LAYERS {
            let engine = build(&format!("{lo}:{hi}"), &CpuSettings::default());
            stages.insert((lo, hi), engine);
        }
    }
    for encoding in [WireEncoding::Bf16, WireEncoding::Fp8] {
        for cuts in splits(4) {
            let shape = SessionShape { positions: 100, reach: 80, boundaries: cuts.clone(), encoding, drafting: true };
            let ends: Vec<u16> = [0].into_iter().chain(cuts.iter().copied()).chain([LAYERS]).collect();
            let drafts = ends[ends.len() - 2] <= 4;
            for pair in ends.windows(2) {
                let shape = SessionShape { drafting: drafts, ..shape.clone() };
                stages.get_mut(&(pair[0], pair[1])).unwrap().open(ONE, &shape).unwrap();
            }
            let mut whole = build("0:7", &CpuSettings::default());
            whole.open(ONE, &SessionShape { drafting: drafts, ..shape.clone() }).unwrap();
            let mut expected = Output::default();
            for (pos, len) in [(0, 70), (70, 1), (71, 6), (75, 1), (76, 14)] {
                let at = Position(pos);
                let chunk_ids = &ids[pos as usize..pos as usize + len];
                let got = chained(&mut stages, &cuts, encoding, pos as usize, chunk_ids);
                let chunk = Chunk { session: ONE, pos: at, ids: chunk_ids, hidden: None, logits_from: at };
                whole.forward(&[chunk], &mut expected).unwrap();
                assert!(bits32(&got.logits) == bits32(&expected.logits), "{cuts:?} {encoding} at {pos}+{len}");
                if drafts {
                    let last = Position(pos + u32::try_from(len).unwrap() - 1);
                    let tail = stages.get_mut(&(ends[ends.len() - 2], LAYERS)).unwrap();
                    let (ours, theirs) = (tail.draft(ONE, last, TokenId(9)), whole.draft(ONE, last, TokenId(9)));
                    assert_eq!(ours.unwrap(), theirs.unwrap(), "{cuts:?} {encoding}: draft at {last}");
                }
            }
            for pair in ends.windows(2) {
                stages.get_mut(&(pair[0], pair[1])).unwrap().close(ONE);
            }
        }
    }
}

#[test]
fn the_fp8_wire_is_seen_in_the_result() {
    let ids = ids(7, 30);
    let mut engine = build("0:7", &CpuSettings::default());
    let mut logits = Vec::new();
    for (boundaries, encoding) in [
        (vec![], WireEncoding::Fp8),
        (vec![3], WireEncoding::Bf16),
        (vec![3], WireEncoding::Fp8),
        (vec![4], WireEncoding::Fp8),
    ] {
        engine.open(ONE, &SessionShape { boundaries, encoding, ..shape(30) }).unwrap();
        logits.push(feed(&mut engine, ONE, 0, &ids));
        engine.close(ONE);
    }
    assert!(logits[0] == logits[1], "bf16 writes what was computed");
    assert!(logits[0] != logits[2] && logits[2] != logits[3], "fp8 rounds where the boundary is");
}

#[test]
fn a_draft_right_after_prefill_is_the_one_that_decoding_makes() {
    let ids = ids(8, 70);
    let mut engine = build("4:7", &CpuSettings::default());
    let mut head = build("0:4", &CpuSettings::default());
    let mut run = |engine: &mut CpuEngine, sizes: &[usize]| {
        head.open(ONE, &shape(70)).unwrap();
        engine.open(ONE, &shape(70)).unwrap();
        let mut pos = 0;
        for &size in sizes {
            let at = Position(u32::try_from(pos).unwrap());
            let ids = &ids[pos..pos + size];
            let mut out = Output::default();
            head.forward(&[Chunk { session: ONE, pos: at, ids, hidden: None, logits_from: at }], &mut out).unwrap();
            let hidden = std::mem::take(&mut out.hidden);
            engine
                .forward(&[Chunk { session: ONE, pos: at, ids, hidden: Some(&hidden), logits_from: at }], &mut out)
                .unwrap();
            pos += size;
        }
        let drafts = engine.draft(ONE, Position(69), TokenId(5)).unwrap();
        assert_eq!(drafts, engine.draft(ONE, Position(69), TokenId(5)).unwrap(), "drafting stores nothing");
        head.close(ONE);
        engine.close(ONE);
        drafts
    };
    let mut decode = vec![1; 70];
    assert_eq!(run(&mut engine, &[70]), run(&mut engine, &decode));
    decode.truncate(7);
    decode.push(63);
    let drafts = run(&mut engine, &decode);
    assert_eq!(drafts, run(&mut engine, &[70]));
    assert_eq!(drafts.tokens.len(), 5);
    assert_eq!(drafts.confidence.len(), 5);
}

#[test]
fn wider_blocks_draft_more_tokens() {
    let ids = ids(9, 40);
    for block in [1, 3, 15] {
        let mut engine = build("0:7", &CpuSettings { draft_block: Some(block), ..CpuSettings::default() });
        engine.open(ONE, &shape(40)).unwrap();
        feed(&mut engine, ONE, 0, &ids);
        let drafts = engine.draft(ONE, Position(39), TokenId(5)).unwrap();
        assert_eq!(drafts.tokens.len(), block as usize);
    }
}

#[test]
fn what_cannot_be_computed_is_refused_and_changes_nothing() {
    let text = ids(10, 60);
    let mut engine = build("0:7", &CpuSettings { max_context: Some(320), ..CpuSettings::default() });
    assert_eq!(
        engine.open(ONE, &SessionShape { positions: 321, ..shape(8) }),
        Err(OpenError::TooLong { asked: 321, limit: 320 })
    );
    assert_eq!(
        engine.open(ONE, &SessionShape { boundaries: vec![3, 7], ..shape(8) }),
        Err(OpenError::Boundary { got: 7, last: 6 })
    );
    engine.open(ONE, &SessionShape { positions: 50, ..shape(8) }).unwrap();
    assert_eq!(engine.open(ONE, &shape(8)), Err(OpenError::AlreadyOpen { session: ONE }));
    let expected = singles_of(&mut engine, &text[..42]);

    let mut out = Output::default();
    let mut forward = |engine: &mut CpuEngine, session, pos, ids: &[TokenId], hidden: Option<&[bf16]>| {
        let pos = Position(pos);
        engine.forward(&[Chunk { session, pos, ids, hidden, logits_from: pos }], &mut out)
    };
    feed(&mut engine, ONE, 0, &text[..40]);
    let bad = [TokenId(5), TokenId(2048)];
    let errors = [
        forward(&mut engine, TWO, 40, &text[..1], None),
        forward(&mut engine, ONE, 40, &[], None),
        forward(&mut engine, ONE, 40, &text[..1], Some(&[bf16::ZERO; 1024])),
        forward(&mut engine, ONE, 40, &bad, None),
        forward(&mut engine, ONE, 41, &text[..1], None),
        forward(&mut engine, ONE, 40, &text[..11], None),
        forward(&mut engine, ONE, 31, &text[..1], None),
    ];
    let (next, end) = (Position(40), Position(50));
    assert_eq!(
        errors.map(Result::unwrap_err),
        [
            EngineError::NotOpen { session: TWO },
            EngineError::Shape { ids: 0, got: 0, expected: 0 },
            EngineError::Shape { ids: 1, got: 1024, expected: 0 },
            EngineError::Token { pos: Position(41), got: TokenId(2048), vocab: 2048 },
            EngineError::Range { pos: Position(41), len: 1, next, end },
            EngineError::Range { pos: Position(40), len: 11, next, end },
            EngineError::Reach { pos: Position(31), next, reach: 8 },
        ]
    );
    assert!(engine.draft(ONE, Position(40), TokenId(1)).is_err(), "position 40 was not computed");
    assert_seen(&feed(&mut engine, ONE, 40, &text[40..42]), &expected[40..42], "after the refusals");

    let mut tail = build("5:7", &CpuSettings::default());
    assert_eq!(tail.open(ONE, &shape(8)), Err(OpenError::NoDrafter { range: "5:7".parse().unwrap() }));
    let mut small = build("0:7", &CpuSettings { max_state_bytes: 1000, ..CpuSettings::default() });
    let needed = small.state_bytes(&shape(8));
    assert_eq!(small.open(ONE, &shape(8)), Err(OpenError::Memory { needed, free: 1000 }));
}

/// As [`singles`], in a session of its own.
fn singles_of(engine: &mut CpuEngine, ids: &[TokenId]) -> Vec<Seen> {
    let session = SessionId(99);
    engine.open(session, &shape(8)).unwrap();
    let seen = (0..ids.len()).flat_map(|pos| feed(engine, session, pos, &ids[pos..=pos])).collect();
    engine.close(session);
    seen
}

#[test]
fn a_hidden_state_that_is_not_finite_is_named() {
    let mut engine = build("2:5", &CpuSettings::default());
    engine.open(ONE, &SessionShape { drafting: false, ..shape(8) }).unwrap();
    let mut hidden = vec![bf16::from_f32(0.1); 3 * 1024];
    hidden[1024 + 7] = bf16::NAN;
    let ids = ids(1, 3);
    let chunk = Chunk { session: ONE, pos: Position(0), ids: &ids, hidden: Some(&hidden), logits_from: Position(0) };
    let range: LayerRange = "2:5".parse().unwrap();
    let error = engine.forward(&[chunk], &mut Output::default()).unwrap_err();
    assert_eq!(error, EngineError::NotFinite { range, pos: Position(1) });
}
