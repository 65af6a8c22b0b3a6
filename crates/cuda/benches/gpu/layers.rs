//! Whole layers at the shapes of DeepSeek-V4-Flash, by kind, and their steps: random weights, written
//! and loaded here.

use half::bf16;
use ringfence_cuda::ops::Row;
use ringfence_cuda::{BuildError, CudaEngine, CudaSettings};
use ringfence_engine::engine::{Chunk, Engine, Output, SessionShape};
use ringfence_engine::ids::{Position, SessionId, TokenId, WireEncoding};
use ringfence_engine::model::{Checkpoint, synth};

use crate::support::{Bench, folders};

/// Positions in front of the measured ones: more slots than the indexer picks.
const POSITIONS: usize = 4_100;

/// What a layer is, and where one lies in the model.
const KINDS: [(&str, &str); 3] = [("window", "0:1"), ("ratio 128", "3:4"), ("ratio 4", "4:5")];

/// Times every kind of layer.
///
/// # Errors
/// An engine's words.
pub(crate) fn run(bench: &Bench) -> Result<(), String> {
    for (kind, range) in KINDS.into_iter().filter(|(kind, _)| bench.wants(&format!("layers {kind}"))) {
        let folder = std::env::temp_dir().join(format!("ringfence-synth-{}", range.replace(':', "-")));
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let range = range.parse().map_err(|_| "a range")?;
        let plan = synth::Plan { config: synth::V4_FLASH, range, seed: 1, threads };
        synth::write(&plan, &folder).map_err(|e| e.to_string())?;
        let checkpoint = Checkpoint::open_dir(&folder).map_err(|e| e.to_string())?;
        let settings = CudaSettings {
            max_context: Some(32_768),
            cuda_folders: folders(),
            kernel_cache: Some(std::env::temp_dir().join("ringfence-kernels")),
            ..CudaSettings::default()
        };
        let mut engine = CudaEngine::new(&checkpoint, range, &settings).map_err(|e: BuildError| e.to_string())?;
        let removed = std::fs::remove_dir_all(&folder);
        one(kind, &mut engine)?;
        removed.map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Some bits for a seed.
fn noise(n: usize) -> f32 {
    let bits = (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 2.0
}

/// The tokens of a session, one like the other's but for its place.
fn token(session: usize, pos: usize) -> TokenId {
    TokenId(((session * 7_919 + pos * 104_729) % 129_280) as u32)
}

fn one(kind: &str, engine: &mut CudaEngine) -> Result<(), String> {
    let facts = engine.facts().clone();
    let width = facts.hc * facts.dim;
    let (graph_bytes, graphs) = engine.graphs();
    println!("{kind}: {} bytes of weights, {graphs} graphs of {graph_bytes} bytes", facts.weight_bytes);
    let shape = SessionShape {
        positions: 8_192,
        reach: 512,
        boundaries: Vec::new(),
        encoding: WireEncoding::Fp8,
        drafting: false,
    };
    let sessions = 16;
    let mut out = Output::default();
    for session in 0..sessions {
        engine.open(SessionId(session as u64), &shape).map_err(|e| e.to_string())?;
        let to = if session == 0 { POSITIONS } else { 2_200 };
        for pos in (0..to).step_by(512) {
            let ids: Vec<TokenId> = (pos..(pos + 512).min(to)).map(|pos| token(session, pos)).collect();
            let hidden: Vec<bf16> =
                (0..ids.len() * width).map(|i| bf16::from_f32(noise(session * 77 + pos * width + i))).collect();
            let chunk = Chunk {
                session: SessionId(session as u64),
                pos: Position(pos as u32),
                ids: &ids,
                hidden: (!facts.is_head()).then_some(hidden.as_slice()),
                logits_from: Position(u32::MAX),
            };
            engine.forward(&[chunk], &mut out).map_err(|e| e.to_string())?;
        }
    }
    for m in [1, 2, 4, 6, 8, 16] {
        // Positions of one session, as a verified draft; then of as many sessions.
        let verified: Vec<Row> = (0..m).map(|k| row(0, POSITIONS + k)).collect();
        let batch: Vec<Row> = (0..m).map(|session| row(session, 2_200)).collect();
        for (what, rows) in [("one session", &verified), ("as many sessions", &batch)] {
            if m == 1 && rows == &batch {
                continue;
            }
            let times = engine.time_layer(0, rows).map_err(|e| e.to_string())?;
            let steps: Vec<String> = times[1..].iter().map(|t| format!("{} {:.1}", t.what, t.us)).collect();
            println!("{kind}, {m} positions of {what}: {:.1} µs ({})", times[0].us, steps.join(", "));
        }
    }
    Ok(())
}

fn row(session: usize, pos: usize) -> Row {
    Row { slot: session as i32, pos: pos as i32, id: token(session, pos).0 as i32, spare: 0 }
}
