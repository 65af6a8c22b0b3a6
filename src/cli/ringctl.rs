//! `ringctl`: everything in one program, so that it can start a ring of itself.

use std::process::ExitCode;

use clap::Subcommand;

use crate::api::score::ScoreReport;
use crate::cli::churn::{self, ChurnArgs};
use crate::cli::console::{self, Failure, Signals};
use crate::cli::coordinator::{self, CoordinatorArgs};
use crate::cli::demo::{self, DemoArgs};
use crate::cli::generate::{self, GenerateArgs};
use crate::cli::ring::{LocalRing, LocalRingOptions, with_ring};
use crate::cli::score::{self, ScoreArgs, score_over_http};
use crate::cli::sim::{self, SimArgs};
use crate::cli::stage::{self, StageArgs};
use crate::cli::synth::{self, SynthArgs};
use crate::cli::tiling::tile_plain;
use crate::cli::wan::{self, WanArgs};
use crate::ids::TokenId;
use crate::model::Checkpoint;

/// Commands of `ringctl`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a ring on this machine, stream a text through it and prove the text right
    Demo(DemoArgs),
    /// Hold a layer range and serve it
    Stage(StageArgs),
    /// Keep a ring whole and serve it over HTTP
    Coordinator(CoordinatorArgs),
    /// Stream text from a running coordinator
    Generate(GenerateArgs),
    /// Score a token sequence on a running coordinator, or on a ring started for it
    Score(ScoreArgs),
    /// Strike stages while text streams, on a ring started for it or a running one, and prove the text right
    Churn(ChurnArgs),
    /// Run the simulator: the whole ring under faults, in one thread and virtual time, one seed a schedule
    Sim(SimArgs),
    /// Write a checkpoint of random weights at a model's true shapes, to measure without its release
    Synth(SynthArgs),
    /// Put an emulated wide-area network in front of processes, and change it while they talk
    Wan(WanArgs),
}

/// Whether this process was asked for a command that a program may have started, and listens to.
#[must_use]
pub fn speaks_to_program() -> bool {
    std::env::args_os().nth(1).is_some_and(|command| command == "stage" || command == "coordinator")
}

/// Runs a command.
pub fn run(command: &Command) -> ExitCode {
    let mut out = std::io::stdout();
    match command {
        Command::Demo(args) => demo::run(args),
        Command::Stage(args) => stage::run(args),
        Command::Coordinator(args) => coordinator::run(args),
        Command::Churn(args) => churn::run(args),
        Command::Sim(args) => sim::run(args),
        Command::Wan(args) => wan::run(args),
        Command::Synth(args) => console::exit_quietly(synth::run(args)),
        Command::Generate(args) => {
            console::exit_quietly(generate::run(args, &mut out).map_err(Failure::of("generate")))
        }
        Command::Score(args) => {
            let mut local = |args: &ScoreArgs, ids: &[TokenId]| score_locally(args, ids).map_err(Into::into);
            console::exit_quietly(score::run(args, &mut out, &mut local).map_err(Failure::of("score")))
        }
    }
}

/// Scores ids on a ring that it starts and stops.
fn score_locally(args: &ScoreArgs, ids: &[TokenId]) -> Result<ScoreReport, Failure> {
    let checkpoint = Checkpoint::open(&args.model).map_err(Failure::of("model"))?;
    let config = checkpoint.config();
    let taps = config.draft.as_ref().map(|draft| draft.targets.as_slice());
    let cut = tile_plain(config.layers, args.stages, taps).map_err(Failure::of("config"))?;
    let wire = args.wire.unwrap_or_default();
    let options = LocalRingOptions {
        model: args.model.clone(),
        cut,
        spares: Vec::new(),
        devices: Vec::new(),
        log: false,
        own_hops: false,
        wire,
        in_flight: None,
        drafts: None,
        threads: 1,
        wan: None,
        seed: 0,
    };
    let ids = ids.to_vec();
    let runtime = console::runtime()?;
    let scored = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let score = async |ring: &LocalRing| {
            let url = ring.url().to_owned();
            let asked = tokio::task::spawn_blocking(move || score_over_http(&url, &ids, score::TOP, Some(wire))).await;
            asked.map_err(Failure::of("client"))?.map_err(Failure::of("client"))
        };
        with_ring(&options, &mut signals, score).await
    });
    // A client that still waits is not waited for.
    runtime.shutdown_background();
    scored
}
