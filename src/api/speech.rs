//! What a checkpoint says about text: its vocabulary, how it chats, how its tokens are best picked.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use crate::api::chat::{Chat, Recipe, Template, TemplateError};
use crate::api::text::{Vocabulary, VocabularyError};
use crate::ids::TokenId;
use crate::model::{Checkpoint, ModelError};

/// Text of one checkpoint.
#[derive(Debug)]
pub struct Speech {
    /// Text to ids and back.
    pub vocabulary: Arc<Vocabulary>,
    /// Messages to ids, and ids to what is said.
    pub chat: Chat,
    /// What a request gets that does not say.
    pub defaults: Defaults,
}

/// How tokens are picked where a request does not say: as `generation_config.json` has it, or else as
/// OpenAI's API.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    /// From 0, greedy, to 2.
    pub temperature: f32,
    /// Above 0, up to 1.
    pub top_p: f32,
    /// 0: all.
    pub top_k: u32,
    /// From 0, all, to 1.
    pub min_p: f32,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }
}

/// The files of a checkpoint that speak of text.
#[derive(Debug, Clone, Default)]
pub struct SpeechFiles {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Vec<u8>>,
    /// `chat_template.jinja`.
    pub template: Option<Vec<u8>>,
    /// `generation_config.json`.
    pub generation: Option<Vec<u8>>,
}

/// Why a checkpoint's text is not served.
#[derive(Debug, thiserror::Error)]
pub enum SpeechError {
    /// A file can't be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer.
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A file is not what it should be.
    #[error("{file}: {why}")]
    File {
        /// The file.
        file: &'static str,
        /// What was expected, what came.
        why: String,
    },
}

/// `tokenizer_config.json`, as far as it matters.
#[derive(Debug, Default, Deserialize)]
struct TokenizerConfig {
    bos_token: Option<Value>,
    eos_token: Option<Value>,
    chat_template: Option<Value>,
}

/// `generation_config.json`, as far as it matters.
#[derive(Debug, Default, Deserialize)]
struct GenerationConfig {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
}

impl Speech {
    /// Reads what a checkpoint says; `eos` never becomes text.
    ///
    /// # Errors
    /// [`SpeechError`].
    pub fn open(checkpoint: &Checkpoint, eos: &[TokenId]) -> Result<Self, SpeechError> {
        let files = SpeechFiles {
            tokenizer: checkpoint.tokenizer_json()?,
            tokenizer_config: checkpoint.read("tokenizer_config.json")?,
            template: checkpoint.read("chat_template.jinja")?,
            generation: checkpoint.read("generation_config.json")?,
        };
        Self::new(&files, eos)
    }

    /// The same from the files' bytes.
    ///
    /// # Errors
    /// [`SpeechError`].
    pub fn new(files: &SpeechFiles, eos: &[TokenId]) -> Result<Self, SpeechError> {
        let vocabulary = Vocabulary::from_bytes(&files.tokenizer, eos)?;
        let config: TokenizerConfig = read("tokenizer_config.json", files.tokenizer_config.as_deref())?;
        let chat = chat(files, config, &vocabulary)?;
        let defaults = defaults(&read("generation_config.json", files.generation.as_deref())?)?;
        Ok(Self { vocabulary: Arc::new(vocabulary), chat, defaults })
    }
}

/// A small JSON file; one that is not there says nothing.
fn read<T: Default + for<'a> Deserialize<'a>>(file: &'static str, bytes: Option<&[u8]>) -> Result<T, SpeechError> {
    let Some(bytes) = bytes else { return Ok(T::default()) };
    serde_json::from_slice(bytes).map_err(|why| SpeechError::File { file, why: why.to_string() })
}

