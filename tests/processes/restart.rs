//! The coordinator dies or freezes under a stream, and another one goes on from its log: the client reads
//! on with the last event's id, and the ids are those of an unbroken run.

use rustix::process::Signal;
use serde_json::{Value, json};

use super::http::{self, Event};
use super::rig::{CUT, Listening, Ring, until};

const NEW: usize = 600;

fn request(temperature: f64) -> Value {
    json!({"prompt": "And it came to pass", "max_tokens": NEW, "temperature": temperature, "seed": 11,
           "ignore_eos": true, "stream": true, "return_token_ids": true})
}

/// The token ids of events, which must be numbered without a gap from `from` on.
#[track_caller]
fn ids(events: &[Event], from: usize) -> Vec<u64> {
    for (at, event) in events.iter().enumerate() {
        assert!(event.id.ends_with(&format!(":{}", from + at)), "event {} at {}", event.id, from + at);
    }
    let of = |event: &Event| match event.data.as_str() {
        "[DONE]" => Vec::new(),
        _ => event.json()["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default(),
    };
    events.iter().flat_map(of).map(|id| id.as_u64().unwrap()).collect()
}

/// Reads the rest of the stream whose events so far are `events`, at another coordinator.
#[track_caller]
fn read_on(url: &str, mut events: Vec<Event>) -> Vec<u64> {
    let last = events.last().unwrap().id.clone();
    let (name, _) = last.rsplit_once(':').unwrap();
    let headers = [("last-event-id", last.as_str()), ("authorization", "Bearer a")];
    for wrong in [&headers[..1], &[headers[0], ("authorization", "Bearer b")]] {
        let (status, body) = http::resume(url, name, wrong).unwrap().json();
        assert_eq!((status, &body["error"]["code"]), (404, &Value::from("no_stream")), "{body}");
    }
    let mut stream = http::resume(url, name, &headers).unwrap();
    assert_eq!(stream.status, 200);
    events.extend(stream.events());
    let [.., end, done] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!((end.json()["choices"][0]["finish_reason"].as_str(), done.data.as_str()), (Some("length"), "[DONE]"));
    ids(&events, 0)
}

fn start(temperature: f64) -> (Ring, tempfile::TempDir, Vec<u64>) {
    let folder = tempfile::tempdir().unwrap();
    let ring = Ring::start_with(&CUT, &["--heal-wait", "30", "--log", folder.path().to_str().unwrap()]);
    let expected = ids(&http::stream(ring.url(), &request(temperature)).events(), 0);
    assert_eq!(expected.len(), NEW);
    (ring, folder, expected)
}

/// Options of the next coordinator of a ring, which dials its stages.
fn next(ring: &Ring, folder: &tempfile::TempDir) -> Vec<String> {
    let stages = ring.stages.iter().flat_map(|stage| ["--stage".to_owned(), stage.address.clone()]);
    let folder = folder.path().to_str().unwrap();
    stages.chain(["--heal-wait", "30", "--log", folder].map(str::to_owned)).collect()
}

fn begin(ring: &Ring, temperature: f64, count: usize) -> (http::Answer, Vec<Event>) {
    let mut stream = http::stream_as(ring.url(), &request(temperature), &[("authorization", "Bearer a")]);
    let events = (0..count).map(|_| stream.event().unwrap()).collect();
    (stream, events)
}

#[test]
fn a_killed_coordinator_is_started_again_and_the_stream_is_read_on() {
    let (ring, folder, expected) = start(0.0);
    let (mut stream, mut events) = begin(&ring, 0.0, 5);
    let (listen, http) = (ring.coordinator.listen(), ring.coordinator.url.clone());
    let more = next(&ring, &folder);
    let Ring { keys, stages, coordinator } = ring;
    coordinator.process.kill();
    // What was on its way when it died still comes.
    events.extend(std::iter::from_fn(|| stream.event()));
    let pids: Vec<u32> = stages.iter().map(super::rig::Stage::pid).collect();
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let same = ["--listen", &listen, "--http", http.strip_prefix("http://").unwrap()];
    let coordinator = Listening::start(&keys, &[&same, &more[..]].concat());
    assert_eq!(coordinator.url, http);
    assert_eq!(read_on(&http, events), expected);
    assert_eq!(coordinator.pids(), pids, "the stages are the same processes");
}

#[test]
fn a_frozen_coordinator_is_replaced_on_other_ports_and_spoils_nothing_when_it_is_back() {
    let (ring, folder, expected) = start(0.8);
    let (mut stream, events) = begin(&ring, 0.8, 5);
    ring.coordinator.process.signal(Signal::STOP);
    let more = next(&ring, &folder);
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let fresh = Listening::start(&ring.keys, &more);
    assert_ne!(fresh.url, ring.coordinator.url);
    assert_eq!(read_on(&fresh.url, events), expected);
    fresh.ready();
    let view = fresh.ring()["view"].clone();
    ring.coordinator.process.signal(Signal::CONT);
    ring.coordinator.misses(&["another coordinator leads the ring"]);
    let left = stream.events();
    let [.., error, done] = left.as_slice() else { panic!("{left:?}") };
    assert_eq!(error.json()["error"]["code"], "detached", "{error:?}");
    assert_eq!((error.id.as_str(), done.data.as_str()), ("", "[DONE]"), "the last id stays that of a token");
    until("the ring serves", || {
        let (status, answer) = http::complete(&fresh.url, &json!({"prompt": "And", "max_tokens": 3}));
        (status == 200 && answer["choices"][0]["finish_reason"] == "length").then_some(())
    });
    assert_eq!(fresh.ring()["view"], view, "the ring is still the new one's");
}

#[test]
fn a_client_whose_connection_broke_reads_on() {
    let (ring, _folder, expected) = start(0.0);
    let (stream, events) = begin(&ring, 0.0, 5);
    drop(stream);
    assert_eq!(read_on(ring.url(), events), expected);
    let (status, body) = http::get(ring.url(), "/v1/streams/cmpl-7");
    assert_eq!((status, &body["error"]["code"]), (404, &Value::from("no_stream")), "{body}");
}

#[test]
fn an_answer_in_one_piece_outlives_the_coordinator_by_the_name_that_its_client_gave_it() {
    let (ring, folder, expected) = start(0.8);
    let mut body = request(0.8);
    body["stream"] = json!(false);
    let named = [("x-client-request-id", "a-letter"), ("authorization", "Bearer a")];
    let asked = http::begin(ring.url(), &body, &named);
    // Another one, by whom nobody could ask for the answer.
    let unnamed = http::begin(ring.url(), &body, &named[1..]);
    until("tokens are settled", || {
        let status = ring.coordinator.ring();
        (status["sessions"] == 2 && status["settled"].as_u64() >= Some(100)).then_some(())
    });
    let more = next(&ring, &folder);
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let Ring { keys, stages, coordinator } = ring;
    coordinator.process.kill();
    assert!(asked.answer().is_none() && unnamed.answer().is_none(), "the connections broke before any answer");
    let fresh = Listening::start(&keys, &more);
    for headers in [&[][..], &[("authorization", "Bearer b")], &[("last-event-id", "cmpl-7:0"), named[1]]] {
        let (status, answer) = http::resume(&fresh.url, "a-letter", headers).unwrap().json();
        let wanted = if headers.len() == 2 { (400, "invalid_value") } else { (404, "no_stream") };
        assert_eq!((status, answer["error"]["code"].as_str()), (wanted.0, Some(wanted.1)), "{answer}");
    }
    let mut stream = http::resume(&fresh.url, "a-letter", &named[1..]).unwrap();
    assert_eq!(stream.status, 200);
    assert_eq!(ids(&stream.events(), 0), expected);
    until("nothing goes on", || (fresh.ring()["sessions"] == 0).then_some(()));
    let pids: Vec<u32> = stages.iter().map(super::rig::Stage::pid).collect();
    assert_eq!(fresh.pids(), pids, "the stages are the same processes");
    let mut again = http::resume(&fresh.url, "a-letter", &named[1..]).unwrap();
    assert_eq!(ids(&again.events(), 0), expected, "it is kept for a while");
}
