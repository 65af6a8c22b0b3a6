//! `ringctl synth`: a checkpoint of random weights at true shapes, to measure without a release.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::cli::console::{self, Failure};
use crate::ids::LayerRange;
use crate::model::synth::{self, Plan, V4_FLASH};

/// Families whose shapes are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Family {
    /// DeepSeek-V4-Flash with its three draft stages: 43 layers, 256 experts
    V4Flash,
}

impl Family {
    /// Its `config.json`.
    fn config(self) -> &'static str {
        match self {
            Self::V4Flash => V4_FLASH,
        }
    }
}

/// Options of `ringctl synth`.
#[derive(Debug, Clone, Args)]
pub struct SynthArgs {
    /// Whose shapes
    #[arg(long, value_enum, default_value_t = Family::V4Flash)]
    pub family: Family,
    /// Layers, half-open; the last ones come with the head, all targets of the drafter with the drafter
    #[arg(long, value_name = "LO:HI")]
    pub layers: LayerRange,
    /// Directory to write, made if it is missing
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Same seed, same bytes
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Threads that write
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
}

/// Runs it.
///
/// # Errors
/// [`Failure`] names the range, or the file and the system's error.
pub fn run(args: &SynthArgs) -> Result<(), Failure> {
    let plan =
        Plan { config: args.family.config(), range: args.layers, seed: args.seed, threads: usize::from(args.threads) };
    let bytes = synth::bytes(&plan).map_err(Failure::of("model"))?;
    console::note(&format!("writing {:.1} GiB of random weights to {}", gib(bytes), args.out.display()));
    let written = synth::write(&plan, &args.out).map_err(Failure::of("model"))?;
    console::line(&format!(
        "{}: layers {}, {} tensors in {} shards, {:.1} GiB, seed {}",
        args.out.display(),
        args.layers,
        written.tensors,
        written.shards,
        gib(written.bytes),
        args.seed,
    ));
    Ok(())
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
