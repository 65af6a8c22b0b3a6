//! What breaks while a ring works: dead and frozen stages, a dead coordinator, clients that leave,
//! stages that are told to end.

use std::time::Duration;

use ringfence::clock;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::http::{self, Event};
use super::rig::{CUT, Keys, Listening, Process, RINGCTL, Ring, Stage, until};

/// A stage's silence counts as death after 1.8 s; the rest is the machine's. The transport by itself
/// would notice after 10 s.
const FAULT_DEADLINE: Duration = Duration::from_secs(9);

fn long_request() -> Value {
    json!({"prompt": "And it came to pass", "max_tokens": 2000, "temperature": 0, "ignore_eos": true, "stream": true,
           "return_token_ids": true})
}

#[track_caller]
fn short_request(url: &str) -> Value {
    let body = json!({"prompt": "And it came to pass", "max_tokens": 12, "temperature": 0, "return_token_ids": true});
    let (status, answer) = http::complete(url, &body);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
    answer["choices"][0]["token_ids"].clone()
}

/// The end of a stream that must fail: its error.
#[track_caller]
fn failure(events: &[Event]) -> Value {
    let [.., last, error, done] = events else { panic!("too few events: {events:?}") };
    assert_eq!(done.data, "[DONE]");
    assert_eq!(last.json()["choices"][0]["finish_reason"], "error", "{last:?}");
    error.json()["error"].take()
}

/// Lets a stream come under way, strikes, and gives the error that the stream ends with.
#[track_caller]
fn struck(ring: &Ring, strike: impl FnOnce()) -> Value {
    let mut stream = http::stream(ring.url(), &long_request());
    for _ in 0..5 {
        stream.event().unwrap();
    }
    let begun = clock::now();
    strike();
    let events = stream.events();
    let took = clock::now() - begun;
    let error = failure(&events);
    assert!(took < FAULT_DEADLINE, "{took:?} until {error}");
    error
}

