//! Typed access to the fields of a request's JSON object.

use serde_json::{Map, Value};

use crate::api::error::ApiError;

/// Characters of an offending value that an error repeats.
const GOT_CHARS_MAX: usize = 60;

/// Says what was expected of a field, and what came, shortened.
pub(crate) fn invalid(field: &'static str, expected: &str, got: &Value) -> ApiError {
    let mut got = got.to_string();
    if let Some((cut, _)) = got.char_indices().nth(GOT_CHARS_MAX) {
        got.truncate(cut);
        got.push('…');
    }
    ApiError::Invalid { field, expected: expected.to_owned(), got }
}

/// Typed access to the fields of an object; `null` counts as absent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a>(pub(crate) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    pub(crate) fn value(&self, field: &str) -> Value {
        self.get(field).cloned().unwrap_or(Value::Null)
    }

    pub(crate) fn integer(&self, field: &'static str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let number = value.as_u64().filter(|n| (least..=most).contains(n));
        number.map(Some).ok_or_else(|| invalid(field, &format!("an integer from {least} to {most}"), value))
    }

    #[allow(clippy::cast_possible_truncation, reason = "the range is checked; the tail samples in f32")]
    pub(crate) fn number(&self, field: &'static str, least: f64, most: f64) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let number = value.as_f64().filter(|n| (least..=most).contains(n));
        number.map(|n| Some(n as f32)).ok_or_else(|| invalid(field, &format!("a number from {least} to {most}"), value))
    }

    pub(crate) fn flag(&self, field: &'static str) -> Result<bool, ApiError> {
        let Some(value) = self.get(field) else { return Ok(false) };
        value.as_bool().ok_or_else(|| invalid(field, "true or false", value))
    }

    pub(crate) fn choice<T: Copy>(&self, field: &'static str, choices: &[(&str, T)]) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let chosen = choices.iter().find(|(name, _)| value.as_str() == Some(name));
        let names = || choices.iter().map(|(name, _)| format!("\"{name}\"")).collect::<Vec<_>>().join(" or ");
        chosen.map(|&(_, choice)| Some(choice)).ok_or_else(|| invalid(field, &names(), value))
    }
}
