//! Text to token ids and back, from the `tokenizer.json` of a checkpoint.
//!
//! Owns the [`Vocabulary`]: encoding, the bytes of every id, and the incremental
//! [`Detokenizer`], whose deltas add up to the text of all ids.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use deepseek_recipe_encoding::{PromptTokenizer, TokenizerEncoder};
use tokenizers::DecoderWrapper;
use tokenizers::tokenizer::Tokenizer;

use crate::ids::TokenId;

/// Largest token id that a `tokenizer.json` may name: bounds the table of bytes.
pub const TOKEN_ID_MAX: u32 = 1 << 22;

/// Why a `tokenizer.json` was refused.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    /// The file is not a tokenizer.
    #[error("tokenizer.json can't be read: {why}; expected the file of a Hugging Face tokenizer")]
    Syntax {
        /// What the parser said.
        why: String,
    },
    /// The decoder is of a kind whose ids have no bytes of their own.
    #[error("tokenizer.json: decoder {got}, expected ByteLevel, as DeepSeek's checkpoints have")]
    Decoder {
        /// The decoder that came.
        got: String,
    },
    /// An id is absurdly large.
    #[error("tokenizer.json names token id {got}, {TOKEN_ID_MAX} is the limit")]
    Id {
        /// The id that came.
        got: u32,
    },
}

/// A text could not be turned into ids.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the text can't be turned into tokens: {why}")]
pub struct EncodeError {
    /// What the tokenizer said.
    pub why: String,
}

