//! What the bodies of both routes may be, and what is refused and how.

use super::*;
use crate::api::speech::SpeechFiles;
use proptest::prelude::*;
use serde_json::json;
use std::sync::OnceLock;

fn tiny() -> &'static Speech {
    static TINY: OnceLock<Speech> = OnceLock::new();
    TINY.get_or_init(|| {
        let files = SpeechFiles {
            tokenizer: include_bytes!("../../../models/tiny-v4-flash/tokenizer.json").to_vec(),
            tokenizer_config: Some(include_bytes!("../../../models/tiny-v4-flash/tokenizer_config.json").to_vec()),
            ..SpeechFiles::default()
        };
        Speech::new(&files, &[TokenId(1)]).unwrap()
    })
}

fn facts() -> ModelFacts {
    ModelFacts { name: "tiny".into(), vocab: 2048, eos: vec![TokenId(1)], context: 2048 }
}

fn read_value(body: &Value) -> Result<Ask, ApiError> {
    read(body.to_string().as_bytes(), &facts(), tiny())
}

fn chat_value(body: &Value) -> Result<Ask, ApiError> {
    read_chat(body.to_string().as_bytes(), &facts(), tiny())
}

fn message(body: &Value) -> String {
    read_value(body).unwrap_err().to_string()
}

#[test]
fn defaults_are_those_of_openai() {
    let ask = read_value(&json!({"prompt": "And the LORD", "model": "whatever", "unknown": [1, {}]})).unwrap();
    assert_eq!(ask.request.max_new, 16);
    let Sampling { temperature, top_k, top_p, min_p, seed } = ask.request.sampling;
    assert_eq!((temperature, top_k, top_p, min_p), (1.0, 0, 1.0, 0.0));
    assert!(seed < 1 << SEED_BITS);
    assert_eq!((ask.request.mode, ask.request.encoding, ask.request.score), (None, None, None));
    assert!(!(ask.stream || ask.include_usage || ask.token_ids || ask.request.ignore_eos));
    let other = read_value(&json!({"prompt": "And the LORD"})).unwrap();
    assert_ne!(seed, other.request.sampling.seed, "seeds are drawn");
}

#[test]
fn a_prompt_is_text_or_ids_alone_or_as_the_only_one() {
    let text = read_value(&json!({"prompt": "Moses"})).unwrap().request.prompt;
    for prompt in [json!(["Moses"]), json!(text), json!([text])] {
        assert_eq!(read_value(&json!({"prompt": prompt})).unwrap().request.prompt, text);
    }
}

#[test]
fn every_field_arrives() {
    let ask = read_value(&json!({
        "prompt": [0, 2047], "max_tokens": 0, "score": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.5, "seed": -1,
        "stop": ["a", "b"], "mode": "plain", "wire": "bf16", "ignore_eos": true, "return_token_ids": true, "n": 1,
    }))
    .unwrap();
    let sampling = Sampling { temperature: 0.5, top_k: 3, top_p: 0.25, min_p: 0.5, seed: u64::MAX };
    let request = Request {
        prompt: vec![TokenId(0), TokenId(2047)],
        max_new: 0,
        sampling,
        mode: Some(Mode::Plain),
        encoding: Some(WireEncoding::Bf16),
        score: Some(5),
        logprobs: None,
        ignore_eos: true,
    };
    assert_eq!((ask.request, ask.score_top, ask.token_ids), (request, 5, true));
    assert_eq!(ask.stops, ["a", "b"]);
}

