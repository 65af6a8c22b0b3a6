//! Chats with a model that talks like DeepSeek-V4 or V4.1, against a scripted coordinator.

use std::sync::Arc;

use expect_test::expect;
use ringfence::api::speech::Speech;
use ringfence::coordinator::job::{Event, Finish};
use ringfence::ids::TokenId;
use serde_json::{Value, json};

use super::install::{node, python, script};
use super::support::{Script, Server, deepseek, done, json_body, token};
use crate::events;

/// A server whose sessions say `text`, in which markers are tokens.
async fn server(speech: &Arc<Speech>, text: &str, finish: Finish) -> Server {
    let mut ids = speech.vocabulary.encode(text).unwrap();
    if finish == Finish::Stop {
        ids.push(TokenId(1));
    }
    let count = ids.len();
    let says: Vec<Event> =
        ids.into_iter().enumerate().map(|(at, id)| token(at, id)).chain([done(finish, count)]).collect();
    Server::start_with(Script::saying(says), Arc::clone(speech)).await
}

fn prompt(speech: &Speech, server: &Server) -> String {
    let ids = server.script.requests().pop().unwrap().prompt;
    let spelled = |id: &TokenId| match id.0 {
        0 => "<bos>".to_owned(),
        1 => "<eos>".to_owned(),
        2 => "<System>".to_owned(),
        3 => "<User>".to_owned(),
        4 => "<Assistant>".to_owned(),
        5 => "<THINK>".to_owned(),
        6 => "</THINK>".to_owned(),
        7 => "[DSML]".to_owned(),
        _ => speech.vocabulary.decode(&[*id]),
    };
    ids.iter().map(spelled).collect()
}

fn weather() -> Value {
    json!([{"type": "function", "function": {
        "name": "weather", "description": "The weather.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}},
    }}])
}

