//! Whole engines on the tiny model: the device's bits are the CPU's, whatever a pass looks like.

use half::bf16;
use ringfence_cuda::{CudaEngine, CudaSettings};
use ringfence_engine::engine::cpu::{CpuEngine, CpuSettings};
use ringfence_engine::engine::wire::Wire;
use ringfence_engine::engine::{Chunk, Engine, Output, SessionShape};
use ringfence_engine::ids::{Position, SessionId, TokenId, WireEncoding};
use ringfence_engine::model::Checkpoint;

use crate::support::{Outcome, Rng, Test, folders, kernel_cache, same_f32};

/// All of them.
pub(crate) const TESTS: &[Test] = &[
    ("engine_whole", |_| both(&["0:7"], true)),
    ("engine_parts", |_| both(&["0:1", "0:3", "2:5", "4:7", "5:7", "3:4"], false)),
    ("engine_graphs", |_| graphs()),
    ("engine_refusals", |_| refusals()),
    ("engine_sizes", |_| sizes()),
    ("engine_ring", |_| ring()),
];

/// The tiny model's folder.
pub(crate) const MODEL: &str = "models/tiny-v4-flash";

/// What a step gave: bits of everything, or the error's words.
pub(crate) type Seen = Result<(Vec<u16>, Vec<u32>), String>;

/// Steps of a test, the same for every engine.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Open(u64, SessionShape),
    Close(u64),
    /// Chunks `(session, pos, positions, logits from)` of one pass; ids and hidden states are those of
    /// `seed`.
    Forward(Vec<(u64, usize, usize, usize)>, u64),
    Draft(u64, usize, u32),
}

pub(crate) fn checkpoint() -> Result<Checkpoint, String> {
    // Not by the name that would put the embedded model into this binary.
    Checkpoint::open_dir(MODEL).map_err(|e| e.to_string())
}

pub(crate) fn cpu(range: &str) -> Result<CpuEngine, String> {
    let settings = CpuSettings { threads: 4, max_context: Some(640), ..CpuSettings::default() };
    CpuEngine::new(&checkpoint()?, range.parse().map_err(|_| "range")?, &settings).map_err(|e| e.to_string())
}

pub(crate) fn settings(graphs: bool) -> CudaSettings {
    CudaSettings {
        max_context: Some(640),
        graph_bytes: if graphs { 1 << 30 } else { 0 },
        cuda_folders: folders(),
        kernel_cache: Some(kernel_cache()),
        ..CudaSettings::default()
    }
}

pub(crate) fn cuda(range: &str, graphs: bool) -> Result<CudaEngine, String> {
    let range = range.parse().map_err(|_| "range")?;
    CudaEngine::new(&checkpoint()?, range, &settings(graphs)).map_err(|e| e.to_string())
}

pub(crate) fn shape(reach: u32, boundaries: &[u16], encoding: WireEncoding, drafting: bool) -> SessionShape {
    SessionShape { positions: 400, reach, boundaries: boundaries.to_vec(), encoding, drafting }
}

/// The token at a position.
fn id(session: u64, pos: usize, seed: u64) -> TokenId {
    TokenId(Rng::new(session * 100_003 + pos as u64 * 7 + seed).below(2048) as u32)
}

/// The hidden state in front of a stage.
fn state(session: u64, pos: usize, seed: u64, width: usize) -> Vec<bf16> {
    let mut rng = Rng::new(session * 77_003 + pos as u64 * 3 + seed);
    (0..width).map(|_| bf16::from_f32(rng.normal())).collect()
}

