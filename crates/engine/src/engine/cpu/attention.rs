//! Attention of one layer: queries and keys, what a position sees, and the low-rank output.

use std::sync::Mutex;

use half::bf16;

use super::compress::{Compressor, Pool};
use super::kernel::attend::{AttendScratch, Keys, Query, Slots, attend};
use super::kernel::compress::RingRows;
use super::kernel::indexer::{scale_weights, scores};
use super::kernel::linear::Rows;
use super::kernel::pool::Columns;
use super::kernel::quant::{KV_GROUP, act_quant_in_place, fp4_act_quant_in_place};
use super::kernel::rope::RopeTable;
use super::kernel::select::top_k;
use super::kernel::vector::{hadamard, head_norm, rms_norm, widen};
use super::load::{AttentionWeights, IndexerWeights, LayerWeights};
use super::ops::{Ctx, sized};
use super::pass::{Parts, Row};
use super::scratch::LayerScratch;
use super::state::{LayerState, Ring, SessionState};
use crate::model::config::OVERLAP_RATIO;

/// Slots scored by one task; fewer than two tasks are not worth a thread.
const SCORE_GRAIN: usize = 2048;

/// Attention of a target layer: from `s.x` to `s.y`, with the rows' sessions moved on.
pub(super) fn target(
    ctx: &mut Ctx<'_>,
    weights: &LayerWeights,
    table: &RopeTable,
    (rows, sessions, place): (&[Row], &mut [Option<SessionState>], usize),
    s: &mut LayerScratch,
) {
    let (w, ratio) = (&weights.attn, weights.ratio);
    queries(ctx, w, table, rows, s);
    keys(ctx, w, table, rows, s);
    for (row, kv) in rows.iter().zip(s.attn.kv.chunks_exact(ctx.config.head_dim)) {
        Parts::state(sessions, row.slot).layers[place].window.row_mut(row.pos).copy_from_slice(kv);
    }
    if let Some(weights) = &w.compressor {
        let compressor = Compressor { weights, table, ratio, pool: Pool::Attention, place };
        compressor.advance(ctx, &s.x_wide, (rows, sessions), &mut s.attn);
    }
    if let Some(indexer) = &w.indexer {
        let compressor = Compressor { weights: &indexer.compressor, table, ratio, pool: Pool::Indexer, place };
        compressor.advance(ctx, &s.x_wide, (rows, sessions), &mut s.attn);
        pick(ctx, indexer, table, (rows, sessions, place), s);
    } else {
        s.attn.picks.rows.clear();
        s.attn.picks.rows.resize(rows.len(), None);
    }
    let sessions = &*sessions;
    let (q, picks) = (&s.attn.q, &s.attn.picks);
    let see = |at: usize| {
        let row = &rows[at];
        let layer = layer_state(sessions, row.slot, place);
        let visible = (row.pos + 1).checked_div(ratio).unwrap_or(0);
        let slots = match picks.rows.get(at).cloned().flatten() {
            Some(of) => Slots::These(&picks.slots[of]),
            None => Slots::All(visible),
        };
        let compressed = layer.compressor.as_ref().map_or(&[] as &[bf16], |c| &c.slots);
        let window = window(&layer.window, row.pos, ctx.config.window);
        Keys { window, window_size: ctx.config.window, compressed, slots, block: &[] }
    };
    let o = sized(&mut s.attn.o, q.len());
    attend_all(ctx.pool, ctx.isa, (q, &w.sink, rows.len()), &see, (&mut s.attn.attend, o));
    output(ctx, w, table, rows, s);
}

fn layer_state(sessions: &[Option<SessionState>], slot: usize, place: usize) -> &LayerState {
    #[allow(clippy::expect_used, reason = "rows are made of checked chunks, whose sessions are open")]
    &sessions[slot].as_ref().expect("a row's session is open").layers[place]
}

/// The last `size` positions up to and including `pos`.
pub(super) fn window(ring: &Ring<bf16>, pos: usize, size: usize) -> RingRows<'_, bf16> {
    let count = size.min(pos + 1);
    RingRows::new(ring.data(), ring.width(), 0, pos + 1 - count, count)
}

/// Queries `[m, heads, head_dim]`, normed and rotated; the low-rank form stays for the indexer.
pub(super) fn queries(ctx: &mut Ctx<'_>, w: &AttentionWeights, table: &RopeTable, rows: &[Row], s: &mut LayerScratch) {
    let (isa, config, a) = (ctx.isa, ctx.config, &mut s.attn);
    ctx.linear(&w.wq_a, &s.codes, &mut a.qa);
    rms_norm(isa, &a.qa, &w.q_norm, config.norm_eps, sized(&mut a.qr, rows.len() * config.q_rank));
    a.qr_codes.quantize(isa, &a.qr, config.q_rank);
    ctx.linear(&w.wq_b, &a.qr_codes, &mut a.q);
    ctx.each(&mut a.q, config.heads * config.head_dim, &|row, q| {
        head_norm(isa, q, config.head_dim, config.norm_eps);
        table.rotate(isa, q, config.head_dim, rows[row].pos);
    });
}

