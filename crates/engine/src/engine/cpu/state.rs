//! What a session leaves behind in the layers of one range, addressed by absolute position.
//!
//! Owns the sizes of that state: rings hold the newest rows, enough that re-opening up to the
//! session's reach back finds every row it reads. Nothing is saved or restored: what is at or
//! above a re-opened position is unread until it is rewritten.

use half::bf16;

use crate::engine::SessionShape;
use crate::ids::LayerRange;
use crate::model::ModelConfig;
use crate::model::config::OVERLAP_RATIO;

/// The newest `rows` rows of one value per position, `[rows, width]`.
#[derive(Debug, Clone)]
pub(super) struct Ring<T> {
    rows: usize,
    width: usize,
    data: Vec<T>,
}

impl<T: Copy> Ring<T> {
    fn new(rows: usize, width: usize, fill: T) -> Self {
        Self { rows, width, data: vec![fill; rows * width] }
    }

    /// The row of a position, `[width]`.
    pub(super) fn row(&self, pos: usize) -> &[T] {
        let at = pos % self.rows * self.width;
        &self.data[at..at + self.width]
    }

    /// The row of a position, `[width]`.
    pub(super) fn row_mut(&mut self, pos: usize) -> &mut [T] {
        let at = pos % self.rows * self.width;
        &mut self.data[at..at + self.width]
    }

    /// Overwrites every row.
    pub(super) fn fill(&mut self, with: T) {
        self.data.fill(with);
    }

    /// Values to a row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// All rows, `[rows, width]`; position `p` is row `p mod rows`.
    pub(super) fn data(&self) -> &[T] {
        &self.data
    }
}

/// A compressor's memory: raw inputs of recent positions and every finished slot.
#[derive(Debug, Clone)]
pub(super) struct CompressorState {
    /// Values before pooling, `[coff · width]` a position.
    pub(super) kv: Ring<f32>,
    /// Scores with `ape`, `[coff · width]` a position.
    pub(super) score: Ring<f32>,
    /// Finished slots, `[slots, width]`; slot `j` is read from position `(j+1)·ratio − 1` on.
    pub(super) slots: Vec<bf16>,
}

/// One layer's memory.
#[derive(Debug, Clone)]
pub(super) struct LayerState {
    /// Keys (= values) of recent positions, `[head_dim]` a position.
    pub(super) window: Ring<bf16>,
    /// Of attention's compressor.
    pub(super) compressor: Option<CompressorState>,
    /// Of the indexer's compressor.
    pub(super) indexer: Option<CompressorState>,
}

/// One session's memory in the layers of a range.
#[derive(Debug, Clone)]
pub(super) struct SessionState {
    /// What was fixed at open.
    pub(super) shape: SessionShape,
    /// Reach in positions, at least 1.
    pub(super) reach: usize,
    /// Next position to compute; everything below is valid as far back as the reach.
    pub(super) next: usize,
    /// Of the range's layers, ascending.
    pub(super) layers: Vec<LayerState>,
    /// Windows of the draft stages; empty where the session does not draft.
    pub(super) draft: Vec<Ring<bf16>>,
}

/// Rows and widths of a session's state, for arithmetic before allocation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes<'a> {
    config: &'a ModelConfig,
    range: LayerRange,
    positions: usize,
    reach: usize,
    draft_stages: usize,
}

