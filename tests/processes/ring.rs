//! Rings by hand: static addresses, stages that dial in, one stage alone; the commands that use them.

use std::fs;

use serde_json::{Value, json};

use super::http;
use super::rig::{CUT, Keys, Listening, Process, RINGCTL, Ring, Stage};

const PROMPT: &str = "And the LORD spake unto Moses";

/// What `ringctl` says on the last line of stdout.
#[track_caller]
fn ringctl(args: &[&str]) -> Value {
    let ended = Process::run(RINGCTL, args);
    assert!(ended.status.success(), "{args:?}: {ended:?}");
    ended.json()
}

/// The token ids of the demo on the usual cut, which proves them against a single process.
#[track_caller]
fn proven_ids(stages: &str) -> Value {
    ringctl(&["demo", "--json", "--stages", stages, "--prompt", PROMPT, "--max-new", "24"])["token_ids"].take()
}

#[track_caller]
fn generated(url: &str, more: &[&str]) -> Value {
    let args = ["generate", "--json", "--url", url, "--prompt", PROMPT, "--max-new", "24"];
    ringctl(&[&args, more].concat())
}

#[test]
fn static_addresses_make_a_ring_that_serves() {
    let ring = Ring::start(&CUT);
    for stage in &ring.stages {
        let ready = &stage.ready;
        assert_eq!(ready["range"], stage.range, "{ready}");
        assert_eq!(ready["pid"], stage.pid(), "{ready}");
        assert!(stage.address.starts_with("/ip4/127.0.0.1/udp/"), "loopback unless told otherwise: {ready}");
        assert!(stage.address.ends_with(&format!("/quic-v1/p2p/{}", stage.peer)), "{ready}");
        assert!(ready["device"].as_str().unwrap().starts_with("cpu"), "{ready}");
    }
    let members = ring.coordinator.ring()["members"].take();
    for (member, stage) in members.as_array().unwrap().iter().zip(&ring.stages) {
        assert_eq!((&member["peer"], &member["range"]), (&json!(stage.peer), &json!(stage.range)), "{member}");
        assert_eq!((&member["in_ring"], &member["alive"]), (&json!(true), &json!(true)), "{member}");
    }
    assert_eq!(ring.coordinator.pids(), ring.pids());

    let answer = generated(ring.url(), &[]);
    assert_eq!(answer["token_ids"], proven_ids("3"));
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(answer["completion_tokens"], 24);
    assert_eq!(generated(ring.url(), &["--mode", "plain"])["token_ids"], answer["token_ids"]);

    streams_token_by_token(ring.url(), &answer);
    stops_at_a_string(ring.url(), answer["text"].as_str().unwrap());
    refuses_what_is_too_long(ring.url());
}

fn streams_token_by_token(url: &str, answer: &Value) {
    let body = json!({"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": true, "return_token_ids": true,
                      "stream_options": {"include_usage": true}});
    let events = http::stream(url, &body).events();
    let (request, _) = events[0].id.split_once(':').unwrap();
    assert_eq!(events.len(), 24 + 3, "a token each, the verdict, the usage, the end");
    let mut text = String::new();
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event.id, format!("{request}:{at}"));
        if let Some(token) = answer["token_ids"].get(at) {
            let choice = event.json()["choices"][0].take();
            assert_eq!((&choice["token_ids"], &choice["finish_reason"]), (&json!([token]), &Value::Null));
            text.push_str(choice["text"].as_str().unwrap());
        }
    }
    let verdict = events[24].json();
    text.push_str(verdict["choices"][0]["text"].as_str().unwrap());
    assert_eq!(json!(text), answer["text"]);
    assert_eq!(verdict["choices"][0]["finish_reason"], "length");
    assert_eq!(verdict["id"], request);
    assert_eq!(events[25].json()["usage"]["completion_tokens"], 24);
    assert_eq!(events[26].data, "[DONE]");
}

fn stops_at_a_string(url: &str, text: &str) {
    // The second word of the text, wherever tokens begin and end.
    let stop = text.split_whitespace().nth(1).unwrap();
    let body = json!({"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stop": [stop]});
    let (status, answer) = http::complete(url, &body);
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{answer}");
    assert_eq!(choice["text"], text[..text.find(stop).unwrap()], "{answer}");
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < 24, "{answer}");
    let last = generated(url, &["--stop", stop]);
    assert_eq!((&last["finish_reason"], &last["text"]), (&choice["finish_reason"], &choice["text"]));
}

