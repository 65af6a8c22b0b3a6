//! Reads golden files and measures distances.

use half::bf16;
use ringfence_engine::engine::cpu::{CpuEngine, CpuSettings};
use ringfence_engine::engine::{Engine, SessionShape};
use ringfence_engine::ids::{SessionId, TokenId, WireEncoding};
use ringfence_engine::model::Checkpoint;
use safetensors::SafeTensors;

/// The session of every golden test.
pub(crate) const SESSION: SessionId = SessionId(1);

/// One golden file.
pub(crate) struct Golden {
    pub(crate) name: String,
    bytes: Vec<u8>,
}

impl Golden {
    pub(crate) fn open(name: &str) -> Self {
        let path = format!("{}/tests/golden/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Self { name: name.to_owned(), bytes: std::fs::read(path).unwrap() }
    }

    fn raw(&self, tensor: &str) -> (Vec<usize>, Vec<u8>) {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(tensor).unwrap_or_else(|_| panic!("{}: no {tensor}", self.name));
        (view.shape().to_vec(), view.data().to_vec())
    }

    pub(crate) fn shape(&self, tensor: &str) -> Vec<usize> {
        self.raw(tensor).0
    }

    pub(crate) fn bf16(&self, tensor: &str) -> Vec<bf16> {
        self.raw(tensor).1.chunks_exact(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub(crate) fn f32(&self, tensor: &str) -> Vec<f32> {
        self.raw(tensor).1.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub(crate) fn i32(&self, tensor: &str) -> Vec<i32> {
        self.raw(tensor).1.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub(crate) fn ids(&self, tensor: &str) -> Vec<TokenId> {
        self.i32(tensor).into_iter().map(|id| TokenId(u32::try_from(id).unwrap())).collect()
    }
}

/// The whole tiny model with one drafting session of 512 positions open.
pub(crate) fn engine(threads: usize) -> CpuEngine {
    let checkpoint = Checkpoint::tiny().unwrap();
    let settings = CpuSettings { threads, max_context: Some(1024), ..CpuSettings::default() };
    let mut engine = CpuEngine::new(&checkpoint, checkpoint.all_layers(), &settings).unwrap();
    let shape = SessionShape {
        positions: 512,
        reach: 300,
        boundaries: Vec::new(),
        encoding: WireEncoding::Bf16,
        drafting: true,
    };
    engine.open(SESSION, &shape).unwrap();
    engine
}

pub(crate) fn wide(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

/// Relative L2 distances of a group of rows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Distance {
    squares: f64,
    norm: f64,
    rows: Vec<f64>,
}

impl Distance {
    /// Adds rows of `width` values.
    pub(crate) fn add(&mut self, ours: &[f32], golden: &[f32], width: usize) {
        assert_eq!(ours.len(), golden.len());
        for (a, b) in ours.chunks_exact(width).zip(golden.chunks_exact(width)) {
            let squares: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let norm: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
            self.squares += squares;
            self.norm += norm;
            self.rows.push((squares / norm.max(1e-30)).sqrt());
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.squares += other.squares;
        self.norm += other.norm;
        self.rows.extend(&other.rows);
    }

    pub(crate) fn total(&self) -> f64 {
        (self.squares / self.norm.max(1e-30)).sqrt()
    }

    pub(crate) fn worst(&self) -> f64 {
        self.rows.iter().copied().fold(0.0, f64::max)
    }

    pub(crate) fn count(&self) -> usize {
        self.rows.len()
    }

    /// Share of rows within `bound`.
    pub(crate) fn share(&self, bound: f64) -> f64 {
        self.rows.iter().filter(|&&row| row <= bound).count() as f64 / self.rows.len().max(1) as f64
    }
}
