//! Buffers of a pass, kept from pass to pass so that a steady pass allocates nothing of weight.

use std::sync::Mutex;

use half::bf16;

use super::experts::ExpertScratch;
use super::kernel::attend::AttendScratch;
use super::kernel::hyper::Mix;
use super::kernel::quant::QuantRows;
use super::pass::Row;

/// All buffers of an engine; `m` is the rows of a wave.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// The wave.
    pub(super) rows: Vec<Row>,
    /// Residual streams, `[m, hc, dim]`.
    pub(super) hidden: Vec<bf16>,
    /// Rows whose logits are asked for, ascending.
    pub(super) logit_rows: Vec<usize>,
    /// Stream means after the drafter's target layers, `[m, targets, dim]`.
    pub(super) taps: Vec<bf16>,
    pub(super) layer: LayerScratch,
    pub(super) head: HeadScratch,
    pub(super) draft: DraftScratch,
}

/// Buffers of one layer.
#[derive(Debug, Default)]
pub(super) struct LayerScratch {
    /// The streams as fp32, `[m, hc · dim]`.
    pub(super) wide: Vec<f32>,
    /// Raw mixes, `[m, (2 + hc) · hc]`.
    pub(super) mixes: Vec<f32>,
    /// Mixes as read, `[m]`.
    pub(super) mix: Vec<Mix>,
    /// The sublayer's input before its norm, `[m, dim]`.
    pub(super) mixed: Vec<bf16>,
    /// The sublayer's input, `[m, dim]`.
    pub(super) x: Vec<bf16>,
    /// The same as fp32.
    pub(super) x_wide: Vec<f32>,
    /// The same quantized.
    pub(super) codes: QuantRows,
    /// The sublayer's result, `[m, dim]`.
    pub(super) y: Vec<bf16>,
    pub(super) attn: AttentionScratch,
    pub(super) experts: ExpertScratch,
}

/// Buffers of attention.
#[derive(Debug, Default)]
pub(super) struct AttentionScratch {
    /// Low-rank queries before and after their norm, `[m, q_rank]`.
    pub(super) qa: Vec<bf16>,
    pub(super) qr: Vec<bf16>,
    pub(super) qr_codes: QuantRows,
    /// Queries, `[m, heads, head_dim]`.
    pub(super) q: Vec<bf16>,
    /// Keys before and after their norm, `[m, head_dim]`.
    pub(super) kv_raw: Vec<bf16>,
    pub(super) kv: Vec<bf16>,
    /// Attended values, `[m, heads, head_dim]`, and as fp32.
    pub(super) o: Vec<bf16>,
    pub(super) o_wide: Vec<f32>,
    /// Low-rank output, `[m, o_groups · o_rank]`.
    pub(super) z: Vec<bf16>,
    pub(super) z_codes: QuantRows,
    /// Raw inputs of a compressor, `[m, coff · width]` each.
    pub(super) raw_kv: Vec<f32>,
    pub(super) raw_score: Vec<f32>,
    /// One slot in the making.
    pub(super) pooled: Vec<f32>,
    pub(super) slot: Vec<bf16>,
    pub(super) picks: Picks,
    /// Indexer queries, `[m, index_heads, index_dim]`, and head weights, `[m, index_heads]`.
    pub(super) index_q: Vec<bf16>,
    pub(super) index_w: Vec<bf16>,
    /// One for each thread.
    pub(super) attend: Vec<Mutex<AttendScratch>>,
}

/// Which compressed slots each row of a wave attends to.
#[derive(Debug, Default)]
pub(super) struct Picks {
    /// Picks of all rows, ascending within a row.
    pub(super) slots: Vec<u32>,
    /// Where each row's picks are; `None`: every visible slot.
    pub(super) rows: Vec<Option<std::ops::Range<usize>>>,
    /// Scores of the row scored last.
    pub(super) scores: Vec<f32>,
    pub(super) best: Vec<u32>,
}

/// Buffers of a head: the end of the residual streams and the logits.
#[derive(Debug, Default)]
pub(super) struct HeadScratch {
    /// Streams of the rows asked for, `[n, hc, dim]`, and as fp32.
    pub(super) hidden: Vec<bf16>,
    pub(super) wide: Vec<f32>,
    pub(super) mixes: Vec<f32>,
    /// Before the norm, `[n, dim]`.
    pub(super) y: Vec<bf16>,
    /// After it, and as fp32.
    pub(super) norm: Vec<bf16>,
    pub(super) norm_wide: Vec<f32>,
    /// `[n, vocab]`.
    pub(super) logits: Vec<f32>,
}

/// Buffers of the drafter.
#[derive(Debug, Default)]
pub(super) struct DraftScratch {
    pub(super) tap_codes: QuantRows,
    pub(super) projected: Vec<bf16>,
    /// `[m, dim]`.
    pub(super) main_x: Vec<bf16>,
    /// `[block, rank]`-wide inputs of the Markov and confidence heads, as fp32.
    pub(super) markov: Vec<f32>,
    pub(super) bias: Vec<f32>,
    pub(super) confidence_in: Vec<f32>,
    pub(super) confidence: Vec<f32>,
}
