//! The engine: weights of a range, sessions on it, and passes over them.
//!
//! Owns what is refused before anything is computed, how chunks are cut into waves, and the one wait at
//! a wave's end.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ringfence_engine::engine::admit::{self, Progress, Run};
use ringfence_engine::engine::cpu::kernel::rope::{RopeTable, Stretch, frequencies};
use ringfence_engine::engine::cpu::{DEFAULT_CONTEXT, DRAFT_BLOCK_MAX};
use ringfence_engine::engine::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use ringfence_engine::ids::{LayerRange, Position, SessionId, TokenId};
use ringfence_engine::model::{Checkpoint, ModelConfig, ModelError};

use crate::branch::Branch;
use crate::driver::{Arena, Device, Direction, Pinned};
use crate::error::CudaError;
use crate::graph::Graphs;
use crate::kernels::Kernels;
use crate::linear::{Products, Tuning};
use crate::many::Many;
use crate::nvrtc::Compiler;
use crate::ops::{self, Ops, Row, Streams, Table};
use crate::pass::{Buffers, ExpertScratch, FEW, Pass, Shape, WAVE, WaveSizes};
use crate::state::{SLOTS, SessionState, Sizes, StateTable, to_i32, to_usize};
use crate::weights::Weights;
use crate::{fits, transfer};

mod launches;

/// How an engine is built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaSettings {
    /// Which of the machine's devices. Default 0.
    pub device: usize,
    /// Longest session in positions. Default: the model's own, at most [`DEFAULT_CONTEXT`].
    pub max_context: Option<u32>,
    /// State of all sessions together, in bytes. Default 4 GiB.
    pub max_state_bytes: u64,
    /// Draft tokens per block. Default: as trained.
    pub draft_block: Option<u32>,
    /// Device memory that captured waves may take, in bytes; 0 captures none. Default 256 MiB.
    pub graph_bytes: u64,
    /// Folders in which the CUDA compiler is looked for beside the loader's path.
    pub cuda_folders: Vec<PathBuf>,
    /// Folder in which compiled kernels are kept. Default: none.
    pub kernel_cache: Option<PathBuf>,
}

impl Default for CudaSettings {
    fn default() -> Self {
        Self {
            device: 0,
            max_context: None,
            max_state_bytes: 4 << 30,
            draft_block: None,
            graph_bytes: 256 << 20,
            cuda_folders: Vec::new(),
            kernel_cache: None,
        }
    }
}

/// Why an engine was not built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// The checkpoint does not fit.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A setting can't be honoured.
    #[error("{setting} is {got}, this model and device allow {expected}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// The value asked for.
        got: u64,
        /// What is allowed.
        expected: String,
    },
    /// The device can't be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The layers of one range on a GPU.
#[derive(Debug)]
pub struct CudaEngine {
    graphs: Graphs,
    config: ModelConfig,
    facts: EngineFacts,
    weights: Weights,
    buffers: Buffers,
    scratch: ExpertScratch,
    many: Many,
    table: StateTable,
    rotations: (Table, Table),
    _rotations: Arena,
    input: Pinned,
    output: Pinned,
    products: Products,
    apart: Products,
    branch: Branch,
    kernels: std::sync::Arc<Kernels>,
    ids: BTreeMap<SessionId, usize>,
    sessions: Vec<Option<SessionState>>,
    state_bytes: u64,
    max_state_bytes: u64,
    device: Device,
}