pub(crate) fn run(engine: &mut dyn Engine, step: &Step) -> Option<Seen> {
    let facts = engine.facts().clone();
    match step {
        Step::Open(session, shape) => match engine.open(SessionId(*session), shape) {
            Ok(()) => None,
            Err(error) => Some(Err(error.to_string())),
        },
        Step::Close(session) => {
            engine.close(SessionId(*session));
            None
        }
        Step::Forward(chunks, seed) => {
            let width = facts.hc * facts.dim;
            let ids: Vec<Vec<TokenId>> =
                chunks.iter().map(|&(s, pos, len, _)| (pos..pos + len).map(|p| id(s, p, *seed)).collect()).collect();
            let hidden: Vec<Vec<bf16>> = chunks
                .iter()
                .map(|&(s, pos, len, _)| (pos..pos + len).flat_map(|p| state(s, p, *seed, width)).collect())
                .collect();
            let at = |pos: usize| Position(pos as u32);
            let batch: Vec<Chunk<'_>> = chunks
                .iter()
                .zip(ids.iter().zip(&hidden))
                .map(|(&(session, pos, _, from), (ids, hidden))| Chunk {
                    session: SessionId(session),
                    pos: at(pos),
                    ids,
                    hidden: (!facts.is_head()).then_some(hidden.as_slice()),
                    logits_from: at(from),
                })
                .collect();
            let mut out = Output::default();
            Some(engine.forward(&batch, &mut out).map_err(|error| error.to_string()).map(|()| {
                (out.hidden.iter().map(|v| v.to_bits()).collect(), out.logits.iter().map(|v| v.to_bits()).collect())
            }))
        }
        Step::Draft(session, at, anchor) => {
            let drafts = engine.draft(SessionId(*session), Position(*at as u32), TokenId(*anchor));
            Some(drafts.map_err(|error| error.to_string()).map(|drafts| {
                let tokens = drafts.tokens.iter().map(|token| token.0);
                (Vec::new(), tokens.chain(drafts.confidence.iter().map(|c| c.to_bits())).collect())
            }))
        }
    }
}

/// Runs the steps on both and compares after each.
pub(crate) fn compare(expected: &mut dyn Engine, got: &mut dyn Engine, steps: &[Step]) -> Outcome {
    for (n, step) in steps.iter().enumerate() {
        let (a, b) = (run(expected, step), run(got, step));
        if a == b {
            continue;
        }
        let place = match (&a, &b) {
            (Some(Ok(a)), Some(Ok(b))) => {
                let hidden = a.0.iter().zip(&b.0).position(|(a, b)| a != b);
                let logits = a.1.iter().zip(&b.1).position(|(a, b)| a != b);
                let wrong = a.0.iter().zip(&b.0).filter(|(a, b)| a != b).count()
                    + a.1.iter().zip(&b.1).filter(|(a, b)| a != b).count();
                let show = |at: Option<usize>| {
                    at.map(|i| (i, a.0.get(i).copied(), b.0.get(i).copied(), a.1.get(i).copied(), b.1.get(i).copied()))
                };
                format!(
                    "{wrong} differ of {}+{} ({}+{}); hidden {:?}, logits {:?}",
                    a.0.len(),
                    a.1.len(),
                    b.0.len(),
                    b.1.len(),
                    show(hidden),
                    show(logits)
                )
            }
            _ => format!("expected {:?}, got {:?}", a.map(|a| a.err()), b.map(|b| b.err())),
        };
        let what: String = format!("{step:?}").chars().take(160).collect();
        return Err(format!("step {n}: {what}: {place}"));
    }
    Ok(())
}

/// Prefill, decode, drafts, verification with rewinds, batches, sessions that come and go.
fn script(boundaries: &[u16], encoding: WireEncoding, drafting: bool, tail: bool) -> Vec<Step> {
    let open = |session, reach| Step::Open(session, shape(reach, boundaries, encoding, drafting));
    let one = |session, pos, len, seed| Step::Forward(vec![(session, pos, len, pos)], seed);
    let mut steps = vec![open(1, 16), one(1, 0, 1, 0), open(2, 70), one(2, 0, 70, 0), one(1, 1, 9, 0)];
    let draft = |session, at: usize| Step::Draft(session, at, (at * 31 % 2048) as u32);
    let mut p = 10;
    for k in 0..8 {
        // A verified draft of which some is thrown away.
        steps.push(one(1, p, 6, k));
        if drafting && tail {
            steps.push(draft(1, p + (k as usize) % 6));
        }
        p += 1 + (k as usize) % 6;
    }
    steps.push(one(2, 70, 1, 0));
    for k in 0..6 {
        steps.push(one(2, 71 + k, 1, 0));
    }
    steps.push(open(3, 8));
    steps.push(Step::Forward(vec![(3, 0, 5, 3), (1, p, 2, p), (2, 77, 1, 77)], 0));
    steps.push(Step::Forward(vec![(1, p + 2, 1, 0), (2, 78, 1, 0), (3, 5, 1, 0)], 0));
    // Only the last position's logits, and none.
    steps.push(Step::Forward(vec![(2, 79, 60, 138)], 0));
    steps.push(Step::Forward(vec![(2, 139, 4, 1000)], 0));
    steps.push(one(2, 143, 130, 0));
    if drafting && tail {
        steps.extend([draft(2, 272), draft(2, 272), draft(2, 230), draft(3, 5)]);
    }
    steps.extend([
        Step::Close(1),
        open(4, 300),
        one(4, 0, 150, 9),
        one(4, 3, 150, 8),
        one(4, 153, 1, 8),
        one(2, 273, 1, 0),
    ]);
    steps.extend([Step::Close(2), Step::Close(3), Step::Close(4)]);
    steps
}

