//! What a streamed completion has said so far.

use serde_json::{Map, Value, json};

use crate::cli::client::ClientError;
use crate::ids::TokenId;

/// What a stream has said.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) id: String,
    pub(crate) text: String,
    pub(crate) token_ids: Vec<Value>,
    pub(crate) finish_reason: Option<String>,
    pub(crate) measured: Map<String, Value>,
    pub(crate) completion_tokens: u64,
}

impl Answer {
    /// Takes an event; gives back its text.
    pub(crate) fn take(&mut self, event: &Value) -> Result<String, ClientError> {
        let shape = |why: &str| ClientError::Shape { why: format!("{why} in {event}") };
        event["id"].as_str().ok_or_else(|| shape("no id"))?.clone_into(&mut self.id);
        if let Some(measured) = event["ringfence"].as_object() {
            self.measured.extend(measured.clone());
        }
        if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
            self.completion_tokens = tokens;
            self.measured.insert("prompt_tokens".into(), event["usage"]["prompt_tokens"].clone());
        }
        let Some(choice) = event["choices"].as_array().ok_or_else(|| shape("no choices"))?.first() else {
            return Ok(String::new());
        };
        if let Some(ids) = choice["token_ids"].as_array() {
            self.token_ids.extend(ids.iter().cloned());
            self.completion_tokens = u64::try_from(self.token_ids.len()).unwrap_or(u64::MAX);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        let text = choice["text"].as_str().ok_or_else(|| shape("no text"))?;
        self.text.push_str(text);
        Ok(text.to_owned())
    }

    /// The token ids.
    pub(crate) fn ids(&self) -> Result<Vec<TokenId>, ClientError> {
        serde_json::from_value(Value::from(self.token_ids.clone()))
            .map_err(|why| ClientError::Shape { why: format!("token ids: {why}") })
    }

    /// The one object of `--json`.
    pub(crate) fn json(&self) -> Value {
        let mut object = self.measured.clone();
        object.insert("id".into(), json!(self.id));
        object.insert("token_ids".into(), json!(self.token_ids));
        object.insert("text".into(), json!(self.text));
        object.insert("finish_reason".into(), json!(self.finish_reason));
        object.insert("completion_tokens".into(), json!(self.completion_tokens));
        Value::Object(object)
    }

    /// The end in one line.
    pub(crate) fn summary(&self) -> String {
        let number = |name: &str| self.measured.get(name).and_then(Value::as_f64);
        let mut line = format!("{} tokens", self.completion_tokens);
        if let Some(speed) = number("tokens_per_second") {
            line += &format!(", {speed:.1} tokens/s");
        }
        if let Some(first) = number("ttft_ms") {
            line += &format!(", first after {first:.0} ms");
        }
        if let Some(length) = number("acceptance_length") {
            line += &format!(", acceptance length {length:.2}");
        }
        line + ", finish: " + self.finish_reason.as_deref().unwrap_or("?")
    }
}
