//! The layers of one range, as a value: several engines may live in one process.
//!
//! Owns the [`Engine`] trait and what goes in and out of it; [`cpu`] is the engine that runs
//! everywhere, [`wire`] writes hidden states on the wire, [`sample`] picks a token from logits, [`solo`] runs
//! a whole model in one process.
//! An engine knows no socket, no frame and no ring.

pub mod admit;
pub mod cpu;
pub mod sample;
pub mod solo;
pub mod wire;

use half::bf16;

use crate::ids::{LayerRange, Position, SessionId, TokenId, WireEncoding};

/// The name of the arithmetic: raised whenever any bit of any result may change.
///
/// Stages with different ids don't share a ring. See `docs/numerics.md`.
pub const NUMERICS_ID: &str = "ringfence-canonical-1";

/// What a built engine runs, read from the engine itself and not from its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineFacts {
    /// The layers held.
    pub range: LayerRange,
    /// Layers of the whole target model.
    pub layers: u16,
    /// Residual streams per position.
    pub hc: usize,
    /// Values per residual stream.
    pub dim: usize,
    /// Size of the vocabulary; ids at or above it are refused.
    pub vocab: usize,
    /// Where it runs and with which kernels, like `cpu avx2 x1`.
    pub device: String,
    /// Draft tokens per block, where this engine holds the drafter; else 0.
    pub draft_block: u32,
    /// Longest session it takes, in positions.
    pub max_context: u32,
    /// Bytes of resident weights.
    pub weight_bytes: u64,
}

impl EngineFacts {
    /// Whether this engine embeds token ids.
    #[must_use]
    pub fn is_head(&self) -> bool {
        self.range.lo() == 0
    }

    /// Whether this engine computes logits.
    #[must_use]
    pub fn is_tail(&self) -> bool {
        self.range.hi() == self.layers
    }
}

/// What is fixed about a session when it is opened on an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionShape {
    /// Positions the session may reach: prompt + new tokens (+ drafts beyond them).
    pub positions: u32,
    /// Reach `R`: the largest `pos + s − settled` ever in flight. State is sized by it.
    pub reach: u32,
    /// Layers in front of which hidden states cross the wire anywhere in the ring, ascending.
    /// The engine applies encode→decode at those strictly inside its range.
    pub boundaries: Vec<u16>,
    /// The encoding at every boundary.
    pub encoding: WireEncoding,
    /// Whether the tail drafts in this session (its draft windows are kept only then).
    pub drafting: bool,
}

/// A run of consecutive positions of one session.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// The session.
    pub session: SessionId,
    /// Absolute position of the first token. State at or above it becomes unread until rewritten.
    pub pos: Position,
    /// Token ids `[s]`, `s ≥ 1`.
    pub ids: &'a [TokenId],
    /// Hidden state before the first layer of the range, `[s, hc, dim]`; `None` exactly at the head.
    pub hidden: Option<&'a [bf16]>,
    /// The tail computes logits for positions at or above this one.
    pub logits_from: Position,
}

/// Results of a pass; buffers are reused from pass to pass.
#[derive(Debug, Default)]
pub struct Output {
    /// Hidden state after the range, chunks in batch order, `[Σ s, hc, dim]`; empty at the tail.
    pub hidden: Vec<bf16>,
    /// Tail only: logits of the positions asked for, chunks in batch order, `[rows, vocab]` fp32.
    pub logits: Vec<f32>,
}

/// Draft tokens for the positions after an anchor.
#[derive(Debug, Clone, PartialEq)]
pub struct Drafts {
    /// Draft `k` proposes the token at position `i + 2 + k`, where the anchor is at `i + 1`.
    pub tokens: Vec<TokenId>,
    /// Raw confidence logits, one per token.
    pub confidence: Vec<f32>,
}

