//! `ringctl churn`: faults on a ring that it starts and on a running one, and what it refuses.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpListener;

use serde_json::{Value, json};

use super::rig::{CUT, Ended, Process, RINGCTL, Ring, Stage, started, until};

fn churn(args: &[&str]) -> Ended {
    Process::run(RINGCTL, &[&["churn", "--json"], args].concat())
}

/// The one run of a churn that must succeed.
#[track_caller]
pub(crate) fn one(args: &[&str]) -> Value {
    let ended = churn(args);
    assert!(ended.status.success(), "{args:?}: {ended:?}");
    let object = ended.json();
    let [run] = &object["runs"].as_array().unwrap()[..] else { panic!("{object}") };
    let names: BTreeSet<&str> = run.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = ["detect_ms", "fault", "ids_equal", "moment", "place", "rebuild_bytes", "rebuild_ms", "stall_ms"];
    assert_eq!(names, expected.into(), "{object}");
    assert_eq!(run["ids_equal"], true, "{object}");
    run.clone()
}

#[track_caller]
pub(crate) fn number(run: &Value, name: &str) -> u64 {
    run[name].as_u64().unwrap_or_else(|| panic!("{name} is no number: {run}"))
}

#[track_caller]
pub(crate) fn refused(args: &[&str], words: &[&str]) {
    let ended = churn(args);
    assert!(!ended.status.success(), "{args:?}: {ended:?}");
    assert!(words.iter().all(|word| ended.err.contains(word)), "{args:?} {words:?}: {ended:?}");
    assert!(!ended.out.contains("\"fault\""), "nothing was done: {ended:?}");
}

#[test]
fn a_killed_stage_is_a_pause_and_the_report_says_how_long() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (report, picture) = (file("report.json"), file("tokens.svg"));
    let more = ["--report", &report, "--svg", &picture];
    let run =
        one(&[&["--fault", "kill", "--place", "middle", "--moment", "decode", "--max-new", "64"], &more[..]].concat());
    assert_eq!((&run["fault"], &run["place"], &run["moment"]), (&json!("kill"), &json!("middle"), &json!("decode")));
    assert!((1..=2000).contains(&number(&run, "detect_ms")), "{run}");
    assert!(number(&run, "rebuild_bytes") > 0 && number(&run, "stall_ms") > 0, "{run}");
    let written: Value = serde_json::from_str(&std::fs::read_to_string(report).unwrap()).unwrap();
    assert_eq!(written["runs"], json!([run]));
    assert!(written["machine"]["processors"].as_u64().unwrap() > 0 && written["versions"]["protocol"].is_u64());
    assert!(written["command"].as_array().unwrap().contains(&json!("--fault")), "{written}");
    let picture = std::fs::read_to_string(picture).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains(">kill</text>"), "{picture}");
}

#[test]
fn a_killed_coordinator_is_started_again_and_the_stream_is_read_on() {
    let run = one(&["--fault", "coordinator", "--place", "random", "--moment", "decode", "--max-new", "64"]);
    // The stages kept their state: nothing had to be sent again.
    assert!(number(&run, "detect_ms") > 0 && number(&run, "rebuild_bytes") == 0, "{run}");
}

#[test]
fn a_frozen_stage_comes_back_and_harms_nothing() {
    let run = one(&["--fault", "freeze", "--place", "tail", "--moment", "decode", "--max-new", "64", "--seed", "3"]);
    assert!((1..=4000).contains(&number(&run, "detect_ms")), "{run}");
}

/// A run on a running ring.
pub(crate) fn on<'a>(url: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["--url", url, "--max-new", "64", "--moment", "decode"], more].concat()
}

#[test]
fn a_running_ring_is_struck_where_it_is_proven_to_be_this_users() {
    let ring = Ring::dialling_with(&CUT, &["--heal-wait", "30"]);
    let spare = Stage::start_as(&ring.keys, "spare", CUT[1], &["--coordinator", &ring.coordinator.address, "--spare"]);
    until("the spare is there", || {
        let members = ring.coordinator.ring()["members"].as_array().unwrap().clone();
        members.iter().find(|member| member["peer"] == spare.peer.as_str()).map(|member| {
            assert_eq!((&member["spare"], &member["in_ring"]), (&json!(true), &json!(false)), "it waits");
        })
    });
    let url = ring.url().to_owned();
    refused(&on(&url, &["--fault", "kill", "--place", "head"]), &["nobody waits", "stage --range 0:2 --spare"]);
    refused(&on(&url, &["--fault", "coordinator"]), &["nobody would start the next one"]);
    refused(&on(&url, &["--fault", "cut", "--place", "middle"]), &["can't be cut", "ringctl wan --control"]);
    let heals = |ring: &Ring| ring.coordinator.ring()["heals"].as_array().unwrap().len();
    assert_eq!(heals(&ring), 0, "nothing was done yet");
    let run = one(&on(&url, &["--fault", "kill", "--place", "middle"]));
    assert!(number(&run, "rebuild_bytes") > 0, "{run}");
    assert_eq!(heals(&ring), 1);
    assert!(ring.coordinator.pids().contains(&spare.pid()), "the spare has the place");
}

/// A coordinator that says what it likes of its ring.
fn liar(members: &Value) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let body = json!({"ready": true, "members": members, "heals": [], "uptime_ms": 1, "rejections": 0, "sessions": 0,
                      "in_flight": 0})
    .to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut piece = [0; 4096];
            let _ = stream.read(&mut piece);
            let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all((head + &body).as_bytes());
        }
    });
    url
}

#[test]
fn a_process_is_not_signalled_on_a_peers_word() {
    let keys = super::rig::Keys::new();
    let stage = Stage::start(&keys, "0:7", &["--open"]);
    let claim = |peer: &str, pid: u32| {
        let member = |peer: &str, in_ring| json!({"peer": peer, "range": "0:7", "pid": pid, "in_ring": in_ring, "alive": true, "addresses": []});
        liar(&json!([member(peer, true), member("other", false)]))
    };
    let kill = |url: &str, words: &[&str]| {
        refused(&["--url", url, "--fault", "kill", "--place", "head", "--moment", "idle"], words);
    };
    let test = std::process::id();
    kill(&claim(&stage.peer, test), &["nothing was done to it", "expected `stage`"]);
    let other = keys.peer("another");
    kill(&claim(&other, stage.pid()), &[&format!("is stage {}, not {other}", stage.peer)]);
    kill(&claim(&stage.peer, 1), &["process 1"]);
    assert!(started(stage.pid()).is_some(), "the stage lives");
}

#[test]
fn what_can_not_be_struck_is_refused_before_anything_starts() {
    let ended = churn(&["--place", "somewhere"]);
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    assert!(["somewhere", "head", "middle", "tail", "spare", "random"].iter().all(|word| ended.err.contains(word)));
    refused(&["--stages", "9"], &["--stages 9"]);
    refused(&["--repeat", "0"], &["--repeat"]);
}
