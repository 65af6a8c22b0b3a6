//! `ringctl demo` from start to end, and what becomes of its processes.

use std::collections::BTreeMap;
use std::fs;

use ringfence::ids::{LayerRange, TokenId};
use ringfence::model::Checkpoint;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::copy::MODEL;
use super::rig::{Ended, Process, RINGCTL, children, gone, started, until};

/// Runs the demo with `--json`.
fn demo(args: &[&str]) -> Ended {
    Process::run(RINGCTL, &[&["demo", "--json"], args].concat())
}

/// Runs a demo that must succeed, and checks the shape of its object.
#[track_caller]
fn proven(args: &[&str]) -> Value {
    let ended = demo(args);
    assert!(ended.status.success(), "{args:?}: {ended:?}");
    let object = ended.json();
    check_shape(&object, args);
    let text = object["text"].as_str().unwrap();
    assert!(ended.out.starts_with(text), "the text is streamed to stdout: {ended:?}");
    assert!(ended.out.contains("ids equal to one undrafted process") && ended.out.contains("yes"), "{ended:?}");
    object
}

#[track_caller]
fn numbers(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().map(|values| values.iter().map(|value| value.as_f64().unwrap()).collect());
    numbers.unwrap_or_else(|| panic!("expected an array of numbers: {value}"))
}

#[track_caller]
fn check_shape(object: &Value, args: &[&str]) {
    let given = |name: &str| args.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1]);
    let ids: Vec<TokenId> = serde_json::from_value(object["token_ids"].clone()).unwrap();
    let most = given("--max-new").map_or(128, |text| text.parse().unwrap());
    assert!((1..=most).contains(&ids.len()), "{object}");
    assert_eq!(object["reference_equal"], true, "{object}");
    let number = |name: &str| object[name].as_f64().unwrap_or_else(|| panic!("{name} is no number: {object}"));
    assert!(number("ttft_ms") > 0.0 && number("tokens_per_second") >= 0.0, "{object}");
    let mut stages = 0;
    let mut end = 0;
    for stage in object["stages"].as_array().unwrap() {
        let range: LayerRange = stage["range"].as_str().unwrap().parse().unwrap();
        assert_eq!(range.lo(), end, "the ranges tile the layers: {object}");
        assert!(stage["peer"].as_str().unwrap().starts_with("12D3KooW"), "{object}");
        let pid = u32::try_from(stage["pid"].as_u64().unwrap()).unwrap();
        assert_eq!(started(pid), None, "a stage lives on: {object}");
        end = range.hi();
        stages += 1;
    }
    assert_eq!(end, 7, "{object}");
    assert_eq!(stages, given("--stages").map_or(3, |text| text.parse().unwrap()), "{object}");
    assert_eq!(numbers(&object["frames_computed_per_token"]).len(), stages, "{object}");
    // Four streams of 256 values: a byte each and a bf16 scale a stream, or two bytes each; and the
    // frame's header.
    let payload = if given("--wire") == Some("bf16") { 2048.0 } else { 1032.0 };
    let header = number("wire_bytes_per_position") - payload;
    assert!((1.0..=128.0).contains(&header), "{object}");
    let in_flight = object["max_in_flight"].as_u64().unwrap();
    if given("--mode") == Some("plain") {
        assert_eq!((&object["acceptance_length"], &object["accept_by_depth"]), (&Value::Null, &Value::Null));
        assert_eq!(in_flight, 1, "{object}");
        assert!(number("frames_per_token") <= 1.0, "{object}");
    } else {
        assert!(number("acceptance_length") >= 1.0 || ids.len() == 1, "{object}");
        assert!(numbers(&object["accept_by_depth"]).iter().all(|rate| (0.0..=1.0).contains(rate)), "{object}");
        assert!(number("frames_per_token") > 0.0 || ids.len() == 1, "{object}");
        assert!(in_flight >= 1, "{object}");
    }
}

