//! The device that a stage computes on: its name on the command line, and an engine on it.

use std::str::FromStr;

use ringfence_cuda::{BuildError, CudaEngine, CudaSettings, load};
use serde_json::json;

use crate::cli::console::{self, Failure};
use crate::config;
use crate::engine::{Engine, SessionShape};
use crate::ids::{LayerRange, WireEncoding};
use crate::model::Checkpoint;

/// Reach that a session is planned with: prefill chunks over a ring of some stages.
const TYPICAL_REACH: u32 = 512;

/// Where a stage computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceName {
    /// On the processor.
    Cpu,
    /// On an NVIDIA GPU, by its ordinal.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        match (text, ordinal) {
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err(Failure::new("device", format!("--device {text}: expected cpu or cuda:N, like cuda:0"))),
        }
    }
}

/// What a stage asks of a GPU.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// The device.
    pub ordinal: usize,
    /// The layers.
    pub range: LayerRange,
    /// Longest session in positions.
    pub max_context: Option<u32>,
    /// Sessions held at once.
    pub sessions: u32,
}

impl Wanted {
    fn settings(self) -> CudaSettings {
        CudaSettings {
            device: self.ordinal,
            max_context: self.max_context,
            max_state_bytes: u64::MAX,
            cuda_folders: config::cuda_folders(),
            kernel_cache: config::kernel_cache(),
            ..CudaSettings::default()
        }
    }

    fn failed(self, error: &BuildError) -> Failure {
        let ordinal = self.ordinal;
        match error {
            BuildError::Setting { .. } => Failure::new("config", error),
            BuildError::Model(_) => Failure::new("model", error),
            BuildError::Cuda(why) => Failure::new(
                "device",
                format!("--device cuda:{ordinal}: {why}; --device cpu computes on the processor"),
            ),
        }
    }

    /// Looks whether the device and the compiler are there; gives the device's name and free bytes.
    ///
    /// # Errors
    /// A failure that says what was looked for and found.
    pub fn probe(self) -> Result<(String, u64), Failure> {
        CudaEngine::probe(&self.settings()).map_err(|error| self.failed(&error.into()))
    }

    /// An engine with room for the sessions.
    ///
    /// # Errors
    /// A failure that names what is missing, or both sizes.
    pub fn engine(self, checkpoint: &Checkpoint) -> Result<CudaEngine, Failure> {
        let engine = CudaEngine::new(checkpoint, self.range, &self.settings()).map_err(|error| self.failed(&error))?;
        let facts = engine.facts();
        let shape = SessionShape {
            positions: facts.max_context,
            reach: TYPICAL_REACH,
            boundaries: Vec::new(),
            encoding: WireEncoding::Fp8,
            drafting: facts.draft_block > 0,
        };
        let each = engine.state_bytes(&shape);
        let needed = each.saturating_mul(u64::from(self.sessions));
        let free = engine.free_bytes().map_err(|error| self.failed(&error.into()))?;
        if needed > free {
            let sessions = self.sessions;
            let why = format!(
                "--device cuda:{}: {sessions} sessions of {each} bytes need {needed} bytes, {free} are free on the device: choose fewer layers, a shorter --max-context or a lower --max-sessions",
                self.ordinal
            );
            return Err(Failure::new("memory", why));
        }
        let (bytes, count) = engine.graphs();
        let budget = self.settings().graph_bytes;
        let weights = facts.weight_bytes;
        console::note(&format!(
            "{}: {weights} bytes of weights, {count} graphs of {bytes} bytes ({budget} at most), {free} bytes free for sessions",
            facts.device
        ));
        Ok(engine)
    }

    /// Prints what the device holds, tensor by tensor, with the digests of the official bytes.
    ///
    /// # Errors
    /// As [`Wanted::engine`].
    pub fn inventory(self, checkpoint: &Checkpoint) -> Result<(), Failure> {
        let engine = self.engine(checkpoint)?;
        let opened = checkpoint.weights(self.range).map_err(Failure::of("model"))?;
        let lines = load::inventory(&opened, engine.weights().held()).map_err(|error| self.failed(&error.into()))?;
        for line in &lines {
            let held = &line.held;
            console::line(&format!(
                "{}",
                json!({
                    "tensor": held.name, "form": held.form, "bytes": held.bytes,
                    "stored_bytes": line.stored, "sha256": line.sha256,
                })
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        assert_eq!("cpu".parse::<DeviceName>().unwrap(), DeviceName::Cpu);
        assert_eq!("cuda:3".parse::<DeviceName>().unwrap(), DeviceName::Cuda(3));
        for text in ["cuda", "cuda:", "cuda:x", "cuda:-1", "gpu", ""] {
            assert!(text.parse::<DeviceName>().is_err(), "{text}");
        }
    }
}
