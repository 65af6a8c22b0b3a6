//! No process outlives the one that started it, however that one ends.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ringfence::clock::now;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

const PATIENCE: Duration = Duration::from_secs(60);

/// How long an orphan may live.
const ORPHAN: Duration = Duration::from_secs(5);

fn ringctl(args: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_ringctl"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Whether a process runs: one that waits to be reaped does not.
fn runs(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    test_kill_process(pid).is_ok() && state != Some("Z")
}

fn until(what: &str, deadline: Duration, mut holds: impl FnMut() -> bool) {
    let started = now();
    while !holds() {
        assert!(now() - started < deadline, "waited in vain until {what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_stage_ends_when_its_parents_pipe_closes() {
    let mut stage = ringctl(&["stage", "--range", "0:2", "--model", "tiny", "--open", "--parent-pipe"]);
    let mut lines = BufReader::new(stage.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("READY ")));
    assert!(stage.try_wait().unwrap().is_none());
    drop(stage.stdin.take());
    until("the stage has ended", ORPHAN, || stage.try_wait().unwrap().is_some());
}

#[test]
fn a_demo_that_is_killed_or_interrupted_leaves_nobody_behind() {
    for signal in [Signal::KILL, Signal::INT, Signal::TERM] {
        let mut demo = ringctl(&["demo", "--max-new", "2000"]);
        let mut pids = Vec::new();
        let lines = BufReader::new(demo.stderr.take().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            let mut words = line.split_whitespace().skip_while(|word| *word != "pid").skip(1);
            pids.extend(words.next().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw));
            if line.starts_with("coordinator at") {
                break;
            }
        }
        assert_eq!(pids.len(), 3, "three stages say their process ids");
        assert!(pids.iter().all(|&pid| runs(pid)));
        let parent = Pid::from_raw(i32::try_from(demo.id()).unwrap()).unwrap();
        kill_process(parent, signal).unwrap();
        until("the demo has ended", PATIENCE, || demo.try_wait().unwrap().is_some());
        until("its stages have ended", ORPHAN, || !pids.iter().any(|&pid| runs(pid)));
    }
}
