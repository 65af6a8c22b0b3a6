//! The shapes of answers: OpenAI's objects, whole or in chunks, and their extensions.

use serde::Serialize;

use crate::api::ask::Ask;
use crate::api::chat::parse::{Call, Piece};
use crate::api::logprobs::Logprobs;
use crate::api::score::ScoreReport;
use crate::coordinator::job::{Finish, JobStats, ModelFacts};
use crate::ids::{SessionId, TokenId};

/// In front of a session's number.
pub(crate) const REQUEST_PREFIX: &str = "cmpl-";

/// What every chunk of an answer repeats.
#[derive(Debug, Clone)]
pub(crate) struct Label {
    /// `cmpl-` and the first session's number.
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// The model served, whatever was asked for.
    pub(crate) model: String,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: usize,
    /// The answer is one to a chat.
    pub(crate) chat: bool,
    /// It may have reasoning, which is counted.
    pub(crate) thinks: bool,
}

/// An answer or one chunk of it.
#[derive(Debug, Serialize)]
pub(crate) struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ringfence: Option<Extension>,
}

/// One choice.
#[derive(Debug, Serialize)]
pub(crate) struct Choice<'a> {
    pub(crate) index: u32,
    #[serde(flatten)]
    pub(crate) said: Said<'a>,
    pub(crate) logprobs: Option<Logprobs>,
    pub(crate) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_scores: Option<&'a ScoreReport>,
    /// Of one choice among several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ringfence: Option<Extension>,
}

/// What a choice says, by the name that its object has for it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Said<'a> {
    /// Of a completion.
    Text(&'a str),
    /// Of a whole chat.
    Message(Message<'a>),
    /// Of a chunk of a chat.
    Delta(Delta<'a>),
}

/// What the assistant said.
#[derive(Debug, Serialize)]
pub(crate) struct Message<'a> {
    role: &'static str,
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
}

/// What it said more.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
}

/// A tool call, or what came of it.
#[derive(Debug, Serialize)]
struct ToolCall<'a> {
    /// Only of a delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function<'a>,
}

#[derive(Debug, Serialize)]
struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

/// Tokens read and written.
#[derive(Debug, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<Details>,
}

#[derive(Debug, Serialize)]
struct Details {
    reasoning_tokens: usize,
}

/// What OpenAI's object has no place for.
#[derive(Debug, Serialize)]
pub(crate) struct Extension {
    seed: u64,
    #[serde(flatten)]
    stats: Option<JobStats>,
}

/// Tokens that were written.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Written {
    pub(crate) tokens: usize,
    /// Those of them that are reasoning.
    pub(crate) reasoning: usize,
}

impl Label {
    /// The label of the answer to `ask` that `session` begins.
    pub(crate) fn new(ask: &Ask, created: u64, model: &ModelFacts, session: SessionId) -> Self {
        Self {
            id: request_name(session),
            created,
            model: model.name.clone(),
            prompt_tokens: ask.request.prompt.len(),
            chat: ask.chat.is_some(),
            thinks: ask.chat.is_some_and(super::chat::Reading::thinks),
        }
    }

    /// A whole answer without usage and extension.
    pub(crate) fn whole<'a>(&'a self, choices: Vec<Choice<'a>>) -> Completion<'a> {
        self.object(if self.chat { "chat.completion" } else { "text_completion" }, choices)
    }

    /// A chunk of an answer.
    pub(crate) fn chunk<'a>(&'a self, choices: Vec<Choice<'a>>) -> Completion<'a> {
        self.object(if self.chat { "chat.completion.chunk" } else { "text_completion" }, choices)
    }

    fn object<'a>(&'a self, object: &'static str, choices: Vec<Choice<'a>>) -> Completion<'a> {
        let Self { id, created, model, .. } = self;
        Completion { id, object, created: *created, model, choices, usage: None, ringfence: None }
    }
}

impl Completion<'_> {
    /// With the count of tokens.
    pub(crate) fn with_usage(mut self, label: &Label, written: Written) -> Self {
        let (prompt_tokens, completion_tokens) = (label.prompt_tokens, written.tokens);
        self.usage = Some(Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            completion_tokens_details: label.thinks.then_some(Details { reasoning_tokens: written.reasoning }),
        });
        self
    }

    /// With what was measured.
    pub(crate) fn with_extension(mut self, extension: Option<Extension>) -> Self {
        self.ringfence = extension;
        self
    }
}

impl Extension {
    pub(crate) fn new(seed: u64, stats: Option<JobStats>) -> Self {
        Self { seed, stats }
    }
}

impl<'a> Choice<'a> {
    /// A choice that goes on.
    pub(crate) fn new(index: u32, said: Said<'a>) -> Self {
        let (logprobs, finish_reason) = (None, None);
        Self { index, said, logprobs, finish_reason, token_ids: None, prompt_scores: None, ringfence: None }
    }
}

impl<'a> Said<'a> {
    /// All that a chat's choice said.
    pub(crate) fn message(piece: &'a Piece, session: SessionId) -> Self {
        let calls: Vec<_> =
            piece.calls.iter().map(|call| ToolCall { index: None, ..tool_call(call, session) }).collect();
        Self::Message(Message {
            role: "assistant",
            content: (!piece.content.is_empty() || calls.is_empty()).then_some(&piece.content),
            reasoning_content: (!piece.reasoning.is_empty()).then_some(&piece.reasoning),
            refusal: None,
            tool_calls: calls,
        })
    }

    /// What a chat's choice said more; the first delta has the role.
    pub(crate) fn delta(piece: &'a Piece, session: SessionId, first: bool, last: bool) -> Self {
        let calls: Vec<_> = piece.calls.iter().map(|call| tool_call(call, session)).collect();
        let other = last || !piece.reasoning.is_empty() || !calls.is_empty();
        Self::Delta(Delta {
            role: first.then_some("assistant"),
            content: (!piece.content.is_empty() || !other).then_some(&piece.content),
            reasoning_content: (!piece.reasoning.is_empty()).then_some(&piece.reasoning),
            tool_calls: calls,
        })
    }
}

/// The id of a call is the same whenever the answer is read: it says the session and the call.
fn tool_call(call: &Call, session: SessionId) -> ToolCall<'_> {
    let begins = call.name.is_some();
    ToolCall {
        index: Some(call.index),
        id: begins.then(|| format!("call_{session}_{}", call.index)),
        kind: begins.then_some("function"),
        function: Function { name: call.name.as_deref(), arguments: &call.arguments },
    }
}

/// What a client calls a session.
pub(crate) fn request_name(session: SessionId) -> String {
    format!("{REQUEST_PREFIX}{session}")
}

/// OpenAI's word for the end of an answer.
pub(crate) fn finish_reason(reason: Finish, called: bool) -> &'static str {
    match reason {
        Finish::Stop if called => "tool_calls",
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}
