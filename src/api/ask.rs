//! The body of `POST /v1/completions`, read and checked: an [`Ask`] has no impossible value.
//!
//! Owns the field table of `docs/api.md`: defaults, ranges, and what is refused by name.

use serde_json::{Map, Value};

use crate::api::error::ApiError;
use crate::api::score::SCORE_TOP_MAX;
use crate::api::stop::{STOP_BYTES_MAX, STOPS_MAX};
use crate::api::text::Vocabulary;
use crate::coordinator::job::{Mode, ModelFacts, Request, SubmitError};
use crate::ids::{TokenId, WireEncoding};
use crate::proto::control::Sampling;

/// Default of `max_tokens`.
pub const MAX_TOKENS_DEFAULT: u32 = 16;
/// Characters of an offending value that an error repeats.
const GOT_CHARS_MAX: usize = 60;
/// Seeds that are drawn here stay exact in a JSON reader that knows only doubles.
const SEED_BITS: u32 = 53;

/// A request as the API takes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// What the coordinator gets.
    pub request: Request,
    /// Stop strings, none empty.
    pub stops: Vec<String>,
    /// Server-sent events.
    pub stream: bool,
    /// A chunk with the usage before the end of a stream.
    pub include_usage: bool,
    /// Token ids in the answer.
    pub token_ids: bool,
    /// Top tokens to show per scored position (0: the scores alone).
    pub score_top: u32,
}

/// Fields of OpenAI's API that would change the answer, with the values that change nothing.
const UNSUPPORTED: &[(&str, &[&str], &str)] = &[
    ("n", &["1"], "send one request per completion"),
    ("best_of", &["1"], "send one request per completion"),
    ("echo", &["false"], "put the prompt in front of the text yourself"),
    ("logprobs", &[], "score a prompt with `score`"),
    ("suffix", &["\"\""], "this model does not insert text"),
    ("presence_penalty", &["0", "0.0"], "leave it out"),
    ("frequency_penalty", &["0", "0.0"], "leave it out"),
    ("logit_bias", &["{}"], "leave it out"),
];

/// Reads a body.
///
/// # Errors
/// [`ApiError`], naming the field and what it may be.
pub fn read(body: &[u8], model: &ModelFacts, text: &Vocabulary) -> Result<Ask, ApiError> {
    let object: Map<String, Value> =
        serde_json::from_slice(body).map_err(|why| ApiError::NotJson { why: why.to_string() })?;
    let fields = Fields(&object);
    for &(field, harmless, hint) in UNSUPPORTED {
        if fields.get(field).is_some_and(|value| !harmless.contains(&value.to_string().as_str())) {
            return Err(ApiError::Unsupported { field, hint });
        }
    }
    let (stream, include_usage) = read_stream(&fields)?;
    let score = read_score(&fields)?;
    if score.is_some() && stream {
        return Err(ApiError::Unsupported { field: "score", hint: "scores come whole, without `stream`" });
    }
    let max_new = fields.integer("max_tokens", 0, u64::from(u32::MAX))?;
    let max_new = max_new.and_then(|n| u32::try_from(n).ok()).unwrap_or(MAX_TOKENS_DEFAULT);
    if max_new == 0 && score.is_none() {
        return Err(invalid("max_tokens", "1 or more (0 only with `score`)", &Value::from(0)));
    }
    let (sampling, stops) = (read_sampling(&fields)?, read_stops(&fields)?);
    let mode = fields.choice("mode", &[("pipelined", Mode::Pipelined), ("plain", Mode::Plain)])?;
    let encoding = fields.choice("wire", &[("fp8", WireEncoding::Fp8), ("bf16", WireEncoding::Bf16)])?;
    let (ignore_eos, token_ids) = (fields.flag("ignore_eos")?, fields.flag("return_token_ids")?);
    let prompt = read_prompt(&fields, model, text)?;
    let prompt_len = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    if u64::from(prompt_len) + u64::from(max_new) > u64::from(model.context) {
        return Err(SubmitError::TooLong { prompt: prompt_len, max_new, context: model.context }.into());
    }
    // One top token is always asked for: it is the argmax, which a sampled token is not.
    let request = Request { prompt, max_new, sampling, mode, encoding, score: score.map(|top| top.max(1)), ignore_eos };
    Ok(Ask { request, stops, stream, include_usage, token_ids, score_top: score.unwrap_or(0) })
}

