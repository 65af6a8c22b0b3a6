//! The bodies of `POST /v1/completions` and `/v1/chat/completions`, read and checked: an [`Ask`] has no
//! impossible value.
//!
//! Owns the field tables of `docs/api.md`: defaults, ranges, and what is refused by name.

use serde_json::{Map, Value};

use crate::api::chat::Reading;
use crate::api::error::ApiError;
use crate::api::fields::{Fields, invalid};
use crate::api::score::SCORE_TOP_MAX;
use crate::api::speech::{Defaults, Speech};
use crate::api::stop::{STOP_BYTES_MAX, STOPS_MAX};
use crate::api::text::Vocabulary;
use crate::coordinator::job::{Mode, ModelFacts, Request, SubmitError};
use crate::ids::{TokenId, WireEncoding};
use crate::proto::control::Sampling;

/// Default of `max_tokens` of a completion.
pub const MAX_TOKENS_DEFAULT: u32 = 16;
/// Default of `max_completion_tokens` of a chat, where the context has so much left.
pub const CHAT_TOKENS_DEFAULT: u32 = 8192;
/// The same of a chat that thinks first.
pub const THINKING_TOKENS_DEFAULT: u32 = 65_536;
/// Most choices of one request.
pub const CHOICES_MAX: u32 = 16;
/// Seeds that are drawn here stay exact in a JSON reader that knows only doubles.
const SEED_BITS: u32 = 53;

/// A request as the API takes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// What the coordinator gets, once for every choice.
    pub request: Request,
    /// Choices, each with a seed of its own ([`Ask::seed_of`]).
    pub choices: u32,
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
    /// How a chat's answer is read; `None`: a completion.
    pub chat: Option<Reading>,
}

/// A field of OpenAI's API that would change the answer, the values that change nothing, and what to do.
type Unsupported = (&'static str, &'static [&'static str], &'static str);

/// Those of both routes.
const UNSUPPORTED: &[Unsupported] = &[
    ("presence_penalty", &["0", "0.0"], "leave it out"),
    ("frequency_penalty", &["0", "0.0"], "leave it out"),
    ("logit_bias", &["{}"], "leave it out"),
];

/// Those of completions.
const UNSUPPORTED_COMPLETION: &[Unsupported] = &[
    ("best_of", &["1"], "ask for the choices with `n`"),
    ("echo", &["false"], "put the prompt in front of the text yourself"),
    ("suffix", &["\"\""], "this model does not insert text"),
];

/// Those of chats.
const UNSUPPORTED_CHAT: &[Unsupported] = &[
    ("functions", &["[]"], "they are called tools"),
    ("function_call", &["\"none\""], "it is called tool_choice"),
    ("audio", &[], "this model writes text"),
    ("modalities", &["[\"text\"]"], "this model writes text"),
    ("prediction", &[], "leave it out"),
    ("web_search_options", &[], "this server searches nothing"),
    ("response_format", &["{\"type\":\"text\"}"], "nothing enforces a format: ask for it in the prompt"),
    ("score", &[], "prompts are scored by /v1/completions"),
    ("prompt_logprobs", &[], "prompts are scored by /v1/completions"),
];

impl Ask {
    /// The seed of a choice: of the first one that of the request, of the others derived from it.
    #[must_use]
    pub fn seed_of(&self, choice: u32) -> u64 {
        let seed = self.request.sampling.seed;
        if choice == 0 {
            return seed;
        }
        // SplitMix64's step and finish: neighbouring choices have nothing in common.
        let mut mixed = seed.wrapping_add(u64::from(choice).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) >> (u64::BITS - SEED_BITS)
    }
}

/// Reads the body of a completion.
///
/// # Errors
/// [`ApiError`], naming the field and what it may be.
pub fn read(body: &[u8], model: &ModelFacts, speech: &Speech) -> Result<Ask, ApiError> {
    let object = parse(body)?;
    let fields = Fields(&object);
    refuse(&fields, UNSUPPORTED_COMPLETION)?;
    let common = read_common(&fields, &speech.defaults)?;
    let score = read_score(&fields)?;
    if score.is_some() && common.stream {
        return Err(ApiError::Unsupported { field: "score", hint: "scores come whole, without `stream`" });
    }
    if score.is_some() && common.choices > 1 {
        return Err(ApiError::Unsupported { field: "n", hint: "a prompt has one score" });
    }
    let logprobs = fields.integer("logprobs", 0, u64::from(SCORE_TOP_MAX))?.and_then(|top| u32::try_from(top).ok());
    if score.is_some() && logprobs.is_some() {
        return Err(ApiError::Unsupported { field: "logprobs", hint: "scores of the prompt come without them" });
    }
    let max_new = fields.integer("max_tokens", 0, u64::from(u32::MAX))?;
    let max_new = max_new.and_then(|n| u32::try_from(n).ok()).unwrap_or(MAX_TOKENS_DEFAULT);
    if max_new == 0 && score.is_none() {
        return Err(invalid("max_tokens", "1 or more (0 only with `score`)", &Value::from(0)));
    }
    let prompt = read_prompt(&fields, model, &speech.vocabulary)?;
    fits(&prompt, max_new, model)?;
    Ok(Ask { score_top: score.unwrap_or(0), ..common.ask(prompt, max_new, logprobs, score) })
}

/// Reads the body of a chat.
///
/// # Errors
/// [`ApiError`], naming the field and what it may be.
pub fn read_chat(body: &[u8], model: &ModelFacts, speech: &Speech) -> Result<Ask, ApiError> {
    let object = parse(body)?;
    let fields = Fields(&object);
    refuse(&fields, UNSUPPORTED_CHAT)?;
    let common = read_common(&fields, &speech.defaults)?;
    let most = u64::from(u32::MAX);
    let (old, new) = (fields.integer("max_tokens", 1, most)?, fields.integer("max_completion_tokens", 1, most)?);
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        let expected = format!("the same as max_completion_tokens ({new}), or one of them alone");
        return Err(invalid("max_tokens", &expected, &old.into()));
    }
    let max_new = new.or(old).and_then(|n| u32::try_from(n).ok());
    let logprobs = read_logprobs(&fields)?;
    let (prompt, reading) = speech.chat.prompt(&fields, &speech.vocabulary)?;
    if let Some(id) = prompt.iter().find(|id| id.0 >= model.vocab) {
        return Err(invalid("messages", &format!("tokens below {}", model.vocab), &Value::from(id.0)));
    }
    let left = model.context.saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
    let usual = if reading.thinks() { THINKING_TOKENS_DEFAULT } else { CHAT_TOKENS_DEFAULT };
    let max_new = max_new.unwrap_or(usual.min(left).max(1));
    fits(&prompt, max_new, model)?;
    Ok(Ask { chat: Some(reading), ..common.ask(prompt, max_new, logprobs, None) })
}