pub(crate) fn both(ranges: &[&str], graphs: bool) -> Outcome {
    for range in ranges {
        let mut expected = cpu(range)?;
        let tail = expected.facts().is_tail();
        let drafts = expected.facts().draft_block > 0;
        let mut got = cuda(range, graphs)?;
        let wires: &[(&[u16], WireEncoding)] =
            &[(&[], WireEncoding::Bf16), (&[1, 3, 4, 6], WireEncoding::Fp8), (&[2, 3], WireEncoding::Bf16)];
        for &(boundaries, encoding) in wires {
            for drafting in if drafts { &[true, false][..] } else { &[false][..] } {
                compare(&mut expected, &mut got, &script(boundaries, encoding, *drafting, tail)).map_err(|why| {
                    format!("{range}, boundaries {boundaries:?} {encoding}, drafting {drafting}: {why}")
                })?;
            }
        }
    }
    Ok(())
}

/// Captured waves against eager ones, on ranges of every kind.
fn graphs() -> Outcome {
    for range in ["0:7", "1:5"] {
        let mut expected = cuda(range, false)?;
        let mut got = cuda(range, true)?;
        let (bytes, count) = got.graphs();
        println!("     {range}: {count} graphs, {bytes} bytes");
        if expected.graphs().1 != 0 || count < 9 {
            return Err(format!("{count} graphs"));
        }
        let facts = got.facts().clone();
        let drafting = facts.draft_block > 0;
        let mut steps = vec![Step::Open(1, shape(8, &[2], WireEncoding::Fp8, drafting))];
        // Replayed at other positions the results change as the eager ones do.
        for pos in (0..330).step_by(3) {
            steps.push(Step::Forward(vec![(1, pos, 3, pos)], 0));
            if drafting && pos % 30 == 0 {
                steps.push(Step::Draft(1, pos + 2, 9));
            }
        }
        for pos in 330..340 {
            steps.push(Step::Forward(vec![(1, pos, 1, pos)], 0));
        }
        compare(&mut expected, &mut got, &steps).map_err(|why| format!("{range}: {why}"))?;
    }
    Ok(())
}

/// What can't be computed is refused in the CPU's words and changes nothing.
fn refusals() -> Outcome {
    let (mut expected, mut got) = (cpu("0:7")?, cuda("0:7", true)?);
    let plain = shape(8, &[], WireEncoding::Bf16, true);
    let one = |session, pos, len| Step::Forward(vec![(session, pos, len, pos)], 0);
    let steps = [
        Step::Open(1, SessionShape { positions: 50, ..plain.clone() }),
        Step::Open(1, plain.clone()),
        Step::Open(2, SessionShape { positions: 641, ..plain.clone() }),
        Step::Open(2, SessionShape { boundaries: vec![3, 7], ..plain.clone() }),
        one(1, 0, 40),
        one(2, 0, 1),
        one(1, 40, 0),
        one(1, 41, 1),
        one(1, 40, 11),
        one(1, 31, 1),
        Step::Forward(vec![(1, 40, 1, 0), (1, 41, 1, 0)], 0),
        Step::Draft(1, 40, 1),
        Step::Draft(1, 20, 1),
        Step::Draft(1, 39, 2048),
        Step::Draft(1, 39, 2047),
        one(1, 40, 2),
    ];
    compare(&mut expected, &mut got, &steps)?;
    // A value that is not finite is named.
    let (mut expected, mut got) = (cpu("2:5")?, cuda("2:5", true)?);
    for engine in [&mut expected as &mut dyn Engine, &mut got] {
        engine.open(SessionId(1), &SessionShape { drafting: false, ..plain.clone() }).map_err(|e| e.to_string())?;
        let mut hidden = state(1, 0, 0, 3 * 1024);
        hidden[1024 + 7] = bf16::NAN;
        let ids = [TokenId(1); 3];
        let chunk = Chunk {
            session: SessionId(1),
            pos: Position(0),
            ids: &ids,
            hidden: Some(&hidden),
            logits_from: Position(0),
        };
        let error = engine.forward(&[chunk], &mut Output::default()).err().map(|e| e.to_string());
        if error.as_deref() != Some("layers 2:5 produced a value that is not finite at position 1") {
            return Err(format!("{error:?}"));
        }
    }
    Ok(())
}