fn read_stream(fields: &Fields<'_>) -> Result<(bool, bool), ApiError> {
    let stream = fields.flag("stream")?;
    let Some(options) = fields.get("stream_options") else { return Ok((stream, false)) };
    let Some(object) = options.as_object() else {
        return Err(invalid("stream_options", "an object like {\"include_usage\": true}", options));
    };
    if !stream {
        return Err(ApiError::Unsupported { field: "stream_options", hint: "only together with \"stream\": true" });
    }
    Ok((stream, Fields(object).flag("include_usage")?))
}

fn read_score(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let most = u64::from(SCORE_TOP_MAX);
    let score = fields.integer("score", 0, most)?;
    let alias = fields.integer("prompt_logprobs", 0, most)?;
    if let (Some(a), Some(b)) = (score, alias)
        && a != b
    {
        return Err(invalid("prompt_logprobs", &format!("the same as score ({a}), or one of them alone"), &b.into()));
    }
    Ok(score.or(alias).and_then(|top| u32::try_from(top).ok()))
}

fn read_sampling(fields: &Fields<'_>) -> Result<Sampling, ApiError> {
    let temperature = fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0);
    let top_p = fields.number("top_p", 0.0, 1.0)?.unwrap_or(1.0);
    if top_p <= 0.0 {
        return Err(invalid("top_p", "a number above 0, up to 1", &fields.value("top_p")));
    }
    let top_k = fields.integer("top_k", 0, u64::from(u32::MAX))?.and_then(|k| u32::try_from(k).ok()).unwrap_or(0);
    let seed = match fields.get("seed") {
        None => rand::random::<u64>() >> (u64::BITS - SEED_BITS),
        // A negative seed is taken as its two's complement.
        Some(value) => value
            .as_u64()
            .or_else(|| value.as_i64().map(i64::cast_unsigned))
            .ok_or_else(|| invalid("seed", "an integer from -2^63 to 2^64 - 1", value))?,
    };
    Ok(Sampling { temperature, top_k, top_p, seed })
}

fn read_stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let Some(value) = fields.get("stop") else { return Ok(Vec::new()) };
    let expected = || format!("a string or up to {STOPS_MAX} strings, each of 1 to {STOP_BYTES_MAX} bytes");
    let bad = || invalid("stop", &expected(), value);
    let one = |value: &Value| {
        let text = value.as_str().filter(|text| (1..=STOP_BYTES_MAX).contains(&text.len()));
        text.map(str::to_owned).ok_or_else(bad)
    };
    match value.as_array() {
        None => Ok(vec![one(value)?]),
        Some(many) if many.len() <= STOPS_MAX => many.iter().map(one).collect(),
        Some(_) => Err(bad()),
    }
}

/// Reads a prompt: text, ids, or a list of one of them.
fn read_prompt(fields: &Fields<'_>, model: &ModelFacts, text: &Vocabulary) -> Result<Vec<TokenId>, ApiError> {
    const EXPECTED: &str = "a text or an array of token ids";
    let mut value = fields.get("prompt").ok_or(ApiError::Missing { field: "prompt", expected: EXPECTED })?;
    if let Some([first]) = value.as_array().map(Vec::as_slice)
        && (first.is_string() || first.is_array())
    {
        value = first;
    }
    let ids = if let Some(prompt) = value.as_str() {
        text.encode(prompt)?
    } else if let Some(array) = value.as_array() {
        if array.len() > 1 && array.iter().all(|item| item.is_string() || item.is_array()) {
            return Err(ApiError::Unsupported { field: "prompt", hint: "send one request per prompt" });
        }
        array.iter().enumerate().map(|(at, id)| read_id(at, id, model.vocab)).collect::<Result<_, _>>()?
    } else {
        return Err(invalid("prompt", EXPECTED, value));
    };
    match ids.iter().find(|id| id.0 >= model.vocab) {
        _ if ids.is_empty() => Err(invalid("prompt", "one token or more", value)),
        // The tokenizer names an id that the model lacks.
        Some(id) => Err(invalid("prompt", &format!("token ids below {}", model.vocab), &Value::from(id.0))),
        None => Ok(ids),
    }
}

fn read_id(at: usize, value: &Value, vocab: u32) -> Result<TokenId, ApiError> {
    let id = value.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id < vocab);
    id.map(TokenId).ok_or_else(|| {
        invalid("prompt", &format!("a token id from 0 to {} at index {at}", vocab.saturating_sub(1)), value)
    })
}

