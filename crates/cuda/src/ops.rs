//! Launches of the kernels that are no products: their parameters as the device reads them.
//!
//! Owns which kernel a parameter belongs to and how many blocks it takes. Nothing here depends on a
//! position: rows, picks and state are read on the device.

use cudarc::driver::CudaStream;

use crate::driver::{Device, DevicePtr, Launch, allow_shared};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::linear::to_u32;
use crate::nvrtc::Source;
use crate::params::{
    AttendScores, AttendValues, BlockRows, CompressParams, EmbedRows, FiniteFloats, FiniteRows, HeadNormRotate,
    HyperEnter, HyperLeave, HyperMix, IndexPicks, IndexQueries, IndexScores, MarkovLogits, MarkovToken, NormKeys,
    Params, Prepare, RmsNorm, Route, StoreKeys, WireRoundtrip,
};

/// The files of these kernels.
pub const SOURCES: [Source; 9] = [
    Source {
        file: "embed.cu",
        text: include_str!("kernels/embed.cu"),
        kernels: &["embed_rows", "block_rows", "finite_rows", "finite_floats"],
    },
    Source {
        file: "norm.cu",
        text: include_str!("kernels/norm.cu"),
        kernels: &["rms_norm", "store_keys", "norm_keys"],
    },
    Source { file: "prepare.cu", text: include_str!("kernels/prepare.cu"), kernels: &["prepare"] },
    Source {
        file: "hyper.cu",
        text: include_str!("kernels/hyper.cu"),
        kernels: &["hyper_mix", "hyper_enter", "hyper_leave"],
    },
    Source { file: "wire.cu", text: include_str!("kernels/wire.cu"), kernels: &["wire_roundtrip"] },
    Source { file: "gate.cu", text: include_str!("kernels/gate.cu"), kernels: &["route"] },
    Source {
        file: "indexer.cu",
        text: include_str!("kernels/indexer.cu"),
        kernels: &["index_scores_64", "index_scores_128", "index_scores_256", "index_picks"],
    },
    Source { file: "attend.cu", text: include_str!("kernels/attend.cu"), kernels: &["attend_scores", "attend_values"] },
    Source { file: "draft.cu", text: include_str!("kernels/draft.cu"), kernels: &["markov_logits", "markov_token"] },
];

/// Most residual streams that the kernels take.
pub const STREAMS_MAX: usize = 5;
/// Widest head and widest key.
pub const HEAD_DIM_MAX: usize = 512;
/// Most routed experts, and most of them to a token.
pub const EXPERTS_MAX: usize = 1024;
/// Most routed experts to a token.
pub const PICKS_MAX: usize = 32;
/// Most values of all streams of a position.
pub const STREAM_VALUES_MAX: usize = 32_768;
/// Most values of a row that is normed.
pub const NORM_MAX: usize = 16_384;

/// List entries to a block of attention.
const BLOCK: usize = 64;
/// Heads to a block of threads.
const HEADS: usize = 4;
/// Slots that a block of threads scores at a time.
const SCORED: usize = 32;
/// Entries of a key list that a block of threads holds at a time.
const CHUNK: usize = 640;
/// Threads of a block that prepares queries, a warp to a head.
const PREPARE_THREADS: usize = 512;
/// Blocks that share the vocabulary in a Markov step.
pub const MARKOV_BLOCKS: u32 = 264;

/// A row of a pass on the device: its session's slot, position and token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Row {
    /// Slot of the session.
    pub slot: i32,
    /// Absolute position.
    pub pos: i32,
    /// Token id.
    pub id: i32,
    /// Nothing.
    pub spare: i32,
}

/// Rows of a pass and the state behind them, at one layer.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct At {
    /// `[m]` of [`Row`].
    pub rows: DevicePtr,
    /// The table of [`crate::state`].
    pub states: DevicePtr,
    /// Places of a session in it.
    pub places: i32,
    /// The layer's.
    pub place: i32,
}

