//! The simulator: seeds hold every invariant, planted bugs are found, a seed is always the same run.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::sync::atomic::{AtomicU64, Ordering};

use ringfence::sim::{Failure, Invariant, Plant, run};

/// Runs seeds on every core; the failure with the lowest seed.
fn run_all(seeds: u64, plant: Option<Plant>) -> Option<Box<Failure>> {
    let next = AtomicU64::new(0);
    let first = || {
        while let Some(seed) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds) {
            if let Err(failure) = run(seed, plant) {
                next.store(seeds, Ordering::Relaxed);
                return Some(failure);
            }
        }
        None
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(first)).collect();
        let found = workers.into_iter().filter_map(|worker| worker.join().unwrap());
        found.min_by_key(|failure| failure.seed)
    })
}

#[test]
fn hundreds_of_seeds_hold_every_invariant() {
    if let Some(failure) = run_all(500, None) {
        panic!("{failure}");
    }
}

#[test]
fn every_planted_bug_is_found() {
    for plant in Plant::ALL {
        let failure = run_all(1_000, Some(plant));
        let failure = failure.unwrap_or_else(|| panic!("{} is not found", plant.name()));
        assert!(failure.command().ends_with(&format!("--first-seed {} --plant {}", failure.seed, plant.name())));
        // It is the bug that is found: without it, the seed holds.
        assert!(run(failure.seed, None).is_ok(), "{failure}");
    }
}

/// A panic ends neither the other seeds nor the program: it is a failure with its seed and command.
#[test]
fn a_panic_is_a_failure_of_its_seed() {
    let failure = run_all(1_000, Some(Plant::PanicAtRebuild)).unwrap();
    assert_eq!(failure.invariant, Invariant::Process);
    assert_eq!(failure.why, "a process panicked: the planted panic");
    assert!(!failure.story.is_empty() && failure.to_string().contains(&failure.command()), "{failure}");
    assert!(run(failure.seed, None).is_ok(), "the next run of the thread is as any other");
}

#[test]
fn one_seed_is_always_the_same_run() {
    for seed in 0..10 {
        assert_eq!(run(seed, None), run(seed, None), "seed {seed}");
    }
}