/// Runs both modes; both must give the same tokens.
#[track_caller]
fn both_modes(args: &[&str]) -> Vec<Value> {
    let pipelined = proven(args);
    let plain = proven(&[&["--mode", "plain"], args].concat());
    assert_eq!(pipelined["token_ids"], plain["token_ids"], "{args:?}");
    assert_eq!(pipelined["text"], plain["text"], "{args:?}");
    assert!(pipelined["acceptance_length"].as_f64().unwrap() > 1.0, "drafts are taken: {pipelined}");
    assert!(pipelined["max_in_flight"].as_u64().unwrap() > 1, "frames overlap: {pipelined}");
    pipelined["token_ids"].as_array().unwrap().clone()
}

#[test]
fn modes_agree_on_fp8() {
    let greedy = both_modes(&["--max-new", "32"]);
    assert_eq!(greedy.len(), 32);
    let sampled = both_modes(&["--max-new", "32", "--temperature", "0.8", "--seed", "7"]);
    assert_ne!(greedy, sampled);
    assert_ne!(sampled, both_modes(&["--max-new", "32", "--temperature", "0.8", "--seed", "8"]));
}

#[test]
fn modes_agree_on_bf16() {
    both_modes(&["--wire", "bf16", "--max-new", "32"]);
    both_modes(&["--wire", "bf16", "--max-new", "32", "--temperature", "0.8", "--seed", "7"]);
}

#[test]
fn any_number_of_stages_that_fits() {
    for stages in ["1", "2", "5"] {
        both_modes(&["--stages", stages, "--max-new", "24"]);
    }
    for stages in ["6", "7"] {
        proven(&["--stages", stages, "--mode", "plain", "--max-new", "24"]);
    }
}

#[test]
fn a_number_of_stages_that_does_not_fit_is_refused() {
    let refused = |args: &[&str], words: &[&str]| {
        let ended = demo(args);
        assert!(!ended.status.success() && ended.out.is_empty(), "{ended:?}");
        assert!(words.iter().all(|word| ended.err.contains(word)), "{args:?}: {ended:?}");
    };
    for stages in ["6", "7"] {
        refused(&["--stages", stages], &["taps layers [4, 5, 6]", "5 stages at most", "--mode plain"]);
    }
    for mode in ["pipelined", "plain"] {
        for stages in ["0", "8"] {
            refused(&["--stages", stages, "--mode", mode], &[&format!("--stages {stages}"), "7 layers", "1 to 7"]);
        }
    }
}

#[test]
fn prompts_come_as_text_or_ids_and_from_any_folder() {
    let text = "And the LORD spake unto Moses";
    let checkpoint = Checkpoint::tiny().unwrap();
    let tokenizer = checkpoint.tokenizer_json().unwrap();
    let ids = ringfence::api::text::Vocabulary::from_bytes(&tokenizer, &[]).unwrap().encode(text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ids.json");
    fs::write(&file, json!(ids).to_string()).unwrap();
    let file = file.to_str().unwrap();
    let from_text = proven(&["--prompt", text, "--max-new", "9", "--model", MODEL]);
    let from_ids = proven(&["--prompt-ids", file, "--max-new", "9", "--model", "tiny"]);
    assert_eq!(from_text["token_ids"], from_ids["token_ids"]);
    assert_eq!(from_text["prompt_tokens"], ids.len());
    let one = proven(&["--prompt-ids", file, "--max-new", "1"]);
    assert_eq!(one["token_ids"].as_array().unwrap().len(), 1);
    assert_eq!(one["token_ids"][0], from_ids["token_ids"][0]);
    let one = proven(&["--prompt-ids", file, "--max-new", "1", "--mode", "plain"]);
    assert_eq!(one["token_ids"][0], from_ids["token_ids"][0]);
}

#[test]
fn a_prompt_that_can_not_be_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ids.json");
    let path = file.to_str().unwrap();
    let long = json!(vec![5; 2048]).to_string();
    let cases: [(&str, &[&str]); 4] = [
        ("[]", &["empty"]),
        ("[5, 2048]", &["2048", "2047"]),
        ("{}", &["ids.json", "JSON array"]),
        (&long, &["2048", "128", "context"]),
    ];
    for (ids, words) in cases {
        fs::write(&file, ids).unwrap();
        let ended = demo(&["--prompt-ids", path]);
        assert!(!ended.status.success() && ended.out.is_empty(), "{ended:?}");
        assert!(words.iter().all(|word| ended.err.contains(word)), "{words:?}: {ended:?}");
        assert!(!ended.err.contains("pid"), "no stage was started: {ended:?}");
    }
    for args in [
        ["--max-new", "0"],
        ["--temperature", "-1"],
        ["--temperature", "NaN"],
        ["--temperature", "2.1"],
        ["--model", "/nowhere"],
        ["--device", "gpu"],
        ["--device", "cpu,cpu"],
    ] {
        let ended = demo(&[&format!("{}={}", args[0], args[1])]);
        assert!(!ended.status.success() && ended.out.is_empty(), "{ended:?}");
        assert!(ended.err.contains(args[1].trim_start_matches('-')), "{ended:?}");
        assert!(!ended.err.contains("pid"), "no stage was started: {ended:?}");
    }
}