/// Rotations on the device, `[positions][cos of pairs, sin of pairs]`.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// The first row.
    pub at: DevicePtr,
    /// Rotary dimensions.
    pub rope: usize,
}

/// What one compressor takes of a pass; `width` 0 is no compressor.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Side {
    /// Raw values, fp32 `[m, stride]`.
    pub kv: DevicePtr,
    /// Raw scores, as many.
    pub score: DevicePtr,
    /// Values from one row to the next.
    pub stride: i32,
    /// Values to a slot.
    pub width: i32,
    /// Added to the scores, `[ratio, raw width]`.
    pub ape: DevicePtr,
    /// Weights of the slot's norm.
    pub norm: DevicePtr,
}

/// The keys that the rows of a pass attend to.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct KeyList {
    /// Rows and their state.
    pub at: At,
    /// Window size.
    pub window: i32,
    /// Compression; 0: window only.
    pub ratio: i32,
    /// Picked slots `[m, topk]`, or null: all that are visible.
    pub picks: DevicePtr,
    /// Slots picked.
    pub topk: i32,
    /// Keys of a draft block, or null.
    pub block: DevicePtr,
    /// How many.
    pub block_rows: i32,
}

/// Sizes of a head, of queries or of keys.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// How many.
    pub heads: usize,
    /// Values of each.
    pub width: usize,
}

/// Streams and the constants of their mixes.
#[derive(Debug, Clone, Copy)]
pub struct Streams {
    /// How many.
    pub hc: usize,
    /// Values of each.
    pub dim: usize,
    /// Sinkhorn rounds.
    pub iterations: usize,
    /// Added to weights and sums.
    pub hc_eps: f32,
    /// Added to means of squares.
    pub norm_eps: f32,
}

/// Weights of one mix on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixWeights {
    /// fp32 `[mixes, hc · dim]`.
    pub mix: DevicePtr,
    /// fp32 `[3]`, or `[1]` of a head.
    pub scale: DevicePtr,
    /// fp32 `[mixes]`.
    pub base: DevicePtr,
}

/// How streams are spread again behind a sublayer: what [`Ops::mix`] left, its weights, and where the
/// weights of the result and the streams go. Any launch between may say it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Spread {
    raw: DevicePtr,
    scale: DevicePtr,
    base: DevicePtr,
    mix: DevicePtr,
    hc: i32,
    width: i32,
    iterations: i32,
    hc_eps: f32,
    norm_eps: f32,
}

impl Spread {
    /// From `raw` into `mix`, fp32 `[m, hc + hc · hc]`.
    #[must_use]
    pub fn new(raw: DevicePtr, weights: MixWeights, s: &Streams, mix: DevicePtr) -> Self {
        Self {
            raw,
            scale: weights.scale,
            base: weights.base,
            mix,
            hc: int(s.hc),
            width: int(s.hc * s.dim),
            iterations: int(s.iterations),
            hc_eps: s.hc_eps,
            norm_eps: s.norm_eps,
        }
    }

    /// Nothing is spread.
    #[must_use]
    pub fn none() -> Self {
        let null = DevicePtr::NULL;
        let (hc, width, iterations) = (0, 0, 0);
        Self { raw: null, scale: null, base: null, mix: null, hc, width, iterations, hc_eps: 0.0, norm_eps: 0.0 }
    }
}

/// A norm: its weights, fp32 `[width]`, and what is added to the mean of squares.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// Weights.
    pub weight: DevicePtr,
    /// Values of a row.
    pub width: usize,
    /// Added to the mean.
    pub eps: f32,
}

/// The kernels on a stream.
#[derive(Debug, Clone, Copy)]
pub struct Ops<'a> {
    kernels: &'a Kernels,
    stream: &'a CudaStream,
    dependent: bool,
}

/// Lets the kernels have the shared memory they ask for.
///
/// # Errors
/// [`CudaError::Driver`].
pub fn prepare(device: &Device, kernels: &Kernels) -> Result<(), CudaError> {
    for name in ["hyper_enter", "attend_values", "index_scores_64", "index_scores_128", "index_scores_256"] {
        allow_shared(kernels.get(name)?, device.facts().shared_max - 8192)?;
    }
    Ok(())
}

