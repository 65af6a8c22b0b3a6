//! The bound of views, in every message that has one.

use bytes::Bytes;
use ringfence::ids::{Epoch, Position, SessionId, VIEW_MAX, View};
use ringfence::proto::codec::{EncodeError, decode_control, decode_data, encode_control, encode_frame, encode_reply};
use ringfence::proto::control::{Control, Digests, Join, Offer, Open, PROTOCOL_VERSION, StageReport};
use ringfence::proto::frame::{FrameHead, Reply};

use super::codec::{offer, open, small_frame};

/// Every message with a view, with `view` in it.
fn controls_of(view: View) -> Vec<(&'static str, Control)> {
    let (session, reason, outputs) = (SessionId(1), String::new(), Digests::default());
    let report = Box::new(StageReport { view, ..StageReport::default() });
    let join = Join { view, predecessor: None, successor: None };
    vec![
        ("offer.view", Control::Offer(Offer { view, ..offer() })),
        ("join.view", Control::Join(Box::new(join))),
        ("open.view", Control::Open(Open { view, ..open() })),
        ("report.view", Control::Report { nonce: 0, report }),
        ("view", Control::Joined { view }),
        ("view", Control::JoinRefused { view, current: View(0), reason: reason.clone() }),
        ("current view", Control::JoinRefused { view: View(0), current: view, reason: reason.clone() }),
        ("view", Control::Opened { view, session, kept: None }),
        ("view", Control::ReplayFailed { view, session, reason: reason.clone() }),
        ("view", Control::Rebuilt { view, session, next: Position(0), outputs }),
        ("view", Control::Failed { view, session, reason: reason.clone() }),
        ("view", Control::Shadow { view, source: None }),
        ("view", Control::Copy { view, to: None }),
        ("view", Control::Shadowed { view, session, next: Position(0), again: false }),
        ("view", Control::NeighbourLost { view, peer: ringfence::ids::Node::random(), reason }),
    ]
}

#[test]
fn views_are_below_the_bound_that_what_is_derived_of_them_has_room_for() {
    let ours = [b"RFCT".to_vec(), PROTOCOL_VERSION.to_le_bytes().to_vec()].concat();
    for (_, control) in controls_of(VIEW_MAX) {
        let bytes = encode_control(&control).unwrap();
        assert_eq!(decode_control(&bytes).unwrap(), control);
    }
    for over in [VIEW_MAX.0 + 1, 1 << 32, 1 << 63, u64::MAX] {
        for (field, control) in controls_of(View(over)) {
            let message = format!("{field} is {over}, expected a view below 2^31");
            let error = encode_control(&control).unwrap_err().to_string();
            assert_eq!(error, format!("control message cannot be written: {message}"));
            let bytes = [ours.clone(), postcard::to_stdvec(&control).unwrap()].concat();
            assert_eq!(decode_control(&bytes).unwrap_err().to_string(), message);
        }
        let (head, ids) = small_frame();
        let bytes = encode_frame(&head, &ids, &[]).unwrap();
        let reply = Reply {
            view: View(1),
            session: SessionId(2),
            epoch: Epoch(3),
            pos: Position(4),
            len: 1,
            answers: vec![],
            draft: None,
        };
        for bytes in [bytes, encode_reply(&reply).unwrap()] {
            let mut bytes = bytes.to_vec();
            bytes[8..16].copy_from_slice(&over.to_le_bytes());
            let error = decode_data(Bytes::from(bytes)).unwrap_err();
            assert_eq!(error.to_string(), format!("view is {over}, expected a view below 2^31"));
        }
        let refused = Err(EncodeError::View { got: View(over) });
        assert_eq!(encode_frame(&FrameHead { view: View(over), ..head }, &ids, &[]), refused);
        assert_eq!(encode_reply(&Reply { view: View(over), ..reply }), refused);
    }
}
