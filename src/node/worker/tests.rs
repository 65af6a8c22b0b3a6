//! What the coordinator says to a worker, in any order.

mod shadow;
mod together;

use super::*;
use crate::clock;
use crate::ids::{View, WireEncoding};
use crate::node::journal::JournalConfig;
use crate::proto::control::{Sampling, Want};
use crate::sim::toy::{SharedToys, ToyEngine};

const VIEW: View = View(3);

/// A head.
fn toy() -> ToyEngine {
    ToyEngine::new("0:2".parse().unwrap(), 1, SharedToys::default())
}

/// A head with its route.
fn worker() -> Worker {
    worker_of(Box::new(toy()))
}

fn worker_of(engine: Box<dyn Engine>) -> Worker {
    let journals = Journals::new(JournalConfig::default(), "0:2").unwrap();
    let mut worker = Worker::new(engine, journals, Arc::new(Counters::default()), 4);
    worker.handle_input(Input::Route(Some(route(VIEW))), clock::now());
    worker
}

fn route(view: View) -> Route {
    let coordinator = Node::random();
    Route { view, coordinator, predecessor: coordinator, successor: Some(Node::random()), shadows: false }
}

fn open(session: u64, view: View, resumes: bool) -> Input {
    Input::Open(Open {
        view,
        session: SessionId(session),
        prompt_len: 2,
        positions: 8,
        reach: 4,
        boundaries: vec![2],
        encoding: WireEncoding::Fp8,
        sampling: Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 },
        draft_block: 0,
        want: Want::default(),
        resumes,
    })
}

/// What a worker tells, a word each.
fn told(worker: &mut Worker) -> Vec<String> {
    let word = |tell: Tell| {
        let said = codec::decode_control(&tell.body).unwrap();
        if let Control::Opened { session, .. } = said {
            format!("opened {session}")
        } else if let Control::Closed { report } = said {
            format!("closed {}", report.session)
        } else if let Control::Failed { session, .. } = said {
            format!("failed {session}")
        } else {
            format!("{said:?}")
        }
    };
    std::iter::from_fn(|| worker.poll_tell()).map(word).collect()
}

#[test]
fn sessions_are_opened_and_closed_in_any_order_of_their_ids() {
    let (mut worker, now) = (worker(), clock::now());
    worker.handle_input(Input::Close(SessionId(7)), now);
    worker.handle_input(open(6, VIEW, false), now);
    worker.handle_input(open(5, VIEW, true), now);
    worker.handle_input(open(4, VIEW, false), now);
    assert_eq!(told(&mut worker), ["closed 7", "opened 6", "opened 5", "opened 4"]);
}

#[test]
fn no_open_is_passed_over_in_silence_but_one_of_another_view_or_said_twice() {
    let (mut worker, now) = (worker(), clock::now());
    worker.handle_input(open(5, VIEW, false), now);
    worker.handle_input(open(5, VIEW, false), now);
    worker.handle_input(open(6, View(2), false), now);
    worker.handle_input(Input::Close(SessionId(5)), now);
    worker.handle_input(open(5, VIEW, false), now);
    assert_eq!(told(&mut worker), ["opened 5", "closed 5", "failed 5"]);
    worker.handle_input(Input::Route(Some(route(View(4)))), now);
    worker.handle_input(open(5, View(4), true), now);
    assert_eq!(told(&mut worker), ["opened 5"], "another view knows nothing of it");
}
