//! The CPU engine: the model's semantics in the canonical arithmetic.
//!
//! Owns [`CpuEngine`]: the weights of one layer range, packed once, and the state of the sessions
//! open on it. A pass cuts its chunks into waves of rows; a wave goes through the layers, products
//! over all its rows at once, attention row by row. No bit of a row depends on the wave it is in.
//!
//! [`kernel`] computes, `load` packs, `state` remembers, `layer` is one layer of the model,
//! `tail` what follows the last one, `drafter` the drafts. [`inspect`] is for tests.

mod attention;
mod compress;
mod drafter;
mod experts;
#[doc(hidden)]
pub mod inspect;
pub mod kernel;
mod layer;
mod load;
mod need;
mod ops;
mod pass;
mod scratch;
mod state;
mod tail;

use std::collections::BTreeMap;

use self::kernel::Isa;
use self::kernel::pool::Pool;
use self::load::Weights;
use self::scratch::Scratch;
use self::state::{SessionState, Sizes, to_usize};
use super::admit::{self, Progress};
use super::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use crate::ids::{LayerRange, Position, SessionId, TokenId};
use crate::model::{Checkpoint, ModelConfig, ModelError};

pub use self::need::{Need, NeedError, need};

/// Positions that a stage serves where nothing else is asked for, if the model has as many.
pub const DEFAULT_CONTEXT: u32 = 32_768;

/// Most compute threads of one engine.
pub const THREADS_MAX: usize = 256;

/// Widest draft block, in tokens.
pub const DRAFT_BLOCK_MAX: u32 = 64;

/// How an engine is built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuSettings {
    /// Threads that compute, the caller's included. Default 1; more than the cores cost speed.
    pub threads: usize,
    /// Longest session in positions. Default: the model's own, at most [`DEFAULT_CONTEXT`]; larger
    /// values cost rotation tables.
    pub max_context: Option<u32>,
    /// Computes without vector instructions; the bits are the same. Default off.
    pub force_portable: bool,
    /// State of all sessions together, in bytes. Default 4 GiB.
    pub max_state_bytes: u64,
    /// Draft tokens per block. Default: as trained; wider blocks guess worse and cost more.
    pub draft_block: Option<u32>,
}

impl Default for CpuSettings {
    fn default() -> Self {
        Self { threads: 1, max_context: None, force_portable: false, max_state_bytes: 4 << 30, draft_block: None }
    }
}

/// Why an engine was not built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// The checkpoint does not fit.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A setting can't be honoured.
    #[error("{setting} is {got}, this model and machine allow {expected}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// The value asked for.
        got: u64,
        /// What is allowed.
        expected: String,
    },
    /// A thread did not start.
    #[error("cannot start a compute thread: {why}: lower --threads")]
    Thread {
        /// The system's words.
        why: String,
    },
}

/// The layers of one range on the CPU.
#[derive(Debug)]
pub struct CpuEngine {
    config: ModelConfig,
    facts: EngineFacts,
    weights: Weights,
    scratch: Scratch,
    pool: Pool,
    isa: Isa,
    ids: BTreeMap<SessionId, usize>,
    sessions: Vec<Option<SessionState>>,
    state_bytes: u64,
    max_state_bytes: u64,
}

impl CpuEngine {
    /// Packs the weights of `range` and starts the compute threads.
    ///
    /// # Errors
    /// [`BuildError`] naming the tensor or setting, both values and what to do.
    pub fn new(checkpoint: &Checkpoint, range: LayerRange, settings: &CpuSettings) -> Result<Self, BuildError> {
        let config = checkpoint.config().clone();
        checkpoint.check_range(range)?;
        let max_context = context(&config, settings)?;
        let draft_block = draft_block(checkpoint, range, settings)?;
        if settings.threads == 0 || settings.threads > THREADS_MAX {
            let expected = format!("1 to {THREADS_MAX}");
            return Err(BuildError::Setting { setting: "threads", got: settings.threads as u64, expected });
        }
        let isa = if settings.force_portable { Isa::PORTABLE } else { Isa::detect() };
        let opened = checkpoint.weights(range)?;
        let weights = Weights::load(&opened, max_context + draft_block)?;
        let pool = Pool::new(settings.threads).map_err(|error| BuildError::Thread { why: error.to_string() })?;
        let facts = EngineFacts {
            range,
            layers: config.layers,
            hc: config.hc,
            dim: config.dim,
            vocab: config.vocab,
            device: format!("cpu {} x{}", isa.name(), settings.threads),
            draft_block,
            max_context,
            weight_bytes: weights.bytes(),
        };
        Ok(Self {
            scratch: Scratch::default(),
            config,
            facts,
            weights,
            pool,
            isa,
            ids: BTreeMap::new(),
            sessions: Vec::new(),
            state_bytes: 0,
            max_state_bytes: settings.max_state_bytes,
        })
    }