impl CudaEngine {
    /// Opens the device, compiles the kernels, checks them, and moves the weights of `range` there.
    ///
    /// # Errors
    /// [`BuildError`] naming the tensor, setting or library, both values and what to do.
    pub fn new(checkpoint: &Checkpoint, range: LayerRange, settings: &CudaSettings) -> Result<Self, BuildError> {
        let config = checkpoint.config().clone();
        checkpoint.check_range(range)?;
        fits::check(&config)?;
        let max_context = fits::context(&config, settings.max_context)?;
        let draft_block = fits::draft_block(checkpoint, range, settings.draft_block)?;
        let device = Device::open(settings.device)?;
        let compiler = Compiler::find(&settings.cuda_folders, settings.kernel_cache.clone())?;
        let kernels = std::sync::Arc::new(Kernels::load(&device, &compiler)?);
        ops::prepare(&device, &kernels)?;
        let products = Products::new(&device, kernels.clone(), Tuning::default())?;
        crate::selftest::run(&device, &products, &kernels)?;
        let opened = checkpoint.weights(range)?;
        let weights = Weights::load(&device, &kernels, &opened)?;
        let (rotations, memory) = rotations(&device, &config, to_usize(max_context + draft_block))?;
        let sizes =
            WaveSizes { config: &config, range, positions: to_usize(max_context), block: to_usize(draft_block) };
        let buffers = Buffers::new(&device, &sizes)?;
        // SAFETY: the buffer is that long; it is copied to the host whole, whatever a block's size.
        unsafe { device.fill(buffers.drafted, 0, 8 * FEW) }?;
        let scratch = ExpertScratch::new(&device, &config, FEW)?;
        let many = Many::new(&device, &config)?;
        let stages = config.draft.as_ref().filter(|_| draft_block > 0).map_or(0, |draft| draft.stages);
        let table = StateTable::new(&device, range.count() + stages)?;
        let input = device.pinned(transfer::input_bytes(&config), Direction::ToDevice)?;
        let output = device.pinned(transfer::output_bytes(&config, range), Direction::FromDevice)?;
        let facts = EngineFacts {
            range,
            layers: config.layers,
            hc: config.hc,
            dim: config.dim,
            vocab: config.vocab,
            device: format!("cuda:{} {}", settings.device, device.facts().name),
            draft_block,
            max_context,
            weight_bytes: weights.bytes(),
        };
        let mut engine = Self {
            graphs: Graphs::default(),
            config,
            facts,
            weights,
            buffers,
            scratch,
            many,
            table,
            rotations,
            _rotations: memory,
            input,
            output,
            apart: products.apart(),
            branch: Branch::new(&device)?,
            products,
            kernels,
            ids: BTreeMap::new(),
            sessions: Vec::new(),
            state_bytes: 0,
            max_state_bytes: settings.max_state_bytes,
            device,
        };
        engine.capture(settings.graph_bytes)?;
        Ok(engine)
    }

    /// Looks whether the device and the compiler are there: the device's name and its free bytes.
    ///
    /// # Errors
    /// [`CudaError`] with what was looked for and found.
    pub fn probe(settings: &CudaSettings) -> Result<(String, u64), CudaError> {
        let device = Device::open(settings.device)?;
        Compiler::find(&settings.cuda_folders, settings.kernel_cache.clone())?;
        Ok((device.facts().name.clone(), device.memory()?.0))
    }

