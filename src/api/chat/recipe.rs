//! DeepSeek's own chat encoding of V4 and V4.1 and the parse of its output, from the crate
//! `deepseek-recipe`.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use deepseek_recipe::openai::ChatCompletionRequest;
use deepseek_recipe::request::{ConversionError, ConversionOptions, ModelVersion, ProtocolRequest};
use deepseek_recipe::stream::{
    ChunkGenerator, FinishReason, InferenceChunk, InferenceFinishReason, OutputChunk, ParsingOptions, StreamError,
    StreamProcessor, StreamTokenizer, ThinkingInitialStage,
};
use deepseek_recipe_encoding::PromptEncoding;
use deepseek_recipe_encoding::v4::dsv4::DeepseekV4Encoding;
use deepseek_recipe_encoding::v4::dsv41::DeepseekV41Encoding;
use futures::Stream;
use serde_json::{Map, Value, json};

use crate::api::chat::message;
use crate::api::chat::parse::{Call, Passed, Piece};
use crate::api::chat::{Dialect, Reading, Start};
use crate::api::error::ApiError;
use crate::api::fields::{Fields, invalid};
use crate::api::text::Vocabulary;
use crate::ids::TokenId;

/// The token in front of the names of tags: whoever has it talks like V4.
const DSML: &str = "｜DSML｜";
/// The end of the reasoning.
const THINKING_END: &str = "</think>";
/// The token in front of a system message: V4.1 has it, V4 does not.
const SYSTEM: &str = "<｜System｜>";
/// Name by which the crate knows the model.
const MODEL: &str = "served";
/// Fields that the crate reads; it is given no others.
const FIELDS: [&str; 5] = ["messages", "tools", "tool_choice", "reasoning_effort", "thinking"];

/// How a V4 or V4.1 checkpoint talks.
pub struct Recipe {
    version: ModelVersion,
    encoding: Box<dyn PromptEncoding + Send + Sync>,
}

impl std::fmt::Debug for Recipe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recipe").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Recipe {
    /// The encoding of a checkpoint whose vocabulary has the tokens of V4 or V4.1.
    #[must_use]
    pub fn of(vocabulary: &Vocabulary) -> Option<Self> {
        vocabulary.special(DSML)?;
        let tokenizer = vocabulary.prompt_tokenizer();
        Some(if vocabulary.special(SYSTEM).is_some() {
            let encoding = DeepseekV41Encoding::new().with_tokenizer(tokenizer);
            Self { version: ModelVersion::DeepseekV41Flash, encoding: Box::new(encoding) }
        } else {
            let encoding = DeepseekV4Encoding::new().with_tokenizer(tokenizer);
            Self { version: ModelVersion::DeepseekV4Pro, encoding: Box::new(encoding) }
        })
    }

    /// Turns a request's messages and tools into a prompt.
    ///
    /// # Errors
    /// [`ApiError::Messages`] with the crate's words, [`ApiError::Unsupported`].
    pub(crate) fn prompt(&self, fields: &Fields<'_>, messages: &[Value]) -> Result<(Vec<TokenId>, Reading), ApiError> {
        if fields.get("parallel_tool_calls") == Some(&Value::Bool(false)) && fields.get("tools").is_some() {
            let hint = "the model decides how many tools it calls: leave it out";
            return Err(ApiError::Unsupported { field: "parallel_tool_calls", hint });
        }
        let refused = |why: String| ApiError::Messages { why };
        let request: ChatCompletionRequest =
            serde_json::from_value(body(fields, messages)?).map_err(|why| refused(why.to_string()))?;
        // Who must call a tool at once can't think first; the default gives way, a wish is refused.
        let forced = fields.get("tool_choice").is_some_and(|choice| *choice != "auto" && *choice != "none");
        let options = ConversionOptions::new()
            .with_model_versions_by_name([(MODEL, self.version)])
            .with_default_thinking_mode(!forced);
        let converted = request.convert(options).map_err(|why| match why {
            ConversionError::BadRequest { detail } => refused(detail),
            ConversionError::Internal { detail } => ApiError::Internal { why: detail },
        })?;
        let ids = self.encoding.encode(&converted.conversation).map_err(|why| refused(why.to_string()))?;
        let parsing = &converted.parsing_options;
        let start = match parsing.thinking_initial_stage {
            _ if parsing.starts_in_tool_calls => Start::ToolCalls,
            None => Start::Content,
            Some(ThinkingInitialStage::ReasoningStart) => Start::Reasoning,
            Some(ThinkingInitialStage::ReasoningContinuation) => Start::MoreReasoning,
            Some(ThinkingInitialStage::ContentContinuation) => Start::MoreContent,
        };
        let reading = Reading { dialect: Dialect::DeepSeek, start, tools: parsing.parse_tool_calls };
        Ok((ids.into_iter().map(TokenId).collect(), reading))
    }
}

