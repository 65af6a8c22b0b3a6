//! The deterministic simulator: the real shells and machines under virtual time, one seed a run.
//!
//! A run has coordinators, stages, a network, a disk and clients in one thread. Shells and workers are
//! those of production, called by `world` instead of woken by tokio; links (`net`), the log's disk
//! (`disk`), the clock ([`crate::clock`]) and the model (`toy`) are simulated. What a seed stands for
//! is drawn first (`scenario`); faults strike (`strike`), and after every event the invariants of
//! `check` must hold. Then faults end, and every session must end with its whole text.
//! `docs/simulator.md` lists faults and invariants.

mod agenda;
mod check;
mod client;
mod disk;
mod draw;
mod lead;
mod net;
mod plant;
mod scenario;
mod stage;
mod strike;
pub(crate) mod toy;
mod trace;
mod world;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use check::Invariant;
use check::broken;
pub use plant::Plant;
pub use world::Summary;
use world::World;

/// A run in which an invariant did not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The bug that was planted.
    pub plant: Option<Plant>,
    /// What did not hold.
    pub invariant: Invariant,
    /// In which way.
    pub why: String,
    /// The last events, oldest first, and how clients stand.
    pub story: Vec<String>,
}

impl Failure {
    /// The smallest command that shows it again.
    #[must_use]
    pub fn command(&self) -> String {
        let plant = self.plant.map_or(String::new(), |plant| format!(" --plant {}", plant.name()));
        format!("ringctl sim --seeds 1 --first-seed {}{plant}", self.seed)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {} does not hold: {}", self.seed, self.invariant.name(), self.why)?;
        for line in &self.story {
            writeln!(f, "  {line}")?;
        }
        write!(f, "run it again: {}", self.command())
    }
}

/// Events that a failure tells of.
pub const EVENTS_SHOWN: usize = 60;

/// Runs one seed; what its processes log goes nowhere.
///
/// # Errors
/// [`Failure`]: an invariant does not hold.
pub fn run(seed: u64, plant: Option<Plant>) -> Result<Summary, Box<Failure>> {
    let nowhere = tracing::subscriber::NoSubscriber::new();
    tracing::subscriber::with_default(nowhere, || run_aloud(seed, plant, EVENTS_SHOWN))
}

/// The same, with the processes' logs where this program's go, and another number of events in a failure.
///
/// # Errors
/// [`Failure`]: an invariant does not hold.
pub fn run_aloud(seed: u64, plant: Option<Plant>, shown: usize) -> Result<Summary, Box<Failure>> {
    let mut world = None;
    // A panic of a process is a failure of its seed like any other: what it left half done goes no further.
    let ran = caught(|| world.insert(World::new(seed, plant, shown)).run());
    let ran = ran.unwrap_or_else(|why| broken(Invariant::Process, why));
    let ran = ran.map_err(|broken| {
        let story = caught(|| world.as_ref().map(World::story)).ok().flatten().unwrap_or_default();
        Box::new(Failure { seed, plant, invariant: broken.invariant, why: broken.why, story })
    });
    // What is left of it must not end the other runs.
    let _ = caught(|| drop(world));
    ran
}

/// What a function gives, or the words with which it panicked.
fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no words");
        format!("a process panicked: {text}")
    })
}
