//! Blocks of DeepSeek-V4-Flash at their true shapes as engines that a stage would run: loading and its
//! peak, decode steps through the engine's own interface, drafts, prefill; layers beside PyTorch's.

use std::cell::RefCell;
use std::time::Instant;

use half::bf16;
use ringfence_cuda::measure::Time;
use ringfence_cuda::ops::Row;
use ringfence_cuda::{CudaEngine, CudaSettings, load};
use ringfence_engine::engine::{Chunk, Engine, Output, SessionShape};
use ringfence_engine::ids::{Position, SessionId, TokenId, WireEncoding};

use crate::peak::Sampler;
use crate::support::{Bench, folders};
use crate::synthetic::Synthetic;
use crate::torch::Torch;

/// Positions of the first session in front of the measured ones: prefill of the larger size, and more
/// slots than the indexer picks.
const POSITIONS: usize = 4_096;
/// Of the other sessions.
const FEWER: usize = 2_112;
/// Sessions.
const SESSIONS: usize = 16;
/// Positions of a chunk of prefill.
const CHUNK: usize = 512;
/// Positions of a decode step.
const ROWS: [usize; 5] = [1, 2, 4, 8, 16];
/// Steps whose median counts.
const STEPS: usize = 31;
/// Device memory that loading may take beside what stays.
const PEAK: u64 = 256 << 20;
/// Bytes of one routed expert: three matrices of 2048 × 4096 codes of four bits, a scale to 32.
const EXPERT: f64 = 3.0 * 2048.0 * 4096.0 * (0.5 + 1.0 / 32.0);

/// What the layers of a block are.
struct Block {
    range: &'static str,
    kinds: &'static [&'static str],
}

const BLOCKS: [Block; 2] = [
    Block { range: "0:2", kinds: &["window", "window"] },
    Block { range: "40:43", kinds: &["ratio 4", "ratio 128", "ratio 4"] },
];

/// A session, its first position in a step, and how many follow.
type Run = (usize, usize, usize);

/// A line of the layers' table.
struct Layer {
    kind: &'static str,
    m: usize,
    us: f64,
    /// Microseconds that its bytes take at the copy's rate.
    limit: f64,
}

/// Measures both blocks, then PyTorch.
///
/// # Errors
/// The words of what failed.
pub(crate) fn run(bench: &Bench) -> Result<(), String> {
    if !bench.wants("blocks") {
        return Ok(());
    }
    let mut layers = Vec::new();
    for block in &BLOCKS {
        let start = Instant::now();
        let made = Synthetic::write(block.range)?;
        one(bench, block, &made, &mut layers)?;
        println!("layers {}: {:.1} s in all\n", block.range, start.elapsed().as_secs_f64());
    }
    // Printed before the rest, which takes as long again.
    bars(&layers);
    let start = Instant::now();
    let torch = Torch::run();
    match &torch {
        Ok(torch) => print!("{}", torch.said),
        Err(why) => println!("no comparison with PyTorch: {why}"),
    }
    println!("PyTorch: {:.1} s in all\n", start.elapsed().as_secs_f64());
    table(&layers, torch.ok().as_ref());
    Ok(())
}

