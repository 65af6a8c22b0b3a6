//! What travels on the data lane: frames towards the tail, replies back to the coordinator.

use bytes::Bytes;

use crate::ids::{Epoch, Position, SessionId, TokenId, View};

/// The numbers that fence a frame; everything a [`crate::proto::fence::Fence`] looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHead {
    /// Membership the frame was sent in.
    pub view: View,
    /// The session.
    pub session: SessionId,
    /// Speculation the frame belongs to.
    pub epoch: Epoch,
    /// First position of the epoch: the point it re-opens at.
    pub start: Position,
    /// Absolute position of the first token.
    pub pos: Position,
    /// Number of tokens, at least 1.
    pub len: u32,
    /// Positions below it are never re-opened.
    pub settled: Position,
    /// The tail answers for positions at or above this one.
    pub answer_from: Position,
}

/// Consecutive positions of one session on their way through the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The fencing numbers; `head.len == ids.len()`.
    pub head: FrameHead,
    /// Token ids `[s]`.
    pub ids: Vec<TokenId>,
    /// Encoded hidden state, `s` times the session's position bytes; empty towards the head.
    pub payload: Bytes,
}

/// What the tail says about one frame.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// Membership.
    pub view: View,
    /// The session.
    pub session: SessionId,
    /// Epoch of the frame that is answered.
    pub epoch: Epoch,
    /// First position of the frame that is answered.
    pub pos: Position,
    /// Positions of the frame that is answered.
    pub len: u32,
    /// One answer for each position of the frame at or above its `answer_from`, ascending; the
    /// last one is for `pos + len − 1`.
    pub answers: Vec<Answer>,
    /// A fresh block, drafted from the frame's last position with its answer as the anchor; only
    /// where that position is true.
    pub draft: Option<DraftBlock>,
}

/// The model's answer at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The token that the model puts at the next position.
    pub token: TokenId,
    /// Log-probabilities, where `open.want` asked for them.
    pub scores: Option<Scores>,
}

/// Log-probabilities at one position, natural logarithm.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// Of the token fed *at* this position given what precedes it; `None` at position 0.
    pub fed: Option<f32>,
    /// Of the answered token; only where `open.want` asked for it.
    pub picked: Option<f32>,
    /// The most likely next tokens, descending (ties: lowest id first).
    pub top: Vec<(TokenId, f32)>,
}

/// Draft tokens: `tokens[k]` proposes the token at `pos + len + 1 + k` of the reply that brings it.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftBlock {
    /// Proposed tokens, nearest first.
    pub tokens: Vec<TokenId>,
    /// Raw confidence logits, one per token.
    pub confidence: Vec<f32>,
}
