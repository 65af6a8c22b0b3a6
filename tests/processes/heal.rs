//! A stream that is not over before a fault is seen.

use serde_json::{Value, json};

use super::http;
use super::rig::Ring;

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
