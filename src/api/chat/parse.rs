//! From tokens to what a reader is shown: content, reasoning, tool calls.

use std::sync::Arc;

use crate::api::chat::recipe::Output;
use crate::api::chat::{Dialect, Reading};
use crate::api::stop::StopText;
use crate::api::text::{Detokenizer, Vocabulary};
use crate::ids::TokenId;

/// What tokens let out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Piece {
    /// Text of the answer.
    pub(crate) content: String,
    /// Text of the reasoning before it.
    pub(crate) reasoning: String,
    /// Tool calls that began or went on, ascending, each once.
    pub(crate) calls: Vec<Call>,
}

/// A tool call, or a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Call {
    /// From 0.
    pub(crate) index: u32,
    /// The tool, where the call begins.
    pub(crate) name: Option<String>,
    /// More of its arguments' JSON.
    pub(crate) arguments: String,
}

impl Piece {
    pub(crate) fn content(content: String) -> Self {
        Self { content, ..Self::default() }
    }

    /// Appends what came next.
    pub(crate) fn absorb(&mut self, next: Self) {
        self.content += &next.content;
        self.reasoning += &next.reasoning;
        for call in next.calls {
            match self.calls.last_mut().filter(|last| last.index == call.index) {
                Some(last) => {
                    last.name = last.name.take().or(call.name);
                    last.arguments += &call.arguments;
                }
                None => self.calls.push(call),
            }
        }
    }
}

/// What a token did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Passed {
    /// What is certain now.
    pub(crate) piece: Piece,
    /// A stop string is complete; it and what follows it are dropped.
    pub(crate) stopped: bool,
}

/// Reads an answer token by token; never splits a character, and holds back what may become a stop string.
#[derive(Debug)]
pub(crate) enum Parser {
    /// All text is content.
    Plain { detokenizer: Detokenizer, stop: StopText },
    /// DeepSeek's markers.
    DeepSeek(Box<Output>),
}

impl Parser {
    /// Reads the answer to a chat, or, without a reading, a completion.
    pub(crate) fn new(reading: Option<Reading>, stops: Vec<String>, vocabulary: Arc<Vocabulary>) -> Self {
        match reading {
            Some(reading) if reading.dialect == Dialect::DeepSeek => {
                Self::DeepSeek(Box::new(Output::new(reading, stops, vocabulary)))
            }
            Some(_) | None => Self::Plain { detokenizer: Detokenizer::new(vocabulary), stop: StopText::new(stops) },
        }
    }

    /// Takes a token; after a stop, gives back nothing.
    pub(crate) fn push(&mut self, token: TokenId) -> Passed {
        match self {
            Self::Plain { detokenizer, stop } => {
                let passed = stop.push(&detokenizer.push(token));
                Passed { piece: Piece::content(passed.text), stopped: passed.stopped }
            }
            Self::DeepSeek(output) => output.push(token),
        }
    }

    /// Gives out what was held back: no more tokens come.
    pub(crate) fn finish(&mut self) -> Piece {
        match self {
            Self::Plain { detokenizer, stop } => {
                let passed = stop.push(&detokenizer.finish());
                let more = if passed.stopped { String::new() } else { stop.finish() };
                Piece::content(passed.text + &more)
            }
            Self::DeepSeek(output) => output.finish(),
        }
    }

    /// Whether the next token is a part of the reasoning.
    pub(crate) fn reasons(&self) -> bool {
        match self {
            Self::Plain { .. } => false,
            Self::DeepSeek(output) => output.reasons(),
        }
    }

    /// Whether a tool was called.
    pub(crate) fn called(&self) -> bool {
        match self {
            Self::Plain { .. } => false,
            Self::DeepSeek(output) => output.called(),
        }
    }
}
