//! Lanes that can be blocked, and what goes out on them.

use std::future::Future;
use std::time::Duration;

use super::super::super::credit::CreditConfig;
use super::super::lane::NOTE;
use super::*;

/// What was written on a lane: each write by itself.
#[derive(Debug, Default)]
struct Written {
    writes: Vec<Vec<u8>>,
    blocked: bool,
    /// Bytes that a write takes at most; 0: all.
    most: usize,
    closed: bool,
}

#[derive(Debug, Clone, Default)]
struct Lane(Arc<Mutex<Written>>);

impl Lane {
    fn state(&self) -> MutexGuard<'_, Written> {
        self.0.lock().unwrap()
    }

    /// Everything but what it says first.
    fn bodies(&self) -> Vec<Vec<u8>> {
        let mut writes = self.state().writes.clone();
        if let Some(first) = writes.first_mut() {
            first.drain(..13);
        }
        writes
    }
}

impl AsyncWrite for Lane {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.state();
        if state.blocked {
            return Poll::Pending;
        }
        let mut bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        if state.most > 0 {
            bytes.truncate(state.most);
        }
        let count = bytes.len();
        state.writes.push(bytes);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.state().closed = true;
        Poll::Ready(Ok(()))
    }
}

/// A sender under test, polled by hand.
struct Rig {
    lanes: Vec<Lane>,
    frames: mpsc::Sender<Outgoing>,
    replies: mpsc::Sender<Outgoing>,
    outflow: Arc<Outflow>,
    run: Pin<Box<dyn Future<Output = io::Result<()>>>>,
}

impl Rig {
    fn new(lanes: usize, window: u64) -> Self {
        let lanes = vec![(); lanes].iter().map(|()| Lane::default()).collect::<Vec<_>>();
        let config = CreditConfig { initial: window, window_max: window };
        let outflow = Arc::new(Outflow::new(Credit::new(config, clock::now())));
        let (frames, frame_queue) = mpsc::channel(64);
        let (replies, reply_queue) = mpsc::channel(64);
        let spread =
            Spread::new(lanes.clone(), reply_queue, frame_queue, Arc::clone(&outflow), Arc::new(AtomicU64::new(3)));
        Self { lanes, frames, replies, outflow, run: Box::pin(spread.run()) }
    }

    fn poll(&mut self) -> Poll<io::Result<()>> {
        let mut cx = Context::from_waker(futures::task::noop_waker_ref());
        // The runtime's pauses are none of this test's business.
        Pin::new(&mut tokio::task::unconstrained(self.run.as_mut())).poll(&mut cx)
    }

    fn frame(&self, n: u8, bytes: usize) {
        self.frames.try_send(Outgoing::Body(vec![n; bytes].into())).unwrap();
    }

    fn reply(&self, n: u8) {
        self.replies.try_send(Outgoing::Body(vec![n].into())).unwrap();
    }

    fn returned(&self, taken: u64) {
        self.outflow.returned(back(taken)).unwrap();
    }

    fn bodies(&self) -> Vec<Vec<Vec<u8>>> {
        self.lanes.iter().map(Lane::bodies).collect()
    }
}

fn back(taken: u64) -> Return {
    Return { taken, held: Duration::ZERO, idle: Duration::ZERO }
}

fn body(flags: u32, n: u8, bytes: usize) -> Vec<u8> {
    [(flags | bytes as u32).to_le_bytes().to_vec(), vec![n; bytes]].concat()
}

#[test]
fn bodies_go_whole_and_in_one_write_on_the_lanes_in_turn() {
    let mut rig = Rig::new(3, 1 << 20);
    for n in 0..7 {
        rig.frame(n, 100);
    }
    assert!(rig.poll().is_pending());
    let on = |numbers: &[u8]| numbers.iter().map(|n| body(0, *n, 100)).collect::<Vec<_>>();
    assert_eq!(rig.bodies(), [on(&[0, 3, 6]), on(&[1, 4]), on(&[2, 5])]);
    // What each lane says first, in the same write: after three bodies on control.
    let mut after = Vec::new();
    Note::After { control: 3 }.encode(&mut after);
    for lane in &rig.lanes {
        assert_eq!(lane.state().writes[0][..13], after);
    }
}