/// Text to ids and ids to text.
///
/// Encoding adds nothing: no beginning-of-sequence token, no template. The text of a special
/// token (like `<｜User｜>`) becomes that token. Special tokens have no text of their own.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    /// Bytes of all ids, one after the other.
    bytes: Vec<u8>,
    /// One past the last byte of each id.
    ends: Vec<usize>,
    /// Encodes text in which nothing is a special token.
    plain: Arc<PromptTokenizer>,
    /// Special tokens by their spelling.
    specials: BTreeMap<String, TokenId>,
    /// Their spellings by their first character, the longest first.
    starts: BTreeMap<char, Vec<String>>,
    /// Their spellings by id.
    spellings: BTreeMap<TokenId, String>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("ids", &self.ends.len()).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Reads a `tokenizer.json`; the ids in `silent` (end-of-sequence) never become text, whether
    /// or not the file calls them special.
    ///
    /// # Errors
    /// [`VocabularyError`].
    pub fn from_bytes(json: &[u8], silent: &[TokenId]) -> Result<Self, VocabularyError> {
        let syntax = |why: tokenizers::Error| VocabularyError::Syntax { why: why.to_string() };
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(syntax)?;
        // A file may ask for truncation and padding; a prompt is taken whole or refused.
        tokenizer.with_padding(None).with_truncation(None).map_err(syntax)?;
        let decoder = tokenizer.get_decoder();
        if !matches!(decoder, Some(DecoderWrapper::ByteLevel(_))) {
            let got = decoder.map_or_else(|| "none".to_owned(), |other| format!("{other:?}"));
            return Err(VocabularyError::Decoder { got: got.chars().take(80).collect() });
        }
        let added = tokenizer.get_added_tokens_decoder();
        let last = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
        if last > TOKEN_ID_MAX {
            return Err(VocabularyError::Id { got: last });
        }
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for id in 0..=last {
            let special = added.get(&id).is_some_and(|token| token.special) || silent.contains(&TokenId(id));
            if !special && let Some(token) = tokenizer.id_to_token(id) {
                push_bytes(&token, &mut bytes);
            }
            ends.push(bytes.len());
        }
        let spellings: BTreeMap<TokenId, String> = tokenizer
            .get_added_vocabulary()
            .get_vocab()
            .iter()
            .map(|(text, &id)| (TokenId(id), text.clone()))
            .filter(|(_, text)| !text.is_empty())
            .collect();
        let mut starts = BTreeMap::<char, Vec<String>>::new();
        for (text, first) in spellings.values().filter_map(|text| Some((text, text.chars().next()?))) {
            starts.entry(first).or_default().push(text.clone());
        }
        starts.values_mut().for_each(|texts| texts.sort_by_key(|text| std::cmp::Reverse(text.len())));
        let specials = spellings.iter().map(|(&id, text)| (text.clone(), id)).collect();
        let plain = Arc::new(PromptTokenizer::new(&tokenizer));
        Ok(Self { tokenizer, bytes, ends, plain, specials, starts, spellings })
    }

    /// Turns a text into ids in which the bytes of `specials`, ascending, are special tokens, and the rest is
    /// none, whatever it spells.
    ///
    /// # Errors
    /// [`EncodeError`] with the tokenizer's words.
    pub(crate) fn encode_parts(&self, text: &str, specials: &[Range<usize>]) -> Result<Vec<TokenId>, EncodeError> {
        let ids = self.plain.encode_ids(text, specials).map_err(|why| EncodeError { why })?;
        Ok(ids.into_iter().map(TokenId).collect())
    }

    /// What encodes a rendered prompt.
    pub(crate) fn prompt_tokenizer(&self) -> Arc<PromptTokenizer> {
        Arc::clone(&self.plain)
    }

    /// The special token with this spelling.
    #[must_use]
    pub fn special(&self, text: &str) -> Option<TokenId> {
        self.specials.get(text).copied()
    }

    /// The special token's spelling with which `text` begins.
    pub(crate) fn special_at(&self, text: &str) -> Option<&str> {
        let texts = self.starts.get(&text.chars().next()?)?;
        texts.iter().map(String::as_str).find(|special| text.starts_with(special))
    }

    /// The spelling of a special token.
    pub(crate) fn spelling(&self, id: TokenId) -> Option<&str> {
        self.spellings.get(&id).map(String::as_str)
    }

    /// How many characters begin in `id`.
    pub(crate) fn characters(&self, id: TokenId) -> usize {
        // Bytes that go on with a character are 10xxxxxx.
        self.token_bytes(id).iter().filter(|&&byte| byte & 0xC0 != 0x80).count()
    }

    /// The bytes that `id` stands for, or its spelling where it is a special token.
    pub(crate) fn spelled(&self, id: TokenId) -> &[u8] {
        self.spelling(id).map_or_else(|| self.token_bytes(id), str::as_bytes)
    }

    /// Turns a text into ids; adds none.
    ///
    /// # Errors
    /// [`EncodeError`] with the tokenizer's words.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, EncodeError> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|why| EncodeError { why: why.to_string() })?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[TokenId]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that `id` stands for; none for special tokens and for ids the file does not name.
    #[must_use]
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        let Ok(at) = usize::try_from(id.0) else { return &[] };
        let Some(&end) = self.ends.get(at) else { return &[] };
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start..end]
    }
}

/// Appends the bytes of a byte-level token: each of its characters stands for one byte. A token
/// with any other character (an added one) stands for its own UTF-8.
fn push_bytes(token: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in token.chars() {
        let Some(byte) = byte_of(c) else {
            out.truncate(start);
            out.extend_from_slice(token.as_bytes());
            return;
        };
        out.push(byte);
    }
}

