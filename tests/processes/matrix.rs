//! The matrix of faults: every place × {kill, freeze} × {in the prompt, in pipelined decode} × {greedy,
//! sampled}, one test a place and fault.
//!
//! | | killed | frozen |
//! |---|---|---|
//! | head | `a_killed_head` | `a_frozen_head` |
//! | middle | `a_killed_middle` | `a_frozen_middle` |
//! | tail | `a_killed_tail` | `a_frozen_tail` |
//! | coordinator | `a_killed_coordinator` | `a_frozen_coordinator` |
//!
//! Each goes through [`CELLS`] on one ring, and holds for every cell that the ids are those of an unbroken
//! run, that the survivors are the same processes, and that they loaded no weight again. A moment is seen
//! at the coordinator before the fault is done, and in what was computed again afterwards.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::http::{self, Answer, Asked, Event, ids};
use super::rig::{CUT, Keys, Listening, Process, Ring, Stage, started, until};

/// Tokens of the prompt: eighteen chunks.
const PROMPT: u64 = 1_152;
/// Tokens of the answer.
const NEW: usize = 240;
/// Positions of the prompt that are computed when a fault comes: two chunks at least, half at most.
const PREFILL: std::ops::RangeInclusive<u64> = 128..=PROMPT / 2;
/// Tokens that the client has when a fault comes.
const TOLD: usize = 5;
/// Frames that are in flight then, at least: one that is computed, a draft behind it, and a probe at most.
const PIPELINED: u64 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// A part of the prompt is computed, and nothing was told.
    Prefill,
    /// Tokens were told, and drafts are in flight.
    Decode,
}

/// What each place and fault goes through: the moment and the temperature.
const CELLS: [(Moment, f64); 4] =
    [(Moment::Prefill, 0.0), (Moment::Prefill, 0.8), (Moment::Decode, 0.0), (Moment::Decode, 0.8)];

/// The ids of each cell's request where nothing fails. They are the same on every ring of this cut, so
/// they are asked for once.
static UNBROKEN: [OnceLock<Vec<u64>>; 4] = [const { OnceLock::new() }; 4];

fn request((moment, temperature): (Moment, f64)) -> Value {
    let prompt = match moment {
        Moment::Prefill => json!((0..PROMPT).map(|at| 300 + at * 37 % 1_500).collect::<Vec<u64>>()),
        Moment::Decode => json!("And it came to pass"),
    };
    json!({"prompt": prompt, "max_tokens": NEW, "temperature": temperature, "seed": 11, "mode": "pipelined",
           "ignore_eos": true, "stream": true, "return_token_ids": true})
}

/// What the client calls its request.
fn name(cell: (Moment, f64)) -> String {
    format!("{:?}-{}", cell.0, cell.1)
}

fn unbroken(url: &str, cell: usize) -> &'static Vec<u64> {
    UNBROKEN[cell].get_or_init(|| {
        let ids = ids(&http::stream(url, &request(CELLS[cell])).events());
        assert_eq!(ids.len(), NEW);
        ids
    })
}

/// A stage as it must be found again: when its process was started, and the weights that it has loaded.
type Alive = (u64, u64);

/// The members of a ring that rests, by process; `None` while something is under way, or a member has
/// not reported.
fn at_rest(coordinator: &Listening, members: usize) -> Option<BTreeMap<u32, Alive>> {
    let ring = coordinator.ring();
    let list = ring["members"].as_array().unwrap();
    let healed = ring["heals"].as_array().unwrap().iter().all(|heal| heal["rebuilt_ms"].is_u64());
    let rests = ring["ready"] == true && ring["sessions"] == 0 && healed && list.len() == members;
    let of = |member: &Value| {
        let pid = u32::try_from(member["pid"].as_u64()?).ok()?;
        let loaded = member["loaded_bytes"].as_u64().filter(|bytes| *bytes > 0 && member["alive"] == true)?;
        Some((pid, (started(pid)?, loaded)))
    };
    list.iter().map(of).collect::<Option<BTreeMap<u32, Alive>>>().filter(|_| rests)
}

/// A client's stream.
enum Stream {
    /// Nothing was told.
    Asked(Asked),
    /// Some tokens were.
    Told(Answer, Vec<Event>),
}

impl Stream {
    /// Every event to its end, however that comes.
    fn events(self) -> Vec<Event> {
        match self {
            Self::Asked(asked) => asked.answer().map(|mut answer| answer.events()).unwrap_or_default(),
            Self::Told(mut answer, told) => told.into_iter().chain(answer.events()).collect(),
        }
    }