fn ask(more: &Value) -> Value {
    let mut body = json!({"seed": 7, "messages": [{"role": "user", "content": "Is it </think> wet?"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

const CALLS: &str = "Let me see.</think>A moment.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n\
                     <｜DSML｜parameter name=\"town\" string=\"true\">Ur \"of\" it</｜DSML｜parameter>\n\
                     <｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
                     <｜DSML｜invoke name=\"weather\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

#[tokio::test]
async fn reasoning_comes_apart_from_content() {
    for system in [false, true] {
        let speech = deepseek(system);
        let server = server(&speech, "It rains.</think>Yes.", Finish::Stop).await;
        let body = json_body(&server.chat(&ask(&json!({}))).await);
        let choice = &body["choices"][0];
        assert_eq!(choice["message"]["reasoning_content"], "It rains.", "{body}");
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("Yes."), &json!("stop")));
        let reasoning = speech.vocabulary.encode("It rains.").unwrap().len() + 1;
        assert_eq!(body["usage"]["completion_tokens_details"]["reasoning_tokens"], reasoning);
        let prompt = prompt(&speech, &server);
        assert!(prompt.starts_with("<bos>") && prompt.ends_with("</think> wet?<Assistant><THINK>"), "{prompt}");
    }
}

#[tokio::test]
async fn without_thinking_all_is_content_and_the_prompt_says_so() {
    let speech = deepseek(false);
    let server = server(&speech, "Yes.", Finish::Stop).await;
    for more in [json!({"reasoning_effort": "none"}), json!({"thinking": {"type": "disabled"}})] {
        let body = json_body(&server.chat(&ask(&more)).await);
        assert_eq!(body["choices"][0]["message"], json!({"role": "assistant", "content": "Yes.", "refusal": null}));
        assert_eq!(prompt(&speech, &server), "<bos><User>Is it </think> wet?<Assistant></THINK>");
    }
}

#[tokio::test]
async fn the_effort_is_a_part_of_the_prompt() {
    let speech = deepseek(false);
    let server = server(&speech, "</think>Yes.", Finish::Stop).await;
    let mut prompts = Vec::new();
    for effort in ["low", "high", "max"] {
        server.chat(&ask(&json!({"reasoning_effort": effort}))).await;
        prompts.push(prompt(&speech, &server));
    }
    assert!(!prompts[0].contains("Reasoning Effort"), "{}", prompts[0]);
    assert!(prompts[1].starts_with("<bos>Reasoning Effort: Absolute maximum"), "{}", prompts[1]);
    assert!(prompts[2].starts_with("<bos>Reasoning Effort: Beyond maximum"), "{}", prompts[2]);
}

#[tokio::test]
async fn tool_calls_are_parsed() {
    let speech = deepseek(false);
    let server = server(&speech, CALLS, Finish::Stop).await;
    let body = json_body(&server.chat(&ask(&json!({"tools": weather()}))).await);
    expect![[r#"
        {
          "index": 0,
          "message": {
            "role": "assistant",
            "content": "A moment.",
            "reasoning_content": "Let me see.",
            "refusal": null,
            "tool_calls": [
              {
                "id": "call_1_0",
                "type": "function",
                "function": {
                  "name": "weather",
                  "arguments": "{\"town\": \"Ur \\\"of\\\" it\", \"days\": 2}"
                }
              },
              {
                "id": "call_1_1",
                "type": "function",
                "function": {
                  "name": "weather",
                  "arguments": "{}"
                }
              }
            ]
          },
          "logprobs": null,
          "finish_reason": "tool_calls"
        }"#]]
    .assert_eq(&serde_json::to_string_pretty(&body["choices"][0]).unwrap());
    let arguments = body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(arguments).unwrap(), json!({"town": "Ur \"of\" it", "days": 2}));
    let prompt = prompt(&speech, &server);
    assert!(prompt.contains("## Tools") && prompt.contains("\"name\": \"weather\""), "{prompt}");
}

/// The deltas add up to the whole answer, no marker is in them, and every token has one event.
#[tokio::test]
async fn a_streams_deltas_add_up_and_are_the_same_when_read_on() {
    let speech = deepseek(false);
    let server = server(&speech, CALLS, Finish::Stop).await;
    let body = ask(&json!({"tools": weather()}));
    let whole = json_body(&server.chat(&body).await);
    let message = &whole["choices"][0]["message"];
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let answer = server.chat(&streamed).await;
    let (mut content, mut reasoning, mut arguments) = (String::new(), String::new(), vec![String::new(); 2]);
    let mut begun = Vec::new();
    let chunks = events(&answer);
    for chunk in &chunks {
        let delta = &chunk["choices"][0]["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            arguments[index] += call["function"]["arguments"].as_str().unwrap();
            if let Some(name) = call["function"]["name"].as_str() {
                begun.push((index, name.to_owned(), call["id"].as_str().unwrap().to_owned()));
                assert_eq!(call["type"], "function");
            }
        }
    }
    assert_eq!((&json!(content), &json!(reasoning)), (&message["content"], &message["reasoning_content"]));
    for (at, call) in message["tool_calls"].as_array().unwrap().iter().enumerate() {
        assert_eq!(call["function"]["arguments"], arguments[at]);
    }
    assert_eq!(begun, [(0, "weather".into(), "call_2_0".into()), (1, "weather".into(), "call_2_1".into())]);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    let (head, shown) = answer.split_once("\n\n").unwrap();
    let shown: Vec<&str> = shown.split_inclusive("\n\n").collect();
    let count = usize::try_from(whole["usage"]["completion_tokens"].as_u64().unwrap()).unwrap();
    assert_eq!(shown.len(), count + 2, "one event a token, the end and the mark");
    for (said, read) in [(0, 0), (count, 0), (count, 9), (9, count), (count, count), (17, 5)] {
        server.script.set_said(said);
        let last = read.checked_sub(1).map(|last| format!("last-event-id: cmpl-2:{last}\r\n")).unwrap_or_default();
        let again = server.get_as("/v1/streams/cmpl-2", &last).await;
        assert_eq!(again, format!("{head}\n\n{}", shown[read..].concat()), "{read} of {said}");
    }
}

#[tokio::test]
async fn a_tool_that_must_be_called_is_called_at_once() {
    let speech = deepseek(false);
    let text = "<｜DSML｜invoke name=\"weather\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let server = server(&speech, text, Finish::Stop).await;
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
        let body = json_body(&server.chat(&ask(&json!({"tools": weather(), "tool_choice": choice}))).await);
        let choice = &body["choices"][0];
        assert_eq!(
            choice["message"]["tool_calls"][0]["function"],
            json!({"name": "weather", "arguments": "{}"}),
            "{body}"
        );
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&Value::Null, &json!("tool_calls")));
        assert!(prompt(&speech, &server).ends_with("<Assistant></THINK>\n\n<[DSML]tool_calls>\n"));
    }
}

#[tokio::test]
async fn tool_results_go_back_and_earlier_reasoning_is_dropped_without_tools() {
    let speech = deepseek(false);
    let server = server(&speech, "</think>Yes.", Finish::Stop).await;
    let call =
        json!({"id": "call_1_0", "type": "function", "function": {"name": "weather", "arguments": "{\"days\": 2}"}});
    let messages = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Wet?"},
        {"role": "assistant", "content": null, "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1_0", "content": "rain"},
    ]);
    let body = json!({"messages": messages, "tools": weather(), "reasoning_effort": "low"});
    server.chat(&body).await;
    let with_tools = prompt(&speech, &server);
    let turn = "<User>Wet?<Assistant><THINK>Look.</THINK>\n\n<[DSML]tool_calls>\n<[DSML]invoke name=\"weather\">\n\
                <[DSML]parameter name=\"days\" string=\"false\">2</[DSML]parameter>\n</[DSML]invoke>\n\
                </[DSML]tool_calls><eos><User><tool_result>rain</tool_result><Assistant><THINK>";
    assert!(with_tools.starts_with("<bos>Be brief.\n\n## Tools") && with_tools.ends_with(turn), "{with_tools}");
    let messages = json!([
        {"role": "user", "content": "Wet?"},
        {"role": "assistant", "content": "No.", "reasoning_content": "Look."},
        {"role": "user", "content": "Sure?"},
    ]);
    server.chat(&json!({"messages": messages, "reasoning_effort": "low"})).await;
    let without = "<bos><User>Wet?<Assistant></THINK>No.<eos><User>Sure?<Assistant><THINK>";
    assert_eq!(prompt(&speech, &server), without);
}

