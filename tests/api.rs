//! The HTTP API against a scripted coordinator: what is on the wire, byte for byte.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod api {
    mod chat;
    mod client;
    mod deepseek;
    #[path = "../clients/install.rs"]
    mod install;
    mod keys;
    pub(crate) mod support;
}

use std::time::Duration;

use api::support::{Script, Server, done, json_body, stage_lost, text_ids, token};
use expect_test::expect;
use ringfence::coordinator::job::{Event, Finish, SubmitError};
use ringfence::ids::TokenId;
use ringfence::proto::frame::{Answer, Scores};
use serde_json::{Value, json};

/// Events of a session that says `text`.
fn says(text: &str, finish: Finish) -> Vec<Event> {
    let ids = text_ids(text);
    let count = ids.len();
    let tokens = ids.into_iter().enumerate().map(|(at, id)| token(at, id));
    tokens.chain([done(finish, count)]).collect()
}

#[tokio::test]
async fn a_completion_in_one_piece() {
    let server = Server::start(Script::saying(says(" unto Moses", Finish::Length))).await;
    let body = json!({"prompt": "And the LORD spake", "max_tokens": 4, "seed": 7, "return_token_ids": true});
    let answer = server.post(&body).await;
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: application/json

        {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":" unto Moses","logprobs":null,"finish_reason":"length","token_ids":[563,371,1675]}],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8},"ringfence":{"seed":7,"prompt_tokens":5,"committed":3,"ttft_ms":1.5,"tokens_per_second":100.0,"acceptance_length":2.0,"accept_by_depth":[0.5],"frames_per_token":1.25,"frames_computed_per_token":[1.0],"max_in_flight":6,"wire_bytes_per_position":1096,"heals":0}}"#]]
    .assert_eq(&answer);
    let request = server.script.requests().remove(0);
    assert_eq!(request.prompt, text_ids("And the LORD spake"));
    assert_eq!((request.max_new, request.sampling.seed), (4, 7));
}

#[tokio::test]
async fn a_completion_as_server_sent_events() {
    let server = Server::start(Script::saying(says(" unto Moses", Finish::Stop))).await;
    let body =
        json!({"prompt": "And the LORD spake", "seed": 7, "stream": true, "stream_options": {"include_usage": true}});
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: text/event-stream; charset=utf-8
        cache-control: no-cache

        id: cmpl-1:0
        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":" unto","logprobs":null,"finish_reason":null}]}

        id: cmpl-1:1
        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":" M","logprobs":null,"finish_reason":null}]}

        id: cmpl-1:2
        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":"oses","logprobs":null,"finish_reason":null}]}

        id: cmpl-1:3
        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}],"ringfence":{"seed":7,"prompt_tokens":5,"committed":3,"ttft_ms":1.5,"tokens_per_second":100.0,"acceptance_length":2.0,"accept_by_depth":[0.5],"frames_per_token":1.25,"frames_computed_per_token":[1.0],"max_in_flight":6,"wire_bytes_per_position":1096,"heals":0}}

        id: cmpl-1:4
        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}

        id: cmpl-1:5
        data: [DONE]

    "#]]
    .assert_eq(&server.post(&body).await);
}

/// From every event on, the rest of the stream comes again byte for byte, stop strings and usage included.
#[tokio::test]
async fn a_stream_is_read_on_from_any_event() {
    let mut body = json!({"prompt": "And", "seed": 7, "stream": true, "return_token_ids": true,
                          "stream_options": {"include_usage": true}, "stop": ["Aaron"]});
    for text in [" unto Moses and Aaron", " unto Moses, saying"] {
        let server = Server::start(Script::saying(says(text, Finish::Length))).await;
        let whole = server.post(&body).await;
        let (head, events) = whole.split_once("\n\n").unwrap();
        let events: Vec<&str> = events.split_inclusive("\n\n").collect();
        let tokens = text_ids(text).len();
        for said in 0..=tokens {
            for read in 0..=events.len() {
                let last = read.checked_sub(1).map(|last| format!("last-event-id: cmpl-1:{last}\r\n"));
                // Tokens may have been told by another coordinator; the end of an answer that goes on was not.
                if read > tokens && said < tokens {
                    continue;
                }
                server.script.set_said(said);
                let answer = server.get_as("/v1/streams/cmpl-1", &last.unwrap_or_default()).await;
                assert_eq!(answer, format!("{head}\n\n{}", events[read..].concat()), "{read} of {said} in {text:?}");
            }
        }
        body["stop"] = json!(null);
    }
}

