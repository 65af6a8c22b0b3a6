//! What the tail adds to a session: the model's tokens, scores and draft blocks.
//!
//! Owns which positions are true and the logits row that scores the next fed token.

use crate::draft::{self, Anchor, Chooser};
use crate::engine::sample::{LogSoftmax, Sampler};
use crate::engine::{Engine, EngineError};
use crate::ids::{Position, TokenId};
use crate::proto::control::{Open, Rebuild, Want};
use crate::proto::frame::{Answer, DraftBlock, FrameHead, Reply, Scores};
use crate::proto::frontier::{Frontier, FrontierError};

/// Why the tail fails a session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TailError {
    /// The engine can't draft.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The fence let something through that it must not.
    #[error(transparent)]
    Frontier(#[from] FrontierError),
    /// Computed again, a position has another answer than the one that was committed.
    #[error(
        "rebuilt, this tail answers position {pos} with {ours}, committed was {committed}: a stage computes differently"
    )]
    Differs {
        /// The position.
        pos: Position,
        /// The answer now.
        ours: TokenId,
        /// The one before.
        committed: TokenId,
    },
}

/// One session at the tail.
#[derive(Debug)]
pub(crate) struct Tail {
    open: Open,
    frontier: Frontier,
    sampler: Sampler,
    /// Logits of the last answered position, kept only where scores are wanted.
    last_row: Vec<f32>,
    last: Option<(Position, LogSoftmax)>,
    /// Positions below are history: their answers are known.
    history: Position,
    /// The last answer within it, and the position at which it is fed.
    said: Option<(Position, TokenId)>,
}

impl Tail {
    pub(crate) fn new(open: Open, rebuild: Rebuild) -> Self {
        Self {
            frontier: Frontier::new(open.prompt_len, open.reach).starting_at(rebuild.from),
            open,
            sampler: Sampler::new(),
            last_row: Vec::new(),
            last: None,
            history: rebuild.history,
            said: None,
        }
    }

    /// Answers frames that were computed together: consecutive positions of one epoch, their ids
    /// in one run, logits `[rows, vocab]` of the positions at or above `logits_from`.
    ///
    /// One block is drafted, off the anchor that [`Chooser`] finds.
    pub(crate) fn answer(
        &mut self,
        engine: &mut dyn Engine,
        heads: &[FrameHead],
        ids: &[TokenId],
        logits: &[f32],
    ) -> Result<Vec<Reply>, TailError> {
        let session = self.open.session;
        let vocab = engine.facts().vocab;
        let mut replies = Vec::with_capacity(heads.len());
        let mut rows = logits.chunks_exact(vocab);
        let mut offset = 0;
        let mut chooser = Chooser::default();
        for (at, head) in heads.iter().enumerate() {
            let ids = &ids[offset..offset + head.len as usize];
            offset += ids.len();
            let mut answers = Vec::new();
            for (pos, id) in (head.pos.0..).map(Position).zip(ids) {
                self.check_said(pos, *id)?;
                let fed = self.fed_score(pos, *id);
                if pos < head.answer_from {
                    continue;
                }
                let Some(row) = rows.next() else { continue };
                let answer = self.answer_row(pos, fed, row);
                if pos < self.history {
                    self.said = Some((pos.plus(1), answer.token));
                }
                answers.push(answer);
            }
            let tokens: Vec<TokenId> = answers.iter().map(|answer| answer.token).collect();
            let fed = self.frontier.handle_fed(head.pos, ids, &tokens)?;
            let last = head.pos.plus(head.len.saturating_sub(1));
            // Off the history nobody wants a draft.
            if last >= self.history {
                chooser.take(at, last, fed.may_draft(), tokens.last().copied());
            }
            replies.push(Reply {
                view: head.view,
                session,
                epoch: head.epoch,
                pos: head.pos,
                len: head.len,
                answers,
                draft: None,
            });
        }
        if let Some(anchor) = chooser.anchor() {
            replies[anchor.frame].draft = self.draft(engine, anchor)?;
        }
        Ok(replies)
    }

    /// Within the history, what is fed is what this tail answered before.
    fn check_said(&mut self, pos: Position, id: TokenId) -> Result<(), TailError> {
        match self.said.take_if(|(at, _)| *at == pos) {
            Some((_, ours)) if ours != id => Err(TailError::Differs { pos: Position(pos.0 - 1), ours, committed: id }),
            Some(_) | None => Ok(()),
        }
    }

    fn answer_row(&mut self, pos: Position, fed: Option<f32>, row: &[f32]) -> Answer {
        let token = self.sampler.pick(row, &self.open.sampling, pos.plus(1));
        let Want { scores, logprobs } = self.open.want;
        let Some(top) = scores.or(logprobs) else { return Answer { token, scores: None } };
        let softmax = self.sampler.log_softmax(row);
        let top = self.sampler.top(row, &softmax, top as usize);
        if scores.is_some() {
            self.last_row.clear();
            self.last_row.extend_from_slice(row);
            self.last = Some((pos, softmax));
        }
        let picked = logprobs.map(|_| softmax.of(row, token));
        Answer { token, scores: Some(Scores { fed, picked, top }) }
    }

    /// Log-probability of the token fed at `pos`, where the row before it is known.
    fn fed_score(&self, pos: Position, id: TokenId) -> Option<f32> {
        let (_, softmax) = self.last.as_ref().filter(|(last, _)| last.plus(1) == pos)?;
        Some(softmax.of(&self.last_row, id))
    }

    fn draft(&self, engine: &mut dyn Engine, anchor: Anchor) -> Result<Option<DraftBlock>, EngineError> {
        let useful = draft::useful(self.open.draft_block, anchor.pos, self.open.positions) as usize;
        if useful == 0 {
            return Ok(None);
        }
        let mut drafts = engine.draft(self.open.session, anchor.pos, anchor.token)?;
        drafts.tokens.truncate(useful);
        drafts.confidence.truncate(useful);
        Ok(Some(DraftBlock { tokens: drafts.tokens, confidence: drafts.confidence }))
    }
}