#[tokio::test]
async fn a_stop_string_ends_the_content_and_not_the_reasoning() {
    let speech = deepseek(false);
    let server = server(&speech, "It rains END.</think>Yes. It doesEND not.", Finish::Stop).await;
    let body = json_body(&server.chat(&ask(&json!({"stop": "END"}))).await);
    let message = &body["choices"][0]["message"];
    assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("Yes. It does"), &json!("It rains END.")));
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn what_is_spelled_or_out_of_place_is_no_marker_and_special_tokens_have_no_text() {
    let speech = deepseek(false);
    let mut ids = speech.vocabulary.encode("a<｜User｜>b</think>c</think>d<｜Assistant｜>").unwrap();
    // The same characters, token by token.
    for text in ["</", "think", ">", " é"] {
        ids.extend(speech.vocabulary.encode(text).unwrap());
    }
    let count = ids.len();
    let says = ids.into_iter().enumerate().map(|(at, id)| token(at, id)).chain([done(Finish::Length, count)]).collect();
    let server = Server::start_with(Script::saying(says), Arc::clone(&speech)).await;
    let body = json_body(&server.chat(&ask(&json!({}))).await);
    let message = &body["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("ab"), &json!("cd</think> é")));
    assert_eq!(body["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn chats_that_the_encoding_does_not_take_are_refused_in_its_words() {
    let speech = deepseek(false);
    let server = server(&speech, "a", Finish::Stop).await;
    for (more, expected) in [
        (
            json!({"reasoning_effort": "huge"}),
            "reasoning_effort: expected one of none, minimal, low, medium, high, xhigh, ultra, max, got \"huge\"",
        ),
        (
            json!({"tools": weather(), "tool_choice": "required", "reasoning_effort": "high"}),
            "messages: Thinking mode does not support this tool_choice",
        ),
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "messages: "),
        (
            json!({"tools": weather(), "parallel_tool_calls": false}),
            "parallel_tool_calls: not supported by this server",
        ),
        (
            json!({"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}),
            "messages: Messages with role 'tool' must be a response",
        ),
    ] {
        let answer = server.chat(&ask(&more)).await;
        let body = json_body(&answer);
        assert!(
            answer.starts_with("HTTP/1.1 400") && body["error"]["message"].as_str().unwrap().starts_with(expected),
            "{answer}"
        );
    }
    assert!(server.script.requests().is_empty());
}

/// OpenAI's clients call a tool, whole and streamed, and send its result back with the message that they got.
#[tokio::test]
async fn openais_clients_call_tools() {
    let speech = deepseek(false);
    let server = server(&speech, CALLS, Finish::Stop).await;
    let url = server.url();
    let clients = tokio::task::spawn_blocking(move || {
        let python =
            python().map(|folder| (folder.join("venv/bin/python"), vec![script("tools_client.py"), url.clone()]));
        let node = node()
            .map(|folder| ("node".into(), vec![script("tools_client.cjs"), url, folder.to_str().unwrap().to_owned()]));
        let run = |(program, args): (std::path::PathBuf, Vec<String>)| {
            let ended = std::process::Command::new(program).args(&args).output().unwrap();
            assert!(ended.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ended.stderr));
            serde_json::from_slice::<Value>(&ended.stdout).unwrap()
        };
        python.into_iter().chain(node).map(run).collect::<Vec<Value>>()
    });
    let clients = clients.await.unwrap();
    let calls = json!([["weather", {"town": "Ur \"of\" it", "days": 2}], ["weather", {}]]);
    for seen in &clients {
        assert_eq!((&seen["whole"], &seen["streamed"], &seen["helper"]), (&calls, &calls, &calls), "{seen}");
        let finish = json!(["tool_calls", "A moment.", "Let me see."]);
        assert_eq!((&seen["finish"], &seen["again"]), (&finish, &json!("tool_calls")));
    }
    if !clients.is_empty() {
        let prompt = prompt(&speech, &server);
        assert!(prompt.contains("<[DSML]parameter name=\"days\" string=\"false\">2</[DSML]parameter>"), "{prompt}");
        assert!(
            prompt.ends_with("<tool_result>wet</tool_result>\n\n<tool_result>dry</tool_result><Assistant><THINK>"),
            "{prompt}"
        );
    }
}