#[tokio::test]
async fn an_answer_in_one_piece_is_read_on_by_the_name_that_its_client_gave_it() {
    let server = Server::start(Script::saying(says(" unto Moses", Finish::Length))).await;
    let body = json!({"prompt": "And", "seed": 7, "return_token_ids": true});
    let name = "x-client-request-id: a/b+c=\r\nauthorization: Bearer x\r\n";
    let whole = json_body(&server.post_as(&body, name).await);
    server.post(&body).await;
    let clients = server.script.clients();
    assert_eq!((clients[0].name.as_deref(), clients[0].resumable), (Some("a/b+c="), true));
    assert_eq!((clients[1].name.as_deref(), clients[1].resumable), (None, false), "nobody could ask for it");
    server.script.set_said(1);
    let authorized = "authorization: Bearer x\r\n";
    let stream = server.get_as("/v1/streams/a%2Fb+c=", authorized).await;
    assert!(stream.contains("id: cmpl-1:0\n") && stream.ends_with("data: [DONE]\n\n"), "{stream}");
    let data = stream.lines().filter_map(|line| line.strip_prefix("data: {"));
    let chunks = data.map(|data| serde_json::from_str::<Value>(&format!("{{{data}")).unwrap());
    let text: String = chunks.map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!(text, whole["choices"][0]["text"], "{stream}");
    let left = server.get_as("/v1/streams/a%2Fb+c=", &format!("last-event-id: cmpl-1:0\r\n{authorized}")).await;
    assert!(!left.contains("id: cmpl-1:0\n") && left.contains("id: cmpl-1:1\n"), "{left}");
    let other = server.get("/v1/streams/a%2Fb+c=").await;
    assert_eq!(json_body(&other)["error"]["code"], "no_stream", "{other}");
    for wrong in ["", "cmpl-7", "a b", "\u{e4}", &"x".repeat(129)] {
        let refused = server.post_as(&body, &format!("X-Client-Request-Id: {wrong}\r\n")).await;
        let error = &json_body(&refused)["error"];
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!("invalid_value"), &json!("X-Client-Request-Id")),
            "{wrong}"
        );
    }
}

#[tokio::test]
async fn what_can_not_be_read_on_is_refused() {
    let server = Server::start(Script::saying(says(" unto Moses", Finish::Length))).await;
    server.post(&json!({"prompt": "And", "stream": true})).await;
    let table = [
        ("/v1/streams/17", "", 404, "no_stream"),
        ("/v1/streams/cmpl-01", "", 404, "no_stream"),
        ("/v1/streams/cmpl-2", "", 404, "no_stream"),
        ("/v1/streams/cmpl-1", "authorization: Bearer x\r\n", 404, "no_stream"),
        ("/v1/streams/cmpl-1", "last-event-id: cmpl-2:0\r\n", 400, "invalid_value"),
        ("/v1/streams/cmpl-1", "last-event-id: cmpl-1:-1\r\n", 400, "invalid_value"),
        ("/v1/streams/cmpl-1", "last-event-id: cmpl-1:16\r\n", 400, "invalid_value"),
    ];
    server.script.set_said(1);
    for (path, header, status, code) in table {
        let answer = server.get_as(path, header).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{path} {header}: {answer}");
        assert_eq!(json_body(&answer)["error"]["code"], code, "{path} {header}: {answer}");
    }
}

