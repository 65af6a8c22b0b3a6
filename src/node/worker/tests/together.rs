//! Several sessions in one pass, each with the results that it has alone.

use super::*;
use crate::engine::{Chunk, Drafts, EngineError, EngineFacts, OpenError, Output, SessionShape};
use crate::ids::TokenId;
use crate::proto::frame::{Frame, FrameHead};
use crate::sim::toy::ToyEngine;

const SESSIONS: std::ops::Range<u64> = 4..7;

/// An engine that knows no token above 1,000.
struct Picky(ToyEngine);

impl Engine for Picky {
    fn facts(&self) -> &EngineFacts {
        self.0.facts()
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        self.0.state_bytes(shape)
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        self.0.open(session, shape)
    }

    fn close(&mut self, session: SessionId) {
        self.0.close(session);
    }

    fn forward(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        let bad = batch.iter().find(|chunk| chunk.ids.iter().any(|id| id.0 > 1_000));
        match bad {
            Some(chunk) => Err(EngineError::Token { pos: chunk.pos, got: chunk.ids[0], vocab: 1_000 }),
            None => self.0.forward(batch, out),
        }
    }

    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError> {
        self.0.draft(session, at, anchor)
    }
}

/// A frame of one position, or of the prompt of two; `payload` bytes are too many for a head.
fn frame(session: u64, pos: u32, payload: usize) -> Input {
    let len = if pos == 0 { 2 } else { 1 };
    let head = FrameHead {
        view: VIEW,
        session: SessionId(session),
        epoch: Epoch(0),
        start: Position(0),
        pos: Position(pos),
        len,
        settled: Position(0),
        answer_from: Position(1),
    };
    let ids = (0..len).map(|at| TokenId(u32::try_from(session).unwrap() + pos + at)).collect();
    Input::Frame(Frame { head, ids, payload: Bytes::from(vec![0; payload]) })
}

/// Serves one pass; gives the sessions in it, with the positions of each.
fn serve(worker: &mut Worker) -> Option<Vec<(u64, usize)>> {
    let pass = worker.poll_work()?;
    let served = pass.parts.iter().map(|part| (part.session.0, part.work.ids.len())).collect();
    worker.compute(pass);
    worker.handle_computed(1, clock::now());
    Some(served)
}

fn sent(worker: &mut Worker) -> Vec<Bytes> {
    let mut bodies = Vec::new();
    while let Some(send) = worker.poll_send(clock::now()) {
        bodies.push(send.body);
        worker.handle_sent(Ok(()), clock::now());
    }
    bodies
}

fn served(worker: &mut Worker) -> (Vec<Vec<(u64, usize)>>, Vec<Bytes>) {
    let (mut passes, mut bodies) = (Vec::new(), Vec::new());
    while let Some(pass) = serve(worker) {
        passes.push(pass);
        bodies.extend(sent(worker));
    }
    (passes, bodies)
}

fn opened(sessions: impl IntoIterator<Item = u64>) -> Worker {
    let mut worker = worker_of(Box::new(Picky(toy())));
    for session in sessions {
        worker.handle_input(open(session, VIEW, false), clock::now());
        worker.handle_input(frame(session, 0, 0), clock::now());
    }
    worker
}

#[test]
fn texts_are_computed_together_with_the_bits_that_each_has_alone() {
    let mut together = opened(SESSIONS);
    let prompts = served(&mut together);
    assert_eq!(prompts.0, [[(4, 2)], [(5, 2)], [(6, 2)]], "a prompt is alone");
    for session in SESSIONS {
        together.handle_input(frame(session, 2, 0), clock::now());
    }
    together.handle_input(frame(5, 3, 0), clock::now());
    let texts = served(&mut together);
    assert_eq!(texts.0, [[(4, 1), (5, 2), (6, 1)]]);
    let mut alone = (Vec::new(), Vec::new());
    for session in SESSIONS {
        let mut worker = opened([session]);
        alone.0.extend(served(&mut worker).1);
        worker.handle_input(frame(session, 2, 0), clock::now());
        if session == 5 {
            worker.handle_input(frame(5, 3, 0), clock::now());
        }
        alone.1.extend(served(&mut worker).1);
    }
    assert_eq!((prompts.1, texts.1), alone);
}

#[test]
fn what_is_wrong_with_one_of_them_fails_that_one_alone() {
    let mut worker = opened(SESSIONS);
    served(&mut worker);
    told(&mut worker);
    for session in SESSIONS {
        worker.handle_input(frame(session, 2, usize::from(session == 5)), clock::now());
    }
    let texts = served(&mut worker);
    assert_eq!(texts.0, [[(4, 1), (5, 1), (6, 1)]]);
    assert_eq!(texts.1.len(), 2);
    assert_eq!(told(&mut worker), ["failed 5"]);
    // A token that the engine does not know is refused by it, together with the others.
    worker.handle_input(frame(4, 3, 0), clock::now());
    let Input::Frame(mut bad) = frame(6, 3, 0) else { unreachable!() };
    bad.ids = vec![TokenId(u32::MAX)];
    worker.handle_input(Input::Frame(bad), clock::now());
    let texts = served(&mut worker);
    assert_eq!((texts.0, texts.1.len()), (vec![vec![(4, 1), (6, 1)]], 1));
    assert_eq!(told(&mut worker), ["failed 6"]);
}

#[test]
fn a_text_waits_behind_one_prompt_at_most() {
    let mut worker = opened([4]);
    served(&mut worker);
    worker.handle_input(frame(4, 2, 0), clock::now());
    for session in [5, 6] {
        worker.handle_input(open(session, VIEW, false), clock::now());
        worker.handle_input(frame(session, 0, 0), clock::now());
    }
    assert_eq!(served(&mut worker).0, [[(4, 1)], [(5, 2)], [(6, 2)]], "a prompt was served last");
    worker.handle_input(frame(4, 3, 0), clock::now());
    assert_eq!(served(&mut worker).0, [[(4, 1)]]);
}