fn parse(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    serde_json::from_slice(body).map_err(|why| ApiError::NotJson { why: why.to_string() })
}

fn refuse(fields: &Fields<'_>, more: &[Unsupported]) -> Result<(), ApiError> {
    for &(field, harmless, hint) in UNSUPPORTED.iter().chain(more) {
        if fields.get(field).is_some_and(|value| !harmless.contains(&value.to_string().as_str())) {
            return Err(ApiError::Unsupported { field, hint });
        }
    }
    Ok(())
}

/// What both routes ask for.
struct Common {
    choices: u32,
    stream: bool,
    include_usage: bool,
    sampling: Sampling,
    stops: Vec<String>,
    mode: Option<Mode>,
    encoding: Option<WireEncoding>,
    ignore_eos: bool,
    token_ids: bool,
}

impl Common {
    /// A request that asks for log-probabilities of the new tokens, or for scores of the prompt.
    fn ask(self, prompt: Vec<TokenId>, max_new: u32, logprobs: Option<u32>, score: Option<u32>) -> Ask {
        let Self { choices, stream, include_usage, sampling, stops, mode, encoding, ignore_eos, token_ids } = self;
        // One top token is always asked for: it is the argmax, which a sampled token is not.
        let score = score.map(|top| top.max(1));
        let request = Request { prompt, max_new, sampling, mode, encoding, score, logprobs, ignore_eos };
        Ask { request, choices, stops, stream, include_usage, token_ids, score_top: 0, chat: None }
    }
}

fn read_common(fields: &Fields<'_>, defaults: &Defaults) -> Result<Common, ApiError> {
    let choices = fields.integer("n", 1, u64::from(CHOICES_MAX))?.and_then(|n| u32::try_from(n).ok());
    let (stream, include_usage) = read_stream(fields)?;
    Ok(Common {
        choices: choices.unwrap_or(1),
        stream,
        include_usage,
        sampling: read_sampling(fields, defaults)?,
        stops: read_stops(fields)?,
        mode: fields.choice("mode", &[("pipelined", Mode::Pipelined), ("plain", Mode::Plain)])?,
        encoding: fields.choice("wire", &[("fp8", WireEncoding::Fp8), ("bf16", WireEncoding::Bf16)])?,
        ignore_eos: fields.flag("ignore_eos")?,
        token_ids: fields.flag("return_token_ids")?,
    })
}

fn fits(prompt: &[TokenId], max_new: u32, model: &ModelFacts) -> Result<(), ApiError> {
    let prompt = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    if u64::from(prompt) + u64::from(max_new) > u64::from(model.context) {
        return Err(SubmitError::TooLong { prompt, max_new, context: model.context }.into());
    }
    Ok(())
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

/// Top tokens of a chat's log-probabilities, where they are asked for.
fn read_logprobs(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let top = fields.integer("top_logprobs", 0, u64::from(SCORE_TOP_MAX))?;
    match (fields.flag("logprobs")?, top) {
        (false, None) => Ok(None),
        (false, Some(_)) => Err(invalid("logprobs", "true with top_logprobs", &fields.value("logprobs"))),
        (true, top) => Ok(Some(top.and_then(|top| u32::try_from(top).ok()).unwrap_or(0))),
    }
}

fn read_sampling(fields: &Fields<'_>, defaults: &Defaults) -> Result<Sampling, ApiError> {
    let temperature = fields.number("temperature", 0.0, 2.0)?.unwrap_or(defaults.temperature);
    let top_p = fields.number("top_p", 0.0, 1.0)?.unwrap_or(defaults.top_p);
    if top_p <= 0.0 {
        return Err(invalid("top_p", "a number above 0, up to 1", &fields.value("top_p")));
    }
    let top_k = fields.integer("top_k", 0, u64::from(u32::MAX))?.and_then(|k| u32::try_from(k).ok());
    let min_p = fields.number("min_p", 0.0, 1.0)?.unwrap_or(defaults.min_p);
    let seed = match fields.get("seed") {
        None => rand::random::<u64>() >> (u64::BITS - SEED_BITS),
        // A negative seed is taken as its two's complement.
        Some(value) => value
            .as_u64()
            .or_else(|| value.as_i64().map(i64::cast_unsigned))
            .ok_or_else(|| invalid("seed", "an integer from -2^63 to 2^64 - 1", value))?,
    };
    Ok(Sampling { temperature, top_k: top_k.unwrap_or(defaults.top_k), top_p, min_p, seed })
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

#[cfg(test)]
mod tests;
