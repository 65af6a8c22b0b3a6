//! A stream that is not over before a fault is seen, and a shadow that takes a place under one.

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

/// The stage of a shadow dies under a stream: next to nothing is computed again.
#[test]
fn a_shadow_takes_the_place_of_a_killed_stage_at_once() {
    let mut ring = Ring::dialling_with(&CUT, &["--heal-wait", "30", "--dead-after", "1.5"]);
    let options = ["--coordinator", &ring.coordinator.address, "--spare", "--shadow"];
    let shadow = Stage::start_as(&ring.keys, "spare", CUT[1], &options);
    let member = |peer: &str| {
        let members = ring.coordinator.ring()["members"].as_array().unwrap().clone();
        members.into_iter().find(|member| member["peer"] == peer).unwrap_or_default()
    };
    let middle = ring.stages[1].peer.clone();
    until("the shadow has its place", || (member(&middle)["shadowed_by"] == shadow.peer.as_str()).then_some(()));
    assert_eq!((&member(&shadow.peer)["shadow_of"], &member(&shadow.peer)["in_ring"]), (&json!(middle), &json!(false)));
    let expected = ids(&http::stream(ring.url(), &request(0.8)).events());
    let mut stream = http::stream(ring.url(), &request(0.8));
    let mut events: Vec<Event> = (0..150).map(|_| stream.event().unwrap()).collect();
    ring.stages[1].process.signal(Signal::KILL);
    events.extend(stream.events());
    assert_eq!(ids(&events), expected);
    assert!(ring.coordinator.pids().contains(&shadow.pid()));
    let heals = ring.coordinator.ring()["heals"].clone();
    let again = heals[0]["replayed_positions"].as_u64().unwrap();
    // Without its state, more than the 150 tokens that were read.
    assert!(heals.as_array().unwrap().len() == 1 && again < 100, "{heals}");
    ring.stages.push(shadow);
}