fn int(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl<'a> Ops<'a> {
    /// The kernels on `stream`; with `dependent`, each may start before the one before it ends.
    #[must_use]
    pub fn new(kernels: &'a Kernels, stream: &'a CudaStream, dependent: bool) -> Self {
        Self { kernels, stream, dependent }
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &'a CudaStream {
        self.stream
    }

    fn run<P: Params>(&self, grid: (usize, usize, usize), threads: usize, params: &P) -> Result<(), CudaError> {
        self.run_as(P::KERNEL, grid, (threads, 0), params)
    }

    fn run_as<P: Params>(
        &self,
        kernel: &'static str,
        grid: (usize, usize, usize),
        (threads, shared): (usize, usize),
        params: &P,
    ) -> Result<(), CudaError> {
        let launch = Launch {
            function: self.kernels.get(kernel)?,
            grid: (to_u32(grid.0), to_u32(grid.1), to_u32(grid.2)),
            threads: to_u32(threads),
            shared: to_u32(shared),
            dependent: self.dependent,
        };
        // SAFETY: the parameter is the kernel's own; its places are the engine's, which keeps them
        // while the stream runs.
        unsafe { launch.run(self.stream, params) }
    }

    /// Embeddings of `m` rows in all streams: `hidden[m, hc, dim]`.
    ///
    /// # Errors
    /// [`CudaError::Driver`], as all that follow.
    pub fn embed(
        &self,
        (rows, m): (DevicePtr, usize),
        embedding: DevicePtr,
        s: &Streams,
        hidden: DevicePtr,
    ) -> Result<(), CudaError> {
        self.run((m, s.hc, 1), 256, &EmbedRows { rows, embedding, hidden, dim: int(s.dim) })
    }

    /// The rows of a draft block behind `anchor`.
    pub fn block_rows(&self, anchor: DevicePtr, rows: DevicePtr, block: usize, noise: u32) -> Result<(), CudaError> {
        let params = BlockRows { anchor, rows, block: int(block), noise: noise.cast_signed() };
        self.run((1, 1, 1), block.next_multiple_of(32), &params)
    }

    /// Marks rows of bf16 values that are not finite.
    pub fn finite(
        &self,
        (x, m, width): (DevicePtr, usize, usize),
        checks: DevicePtr,
        number: i32,
    ) -> Result<(), CudaError> {
        self.run((m, 1, 1), 256, &FiniteRows { x, width: int(width), checks, number })
    }

    /// The same of fp32 values, of the rows that `picks` names.
    pub fn finite_floats(
        &self,
        (x, m, width): (DevicePtr, usize, usize),
        picks: DevicePtr,
        checks: DevicePtr,
        number: i32,
    ) -> Result<(), CudaError> {
        self.run((m, 8, 1), 256, &FiniteFloats { x, width: int(width), picks, checks, number })
    }

    /// RMS norm of `m` rows.
    pub fn rms_norm(
        &self,
        (x, stride, m): (DevicePtr, usize, usize),
        norm: Norm,
        out: DevicePtr,
    ) -> Result<(), CudaError> {
        self.run((m, 1, 1), 256, &norm_params((x, stride), norm, out))
    }

    /// Keys of `m` rows: normed, rotated, quantized; into `out` and, with `store`, into windows.
    pub fn store_keys(&self, m: usize, keys: &Keys) -> Result<(), CudaError> {
        self.run((m, 1, 1), 256, &key_params(keys))
    }

    /// An RMS norm and keys, of the same rows.
    pub fn norm_keys(
        &self,
        m: usize,
        (x, stride): (DevicePtr, usize),
        (norm, out): (Norm, DevicePtr),
        keys: &Keys,
    ) -> Result<(), CudaError> {
        let params = NormKeys { norm: norm_params((x, stride), norm, out), keys: key_params(keys) };
        self.run((m, 2, 1), 256, &params)
    }

    /// Queries, indexer queries and compressors of `m` rows, as far as there are any.
    pub fn prepare(&self, m: usize, parts: &Preparing) -> Result<(), CudaError> {
        let Preparing { table, eps, at, queries, index, compressors } = *parts;
        let (q, heads) = queries.unwrap_or((DevicePtr::NULL, Heads { heads: 0, width: 32 }));
        let queries = HeadNormRotate {
            q,
            heads: int(heads.heads),
            width: int(heads.width),
            eps,
            table: table.at,
            rope: int(table.rope),
            rows: at.rows,
        };
        let (index_q, index_heads, topk, ratio) =
            index.unwrap_or((DevicePtr::NULL, Heads { heads: 0, width: 32 }, 0, 1));
        let index = IndexQueries {
            q: index_q,
            heads: int(index_heads.heads),
            width: int(index_heads.width),
            table: table.at,
            rope: int(table.rope),
            rows: at.rows,
            topk: int(topk),
            ratio: int(ratio),
            factor: hadamard(index_heads.width),
        };
        let (sides, ratio, overlap) = compressors.unwrap_or(([Side::default(); 2], 1, false));
        let compress = CompressParams {
            attention: sides[0],
            index: sides[1],
            ratio: int(ratio),
            overlap: i32::from(overlap),
            table: table.at,
            rope: int(table.rope),
            eps,
            hadamard: hadamard(usize::try_from(sides[1].width).unwrap_or(0).max(1)),
            at,
        };
        let warps = PREPARE_THREADS / 32;
        let (query_blocks, index_blocks) = (heads.heads.div_ceil(warps), index_heads.heads.div_ceil(warps));
        let sides = sides.iter().filter(|side| side.width > 0).count();
        let params =
            Prepare { queries, index, compress, query_blocks: int(query_blocks), index_blocks: int(index_blocks) };
        self.run((m, query_blocks + index_blocks + sides, 1), PREPARE_THREADS, &params)
    }

    /// The mixes of `m` rows of streams; `raw[m, mixes + 1]`.
    pub fn mix(
        &self,
        (x, picks, m): (DevicePtr, DevicePtr, usize),
        weights: MixWeights,
        mixes: usize,
        s: &Streams,
        raw: DevicePtr,
    ) -> Result<(), CudaError> {
        self.run((mixes + 1, m, 1), 1024, &HyperMix { x, picks, mix: weights.mix, width: int(s.hc * s.dim), raw })
    }

    /// From streams and their `mixes` mixes to a sublayer's or a head's input `x`. `y`, the row before
    /// its norm, may be null.
    pub fn enter(
        &self,
        (h, picks, m): (DevicePtr, DevicePtr, usize),
        (raw, weights, mixes): (DevicePtr, MixWeights, usize),
        s: &Streams,
        norm: DevicePtr,
        (y, x): (DevicePtr, DevicePtr),
    ) -> Result<(), CudaError> {
        let params = HyperEnter {
            h,
            picks,
            raw,
            scale: weights.scale,
            base: weights.base,
            hc: int(s.hc),
            dim: int(s.dim),
            mixes: int(mixes),
            hc_eps: s.hc_eps,
            norm_eps: s.norm_eps,
            weight: norm,
            y,
            x,
        };
        self.run_as(HyperEnter::KERNEL, (m, 1, 1), (1024, 5 * s.dim), &params)
    }

    /// Spreads a sublayer's result over the streams; `taps` is null, or where their mean goes.
    pub fn leave(
        &self,
        (h, m): (DevicePtr, usize),
        y: DevicePtr,
        mix: DevicePtr,
        s: &Streams,
        (taps, tap_stride, tap_at): (DevicePtr, usize, usize),
    ) -> Result<(), CudaError> {
        let params = HyperLeave {
            h,
            y,
            mix,
            hc: int(s.hc),
            dim: int(s.dim),
            taps,
            tap_stride: int(tap_stride),
            tap_at: int(tap_at),
        };
        self.run((m, (s.dim / 4).div_ceil(128), 1), 128, &params)
    }

    /// What the fp8 wire does, to rows whose session has a boundary here.
    pub fn roundtrip(
        &self,
        (x, m): (DevicePtr, usize),
        s: &Streams,
        at: At,
        checks: DevicePtr,
    ) -> Result<(), CudaError> {
        let params = WireRoundtrip {
            x,
            dim: int(s.dim),
            rows: at.rows,
            states: at.states,
            places: at.places,
            place: at.place,
            checks,
        };
        self.run((m, s.hc, 1), 256, &params)
    }

    /// Routes `m` rows: picks, ascending, and weights. Exactly one of `bias` and `hash` is given.
    pub fn route(
        &self,
        (logits, experts, m): (DevicePtr, usize, usize),
        k: usize,
        (bias, hash): (DevicePtr, DevicePtr),
        (route_scale, rows): (f32, DevicePtr),
        (picks, weights, spread): (DevicePtr, DevicePtr, Spread),
    ) -> Result<(), CudaError> {
        let (experts, k) = (int(experts), int(k));
        let params = Route { logits, experts, k, bias, hash, route_scale, rows, picks, weights, spread };
        self.run((m, if spread.mix == DevicePtr::NULL { 1 } else { 2 }, 1), 256, &params)
    }

    /// The slots that `m` rows pick, of at most `slots`: `picks[m, topk]`; `keys[m, slots]` is scratch.
    pub fn pick(
        &self,
        (q, w, m): (DevicePtr, DevicePtr, usize),
        heads: Heads,
        (topk, ratio, slots): (usize, usize, usize),
        at: At,
        (keys, picks): (DevicePtr, DevicePtr),
    ) -> Result<(), CudaError> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a constant of the model")]
        let factor = (1.0 / (heads.width as f64).sqrt() * (1.0 / (heads.heads as f64).sqrt())) as f32;
        let params = IndexScores {
            q,
            w,
            factor,
            heads: int(heads.heads),
            topk: int(topk),
            ratio: int(ratio),
            at,
            keys,
            keys_stride: int(slots),
        };
        let kernel = match heads.width {
            64 => "index_scores_64",
            128 => "index_scores_128",
            _ => "index_scores_256",
        };
        let shared = 4 * heads.heads * (heads.width + 1 + SCORED);
        let blocks = slots.div_ceil(SCORED).clamp(1, 512);
        self.run_as(kernel, (blocks, m, 1), (256, shared), &params)?;
        let params =
            IndexPicks { keys, keys_stride: int(slots), topk: int(topk), ratio: int(ratio), rows: at.rows, picks };
        self.run((m, 1, 1), 1024, &params)
    }

    /// Attends: `out[m, heads, width]`, its rotation undone. Lists have at most `list` entries, a
    /// multiple of 64; `scores[m, heads, list]` is scratch.
    pub fn attend(
        &self,
        (q, m): (DevicePtr, usize),
        heads: Heads,
        (keys, list): (KeyList, usize),
        (sink, table, spread): (DevicePtr, Table, Spread),
        (scores, out): (DevicePtr, DevicePtr),
    ) -> Result<(), CudaError> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a constant of the model")]
        let scale = (1.0 / (heads.width as f64).sqrt()) as f32;
        let (count, width, scores_stride) = (int(heads.heads), int(heads.width), int(list));
        let params = AttendScores { keys, q, heads: count, width, scale, scores, scores_stride, spread };
        let groups = heads.heads.div_ceil(HEADS);
        let more = usize::from(spread.mix != DevicePtr::NULL);
        self.run((list / BLOCK + more, groups, m), 256, &params)?;
        let (table, rope) = (table.at, int(table.rope));
        let chunk = list.min(CHUNK);
        let params = AttendValues {
            keys,
            scores,
            scores_stride,
            chunk: int(chunk),
            sink,
            heads: count,
            width,
            table,
            rope,
            out,
        };
        let shared = chunk * (2 * BLOCK + 8 * HEADS);
        self.run_as(AttendValues::KERNEL, (groups, heads.width / BLOCK, m), (128, shared), &params)
    }

    /// One token of a draft block: the bias of the token before, the confidence, the best.
    pub fn markov(&self, step: &MarkovStep, k: usize) -> Result<(), CudaError> {
        let params = MarkovLogits {
            anchor: step.anchor,
            tokens: step.tokens,
            k: int(k),
            markov_in: step.markov_in,
            markov_out: step.markov_out,
            rank: int(step.rank),
            vocab: int(step.vocab),
            logits: step.logits,
            y: step.y,
            dim: int(step.dim),
            confidence_weights: step.confidence_weights,
            confidence: step.confidence,
            best: step.best,
        };
        self.run((MARKOV_BLOCKS as usize + 1, 1, 1), 256, &params)?;
        let params =
            MarkovToken { best: step.best, blocks: MARKOV_BLOCKS.cast_signed(), k: int(k), tokens: step.tokens };
        self.run((1, 1, 1), 32, &params)
    }
}