    /// Those that were told.
    fn told(self) -> Vec<Event> {
        match self {
            Self::Asked(_) => Vec::new(),
            Self::Told(_, told) => told,
        }
    }
}

/// Asks, and waits until the moment is there.
#[track_caller]
fn under_way(coordinator: &Listening, cell: (Moment, f64)) -> Stream {
    let asked = http::begin(&coordinator.url, &request(cell), &[("x-client-request-id", &name(cell))]);
    let stream = match cell.0 {
        Moment::Prefill => Stream::Asked(asked),
        Moment::Decode => {
            let mut answer = asked.answer().unwrap();
            let told = (0..TOLD).map(|_| answer.event().unwrap()).collect();
            Stream::Told(answer, told)
        }
    };
    let number = |ring: &Value, name: &str| ring[name].as_u64().unwrap();
    until("the moment", || {
        let ring = coordinator.ring();
        let settled = number(&ring, "settled");
        match cell.0 {
            Moment::Prefill => {
                assert!(settled <= *PREFILL.end(), "the prompt was computed too soon: {ring}");
                PREFILL.contains(&settled).then_some(())
            }
            Moment::Decode => {
                assert_eq!(ring["sessions"], 1, "it was over too soon: {ring}");
                (number(&ring, "in_flight") >= PIPELINED).then_some(())
            }
        }
    });
    stream
}

/// Every survivor is the process that it was, and loaded nothing since.
#[track_caller]
fn survived(coordinator: &Listening, before: &BTreeMap<u32, Alive>, but: Option<u32>) {
    let now = until("every member has reported", || {
        let members = coordinator.ring()["members"].take();
        let of = |member: &Value| {
            let pid = u32::try_from(member["pid"].as_u64()?).ok()?;
            Some((pid, member["loaded_bytes"].as_u64().filter(|bytes| *bytes > 0)?))
        };
        members.as_array().unwrap().iter().map(of).collect::<Option<BTreeMap<u32, u64>>>()
    });
    for (pid, (since, loaded)) in before.iter().filter(|(pid, _)| Some(**pid) != but) {
        assert_eq!(started(*pid), Some(*since), "process {pid} was started again");
        assert_eq!(now.get(pid), Some(loaded), "process {pid} loaded weights again");
    }
}

/// The break that the ring healed from: whom it blames, and that as much was computed again as the moment
/// says.
#[track_caller]
fn healed(coordinator: &Listening, breaks: usize, peer: &str, moment: Moment) {
    let ring = coordinator.ring();
    let heals = ring["heals"].as_array().unwrap();
    let [.., last] = heals.as_slice() else { panic!("no break: {ring}") };
    assert_eq!(heals.len(), breaks, "one break a fault: {ring}");
    assert!(last["peer"].as_str().unwrap().contains(peer), "{last}");
    let replayed = last["replayed_positions"].as_u64().unwrap();
    match moment {
        Moment::Prefill => assert!((1..PROMPT).contains(&replayed), "it was not in the prompt: {last}"),
        Moment::Decode => assert!(replayed >= TOLD as u64, "{last}"),
    }
}

/// Strikes stage `victim` of a ring once for each cell. Two processes take turns at its place: one serves,
/// the other waits.
#[track_caller]
fn a_stage(victim: usize, signal: Signal) {
    let mut ring = Ring::dialling_with(&CUT, &["--heal-wait", "30"]);
    let dial = ring.coordinator.address.clone();
    let start = |keys: &Keys, name: &str| Stage::start_as(keys, name, CUT[victim], &["--coordinator", &dial]);
    let mut waiting = start(&ring.keys, "spare");
    let mut names = [CUT[victim], "spare"];
    for (at, cell) in CELLS.into_iter().enumerate() {
        let what = format!("{} {signal:?} in {:?} at temperature {}", CUT[victim], cell.0, cell.1);
        let members = || at_rest(&ring.coordinator, CUT.len() + 1);
        until("the spare waits", members);
        let expected = unbroken(ring.url(), at);
        let before = until("the ring rests", members);
        assert_eq!(ring.coordinator.pids(), ring.pids(), "the spare waits");
        let stream = under_way(&ring.coordinator, cell);
        let target = &ring.stages[victim];
        target.process.signal(signal);
        let events = stream.events();
        let [.., end, _] = events.as_slice() else { panic!("{what}: {events:?}") };
        assert_eq!(end.json()["ringfence"]["heals"], 1, "{what}: its ring was lost once: {end:?}");
        assert_eq!(&ids(&events), expected, "{what}");
        healed(&ring.coordinator, at + 1, &target.peer, cell.0);
        let gone = target.pid();
        let fresh = match signal {
            Signal::KILL => {
                let dead = std::mem::replace(&mut ring.stages[victim], waiting);
                dead.process.kill();
                start(&ring.keys, names[0])
            }
            _ => {
                let frozen = std::mem::replace(&mut ring.stages[victim], waiting);
                frozen.process.signal(Signal::CONT);
                frozen
            }
        };
        assert_eq!(ring.coordinator.pids(), ring.pids(), "{what}: the spare has the place, nobody else moved");
        assert!(ring.stages.iter_mut().all(|stage| stage.process.runs()), "{what}");
        survived(&ring.coordinator, &before, Some(gone));
        waiting = fresh;
        names.reverse();
    }
}

