//! What a range needs of this machine's memory, by arithmetic alone.
//!
//! Owns the resident size of each stored tensor and the comparison with what is free, so that a
//! stage which does not fit says so before it allocates anything.

use super::state::Sizes;
use super::{BuildError, CpuEngine, CpuSettings};
use crate::engine::SessionShape;
use crate::ids::{LayerRange, WireEncoding};
use crate::model::layout::{Kind, TensorSpec};
use crate::model::{Checkpoint, ModelConfig, ModelError};

/// Output rows that the packed forms round up to.
const TILE: u64 = 16;
/// The same for fp32 matrices.
const TILE_F32: u64 = 8;

/// Reach that a session is planned with: prefill chunks over a ring of some stages.
const TYPICAL_REACH: u32 = 512;

/// Memory of one range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// The layers.
    pub range: LayerRange,
    /// Bytes of the range's tensors in the checkpoint.
    pub stored_bytes: u64,
    /// Bytes of the same weights as the engine holds them.
    pub weight_bytes: u64,
    /// Bytes of rotation tables.
    pub table_bytes: u64,
    /// Bytes of buffers that a pass works in, rounded up generously.
    pub scratch_bytes: u64,
    /// Bytes of state for each session of the shape asked about.
    pub session_bytes: u64,
    /// Sessions planned for.
    pub sessions: u64,
}

/// Why a range can't be held.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NeedError {
    /// The memory does not suffice.
    #[error(
        "layers {range} need {needed} bytes ({fixed} of weights, tables and buffers, {sessions} sessions of {session} \
         bytes), {free} are free: choose fewer layers, a shorter --max-context or fewer sessions"
    )]
    Memory {
        /// The layers.
        range: LayerRange,
        /// Bytes needed in all.
        needed: u64,
        /// Bytes of weights, tables and buffers.
        fixed: u64,
        /// Sessions planned for.
        sessions: u64,
        /// Bytes of each session.
        session: u64,
        /// Bytes free.
        free: u64,
    },
}

impl Need {
    /// Bytes needed in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        let sessions = self.sessions.saturating_mul(self.session_bytes);
        self.fixed().saturating_add(sessions)
    }

    /// Bytes needed whether or not a session is open.
    fn fixed(&self) -> u64 {
        self.weight_bytes.saturating_add(self.table_bytes).saturating_add(self.scratch_bytes)
    }

    /// Compares with the memory that is free, in bytes.
    ///
    /// # Errors
    /// [`NeedError::Memory`] with both numbers.
    pub fn check(&self, free: u64) -> Result<(), NeedError> {
        let needed = self.total();
        if needed <= free {
            return Ok(());
        }
        Err(NeedError::Memory {
            range: self.range,
            needed,
            fixed: self.fixed(),
            sessions: self.sessions,
            session: self.session_bytes,
            free,
        })
    }
}

impl CpuEngine {
    /// Computes what an engine with these settings needs for one session of its longest context.
    /// No shard is opened.
    ///
    /// # Errors
    /// [`BuildError`] where the range is no part of the model or a setting can't be honoured.
    pub fn need(checkpoint: &Checkpoint, range: LayerRange, settings: &CpuSettings) -> Result<Need, BuildError> {
        checkpoint.check_range(range)?;
        let shape = SessionShape {
            positions: super::context(checkpoint.config(), settings)?,
            reach: TYPICAL_REACH,
            boundaries: Vec::new(),
            encoding: WireEncoding::Fp8,
            drafting: true,
        };
        Ok(need(checkpoint, range, &shape, 1)?)
    }
}

