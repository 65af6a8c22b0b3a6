//! `coordinator`: keeps a ring whole and serves it over HTTP.

use std::process::ExitCode;

use clap::Parser;
use ringfence::cli::{console, coordinator, version};

/// Keeps a ring of stages whole and serves it over HTTP
#[derive(Debug, Parser)]
#[command(name = "coordinator", version = version())]
struct Args {
    #[command(flatten)]
    coordinator: coordinator::CoordinatorArgs,
}

fn main() -> ExitCode {
    let args = match console::arguments::<Args>(true) {
        Ok(args) => args,
        Err(status) => return status,
    };
    console::start_log();
    coordinator::run(&args.coordinator)
}