#[tokio::test]
async fn a_failure_after_the_start_is_an_error_and_never_a_stop() {
    let mut events = says(" unto Moses", Finish::Stop);
    events.truncate(1);
    events.push(Event::Failed(stage_lost()));
    let server = Server::start(Script::saying(events)).await;
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: text/event-stream; charset=utf-8
        cache-control: no-cache

        id: cmpl-1:0
        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":" unto","logprobs":null,"finish_reason":null}]}

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"error"}],"ringfence":{"seed":7}}

        data: {"error":{"message":"stage 3:6 (12D3KooWMiddle) failed: no heartbeat for 1500 ms; the request can be sent again once the ring is whole","type":"server_error","param":null,"code":"stage_lost"}}

        data: [DONE]

    "#]].assert_eq(&server.post(&json!({"prompt": "And", "seed": 7, "stream": true})).await);
    expect![[r#"
        HTTP/1.1 502 Bad Gateway
        content-type: application/json

        {"error":{"message":"stage 3:6 (12D3KooWMiddle) failed: no heartbeat for 1500 ms; the request can be sent again once the ring is whole","type":"server_error","param":null,"code":"stage_lost"}}"#]].assert_eq(&server.post(&json!({"prompt": "And"})).await);
}

#[tokio::test]
async fn a_failure_before_the_first_token_is_a_plain_5xx_for_a_stream_too() {
    let server = Server::start(Script::saying(vec![Event::Failed(stage_lost())])).await;
    let answer = server.post(&json!({"prompt": "And", "stream": true})).await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    assert!(answer.contains("\"code\":\"stage_lost\""), "{answer}");
}

#[tokio::test]
async fn a_session_that_hangs_up_without_a_verdict_is_an_error() {
    let server = Server::start(Script::saying(vec![token(0, TokenId(300))])).await;
    let answer = server.post(&json!({"prompt": "And"})).await;
    assert!(answer.starts_with("HTTP/1.1 500") && answer.contains("no_verdict"), "{answer}");
}

#[tokio::test]
async fn a_stop_string_across_tokens_ends_the_session_and_is_not_passed() {
    let server = Server::start(Script::driven()).await;
    let body = json!({"prompt": "And", "seed": 7, "stop": "to Mo", "return_token_ids": true});
    let (answer, ()) = tokio::join!(server.post(&body), async {
        let mut side = server.script.next_job().await;
        for (at, id) in text_ids(" unto Moses spake").into_iter().enumerate() {
            side.send(token(at, id)).unwrap();
        }
        assert_eq!((&mut side.caller).await, Ok(()), "the coordinator is told to stop, not to cancel");
        side.end(done(Finish::Stop, 3));
    });
    let answer = json_body(&answer);
    assert_eq!(answer["choices"][0]["text"], " un");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][0]["token_ids"], json!(text_ids(" unto Moses")));
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    assert_eq!(answer["ringfence"]["committed"], 3);
}

#[tokio::test]
async fn text_held_for_a_stop_string_comes_out_when_none_came() {
    let server = Server::start(Script::saying(says(" unto", Finish::Length))).await;
    let body = json!({"prompt": "And", "stop": ["unto the", "nowhere"], "stream": true});
    let answer = server.post(&body).await;
    let texts: Vec<String> =
        events(&answer).iter().map(|e| e["choices"][0]["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!(texts, [" ", "unto"]);
}

#[tokio::test]
async fn a_character_is_never_split_and_the_end_of_sequence_has_no_text() {
    let mut said = says("é🦀", Finish::Stop);
    let count = said.len() - 1;
    said.insert(count, token(count, TokenId(1)));
    let server = Server::start(Script::saying(said)).await;
    let answer = server.post(&json!({"prompt": "And", "stream": true, "return_token_ids": true})).await;
    let events = events(&answer);
    let texts: Vec<&str> = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts.concat(), "é🦀");
    assert!(texts.iter().all(|text| !text.contains('\u{FFFD}')), "{texts:?}");
    assert!(texts.len() > 4, "the text is cut inside characters: {texts:?}");
    assert_eq!(events[count]["choices"][0]["token_ids"], json!([1]));
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_session_streamed_or_not() {
    let server = Server::start(Script::driven()).await;
    for stream in [false, true] {
        let client = server.send(&json!({"prompt": "And", "stream": stream})).await;
        let mut side = server.script.next_job().await;
        side.send(token(0, TokenId(300))).unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut side.caller).await.is_err(), "still there");
        drop(client);
        let gone = tokio::time::timeout(Duration::from_secs(5), &mut side.caller).await;
        assert!(matches!(gone, Ok(Err(_))), "stream: {stream}, {gone:?}");
    }
}