fn words<T, E: std::fmt::Display>(result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// `held` or `MISSED`.
fn bar(what: &str, value: f64, limit: f64, unit: &str) {
    let word = if value <= limit { "held" } else { "MISSED" };
    println!("bar: {what}: {value:.1} {unit}, at most {limit:.1} {unit}: {word}");
}

fn one(bench: &Bench, block: &Block, made: &Synthetic, layers: &mut Vec<Layer>) -> Result<(), String> {
    let range = made.range();
    let mut engine = loaded(bench, made)?;
    let work = Work::new(&engine);
    for session in 0..SESSIONS {
        let shape = SessionShape {
            positions: 8_192,
            reach: CHUNK as u32,
            boundaries: Vec::new(),
            encoding: WireEncoding::Fp8,
            drafting: engine.facts().draft_block > 0,
        };
        words(engine.open(SessionId(session as u64), &shape))?;
    }
    prefill(&mut engine, &work, block)?;
    let steps = |engine: &mut CudaEngine, work: &Work, how: &str| {
        for m in ROWS {
            for (what, rows) in cases(m) {
                let us = median(STEPS, || work.forward(engine, &rows))?;
                println!("step, {range}, {how}, {m} {what}: {us:.1} µs, {:.1} a layer", us / block.kinds.len() as f64);
            }
        }
        if engine.facts().draft_block > 0 {
            let (at, anchor) = (Position(POSITIONS as u32 - 1), token(0, POSITIONS));
            let us = median(STEPS, || words(engine.draft(SessionId(0), at, anchor)).map(|_| ()))?;
            println!("draft, {range}, {how}: {us:.1} µs for {} tokens", engine.facts().draft_block);
        }
        Ok::<_, String>(())
    };
    steps(&mut engine, &work, "graphs")?;
    let mut ours = Vec::new();
    for m in ROWS {
        for (what, rows) in cases(m) {
            work.forward(&mut engine, &rows)?;
            let met = words(engine.experts_met(m))?;
            let bare = words(engine.time_step(m, false))?.us;
            let whole = words(engine.time_step(m, true))?.us;
            println!(
                "device, {range}, {m} {what}: {bare:.1} µs, {:.1} a layer; with logits {whole:.1}; experts met {met:?}",
                bare / block.kinds.len() as f64
            );
            if what.starts_with("positions") {
                ours.push((m, bare, met));
            }
        }
    }
    against_one(bench, &range.to_string(), &ours);
    for (place, kind) in block.kinds.iter().enumerate() {
        if block.kinds[..place].contains(kind) {
            continue;
        }
        for m in ROWS {
            let rows: Vec<Row> = (0..m).map(|k| row(0, POSITIONS + k)).collect();
            let times = words(engine.time_layer(place, &rows))?;
            let limit = times[0].bytes as f64 / bench.copy / 1e3;
            layers.push(Layer { kind, m, us: times[0].us, limit });
            by_step(bench, kind, m, &times);
        }
    }
    engine.forget_graphs();
    steps(&mut engine, &work, "eager")
}

/// The steps of a layer beside the bytes that they must read; alone, a step may find some of them in the
/// cache.
fn by_step(bench: &Bench, kind: &str, m: usize, times: &[Time]) {
    if m != 1 && m != 8 {
        return;
    }
    for Time { what, us, bytes } in times {
        let (mb, rate) = (*bytes as f64 / 1e6, *bytes as f64 / us / 1e3);
        println!("{kind}, {m}: {what:30} {us:7.1} µs {mb:7.1} MB {rate:6.0} GB/s {:4.0} %", 100.0 * rate / bench.copy);
    }
}

/// Loads the block, with its peak and inventory.
fn loaded(bench: &Bench, made: &Synthetic) -> Result<CudaEngine, String> {
    let (checkpoint, range) = (made.open()?, made.range());
    let settings = CudaSettings {
        max_context: Some(32_768),
        cuda_folders: folders(),
        kernel_cache: Some(std::env::temp_dir().join("ringfence-kernels")),
        ..CudaSettings::default()
    };
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let sampler = Sampler::start(&bench.device)?;
    let start = Instant::now();
    let engine = words(CudaEngine::new(&checkpoint, range, &settings))?;
    let seconds = start.elapsed().as_secs_f64();
    let used = sampler.stop()?;
    let facts = engine.facts();
    let (graph_bytes, graphs) = engine.graphs();
    let (now, most) = engine.device().taken();
    println!(
        "load, {range}: {:.2} GiB of weights in {seconds:.1} s ({:.1} GB/s, compiling and capturing included); \
         {graphs} graphs of {:.1} MiB",
        mib(facts.weight_bytes) / 1024.0,
        facts.weight_bytes as f64 / seconds / 1e9,
        mib(graph_bytes)
    );
    println!(
        "memory, {range}: {:.1} MiB stay, {:.1} MiB at most ({} samples); arenas {:.1} MiB, {:.1} MiB at most",
        mib(used.steady),
        mib(used.peak),
        used.samples,
        mib(now),
        mib(most)
    );
    bar(&format!("peak beside what stays, {range}"), mib(used.peak.saturating_sub(used.steady)), mib(PEAK), "MiB");
    let start = Instant::now();
    let lines = words(load::inventory(&words(checkpoint.weights(range))?, engine.weights().held()))?;
    let held: u64 = lines.iter().map(|line| line.held.bytes).sum();
    println!(
        "inventory, {range}: {} tensors, {:.1} MiB held, digests in {:.1} s; the first and the last:",
        lines.len(),
        mib(held),
        start.elapsed().as_secs_f64()
    );
    for line in lines.first().into_iter().chain(lines.last()) {
        println!("  {} ({}), {} bytes, sha256 {}", line.held.name, line.held.form, line.held.bytes, line.sha256);
    }
    Ok(engine)
}

/// Prefill of all sessions; the first two are timed, then one at its first chunk again, warm.
fn prefill(engine: &mut CudaEngine, work: &Work, block: &Block) -> Result<(), String> {
    let range = engine.facts().range;
    let mut timed = |what: &str, session: usize, to: usize| {
        let start = Instant::now();
        for pos in (0..to).step_by(CHUNK) {
            work.prefill(engine, (session, pos, (pos + CHUNK).min(to)), to - 1)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let rate = to as f64 / seconds;
        if !what.is_empty() {
            let a_layer = 1e6 * seconds / to as f64 / block.kinds.len() as f64;
            println!("prefill, {range}, {what}: {rate:.0} tokens/s, {a_layer:.2} µs a position and layer");
        }
        Ok::<_, String>(())
    };
    timed("", 1, CHUNK)?;
    timed("512 positions", 2, CHUNK)?;
    timed("4096 positions in chunks of 512", 0, POSITIONS)?;
    (1..SESSIONS).try_for_each(|session| timed("", session, FEWER))
}

/// The rows of a step: positions of one session (a verified draft), and of as many sessions.
fn cases(m: usize) -> Vec<(&'static str, Vec<Run>)> {
    let one = ("positions of one session", vec![(0, POSITIONS, m)]);
    let many = ("sessions", (0..m).map(|session| (session, if session == 0 { POSITIONS } else { FEWER }, 1)).collect());
    if m == 1 { vec![one] } else { vec![one, many] }
}

/// Eight positions against one: 2.5 times, and what the further experts' bytes take at the copy's rate.
/// `ours`: positions, microseconds, experts met by layer.
fn against_one(bench: &Bench, range: &str, ours: &[(usize, f64, Vec<usize>)]) {
    let of = |rows: usize| ours.iter().find(|(m, ..)| *m == rows).map(|(_, us, met)| (*us, met.iter().sum::<usize>()));
    let (Some((one, met_one)), Some((eight, met_eight))) = (of(1), of(8)) else { return };
    let extra = met_eight.saturating_sub(met_one) as f64 * EXPERT / bench.copy / 1e3;
    bar(&format!("8 positions, {range}, against 2.5 × {one:.1} + {extra:.1} µs"), eight, 2.5 * one + extra, "µs");
}

fn median(count: usize, mut work: impl FnMut() -> Result<(), String>) -> Result<f64, String> {
    let mut times = Vec::new();
    for _ in 0..count + 2 {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let mut times = times.split_off(2);
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// The tokens of a session, one like the other's but for its place.
fn token(session: usize, pos: usize) -> TokenId {
    TokenId(((session * 7_919 + pos * 104_729) % 129_280) as u32)
}

fn row(session: usize, pos: usize) -> Row {
    Row { slot: session as i32, pos: pos as i32, id: token(session, pos).0 as i32, spare: 0 }
}

/// Hidden states to take from, and where results go.
struct Work {
    hidden: Option<Vec<bf16>>,
    width: usize,
    /// Used again from pass to pass, as a stage does.
    out: RefCell<Output>,
}

impl Work {
    fn new(engine: &CudaEngine) -> Self {
        let width = engine.facts().hc * engine.facts().dim;
        // Rows that have nothing in common: their experts are different ones.
        let mut state = 1u64;
        let mut value = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d);
            bf16::from_f32(((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 2.0)
        };
        let hidden = (!engine.facts().is_head()).then(|| (0..2 * CHUNK * width).map(|_| value()).collect());
        Self { hidden, width, out: RefCell::default() }
    }

    /// Hidden states of as many positions, others for each session.
    fn states(&self, (session, pos, count): Run) -> Option<&[bf16]> {
        let first = (session * 37 + pos) % CHUNK;
        self.hidden.as_ref().map(|all| &all[first * self.width..(first + count) * self.width])
    }

    /// One chunk of prefill; logits of position `last` alone.
    fn prefill(
        &self,
        engine: &mut CudaEngine,
        (session, from, to): (usize, usize, usize),
        last: usize,
    ) -> Result<(), String> {
        let ids: Vec<TokenId> = (from..to).map(|pos| token(session, pos)).collect();
        let chunk = Chunk {
            session: SessionId(session as u64),
            pos: Position(from as u32),
            ids: &ids,
            hidden: self.states((session, from, to - from)),
            logits_from: Position(last as u32),
        };
        words(engine.forward(&[chunk], &mut Output::default()))
    }

    /// A decode step over chunks `(session, pos, positions)`, with all logits.
    fn forward(&self, engine: &mut CudaEngine, rows: &[Run]) -> Result<(), String> {
        let ids: Vec<Vec<TokenId>> =
            rows.iter().map(|&(s, pos, len)| (pos..pos + len).map(|p| token(s, p)).collect()).collect();
        let batch: Vec<Chunk<'_>> = rows
            .iter()
            .zip(&ids)
            .map(|(&(session, pos, len), ids)| Chunk {
                session: SessionId(session as u64),
                pos: Position(pos as u32),
                ids,
                hidden: self.states((session, pos, len)),
                logits_from: Position(0),
            })
            .collect();
        let mut out = std::mem::take(&mut *self.out.borrow_mut());
        let done = words(engine.forward(&batch, &mut out));
        self.out.replace(out);
        done
    }
}

/// Layers, ours and PyTorch's fastest variant.
fn table(layers: &[Layer], torch: Option<&Torch>) {
    println!("one layer, µs: ours in graphs of 20; its weights' bytes at the copy's rate; PyTorch's fastest variant");
    println!("layer      positions     ours  limit  PyTorch, graph     eager              PyTorch's / ours");
    for Layer { kind, m, us, limit } in layers {
        let best = |mode: &str| torch.and_then(|torch| torch.best(kind, mode, *m));
        let cell =
            |best: Option<(f64, &str)>| best.map_or_else(|| "-".to_owned(), |(us, what)| format!("{us:.0} ({what})"));
        let (graph, eager) = (best("graph"), best("eager"));
        let ratio = graph.map_or_else(|| "-".to_owned(), |(theirs, _)| format!("{:.1}", theirs / us));
        println!("{kind:10} {m:9} {us:8.1} {limit:6.1}  {:18} {:18} {ratio}", cell(graph), cell(eager));
    }
}

fn bars(layers: &[Layer]) {
    for Layer { kind, us, limit, .. } in layers.iter().filter(|layer| layer.m == 1) {
        bar(&format!("a whole layer, {kind}, 1 position"), *us, 150.0, "µs");
        bar(&format!("a whole layer, {kind}, 1 position, the aim"), *us, 2.0 * limit, "µs");
    }
}
