//! No stage is left for layers of a stream: the client sees that it waits, and then either goes on as if nothing had
//! been or is told what was missing.

use serde_json::{Value, json};

use super::http;
use super::rig::{CUT, Ring, Stage};

fn request() -> Value {
    json!({"prompt": "And it came to pass", "max_tokens": 600, "temperature": 0, "ignore_eos": true, "stream": true,
           "return_token_ids": true})
}

#[test]
fn a_stream_waits_in_comments_for_a_stage_that_comes_later() {
    let ring = Ring::dialling_with(&CUT, &["--heal-wait", "120"]);
    let expected = http::ids(&http::stream(ring.url(), &request()).events());
    assert_eq!(expected.len(), 600);
    let mut stream = http::stream(ring.url(), &request());
    let mut events: Vec<_> = (0..5).map(|_| stream.event().unwrap()).collect();
    let Ring { keys, mut stages, coordinator } = ring;
    stages.remove(1).process.kill();
    coordinator.misses(&["layers 2:4 are missing"]);
    // What was told before the stage died is still to be read.
    let mut comments = 0;
    while comments == 0 {
        match stream.event_or_comment() {
            Ok(event) => events.push(event.unwrap()),
            Err(words) => {
                assert_eq!(words, "waiting");
                comments += 1;
            }
        }
    }
    assert!(events.len() < 600, "the stage died too late");
    let _spare = Stage::start_as(&keys, "spare", CUT[1], &["--coordinator", &coordinator.address]);
    events.extend(stream.events());
    assert_eq!(http::ids(&events), expected);
}

#[test]
fn a_stream_that_waited_in_vain_is_told_which_layers_were_missing() {
    let ring = Ring::dialling_with(&CUT, &["--heal-wait", "3"]);
    let mut stream = http::stream(ring.url(), &request());
    let mut events: Vec<_> = (0..5).map(|_| stream.event().unwrap()).collect();
    let Ring { keys: _keys, mut stages, coordinator: _coordinator } = ring;
    stages.remove(1).process.kill();
    events.extend(stream.events());
    let [.., last, error, done] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(last.json()["choices"][0]["finish_reason"], "error", "{last:?}");
    let error = error.json()["error"].take();
    assert_eq!(error["code"], "stage_lost", "{error}");
    let said = error["message"].as_str().unwrap();
    assert!(said.contains("2:4") && said.contains("layers 2:4 are missing") && said.contains("3 s"), "{said}");
    assert_eq!(done.data, "[DONE]");
}