#[test]
fn impossible_values_are_refused_by_name_and_range() {
    let long = "x".repeat(257);
    let table = [
        (json!({}), "prompt: missing, expected a text or an array of token ids"),
        (json!({"prompt": ""}), "prompt: expected one token or more, got \"\""),
        (json!({"prompt": []}), "prompt: expected one token or more, got []"),
        (json!({"prompt": {"a": 1}}), "prompt: expected a text or an array of token ids, got {\"a\":1}"),
        (json!({"prompt": [1, 2048]}), "prompt: expected a token id from 0 to 2047 at index 1, got 2048"),
        (json!({"prompt": [1, -1]}), "prompt: expected a token id from 0 to 2047 at index 1, got -1"),
        (json!({"prompt": [1.5]}), "prompt: expected a token id from 0 to 2047 at index 0, got 1.5"),
        (json!({"prompt": ["a", "b"]}), "prompt: not supported by this server: send one request per prompt"),
        (json!({"prompt": "a", "max_tokens": 0}), "max_tokens: expected 1 or more (0 only with `score`), got 0"),
        (json!({"prompt": "a", "max_tokens": -1}), "max_tokens: expected an integer from 0 to 4294967295, got -1"),
        (json!({"prompt": "a", "max_tokens": "9"}), "max_tokens: expected an integer from 0 to 4294967295, got \"9\""),
        (json!({"prompt": "a", "temperature": 2.5}), "temperature: expected a number from 0 to 2, got 2.5"),
        (json!({"prompt": "a", "temperature": "hot"}), "temperature: expected a number from 0 to 2, got \"hot\""),
        (json!({"prompt": "a", "top_p": 0}), "top_p: expected a number above 0, up to 1, got 0"),
        (json!({"prompt": "a", "top_p": 1.1}), "top_p: expected a number from 0 to 1, got 1.1"),
        (json!({"prompt": "a", "top_k": -1}), "top_k: expected an integer from 0 to 4294967295, got -1"),
        (json!({"prompt": "a", "seed": 0.5}), "seed: expected an integer from -2^63 to 2^64 - 1, got 0.5"),
        (
            json!({"prompt": "a", "stop": ""}),
            "stop: expected a string or up to 4 strings, each of 1 to 256 bytes, got \"\"",
        ),
        (
            json!({"prompt": "a", "stop": ["a", 1]}),
            "stop: expected a string or up to 4 strings, each of 1 to 256 bytes, got [\"a\",1]",
        ),
        (
            json!({"prompt": "a", "stop": ["a", "b", "c", "d", "e"]}),
            "stop: expected a string or up to 4 strings, each of 1 to 256 bytes, got [\"a\",\"b\",\"c\",\"d\",\"e\"]",
        ),
    ];
    for (body, expected) in table {
        assert_eq!(message(&body), expected, "{body}");
    }
    assert!(message(&json!({"prompt": "a", "stop": long})).len() < 200, "an error repeats the value shortened");
}

#[test]
fn what_is_not_possible_together_or_not_at_all_is_refused_by_name() {
    let table = [
        (json!({"prompt": "a", "mode": "fast"}), "mode: expected \"pipelined\" or \"plain\", got \"fast\""),
        (json!({"prompt": "a", "wire": "fp16"}), "wire: expected \"fp8\" or \"bf16\", got \"fp16\""),
        (json!({"prompt": "a", "stream": 1}), "stream: expected true or false, got 1"),
        (
            json!({"prompt": "a", "stream_options": {}}),
            "stream_options: not supported by this server: only together with \"stream\": true",
        ),
        (json!({"prompt": "a", "score": 21}), "score: expected an integer from 0 to 20, got 21"),
        (
            json!({"prompt": "a", "score": 1, "prompt_logprobs": 2}),
            "prompt_logprobs: expected the same as score (1), or one of them alone, got 2",
        ),
        (
            json!({"prompt": "a", "score": 1, "stream": true}),
            "score: not supported by this server: scores come whole, without `stream`",
        ),
        (json!({"prompt": "a", "min_p": 1.5}), "min_p: expected a number from 0 to 1, got 1.5"),
        (json!({"prompt": "a", "logprobs": 21}), "logprobs: expected an integer from 0 to 20, got 21"),
        (json!({"prompt": "a", "logprobs": true}), "logprobs: expected an integer from 0 to 20, got true"),
        (
            json!({"prompt": "a", "logprobs": 1, "score": 1}),
            "logprobs: not supported by this server: scores of the prompt come without them",
        ),
        (json!({"prompt": "a", "n": 17}), "n: expected an integer from 1 to 16, got 17"),
        (json!({"prompt": "a", "n": 2, "score": 1}), "n: not supported by this server: a prompt has one score"),
        (
            json!({"prompt": "a", "echo": true}),
            "echo: not supported by this server: put the prompt in front of the text yourself",
        ),
        (json!({"prompt": "a", "logit_bias": {"5": 1}}), "logit_bias: not supported by this server: leave it out"),
        (
            json!({"prompt": [1, 2], "max_tokens": 2047}),
            "prompt of 2 tokens + max_tokens 2047 is more than the context of 2048: shorten one of them",
        ),
        (json!([1]), "the body is not a JSON object: invalid type: sequence, expected a map at line 1 column 0"),
    ];
    for (body, expected) in table {
        assert_eq!(message(&body), expected, "{body}");
    }
    assert!(read_value(&json!({"prompt": [1, 2], "max_tokens": 2046})).is_ok());
}