/// Computes what a range needs for some sessions of one shape. No shard is opened.
///
/// # Errors
/// [`ModelError`] where the range is no part of the model.
pub fn need(
    checkpoint: &Checkpoint,
    range: LayerRange,
    shape: &SessionShape,
    sessions: u64,
) -> Result<Need, ModelError> {
    let config = checkpoint.config();
    let stored_bytes = checkpoint.stored_bytes(range)?;
    let weight_bytes = checkpoint.tensors(range).map(|spec| held(&spec)).sum();
    let positions = u64::from(shape.positions) + u64::from(super::DRAFT_BLOCK_MAX);
    Ok(Need {
        range,
        stored_bytes,
        weight_bytes,
        // Two tables of a cosine and a sine for each pair.
        table_bytes: 2 * positions * config.rope_dim as u64 * 4,
        scratch_bytes: scratch(config, range.hi() == config.layers, shape),
        session_bytes: Sizes::new(config, range, shape, checkpoint.drafts(range)).bytes(),
        sessions,
    })
}

/// Bytes of a full wave's buffers: what is as wide as the streams, a row, the heads, and at the tail
/// the vocabulary, each some times over.
fn scratch(config: &ModelConfig, tail: bool, shape: &SessionShape) -> u64 {
    let streams = config.hc * config.dim * 12;
    let row = (config.dim + config.inner + config.q_rank) * 32;
    let heads = (config.heads * config.head_dim + config.index_heads * config.index_dim) * 16;
    let vocab = if tail { config.vocab * 8 } else { 0 };
    let waves = super::pass::WAVE_ROWS_MAX * (streams + row + heads + vocab);
    // Scores of one row over all its slots.
    waves as u64 + 8 * u64::from(shape.positions)
}

/// Resident bytes of one stored tensor.
fn held(spec: &TensorSpec) -> u64 {
    let rows = spec.shape.first().copied().unwrap_or(1);
    let row = spec.elements() / rows.max(1);
    let name = spec.name.as_str();
    match spec.kind {
        Kind::Fp8 if name.ends_with("wo_a.weight") => rows.next_multiple_of(TILE) * row * 2,
        // A flag for each run of a tile: 16 rows by 16 inputs.
        Kind::Fp8 => rows.next_multiple_of(TILE) * row / 256 * 257,
        Kind::Fp8Scale if name.ends_with("wo_a.scale") => 0,
        Kind::Fp8Scale => spec.elements() * 4,
        Kind::Fp4 | Kind::Fp4Scale => rows.next_multiple_of(TILE) * row,
        Kind::Bf16 if spec.shape.len() == 1 => spec.elements() * 4,
        Kind::Bf16 if name == "embed.weight" || name.ends_with("markov_w1.weight") => spec.elements() * 2,
        Kind::Bf16 => rows.next_multiple_of(TILE) * row * 2,
        Kind::F32 if name.ends_with("_fn") => rows.next_multiple_of(TILE_F32) * row * 4,
        Kind::F32 => spec.elements() * 4,
        Kind::Ids => spec.elements() * 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;

    fn shape() -> SessionShape {
        SessionShape { positions: 512, reach: 16, boundaries: vec![], encoding: WireEncoding::Fp8, drafting: true }
    }

    #[test]
    fn the_arithmetic_says_what_a_built_engine_holds() {
        let checkpoint = Checkpoint::tiny().unwrap();
        for range in ["0:7", "0:1", "2:3", "3:4", "4:7", "6:7"] {
            let range = range.parse().unwrap();
            let plan = need(&checkpoint, range, &shape(), 1).unwrap();
            let engine = CpuEngine::new(&checkpoint, range, &CpuSettings::default()).unwrap();
            assert_eq!(plan.weight_bytes, engine.facts().weight_bytes, "{range}");
            assert_eq!(plan.session_bytes, engine.state_bytes(&shape()), "{range}");
        }
    }

    #[test]
    fn too_little_memory_is_named_with_both_numbers() {
        let checkpoint = Checkpoint::tiny().unwrap();
        let plan = need(&checkpoint, "0:7".parse().unwrap(), &shape(), 3).unwrap();
        assert!(plan.check(plan.total()).is_ok());
        let message = plan.check(plan.total() - 1).unwrap_err().to_string();
        for part in [plan.total(), plan.total() - 1, plan.session_bytes] {
            assert!(message.contains(&part.to_string()), "{message}");
        }
    }
}
