//! `ringctl`: starts, asks and measures rings.

use std::process::ExitCode;

use clap::Parser;
use ringfence::cli::{console, ringctl, version};

/// Pipeline-ring inference of very large models on volunteers' GPUs
#[derive(Debug, Parser)]
#[command(name = "ringctl", version = version(), propagate_version = true)]
struct Args {
    #[command(subcommand)]
    command: ringctl::Command,
}

fn main() -> ExitCode {
    let args = match console::arguments::<Args>(ringctl::speaks_to_program()) {
        Ok(args) => args,
        Err(status) => return status,
    };
    console::start_log();
    ringctl::run(&args.command)
}
