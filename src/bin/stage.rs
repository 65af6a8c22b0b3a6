//! `stage`: a volunteer holds a layer range and serves it.

use std::process::ExitCode;

use clap::Parser;
use ringfence::cli::{console, stage, version};

/// Holds a layer range of a model and serves it to a ring
#[derive(Debug, Parser)]
#[command(name = "stage", version = version())]
struct Args {
    #[command(flatten)]
    stage: stage::StageArgs,
}

fn main() -> ExitCode {
    let args = match console::arguments::<Args>(true) {
        Ok(args) => args,
        Err(status) => return status,
    };
    console::start_log();
    stage::run(&args.stage)
}
