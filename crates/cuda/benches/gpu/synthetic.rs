//! Checkpoints of true shapes and random weights, written once a run and shared by the measurements.

use std::path::{Path, PathBuf};
use std::time::Instant;

use ringfence_engine::ids::LayerRange;
use ringfence_engine::model::{Checkpoint, synth};

/// A folder with a checkpoint that goes with the value.
#[derive(Debug)]
pub(crate) struct Synthetic {
    folder: PathBuf,
    range: LayerRange,
}

impl Synthetic {
    /// Writes the range, as `ringctl synth --family v4-flash --layers RANGE` does, below the system's
    /// folder for temporary files.
    ///
    /// # Errors
    /// The words of what failed.
    pub(crate) fn write(range: &str) -> Result<Self, String> {
        let start = Instant::now();
        let folder =
            std::env::temp_dir().join(format!("ringfence-synth-{}-{}", range.replace(':', "-"), std::process::id()));
        let range = range.parse().map_err(|_| "a range")?;
        let made = Self { folder, range };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let plan = synth::Plan { config: synth::V4_FLASH, range, seed: 1, threads };
        let written = synth::write(&plan, &made.folder).map_err(|e| e.to_string())?;
        let seconds = start.elapsed().as_secs_f64();
        let gib = written.bytes as f64 / f64::from(1 << 30);
        println!(
            "layers {range}: {} tensors, {gib:.2} GiB written in {seconds:.1} s by {threads} threads",
            written.tensors
        );
        Ok(made)
    }

    /// The checkpoint.
    ///
    /// # Errors
    /// The model's words.
    pub(crate) fn open(&self) -> Result<Checkpoint, String> {
        Checkpoint::open_dir(&self.folder).map_err(|e| e.to_string())
    }

    /// The layers.
    pub(crate) fn range(&self) -> LayerRange {
        self.range
    }
}

impl Drop for Synthetic {
    fn drop(&mut self) {
        remove(&self.folder);
    }
}

fn remove(folder: &Path) {
    if let Err(why) = std::fs::remove_dir_all(folder) {
        println!("{} is left behind: {why}", folder.display());
    }
}