/// Keys of some rows.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    /// Keys before their norm, bf16 `[m, norm.width]`.
    pub x: DevicePtr,
    /// Their norm.
    pub norm: Norm,
    /// Their rotations.
    pub table: Table,
    /// Whose they are.
    pub at: At,
    /// Whether they go into windows.
    pub store: bool,
    /// Where they go beside; null for nowhere.
    pub out: DevicePtr,
}

/// What stands between products and attention, for some rows.
#[derive(Debug, Clone, Copy)]
pub struct Preparing {
    /// Rotations.
    pub table: Table,
    /// Added to means of squares.
    pub eps: f32,
    /// Whose rows they are.
    pub at: At,
    /// Queries, normed and rotated in place.
    pub queries: Option<(DevicePtr, Heads)>,
    /// Indexer queries in place, of rows that see more than so many slots of so many positions.
    pub index: Option<(DevicePtr, Heads, usize, usize)>,
    /// Attention's compressor and, if it has a width, the indexer's; positions to a slot; whether slots
    /// overlap.
    pub compressors: Option<([Side; 2], usize, bool)>,
}

fn norm_params((x, stride): (DevicePtr, usize), norm: Norm, out: DevicePtr) -> RmsNorm {
    RmsNorm { x, stride: int(stride), weight: norm.weight, width: int(norm.width), eps: norm.eps, out }
}

