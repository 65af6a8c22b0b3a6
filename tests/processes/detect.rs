//! How soon a dead stage and a frozen one are seen, with default settings.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::heal::{long, under_way};
use super::rig::{CUT, Ring, until};

/// Strikes a stage under a stream, and gives the time until the coordinator saw it, on its own clock.
#[track_caller]
fn seen_after(victim: usize, signal: Signal) -> Duration {
    let ring = Ring::start(&CUT);
    let _stream = under_way(&ring, &long());
    let before = ring.coordinator.ring();
    assert_eq!(before["heals"], Value::Array(Vec::new()));
    ring.stages[victim].process.signal(signal);
    let seen = until("the break is seen", || {
        let heal = ring.coordinator.ring()["heals"].get(0).cloned()?;
        assert_eq!(heal["peer"].as_str().map(|peer| peer.contains(&ring.stages[victim].peer)), Some(true), "{heal}");
        heal["detected_ms"].as_u64()
    });
    // Read before the fault: what is found is never too little.
    let begun = before["uptime_ms"].as_u64().unwrap();
    ring.stages[victim].process.signal(Signal::CONT);
    Duration::from_millis(seen - begun)
}

#[test]
fn a_kill_is_seen_within_two_seconds() {
    for (victim, range) in CUT.iter().enumerate() {
        let took = seen_after(victim, Signal::KILL);
        assert!(took <= Duration::from_secs(2), "stage {range} was dead for {took:?}");
    }
}

#[test]
fn a_freeze_is_seen_within_four_seconds() {
    for (victim, range) in CUT.iter().enumerate() {
        let took = seen_after(victim, Signal::STOP);
        assert!(took <= Duration::from_secs(4), "stage {range} was frozen for {took:?}");
    }
}