fn invalid(field: &'static str, expected: &str, got: &Value) -> ApiError {
    let mut got = got.to_string();
    if let Some((cut, _)) = got.char_indices().nth(GOT_CHARS_MAX) {
        got.truncate(cut);
        got.push('…');
    }
    ApiError::Invalid { field, expected: expected.to_owned(), got }
}

/// Typed access to the fields of an object; `null` counts as absent.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    fn value(&self, field: &str) -> Value {
        self.get(field).cloned().unwrap_or(Value::Null)
    }

    fn integer(&self, field: &'static str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let number = value.as_u64().filter(|n| (least..=most).contains(n));
        number.map(Some).ok_or_else(|| invalid(field, &format!("an integer from {least} to {most}"), value))
    }

    #[allow(clippy::cast_possible_truncation, reason = "the range is checked; the tail samples in f32")]
    fn number(&self, field: &'static str, least: f64, most: f64) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let number = value.as_f64().filter(|n| (least..=most).contains(n));
        number.map(|n| Some(n as f32)).ok_or_else(|| invalid(field, &format!("a number from {least} to {most}"), value))
    }

    fn flag(&self, field: &'static str) -> Result<bool, ApiError> {
        let Some(value) = self.get(field) else { return Ok(false) };
        value.as_bool().ok_or_else(|| invalid(field, "true or false", value))
    }

    fn choice<T: Copy>(&self, field: &'static str, choices: &[(&str, T)]) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let chosen = choices.iter().find(|(name, _)| value.as_str() == Some(name));
        let names = || choices.iter().map(|(name, _)| format!("\"{name}\"")).collect::<Vec<_>>().join(" or ");
        chosen.map(|&(_, choice)| Some(choice)).ok_or_else(|| invalid(field, &names(), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use std::sync::OnceLock;

    fn read_value(body: &Value) -> Result<Ask, ApiError> {
        static TINY: OnceLock<Vocabulary> = OnceLock::new();
        let json = include_bytes!("../../models/tiny-v4-flash/tokenizer.json");
        let text = TINY.get_or_init(|| Vocabulary::from_bytes(json, &[TokenId(1)]).unwrap());
        let model = ModelFacts { name: "tiny".into(), vocab: 2048, eos: vec![TokenId(1)], context: 2048 };
        read(body.to_string().as_bytes(), &model, text)
    }

    fn message(body: &Value) -> String {
        read_value(body).unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_those_of_openai() {
        let ask = read_value(&json!({"prompt": "And the LORD", "model": "whatever", "unknown": [1, {}]})).unwrap();
        assert_eq!(ask.request.max_new, 16);
        let Sampling { temperature, top_k, top_p, seed } = ask.request.sampling;
        assert_eq!((temperature, top_k, top_p), (1.0, 0, 1.0));
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
            "prompt": [0, 2047], "max_tokens": 0, "score": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": -1,
            "stop": ["a", "b"], "mode": "plain", "wire": "bf16", "ignore_eos": true, "return_token_ids": true, "n": 1,
        }))
        .unwrap();
        let sampling = Sampling { temperature: 0.5, top_k: 3, top_p: 0.25, seed: u64::MAX };
        let request = Request {
            prompt: vec![TokenId(0), TokenId(2047)],
            max_new: 0,
            sampling,
            mode: Some(Mode::Plain),
            encoding: Some(WireEncoding::Bf16),
            score: Some(5),
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
            (
                json!({"prompt": "a", "max_tokens": "9"}),
                "max_tokens: expected an integer from 0 to 4294967295, got \"9\"",
            ),
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
            (json!({"prompt": "a", "n": 2}), "n: not supported by this server: send one request per completion"),
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
        assert!(message(&json!({"prompt": "a", "stop": long})).len() < 200, "an error repeats the value shortened");
        assert!(read_value(&json!({"prompt": [1, 2], "max_tokens": 2046})).is_ok());
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
            "echo",
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
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let model = ModelFacts { name: "tiny".into(), vocab: 2048, eos: vec![], context: 2048 };
            let json = include_bytes!("../../models/tiny-v4-flash/tokenizer.json");
            static TINY: OnceLock<Vocabulary> = OnceLock::new();
            let text = TINY.get_or_init(|| Vocabulary::from_bytes(json, &[]).unwrap());
            let _ = read(&bytes, &model, text);
        }
    }
}
