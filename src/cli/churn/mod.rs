//! `ringctl churn`: strikes stages while text streams, and proves that the text stays the same.
//!
//! One run is one fault, at one place, at one moment, on a ring that it starts for the run, or on a
//! running ring: there it signals only processes that [`target`] has checked, and cuts only hops behind
//! a `ringctl wan`.

mod lead;
mod plan;
mod report;
pub mod show;
mod strike;
pub mod target;
mod trial;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;

pub use plan::{Fault, Moment, Place};
pub use strike::Cut;

use crate::cli::client::Client;
use crate::cli::console::{self, Failure, Signals};
use crate::cli::ring::{LocalRing, LocalRingOptions, interrupted, with_ring};
use crate::cli::tiling::tile;
use crate::clock;
use crate::ids::{LayerRange, WireEncoding};
use crate::model::Checkpoint;
use crate::wan::WanSettings;
use lead::Ours;
use plan::{Choice, Trial, trials};
use report::{Row, Trace};
use strike::Hops;
use trial::{Arena, Outcome, REFUSED};

/// Longest time of one repeat.
const REPEAT_MAX: Duration = Duration::from_secs(600);

/// Options of `ringctl churn`.
#[derive(Debug, Clone, Args)]
pub struct ChurnArgs {
    /// Fault; default: each in turn
    #[arg(long, value_name = "FAULT")]
    pub fault: Option<Fault>,
    /// Whom it strikes; default: each in turn
    #[arg(long, value_name = "PLACE")]
    pub place: Option<Place>,
    /// When it strikes; default: drawn
    #[arg(long, value_name = "MOMENT")]
    pub moment: Option<Moment>,
    /// Which way a hop is cut, seen by the stage that it leads into; default: drawn
    #[arg(long, value_name = "WAY")]
    pub way: Option<Cut>,
    /// How often all of it is done; the seed goes up by one each time
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub repeat: u32,
    /// Seed of everything that is drawn
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Tokens of each request
    #[arg(long, value_name = "TOKENS", default_value_t = 160)]
    pub max_new: u32,
    /// Stages of the ring that is started for each run; every one gets a spare
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub stages: u16,
    /// Model of that ring: folder of a checkpoint, or `tiny` for the small model inside this program
    #[arg(long, value_name = "DIR", default_value = "tiny")]
    pub model: String,
    /// The emulated network of every hop of that ring
    #[arg(long, value_name = "SETTINGS", default_value = "rtt=10ms")]
    pub wan: WanSettings,
    /// Strike the ring of the coordinator at this HTTP address instead: only stages of this machine and
    /// this user, and hops behind --wan-control
    #[arg(long, value_name = "URL", conflicts_with_all = ["stages", "model", "wan"])]
    pub url: Option<String>,
    /// File with the stdout of a stage that has no identity file: its READY line proves which process it
    /// is; more than one may be given
    #[arg(long, value_name = "FILE", requires = "url")]
    pub ready: Vec<PathBuf>,
    /// Socket of the `ringctl wan --control FILE` in front of the running stages
    #[arg(long, value_name = "FILE", requires = "url")]
    pub wan_control: Option<PathBuf>,
    /// Write a JSON report with machine, versions and command to a file
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Draw tokens over time, with the fault marked, into a file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// One JSON object on the last line of stdout, in place of the table
    #[arg(long)]
    pub json: bool,
}

/// Runs the command; success only if every stream was the same as unbroken.
pub fn run(args: &ChurnArgs) -> ExitCode {
    console::exit_quietly(start(args))
}

fn start(args: &ChurnArgs) -> Result<(), Failure> {
    if args.repeat == 0 || args.max_new < 32 {
        return Err(Failure::new("config", "expected --repeat 1 or more and --max-new 32 or more"));
    }
    let mut churn = Churn { args, cut: Vec::new(), done: Vec::new(), problems: Vec::new() };
    if args.url.is_none() {
        let checkpoint = Checkpoint::open(&args.model).map_err(Failure::of("model"))?;
        let taps = checkpoint.config().draft.as_ref().map(|draft| draft.targets.as_slice());
        churn.cut = tile(checkpoint.config().layers, args.stages, taps).map_err(Failure::of("config"))?;
    }
    let runtime = console::runtime()?;
    let ended = runtime.block_on(churn.all());
    runtime.shutdown_background();
    let told = churn.tell();
    ended.and(told)
}

struct Churn<'a> {
    args: &'a ChurnArgs,
    /// Ranges of a ring that is started.
    cut: Vec<LayerRange>,
    done: Vec<(Row, Trace)>,
    problems: Vec<String>,
}

