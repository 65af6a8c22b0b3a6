//! Times of the kernels on a GPU: `gpu [FILTER…]`.
//!
//! One binary for a machine with a GPU. Times are medians of graph replays over weights that no
//! cache holds, beside the copy bandwidth of the same run.

#![allow(clippy::print_stdout, reason = "a program's report")]
#![allow(clippy::disallowed_methods, reason = "a program of its own reads its environment")]

mod blocks;
mod experts;
mod layers;
mod peak;
mod prefill;
mod products;
mod support;
mod synthetic;
mod torch;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use support::Bench;

/// Measures and prints.
type Part = fn(&Bench) -> Result<(), Box<dyn Error>>;

fn main() -> ExitCode {
    let filters: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let bench = match Bench::open(filters) {
        Ok(bench) => bench,
        Err(why) => {
            println!("no GPU, nothing was measured: {why}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{:?}, copy {:.0} GB/s", bench.device.facts(), bench.copy);
    let parts: [(&str, Part); 5] = [
        ("products", |bench| Ok(products::run(bench)?)),
        ("experts", |bench| Ok(experts::run(bench)?)),
        ("prefill", prefill::run),
        ("layers", |bench| Ok(layers::run(bench)?)),
        ("blocks", |bench| Ok(blocks::run(bench)?)),
    ];
    let mut done = ExitCode::SUCCESS;
    for (what, part) in parts {
        let start = Instant::now();
        if let Err(why) = part(&bench) {
            println!("FAIL {what}: {why}");
            done = ExitCode::FAILURE;
        }
        println!("{what}: {:.1} s", start.elapsed().as_secs_f64());
    }
    done
}
