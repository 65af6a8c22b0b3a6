//! Chats: messages become a prompt, and the tokens of the answer become content, reasoning and tool calls.
//!
//! A [`Chat`] is how one checkpoint does it: a plain [`Template`], or DeepSeek's own encoding of V4 and
//! V4.1. How an answer is read is a [`Reading`], which is logged with the request.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::fields::{Fields, invalid};
use crate::api::text::Vocabulary;
use crate::ids::TokenId;

mod message;
pub(crate) mod parse;
mod recipe;
mod template;

pub use recipe::Recipe;
pub use template::{Template, TemplateError};

/// How a checkpoint talks.
#[derive(Debug)]
pub enum Chat {
    /// It has no template, and none is known for its tokens.
    None,
    /// A template without tools and reasoning.
    Plain(Box<Template>),
    /// DeepSeek's own encoding.
    DeepSeek(Box<Recipe>),
}

/// How the tokens of a chat's answer are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// Whose markers they have.
    pub dialect: Dialect,
    /// What the first token is a part of.
    pub start: Start,
    /// Tool calls are looked for.
    pub tools: bool,
}

/// Whose markers an answer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// None: all text is content.
    Plain,
    /// Those of DeepSeek-V4.
    DeepSeek,
}

/// What the first token of an answer is a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// The content of an answer that does not think.
    Content,
    /// Its reasoning.
    Reasoning,
    /// Reasoning that the prompt began.
    MoreReasoning,
    /// Content that the prompt began, after reasoning.
    MoreContent,
    /// A block of tool calls that the prompt opened.
    ToolCalls,
}

impl Reading {
    /// All text is content.
    pub const PLAIN: Self = Self { dialect: Dialect::Plain, start: Start::Content, tools: false };

    /// Whether the answer thinks first.
    #[must_use]
    pub fn thinks(self) -> bool {
        match self.start {
            Start::Reasoning | Start::MoreReasoning | Start::MoreContent => true,
            Start::Content | Start::ToolCalls => false,
        }
    }
}

impl Chat {
    /// Turns a request's messages into a prompt.
    ///
    /// # Errors
    /// [`ApiError`], naming the field.
    pub(crate) fn prompt(
        &self,
        fields: &Fields<'_>,
        vocabulary: &Vocabulary,
    ) -> Result<(Vec<TokenId>, Reading), ApiError> {
        let messages = message::list(fields)?;
        match self {
            Self::None => Err(ApiError::Unsupported {
                field: "messages",
                hint: "this checkpoint has no chat template; send a prompt to /v1/completions",
            }),
            Self::Plain(template) => {
                refuse_tools(fields)?;
                if fields.get("reasoning_effort").is_some_and(|effort| effort != "none") {
                    return Err(ApiError::Unsupported {
                        field: "reasoning_effort",
                        hint: "this model does not reason",
                    });
                }
                let ids = template.prompt(&message::plain(messages)?, vocabulary)?;
                Ok((ids, Reading::PLAIN))
            }
            Self::DeepSeek(recipe) => recipe.prompt(fields, messages),
        }
    }
}

/// Refuses what a model without tools can't do.
fn refuse_tools(fields: &Fields<'_>) -> Result<(), ApiError> {
    let hint = "this model's template has no tools";
    if let Some(tools) = fields.get("tools") {
        let list = tools.as_array().ok_or_else(|| invalid("tools", "an array of tools", tools))?;
        if !list.is_empty() {
            return Err(ApiError::Unsupported { field: "tools", hint });
        }
    }
    match fields.get("tool_choice").map(Value::as_str) {
        None | Some(Some("none" | "auto")) => Ok(()),
        Some(_) => Err(ApiError::Unsupported { field: "tool_choice", hint }),
    }
}