/// The fields that the crate reads, as it wants them.
fn body(fields: &Fields<'_>, messages: &[Value]) -> Result<Value, ApiError> {
    const EFFORTS: [&str; 8] = ["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"];
    if let Some(effort) = fields.get("reasoning_effort")
        && !effort.as_str().is_some_and(|effort| EFFORTS.contains(&effort))
    {
        return Err(invalid("reasoning_effort", &format!("one of {}", EFFORTS.join(", ")), effort));
    }
    let mut body = Map::new();
    for field in FIELDS {
        if let Some(value) = fields.get(field) {
            body.insert(field.to_owned(), value.clone());
        }
    }
    let spoken = messages.iter().map(|message| {
        let mut message = message.clone();
        message["role"] = json!(message::role(&message));
        message
    });
    body.insert("messages".to_owned(), spoken.collect());
    body.insert("model".to_owned(), json!(MODEL));
    Ok(Value::Object(body))
}

/// What the crate parses of an answer, as it comes.
type Parsed = Pin<Box<dyn Stream<Item = Result<OutputChunk, StreamError>> + Send>>;

/// An answer that is read.
///
/// The crate's parser is a stream over the inference: it is given a queue, and polled until it wants more.
pub(crate) struct Output {
    vocabulary: Arc<Vocabulary>,
    queue: Arc<Mutex<VecDeque<InferenceChunk>>>,
    parsed: Parsed,
    /// Tokens that are markers for the parser; no other special token is shown to it.
    markers: Vec<TokenId>,
    thinking_end: Option<TokenId>,
    reasons: bool,
    calls: u32,
    ended: bool,
}

impl std::fmt::Debug for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output").field("calls", &self.calls).field("ended", &self.ended).finish_non_exhaustive()
    }
}

/// Passes chunks on as they are.
struct AsTheyAre;

impl ChunkGenerator for AsTheyAre {
    type Chunk = OutputChunk;

    async fn generate(&mut self, chunk: OutputChunk) -> Vec<OutputChunk> {
        vec![chunk]
    }
}

/// Bytes of tokens as text, with special tokens spelled out.
struct Spelling(Arc<Vocabulary>);

impl StreamTokenizer for Spelling {
    fn decode_ids(&self, ids: &[u32], _skip_special_tokens: bool) -> Result<String, String> {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.0.spelled(TokenId(id))).copied().collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn is_special_token(&self, id: u32) -> bool {
        self.0.spelling(TokenId(id)).is_some()
    }
}

