//! OpenAI's own clients, unchanged, against a real ring: the Python and the Node client see the same, and
//! what they see is true.

use std::path::Path;

use serde_json::{Value, json};

use super::http;
use super::install::{node, python, script};
use super::rig::{CUT, Process, Ring};

#[track_caller]
fn seen(program: &Path, args: &[&str]) -> Value {
    let ended = Process::run(program.to_str().unwrap(), args);
    assert!(ended.status.success(), "{args:?}: {ended:?}");
    ended.json()
}

#[test]
fn openais_clients_work_unchanged() {
    let (python, node) = (python(), node());
    let ring = Ring::start(&CUT);
    let python = python.map(|folder| seen(&folder.join("venv/bin/python"), &[&script("openai_client.py"), ring.url()]));
    let node = node
        .map(|folder| seen(Path::new("node"), &[&script("openai_client.cjs"), ring.url(), folder.to_str().unwrap()]));
    if let (Some(python), Some(node)) = (&python, &node) {
        assert_eq!(python, node, "both clients see the same");
    }
    for seen in python.iter().chain(&node) {
        check(seen, ring.url());
    }
}

/// What the clients saw is what is on the wire.
#[track_caller]
fn check(seen: &Value, url: &str) {
    let (status, models) = http::get(url, "/v1/models");
    let model = &models["data"][0]["id"];
    assert_eq!((status, &seen["model"], &seen["named"]), (200, model, model), "{seen}");
    let prompt = "<｜begin▁of▁sentence｜>Be brief.\n\n<｜User｜>And the LORD spake unto Moses<｜Assistant｜></think>";
    let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 24});
    let text = http::complete(url, &body).1["choices"][0]["text"].take();
    assert_eq!(seen["chat"], json!(["assistant", text, "length", 24]));
    assert_eq!(seen["chat_stream"], seen["chat"]);
    assert_eq!(seen["stopped_helper"], true, "{seen}");
    assert_eq!((&seen["logprobs"], &seen["greedy"]), (&json!([text, true]), &json!(true)));
    assert_eq!(seen["likeliest"], json!([text, 24]));
    assert_eq!(seen["stopped"], json!([false, "stop"]));

    let several = seen["several"].as_array().unwrap();
    assert_eq!((several.len(), &seen["several"]), (3, &seen["several_stream"]));
    assert!(several[0][1] != several[1][1] && several[1][1] != several[2][1], "{seen}");

    let body = json!({"prompt": "And the LORD spake unto Moses", "temperature": 0, "max_tokens": 24});
    let text = http::complete(url, &body).1["choices"][0]["text"].take();
    assert_eq!((&seen["completion"], &seen["completion_stream"]), (&text, &text));
    assert_eq!(seen["completion_logprobs"], json!([text, true]));

    let refused: Vec<Value> =
        seen["refused"].as_array().unwrap().iter().map(|error| json!(error.as_array().unwrap()[..3])).collect();
    let expected = json!([
        [400, "temperature", "invalid_value"],
        [400, "max_tokens", "context_length_exceeded"],
        [400, "response_format", "unsupported_field"],
        [400, "messages", "invalid_value"],
        [404, "model", "model_not_found"],
    ]);
    assert_eq!(json!(refused), expected, "{seen}");
}
