//! Log-probabilities of new tokens in OpenAI's shapes, which differ between completions and chats.

use serde::{Serialize, Serializer};

use crate::api::text::Vocabulary;
use crate::coordinator::job::TokenScores;
use crate::ids::TokenId;

/// A new token with its log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scored {
    pub(crate) token: TokenId,
    pub(crate) scores: TokenScores,
    /// It is a part of the reasoning.
    pub(crate) reasoning: bool,
    /// Characters of the answer in front of it.
    pub(crate) offset: usize,
}

/// Log-probabilities of some tokens.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Logprobs {
    /// Of a completion: one list for each thing.
    Text { tokens: Vec<String>, token_logprobs: Vec<f32>, top_logprobs: Vec<Top>, text_offset: Vec<usize> },
    /// Of a chat: one object for each token.
    Chat {
        content: Option<Vec<Entry>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_content: Option<Vec<Entry>>,
        refusal: Option<()>,
    },
}

/// The likeliest tokens: their texts, with their log-probabilities, as one object.
#[derive(Debug)]
pub(crate) struct Top(Vec<(String, f32)>);

impl Serialize for Top {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// A token of a chat.
#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    #[serde(flatten)]
    token: Likely,
    top_logprobs: Vec<Likely>,
}

/// A token and how likely it is.
#[derive(Debug, Serialize)]
struct Likely {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Logprobs {
    /// Those of `list` for an answer to a chat, or for a completion.
    pub(crate) fn new(chat: bool, list: &[Scored], vocabulary: &Vocabulary) -> Self {
        if !chat {
            return Self::Text {
                tokens: list.iter().map(|scored| text(scored.token, vocabulary)).collect(),
                token_logprobs: list.iter().map(|scored| scored.scores.logprob).collect(),
                top_logprobs: list.iter().map(|scored| top(&scored.scores.top, vocabulary)).collect(),
                text_offset: list.iter().map(|scored| scored.offset).collect(),
            };
        }
        let part = |reasoning: bool| {
            let part = list.iter().filter(|scored| scored.reasoning == reasoning);
            let entries: Vec<Entry> = part.map(|scored| entry(scored, vocabulary)).collect();
            (!entries.is_empty()).then_some(entries)
        };
        Self::Chat { content: part(false), reasoning_content: part(true), refusal: None }
    }
}

fn entry(scored: &Scored, vocabulary: &Vocabulary) -> Entry {
    let top = scored.scores.top.iter().map(|&(token, logprob)| likely(token, logprob, vocabulary));
    Entry { token: likely(scored.token, scored.scores.logprob, vocabulary), top_logprobs: top.collect() }
}

fn likely(token: TokenId, logprob: f32, vocabulary: &Vocabulary) -> Likely {
    Likely { token: text(token, vocabulary), logprob, bytes: vocabulary.spelled(token).to_vec() }
}

/// Tokens that read alike, as parts of characters do, share a name: the likeliest has it.
fn top(list: &[(TokenId, f32)], vocabulary: &Vocabulary) -> Top {
    let mut named: Vec<(String, f32)> = Vec::with_capacity(list.len());
    for &(token, logprob) in list {
        let text = text(token, vocabulary);
        if named.iter().all(|(other, _)| *other != text) {
            named.push((text, logprob));
        }
    }
    Top(named)
}

/// The text of one token; a special one is spelled out.
fn text(token: TokenId, vocabulary: &Vocabulary) -> String {
    String::from_utf8_lossy(vocabulary.spelled(token)).into_owned()
}