/// Keys `[m, head_dim]` (they are the values too): normed, rotated and quantized.
pub(super) fn keys(ctx: &mut Ctx<'_>, w: &AttentionWeights, table: &RopeTable, rows: &[Row], s: &mut LayerScratch) {
    let (isa, config, a) = (ctx.isa, ctx.config, &mut s.attn);
    ctx.linear(&w.wkv, &s.codes, &mut a.kv_raw);
    rms_norm(isa, &a.kv_raw, &w.kv_norm, config.norm_eps, sized(&mut a.kv, rows.len() * config.head_dim));
    for (row, kv) in rows.iter().zip(a.kv.chunks_exact_mut(config.head_dim)) {
        table.rotate(isa, kv, config.head_dim, row.pos);
        act_quant_in_place(isa, &mut kv[..config.head_dim - config.rope_dim], KV_GROUP);
    }
}

/// The indexer's picks. Where a row sees no more slots than it may pick, it takes them all.
fn pick(
    ctx: &mut Ctx<'_>,
    w: &IndexerWeights,
    table: &RopeTable,
    (rows, sessions, place): (&[Row], &[Option<SessionState>], usize),
    s: &mut LayerScratch,
) {
    let (isa, config, a) = (ctx.isa, ctx.config, &mut s.attn);
    let (heads, width, ratio) = (config.index_heads, config.index_dim, OVERLAP_RATIO);
    a.picks.slots.clear();
    a.picks.rows.clear();
    let scored = |row: &Row| (row.pos + 1) / ratio > config.index_topk;
    if !rows.iter().any(scored) {
        a.picks.rows.resize(rows.len(), None);
        return;
    }
    ctx.linear(&w.wq_b, &a.qr_codes, &mut a.index_q);
    ctx.each(&mut a.index_q, heads * width, &|row, q| {
        table.rotate(isa, q, width, rows[row].pos);
        hadamard(isa, q, width);
        fp4_act_quant_in_place(isa, q);
    });
    ctx.plain(&w.weights_proj, Rows::new(&s.x_wide, rows.len()), &mut a.index_w);
    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "an fp32 constant of the model")]
    let factor = (1.0 / (width as f64).sqrt() * (1.0 / (heads as f64).sqrt())) as f32;
    scale_weights(&mut a.index_w, factor);
    for (at, row) in rows.iter().enumerate() {
        if !scored(row) {
            a.picks.rows.push(None);
            continue;
        }
        let visible = (row.pos + 1) / ratio;
        let Some(state) = &layer_state(sessions, row.slot, place).indexer else { continue };
        let q = &a.index_q[at * heads * width..(at + 1) * heads * width];
        let head_weights = &a.index_w[at * heads..(at + 1) * heads];
        let out = sized(&mut a.picks.scores, visible);
        ctx.pool.run_columns(Columns::all(out, 1), SCORE_GRAIN, &|mut columns| {
            let of = columns.range();
            scores(isa, q, head_weights, &state.slots[of.start * width..of.end * width], columns.row(0));
        });
        top_k(&a.picks.scores, config.index_topk, &mut a.picks.best);
        a.picks.best.sort_unstable();
        let from = a.picks.slots.len();
        a.picks.slots.extend_from_slice(&a.picks.best);
        a.picks.rows.push(Some(from..a.picks.slots.len()));
    }
}

/// Attends for all rows, cut by rows and, where there are fewer rows than threads, by heads.
pub(super) fn attend_all<'k>(
    pool: &mut super::kernel::pool::Pool,
    isa: super::kernel::Isa,
    (q, sink, m): (&[bf16], &[f32], usize),
    keys: &(dyn Fn(usize) -> Keys<'k> + Sync),
    (scratch, o): (&mut Vec<Mutex<AttendScratch>>, &mut [bf16]),
) {
    let heads = sink.len();
    let groups = pool.threads().div_ceil(m).min(heads);
    let groups = (1..=groups).rev().find(|groups| heads.is_multiple_of(*groups)).unwrap_or(1);
    let (item, each) = (q.len() / m / groups, heads / groups);
    while scratch.len() < pool.threads() {
        scratch.push(Mutex::default());
    }
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "an fp32 constant of the model")]
    let scale = (1.0 / ((q.len() / m / heads) as f64).sqrt()) as f32;
    let scratch = &*scratch;
    pool.run_columns(Columns::all(o, 1), item, &|mut columns| {
        let first = columns.range().start / item;
        // There are as many as threads, so one is free.
        let free = scratch.iter().find_map(|scratch| scratch.try_lock().ok());
        let mut own = AttendScratch::new();
        let mut guard = free;
        let scratch = guard.as_deref_mut().unwrap_or(&mut own);
        for (k, out) in columns.row(0).chunks_exact_mut(item).enumerate() {
            let (row, group) = ((first + k) / groups, (first + k) % groups);
            let query = Query {
                q: &q[(first + k) * item..(first + k + 1) * item],
                sink: &sink[group * each..(group + 1) * each],
                scale,
            };
            attend(isa, query, &keys(row), scratch, out);
        }
    });
}

/// The output projection: rotation undone, two products, into `s.y`.
pub(super) fn output(ctx: &mut Ctx<'_>, w: &AttentionWeights, table: &RopeTable, rows: &[Row], s: &mut LayerScratch) {
    let (isa, config, a) = (ctx.isa, ctx.config, &mut s.attn);
    ctx.each(&mut a.o, config.heads * config.head_dim, &|row, o| {
        table.rotate_back(isa, o, config.head_dim, rows[row].pos);
    });
    widen(isa, &a.o, sized(&mut a.o_wide, a.o.len()));
    ctx.grouped(&w.wo_a, config.o_groups, Rows::new(&a.o_wide, rows.len()), &mut a.z);
    a.z_codes.quantize(isa, &a.z, config.o_groups * config.o_rank);
    ctx.linear(&w.wo_b, &a.z_codes, &mut s.y);
}