/// The byte that a character of a byte-level token stands for: printable Latin-1 characters stand
/// for themselves, the other 68 bytes, ascending, are written as U+0100 and up.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Turns ids into text one by one, never splitting a character.
///
/// The deltas, joined, with [`Detokenizer::finish`] last, equal [`Vocabulary::decode`] of all ids.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    /// Bytes of a character that is not complete yet; at most three.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Starts with nothing pending.
    #[must_use]
    pub fn new(vocabulary: Arc<Vocabulary>) -> Self {
        Self { vocabulary, pending: Vec::new() }
    }

    /// The text that `id` completes; may be empty.
    pub fn push(&mut self, id: TokenId) -> String {
        self.pending.extend_from_slice(self.vocabulary.token_bytes(id));
        let mut text = String::new();
        let mut taken = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            taken += chunk.valid().len();
            let invalid = chunk.invalid();
            // At the very end, an unfinished character waits for its other bytes.
            let unfinished = taken + invalid.len() == self.pending.len()
                && matches!(std::str::from_utf8(invalid), Err(e) if e.error_len().is_none());
            if !invalid.is_empty() && !unfinished {
                text.push(char::REPLACEMENT_CHARACTER);
                taken += invalid.len();
            }
        }
        self.pending.drain(..taken);
        text
    }

    /// The text of what was left incomplete: empty or one U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tiny() -> Arc<Vocabulary> {
        static TINY: std::sync::OnceLock<Arc<Vocabulary>> = std::sync::OnceLock::new();
        let load = || {
            let json = include_bytes!("../../models/tiny-v4-flash/tokenizer.json");
            Arc::new(Vocabulary::from_bytes(json, &[TokenId(1)]).unwrap())
        };
        Arc::clone(TINY.get_or_init(load))
    }

    fn plain(ids: &[TokenId]) -> Vec<u32> {
        ids.iter().map(|id| id.0).collect()
    }

    #[test]
    fn text_comes_back_and_nothing_is_added() {
        let tiny = tiny();
        for text in ["And the LORD spake unto Moses", "", " ", "a\n\n  b", "naïve Ωmega 🦀 <|", "\u{0}\u{7f}"] {
            let ids = tiny.encode(text).unwrap();
            assert_eq!(tiny.decode(&ids), text);
            assert!(ids.iter().all(|id| id.0 > 7), "{ids:?}");
        }
    }

    #[test]
    fn special_tokens_are_read_in_a_prompt_and_have_no_text() {
        let tiny = tiny();
        let ids = tiny.encode("<｜User｜>Hi<｜Assistant｜></think>").unwrap();
        assert_eq!(plain(&ids)[0], 3);
        assert_eq!(plain(&ids)[ids.len() - 2..], [4, 6]);
        assert_eq!(tiny.decode(&ids), "Hi");
    }

    #[test]
    fn every_byte_has_its_character() {
        // The tokenizers crate knows the same map: a token of one character per byte.
        let mut seen = [false; 256];
        for code in 0..0x200u32 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                assert!(!std::mem::replace(&mut seen[usize::from(byte)], true), "{byte} twice");
            }
        }
        assert!(seen.iter().all(|&s| s));
    }

    #[test]
    fn foreign_files_are_refused_in_words() {
        let not_json = Vocabulary::from_bytes(b"{", &[]).unwrap_err().to_string();
        assert!(not_json.contains("tokenizer.json can't be read"), "{not_json}");
        let json = include_str!("../../models/tiny-v4-flash/tokenizer.json");
        let mut value: serde_json::Value = serde_json::from_str(json).unwrap();
        value["decoder"] = serde_json::json!({"type": "Fuse"});
        let other = Vocabulary::from_bytes(value.to_string().as_bytes(), &[]).unwrap_err().to_string();
        assert!(other.contains("Fuse") && other.contains("expected ByteLevel"), "{other}");
    }

    proptest! {
        #[test]
        fn deltas_add_up_to_the_text_of_all_ids(ids in prop::collection::vec(0u32..2100, 0..80)) {
            let tiny = tiny();
            let ids: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
            let mut stream = Detokenizer::new(Arc::clone(&tiny));
            let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
            text += &stream.finish();
            prop_assert_eq!(&text, &tiny.decode(&ids));
            prop_assert_eq!(text, tiny.tokenizer.decode(&plain(&ids), true).unwrap());
        }

        #[test]
        fn any_text_survives_the_round_trip(text in "\\PC{0,40}") {
            let tiny = tiny();
            prop_assume!(!text.contains('｜') && !text.contains("think>"));
            let ids = tiny.encode(&text).unwrap();
            let mut stream = Detokenizer::new(Arc::clone(&tiny));
            let out: String = ids.iter().map(|&id| stream.push(id)).collect();
            prop_assert_eq!(out, text);
        }
    }
}