impl Churn<'_> {
    /// Does every run.
    async fn all(&mut self) -> Result<(), Failure> {
        let args = self.args;
        let mut signals = Signals::new()?;
        let choice = Choice { fault: args.fault, place: args.place, moment: args.moment };
        for repeat in 0..args.repeat {
            let begun = clock::now();
            let trials = trials(choice, args.seed.wrapping_add(u64::from(repeat)));
            for (at, trial) in trials.iter().enumerate() {
                if clock::now() - begun > REPEAT_MAX {
                    let why = format!(
                        "{at} of {} runs took {} s; choose fewer with --fault or --place",
                        trials.len(),
                        REPEAT_MAX.as_secs()
                    );
                    return Err(Failure::new("churn", why));
                }
                let outcome = match &args.url {
                    Some(url) => self.live(url, *trial, &mut signals).await,
                    None => self.local(*trial, &mut signals).await,
                };
                match outcome {
                    Ok(outcome) => self.take(outcome),
                    // One of many that this ring does not allow.
                    Err(failure) if failure.phase() == REFUSED && trials.len() > 1 => {
                        console::note(&format!("{} {}: refused: {}", trial.fault, trial.place, failure.why()));
                    }
                    Err(failure) => return Err(failure),
                }
            }
        }
        if self.done.is_empty() { Err(Failure::new(REFUSED, "nothing could be struck")) } else { Ok(()) }
    }

    fn arena(&self, url: &str, hops: Hops, members: usize) -> Arena {
        Arena {
            client: Client::new(url),
            hops,
            ready: self.args.ready.clone(),
            members,
            max_new: self.args.max_new,
            way: self.args.way,
            ours: None,
            stop: Arc::new(AtomicBool::new(false)),
        }
    }

    /// On a ring of its own.
    async fn local(&self, trial: Trial, signals: &mut Signals) -> Result<Outcome, Failure> {
        let mut spares = self.cut.clone();
        // A spare that dies while it takes a place needs another beside it.
        if trial.moment == Moment::Heal && matches!(trial.place, Place::Spare | Place::Random) {
            spares.extend(self.cut.get(self.cut.len() / 2));
        }
        let options = LocalRingOptions {
            model: self.args.model.clone(),
            cut: self.cut.clone(),
            spares,
            devices: Vec::new(),
            wire: WireEncoding::default(),
            in_flight: None,
            drafts: None,
            threads: 1,
            wan: Some(self.args.wan.clone()),
            log: trial.fault == Fault::Coordinator,
            own_hops: true,
            seed: trial.seed,
        };
        let work = async |ring: &LocalRing| {
            let ours = (trial.fault == Fault::Coordinator).then(|| Ours::of(ring));
            let arena = Arena { ours, ..self.arena(ring.url(), Hops::of(ring), ring.stages.len()) };
            let run = tokio::task::spawn_blocking(move || trial::run(&arena, trial)).await;
            run.map_err(Failure::of("churn"))?
        };
        with_ring(&options, signals, work).await
    }

    /// On a running ring; what was done to it is undone before this returns.
    async fn live(&self, url: &str, trial: Trial, signals: &mut Signals) -> Result<Outcome, Failure> {
        let hops = self.args.wan_control.clone().map_or(Hops::None, Hops::Control);
        let arena = self.arena(url, hops, 0);
        let stop = Arc::clone(&arena.stop);
        let mut run = tokio::task::spawn_blocking(move || trial::run(&arena, trial));
        let done = tokio::select! {
            done = &mut run => done,
            () = signals.next() => {
                stop.store(true, Ordering::Release);
                // It ends at its next look, and takes its fault back.
                drop(run.await);
                return Err(interrupted());
            }
        };
        done.map_err(Failure::of("churn"))?
    }

    fn take(&mut self, outcome: Outcome) {
        let Outcome { row, trace, whom, problems } = outcome;
        let equal = if row.ids_equal { "ids equal" } else { "IDS DIFFER" };
        console::note(&format!(
            "{} {} during {}: {whom}: seen after {} ms, stalled {} ms, {equal}",
            row.fault, row.place, row.moment, row.detect_ms, row.stall_ms
        ));
        for problem in problems {
            console::note(&format!("  {problem}"));
            self.problems.push(format!("{} {} during {}: {problem}", row.fault, row.place, row.moment));
        }
        self.done.push((row, trace));
    }

    /// Tells what was measured, and whether all was well.
    fn tell(&self) -> Result<(), Failure> {
        let rows: Vec<Row> = self.done.iter().map(|(row, _)| row.clone()).collect();
        if let Some(file) = &self.args.report {
            write(file, &format!("{:#}\n", report::report(&rows)))?;
        }
        if let Some(file) = &self.args.svg {
            write(file, &report::svg(&self.done))?;
        }
        if self.args.json {
            console::line(&report::runs(&rows).to_string());
        } else if !rows.is_empty() {
            console::line(report::table(&rows).trim_end());
        }
        let differ = rows.iter().filter(|row| !row.ids_equal).count();
        if differ > 0 {
            return Err(Failure::new("equality", format!("{differ} of {} streams were not identical", rows.len())));
        }
        match self.problems.first() {
            Some(problem) => Err(Failure::new("churn", problem)),
            None => Ok(()),
        }
    }
}

fn write(file: &Path, text: &str) -> Result<(), Failure> {
    fs::write(file, text).map_err(|why| Failure::new("report", format!("{}: {why}", file.display())))
}