/// DeepSeek's encoding where the vocabulary has its markers, else the checkpoint's template, else the
/// built-in one.
fn chat(files: &SpeechFiles, config: TokenizerConfig, vocabulary: &Vocabulary) -> Result<Chat, SpeechError> {
    if let Some(recipe) = Recipe::of(vocabulary) {
        return Ok(Chat::DeepSeek(Box::new(recipe)));
    }
    let (bos, eos) = (spelling(config.bos_token.as_ref()), spelling(config.eos_token.as_ref()));
    let source = match (&files.template, config.chat_template) {
        (Some(bytes), _) => {
            let text = std::str::from_utf8(bytes);
            Some(
                text.map_err(|why| SpeechError::File { file: "chat_template.jinja", why: why.to_string() })?.to_owned(),
            )
        }
        (None, Some(Value::String(text))) => Some(text),
        (None, _) => None,
    };
    Ok(match source {
        Some(source) => Chat::Plain(Box::new(Template::new(source, bos, eos)?)),
        None => Template::built_in(vocabulary, bos, eos).map_or(Chat::None, |template| Chat::Plain(Box::new(template))),
    })
}

/// A token of `tokenizer_config.json`: its text, or an object with it.
fn spelling(token: Option<&Value>) -> String {
    let text = token.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str()));
    text.unwrap_or_default().to_owned()
}

fn defaults(config: &GenerationConfig) -> Result<Defaults, SpeechError> {
    let usual = Defaults::default();
    let greedy = config.do_sample == Some(false);
    let defaults = Defaults {
        temperature: if greedy { 0.0 } else { config.temperature.unwrap_or(usual.temperature) },
        top_p: config.top_p.unwrap_or(usual.top_p),
        top_k: config.top_k.unwrap_or(usual.top_k),
        min_p: config.min_p.unwrap_or(usual.min_p),
    };
    let Defaults { temperature, top_p, min_p, .. } = defaults;
    let mass = top_p > 0.0 && top_p <= 1.0;
    if mass && (0.0..=2.0).contains(&temperature) && (0.0..=1.0).contains(&min_p) {
        return Ok(defaults);
    }
    let why = format!(
        "temperature {temperature}, top_p {top_p}, min_p {min_p}: expected 0 to 2, above 0 up to 1, and 0 to 1"
    );
    Err(SpeechError::File { file: "generation_config.json", why })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(generation: &str, template: Option<&str>) -> Result<Speech, SpeechError> {
        let files = SpeechFiles {
            tokenizer: include_bytes!("../../models/tiny-v4-flash/tokenizer.json").to_vec(),
            tokenizer_config: Some(include_bytes!("../../models/tiny-v4-flash/tokenizer_config.json").to_vec()),
            template: template.map(|text| text.as_bytes().to_vec()),
            generation: Some(generation.as_bytes().to_vec()),
        };
        Speech::new(&files, &[TokenId(1)])
    }

    #[test]
    fn defaults_are_the_checkpoints_or_openais() {
        let of = |generation| tiny(generation, None).unwrap().defaults;
        assert_eq!(of("{}"), Defaults::default());
        let some = of(r#"{"temperature": 0.6, "top_p": 0.95, "top_k": 40, "min_p": 0.125, "do_sample": true}"#);
        assert_eq!(some, Defaults { temperature: 0.6, top_p: 0.95, top_k: 40, min_p: 0.125 });
        assert_eq!(of(r#"{"temperature": 0.6, "do_sample": false}"#).temperature, 0.0);
    }

    #[test]
    fn files_that_make_no_sense_are_named() {
        for (generation, template) in [("{", None), (r#"{"top_p": 0}"#, None), ("{}", Some("{% if %}"))] {
            let why = tiny(generation, template).unwrap_err().to_string();
            let file = if template.is_some() { "chat template" } else { "generation_config.json" };
            assert!(why.contains(file), "{why}");
        }
    }

    #[test]
    fn the_checkpoints_template_goes_before_the_built_in_one() {
        assert!(matches!(tiny("{}", None).unwrap().chat, Chat::Plain(_)));
        let template = include_bytes!("../../models/tiny-v4-flash/tokenizer.json").to_vec();
        let text = String::from_utf8(template).unwrap().replace("｜User｜", "｜Other｜");
        let files = SpeechFiles { tokenizer: text.into_bytes(), ..SpeechFiles::default() };
        assert!(matches!(Speech::new(&files, &[]).unwrap().chat, Chat::None));
        let files = SpeechFiles { template: Some(b"x".to_vec()), ..files };
        assert!(matches!(Speech::new(&files, &[]).unwrap().chat, Chat::Plain(_)));
    }
}