#[test]
fn a_killed_head() {
    a_stage(0, Signal::KILL);
}

#[test]
fn a_killed_middle() {
    a_stage(1, Signal::KILL);
}

#[test]
fn a_killed_tail() {
    a_stage(2, Signal::KILL);
}

#[test]
fn a_frozen_head() {
    a_stage(0, Signal::STOP);
}

#[test]
fn a_frozen_middle() {
    a_stage(1, Signal::STOP);
}

#[test]
fn a_frozen_tail() {
    a_stage(2, Signal::STOP);
}

/// What the client of a coordinator that is gone does: it reads on from the last token that it has; one that
/// has none does so by the name that it gave its request.
fn rest(url: &str, cell: (Moment, f64), mut events: Vec<Event>) -> Vec<u64> {
    let mut stream = match events.last() {
        Some(last) => {
            let (id, _) = last.id.rsplit_once(':').unwrap();
            http::resume(url, id, &[("last-event-id", &last.id)]).unwrap()
        }
        None => http::resume(url, &name(cell), &[]).unwrap(),
    };
    assert_eq!(stream.status, 200);
    events.extend(stream.events());
    ids(&events)
}

/// Strikes the coordinator once for each cell; the next one goes on from its log, elsewhere.
#[track_caller]
fn a_coordinator(signal: Signal) {
    let folder = tempfile::tempdir().unwrap();
    let log = ["--heal-wait", "30", "--log", folder.path().to_str().unwrap()];
    let Ring { keys, mut stages, mut coordinator } = Ring::start_with(&CUT, &log);
    let dial: Vec<String> = stages.iter().flat_map(|stage| ["--stage".to_owned(), stage.address.clone()]).collect();
    let dial: Vec<&str> = dial.iter().map(String::as_str).chain(log).collect();
    for (at, cell) in CELLS.into_iter().enumerate() {
        let what = format!("coordinator {signal:?} in {:?} at temperature {}", cell.0, cell.1);
        let expected = unbroken(&coordinator.url, at);
        let before = until("the ring rests", || at_rest(&coordinator, CUT.len()));
        let stream = under_way(&coordinator, cell);
        coordinator.process.signal(signal);
        // What was on its way when it died still comes.
        let events = if signal == Signal::KILL { stream.events() } else { stream.told() };
        assert_eq!(events.is_empty(), cell.0 == Moment::Prefill, "{what}: {events:?}");
        assert!(events.len() < NEW, "{what}: it was over before the fault");
        let next = Listening::start(&keys, &dial);
        next.ready();
        assert_eq!(&rest(&next.url, cell, events), expected, "{what}");
        let pids: Vec<u32> = stages.iter().map(Stage::pid).collect();
        assert_eq!(next.pids(), pids, "{what}: the stages are the same processes");
        assert!(stages.iter_mut().all(|stage| stage.process.runs()), "{what}");
        survived(&next, &before, None);
        let Listening { process, .. } = &coordinator;
        process.signal(Signal::CONT);
        if signal == Signal::STOP {
            coordinator.misses(&["another coordinator leads the ring"]);
        }
        Process::kill(std::mem::replace(&mut coordinator, next).process);
    }
}

#[test]
fn a_killed_coordinator() {
    a_coordinator(Signal::KILL);
}

#[test]
fn a_frozen_coordinator() {
    a_coordinator(Signal::STOP);
}
