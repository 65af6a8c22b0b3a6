//! Bytes of everything that travels: they come back as they went, and no bytes of a peer do harm.

use bytes::Bytes;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use ringfence::ids::{Epoch, LayerRange, Position, SessionId, TokenId, View, WireEncoding};
use ringfence::proto::codec::{
    CONTROL_HEADER_BYTES, Data, DecodeError, EncodeError, FRAME_BYTES_MAX, FRAME_IDS_MAX, FrameBuffer, bounded_reason,
    decode_control, decode_data, encode_control, encode_frame, encode_reply, frame_header_bytes,
};
use ringfence::proto::control::{Control, Join, Neighbour, Offer, Open, PROTOCOL_VERSION, Sampling, Want};
use ringfence::proto::frame::{Answer, DraftBlock, FrameHead, Reply, Scores};

use super::arbitrary::{any_control, any_frame, any_reply, damage, damaged};
use super::counting::allocated_by;

fn config(cases: u32, seed: u64) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(seed), ..ProptestConfig::default() }
}

/// Bytes that decoding may allocate for each byte that came: an answer takes eight bytes at least
/// on the wire and less than six times that in memory, a session's report seven bytes and ten times.
const DATA_ALLOCATION_MAX: usize = 6;
const CONTROL_ALLOCATION_MAX: usize = 64;
/// And for what does not grow with the message: the reference count of a payload, an error's text.
const FIXED_ALLOCATION_MAX: usize = 512;

