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

    /// Takes a token; none follows the one that completed a stop string.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::chat::Start;
    use proptest::prelude::*;
    use std::sync::OnceLock;

    /// The tiny model's vocabulary with DeepSeek's marker in place of a token of the drafter.
    fn marked() -> Arc<Vocabulary> {
        static MARKED: OnceLock<Arc<Vocabulary>> = OnceLock::new();
        let load = || {
            let json = include_str!("../../../models/tiny-v4-flash/tokenizer.json");
            let json = json.replace("<｜dspark▁noise｜>", "｜DSML｜");
            Arc::new(Vocabulary::from_bytes(json.as_bytes(), &[TokenId(1)]).unwrap())
        };
        Arc::clone(MARKED.get_or_init(load))
    }

    fn readings() -> impl Strategy<Value = Reading> {
        let starts = vec![Start::Content, Start::Reasoning, Start::MoreReasoning, Start::MoreContent, Start::ToolCalls];
        let dialects = prop::sample::select(vec![Dialect::Plain, Dialect::DeepSeek]);
        (dialects, prop::sample::select(starts), any::<bool>()).prop_map(|(dialect, start, tools)| {
            let tools = tools || start == Start::ToolCalls;
            Reading { dialect, start, tools }
        })
    }

    /// Pieces of markup, so that a random answer gets far into a parser, and of characters.
    fn ids() -> impl Strategy<Value = Vec<TokenId>> {
        let texts = vec![
            "<｜DSML｜tool_calls>\n",
            "</｜DSML｜tool_calls>",
            "<｜DSML｜invoke name=\"a\">\n",
            "</｜DSML｜invoke>\n",
            "<｜DSML｜parameter name=\"b\" string=\"true\">",
            "<｜DSML｜parameter name=\"b\" string=\"false\">",
            "</｜DSML｜parameter>\n",
            "</think>",
            "\n\n",
            "é🦀",
            "èé",
            "\"",
            "\\",
            "{",
            "END",
            "<",
        ];
        let piece = prop_oneof![
            prop::sample::select(texts).prop_map(|text| marked().encode(text).unwrap()),
            (0u32..2100).prop_map(|id| vec![TokenId(id)]),
            (0u32..8).prop_map(|id| vec![TokenId(id)]),
            // Single bytes, so that characters are cut and broken.
            (8u32..264).prop_map(|id| vec![TokenId(id)]),
        ];
        prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn no_answer_panics_and_its_calls_are_in_order(
            reading in readings(), ids in ids(), stops in prop::collection::vec("[Eaé🦀\"\n]{1,3}", 0..3),
        ) {
            let mut parser = Parser::new(Some(reading), stops.clone(), marked());
            let (mut all, mut stopped) = (Piece::default(), false);
            for &id in &ids {
                if stopped {
                    break;
                }
                let passed = parser.push(id);
                for call in &passed.piece.calls {
                    let begun = all.calls.iter().any(|known| known.index == call.index);
                    prop_assert!(begun != call.name.is_some(), "a call begins with its name, once");
                }
                stopped |= passed.stopped;
                all.absorb(passed.piece);
            }
            if !stopped {
                all.absorb(parser.finish());
            }
            prop_assert!(all.calls.iter().enumerate().all(|(at, call)| call.index as usize == at));
            prop_assert_eq!(parser.called(), !all.calls.is_empty());
            prop_assert!(reading.tools && reading.dialect == Dialect::DeepSeek || all.calls.is_empty());
            prop_assert!(reading.thinks() && reading.dialect == Dialect::DeepSeek || all.reasoning.is_empty());
            for stop in &stops {
                prop_assert!(!all.content.contains(stop.as_str()), "{:?} has {stop:?}", all.content);
            }
            for special in ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"] {
                prop_assert!(!all.content.contains(special) && !all.reasoning.contains(special));
            }
        }
    }
}