impl Output {
    /// Reads an answer as `reading` says; `stops` end its content.
    pub(crate) fn new(reading: Reading, stops: Vec<String>, vocabulary: Arc<Vocabulary>) -> Self {
        let thinking_initial_stage = match reading.start {
            Start::Content | Start::ToolCalls => None,
            Start::Reasoning => Some(ThinkingInitialStage::ReasoningStart),
            Start::MoreReasoning => Some(ThinkingInitialStage::ReasoningContinuation),
            Start::MoreContent => Some(ThinkingInitialStage::ContentContinuation),
        };
        let options = ParsingOptions {
            parse_tool_calls: reading.tools,
            starts_in_tool_calls: reading.start == Start::ToolCalls,
            thinking_initial_stage,
            stop_sequences: stops,
            ..ParsingOptions::default()
        };
        let queue: Arc<Mutex<VecDeque<InferenceChunk>>> = Arc::default();
        let source = Arc::clone(&queue);
        let inference = futures::stream::poll_fn(move |_| {
            let next = source.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            next.map_or(Poll::Pending, |chunk| Poll::Ready(Some(chunk)))
        });
        let processor = StreamProcessor::new(AsTheyAre, options).with_tokenizer(Spelling(Arc::clone(&vocabulary)));
        let thinking_end = vocabulary.special(THINKING_END);
        let dsml = vocabulary.special(DSML).filter(|_| reading.tools);
        Self {
            queue,
            parsed: Box::pin(processor.into_protocol_stream(inference)),
            markers: thinking_end.into_iter().chain(dsml).collect(),
            thinking_end,
            reasons: matches!(reading.start, Start::Reasoning | Start::MoreReasoning),
            calls: 0,
            ended: false,
            vocabulary,
        }
    }

    pub(crate) fn push(&mut self, token: TokenId) -> Passed {
        let special = self.vocabulary.token_bytes(token).is_empty();
        let ends_reasoning = Some(token) == self.thinking_end;
        // One that ends no reasoning is as any special token: no stop string ends at it.
        let silent = if ends_reasoning { !self.reasons } else { special && !self.markers.contains(&token) };
        if self.ended || silent {
            return Passed { piece: Piece::default(), stopped: false };
        }
        self.reasons &= !ends_reasoning;
        let piece = self.feed(InferenceChunk::Tokens { token_ids: vec![token.0], logprobs: None });
        // The parser ends by itself where a stop string is complete, and only there.
        Passed { piece, stopped: self.ended }
    }

    pub(crate) fn finish(&mut self) -> Piece {
        if self.ended {
            return Piece::default();
        }
        self.feed(InferenceChunk::Finish { finish_reason: InferenceFinishReason::Stop })
    }

    pub(crate) fn reasons(&self) -> bool {
        self.reasons
    }

    pub(crate) fn called(&self) -> bool {
        self.calls > 0
    }

    /// Gives the parser a chunk and takes all that it says to it.
    fn feed(&mut self, chunk: InferenceChunk) -> Piece {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(chunk);
        let mut piece = Piece::default();
        let mut context = Context::from_waker(Waker::noop());
        while !self.ended {
            match self.parsed.as_mut().poll_next(&mut context) {
                Poll::Pending => break,
                Poll::Ready(Some(Ok(chunk))) => self.take(chunk, &mut piece),
                // Tokens are always spelled, so nothing fails.
                Poll::Ready(Some(Err(_)) | None) => self.ended = true,
            }
        }
        piece
    }

    fn take(&mut self, chunk: OutputChunk, piece: &mut Piece) {
        let next = match chunk {
            OutputChunk::Start { .. } | OutputChunk::ToolCallBegin => Piece::default(),
            OutputChunk::Content { content, .. } => Piece::content(content),
            OutputChunk::Reasoning { content, .. } => Piece { reasoning: content, ..Piece::default() },
            OutputChunk::ToolCallNamed { tool_name } => {
                self.calls += 1;
                self.call(Some(tool_name), String::new())
            }
            OutputChunk::ToolCallArgumentsDelta { arguments } => self.call(None, arguments),
            OutputChunk::Finish { finish_reason, .. } => {
                self.ended = true;
                tracing::trace!(?finish_reason, stopped = finish_reason == FinishReason::StopSequence, "answer parsed");
                Piece::default()
            }
        };
        piece.absorb(next);
    }

    fn call(&self, name: Option<String>, arguments: String) -> Piece {
        let Some(index) = self.calls.checked_sub(1) else { return Piece::default() };
        Piece { calls: vec![Call { index, name, arguments }], ..Piece::default() }
    }
}