#[test]
fn a_blocked_lane_holds_up_no_other() {
    let mut rig = Rig::new(2, 1 << 20);
    rig.frame(0, 10);
    rig.frame(1, 10);
    assert!(rig.poll().is_pending());
    rig.lanes[0].state().blocked = true;
    for n in 2..6 {
        rig.frame(n, 10);
    }
    assert!(rig.poll().is_pending());
    let on = |numbers: &[u8]| numbers.iter().map(|n| body(0, *n, 10)).collect::<Vec<_>>();
    assert_eq!(rig.bodies(), [on(&[0]), on(&[1, 3, 4, 5])]);
    rig.lanes[0].state().blocked = false;
    assert!(rig.poll().is_pending());
    assert_eq!(rig.bodies()[0], on(&[0, 2]));
}

#[test]
fn a_body_that_is_written_in_pieces_is_whole() {
    let mut rig = Rig::new(1, 1 << 20);
    rig.lanes[0].state().most = 7;
    rig.frame(1, 100);
    rig.reply(2);
    assert!(rig.poll().is_pending());
    let all = rig.lanes[0].state().writes.concat();
    assert_eq!(all[13..], [body(REPLY, 2, 1), body(0, 1, 100)].concat());
}

#[test]
fn frames_wait_for_credit_and_replies_do_not() {
    let mut rig = Rig::new(1, 250);
    for n in 0..4 {
        rig.frame(n, 96);
    }
    assert!(rig.poll().is_pending());
    // Where two fit, the credit of each is asked back at once.
    let mut sent = vec![body(ASKED, 0, 96), body(ASKED, 1, 96)];
    assert_eq!(rig.lanes[0].bodies(), sent);
    rig.reply(9);
    assert!(rig.poll().is_pending());
    sent.push(body(REPLY, 9, 1));
    assert_eq!(rig.lanes[0].bodies(), sent);
    rig.returned(100);
    rig.reply(8);
    assert!(rig.poll().is_pending());
    // A reply goes first.
    sent.extend([body(REPLY, 8, 1), body(ASKED, 2, 96)]);
    assert_eq!(rig.lanes[0].bodies(), sent);
    assert_eq!(rig.outflow.stats(1).in_flight, 200);
    assert!(rig.outflow.returned(back(301)).is_err());
}

#[test]
fn a_farewell_comes_last_on_every_lane() {
    let mut rig = Rig::new(2, 250);
    for n in 0..3 {
        rig.frame(n, 96);
    }
    rig.reply(9);
    rig.frames.try_send(Outgoing::Farewell("done".to_owned())).unwrap();
    assert!(rig.poll().is_pending(), "a frame has no credit");
    assert!(rig.lanes.iter().all(|lane| !lane.state().closed));
    rig.returned(200);
    assert!(matches!(rig.poll(), Poll::Ready(Ok(()))));
    let mut farewell = Vec::new();
    Note::Farewell { reason: "done".to_owned() }.encode(&mut farewell);
    assert_eq!(u32::from_le_bytes(farewell[..4].try_into().unwrap()) & NOTE, NOTE);
    for lane in &rig.lanes {
        assert_eq!(lane.state().writes.last(), Some(&farewell));
        assert!(lane.state().closed);
    }
}

#[test]
fn the_end_of_the_queues_ends_the_lanes() {
    let mut rig = Rig::new(2, 250);
    rig.frame(1, 10);
    (rig.frames, rig.replies) = (mpsc::channel(1).0, mpsc::channel(1).0);
    assert!(matches!(rig.poll(), Poll::Ready(Ok(()))));
    assert_eq!(rig.bodies(), [vec![body(0, 1, 10)], vec![]]);
    assert!(rig.lanes.iter().all(|lane| lane.state().closed));
}
