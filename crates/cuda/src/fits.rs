//! What a model and the settings must be for the kernels: checked before the device is touched.

use ringfence_engine::engine::cpu::{DEFAULT_CONTEXT, DRAFT_BLOCK_MAX};
use ringfence_engine::ids::LayerRange;
use ringfence_engine::model::{Checkpoint, ModelConfig};

use crate::engine::BuildError;
use crate::error::CudaError;
use crate::ops::{EXPERTS_MAX, HEAD_DIM_MAX, NORM_MAX, PICKS_MAX, STREAM_VALUES_MAX, STREAMS_MAX};

/// Refuses sizes that no kernel takes.
///
/// # Errors
/// [`CudaError::Shape`] with the size and what is possible.
pub(crate) fn check(config: &ModelConfig) -> Result<(), CudaError> {
    let rows = [config.dim, config.q_rank].into_iter().max().unwrap_or(0);
    let checks = [
        ("residual streams", config.hc, config.hc <= STREAMS_MAX, format!("at most {STREAMS_MAX}")),
        (
            "values of all residual streams",
            config.hc * config.dim,
            config.hc * config.dim <= STREAM_VALUES_MAX && config.dim.is_multiple_of(8),
            format!("a multiple of 8, at most {STREAM_VALUES_MAX}"),
        ),
        ("values of a normed row", rows, rows <= NORM_MAX, format!("at most {NORM_MAX}")),
        (
            "head_dim",
            config.head_dim,
            config.head_dim.is_multiple_of(128) && config.head_dim <= HEAD_DIM_MAX,
            format!("a multiple of 128, at most {HEAD_DIM_MAX}"),
        ),
        (
            "rotary dimensions",
            config.rope_dim,
            config.rope_dim.is_multiple_of(64) && config.rope_dim <= config.head_dim,
            "a multiple of 64".to_owned(),
        ),
        (
            "values of an indexer head",
            config.index_dim,
            [64, 128, 256].contains(&config.index_dim),
            "64, 128 or 256".to_owned(),
        ),
        ("routed experts", config.experts, config.experts <= EXPERTS_MAX, format!("at most {EXPERTS_MAX}")),
        (
            "experts per token",
            config.experts_per_token,
            config.experts_per_token <= PICKS_MAX,
            format!("at most {PICKS_MAX}"),
        ),
    ];
    for (what, got, fits, expected) in checks {
        if !fits {
            return Err(CudaError::Shape { what: what.to_owned(), got, expected });
        }
    }
    Ok(())
}

/// The longest session, from the settings and the model.
pub(crate) fn context(config: &ModelConfig, asked: Option<u32>) -> Result<u32, BuildError> {
    let limit = config.max_positions;
    match asked {
        None => Ok(limit.min(DEFAULT_CONTEXT)),
        Some(got) if got >= 1 && got <= limit => Ok(got),
        Some(got) => {
            Err(BuildError::Setting { setting: "max-context", got: u64::from(got), expected: format!("1 to {limit}") })
        }
    }
}

/// Draft tokens per block; 0 where the range does not draft.
pub(crate) fn draft_block(checkpoint: &Checkpoint, range: LayerRange, asked: Option<u32>) -> Result<u32, BuildError> {
    if let Some(got) = asked.filter(|&got| got == 0 || got > DRAFT_BLOCK_MAX) {
        let expected = format!("1 to {DRAFT_BLOCK_MAX}");
        return Err(BuildError::Setting { setting: "draft-block", got: u64::from(got), expected });
    }
    let Some(draft) = checkpoint.config().draft.as_ref().filter(|_| checkpoint.drafts(range)) else { return Ok(0) };
    Ok(asked.unwrap_or_else(|| u32::try_from(draft.block).unwrap_or(DRAFT_BLOCK_MAX)))
}
