//! A worker that shadows, with an engine of the embedded model and no thread.

use libp2p::PeerId;

use super::super::*;
use crate::engine::cpu::{CpuEngine, CpuSettings};
use crate::ids::{TokenId, WireEncoding};
use crate::model::Checkpoint;
use crate::node::journal::JournalConfig;
use crate::proto::control::{Sampling, Want};
use crate::proto::frame::FrameHead;

const VIEW: View = View(3);
const SESSION: SessionId = SessionId(5);

fn head() -> Worker {
    let settings = CpuSettings { max_context: Some(64), ..CpuSettings::default() };
    let engine = CpuEngine::new(&Checkpoint::tiny().unwrap(), "0:3".parse().unwrap(), &settings).unwrap();
    let journals = Journals::new(JournalConfig::default(), "0:3").unwrap();
    Worker::new(Box::new(engine), journals, Arc::default(), 4)
}

fn shadow_route() -> Route {
    let coordinator = Node { peer: PeerId::random(), start: 1 };
    Route { view: VIEW, coordinator, predecessor: coordinator, successor: None, shadows: true }
}

fn open() -> Open {
    Open {
        view: VIEW,
        session: SESSION,
        prompt_len: 4,
        positions: 32,
        reach: 8,
        boundaries: vec![3],
        encoding: WireEncoding::Fp8,
        sampling: Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 },
        draft_block: 0,
        want: Want::default(),
        resumes: false,
    }
}

/// A copy of the positions `from..to`.
fn copy(from: u32, to: u32) -> Frame {
    let head = FrameHead {
        view: VIEW,
        session: SESSION,
        epoch: Epoch(0),
        start: Position(0),
        pos: Position(from),
        len: to - from,
        settled: Position(0),
        answer_from: Position(3),
    };
    Frame { head, ids: (from..to).map(|id| TokenId(id + 10)).collect(), payload: Bytes::new() }
}

/// What it tells the source of its copies: the next position, and whether it asks for all above.
fn asks(worker: &mut Worker) -> Vec<(u32, bool)> {
    let mut asks = Vec::new();
    while let Some(tell) = worker.poll_tell() {
        let message = codec::decode_control(&tell.body).unwrap();
        let Control::Shadowed { view: VIEW, session: SESSION, next, again } = message else { panic!("{message:?}") };
        asks.push((next.0, again));
    }
    asks
}

fn next(worker: &Worker) -> Position {
    worker.sessions().next().unwrap().2.next()
}

#[test]
fn a_shadow_asks_computes_and_sends_nothing_on() {
    let (mut worker, now) = (head(), crate::clock::now());
    worker.handle_input(Input::Route(Some(shadow_route())), now);
    worker.handle_input(Input::Open(open()), now);
    assert_eq!(asks(&mut worker), [(0, true)]);
    for (from, to) in [(0, 4), (4, 5), (5, 6), (6, 7)] {
        worker.handle_input(Input::Frame(copy(from, to)), now);
    }
    while let Some(pass) = worker.poll_work() {
        worker.compute(pass);
        worker.handle_computed(1, now);
    }
    assert_eq!((next(&worker), worker.poll_send(now)), (Position(7), None));
    assert_eq!(asks(&mut worker), [(7, false)], "it reports every four frames");
    assert_eq!(worker.journals.span(SESSION), Position(0)..Position(7), "it has what it would have sent");
}

#[test]
fn a_pass_that_is_computed_while_the_route_changes_counts_since_the_state_holds_it() {
    let (mut worker, now, route) = (head(), crate::clock::now(), shadow_route());
    worker.handle_input(Input::Route(Some(route)), now);
    worker.handle_input(Input::Open(open()), now);
    worker.handle_input(Input::Frame(copy(0, 4)), now);
    let pass = worker.poll_work().unwrap();
    worker.compute(pass);
    // It is no shadow any more, and again one, while the pass is computed.
    worker.handle_input(Input::Route(None), now);
    worker.handle_input(Input::Route(Some(route)), now);
    worker.handle_input(Input::Open(open()), now);
    worker.handle_computed(1, now);
    assert_eq!(next(&worker), Position(4));
    assert_eq!(asks(&mut worker), [(0, true), (4, true)]);
    worker.handle_input(Input::Frame(copy(4, 6)), now);
    let pass = worker.poll_work().unwrap();
    worker.compute(pass);
    worker.handle_computed(1, now);
    assert_eq!(next(&worker), Position(6));
    assert_eq!(worker.journals.span(SESSION), Position(0)..Position(6), "what it would have sent, too");
}

#[test]
fn a_frame_that_can_not_be_taken_in_costs_a_shadow_nothing_but_time() {
    let (mut worker, now) = (head(), crate::clock::now());
    worker.handle_input(Input::Route(Some(shadow_route())), now);
    worker.handle_input(Input::Open(open()), now);
    worker.handle_input(Input::Frame(copy(0, 4)), now);
    worker.handle_input(Input::Frame(copy(30, 40)), now);
    assert!(worker.poll_work().is_none(), "it begins anew, with what it has");
    assert_eq!(asks(&mut worker), [(0, true)]);
    let later = worker.poll_timeout().unwrap();
    worker.handle_timeout(later);
    assert_eq!(asks(&mut worker), [(0, true)]);
    worker.handle_input(Input::Frame(copy(0, 4)), later);
    let pass = worker.poll_work().unwrap();
    worker.compute(pass);
    worker.handle_computed(1, later);
    assert_eq!(next(&worker), Position(4));
}
