//! The last inputs against a plain list.

use proptest::prelude::*;

use super::*;
use crate::node::journal::digest::position_digest;

proptest! {
    #[test]
    fn the_last_inputs_have_the_digests_of_their_newest_epoch(
        ops in prop::collection::vec((prop_oneof![4 => Just(0i64), 2 => -9..0i64, 1 => 1..4i64], 0..12u32), 1..60),
        capacity in 0..20u32,
    ) {
        let mut recent = Recent::new(capacity, 2);
        let (mut first, mut rows) = (0u32, Vec::new());
        for (round, (shift, len)) in (0u32..).zip(ops) {
            let end = first + rows.len() as u32;
            let pos = u32::try_from((i64::from(end) + shift).max(0)).unwrap();
            let (ids, payload) = frame(pos, len, round, EACH);
            prop_assert!(recent.record(Position(pos), &ids, payload, EACH));
            if pos < first || pos > end || rows.is_empty() {
                (first, rows) = (pos, Vec::new());
            }
            rows.truncate((pos - first) as usize);
            rows.extend((pos..pos + len).map(|pos| row(pos, round, EACH)));
            let (from, digests) = recent.digests();
            let end = first + rows.len() as u32;
            prop_assert!(digests.len() <= capacity as usize);
            if !digests.is_empty() {
                prop_assert_eq!(from.0 + digests.len() as u32, end);
            }
            // What left at the capacity is gone, also after a re-open.
            prop_assert!(recent.held() <= u64::from(capacity + 12) * COST);
            for (pos, digest) in (from.0..).zip(&digests) {
                let (id, bytes) = &rows[(pos - first) as usize];
                prop_assert_eq!(digest, &position_digest(Position(pos), *id, 2, bytes));
            }
        }
    }
}

#[test]
fn the_last_inputs_are_as_many_as_the_capacity() {
    let mut recent = Recent::new(10, 2);
    let put = |recent: &mut Recent, pos, len| {
        let (ids, payload) = frame(pos, len, 0, EACH);
        recent.record(Position(pos), &ids, payload, EACH)
    };
    put(&mut recent, 0, 64);
    assert_eq!((recent.digests().0, recent.digests().1.len()), (Position(54), 10));
    // A re-open in the same frame still has what is below it.
    put(&mut recent, 60, 1);
    assert_eq!((recent.digests().0, recent.digests().1.len()), (Position(51), 10));
    for pos in 61..90 {
        put(&mut recent, pos, 1);
        assert_eq!((recent.digests().0, recent.digests().1.len()), (Position(pos - 9), 10));
    }
    put(&mut recent, 100, 2);
    assert_eq!((recent.digests().0, recent.digests().1.len()), (Position(100), 2));
}

#[test]
fn a_frame_of_the_wrong_size_is_not_taken() {
    let mut recent = Recent::new(10, 2);
    let (ids, payload) = frame(0, 3, 0, EACH);
    assert!(recent.record(Position(0), &ids, payload.clone(), EACH));
    assert!(!recent.record(Position(3), &ids, payload.slice(1..), EACH));
    assert_eq!(recent.digests().1.len(), 0);
    assert!(!recent.record(Position(u32::MAX - 1), &ids, payload, EACH));
}

#[test]
fn inputs_of_the_head_are_ids_alone() {
    let mut recent = Recent::new(10, 0);
    assert!(recent.record(Position(0), &[TokenId(1), TokenId(2)], Bytes::new(), 0));
    assert_eq!(recent.digests().1[1], position_digest(Position(1), TokenId(2), 0, &[]));
}
