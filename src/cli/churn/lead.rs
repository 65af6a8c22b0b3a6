//! The run whose fault is the death of the coordinator: another one goes on from its log.

use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process};

use super::plan::{Draw, Fault, Moment, Trial};
use super::strike::{Aim, Cut};
use super::trial::{Arena, LOOK, Outcome, PATIENCE, REFUSED, Run, request};
use super::watch::Ring;
use crate::cli::console::Failure;
use crate::cli::process::Events;
use crate::cli::ring::{Lead, LocalRing};
use crate::clock;

/// What a stage says of its coordinator.
const SIGN: &str = "\"event\":\"coordinator\"";

/// The coordinator of a ring that this command started.
#[derive(Debug, Clone)]
pub(crate) struct Ours {
    lead: Arc<Lead>,
    stages: Vec<Events>,
    runtime: tokio::runtime::Handle,
}

impl Ours {
    /// That of a ring, in the runtime that this is called in.
    pub(crate) fn of(ring: &LocalRing) -> Self {
        let stages = ring.stages.iter().map(|stage| stage.child.events()).collect();
        Self { lead: ring.lead(), stages, runtime: tokio::runtime::Handle::current() }
    }

    /// Kills it and starts the next one, which listens where it did.
    fn replace(&self) -> Result<(), Failure> {
        let pid = self.lead.pid().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Failure::new("churn", "the coordinator has ended by itself"))?;
        // It is this process's child and not reaped: its id is not another's.
        kill_process(pid, Signal::KILL).map_err(Failure::of("churn"))?;
        let _runtime = self.runtime.enter();
        self.lead.start()
    }
}

/// Does one run.
///
/// # Errors
/// As [`super::trial::run`].
pub(crate) fn run(arena: &Arena, trial: Trial) -> Result<Outcome, Failure> {
    let ours = arena.ours.as_ref().ok_or_else(|| {
        let why = "a coordinator that this command did not start is not killed: nobody would start the next one";
        Failure::new(REFUSED, format!("--fault coordinator: {why}"))
    })?;
    let mut draw = Draw::new(trial.seed);
    let body = request(&mut draw, trial.moment, arena.max_new);
    let ring = arena.settled()?;
    let opening = (trial.moment == Moment::Heal).then(|| opening(arena, &ring, &mut draw)).transpose()?;
    let unbroken = arena.stream(&body);
    let reference = arena.ended(&unbroken)?.map_err(Failure::of("churn"))?;
    arena.settled()?;
    let mut run = Run::new(arena, trial, String::new())?;
    let before = if trial.moment == Moment::Idle {
        None
    } else {
        let stream = arena.stream(&body);
        run.wait(&stream, opening, &mut draw)?;
        Some(stream)
    };
    run.at = clock::now();
    ours.replace()?;
    back(arena)?;
    let stream = before.unwrap_or_else(|| arena.stream(&body));
    let ids = arena.ended(&stream)?;
    let signs = ours.stages.iter().filter_map(|stage| stage.first_since(run.at, SIGN));
    run.detected = signs.min().map(|at| (at, "a stage lost it, or found the next one".to_owned()));
    run.zero = arena.zero()?;
    run.outcome(&stream, (&unbroken, &reference), ids, "the coordinator".to_owned())
}

/// A stage that dies first, and for which a spare waits.
fn opening(arena: &Arena, ring: &Ring, draw: &mut Draw) -> Result<Aim, Failure> {
    let replaced = |range: &str| ring.waiting().iter().any(|spare| spare.range == range);
    let those: Vec<_> = ring.serving().into_iter().filter(|member| replaced(&member.range)).collect();
    let one = draw.pick(&those).ok_or_else(|| Failure::new(REFUSED, "--moment heal: no spare waits"))?;
    Aim::take(Fault::Kill, Cut::Both, (one, false), &arena.hops, &arena.ready).map_err(Failure::of(REFUSED))
}

/// Waits until the next coordinator serves.
fn back(arena: &Arena) -> Result<(), Failure> {
    let begun = clock::now();
    loop {
        let seen = arena.ring();
        match seen {
            Ok(ring) if ring.ready => return Ok(()),
            Err(failure) if clock::now() - begun > PATIENCE => return Err(failure),
            Ok(_) if clock::now() - begun > PATIENCE => {
                return Err(Failure::new("churn", "the next coordinator does not serve"));
            }
            Err(failure) if failure.phase() == "interrupted" => return Err(failure),
            Ok(_) | Err(_) => std::thread::sleep(LOOK),
        }
    }
}
