//! The fence's table, row by row, and its bounds.

use super::*;
use crate::ids::TokenId;

const HOLD: Duration = Duration::from_millis(500);

fn fence() -> Fence<TokenId> {
    Fence::new(FenceConfig {
        session: SessionId(9),
        view: View(3),
        prompt_len: 2,
        reach: 8,
        end: Position(40),
        from: Position(0),
        history: Position(0),
        forward_from: Position(0),
        hold_for: HOLD,
        held_max: 6,
    })
}

fn head(epoch: u32, start: u32, pos: u32, settled: u32) -> FrameHead {
    FrameHead {
        view: View(3),
        session: SessionId(9),
        epoch: Epoch(epoch),
        start: Position(start),
        pos: Position(pos),
        len: 1,
        settled: Position(settled),
        answer_from: Position(pos),
    }
}

fn put(fence: &mut Fence<TokenId>, head: FrameHead) -> Result<Arrival, FenceError> {
    fence.handle_frame(head, TokenId(0), crate::clock::now())
}

fn compute(fence: &mut Fence<TokenId>) -> Vec<(u32, u32)> {
    let mut done = Vec::new();
    while let Some((head, _)) = fence.poll_compute() {
        if fence.handle_computed(&head) == Forward::Yes {
            done.push((head.epoch.0, head.pos.0));
        }
    }
    done
}

/// Positions 0 to 9 of epoch 0 are computed, then 6 to 9 again in epoch 1; 6 is settled.
fn in_epoch_1() -> Fence<TokenId> {
    let mut fence = fence();
    for pos in 0..10 {
        put(&mut fence, head(0, 0, pos, pos.saturating_sub(4))).unwrap();
        let _ = compute(&mut fence);
    }
    for pos in 6..10 {
        put(&mut fence, head(1, 6, pos, 6)).unwrap();
    }
    assert_eq!(compute(&mut fence), vec![(1, 6), (1, 7), (1, 8), (1, 9)]);
    assert_eq!((fence.epoch(), fence.next(), fence.settled()), (Epoch(1), Position(10), Position(6)));
    fence
}

#[test]
fn every_row_of_the_table_has_its_verdict() {
    let (session, waited) = (SessionId(9), Duration::ZERO);
    let rows = [
        // epoch < e
        (head(0, 0, 10, 6), Ok(Arrival::Dropped(DropReason::OldEpoch))),
        // epoch > e, pos == start, settled ≤ start ≤ next
        (head(2, 8, 8, 8), Ok(Arrival::Queued)),
        (head(2, 10, 10, 10), Ok(Arrival::Queued)),
        (head(7, 6, 6, 6), Ok(Arrival::Queued)),
        // epoch > e, pos > start
        (head(2, 8, 9, 8), Ok(Arrival::Held)),
        (head(2, 10, 12, 10), Ok(Arrival::Held)),
        // epoch > e, start > next or start < settled
        (
            head(2, 11, 11, 10),
            Err(FenceError::Gap { session, epoch: Epoch(2), expected: Position(10), got: Position(11), waited }),
        ),
        (
            head(2, 11, 12, 10),
            Err(FenceError::Gap { session, epoch: Epoch(2), expected: Position(10), got: Position(11), waited }),
        ),
        (
            head(2, 7, 7, 8),
            Err(FenceError::BelowFloor { session, epoch: Epoch(2), start: Position(7), floor: Position(8) }),
        ),
        (
            head(2, 5, 5, 5),
            Err(FenceError::BelowFloor { session, epoch: Epoch(2), start: Position(5), floor: Position(6) }),
        ),
        // epoch == e: next, further on, behind
        (head(1, 6, 10, 6), Ok(Arrival::Queued)),
        (head(1, 6, 11, 6), Ok(Arrival::Held)),
        (head(1, 6, 9, 6), Ok(Arrival::Dropped(DropReason::Duplicate))),
    ];
    for (frame, verdict) in rows {
        assert_eq!(put(&mut in_epoch_1(), frame), verdict, "{frame:?}");
    }
}

