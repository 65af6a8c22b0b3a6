//! Chats with a model that has a plain template, against a scripted coordinator.

use expect_test::expect;
use ringfence::coordinator::job::{Event, Finish, SubmitError, TokenScores};
use ringfence::ids::TokenId;
use serde_json::{Value, json};

use super::support::{Script, Server, done, json_body, stage_lost, text_ids, token};
use crate::{events, says};

fn hi() -> Value {
    json!({"model": "tiny", "seed": 7, "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "And the LORD"}, {"type": "text", "text": " spake"}]},
    ]})
}

fn with(mut body: Value, field: &str, value: Value) -> Value {
    body[field] = value;
    body
}

#[tokio::test]
async fn a_chat_in_one_piece() {
    let server = Server::start(Script::saying(says(" unto Moses", Finish::Stop))).await;
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: application/json

        {"id":"cmpl-1","object":"chat.completion","created":0,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":" unto Moses","refusal":null},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":16,"completion_tokens":3,"total_tokens":19},"ringfence":{"seed":7,"prompt_tokens":5,"committed":3,"ttft_ms":1.5,"tokens_per_second":100.0,"acceptance_length":2.0,"accept_by_depth":[0.5],"frames_per_token":1.25,"frames_computed_per_token":[1.0],"max_in_flight":6,"wire_bytes_per_position":1096,"heals":0}}"#]].assert_eq(&server.chat(&hi()).await);
    let prompt = "<｜begin▁of▁sentence｜>Be brief.\n\n<｜User｜>And the LORD spake<｜Assistant｜></think>";
    assert_eq!(server.script.requests()[0].prompt, text_ids(prompt));
}