impl<'a> Sizes<'a> {
    /// Sizes for one shape; `drafter`: whether the engine holds the draft stages.
    pub(super) fn new(config: &'a ModelConfig, range: LayerRange, shape: &SessionShape, drafter: bool) -> Self {
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

    /// A ring never needs more rows than the session has positions.
    fn window_rows(&self) -> usize {
        (self.config.window + self.reach).min(self.positions)
    }

    fn raw_rows(&self, ratio: usize) -> usize {
        let blocks = if ratio == OVERLAP_RATIO { 2 } else { 1 };
        (blocks * ratio + self.reach).min(self.positions)
    }

    fn compressor_bytes(&self, ratio: usize, width: usize) -> u64 {
        let raw = 2 * self.raw_rows(ratio) * raw_width(ratio, width) * size_of::<f32>();
        let slots = self.positions / ratio * width * size_of::<bf16>();
        raw as u64 + slots as u64
    }

    fn window_bytes(&self) -> u64 {
        (self.window_rows() * self.config.head_dim * size_of::<bf16>()) as u64
    }

    /// Bytes of the whole state.
    pub(super) fn bytes(&self) -> u64 {
        let layer = |layer| {
            let ratio = self.config.ratio(layer);
            let mut bytes = self.window_bytes();
            if ratio > 0 {
                bytes += self.compressor_bytes(ratio, self.config.head_dim);
            }
            if ratio == OVERLAP_RATIO {
                bytes += self.compressor_bytes(ratio, self.config.index_dim);
            }
            bytes
        };
        self.range.layers().map(layer).sum::<u64>() + self.draft_stages as u64 * self.window_bytes()
    }

    /// Allocates the state.
    pub(super) fn allocate(&self, shape: &SessionShape) -> SessionState {
        let window = || Ring::new(self.window_rows(), self.config.head_dim, bf16::ZERO);
        let compressor = |ratio: usize, width: usize| CompressorState {
            kv: Ring::new(self.raw_rows(ratio), raw_width(ratio, width), 0.0),
            score: Ring::new(self.raw_rows(ratio), raw_width(ratio, width), f32::NEG_INFINITY),
            slots: vec![bf16::ZERO; self.positions / ratio * width],
        };
        let layer = |layer| {
            let ratio = self.config.ratio(layer);
            LayerState {
                window: window(),
                compressor: (ratio > 0).then(|| compressor(ratio, self.config.head_dim)),
                indexer: (ratio == OVERLAP_RATIO).then(|| compressor(ratio, self.config.index_dim)),
            }
        };
        SessionState {
            shape: shape.clone(),
            reach: self.reach,
            next: 0,
            layers: self.range.layers().map(layer).collect(),
            draft: (0..self.draft_stages).map(|_| window()).collect(),
        }
    }
}

/// Values that one position leaves for pooling: two halves where blocks overlap.
pub(super) fn raw_width(ratio: usize, width: usize) -> usize {
    if ratio == OVERLAP_RATIO { 2 * width } else { width }
}

/// Positions and counts are `u32` on the wire; every machine this runs on has 32-bit addresses at
/// least.
pub(super) fn to_usize(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

impl CompressorState {
    /// The finished slot `j`, `[width]`.
    pub(super) fn slot(&self, j: usize, width: usize) -> &[bf16] {
        &self.slots[j * width..(j + 1) * width]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::WireEncoding;
    use crate::model::Checkpoint;

    fn held(state: &SessionState) -> u64 {
        let compressor = |c: &CompressorState| 4 * (c.kv.data.len() + c.score.data.len()) + 2 * c.slots.len();
        let layer = |l: &LayerState| {
            2 * l.window.data.len()
                + l.compressor.as_ref().map_or(0, compressor)
                + l.indexer.as_ref().map_or(0, compressor)
        };
        let draft: usize = state.draft.iter().map(|ring| 2 * ring.data.len()).sum();
        (state.layers.iter().map(layer).sum::<usize>() + draft) as u64
    }

    #[test]
    fn the_arithmetic_says_what_is_allocated() {
        let checkpoint = Checkpoint::tiny().unwrap();
        for (positions, reach, drafting) in
            [(1, 1, true), (7, 3, false), (300, 16, true), (2048, 2048, true), (2048, 6, false)]
        {
            let shape = SessionShape { positions, reach, boundaries: vec![], encoding: WireEncoding::Fp8, drafting };
            for range in ["0:7", "2:3", "4:7"] {
                let sizes = Sizes::new(checkpoint.config(), range.parse().unwrap(), &shape, true);
                assert_eq!(sizes.bytes(), held(&sizes.allocate(&shape)), "{range} {shape:?}");
            }
        }
    }

    #[test]
    fn rings_are_as_long_as_a_rewind_needs() {
        let checkpoint = Checkpoint::tiny().unwrap();
        let shape = SessionShape {
            positions: 2000,
            reach: 16,
            boundaries: vec![],
            encoding: WireEncoding::Fp8,
            drafting: true,
        };
        let state = Sizes::new(checkpoint.config(), "0:7".parse().unwrap(), &shape, true).allocate(&shape);
        assert_eq!(state.layers[0].window.rows, 64 + 16);
        assert_eq!(state.layers[2].compressor.as_ref().unwrap().kv.rows, 8 + 16);
        assert_eq!(state.layers[2].indexer.as_ref().unwrap().score.rows, 8 + 16);
        assert_eq!(state.layers[3].compressor.as_ref().unwrap().kv.rows, 16 + 16);
        assert_eq!(state.draft[2].rows, 64 + 16);
    }
}
