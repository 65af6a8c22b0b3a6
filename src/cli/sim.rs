//! `ringctl sim`: runs seeds of the simulator on every core, and says how to see a failure again.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use crate::cli::{console, receipt};
use crate::clock;
use crate::sim::{self, Failure, Plant, Summary};

/// Exit status where an invariant does not hold.
const BROKEN_STATUS: u8 = 1;

/// Exit status of options that can't be served.
const USAGE_STATUS: u8 = 2;

/// Options of `ringctl sim`.
#[derive(Debug, Clone, Args)]
pub struct SimArgs {
    /// How many seeds are run
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub seeds: u64,
    /// The first of them
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub first_seed: u64,
    /// Runs with a planted bug, which must be found; `list` prints the names
    #[arg(long, value_name = "NAME")]
    pub plant: Option<String>,
    /// Of a failure, this many events are shown, where one seed is run
    #[arg(long, value_name = "N", default_value_t = sim::EVENTS_SHOWN)]
    pub events: usize,
    /// Says the result as one line of JSON
    #[arg(long)]
    pub json: bool,
    /// Writes the result with machine, versions and command as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// What became of a batch of seeds.
struct Outcome {
    run: u64,
    total: Summary,
    failure: Option<Box<Failure>>,
    took: Duration,
}

/// Runs it.
pub fn run(args: &SimArgs) -> ExitCode {
    let plant = match args.plant.as_deref() {
        None => None,
        Some("list") => {
            for plant in Plant::ALL {
                console::line(plant.name());
            }
            return ExitCode::SUCCESS;
        }
        Some(name) => match Plant::named(name) {
            Some(plant) => Some(plant),
            None => {
                let names = Plant::ALL.map(Plant::name).join(", ");
                console::note(&format!(
                    "--plant {name}: there is no such bug to plant; expected one of {names}, or list"
                ));
                return ExitCode::from(USAGE_STATUS);
            }
        },
    };
    if args.first_seed.checked_add(args.seeds).is_none() {
        console::note("--first-seed plus --seeds is above the largest seed");
        return ExitCode::from(USAGE_STATUS);
    }
    let outcome = run_seeds(args, plant);
    report(&outcome, plant, args.json);
    if let Some(file) = &args.report {
        let text = format!("{:#}\n", receipt::stamped(figures(&outcome, plant)));
        if let Err(why) = std::fs::write(file, text) {
            console::note(&format!("cannot write {}: {why}", file.display()));
            return ExitCode::from(USAGE_STATUS);
        }
    }
    if outcome.failure.is_some() { ExitCode::from(BROKEN_STATUS) } else { ExitCode::SUCCESS }
}

/// Runs seeds on every core, until one fails.
fn run_seeds(args: &SimArgs, plant: Option<Plant>) -> Outcome {
    let (first, count) = (args.first_seed, args.seeds);
    let begun = clock::now();
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let total = Mutex::new((0, Summary::default(), None::<Box<Failure>>));
    let lock = || total.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return;
            }
            // One run is looked at; of many, the logs would be in one another's way.
            let ran = match count {
                1 => sim::run_aloud(first, plant, args.events),
                _ => sim::run(first + at, plant),
            };
            let (run, sum, failure) = &mut *lock();
            *run += 1;
            match ran {
                Ok(summary) => sum.add(&summary),
                Err(found) => {
                    stop.store(true, Ordering::Relaxed);
                    // Of two that fail at once, the lower seed.
                    if failure.as_ref().is_none_or(|known| found.seed < known.seed) {
                        *failure = Some(found);
                    }
                }
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(work);
        }
    });
    let took = clock::now().duration_since(begun);
    let (run, total, failure) = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    Outcome { run, total, failure, took }
}

fn report(outcome: &Outcome, plant: Option<Plant>, as_json: bool) {
    let Outcome { run, total, failure, took } = outcome;
    let seconds = took.as_secs_f64().max(1e-9);
    let per_minute = per_minute(*run, seconds);
    if as_json {
        return console::line(&figures(outcome, plant).to_string());
    }
    if let Some(failure) = failure {
        console::line(&failure.to_string());
    }
    console::line(&format!(
        "{run} schedules in {seconds:.1} s, {per_minute:.0} a minute: {} events, {} faults, {} heals, {} tokens, \
         {:.0} s simulated; {}",
        total.events,
        total.faults,
        total.heals,
        total.tokens,
        total.simulated.as_secs_f64(),
        if failure.is_some() { "FAILED" } else { "every invariant held" }
    ));
}

/// What became of the seeds, as an object.
fn figures(outcome: &Outcome, plant: Option<Plant>) -> Value {
    let Outcome { run, total, failure, took } = outcome;
    let seconds = took.as_secs_f64().max(1e-9);
    let failed = failure.as_ref().map_or(Value::Null, |failure| {
        json!({
            "seed": failure.seed,
            "invariant": failure.invariant.name(),
            "why": failure.why,
            "story": failure.story,
            "command": failure.command(),
        })
    });
    json!({
        "schedules": run,
        "seconds": seconds,
        "schedules_per_minute": per_minute(*run, seconds),
        "plant": plant.map(Plant::name),
        "events": total.events,
        "faults": total.faults,
        "heals": total.heals,
        "tokens": total.tokens,
        "simulated_s": total.simulated.as_secs_f64(),
        "failure": failed,
    })
}

#[allow(clippy::cast_precision_loss, reason = "nobody runs 2^52 schedules")]
fn per_minute(run: u64, seconds: f64) -> f64 {
    run as f64 * 60.0 / seconds
}