/// State is what the arithmetic says, and is given back.
fn sizes() -> Outcome {
    let mut engine = cuda("0:7", false)?;
    let wide = shape(200, &[], WireEncoding::Fp8, true);
    let needed = engine.state_bytes(&wide);
    let (free, _) = engine.device().memory().map_err(|e| e.to_string())?;
    for round in 0..40u64 {
        for session in 0..3 {
            engine.open(SessionId(round * 3 + session), &wide).map_err(|e| e.to_string())?;
        }
        for session in 0..3 {
            engine.close(SessionId(round * 3 + session));
        }
    }
    let (after, _) = engine.device().memory().map_err(|e| e.to_string())?;
    if needed < 1 << 16 || free.abs_diff(after) > 64 << 20 {
        return Err(format!("{needed} bytes a session, {free} free before and {after} after"));
    }
    Ok(())
}

fn chunk<'a>(at: Position, ids: &'a [TokenId], hidden: Option<&'a [bf16]>) -> Chunk<'a> {
    Chunk { session: SessionId(1), pos: at, ids, hidden, logits_from: at }
}

/// A ring of a stage on the processor and one on the device, and the other way round: greedy tokens and
/// drafts are those of the processor alone.
fn ring() -> Outcome {
    for encoding in [WireEncoding::Fp8, WireEncoding::Bf16] {
        let plain = shape(64, &[3], encoding, true);
        let mut whole = cpu("0:7")?;
        let mut mixed: [[Box<dyn Engine>; 2]; 2] = [
            [Box::new(cpu("0:3")?), Box::new(cuda("3:7", true)?)],
            [Box::new(cuda("0:3", true)?), Box::new(cpu("3:7")?)],
        ];
        let open = |engine: &mut dyn Engine| engine.open(SessionId(1), &plain).map_err(|e| e.to_string());
        open(&mut whole)?;
        for stages in &mut mixed {
            open(&mut *stages[0])?;
            open(&mut *stages[1])?;
        }
        let wire = Wire::new(encoding, whole.facts().hc, whole.facts().dim);
        let mut next: Vec<TokenId> = (0..40).map(|pos| id(1, pos, 3)).collect();
        let mut pos = 0;
        while pos < 120 {
            let at = Position(pos as u32);
            let (mut expected, mut out) = (Output::default(), Output::default());
            whole.forward(&[chunk(at, &next, None)], &mut expected).map_err(|e| e.to_string())?;
            let last = Position((pos + next.len() - 1) as u32);
            let drafts = whole.draft(SessionId(1), last, TokenId(7)).map_err(|e| e.to_string())?;
            for stages in &mut mixed {
                stages[0].forward(&[chunk(at, &next, None)], &mut out).map_err(|e| e.to_string())?;
                let (mut bytes, mut hidden) = (Vec::new(), Vec::new());
                wire.encode(at, &out.hidden, &mut bytes).map_err(|e| e.to_string())?;
                wire.decode(at, &bytes, &mut hidden).map_err(|e| e.to_string())?;
                stages[1].forward(&[chunk(at, &next, Some(&hidden))], &mut out).map_err(|e| e.to_string())?;
                same_f32(&format!("{encoding}: logits at {pos}"), &out.logits, &expected.logits)?;
                let got = stages[1].draft(SessionId(1), last, TokenId(7)).map_err(|e| e.to_string())?;
                if got != drafts {
                    return Err(format!("{encoding}: draft at {pos}: {got:?} for {drafts:?}"));
                }
            }
            pos += next.len();
            let vocab = whole.facts().vocab;
            let row = &expected.logits[expected.logits.len() - vocab..];
            let best = (0..vocab).fold(0, |best, i| if row[i] > row[best] { i } else { best });
            next = vec![TokenId(best as u32)];
        }
    }
    Ok(())
}