fn refuses_what_is_too_long(url: &str) {
    let (status, answer) = http::complete(url, &json!({"prompt": vec![5; 100], "max_tokens": 2000}));
    assert_eq!(status, 400, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("100") && message.contains("2000") && message.contains("2048"), "{message}");
    let ended = Process::run(RINGCTL, &["generate", "--url", url, "--prompt", PROMPT, "--max-new", "4000"]);
    assert!(!ended.status.success() && ended.err.contains("4000"), "{ended:?}");
}

#[test]
fn stages_that_dial_in_make_a_ring_as_they_come() {
    let keys = Keys::new();
    let allow: Vec<String> = CUT.iter().flat_map(|range| ["--allow".to_owned(), keys.peer(range)]).collect();
    let allow: Vec<&str> = allow.iter().map(String::as_str).collect();
    let mut coordinator = Listening::start(&keys, &allow);
    assert_eq!(coordinator.peer, keys.peer("coordinator"), "an identity lasts");
    coordinator.misses(&["layers 0:7 are missing"]);
    let (status, refusal) = http::complete(&coordinator.url, &json!({"prompt": "a"}));
    assert_eq!(status, 503, "{refusal}");
    assert!(refusal["error"]["message"].as_str().unwrap().contains("layers 0:7"), "{refusal}");

    let dial = coordinator.address.clone();
    let start = |range: &str| Stage::start(&keys, range, &["--coordinator", &dial]);
    let middle = start("2:4");
    coordinator.misses(&["layers 0:2, 4:7 are missing"]);
    coordinator.process.notes(&["waiting", "0:2, 4:7"]);
    let tail = start("4:7");
    coordinator.misses(&["layers 0:2 are missing"]);
    let head = start("0:2");
    coordinator.ready();
    let said = coordinator.process.says("READY ");
    assert_eq!(said["ring"], json!(CUT));
    assert_eq!(said["http"], coordinator.url);
    assert_eq!(coordinator.pids(), [head.pid(), middle.pid(), tail.pid()]);
    let ring = coordinator.ring();
    assert_eq!((&ring["sessions"], &ring["in_flight"], &ring["ready"]), (&json!(0), &json!(0), &json!(true)), "{ring}");
    assert_eq!(generated(&coordinator.url, &[])["token_ids"], proven_ids("3"));
}

#[test]
fn one_stage_can_be_the_whole_ring() {
    let ring = Ring::dialling(&["0:7"]);
    let answer = generated(ring.url(), &[]);
    assert_eq!(answer["token_ids"], proven_ids("1"));
    assert!(answer["acceptance_length"].as_f64().unwrap() > 1.0, "{answer}");
}

#[test]
fn scores_are_equal_on_a_running_ring_and_on_one_started_for_them() {
    let ring = Ring::start(&CUT);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ids.json");
    let ids: Vec<u32> = (0..90).map(|at| 8 + (at * 37) % 1000).collect();
    fs::write(&file, json!(ids).to_string()).unwrap();
    let file = file.to_str().unwrap();
    for wire in ["fp8", "bf16"] {
        let there = ringctl(&["score", "--json", "--wire", wire, "--ids", file, "--url", ring.url()]);
        let here = ringctl(&["score", "--json", "--wire", wire, "--ids", file]);
        assert_eq!(there, here);
        let list = |name: &str| here[name].as_array().unwrap().clone();
        assert_eq!((list("argmax").len(), list("logprobs").len(), list("top").len()), (90, 89, 90));
        let logprobs: Vec<f64> = list("logprobs").iter().map(|value| value.as_f64().unwrap()).collect();
        assert!(logprobs.iter().all(|p| *p < 0.0), "{logprobs:?}");
        let mean = -logprobs.iter().sum::<f64>() / 89.0;
        assert!((here["mean_nll"].as_f64().unwrap() - mean).abs() < 1e-5, "{mean}");
        for (top, argmax) in list("top").iter().zip(list("argmax")) {
            assert_eq!((top.as_array().unwrap().len(), &top[0][0]), (5, &argmax));
        }
    }
    let ended = Process::run(RINGCTL, &["score", "--ids", file, "--url", ring.url()]);
    assert!(ended.status.success() && ended.out.contains("mean negative log-likelihood"), "{ended:?}");
}

#[test]
fn nobody_there_is_said() {
    // The port was free a moment ago, and nothing that answers HTTP takes it.
    let port = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    let ended = Process::run(RINGCTL, &["generate", "--url", &url, "--prompt", "a"]);
    assert!(!ended.status.success() && ended.err.contains(&url) && ended.err.contains("--url"), "{ended:?}");
}