/// The error names a stage.
#[track_caller]
fn names(error: &Value, range: &str, peer: &str) {
    assert_eq!(error["code"], "stage_lost", "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(&format!("stage {range} ")) && message.contains(peer), "{message}");
}

#[track_caller]
fn a_stage_dies(mut ring: Ring, victim: usize) {
    let expected = short_request(ring.url());
    let range = CUT[victim];
    let (peer, address) = (ring.stages[victim].peer.clone(), ring.stages[victim].address.clone());
    let error = struck(&ring, || ring.stages[victim].process.signal(Signal::KILL));
    names(&error, range, &peer);
    let dead = ring.stages.remove(victim);
    dead.process.kill();
    ring.coordinator.misses(&[&format!("layers {range} are missing")]);
    let ended = Process::run(RINGCTL, &["generate", "--url", ring.url(), "--prompt", "a", "--max-new", "2"]);
    assert!(!ended.status.success() && ended.err.contains(range), "{ended:?}");

    // The same identity at the same address, dialled or dialling.
    let listen = address.split("/p2p/").next().unwrap().to_owned();
    let coordinator = ring.keys.peer("coordinator");
    let fresh = Stage::start(&ring.keys, range, &["--listen", &listen, "--allow", &coordinator]);
    ring.stages.insert(victim, fresh);
    ring.coordinator.ready();
    assert_eq!(ring.coordinator.pids(), ring.pids(), "the survivors are the same processes");
    assert!(ring.coordinator.process.runs());
    assert_eq!(short_request(ring.url()), expected);
}

#[test]
fn a_dead_middle_is_named_and_replaced() {
    a_stage_dies(Ring::start(&CUT), 1);
}

#[test]
fn a_dead_head_is_named_and_replaced() {
    a_stage_dies(Ring::start(&CUT), 0);
}

#[test]
fn a_dead_tail_of_a_ring_that_dialled_in_is_named_and_replaced_by_another_identity() {
    let mut ring = Ring::dialling(&CUT);
    let expected = short_request(ring.url());
    let peer = ring.stages[2].peer.clone();
    let error = struck(&ring, || ring.stages[2].process.signal(Signal::KILL));
    names(&error, "4:7", &peer);
    ring.stages.pop().unwrap().process.kill();
    ring.coordinator.misses(&["layers 4:7 are missing"]);
    let fresh = Stage::start_as(&ring.keys, "spare", "4:7", &["--coordinator", &ring.coordinator.address]);
    assert_ne!(fresh.peer, peer);
    ring.stages.push(fresh);
    ring.coordinator.ready();
    assert_eq!(ring.coordinator.pids(), ring.pids());
    assert_eq!(short_request(ring.url()), expected);
}

#[track_caller]
fn a_stage_freezes(mut ring: Ring, victim: usize) {
    let expected = short_request(ring.url());
    let stage = &ring.stages[victim];
    let error = struck(&ring, || stage.process.signal(Signal::STOP));
    names(&error, &stage.range, &stage.peer);
    ring.coordinator.misses(&[&stage.range]);
    assert!(ring.stages[victim].process.runs(), "it is frozen, not dead");
    ring.stages[victim].process.signal(Signal::CONT);
    ring.coordinator.ready();
    assert_eq!(ring.coordinator.pids(), ring.pids(), "nobody was replaced");
    assert_eq!(short_request(ring.url()), expected);
}

#[test]
fn a_frozen_middle_comes_back() {
    a_stage_freezes(Ring::start(&CUT), 1);
}

#[test]
fn a_frozen_tail_of_a_ring_that_dialled_in_comes_back() {
    a_stage_freezes(Ring::dialling(&CUT), 2);
}

#[test]
fn a_short_freeze_is_not_a_fault() {
    let ring = Ring::start(&CUT);
    let mut stream = http::stream(ring.url(), &long_request());
    for _ in 0..5 {
        stream.event().unwrap();
    }
    ring.stages[1].process.signal(Signal::STOP);
    until("the coordinator suspects it", || {
        let members = ring.coordinator.ring()["members"].take();
        members.as_array().unwrap().iter().any(|member| member["alive"] == false).then_some(())
    });
    ring.stages[1].process.signal(Signal::CONT);
    let events = stream.events();
    let verdict = events[events.len() - 2].json();
    assert_eq!(verdict["choices"][0]["finish_reason"], "length", "{verdict}");
}

/// Kills the coordinator and starts it again with the same identity at the same address.
#[track_caller]
fn the_coordinator_dies(ring: Ring, more: &[&str]) {
    let expected = short_request(ring.url());
    let mut stream = http::stream(ring.url(), &long_request());
    stream.event().unwrap();
    let listen = ring.coordinator.listen();
    let Ring { keys, stages, coordinator } = ring;
    coordinator.process.kill();
    let coordinator = Listening::start(&keys, &[&["--listen", &listen], more].concat());
    let ring = Ring { keys, stages, coordinator };
    ring.coordinator.ready();
    assert_eq!(ring.coordinator.pids(), ring.pids(), "the stages are the same processes");
    assert_eq!(short_request(ring.url()), expected);
}

#[test]
fn a_dead_coordinator_can_be_started_again_and_dials() {
    let ring = Ring::start(&CUT);
    let dial: Vec<String> =
        ring.stages.iter().flat_map(|stage| ["--stage".to_owned(), stage.address.clone()]).collect();
    let dial: Vec<&str> = dial.iter().map(String::as_str).collect();
    the_coordinator_dies(ring, &dial);
}

#[test]
fn a_dead_coordinator_can_be_started_again_and_is_dialled() {
    the_coordinator_dies(Ring::dialling(&CUT), &["--open"]);
}

/// Waits until no session is open, on the coordinator and on every stage.
#[track_caller]
fn idle(ring: &Ring) {
    until("every session is freed", || {
        let status = ring.coordinator.ring();
        let members = status["members"].as_array().unwrap();
        let open = members.iter().any(|member| member["sessions"] != 0);
        (status["sessions"] == 0 && status["in_flight"] == 0 && !open).then_some(())
    });
}

#[test]
fn a_client_that_leaves_frees_its_session_everywhere() {
    let ring = Ring::start(&CUT);
    let mut stream = http::stream(ring.url(), &long_request());
    stream.event().unwrap();
    until("the session is seen on every stage", || {
        let status = ring.coordinator.ring();
        if status["sessions"] == 0 {
            // It was at its end before every stage had reported.
            stream = http::stream(ring.url(), &long_request());
            stream.event().unwrap();
        }
        let members = status["members"].as_array().unwrap();
        (status["sessions"] == 1 && members.iter().all(|member| member["sessions"] == 1)).then_some(())
    });
    let begun = clock::now();
    drop(stream);
    until("the session is freed", || (ring.coordinator.ring()["sessions"] == 0).then_some(()));
    let took = clock::now() - begun;
    assert!(took < Duration::from_secs(2), "{took:?}");
    idle(&ring);
    short_request(ring.url());

    // One that waits for an answer in one piece leaves as well; so does `ringctl generate`.
    let generate = Process::start(
        RINGCTL,
        &["generate", "--url", ring.url(), "--prompt", "And", "--max-new", "2000", "--ignore-eos"],
    );
    generate.writes(20);
    generate.signal(Signal::INT);
    let ended = generate.ended();
    assert!(!ended.status.success(), "{ended:?}");
    idle(&ring);
}

#[test]
fn sigterm_drains_a_stage() {
    let mut ring = Ring::start(&CUT);
    let mut stream = http::stream(ring.url(), &long_request());
    for _ in 0..5 {
        stream.event().unwrap();
    }
    let stage = ring.stages.remove(1);
    stage.process.signal(Signal::TERM);
    ring.coordinator.misses(&["2:4", "draining"]);
    let events = stream.events();
    let verdict = events[events.len() - 2].json();
    assert_eq!(verdict["choices"][0]["finish_reason"], "length", "what is open is finished: {verdict}");
    let ended = stage.process.ended();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    ring.coordinator.misses(&["layers 2:4 are missing"]);
}

#[test]
fn sigterm_and_sigint_end_idle_processes_well() {
    for signal in [Signal::TERM, Signal::INT] {
        // At once after the word, and in no ring.
        let stage = Stage::start(&Keys::new(), "0:2", &["--open", "--json-events"]);
        stage.process.signal(signal);
        let ended = stage.process.ended();
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        assert!(ended.out.contains(r#"EVENT {"event":"draining"}"#), "{ended:?}");
        let coordinator = Listening::start(&Keys::new(), &["--open"]);
        coordinator.process.signal(signal);
        let ended = coordinator.process.ended();
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    }
}

#[test]
fn a_stage_that_is_back_before_it_was_missed() {
    for victim in [0, 1, 2] {
        let mut ring = Ring::start(&CUT);
        let expected = short_request(ring.url());
        let address = ring.stages[victim].address.clone();
        let listen = address.split("/p2p/").next().unwrap();
        ring.stages.remove(victim).process.kill();
        let coordinator = ring.keys.peer("coordinator");
        let fresh = Stage::start(&ring.keys, CUT[victim], &["--listen", listen, "--allow", &coordinator]);
        ring.stages.insert(victim, fresh);
        until("the fresh stage is in the ring", || (ring.coordinator.pids() == ring.pids()).then_some(()));
        ring.coordinator.ready();
        assert_eq!(short_request(ring.url()), expected);
    }
}

/// The connection of the fresh process replaces the old one while the coordinator still speaks to
/// the stage that it lost.
#[test]
fn a_stage_restarted_at_once_under_a_session_is_taken_back() {
    let mut ring = Ring::dialling(&CUT);
    let expected = short_request(ring.url());
    for victim in [0, 1, 2, 0, 2] {
        let body =
            json!({"prompt": "And it came", "max_tokens": 1500, "temperature": 0, "ignore_eos": true, "stream": true});
        let mut answer = http::stream(ring.url(), &body);
        assert!(answer.event().is_some(), "the session is open");
        ring.stages.remove(victim).process.kill();
        let fresh = Stage::start(&ring.keys, CUT[victim], &["--coordinator", &ring.coordinator.address]);
        ring.stages.insert(victim, fresh);
        until("the fresh stage is in the ring", || (ring.coordinator.pids() == ring.pids()).then_some(()));
        ring.coordinator.ready();
        assert_eq!(short_request(ring.url()), expected);
    }
}

#[test]
fn two_dead_stages_are_both_missing_and_both_replaced() {
    let mut ring = Ring::dialling(&CUT);
    let expected = short_request(ring.url());
    for stage in ring.stages.drain(1..) {
        stage.process.signal(Signal::KILL);
    }
    ring.coordinator.misses(&["layers 2:7 are missing"]);
    for range in &CUT[1..] {
        ring.stages.push(Stage::start(&ring.keys, range, &["--coordinator", &ring.coordinator.address]));
    }
    ring.coordinator.ready();
    assert_eq!(ring.coordinator.pids(), ring.pids());
    assert_eq!(short_request(ring.url()), expected);
}

#[test]
fn a_frozen_coordinator_goes_on() {
    let ring = Ring::start(&CUT);
    let expected = short_request(ring.url());
    ring.coordinator.process.signal(Signal::STOP);
    let begun = clock::now();
    until("stages count as silent", || (clock::now() - begun > Duration::from_secs(4)).then_some(()));
    ring.coordinator.process.signal(Signal::CONT);
    ring.coordinator.ready();
    until("a request is served", || {
        let body =
            json!({"prompt": "And it came to pass", "max_tokens": 12, "temperature": 0, "return_token_ids": true});
        let (status, mut answer) = http::complete(ring.url(), &body);
        (status == 200).then(|| assert_eq!(answer["choices"][0]["token_ids"].take(), expected))
    });
    assert_eq!(ring.coordinator.pids(), ring.pids());
}

#[test]
fn a_coordinator_that_is_told_to_end_says_so_to_its_clients() {
    let ring = Ring::start(&CUT);
    let mut stream = http::stream(ring.url(), &long_request());
    stream.event().unwrap();
    ring.coordinator.process.signal(Signal::TERM);
    let error = failure(&stream.events());
    assert_eq!(error["code"], "shutting_down", "{error}");
    let Ring { coordinator, stages, .. } = ring;
    assert_eq!(coordinator.process.ended().status.code(), Some(0));
    for mut stage in stages {
        assert!(stage.process.runs());
        stage.process.signal(Signal::TERM);
        assert_eq!(stage.process.ended().status.code(), Some(0));
    }
}

#[test]
fn an_answer_in_one_piece_and_the_command_fail_with_the_stage() {
    let ring = Ring::start(&CUT);
    let mut body = long_request();
    body["stream"] = json!(false);
    let url = ring.url().to_owned();
    let asking = std::thread::spawn(move || http::complete(&url, &body));
    let generate = Process::start(
        RINGCTL,
        &["generate", "--json", "--url", ring.url(), "--prompt", "And", "--max-new", "2000", "--ignore-eos"],
    );
    generate.writes(20);
    until("both are served", || (ring.coordinator.ring()["sessions"] == 2).then_some(()));
    ring.stages[1].process.signal(Signal::KILL);
    let (status, answer) = asking.join().unwrap();
    assert_eq!(status, 502, "{answer}");
    names(&answer["error"], "2:4", &ring.stages[1].peer);
    let ended = generate.ended();
    assert!(!ended.status.success() && ended.err.contains("stage 2:4 "), "{ended:?}");
}
