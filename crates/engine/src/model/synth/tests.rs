//! What is written reads back as a checkpoint, the same bytes for the same seed.

use super::*;
use crate::engine::cpu::{CpuEngine, CpuSettings};
use crate::engine::{Chunk, Engine, Output, SessionShape};
use crate::ids::{Position, SessionId, TokenId, WireEncoding};

/// A configuration with every kind of layer, at sizes that a test can afford.
fn small() -> String {
    let bytes = Checkpoint::tiny().unwrap().read("config.json").unwrap().unwrap();
    String::from_utf8(bytes).unwrap()
}

fn plan(config: &str, threads: usize, range: (u16, u16)) -> Plan<'_> {
    Plan { config, range: LayerRange::new(range.0, range.1).unwrap(), seed: 7, threads }
}

#[test]
fn the_real_sizes_are_those_of_the_release() {
    let plan = plan(V4_FLASH, 1, (40, 43));
    // Three layers and three draft stages of 256 experts, the embedding and the head.
    let gib = bytes(&plan).unwrap() as f64 / f64::from(1 << 30);
    assert!((20.0..25.0).contains(&gib), "{gib} GiB");
    let whole = Plan { range: LayerRange::new(0, 43).unwrap(), ..plan };
    let gib = bytes(&whole).unwrap() as f64 / f64::from(1 << 30);
    assert!((150.0..166.0).contains(&gib), "{gib} GiB");
}

#[test]
fn the_same_seed_gives_the_same_bytes_with_any_threads() {
    let config = small();
    let (one, three) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let written = write(&plan(&config, 1, (0, 3)), one.path()).unwrap();
    assert_eq!(write(&plan(&config, 3, (0, 3)), three.path()).unwrap(), written);
    for entry in std::fs::read_dir(one.path()).unwrap() {
        let name = entry.unwrap().file_name();
        let read = |dir: &Path| std::fs::read(dir.join(&name)).unwrap();
        assert!(read(one.path()) == read(three.path()), "{name:?}");
    }
    let other = Plan { seed: 8, ..plan(&config, 2, (0, 3)) };
    write(&other, three.path()).unwrap();
    let shard = "model-00002-of-00004.safetensors";
    assert!(std::fs::read(one.path().join(shard)).unwrap() != std::fs::read(three.path().join(shard)).unwrap());
}

/// A range with its neighbours written apart computes finite values from end to end.
#[test]
fn what_is_written_runs_on_the_engine() {
    let config = small();
    let layers = ModelConfig::parse("config.json", config.as_bytes()).unwrap().layers;
    let mut hidden = Vec::new();
    for range in [(0, 3), (3, layers)] {
        let dir = tempfile::tempdir().unwrap();
        write(&plan(&config, 2, range), dir.path()).unwrap();
        let checkpoint = Checkpoint::open_dir(dir.path()).unwrap();
        let range = LayerRange::new(range.0, range.1).unwrap();
        checkpoint.weights(range).unwrap().check_values().unwrap();
        let mut engine = CpuEngine::new(&checkpoint, range, &CpuSettings::default()).unwrap();
        let shape = SessionShape {
            positions: 64,
            reach: 64,
            boundaries: Vec::new(),
            encoding: WireEncoding::Bf16,
            drafting: range.hi() == layers,
        };
        engine.open(SessionId(1), &shape).unwrap();
        let ids: Vec<TokenId> = (0..40).map(TokenId).collect();
        let mut out = Output::default();
        let chunk = Chunk {
            session: SessionId(1),
            pos: Position(0),
            ids: &ids,
            hidden: (range.lo() > 0).then_some(hidden.as_slice()),
            logits_from: Position(39),
        };
        engine.forward(&[chunk], &mut out).unwrap();
        if range.hi() == layers {
            assert!(out.logits.iter().all(|logit| logit.is_finite()));
            let spread = out.logits.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
            assert!((0.1..100.0).contains(&spread), "largest logit {spread}");
            engine.draft(SessionId(1), Position(39), TokenId(3)).unwrap();
        }
        hidden = out.hidden;
    }
}

#[test]
fn a_range_that_the_model_lacks_is_refused() {
    let config = small();
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(write(&plan(&config, 1, (0, 40)), dir.path()), Err(ModelError::Range { .. })));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was written");
}