/// What decodes is canonical (it encodes to the very bytes it came from, so no two different bodies
/// mean the same), and nothing is allocated beyond what the bytes can fill.
fn decodes_canonically_or_not_at_all(bytes: Vec<u8>) {
    let bytes = Bytes::from(bytes);
    let (data, allocated) = allocated_by(|| decode_data(bytes.clone()));
    let limit = DATA_ALLOCATION_MAX * bytes.len() + FIXED_ALLOCATION_MAX;
    assert!(allocated <= limit, "{} bytes made decoding allocate {allocated}", bytes.len());
    match data {
        Ok(Data::Frame(frame)) => assert_eq!(encode_frame(&frame.head, &frame.ids, &frame.payload).unwrap(), bytes),
        Ok(Data::Reply(reply)) => assert_eq!(encode_reply(&reply).unwrap(), bytes),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let (control, allocated) = allocated_by(|| decode_control(&bytes));
    let limit = CONTROL_ALLOCATION_MAX * bytes.len() + FIXED_ALLOCATION_MAX;
    assert!(allocated <= limit, "{} bytes made decoding allocate {allocated}", bytes.len());
    match control {
        Ok(control) => drop(encode_control(&control).unwrap()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

proptest! {
    #![proptest_config(config(1000, 3))]

    #[test]
    fn frames_come_back_as_they_went(frame in any_frame()) {
        let bytes = encode_frame(&frame.head, &frame.ids, &frame.payload).unwrap();
        prop_assert_eq!(bytes.len(), frame_header_bytes(frame.ids.len()) + frame.payload.len());
        let mut buffer = FrameBuffer::begin(&frame.head, &frame.ids, frame.payload.len()).unwrap();
        buffer.payload_mut().copy_from_slice(&frame.payload);
        prop_assert_eq!(buffer.finish(), bytes.clone());
        let Data::Frame(back) = decode_data(bytes.clone()).unwrap() else { panic!("not a frame") };
        let payload_at = bytes.len() - frame.payload.len();
        prop_assert!(frame.payload.is_empty() || back.payload.as_ptr() == bytes[payload_at..].as_ptr(), "not copied");
        prop_assert!(back.ids.capacity() == frame.ids.len());
        prop_assert_eq!(back, frame);
    }

    #[test]
    fn replies_come_back_as_they_went(reply in any_reply()) {
        let bytes = encode_reply(&reply).unwrap();
        prop_assert_eq!(decode_data(bytes).unwrap(), Data::Reply(reply));
    }

    #[test]
    fn control_messages_come_back_as_they_went(control in any_control()) {
        let bytes = encode_control(&control).unwrap();
        prop_assert_eq!(decode_control(&bytes).unwrap(), control);
    }

    #[test]
    fn a_message_cut_short_or_continued_is_refused(frame in any_frame(), reply in any_reply(), cut in any::<usize>()) {
        let frame = encode_frame(&frame.head, &frame.ids, &frame.payload).unwrap();
        for bytes in [frame, encode_reply(&reply).unwrap()] {
            let short = bytes.slice(..cut % bytes.len());
            let is_short = matches!(decode_data(short), Err(DecodeError::Short { .. }));
            prop_assert!(is_short);
            let long = Bytes::from([&bytes[..], &[0]].concat());
            prop_assert_eq!(decode_data(long), Err(DecodeError::Trailing { extra: 1 }));
        }
    }
}

proptest! {
    #![proptest_config(config(4000, 4))]

    #[test]
    fn damaged_frames_do_no_harm(frame in any_frame(), damage in damage()) {
        let bytes = encode_frame(&frame.head, &frame.ids, &frame.payload).unwrap();
        decodes_canonically_or_not_at_all(damaged(&bytes, &damage));
    }

    #[test]
    fn damaged_replies_do_no_harm(reply in any_reply(), damage in damage()) {
        decodes_canonically_or_not_at_all(damaged(&encode_reply(&reply).unwrap(), &damage));
    }

    #[test]
    fn damaged_control_messages_do_no_harm(control in any_control(), damage in damage()) {
        let bytes = encode_control(&control).unwrap();
        // Behind the header, where the parser is.
        let body = damaged(&bytes[CONTROL_HEADER_BYTES..], &damage);
        decodes_canonically_or_not_at_all([&bytes[..CONTROL_HEADER_BYTES], &body].concat());
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200), lane in 0..4_u8) {
        let header: &[u8] = match lane {
            0 => &[],
            1 => b"RFDT\x05\x00\x01\x00",
            2 => b"RFDT\x05\x00\x02\x00",
            _ => b"RFCT\x05\x00",
        };
        decodes_canonically_or_not_at_all([header, &bytes].concat());
    }
}

pub(crate) fn small_frame() -> (FrameHead, Vec<TokenId>) {
    let head = FrameHead {
        view: View(0x0506_0708),
        session: SessionId(9),
        epoch: Epoch(10),
        start: Position(11),
        pos: Position(12),
        len: 2,
        settled: Position(13),
        answer_from: Position(14),
    };
    (head, vec![TokenId(15), TokenId(0xaabb)])
}

#[test]
fn the_layouts_are_the_documented_ones() {
    let (head, ids) = small_frame();
    let bytes = encode_frame(&head, &ids, &[0xee, 0xff]).unwrap();
    let mut expected = b"RFDT\x05\x00\x01\x00\x08\x07\x06\x05\0\0\0\0\x09\0\0\0\0\0\0\0".to_vec();
    for number in [10_u32, 11, 12, 13, 14, 2, 2, 15, 0xaabb] {
        expected.extend(number.to_le_bytes());
    }
    expected.extend([0xee, 0xff]);
    assert_eq!(bytes, expected);

    let scores = Some(Scores { fed: Some(-1.0), picked: Some(-3.0), top: vec![(TokenId(4), -0.5)] });
    let reply = Reply {
        view: View(1),
        session: SessionId(2),
        epoch: Epoch(3),
        pos: Position(4),
        len: 2,
        answers: vec![Answer { token: TokenId(5), scores: None }, Answer { token: TokenId(6), scores }],
        draft: Some(DraftBlock { tokens: vec![TokenId(7)], confidence: vec![2.0] }),
    };
    let mut expected = b"RFDT\x05\x00\x02\x00\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
    for number in [3_u32, 4, 2, 2, 1, 5, 0, 6] {
        expected.extend(number.to_le_bytes());
    }
    expected.extend([7, 0, 1, 0]);
    expected.extend((-1.0_f32).to_le_bytes());
    expected.extend((-3.0_f32).to_le_bytes());
    expected.extend(4_u32.to_le_bytes());
    expected.extend((-0.5_f32).to_le_bytes());
    expected.extend(7_u32.to_le_bytes());
    expected.extend(2.0_f32.to_le_bytes());
    assert_eq!(encode_reply(&reply).unwrap(), expected);
}

#[test]
fn counts_are_refused_before_anything_is_allocated_for_them() {
    let (head, ids) = small_frame();
    let bytes = encode_frame(&head, &ids, &[]).unwrap();
    let with = |bytes: &[u8], at: usize, number: u32| {
        let mut bytes = bytes.to_vec();
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        decode_data(Bytes::from(bytes)).unwrap_err()
    };
    let limit = u64::from(FRAME_IDS_MAX);
    assert_eq!(
        with(&bytes, 44, FRAME_IDS_MAX + 1),
        DecodeError::TooMany { what: "positions in a frame", got: limit + 1, limit }
    );
    assert_eq!(
        with(&bytes, 44, FRAME_IDS_MAX),
        DecodeError::Short { what: "positions in a frame", needed: 4 * FRAME_IDS_MAX as usize, got: 8 }
    );
    assert_eq!(with(&bytes, 44, 0), DecodeError::Span { pos: Position(12), len: 0 });
    assert_eq!(with(&bytes, 48, 1), DecodeError::Short { what: "payload", needed: 1, got: 0 });
    assert_eq!(with(&bytes, 32, u32::MAX), DecodeError::Span { pos: Position(u32::MAX), len: 2 });
    let long = Bytes::from(vec![0; FRAME_BYTES_MAX as usize + 1]);
    assert_eq!(
        decode_data(long),
        Err(DecodeError::TooLong { got: FRAME_BYTES_MAX as usize + 1, limit: FRAME_BYTES_MAX })
    );
}

#[test]
fn what_a_peer_would_refuse_is_not_sent() {
    let (head, ids) = small_frame();
    assert_eq!(encode_frame(&head, &ids[..1], &[]), Err(EncodeError::Ids { len: 2, ids: 1 }));
    assert_eq!(encode_frame(&FrameHead { len: 0, ..head }, &[], &[]), Err(EncodeError::Ids { len: 0, ids: 0 }));
    let many = vec![TokenId(0); FRAME_IDS_MAX as usize + 1];
    let head = FrameHead { len: many.len() as u32, ..head };
    assert!(matches!(encode_frame(&head, &many, &[]), Err(EncodeError::TooMany { .. })));
    let (head, ids) = small_frame();
    let too_long = FrameBuffer::begin(&head, &ids, FRAME_BYTES_MAX as usize).map(|_| ());
    assert_eq!(
        too_long.unwrap_err().to_string(),
        "message of 67108924 bytes, the limit is 67108864: send fewer positions at once"
    );
    let reply = Reply {
        view: View(1),
        session: SessionId(2),
        epoch: Epoch(3),
        pos: Position(4),
        len: 1,
        answers: vec![Answer { token: TokenId(5), scores: None }],
        draft: Some(DraftBlock { tokens: vec![TokenId(7)], confidence: vec![f32::NAN] }),
    };
    assert!(matches!(encode_reply(&reply), Err(EncodeError::NotFinite { what: "draft confidence", .. })));
}

#[test]
fn another_version_is_readable_whatever_follows_it() {
    let theirs = PROTOCOL_VERSION + 1;
    let mut bytes = b"RFCT".to_vec();
    bytes.extend(theirs.to_le_bytes());
    for rest in [&[][..], &[0xff; 40][..]] {
        let error = decode_control(&[&bytes, rest].concat()).unwrap_err();
        assert_eq!(error, DecodeError::Version { ours: PROTOCOL_VERSION, theirs });
        assert_eq!(error.to_string(), "peer speaks protocol 6, this program speaks 5: this program must be upgraded");
    }
    let old = decode_control(b"RFCT\0\0").unwrap_err();
    assert_eq!(old.to_string(), "peer speaks protocol 0, this program speaks 5: the peer must be upgraded");
    assert!(matches!(decode_control(b"GET / HTTP/1.1"), Err(DecodeError::Magic { .. })));
    assert!(matches!(decode_control(b"RFC"), Err(DecodeError::Short { .. })));
}

pub(crate) fn open() -> Open {
    Open {
        view: View(1),
        session: SessionId(1),
        prompt_len: 4,
        positions: 8,
        reach: 6,
        boundaries: vec![2, 4],
        encoding: WireEncoding::Fp8,
        sampling: Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 },
        draft_block: 5,
        want: Want { scores: Some(5), logprobs: None },
        resumes: false,
    }
}

#[test]
fn fields_out_of_range_are_refused_on_both_sides() {
    let with = |change: fn(&mut Open)| {
        let mut open = open();
        change(&mut open);
        open
    };
    let cases = [
        (with(|open| open.sampling.temperature = f32::NAN), "sampling.temperature is NaN, expected 0 to 100"),
        (with(|open| open.sampling.temperature = -0.5), "sampling.temperature is -0.5, expected 0 to 100"),
        (with(|open| open.sampling.top_p = 0.0), "sampling.top_p is 0, expected above 0, at most 1"),
        (with(|open| open.sampling.top_p = f32::INFINITY), "sampling.top_p is inf, expected above 0, at most 1"),
        (with(|open| open.boundaries = vec![4, 4]), "open.boundaries is [4, 4], expected ascending layers"),
        (with(|open| open.positions = 3), "open.positions is 3, expected at least the prompt's length"),
        (with(|open| open.prompt_len = 0), "open.prompt_len is 0, expected at least 1"),
        (with(|open| open.draft_block = 65), "open.draft_block: 65, the limit is 64"),
        (with(|open| open.want.scores = Some(65)), "open.want.scores: 65, the limit is 64"),
        (with(|open| open.sampling.min_p = -0.1), "sampling.min_p is -0.1, expected 0 to 1"),
        (with(|open| open.sampling.min_p = f32::NAN), "sampling.min_p is NaN, expected 0 to 1"),
        (with(|open| open.want = Want { scores: None, logprobs: Some(65) }), "open.want.logprobs: 65, the limit is 64"),
        (
            with(|open| open.want.logprobs = Some(5)),
            "open.want is Want { scores: Some(5), logprobs: Some(5) }, expected scores or logprobs",
        ),
        (with(|open| open.boundaries = (0..2000).collect()), "open.boundaries: 2000, the limit is 1024"),
    ];
    for (open, message) in cases {
        let control = Control::Open(open);
        let error = encode_control(&control).unwrap_err().to_string();
        assert_eq!(error, format!("control message cannot be written: {message}"));
        let mut bytes = b"RFCT\x05\x00".to_vec();
        bytes.extend(postcard::to_stdvec(&control).unwrap());
        assert_eq!(decode_control(&bytes).unwrap_err().to_string(), message);
    }
}

pub(crate) fn offer() -> Offer {
    Offer {
        range: LayerRange::new(3, 6).unwrap(),
        device: String::new(),
        draft_block: 0,
        max_context: 1,
        max_sessions: 1,
        encodings: vec![],
        addresses: vec![],
        pid: 0,
        view: View(0),
        spare: false,
        shadow: false,
    }
}

#[test]
fn a_layer_range_that_holds_nothing_does_not_parse() {
    let offer = Control::Offer(offer());
    let mut bytes = encode_control(&offer).unwrap().to_vec();
    // Behind the header and the variant's number come lo and hi, one byte each.
    assert_eq!(bytes[CONTROL_HEADER_BYTES + 1..][..2], [3, 6]);
    bytes[CONTROL_HEADER_BYTES + 2] = 3;
    assert!(matches!(decode_control(&bytes), Err(DecodeError::Body { .. })));
}

#[test]
fn long_texts_are_refused_and_reasons_are_cut() {
    let long = "é".repeat(3000);
    let refused = Control::Refused { reason: long.clone() };
    assert!(encode_control(&refused).unwrap_err().to_string().contains("6000, the limit is 4096"));
    let reason = bounded_reason(&long);
    assert!(reason.len() <= 4096 && reason.ends_with('…'));
    assert!(encode_control(&Control::Refused { reason }).is_ok());
    assert_eq!(bounded_reason(&"short"), "short");
    let addresses = vec![String::new(); 17];
    let join = Join {
        view: View(1),
        predecessor: Some(Neighbour { peer: ringfence::ids::Node::random(), addresses }),
        successor: None,
    };
    assert!(encode_control(&Control::Join(Box::new(join))).unwrap_err().to_string().contains("17, the limit is 16"));
}

#[test]
fn caps_are_those_of_the_lanes() {
    assert_eq!(FRAME_BYTES_MAX, ringfence::transport::BODY_BYTES_MAX);
    assert_eq!(ringfence::proto::codec::CONTROL_BYTES_MAX, ringfence::transport::CONTROL_BYTES_MAX);
}

#[test]
fn a_count_that_the_bytes_cannot_hold_allocates_nothing_for_it() {
    // A report that announces as many sessions as postcard can say, in front of zeros.
    for zeros in [0, 10, 1000, 100_000] {
        let report = Control::Report { nonce: 0, report: Box::default() };
        let mut bytes = encode_control(&report).unwrap()[..CONTROL_HEADER_BYTES + 3].to_vec();
        bytes.extend([0xff, 0xff, 0xff, 0x7f]);
        bytes.extend(vec![0; zeros]);
        decodes_canonically_or_not_at_all(bytes);
    }
    // A reply of nothing but answers.
    let answers = vec![Answer { token: TokenId(5), scores: None }; FRAME_IDS_MAX as usize];
    let (view, session, epoch, pos) = (View(1), SessionId(2), Epoch(3), Position(4));
    let reply = Reply { view, session, epoch, pos, len: FRAME_IDS_MAX, answers, draft: None };
    let bytes = encode_reply(&reply).unwrap();
    for cut in [bytes.len(), bytes.len() - 1, 60] {
        decodes_canonically_or_not_at_all(bytes[..cut].to_vec());
    }
}
