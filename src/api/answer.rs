//! The shapes of answers: OpenAI's completion object, whole or in chunks, and its extensions.

use serde::Serialize;

use crate::api::ask::Ask;
use crate::api::score::ScoreReport;
use crate::coordinator::job::{Finish, JobStats, ModelFacts};
use crate::ids::{SessionId, TokenId};

/// In front of a session's number.
pub(crate) const REQUEST_PREFIX: &str = "cmpl-";

/// What every chunk of an answer repeats.
#[derive(Debug, Clone)]
pub(crate) struct Label {
    /// `cmpl-` and the session's number.
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// The model served, whatever was asked for.
    pub(crate) model: String,
    /// The seed that was used.
    pub(crate) seed: u64,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: usize,
}

/// A completion or one chunk of it.
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

/// The one choice.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Choice<'a> {
    pub(crate) index: u32,
    pub(crate) text: &'a str,
    pub(crate) logprobs: Option<()>,
    pub(crate) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_scores: Option<&'a ScoreReport>,
}

/// Tokens read and written.
#[derive(Debug, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

/// What OpenAI's object has no place for.
#[derive(Debug, Serialize)]
pub(crate) struct Extension {
    seed: u64,
    #[serde(flatten)]
    stats: Option<JobStats>,
}

impl Label {
    /// The label of the answer to `ask`; its session is not named yet.
    pub(crate) fn new(ask: &Ask, created: u64, model: &ModelFacts) -> Self {
        let (seed, prompt_tokens) = (ask.request.sampling.seed, ask.request.prompt.len());
        Self { id: String::new(), created, model: model.name.clone(), seed, prompt_tokens }
    }

    /// With the name of its session.
    pub(crate) fn of(self, session: SessionId) -> Self {
        Self { id: request_name(session), ..self }
    }

    /// An answer or chunk without usage and extension.
    pub(crate) fn completion<'a>(&'a self, choices: Vec<Choice<'a>>) -> Completion<'a> {
        let Self { id, created, model, .. } = self;
        let object = "text_completion";
        Completion { id, object, created: *created, model, choices, usage: None, ringfence: None }
    }
}

impl Completion<'_> {
    /// With the count of tokens.
    pub(crate) fn with_usage(mut self, label: &Label, completion_tokens: usize) -> Self {
        let prompt_tokens = label.prompt_tokens;
        self.usage = Some(Usage { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens });
        self
    }

    /// With what was measured.
    pub(crate) fn with_stats(mut self, label: &Label, stats: Option<JobStats>) -> Self {
        self.ringfence = Some(Extension { seed: label.seed, stats });
        self
    }
}

/// What a client calls a session.
pub(crate) fn request_name(session: SessionId) -> String {
    format!("{REQUEST_PREFIX}{session}")
}

/// OpenAI's word for the end of an answer.
pub(crate) fn finish_reason(reason: Finish) -> &'static str {
    match reason {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}
