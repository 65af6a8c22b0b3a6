//! The messages of a chat, as far as every template has them: roles and text.

use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::fields::{Fields, invalid};

/// Most messages of a chat.
const MESSAGES_MAX: usize = 4096;

const EXPECTED: &str = "an array of one message or more, like {\"role\": \"user\", \"content\": \"Hi\"}";
const ROLES: &str = "\"system\", \"developer\", \"user\", \"assistant\" or \"tool\"";

/// A message of a template without tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    /// `system`, `user` or `assistant`.
    pub(crate) role: &'static str,
    /// Its text.
    pub(crate) content: String,
}

/// The messages of a request: objects with a known role and text alone.
///
/// # Errors
/// [`ApiError`], naming the message by its index.
pub(crate) fn list<'a>(fields: &Fields<'a>) -> Result<&'a [Value], ApiError> {
    let value = fields.get("messages").ok_or(ApiError::Missing { field: "messages", expected: EXPECTED })?;
    let list = value.as_array().filter(|list| !list.is_empty()).ok_or_else(|| invalid("messages", EXPECTED, value))?;
    if list.len() > MESSAGES_MAX {
        return Err(invalid("messages", &format!("at most {MESSAGES_MAX} messages"), &list.len().into()));
    }
    for (at, message) in list.iter().enumerate() {
        if role(message).is_none() {
            return Err(invalid("messages", &format!("an object with the role {ROLES} at index {at}"), message));
        }
        text(at, message)?;
    }
    Ok(list)
}

/// The messages for a template without tools.
///
/// # Errors
/// [`ApiError`] for tools, of which such a template knows nothing.
pub(crate) fn plain(messages: &[Value]) -> Result<Vec<Message>, ApiError> {
    let one = |(at, message): (usize, &Value)| {
        let calls = message.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
        match role(message) {
            Some(role @ ("system" | "user" | "assistant")) if !calls => {
                Ok(Message { role, content: text(at, message)? })
            }
            Some(_) | None => {
                Err(ApiError::Unsupported { field: "messages", hint: "this model's template has no tools" })
            }
        }
    };
    messages.iter().enumerate().map(one).collect()
}

/// The role of a message; a developer is the system.
pub(crate) fn role(message: &Value) -> Option<&'static str> {
    match message.get("role").and_then(Value::as_str) {
        Some("system" | "developer") => Some("system"),
        Some("user") => Some("user"),
        Some("assistant") => Some("assistant"),
        Some("tool") => Some("tool"),
        Some(_) | None => None,
    }
}

/// The text of a message: a string, or parts that are text.
fn text(at: usize, message: &Value) -> Result<String, ApiError> {
    let expected = || format!("a text, or an array of parts that are text, as content at index {at}");
    let optional = role(message) == Some("assistant");
    match message.get("content") {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => parts
            .iter()
            .map(|part| match part.get("type").and_then(Value::as_str) {
                Some("text") => {
                    let text = part.get("text").and_then(Value::as_str);
                    text.map(str::to_owned).ok_or_else(|| invalid("messages", &expected(), part))
                }
                Some("image_url" | "input_audio" | "file" | "refusal") => {
                    Err(ApiError::Unsupported { field: "messages", hint: "this server takes text alone" })
                }
                Some(_) | None => Err(invalid("messages", &expected(), part)),
            })
            .collect(),
        // An assistant that called tools said nothing else.
        None | Some(Value::Null) if optional => Ok(String::new()),
        other => Err(invalid("messages", &expected(), other.unwrap_or(&Value::Null))),
    }
}