#[test]
fn every_stage_computes_where_it_was_told_to() {
    proven(&["--device", "cpu,cpu,cpu", "--max-new", "5"]);
    // No machine has so many: the one stage says so, and the ring ends.
    let ended = demo(&["--device", "cpu,cuda:99,cpu", "--max-new", "5"]);
    assert!(!ended.status.success(), "{ended:?}");
    assert!(ended.err.contains("--device cuda:99"), "{ended:?}");
}

/// A demo in the middle of its text, and its children.
fn in_the_middle() -> (Process, BTreeMap<u32, u64>) {
    let demo = Process::start(RINGCTL, &["demo", "--json", "--max-new", "2000", "--prompt", "It was"]);
    demo.writes(40);
    let children = children(demo.pid());
    assert_eq!(children.len(), 4, "three stages and a coordinator");
    assert!(!demo.out().contains("tokens per second"), "it is in the middle");
    (demo, children)
}

#[test]
fn ctrl_c_and_sigterm_stop_every_process() {
    for signal in [Signal::INT, Signal::TERM] {
        let (demo, children) = in_the_middle();
        demo.signal(signal);
        let ended = demo.ended();
        assert!(!ended.status.success(), "{ended:?}");
        assert!(ended.err.contains("stopped by a signal"), "{ended:?}");
        for (pid, since) in &children {
            assert_ne!(started(*pid), Some(*since), "a child outlives the demo: {ended:?}");
        }
    }
}

#[test]
fn ctrl_c_ends_the_demo_while_it_checks() {
    let demo = Process::start(RINGCTL, &["demo", "--json", "--max-new", "900", "--prompt", "It was"]);
    until("the ring is up", || (children(demo.pid()).len() == 4).then_some(()));
    until("the ring is down", || children(demo.pid()).is_empty().then_some(()));
    demo.signal(Signal::INT);
    let ended = demo.ended();
    assert!(!ended.status.success() && ended.err.contains("stopped by a signal"), "{ended:?}");
}

#[test]
fn ctrl_c_ends_a_demo_that_has_just_begun() {
    let demo = Process::start(RINGCTL, &["demo", "--json"]);
    let children =
        until("the first stage is there", || Some(children(demo.pid())).filter(|children| !children.is_empty()));
    demo.signal(Signal::INT);
    let ended = demo.ended();
    assert!(!ended.status.success(), "{ended:?}");
    gone(&children);
}

#[test]
fn no_process_survives_a_kill_of_the_demo() {
    let (demo, children) = in_the_middle();
    demo.kill();
    gone(&children);
}
