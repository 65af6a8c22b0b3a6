//! Every kernel against the CPU engine, bit by bit: `gpu [FILTER…]`, parts of names, or `kernels` for those
//! that test kernels one by one.
//!
//! One binary for a machine with a GPU; it needs nothing beside it but `models/` (in the repository, where
//! Cargo runs it). Where no GPU is found it says so and succeeds; `tests/emulator` stands for one.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program's report")]
#![allow(clippy::disallowed_methods, reason = "a program of its own reads its environment and clock")]

mod attend;
mod device;
mod engine;
mod experts;
mod goldens;
mod history;
mod long;
mod products;
mod rows;
mod support;

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use support::Gpu;

fn main() -> ExitCode {
    let filters: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    if let Some(package) = std::env::var_os("CARGO_MANIFEST_DIR")
        && let Err(why) = std::env::set_current_dir(Path::new(&package).join("../.."))
    {
        eprintln!("the repository's folder is not there: {why}");
        return ExitCode::FAILURE;
    }
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(why) => {
            println!("no GPU, nothing was run: {why}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{:?}", gpu.device.facts());
    let groups = [
        ("kernels", products::TESTS),
        ("kernels", experts::TESTS),
        ("kernels", rows::TESTS),
        ("kernels", attend::TESTS),
        ("device", device::TESTS),
        ("engine", engine::TESTS),
        ("history", history::TESTS),
        ("long", long::TESTS),
        ("goldens", goldens::TESTS),
    ];
    let (begun, mut run, mut failed) = (Instant::now(), 0, 0);
    let all = groups.iter().flat_map(|(group, tests)| tests.iter().map(move |test| (*group, *test)));
    for (group, (name, test)) in all {
        let wanted = |filter: &String| filter == group || name.contains(filter.as_str());
        if !filters.is_empty() && !filters.iter().any(wanted) {
            continue;
        }
        run += 1;
        let start = Instant::now();
        match test(&gpu) {
            Ok(()) => println!("ok   {name} ({:.1} s)", start.elapsed().as_secs_f64()),
            Err(why) => {
                failed += 1;
                println!("FAIL {name}: {why}");
            }
        }
    }
    println!("{run} run, {failed} failed, {:.1} s", begun.elapsed().as_secs_f64());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
