//! Whole-ring speed against one process, in one run: `cargo bench --bench ring`.
//!
//! Three stages and a coordinator in this process over links in memory, with no delay and with
//! 5 ms a hop, plain and pipelined; the same request undrafted in one engine. Medians of a few
//! interleaved runs, and ratios, since machines are shared.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench prints, and stops at the first surprise")]

#[path = "../tests/ring/rig.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod rig;

use std::time::Duration;

use ringfence::clock;
use ringfence::config::CoordinatorSettings;
use ringfence::coordinator::job::{JobStats, Mode};
use ringfence::engine::solo;
use ringfence::ids::WireEncoding;

use rig::{Rig, engine, greedy, prompt, quick, ranges, request, tiny};

/// Runs of each kind.
const RUNS: usize = 5;
/// New tokens a run.
const TOKENS: u32 = 96;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Tokens per second of one undrafted process.
fn alone() -> f64 {
    let checkpoint = tiny();
    let mut engine = engine(&checkpoint, checkpoint.all_layers());
    let prompt: Vec<_> = prompt(24).into_iter().map(ringfence::ids::TokenId).collect();
    let ask = |max_new| solo::Request {
        prompt: &prompt,
        max_new,
        sampling: greedy(),
        eos: &[],
        boundaries: vec![2, 4],
        encoding: WireEncoding::Fp8,
        chunk: 64,
    };
    let mut timed = |max_new| {
        let begun = clock::now();
        solo::generate(&mut engine, &ask(max_new)).unwrap();
        clock::now().duration_since(begun).as_secs_f64()
    };
    let first = timed(1);
    f64::from(TOKENS - 1) / (timed(TOKENS) - first)
}

async fn ring(delay: Duration, mode: Mode) -> JobStats {
    let rig = Rig::new(&ranges("0:2 2:4 4:7"), CoordinatorSettings { ..quick() }).await;
    let mut peers = vec![rig.coordinator_peer];
    peers.extend(rig.stages.iter().map(|stage| stage.peer));
    for (at, from) in peers.iter().enumerate() {
        for to in &peers[at + 1..] {
            rig.network.set_delay(*from, *to, delay);
        }
    }
    let run = rig.run(request(&prompt(24), TOKENS, mode)).await;
    let stats = run.stats().clone();
    rig.end().await;
    stats
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let kinds = [(0, Mode::Plain), (0, Mode::Pipelined), (5, Mode::Plain), (5, Mode::Pipelined)];
    let mut solo = Vec::new();
    let mut runs: Vec<Vec<JobStats>> = vec![Vec::new(); kinds.len()];
    for _ in 0..RUNS {
        solo.push(alone());
        for (at, (delay, mode)) in kinds.iter().enumerate() {
            runs[at].push(runtime.block_on(ring(Duration::from_millis(*delay), *mode)));
        }
    }
    let solo = median(solo);
    println!("{TOKENS} tokens, medians of {RUNS} interleaved runs, three stages, fp8 wire");
    println!("{:<28} {:>10} {:>10} {:>8} {:>14}", "", "tokens/s", "vs solo", "ttft ms", "accept length");
    println!("{:<28} {solo:>10.1} {:>10.2} {:>8} {:>14}", "one process, undrafted", 1.0, "-", "-");
    for ((delay, mode), runs) in kinds.iter().zip(&runs) {
        let of = |read: fn(&JobStats) -> f64| median(runs.iter().map(read).collect());
        let speed = of(|stats| stats.tokens_per_second);
        let length = runs[0].acceptance_length.map_or_else(|| "-".to_owned(), |length| format!("{length:.2}"));
        let name = format!("ring, {delay} ms a hop, {mode:?}");
        println!("{name:<28} {speed:>10.1} {:>10.2} {:>8.1} {length:>14}", speed / solo, of(|stats| stats.ttft_ms));
    }
    let speed = |at: usize| median(runs[at].iter().map(|stats| stats.tokens_per_second).collect());
    println!("pipelined / plain: {:.2} without delay, {:.2} with 5 ms a hop", speed(1) / speed(0), speed(3) / speed(2));
    assert!(speed(3) > speed(2), "where a hop costs time, pipelining must win");
}