    fn sizes(&self, shape: &SessionShape) -> Sizes<'_> {
        Sizes::new(&self.config, self.facts.range, shape, self.facts.draft_block > 0)
    }

    fn slot(&self, session: SessionId) -> Result<usize, EngineError> {
        self.ids.get(&session).copied().ok_or(EngineError::NotOpen { session })
    }

    fn state(&self, slot: usize) -> Option<&SessionState> {
        self.sessions.get(slot).and_then(Option::as_ref)
    }

    /// Refuses a chunk that can't be computed, before anything is.
    fn check(&self, batch: &[Chunk<'_>], at: usize) -> Result<(), EngineError> {
        let session = batch[at].session;
        let state = self.state(self.slot(session)?).ok_or(EngineError::NotOpen { session })?;
        let progress = Progress { shape: &state.shape, next: state.next, reach: state.reach };
        admit::chunk(&self.facts, batch, at, progress)
    }
}

/// The longest session, from the settings and the model.
fn context(config: &ModelConfig, settings: &CpuSettings) -> Result<u32, BuildError> {
    let limit = config.max_positions;
    match settings.max_context {
        None => Ok(limit.min(DEFAULT_CONTEXT)),
        Some(got) if got >= 1 && got <= limit => Ok(got),
        Some(got) => {
            Err(BuildError::Setting { setting: "max-context", got: u64::from(got), expected: format!("1 to {limit}") })
        }
    }
}

/// Draft tokens per block; 0 where the range does not draft.
fn draft_block(checkpoint: &Checkpoint, range: LayerRange, settings: &CpuSettings) -> Result<u32, BuildError> {
    if let Some(got) = settings.draft_block.filter(|&got| got == 0 || got > DRAFT_BLOCK_MAX) {
        let expected = format!("1 to {DRAFT_BLOCK_MAX}");
        return Err(BuildError::Setting { setting: "draft-block", got: u64::from(got), expected });
    }
    let Some(draft) = checkpoint.config().draft.as_ref().filter(|_| checkpoint.drafts(range)) else { return Ok(0) };
    Ok(settings.draft_block.unwrap_or_else(|| u32::try_from(draft.block).unwrap_or(DRAFT_BLOCK_MAX)))
}

fn position(pos: usize) -> Position {
    Position(u32::try_from(pos).unwrap_or(u32::MAX))
}

impl Engine for CpuEngine {
    fn facts(&self) -> &EngineFacts {
        &self.facts
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        self.sizes(shape).bytes()
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        admit::session(&self.facts, (session, self.ids.contains_key(&session)), shape)?;
        let (needed, free) = (self.state_bytes(shape), self.max_state_bytes.saturating_sub(self.state_bytes));
        if needed > free {
            return Err(OpenError::Memory { needed, free });
        }
        let state = self.sizes(shape).allocate(shape);
        self.state_bytes += needed;
        let slot = self.sessions.iter().position(Option::is_none).unwrap_or(self.sessions.len());
        if slot == self.sessions.len() {
            self.sessions.push(None);
        }
        self.sessions[slot] = Some(state);
        self.ids.insert(session, slot);
        Ok(())
    }

    fn close(&mut self, session: SessionId) {
        let Some(slot) = self.ids.remove(&session) else { return };
        if let Some(state) = self.sessions[slot].take() {
            self.state_bytes -= self.state_bytes(&state.shape);
        }
    }

    fn forward(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        for at in 0..batch.len() {
            self.check(batch, at)?;
        }
        self.run(batch, out)
    }

    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError> {
        self.draft_block(session, at, anchor)
    }
}