fn hi(more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn a_chat_may_say_as_much_as_the_context_has_room_for() {
    let ask = chat_value(&hi(&json!({}))).unwrap();
    let prompt = u32::try_from(ask.request.prompt.len()).unwrap();
    assert_eq!((ask.request.max_new, ask.chat, ask.choices), (2048 - prompt, Some(Reading::PLAIN), 1));
    for field in ["max_tokens", "max_completion_tokens"] {
        assert_eq!(chat_value(&hi(&json!({field: 7}))).unwrap().request.max_new, 7);
    }
    assert_eq!(chat_value(&hi(&json!({"max_tokens": 7, "max_completion_tokens": 7}))).unwrap().request.max_new, 7);
    let logprobs = |more: Value| chat_value(&hi(&more)).unwrap().request.logprobs;
    assert_eq!(logprobs(json!({"logprobs": true})), Some(0));
    assert_eq!(logprobs(json!({"logprobs": true, "top_logprobs": 20})), Some(20));
    let completion = read_value(&json!({"prompt": "a", "logprobs": 3})).unwrap();
    assert_eq!((completion.request.logprobs, completion.request.score), (Some(3), None));
    let plain = chat_value(&hi(&json!({
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "reasoning_effort": "none", "n": 3,
        "logprobs": false, "store": true, "metadata": {"a": "b"}, "user": "x", "modalities": ["text"],
    })));
    assert_eq!(plain.unwrap().choices, 3);
}

#[test]
fn impossible_chats_are_refused_by_name() {
    let chat = |messages: Value| json!({"messages": messages});
    let user = json!({"role": "user", "content": "Hi"});
    let table = [
        (
            json!({}),
            "messages: missing, expected an array of one message or more, like {\"role\": \"user\", \"content\": \"Hi\"}",
        ),
        (
            chat(json!([])),
            "messages: expected an array of one message or more, like {\"role\": \"user\", \"content\": \"Hi\"}, got []",
        ),
        (
            chat(json!([user, {"role": "king", "content": "a"}])),
            "messages: expected an object with the role \"system\", \"developer\", \"user\", \"assistant\" or \"tool\" at \
             index 1, got {\"role\":\"king\",\"content\":\"a\"}",
        ),
        (
            chat(json!([{"role": "user", "content": 5}])),
            "messages: expected a text, or an array of parts that are text, as content at index 0, got 5",
        ),
        (
            chat(json!([{"role": "user"}])),
            "messages: expected a text, or an array of parts that are text, as content at index 0, got null",
        ),
        (
            chat(json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])),
            "messages: not supported by this server: this server takes text alone",
        ),
        (
            chat(json!([{"role": "tool", "content": "a", "tool_call_id": "b"}])),
            "messages: not supported by this server: this model's template has no tools",
        ),
        (
            hi(&json!({"tools": [{"type": "function", "function": {"name": "f"}}]})),
            "tools: not supported by this server: this model's template has no tools",
        ),
        (
            hi(&json!({"tool_choice": "required"})),
            "tool_choice: not supported by this server: this model's template has no tools",
        ),
        (
            hi(&json!({"reasoning_effort": "high"})),
            "reasoning_effort: not supported by this server: this model does not reason",
        ),
        (
            hi(&json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}})),
            "response_format: not supported by this server: nothing enforces a format: ask for it in the prompt",
        ),
        (
            hi(&json!({"max_tokens": 7, "max_completion_tokens": 8})),
            "max_tokens: expected the same as max_completion_tokens (8), or one of them alone, got 7",
        ),
        (
            hi(&json!({"max_completion_tokens": 0})),
            "max_completion_tokens: expected an integer from 1 to 4294967295, got 0",
        ),
        (
            hi(&json!({"max_completion_tokens": 2048})),
            "prompt of 6 tokens + max_tokens 2048 is more than the context of 2048: shorten one of them",
        ),
        (hi(&json!({"top_logprobs": 3})), "logprobs: expected true with top_logprobs, got null"),
        (hi(&json!({"logprobs": true, "top_logprobs": 21})), "top_logprobs: expected an integer from 0 to 20, got 21"),
        (hi(&json!({"logprobs": 3})), "logprobs: expected true or false, got 3"),
        (hi(&json!({"n": 0})), "n: expected an integer from 1 to 16, got 0"),
    ];
    for (body, expected) in table {
        assert_eq!(chat_value(&body).unwrap_err().to_string(), expected, "{body}");
    }
}

