//! Scripted drafters on the real ring: blocks of any width with none, some and all of their tokens
//! right never change the stream.

use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence::config::CoordinatorSettings;
use ringfence::coordinator::job::{Mode, Request};
use ringfence::engine::cpu::CpuEngine;
use ringfence::engine::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use ringfence::ids::{Position, SessionId, TokenId, WireEncoding};

use crate::equal::reference;
use crate::rig::{Rig, greedy, prompt, quick, ranges, request, shared, tiny, warm};

/// An engine whose drafts are a script over the true stream.
pub(crate) struct Scripted {
    pub(crate) inner: CpuEngine,
    pub(crate) facts: EngineFacts,
    /// The true token at each position.
    pub(crate) truth: Arc<BTreeMap<u32, TokenId>>,
    /// Of the drafts at a position, how many are right before the first wrong one.
    pub(crate) right: fn(u32) -> u32,
}

impl Engine for Scripted {
    fn facts(&self) -> &EngineFacts {
        &self.facts
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        self.inner.state_bytes(shape)
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        self.inner.open(session, shape)
    }

    fn close(&mut self, session: SessionId) {
        self.inner.close(session);
    }

    fn forward(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        self.inner.forward(batch, out)
    }

    fn draft(&mut self, _: SessionId, at: Position, _: TokenId) -> Result<Drafts, EngineError> {
        let right = (self.right)(at.0);
        let tokens = (0..self.facts.draft_block).map(|k| {
            let truth = self.truth.get(&(at.0 + 2 + k)).copied().unwrap_or(TokenId(9));
            if k == right { TokenId((truth.0 + 1) % 2_048) } else { truth }
        });
        let tokens: Vec<TokenId> = tokens.collect();
        Ok(Drafts { confidence: vec![0.0; tokens.len()], tokens })
    }
}

async fn check(block: u32, right: fn(u32) -> u32) {
    let (checkpoint, cut) = (tiny(), ranges("0:2 2:4 4:7"));
    for sampling in [greedy(), warm(5)] {
        let request = Request { sampling, ..request(&prompt(33), 50, Mode::Pipelined) };
        let expected = reference(&checkpoint, &cut, &request, WireEncoding::Fp8, &[]);
        let first = u32::try_from(request.prompt.len()).unwrap();
        let truth = shared((first..).zip(expected.iter().copied()).collect::<BTreeMap<_, _>>());
        for in_flight_max in [1, 2, 8, 16] {
            let wrap = |inner: CpuEngine| -> Box<dyn Engine> {
                let mut facts = inner.facts().clone();
                if facts.draft_block == 0 {
                    return Box::new(inner);
                }
                facts.draft_block = block;
                Box::new(Scripted { inner, facts, truth: Arc::clone(&truth), right })
            };
            let rig = Rig::wrapped(&cut, CoordinatorSettings { in_flight_max, ..quick() }, &wrap).await;
            let run = rig.run(request.clone()).await;
            assert_eq!(run.tokens, expected, "block {block}, W = {in_flight_max}, {sampling:?}");
            rig.end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_that_are_never_right() {
    check(5, |_| 0).await;
    check(15, |_| 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_that_are_right_for_a_while() {
    check(5, |at| at % 4).await;
    check(15, |at| at % 9).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_that_are_always_right() {
    check(1, |_| u32::MAX).await;
    check(15, |_| u32::MAX).await;
}

/// Wrong at a compression boundary, so that the cancel lands on it: the slots of ratio 4 and 16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancels_that_land_on_a_compression_boundary() {
    check(8, |at| (at + 2).next_multiple_of(4) - (at + 2)).await;
    check(15, |at| (at + 2).next_multiple_of(16) - (at + 2)).await;
}