/// Why a session was not opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The id is in use.
    #[error("session {session} is already open on this engine")]
    AlreadyOpen {
        /// The session.
        session: SessionId,
    },
    /// The session is longer than the engine's context.
    #[error(
        "session asks for {asked} positions, this stage was started for {limit}: shorten the request or raise --max-context"
    )]
    TooLong {
        /// Positions asked for.
        asked: u32,
        /// Positions allowed.
        limit: u32,
    },
    /// A boundary is no layer of the model.
    #[error("boundary at layer {got}, the model has layers 1 to {last} to cut before")]
    Boundary {
        /// The boundary that came.
        got: u16,
        /// Last possible one.
        last: u16,
    },
    /// Drafting was asked of a stage that holds no drafter.
    #[error("session asks for drafts, this stage holds layers {range} without the drafter")]
    NoDrafter {
        /// The layers held.
        range: LayerRange,
    },
    /// The state does not fit.
    #[error("session state needs {needed} bytes, {free} are free: close sessions or lower reach and context")]
    Memory {
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The device failed: no session of this engine can go on.
    #[error("the device failed: {why}: restart this stage")]
    Device {
        /// The driver's words.
        why: String,
    },
}

/// Why a pass was refused or failed. The session's state is unchanged or, for
/// [`EngineError::NotFinite`], undefined from the named position on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// No such session.
    #[error("session {session} is not open on this engine")]
    NotOpen {
        /// The session.
        session: SessionId,
    },
    /// Two chunks of a batch are of one session.
    #[error("session {session} is in the batch twice: a pass takes one chunk of each session")]
    Twice {
        /// The session.
        session: SessionId,
    },
    /// The chunk has no token, or buffers of another size than its ids say.
    #[error("chunk of {ids} ids came with {got} hidden values, expected {expected}")]
    Shape {
        /// Ids in the chunk.
        ids: usize,
        /// Values that came.
        got: usize,
        /// Values expected.
        expected: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token id {got} at position {pos}: the vocabulary ends at {vocab}")]
    Token {
        /// Where.
        pos: Position,
        /// The id.
        got: TokenId,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// The chunk runs past the positions the session was opened for, or skips some.
    #[error("chunk at {pos}+{len}: this session continues at {next} at most and ends at {end}")]
    Range {
        /// First position.
        pos: Position,
        /// Positions in the chunk.
        len: u32,
        /// Highest position it may start at.
        next: Position,
        /// One past the last position of the session.
        end: Position,
    },
    /// Re-opening further back than the reach the session was opened with.
    #[error("re-opening at {pos} with {next} computed: the session's reach is {reach}")]
    Reach {
        /// First position.
        pos: Position,
        /// Positions computed so far.
        next: Position,
        /// The session's reach.
        reach: u32,
    },
    /// The result holds a NaN or an infinity.
    #[error("layers {range} produced a value that is not finite at position {pos}")]
    NotFinite {
        /// The layers.
        range: LayerRange,
        /// The position.
        pos: Position,
    },
    /// A draft was asked for where none can be made.
    #[error("no draft at position {pos}: {why}")]
    Draft {
        /// The position.
        pos: Position,
        /// What is missing.
        why: &'static str,
    },
    /// The device failed: no session of this engine can go on.
    #[error("the device failed: {why}: restart this stage")]
    Device {
        /// The driver's words.
        why: String,
    },
}

/// The layers of one range with the state of the sessions open on them.
///
/// All results obey the canonical arithmetic: the bits of a position's result are a function of
/// that position's history only, not of chunking, batching, threads or device.
pub trait Engine: Send {
    /// What this engine runs.
    fn facts(&self) -> &EngineFacts;

    /// Bytes of state that a session of this shape takes.
    fn state_bytes(&self, shape: &SessionShape) -> u64;

    /// Allocates a session's state.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is allocated then.
    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError>;

    /// Frees a session's state; unknown ids are ignored.
    fn close(&mut self, session: SessionId);

    /// Runs chunks of different sessions (each session at most once) through the range.
    ///
    /// # Errors
    /// [`EngineError`]; refusals by shape, token or range come before anything is computed.
    fn forward(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError>;

    /// Drafts a block from position `at` (computed, with drafting on) with the token `anchor` at
    /// `at + 1`. Idempotent: it stores nothing.
    ///
    /// # Errors
    /// [`EngineError::Draft`] where the position was not computed or nothing here drafts.
    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError>;
}
