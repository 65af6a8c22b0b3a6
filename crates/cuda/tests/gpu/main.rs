//! Every kernel against the CPU engine, bit by bit: `gpu [FILTER…]`.
//!
//! One binary for a machine with a GPU; it needs nothing beside it but `models/`. Where no GPU is
//! found it says so and succeeds.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program's report")]
#![allow(clippy::disallowed_methods, reason = "a program of its own reads its environment and clock")]

mod attend;
mod engine;
mod experts;
mod products;
mod rows;
mod support;

use std::process::ExitCode;
use std::time::Instant;

use support::{Gpu, Test};

fn main() -> ExitCode {
    let filters: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(why) => {
            println!("no GPU, nothing was run: {why}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{:?}", gpu.device.facts());
    let tests: Vec<Test> = [products::TESTS, experts::TESTS, rows::TESTS, attend::TESTS, engine::TESTS].concat();
    let mut failed = 0;
    for (name, test) in tests {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter.as_str())) {
            continue;
        }
        let start = Instant::now();
        match test(&gpu) {
            Ok(()) => println!("ok   {name} ({:.1} s)", start.elapsed().as_secs_f64()),
            Err(why) => {
                failed += 1;
                println!("FAIL {name}: {why}");
            }
        }
    }
    println!("{failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