#[tokio::test]
async fn a_reader_that_does_not_read_fills_a_bounded_buffer_and_ends_alone() {
    let server = Server::start(Script::driven()).await;
    let client = server.send(&json!({"prompt": "And", "stream": true})).await;
    let side = server.script.next_job().await;
    let mut sent = 0;
    let error = loop {
        match side.send(token(sent, TokenId(300))) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 1_000_000, "the buffers have no bound");
        tokio::task::yield_now().await;
    };
    side.end(Event::Failed(error));
    let answer = client.read_to_end().await;
    assert!(answer.contains("\"finish_reason\":\"error\"") && answer.contains("\"code\":\"slow_reader\""));
    assert!(answer.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn refusals_have_their_status_and_say_when_to_come_back() {
    let server = Server::start(Script::saying(Vec::new())).await;
    server.script.refuse(SubmitError::Busy { open: 4, limit: 4 });
    expect![[r#"
        HTTP/1.1 429 Too Many Requests
        content-type: application/json
        retry-after: 1

        {"error":{"message":"4 sessions are open, 4 is the limit: try again later","type":"rate_limit_error","param":null,"code":"busy"}}"#]].assert_eq(&server.post(&json!({"prompt": "And"})).await);
    server.script.refuse(SubmitError::NotReady { why: "layers 3:6 are missing".into() });
    expect![[r#"
        HTTP/1.1 503 Service Unavailable
        content-type: application/json
        retry-after: 1

        {"error":{"message":"the ring is not ready: layers 3:6 are missing","type":"server_error","param":null,"code":"ring_not_ready"}}"#]].assert_eq(&server.post(&json!({"prompt": "And"})).await);
    server
        .script
        .refuse(SubmitError::Invalid { field: "mode", why: "the tail holds layers 5:7 and can't draft".into() });
    expect![[r#"
        HTTP/1.1 400 Bad Request
        content-type: application/json

        {"error":{"message":"mode: the tail holds layers 5:7 and can't draft","type":"invalid_request_error","param":"mode","code":"invalid_value"}}"#]].assert_eq(&server.post(&json!({"prompt": "And"})).await);
}

#[tokio::test]
async fn impossible_requests_never_reach_the_coordinator() {
    let server = Server::start(Script::saying(Vec::new())).await;
    let long = json!({"prompt": "And", "max_tokens": 2048});
    expect![[r#"
        HTTP/1.1 400 Bad Request
        content-type: application/json

        {"error":{"message":"prompt of 1 tokens + max_tokens 2048 is more than the context of 2048: shorten one of them","type":"invalid_request_error","param":"max_tokens","code":"context_length_exceeded"}}"#]].assert_eq(&server.post(&long).await);
    for body in [json!({"prompt": [5000]}), json!({"prompt": "a", "temperature": 3}), json!({}), json!(null)] {
        let answer = server.post(&body).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    let large = json!({"prompt": "a".repeat(400_000)});
    assert!(server.post(&large).await.starts_with("HTTP/1.1 413"));
    assert!(
        server
            .raw("GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            .await
            .starts_with("HTTP/1.1 405")
    );
    expect![[r#"
        HTTP/1.1 404 Not Found
        content-type: application/json

        {"error":{"message":"no route GET /v2; there are POST /v1/chat/completions, POST /v1/completions, GET /v1/streams/REQUEST, GET /v1/models, GET /health, GET /ring (docs/api.md)","type":"invalid_request_error","param":null,"code":"no_route"}}"#]].assert_eq(&server.get("/v2").await);
    assert_eq!(server.script.requests(), []);
}

#[tokio::test]
async fn a_prompt_is_scored() {
    let scored = |pos, fed, best| Event::Scored {
        pos,
        answer: Answer {
            token: TokenId(9),
            scores: Some(Scores { fed, picked: None, top: vec![(TokenId(best), -0.5), (TokenId(4), -1.25)] }),
        },
    };
    let events =
        vec![scored(0, None, 300), scored(1, Some(-0.5), 301), scored(2, Some(-1.0), 302), done(Finish::Length, 0)];
    let server = Server::start(Script::saying(events)).await;
    let body = json!({"prompt": [0, 300, 20], "max_tokens": 0, "score": 2, "temperature": 0});
    let answer = json_body(&server.post(&body).await);
    expect![[r#"{"index":0,"text":"","logprobs":null,"finish_reason":"length","prompt_scores":{"argmax":[300,301,302],"logprobs":[-0.5,-1.0],"top":[[[300,-0.5],[4,-1.25]],[[301,-0.5],[4,-1.25]],[[302,-0.5],[4,-1.25]]],"mean_nll":0.75}}"#]].assert_eq(&answer["choices"][0].to_string());
    assert_eq!(server.script.requests()[0].score, Some(2));
}

#[tokio::test]
async fn health_is_green_only_while_tokens_go_round() {
    let server = Server::start(Script::saying(Vec::new())).await;
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: application/json

        {"ready":true,"view":2,"last_round_ms":120}"#]]
    .assert_eq(&server.get("/health").await);
    server.script.set_ready(false);
    expect![[r#"
        HTTP/1.1 503 Service Unavailable
        content-type: application/json

        {"ready":false,"view":2,"last_round_ms":120,"reason":"layers 3:7 are missing"}"#]]
    .assert_eq(&server.get("/health").await);
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: application/json

        {"coordinator":"12D3KooWCoordinator","view":2,"ready":false,"missing":"layers 3:7 are missing","last_round_ms":120,"members":[{"peer":"12D3KooWHead","range":"0:3","device":"cpu avx2 x1","pid":4711,"in_ring":true,"alive":true,"spare":false,"shadow_of":null,"shadowed_by":null,"addresses":["/ip4/127.0.0.1/udp/4001/quic-v1"],"rtt_us":310,"service_us":850,"passes":12,"draft_block":0,"sessions":0,"loaded_bytes":4096}],"hops":[{"from":"12D3KooWCoordinator","to":"12D3KooWHead","rtt_us":310,"jitter_us":null,"in_flight":16700,"window":1048576,"rate":0,"queued":0}],"heals":[],"uptime_ms":5000,"rejections":0,"settled":0,"sessions":0,"in_flight":0,"encoding":"fp8"}"#]].assert_eq(&server.get("/ring").await);
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: application/json

        {"object":"list","data":[{"id":"tiny","object":"model","created":0,"owned_by":"ringfence","context":2048,"vocab":2048,"eos":[1]}]}"#]].assert_eq(&server.get("/v1/models").await);
}

#[tokio::test]
async fn a_stream_with_nothing_to_say_is_kept_alive_and_one_that_says_nothing_is_closed() {
    let server = Server::start(Script::driven()).await;
    let mut client = server.send(&json!({"prompt": "And", "stream": true})).await;
    let side = server.script.next_job().await;
    side.send(token(0, TokenId(300))).unwrap();
    let seen = client.read_until(": waiting\n\n").await;
    assert!(seen.contains("cmpl-1:0"), "{seen}");
    // A connection that never sends a whole head.
    let mut idle = server.connect().await;
    idle.write("POST /v1/comple").await;
    assert_eq!(idle.read_to_end().await, "");
    // A body that never ends.
    let mut slow = server.connect().await;
    slow.write("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\nconnection: close\r\n\r\n{").await;
    let answer = slow.read_to_end().await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
}

#[tokio::test]
async fn a_shutdown_lets_open_answers_end() {
    let mut server = Server::start(Script::driven()).await;
    let client = server.send(&json!({"prompt": "And", "stream": true})).await;
    let side = server.script.next_job().await;
    side.send(token(0, TokenId(300))).unwrap();
    server.shut_down();
    tokio::time::sleep(Duration::from_millis(20)).await;
    side.end(done(Finish::Length, 1));
    assert!(client.read_to_end().await.ends_with("data: [DONE]\n\n"));
    server.ended().await;
}

/// The JSON of every event but the last.
fn events(answer: &str) -> Vec<Value> {
    let data = answer.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}