#[test]
fn a_frame_that_contradicts_itself_or_the_session_is_refused() {
    let session = SessionId(9);
    let (pos, reach, end) = (Position(10), 8, Position(40));
    let rows = [
        (head(1, 6, 10, 11), FenceError::Settled { session, pos, settled: Position(11) }),
        (head(1, 6, 15, 11), FenceError::Unsettled { session, settled: Position(11), next: Position(10) }),
        (
            FrameHead { view: View(4), ..head(1, 6, 10, 6) },
            FenceError::View { session, expected: View(3), got: View(4) },
        ),
        (FrameHead { len: 0, ..head(1, 6, 10, 6) }, FenceError::Empty { session, pos }),
        (FrameHead { len: 31, ..head(1, 6, 10, 6) }, FenceError::PastEnd { session, pos, len: 31, end }),
        (FrameHead { len: u32::MAX, ..head(1, 6, 10, 6) }, FenceError::PastEnd { session, pos, len: u32::MAX, end }),
        (
            FrameHead { len: 5, ..head(1, 6, 10, 6) },
            FenceError::Reach { session, pos, len: 5, settled: Position(6), reach },
        ),
        (
            head(1, 7, 10, 6),
            FenceError::Start { session, epoch: Epoch(1), pos, expected: Position(6), got: Position(7) },
        ),
        (
            head(2, 10, 9, 6),
            FenceError::Start { session, epoch: Epoch(2), pos: Position(9), expected: Position(9), got: pos },
        ),
    ];
    for (frame, error) in rows {
        assert_eq!(put(&mut in_epoch_1(), frame), Err(error), "{frame:?}");
    }
}

#[test]
fn an_older_view_is_dropped_and_an_older_frame_never_moves_the_floor() {
    let mut fence = in_epoch_1();
    let old = FrameHead { view: View(2), ..head(9, 30, 30, 30) };
    assert_eq!(put(&mut fence, old), Ok(Arrival::Dropped(DropReason::OldView)));
    assert_eq!(put(&mut fence, head(0, 0, 39, 39)), Ok(Arrival::Dropped(DropReason::OldEpoch)));
    assert_eq!((fence.settled(), fence.epoch(), fence.next()), (Position(6), Epoch(1), Position(10)));
}

#[test]
fn held_frames_follow_their_start_and_the_old_epoch_goes() {
    let mut fence = in_epoch_1();
    assert_eq!(put(&mut fence, head(1, 6, 11, 6)), Ok(Arrival::Held));
    assert_eq!(put(&mut fence, head(2, 8, 10, 8)), Ok(Arrival::Held));
    assert_eq!(put(&mut fence, head(2, 8, 9, 8)), Ok(Arrival::Held));
    assert!(!fence.is_ready());
    assert_eq!(put(&mut fence, head(2, 8, 8, 8)), Ok(Arrival::Queued));
    assert!(fence.is_ready());
    assert_eq!(fence.counters().old_epoch, 1);
    assert_eq!(compute(&mut fence), vec![(2, 8), (2, 9), (2, 10)]);
}

#[test]
fn a_cancel_drops_what_waits_and_what_was_computed_meanwhile() {
    let mut fence = in_epoch_1();
    put(&mut fence, head(1, 6, 10, 6)).unwrap();
    put(&mut fence, head(1, 6, 11, 6)).unwrap();
    let (first, _) = fence.poll_compute().unwrap();
    fence.handle_cancel(Epoch(2));
    fence.handle_cancel(Epoch(1));
    assert_eq!(fence.handle_computed(&first), Forward::No);
    assert!(fence.poll_compute().is_none());
    assert_eq!(put(&mut fence, head(1, 6, 12, 6)), Ok(Arrival::Dropped(DropReason::Cancelled)));
    assert_eq!(fence.counters().cancelled, 2);
    assert_eq!((fence.epoch(), fence.next()), (Epoch(1), Position(11)), "a cancel adopts nothing");
    put(&mut fence, head(2, 11, 11, 11)).unwrap();
    assert_eq!(compute(&mut fence), vec![(2, 11)]);
}

#[test]
fn an_epoch_adopted_during_a_compute_stops_its_result() {
    let mut fence = in_epoch_1();
    put(&mut fence, head(1, 6, 10, 6)).unwrap();
    let (old, _) = fence.poll_compute().unwrap();
    put(&mut fence, head(2, 9, 9, 9)).unwrap();
    assert_eq!(fence.handle_computed(&old), Forward::No);
    assert_eq!(fence.next(), Position(9));
    assert_eq!(compute(&mut fence), vec![(2, 9)]);
}

