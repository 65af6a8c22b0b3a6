//! A stage dies under a stream, and a spare takes its place: the stream pauses and goes on, with the
//! tokens of a run that never failed.

use rustix::process::Signal;
use serde_json::{Value, json};

use super::http::{self, Event, ids};
use super::rig::{CUT, Ring, Stage, until};

fn request(temperature: f64) -> Value {
    json!({"prompt": "And it came to pass", "max_tokens": 400, "temperature": temperature, "seed": 11,
           "ignore_eos": true, "stream": true, "return_token_ids": true})
}

/// A request that is not over before a fault is seen.
pub(crate) fn long() -> Value {
    json!({"prompt": "And it came to pass", "max_tokens": 2000, "temperature": 0, "ignore_eos": true, "stream": true})
}

/// Asks, and waits until tokens come.
#[track_caller]
pub(crate) fn under_way(ring: &Ring, request: &Value) -> http::Answer {
    let mut stream = http::stream(ring.url(), request);
    for _ in 0..5 {
        stream.event().unwrap();
    }
    stream
}

/// Strikes stage `victim` under a stream on a ring with a spare for it.
#[track_caller]
fn struck(victim: usize, signal: Signal, temperature: f64) {
    let mut ring = Ring::dialling_with(&CUT, &["--heal-wait", "30", "--dead-after", "1.5"]);
    let spare = Stage::start_as(&ring.keys, "spare", CUT[victim], &["--coordinator", &ring.coordinator.address]);
    until("the spare is there", || {
        (ring.coordinator.ring()["members"].as_array().unwrap().len() == CUT.len() + 1).then_some(())
    });
    let expected = ids(&http::stream(ring.url(), &request(temperature)).events());
    assert_eq!(expected.len(), 400);
    let survivors: Vec<u32> = (0..CUT.len()).filter(|at| *at != victim).map(|at| ring.stages[at].pid()).collect();
    // The spare may have been chosen from the start; then it is the victim.
    let spare_in = ring.coordinator.pids().contains(&spare.pid());
    let target = if spare_in { &spare } else { &ring.stages[victim] };
    let mut stream = http::stream(ring.url(), &request(temperature));
    let mut events: Vec<Event> = (0..5).map(|_| stream.event().unwrap()).collect();
    target.process.signal(signal);
    events.extend(stream.events());
    assert_eq!(ids(&events), expected, "{} {signal:?} at temperature {temperature}", CUT[victim]);
    let pids = ring.coordinator.pids();
    assert!(survivors.iter().all(|pid| pids.contains(pid)), "the survivors are the same processes");
    target.process.signal(Signal::CONT);
    ring.stages.push(spare);
}

#[test]
fn a_killed_stage_is_replaced_under_a_stream() {
    for victim in 0..CUT.len() {
        struck(victim, Signal::KILL, 0.0);
    }
    struck(1, Signal::KILL, 0.8);
}

#[test]
fn a_frozen_stage_is_replaced_under_a_stream() {
    for victim in 0..CUT.len() {
        struck(victim, Signal::STOP, 0.8);
    }
}