    /// Bytes free on the device, beside all that the engine holds.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        self.device.bind()?;
        Ok(self.device.memory()?.0)
    }

    /// Device memory that captured waves take, in bytes, and how many there are.
    #[must_use]
    pub fn graphs(&self) -> (u64, usize) {
        (self.graphs.bytes(), self.graphs.count())
    }

    /// Device memory that a pass works in, whatever the sessions, in bytes.
    #[must_use]
    pub fn pass_bytes(&self) -> u64 {
        (self.buffers.bytes() + self.many.bytes()) as u64
    }

    /// What the device holds.
    #[must_use]
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn pass(&self) -> Pass<'_> {
        let c = &self.config;
        Pass {
            ops: Ops::new(&self.kernels, self.device.stream(), true),
            products: &self.products,
            apart: &self.apart,
            branch: &self.branch,
            config: c,
            range: self.facts.range,
            streams: Streams {
                hc: c.hc,
                dim: c.dim,
                iterations: c.sinkhorn_iters,
                hc_eps: c.hc_eps,
                norm_eps: c.norm_eps,
            },
            positions: to_usize(self.facts.max_context),
            weights: &self.weights,
            buffers: &self.buffers,
            scratch: &self.scratch,
            many: &self.many,
            states: (self.table.at(), self.table.places()),
            plain: self.rotations.0,
            scaled: self.rotations.1,
        }
    }

    fn sizes(&self, shape: &SessionShape) -> Sizes<'_> {
        Sizes::new(&self.config, self.facts.range, shape, self.facts.draft_block > 0)
    }

    fn slot(&self, session: SessionId) -> Result<usize, EngineError> {
        self.ids.get(&session).copied().ok_or(EngineError::NotOpen { session })
    }

    fn state(&self, session: SessionId) -> Result<(usize, &SessionState), EngineError> {
        let slot = self.slot(session)?;
        let state = self.sessions.get(slot).and_then(Option::as_ref).ok_or(EngineError::NotOpen { session })?;
        Ok((slot, state))
    }

    fn set_next(&mut self, session: SessionId, next: usize) {
        if let Some(&slot) = self.ids.get(&session)
            && let Some(Some(state)) = self.sessions.get_mut(slot)
        {
            state.next = next;
        }
    }

    /// Takes memory for a session whose shape was checked.
    fn try_open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), CudaError> {
        let slot = self.sessions.iter().position(Option::is_none).unwrap_or(self.sessions.len());
        if slot >= SLOTS {
            return Err(CudaError::Memory { what: "one more session".to_owned(), needed: 1, free: 0 });
        }
        self.device.bind()?;
        let state = self.table.open(&self.device, slot, (self.sizes(shape), shape))?;
        if slot == self.sessions.len() {
            self.sessions.push(None);
        }
        self.state_bytes += state.bytes;
        self.sessions[slot] = Some(state);
        self.ids.insert(session, slot);
        Ok(())
    }

    /// Refuses a chunk that can't be computed, before anything is.
    fn check(&self, batch: &[Chunk<'_>], at: usize) -> Result<(), EngineError> {
        let (_, state) = self.state(batch[at].session)?;
        let progress = Progress { shape: &state.shape, next: state.next, reach: state.reach };
        admit::chunk(&self.facts, batch, at, progress)
    }

    /// Runs one wave and appends what it gives.
    fn wave(&mut self, batch: &[Chunk<'_>], wave: &[Run], out: &mut Output) -> Result<(), EngineError> {
        let width = self.config.hc * self.config.dim;
        let (mut rows, mut picks) = (Vec::with_capacity(WAVE), Vec::new());
        let mut drafting = false;
        for run in wave {
            let chunk = &batch[run.chunk];
            let (slot, state) = self.state(chunk.session)?;
            drafting |= state.drafting;
            let first = rows.len();
            for k in run.from..run.from + run.len {
                let pos = to_usize(chunk.pos.0) + k;
                if self.facts.is_tail() && pos >= to_usize(chunk.logits_from.0) {
                    picks.push(to_i32(rows.len()));
                }
                let id = chunk.ids[k].0.cast_signed();
                rows.push(Row { slot: to_i32(slot), pos: to_i32(pos), id, spare: 0 });
            }
            if let Some(hidden) = chunk.hidden {
                let part = &hidden[run.from * width..(run.from + run.len) * width];
                transfer::hidden(&mut self.input, first * width, part);
            }
        }
        transfer::rows(&mut self.input, &rows, &picks);
        // A captured wave moves windows on where there are any, which the device finds out.
        let logits = picks.len().min(FEW);
        let captured = Shape { rows: rows.len(), logits, drafting: self.facts.draft_block > 0 };
        let done = match self.graphs.wave(captured) {
            Some(graph) => graph.launch(),
            None => self.enqueue(Shape { drafting, ..captured }),
        };
        self.finish(done, &rows)?;
        if !self.facts.is_tail() {
            out.hidden.extend_from_slice(transfer::halves(&self.output, transfer::RESULT, rows.len() * width));
            return Ok(());
        }
        self.take_logits(logits, out);
        for from in (FEW..picks.len()).step_by(FEW) {
            let more = FEW.min(picks.len() - from);
            self.finish(self.enqueue_logits(from, more, rows.len()), &rows)?;
            self.take_logits(more, out);
        }
        Ok(())
    }

    /// Waits for what was put on the stream, and looks whether all of it is finite.
    fn finish(&self, enqueued: Result<(), CudaError>, rows: &[Row]) -> Result<(), EngineError> {
        enqueued.and_then(|()| self.device.synchronize()).map_err(broken)?;
        let Some(row) = transfer::failed(&self.output, rows.len()) else { return Ok(()) };
        let pos = position(usize::try_from(rows[row].pos).unwrap_or(0));
        Err(EngineError::NotFinite { range: self.facts.range, pos })
    }

    fn take_logits(&self, n: usize, out: &mut Output) {
        let logits = transfer::floats(&self.output, transfer::RESULT, n * self.config.vocab);
        out.logits.extend_from_slice(logits);
    }
}

fn position(pos: usize) -> Position {
    Position(u32::try_from(pos).unwrap_or(u32::MAX))
}

fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn broken(error: CudaError) -> EngineError {
    EngineError::Device { why: error.to_string() }
}

/// The rotations of layers that see the window only, and of those that compress.
fn rotations(device: &Device, config: &ModelConfig, positions: usize) -> Result<((Table, Table), Arena), CudaError> {
    let stretch = Stretch {
        original: f64::from(config.yarn.original),
        factor: config.yarn.factor,
        beta_fast: f64::from(config.yarn.beta_fast),
        beta_slow: f64::from(config.yarn.beta_slow),
    };
    let bytes = 4 * positions * config.rope_dim;
    let mut memory = device.arena("rotation tables", 2 * bytes.next_multiple_of(crate::driver::ALIGN))?;
    let mut table = |base, stretch| {
        let host = RopeTable::new(&frequencies(config.rope_dim, base, stretch), positions);
        let mut values = Vec::with_capacity(positions * config.rope_dim);
        for position in 0..positions {
            let (cos, sin) = host.row(position);
            values.extend_from_slice(cos);
            values.extend_from_slice(sin);
        }
        let at = memory.take("a rotation table", bytes)?;
        // SAFETY: the piece is that long, and nothing runs yet.
        unsafe { device.upload(&values, at) }?;
        Ok::<_, CudaError>(Table { at, rope: config.rope_dim })
    };
    let tables = (table(config.rope_theta, None)?, table(config.compress_rope_theta, Some(stretch))?);
    Ok((tables, memory))
}

impl Engine for CudaEngine {
    fn facts(&self) -> &EngineFacts {
        &self.facts
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        self.sizes(shape).bytes(shape) as u64
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        admit::session(&self.facts, (session, self.ids.contains_key(&session)), shape)?;
        let (needed, free) = (self.state_bytes(shape), self.max_state_bytes.saturating_sub(self.state_bytes));
        if needed > free {
            return Err(OpenError::Memory { needed, free });
        }
        self.try_open(session, shape).map_err(|error| {
            if let CudaError::Memory { free, .. } = error {
                return OpenError::Memory { needed, free };
            }
            OpenError::Device { why: error.to_string() }
        })
    }

    fn close(&mut self, session: SessionId) {
        let Some(slot) = self.ids.remove(&session) else { return };
        if let Some(state) = self.sessions[slot].take() {
            self.state_bytes -= state.bytes;
        }
    }

    fn forward(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        for at in 0..batch.len() {
            self.check(batch, at)?;
        }
        self.device.bind().map_err(broken)?;
        out.hidden.clear();
        out.logits.clear();
        for chunk in batch {
            // From here on nothing at or above the chunk counts until it is rewritten.
            self.set_next(chunk.session, to_usize(chunk.pos.0));
        }
        // Rings have room for `reach` rows ahead of what a row reads.
        let sizes = |chunk: &Chunk<'_>| self.state(chunk.session).map(|(_, state)| (chunk.ids.len(), state.reach));
        let runs = admit::cut(batch.iter().map(sizes), WAVE)?;
        for wave in admit::waves(&runs) {
            self.wave(batch, wave, out)?;
        }
        for chunk in batch {
            self.set_next(chunk.session, to_usize(chunk.pos.0) + chunk.ids.len());
        }
        Ok(())
    }

    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError> {
        let (slot, state) = self.state(session)?;
        let (block, vocab) = (to_usize(self.facts.draft_block), self.config.vocab);
        let pos = to_usize(at.0);
        let refuse = |why| Err(EngineError::Draft { pos: at, why });
        if block == 0 || !state.drafting {
            return refuse("the session was opened without drafting, or this stage has no drafter");
        }
        if pos >= state.next {
            return refuse("the position is not computed yet");
        }
        if pos + state.reach + 1 < state.next {
            return refuse("the position lies further back than the session's reach");
        }
        if to_usize(anchor.0) >= vocab {
            return Err(EngineError::Token { pos: at.plus(1), got: anchor, vocab });
        }
        let row = Row { slot: to_i32(slot), pos: to_i32(pos), id: anchor.0.cast_signed(), spare: 0 };
        transfer::anchor(&mut self.input, row);
        self.device.bind().map_err(broken)?;
        match self.graphs.draft() {
            Some(graph) => graph.launch(),
            None => self.enqueue_draft(),
        }
        .and_then(|()| self.device.synchronize())
        .map_err(broken)?;
        if transfer::failed(&self.output, block).is_some() {
            return Err(EngineError::NotFinite { range: self.facts.range, pos: at });
        }
        Ok(transfer::drafts(&self.output, block))
    }
}

const _: () = assert!(DRAFT_BLOCK_MAX as usize <= FEW && DEFAULT_CONTEXT > 0, "a block is a wave");