#[test]
fn neighbouring_frames_are_handed_out_before_the_first_is_computed() {
    let mut fence = in_epoch_1();
    for pos in [11, 10, 12] {
        put(&mut fence, head(1, 6, pos, 6)).unwrap();
    }
    let handed: Vec<FrameHead> = std::iter::from_fn(|| fence.poll_compute()).map(|(head, _)| head).collect();
    assert_eq!(handed.iter().map(|head| head.pos.0).collect::<Vec<_>>(), vec![10, 11, 12]);
    assert_eq!(fence.next(), Position(10));
    assert_eq!(put(&mut fence, head(1, 6, 11, 6)), Ok(Arrival::Dropped(DropReason::Duplicate)));
    for head in &handed {
        assert_eq!(fence.handle_computed(head), Forward::Yes);
    }
    assert_eq!((fence.next(), fence.counters().decoded), (Position(13), 15));
}

#[test]
fn a_held_frame_has_a_deadline_and_a_queued_one_has_none() {
    let mut fence = in_epoch_1();
    let t0 = crate::clock::now();
    assert_eq!(fence.handle_frame(head(1, 6, 10, 6), TokenId(0), t0), Ok(Arrival::Queued));
    assert_eq!(fence.poll_timeout(), None);
    assert_eq!(fence.handle_frame(head(1, 6, 12, 6), TokenId(0), t0 + HOLD), Ok(Arrival::Held));
    assert_eq!(fence.poll_timeout(), Some((t0 + 2 * HOLD, FenceTimeout::Held)));
    assert_eq!(fence.handle_timeout(t0 + 2 * HOLD - Duration::from_millis(1)), Ok(()));
    let (session, epoch, waited) = (SessionId(9), Epoch(1), HOLD);
    assert_eq!(
        fence.handle_timeout(t0 + 2 * HOLD),
        Err(FenceError::Gap { session, epoch, expected: Position(11), got: Position(12), waited })
    );
    assert_eq!(fence.handle_frame(head(1, 6, 11, 6), TokenId(0), t0), Ok(Arrival::Queued));
    assert_eq!(fence.poll_timeout(), None, "the missing one came");
    assert_eq!(fence.handle_frame(head(2, 8, 9, 8), TokenId(0), t0), Ok(Arrival::Held));
    let epoch = Epoch(2);
    assert_eq!(
        fence.handle_timeout(t0 + HOLD),
        Err(FenceError::Gap { session, epoch, expected: Position(8), got: Position(9), waited })
    );
}

#[test]
fn waiting_frames_are_bounded() {
    let mut fence = in_epoch_1();
    for pos in 8..14 {
        assert_eq!(put(&mut fence, head(2, 7, pos, 7)), Ok(Arrival::Held));
    }
    assert_eq!(put(&mut fence, head(2, 7, 14, 7)), Err(FenceError::HeldFull { session: SessionId(9), limit: 6 }));
}

#[test]
fn a_frame_inside_another_one_is_a_duplicate() {
    let mut fence = in_epoch_1();
    assert_eq!(put(&mut fence, head(1, 6, 11, 6)), Ok(Arrival::Held));
    let wide = FrameHead { len: 3, ..head(1, 6, 10, 6) };
    assert_eq!(put(&mut fence, wide), Ok(Arrival::Queued));
    assert_eq!(put(&mut fence, head(1, 6, 12, 6)), Ok(Arrival::Dropped(DropReason::Duplicate)));
    assert_eq!((compute(&mut fence), fence.waiting()), (vec![(1, 10)], 0));
    assert_eq!(fence.counters().duplicate, 2);
}

#[test]
fn an_epoch_that_starts_in_two_places_is_refused() {
    let mut fence = in_epoch_1();
    assert_eq!(put(&mut fence, head(2, 7, 9, 7)), Ok(Arrival::Held));
    assert_eq!(
        put(&mut fence, head(2, 8, 8, 7)).unwrap_err().to_string(),
        "session 9: frame at 9 says that epoch 2 starts at 7, expected 8"
    );
}
