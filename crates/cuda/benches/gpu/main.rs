//! Times of the kernels on a GPU: `gpu [FILTER…]`.
//!
//! One binary for a machine with a GPU. Times are medians of graph replays over weights that no
//! cache holds, beside the copy bandwidth of the same run.

#![allow(clippy::print_stdout, reason = "a program's report")]
#![allow(clippy::disallowed_methods, reason = "a program of its own reads its environment")]

mod experts;
mod layers;
mod products;
mod support;

use std::process::ExitCode;

use ringfence_cuda::CudaError;
use support::Bench;

fn main() -> ExitCode {
    let filters: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let bench = match Bench::open(filters) {
        Ok(bench) => bench,
        Err(why) => {
            println!("no GPU, nothing was measured: {why}");
            return ExitCode::SUCCESS;
        }
    };
    match all(&bench) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("FAIL {why}");
            ExitCode::FAILURE
        }
    }
}

fn all(bench: &Bench) -> Result<(), CudaError> {
    println!("{:?}, copy {:.0} GB/s", bench.device.facts(), bench.copy);
    products::run(bench)?;
    experts::run(bench)?;
    if let Err(why) = layers::run(bench) {
        println!("FAIL layers: {why}");
    }
    Ok(())
}
