//! What a session leaves behind in device memory, addressed by absolute position.
//!
//! Owns its sizes and the table by which kernels find it: an entry for each slot and layer. Nothing
//! is saved or restored: what is at or above a re-opened position is unread until it is rewritten.

use ringfence_engine::engine::SessionShape;
use ringfence_engine::ids::{LayerRange, WireEncoding};
use ringfence_engine::model::ModelConfig;
use ringfence_engine::model::config::OVERLAP_RATIO;

use crate::driver::{ALIGN, Arena, Device, DevicePtr};
use crate::error::CudaError;

/// Sessions that one engine holds at most.
pub(crate) const SLOTS: usize = 1024;

/// Raw inputs and finished slots of one compressor, as the kernels read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct PooledState {
    /// fp32 `[raw rows, raw width]`, row p at p mod rows.
    pub kv: DevicePtr,
    /// fp32, as many.
    pub score: DevicePtr,
    /// bf16 `[slots, width]`.
    pub slots: DevicePtr,
}

/// One layer or draft stage of one session, as the kernels read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct LayerState {
    /// bf16 `[window rows, head_dim]`, row p at p mod rows; null where none is kept.
    pub window: DevicePtr,
    /// Rows of the window.
    pub window_rows: i32,
    /// Whether hidden states in front of this layer cross the fp8 wire.
    pub crossing: i32,
    /// Attention's compressor.
    pub attention: PooledState,
    /// The indexer's.
    pub index: PooledState,
    /// Raw rows of both.
    pub raw_rows: i32,
    /// Nothing.
    pub spare: i32,
}

/// The sizes of one session's state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes<'a> {
    config: &'a ModelConfig,
    range: LayerRange,
    positions: usize,
    reach: usize,
    draft_stages: usize,
}

/// Raw rows of one compressor: values to a row.
fn raw_width(ratio: usize, width: usize) -> usize {
    if ratio == OVERLAP_RATIO { 2 * width } else { width }
}

pub(crate) fn to_usize(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

pub(crate) fn to_i32(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl<'a> Sizes<'a> {
    /// Sizes on a range with or without a drafter.
    pub(crate) fn new(config: &'a ModelConfig, range: LayerRange, shape: &SessionShape, drafter: bool) -> Self {
        let positions = to_usize(shape.positions).max(1);
        let stages = config.draft.as_ref().map_or(0, |draft| draft.stages);
        Self {
            config,
            range,
            positions,
            reach: to_usize(shape.reach).clamp(1, positions),
            draft_stages: if drafter && shape.drafting { stages } else { 0 },
        }
    }

    /// Rows of a wave ahead of what a row reads, as a session's rings have room for.
    pub(crate) fn reach(&self) -> usize {
        self.reach
    }

    /// Draft stages with a window.
    pub(crate) fn draft_stages(&self) -> usize {
        self.draft_stages
    }

    fn window_rows(&self) -> usize {
        (self.config.window + self.reach).min(self.positions)
    }

    fn raw_rows(&self, ratio: usize) -> usize {
        let blocks = if ratio == OVERLAP_RATIO { 2 } else { 1 };
        (blocks * ratio + self.reach).min(self.positions)
    }

    /// Hands out the state piece by piece; `take` gives the place of so many bytes.
    fn lay_out(&self, shape: &SessionShape, take: &mut dyn FnMut(usize) -> DevicePtr) -> Vec<LayerState> {
        let window = |take: &mut dyn FnMut(usize) -> DevicePtr| LayerState {
            window: take(2 * self.window_rows() * self.config.head_dim),
            window_rows: to_i32(self.window_rows()),
            ..LayerState::default()
        };
        let mut entries = Vec::with_capacity(self.range.count() + self.draft_stages);
        for layer in self.range.layers() {
            let ratio = self.config.ratio(layer);
            let mut entry = window(take);
            let crosses = layer > self.range.lo() && shape.boundaries.contains(&layer);
            entry.crossing = i32::from(crosses && shape.encoding == WireEncoding::Fp8);
            let mut pooled = |width: usize| {
                let raw = 4 * self.raw_rows(ratio) * raw_width(ratio, width);
                PooledState { kv: take(raw), score: take(raw), slots: take(2 * (self.positions / ratio) * width) }
            };
            if ratio > 0 {
                entry.raw_rows = to_i32(self.raw_rows(ratio));
                entry.attention = pooled(self.config.head_dim);
            }
            if ratio == OVERLAP_RATIO {
                entry.index = pooled(self.config.index_dim);
            }
            entries.push(entry);
        }
        entries.extend((0..self.draft_stages).map(|_| window(take)));
        entries
    }

    /// Bytes of the state; each piece is rounded up to [`ALIGN`].
    pub(crate) fn bytes(&self, shape: &SessionShape) -> usize {
        let mut bytes = 0;
        self.lay_out(shape, &mut |piece| {
            bytes += piece.next_multiple_of(ALIGN);
            DevicePtr::NULL
        });
        bytes
    }
}

/// A session's state.
#[derive(Debug)]
pub(crate) struct SessionState {
    pub(crate) shape: SessionShape,
    pub(crate) reach: usize,
    /// Positions computed so far.
    pub(crate) next: usize,
    /// Whether draft windows are kept.
    pub(crate) drafting: bool,
    pub(crate) bytes: u64,
    _memory: Arena,
}

/// The table of all sessions: `[slots, places]` of [`LayerState`], a place for each layer of the range
/// and each draft stage.
#[derive(Debug)]
pub(crate) struct StateTable {
    arena: Arena,
    places: usize,
}

impl StateTable {
    /// An empty table.
    pub(crate) fn new(device: &Device, places: usize) -> Result<Self, CudaError> {
        let bytes = SLOTS * places * size_of::<LayerState>();
        let arena = device.arena("the table of sessions", bytes)?;
        // SAFETY: the arena is that long.
        unsafe { device.fill(arena.base(), 0, bytes) }?;
        Ok(Self { arena, places })
    }

    /// Where it is.
    pub(crate) fn at(&self) -> DevicePtr {
        self.arena.base()
    }

    /// Places of a slot.
    pub(crate) fn places(&self) -> usize {
        self.places
    }

    /// Takes memory for a session and enters it at `slot`.
    pub(crate) fn open(
        &self,
        device: &Device,
        slot: usize,
        (sizes, shape): (Sizes<'_>, &SessionShape),
    ) -> Result<SessionState, CudaError> {
        let bytes = sizes.bytes(shape);
        let memory = device.arena("a session", bytes)?;
        let mut used = 0;
        let mut entries = sizes.lay_out(shape, &mut |piece| {
            let at = memory.base().plus(used);
            used += piece.next_multiple_of(ALIGN);
            at
        });
        entries.resize(self.places, LayerState::default());
        // SAFETY: the arena is that long and belongs to nobody else yet.
        unsafe { device.fill(memory.base(), 0, bytes) }?;
        let at = self.at().plus(slot * self.places * size_of::<LayerState>());
        // SAFETY: the slot lies in the table, and no kernel in flight reads a slot that is not open.
        unsafe { device.upload(&entries, at) }?;
        Ok(SessionState {
            shape: shape.clone(),
            reach: sizes.reach(),
            next: 0,
            drafting: sizes.draft_stages() > 0,
            bytes: bytes as u64,
            _memory: memory,
        })
    }
}