fn key_params(keys: &Keys) -> StoreKeys {
    let Keys { x, norm, table, at, store, out } = *keys;
    StoreKeys {
        x,
        stride: int(norm.width),
        weight: norm.weight,
        width: int(norm.width),
        eps: norm.eps,
        table: table.at,
        rope: int(table.rope),
        rows: at.rows,
        states: if store { at.states } else { DevicePtr::NULL },
        places: at.places,
        place: at.place,
        out,
    }
}

/// fp32 width^-½.
#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a constant of the model")]
fn hadamard(width: usize) -> f32 {
    (1.0 / (width as f64).sqrt()) as f32
}

/// What the Markov head works on.
#[derive(Debug, Clone, Copy)]
pub struct MarkovStep {
    /// The block's anchor, one [`Row`].
    pub anchor: DevicePtr,
    /// Tokens so far and to come, i32 `[block]`.
    pub tokens: DevicePtr,
    /// bf16 `[vocab, rank]`.
    pub markov_in: DevicePtr,
    /// bf16 `[vocab, rank]`.
    pub markov_out: DevicePtr,
    /// Values of a Markov embedding.
    pub rank: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// fp32 `[block, vocab]`.
    pub logits: DevicePtr,
    /// The head's input before its norm, bf16 `[block, dim]`.
    pub y: DevicePtr,
    /// Values of a row of it.
    pub dim: usize,
    /// bf16 `[dim + rank]`.
    pub confidence_weights: DevicePtr,
    /// fp32 `[block]`.
    pub confidence: DevicePtr,
    /// u64 `[MARKOV_BLOCKS]`.
    pub best: DevicePtr,
}