#[tokio::test]
async fn a_chat_as_server_sent_events() {
    let server = Server::start(Script::saying(says(" unto Moses", Finish::Length))).await;
    let body = with(with(hi(), "stream", json!(true)), "stream_options", json!({"include_usage": true}));
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: text/event-stream; charset=utf-8
        cache-control: no-cache

        id: cmpl-1:0
        data: {"id":"cmpl-1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,"delta":{"role":"assistant","content":" unto"},"logprobs":null,"finish_reason":null}]}

        id: cmpl-1:1
        data: {"id":"cmpl-1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,"delta":{"content":" M"},"logprobs":null,"finish_reason":null}]}

        id: cmpl-1:2
        data: {"id":"cmpl-1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,"delta":{"content":"oses"},"logprobs":null,"finish_reason":null}]}

        id: cmpl-1:3
        data: {"id":"cmpl-1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"ringfence":{"seed":7,"prompt_tokens":5,"committed":3,"ttft_ms":1.5,"tokens_per_second":100.0,"acceptance_length":2.0,"accept_by_depth":[0.5],"frames_per_token":1.25,"frames_computed_per_token":[1.0],"max_in_flight":6,"wire_bytes_per_position":1096,"heals":0}}

        id: cmpl-1:4
        data: {"id":"cmpl-1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[],"usage":{"prompt_tokens":16,"completion_tokens":3,"total_tokens":19}}

        id: cmpl-1:5
        data: [DONE]

    "#]].assert_eq(&server.chat(&body).await);
}

#[tokio::test]
async fn a_chat_is_read_on_from_any_event() {
    let text = " unto Moses and Aaron";
    let server = Server::start(Script::saying(says(text, Finish::Length))).await;
    let body = with(with(hi(), "stream", json!(true)), "stop", json!("Aaron"));
    let whole = server.chat(&body).await;
    let (head, events) = whole.split_once("\n\n").unwrap();
    let events: Vec<&str> = events.split_inclusive("\n\n").collect();
    let tokens = text_ids(text).len();
    for said in 0..=tokens {
        for read in 0..=events.len() {
            if read > tokens && said < tokens {
                continue;
            }
            let last = read.checked_sub(1).map(|last| format!("last-event-id: cmpl-1:{last}\r\n"));
            server.script.set_said(said);
            let answer = server.get_as("/v1/streams/cmpl-1", &last.unwrap_or_default()).await;
            assert_eq!(answer, format!("{head}\n\n{}", events[read..].concat()), "{read} of {said}");
        }
    }
}

#[tokio::test]
async fn several_choices_are_sessions_with_seeds_of_their_own() {
    let server = Server::start(Script::saying(says(" unto Moses", Finish::Stop))).await;
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: application/json

        {"id":"cmpl-1","object":"chat.completion","created":0,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":" unto Moses","refusal":null},"logprobs":null,"finish_reason":"stop","ringfence":{"seed":7,"prompt_tokens":5,"committed":3,"ttft_ms":1.5,"tokens_per_second":100.0,"acceptance_length":2.0,"accept_by_depth":[0.5],"frames_per_token":1.25,"frames_computed_per_token":[1.0],"max_in_flight":6,"wire_bytes_per_position":1096,"heals":0}},{"index":1,"message":{"role":"assistant","content":" unto Moses","refusal":null},"logprobs":null,"finish_reason":"stop","ringfence":{"seed":3511274219185729,"prompt_tokens":5,"committed":3,"ttft_ms":1.5,"tokens_per_second":100.0,"acceptance_length":2.0,"accept_by_depth":[0.5],"frames_per_token":1.25,"frames_computed_per_token":[1.0],"max_in_flight":6,"wire_bytes_per_position":1096,"heals":0}}],"usage":{"prompt_tokens":16,"completion_tokens":6,"total_tokens":22}}"#]].assert_eq(&server.chat(&with(hi(), "n", json!(2))).await);
    let seeds: Vec<u64> = server.script.requests().iter().map(|request| request.sampling.seed).collect();
    assert!(seeds[0] == 7 && seeds[1] != 7, "{seeds:?}");
    assert!(server.script.clients().iter().all(|client| !client.resumable));
}

#[tokio::test]
async fn several_choices_come_in_turn_and_each_has_its_end() {
    let server = Server::start(Script::saying(says(" unto Moses", Finish::Stop))).await;
    let mut body = json!({"prompt": "And", "seed": 7, "n": 2, "stream": true});
    body["stream_options"] = json!({"include_usage": true});
    expect![[r#"
        HTTP/1.1 200 OK
        content-type: text/event-stream; charset=utf-8
        cache-control: no-cache

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":" unto","logprobs":null,"finish_reason":null}]}

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":1,"text":" unto","logprobs":null,"finish_reason":null}]}

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":" M","logprobs":null,"finish_reason":null}]}

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":1,"text":" M","logprobs":null,"finish_reason":null}]}

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":"oses","logprobs":null,"finish_reason":null}]}

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":1,"text":"oses","logprobs":null,"finish_reason":null}]}

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}],"ringfence":{"seed":7,"prompt_tokens":5,"committed":3,"ttft_ms":1.5,"tokens_per_second":100.0,"acceptance_length":2.0,"accept_by_depth":[0.5],"frames_per_token":1.25,"frames_computed_per_token":[1.0],"max_in_flight":6,"wire_bytes_per_position":1096,"heals":0}}

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[{"index":1,"text":"","logprobs":null,"finish_reason":"stop"}],"ringfence":{"seed":3511274219185729,"prompt_tokens":5,"committed":3,"ttft_ms":1.5,"tokens_per_second":100.0,"acceptance_length":2.0,"accept_by_depth":[0.5],"frames_per_token":1.25,"frames_computed_per_token":[1.0],"max_in_flight":6,"wire_bytes_per_position":1096,"heals":0}}

        data: {"id":"cmpl-1","object":"text_completion","created":0,"model":"tiny","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":6,"total_tokens":7}}

        data: [DONE]

    "#]].assert_eq(&server.post(&body).await);
}

#[tokio::test]
async fn one_choice_that_fails_ends_them_all() {
    let server = Server::start(Script::driven()).await;
    let body = with(with(hi(), "n", json!(3)), "stream", json!(true));
    let (answer, ()) = tokio::join!(server.chat(&body), async {
        let mut jobs = Vec::new();
        for _ in 0..3 {
            jobs.push(server.script.next_job().await);
        }
        let last = jobs.pop().unwrap();
        last.send(token(0, text_ids("a")[0])).unwrap();
        last.end(Event::Failed(stage_lost()));
        for job in jobs {
            assert!(job.caller.await.is_err(), "the others are cancelled");
        }
    });
    let events = events(&answer);
    let reasons: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
    assert_eq!((reasons[1], &events[1]["choices"][0]["index"]), (&json!("error"), &json!(2)), "{answer}");
    assert_eq!(events[2]["error"]["code"], "stage_lost");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": "a"}));
    assert!(answer.ends_with("data: [DONE]\n\n"), "{answer}");
}

#[tokio::test]
async fn a_choice_that_is_not_taken_cancels_those_before_it() {
    let server = Server::start(Script::driven()).await;
    server.script.refuse_after(1, SubmitError::Busy { open: 8, limit: 8 });
    let answer = server.chat(&with(hi(), "n", json!(2))).await;
    assert!(answer.starts_with("HTTP/1.1 429") && answer.contains("retry-after: 1"), "{answer}");
    assert!(server.script.next_job().await.caller.await.is_err());
}

#[tokio::test]
async fn special_tokens_are_neither_masked_nor_printed() {
    let ids = [text_ids("a"), vec![TokenId(3), TokenId(5), TokenId(6), TokenId(7)], text_ids("b"), vec![TokenId(1)]];
    let ids = ids.concat();
    let count = ids.len();
    let events = ids.iter().enumerate().map(|(at, &id)| token(at, id)).chain([done(Finish::Stop, count)]).collect();
    let server = Server::start(Script::saying(events)).await;
    let body = json_body(&server.chat(&with(hi(), "return_token_ids", json!(true))).await);
    assert_eq!(body["choices"][0]["message"]["content"], "ab");
    assert_eq!(body["choices"][0]["token_ids"], json!(ids.iter().map(|id| id.0).collect::<Vec<_>>()));
}

#[tokio::test]
async fn a_chat_that_is_not_possible_has_openais_error() {
    let server = Server::start(Script::driven()).await;
    let schema = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {}}});
    expect![[r#"
        HTTP/1.1 400 Bad Request
        content-type: application/json

        {"error":{"message":"response_format: not supported by this server: nothing enforces a format: ask for it in the prompt","type":"invalid_request_error","param":"response_format","code":"unsupported_field"}}"#]].assert_eq(&server.chat(&with(hi(), "response_format", schema)).await);
    expect![[r#"
        HTTP/1.1 400 Bad Request
        content-type: application/json

        {"error":{"message":"prompt of 16 tokens + max_tokens 3000 is more than the context of 2048: shorten one of them","type":"invalid_request_error","param":"max_tokens","code":"context_length_exceeded"}}"#]].assert_eq(&server.chat(&with(hi(), "max_tokens", json!(3000))).await);
}

/// A session whose tokens have log-probabilities.
fn scored(text: &str) -> Vec<Event> {
    let ids = text_ids(text);
    let (count, other) = (ids.len(), text_ids("é")[0]);
    let events = ids.into_iter().enumerate().map(|(at, token)| Event::Token {
        index: u32::try_from(at).unwrap(),
        token,
        scores: Some(TokenScores { logprob: -0.25, top: vec![(token, -0.25), (other, -1.5)] }),
    });
    events.chain([done(Finish::Stop, count)]).collect()
}

#[tokio::test]
async fn log_probabilities_of_a_chat() {
    let server = Server::start(Script::saying(scored(" M"))).await;
    let body = with(with(hi(), "logprobs", json!(true)), "top_logprobs", json!(2));
    expect![[r#"{"index":0,"message":{"role":"assistant","content":" M","refusal":null},"logprobs":{"content":[{"token":" M","logprob":-0.25,"bytes":[32,77],"top_logprobs":[{"token":" M","logprob":-0.25,"bytes":[32,77]},{"token":"�","logprob":-1.5,"bytes":[195]}]}],"refusal":null},"finish_reason":"stop"}"#]].assert_eq(&json_body(&server.chat(&body).await)["choices"][0].to_string());
    let chunks = events(&server.chat(&with(body, "stream", json!(true))).await);
    expect![[r#"{"index":0,"delta":{"role":"assistant","content":" M"},"logprobs":{"content":[{"token":" M","logprob":-0.25,"bytes":[32,77],"top_logprobs":[{"token":" M","logprob":-0.25,"bytes":[32,77]},{"token":"�","logprob":-1.5,"bytes":[195]}]}],"refusal":null},"finish_reason":null}"#]].assert_eq(&chunks[0]["choices"][0].to_string());
    assert_eq!(chunks[1]["choices"][0]["logprobs"], Value::Null, "the end is no token");
    let request = server.script.requests().remove(0);
    assert_eq!((request.logprobs, request.score), (Some(2), None));
}

#[tokio::test]
async fn log_probabilities_of_a_completion() {
    let server = Server::start(Script::saying(scored("é M"))).await;
    let body = json!({"prompt": "And", "seed": 7, "logprobs": 2});
    expect![[r#"{"index":0,"text":"é M","logprobs":{"tokens":["�","�"," M"],"token_logprobs":[-0.25,-0.25,-0.25],"top_logprobs":[{"�":-0.25},{"�":-0.25},{" M":-0.25,"�":-1.5}],"text_offset":[0,1,1]},"finish_reason":"stop"}"#]].assert_eq(&json_body(&server.post(&body).await)["choices"][0].to_string());
    let streamed = events(&server.post(&with(body.clone(), "stream", json!(true))).await);
    let whole = &json_body(&server.post(&body).await)["choices"][0]["logprobs"];
    for (at, chunk) in streamed.iter().take(whole["tokens"].as_array().unwrap().len()).enumerate() {
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(chunk["choices"][0]["logprobs"][list], json!([whole[list][at]]), "{chunk}");
        }
    }
}

#[tokio::test]
async fn log_probabilities_are_read_on_too_and_none_may_be_missing() {
    let server = Server::start(Script::saying(scored(" unto Moses"))).await;
    let body = json!({"prompt": "And", "seed": 7, "logprobs": 2, "stream": true});
    let whole = server.post(&body).await;
    server.script.set_said(2);
    assert_eq!(server.get_as("/v1/streams/cmpl-1", "").await, whole);
    let lacking = Server::start(Script::saying(says(" unto", Finish::Stop))).await;
    let answer = lacking.post(&with(body, "stream", json!(false))).await;
    assert!(answer.starts_with("HTTP/1.1 500") && answer.contains("token 0 has no log-probability"), "{answer}");
}
