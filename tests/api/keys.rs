//! A service that takes requests with a known key alone.

use std::fs;

use axum::http::{HeaderMap, HeaderValue, header};
use ringfence::api::keys::{Keys, KeysError};
use ringfence::coordinator::job::Finish;
use serde_json::json;

use crate::api::support::{Script, Server, json_body};
use crate::says;

const ALICE: &str = "alice-0123456789abcdef";
const BOB: &str = "bob-fedcba9876543210";

fn keys() -> Keys {
    Keys::parse(&format!("# who may\n\nalice {ALICE}\n  bob\t{BOB}  \r\n")).unwrap()
}

fn bearer(key: &str) -> String {
    format!("authorization: Bearer {key}\r\n")
}

fn client(values: &[&str]) -> Option<String> {
    let mut headers = HeaderMap::new();
    for value in values {
        headers.append(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
    }
    keys().client(&headers).map(str::to_owned)
}

#[test]
fn a_key_is_known_whole_and_alone() {
    assert_eq!(client(&[&format!("Bearer {ALICE}")]).as_deref(), Some("alice"));
    assert_eq!(client(&[&format!("bearer {BOB}")]).as_deref(), Some("bob"));
    let known = format!("Bearer {ALICE}");
    let (shorter, longer) = (&known[..known.len() - 1], format!("{known}0"));
    for unknown in [shorter, longer.as_str(), ALICE, "Bearer ", "Bearer", "", "Basic YWxpY2U6eA==", "Bearer alice"] {
        assert_eq!(client(&[unknown]), None, "{unknown}");
    }
    assert_eq!(client(&[]), None);
    assert_eq!(client(&[&known, &known]), None);
}

#[test]
fn a_file_of_keys_that_can_not_be_used_is_refused_and_no_error_shows_a_key() {
    let says = |text: &str| Keys::parse(text).unwrap_err().to_string();
    let line = "expected NAME KEY, the key of at least 16 visible ASCII characters";
    assert_eq!(says(&format!("alice {ALICE}\nbob")), format!("line 2: {line}"));
    assert_eq!(says("alice short"), format!("line 1: {line}"));
    assert_eq!(says(&format!("alice {ALICE} more")), format!("line 1: {line}"));
    assert_eq!(says("alice schlüssel-0123456789"), format!("line 1: {line}"));
    assert_eq!(says(&format!("a {ALICE}\n#\nb {ALICE}")), "line 3: its key is on an earlier line too");
    assert_eq!(says(&format!("a {ALICE}\na {BOB}")), "line 2: its name is on an earlier line too");
    assert!(matches!(Keys::parse("# none\n"), Err(KeysError::Empty)));
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(Keys::open(&folder.path().join("none")), Err(KeysError::Read(_))));
    let file = folder.path().join("keys");
    fs::write(&file, format!("alice {ALICE}\nbob {BOB}\n")).unwrap();
    assert_eq!(Keys::open(&file).unwrap(), keys());
    assert_eq!(format!("{:?}", keys()), r#"["alice", "bob"]"#);
}

#[tokio::test]
async fn only_who_has_a_key_uses_the_ring() {
    let server = Server::start_keyed(Script::saying(says(" unto Moses", Finish::Length)), keys()).await;
    let body = json!({"prompt": "And the LORD spake", "max_tokens": 4});
    let guarded = ["/v1/models", "/v1/models/tiny", "/v1/streams/cmpl-1", "/ring"];
    for (headers, message) in [
        (String::new(), "no API key: send one as Authorization: Bearer KEY"),
        (bearer("alice-0123456789abcdeg"), "this API key is not known here"),
    ] {
        let mut refused = vec![server.post_as(&body, &headers).await];
        for path in guarded {
            refused.push(server.get_as(path, &headers).await);
        }
        for answer in refused {
            assert!(answer.starts_with("HTTP/1.1 401 Unauthorized\n"), "{answer}");
            let error = &json_body(&answer)["error"];
            let expected = json!({
                "message": message, "type": "invalid_request_error", "param": null, "code": "invalid_api_key",
            });
            assert_eq!(*error, expected);
        }
        let health = server.get_as("/health", &headers).await;
        assert!(health.starts_with("HTTP/1.1 200 OK\n"), "{health}");
    }
    assert_eq!(server.script.requests(), []);
    for path in ["/v1/models", "/v1/models/tiny", "/ring"] {
        let answer = server.get_as(path, &bearer(BOB)).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\n"), "{path}: {answer}");
    }
    let answer = server.post_as(&body, &bearer(ALICE)).await;
    assert_eq!(json_body(&answer)["choices"][0]["text"], " unto Moses");
    assert_eq!(server.script.requests().len(), 1);
}