#[test]
fn every_choice_has_a_seed_of_its_own_and_always_the_same() {
    let ask = read_value(&json!({"prompt": "a", "seed": 7, "n": 16})).unwrap();
    let seeds: Vec<u64> = (0..16).map(|choice| ask.seed_of(choice)).collect();
    assert_eq!(seeds[0], 7);
    assert!(seeds.iter().skip(1).all(|&seed| seed < 1 << SEED_BITS));
    let mut unique = seeds.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), seeds.len());
    assert_eq!(seeds[1], ask.clone().seed_of(1));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0u64..3000).prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        prop::sample::select(vec!["pipelined", "fp8", "plain"]).prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map("\\PC{0,4}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn any_body() -> impl Strategy<Value = Value> {
    let known = prop::sample::select(vec![
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "mode",
        "wire",
        "ignore_eos",
        "return_token_ids",
        "score",
        "prompt_logprobs",
        "n",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "min_p",
        "echo",
        "messages",
        "tools",
        "tool_choice",
        "reasoning_effort",
        "max_completion_tokens",
        "response_format",
    ]);
    prop::collection::btree_map(known.prop_map(str::to_owned), any_json(), 0..8)
        .prop_map(|map| Value::Object(map.into_iter().collect()))
}

proptest! {
    #[test]
    fn no_body_panics_and_what_is_taken_is_possible(body in any_body()) {
        if let Ok(ask) = read_value(&body) {
            prop_assert!(!ask.request.prompt.is_empty() && ask.request.prompt.iter().all(|id| id.0 < 2048));
            prop_assert!(ask.request.prompt.len() as u64 + u64::from(ask.request.max_new) <= 2048);
            prop_assert!(ask.request.max_new > 0 || ask.request.score.is_some());
            prop_assert!((0.0..=2.0).contains(&ask.request.sampling.temperature));
            prop_assert!(ask.stops.len() <= STOPS_MAX);
        }
    }

    #[test]
    fn no_chat_panics_and_what_is_taken_is_possible(body in any_body()) {
        if let Ok(ask) = chat_value(&body) {
            prop_assert!(!ask.request.prompt.is_empty() && ask.request.prompt.iter().all(|id| id.0 < 2048));
            prop_assert!(ask.request.prompt.len() as u64 + u64::from(ask.request.max_new) <= 2048);
            prop_assert!(ask.request.max_new > 0 && ask.request.score.is_none());
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = read(&bytes, &facts(), tiny());
        let _ = read_chat(&bytes, &facts(), tiny());
    }
}
