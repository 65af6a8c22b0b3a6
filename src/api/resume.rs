//! Reading an answer on over another connection: what is logged of its form, and what a client asks for.

use axum::http::{HeaderMap, header};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::api::answer::{REQUEST_PREFIX, request_name};
use crate::api::ask::Ask;
use crate::api::error::ApiError;
use crate::coordinator::job::{Attached, Client};
use crate::ids::SessionId;

/// Events behind an answer's tokens: the end, the usage, the mark.
const LAST_EVENTS: u64 = 3;

/// Characters of a header that an error repeats.
const GOT_CHARS_MAX: usize = 60;

/// How an answer is written, besides its request.
#[derive(Debug, Serialize, Deserialize)]
struct Form {
    created: u64,
    stops: Vec<String>,
    include_usage: bool,
    token_ids: bool,
}

/// Who asks, for the coordinator.
pub(crate) fn client(ask: &Ask, created: u64, headers: &HeaderMap) -> Client {
    let form = Form { created, stops: ask.stops.clone(), include_usage: ask.include_usage, token_ids: ask.token_ids };
    Client {
        resumable: ask.stream,
        authorization: authorization(headers),
        // Strings and numbers of ours always serialize.
        form: serde_json::to_vec(&form).unwrap_or_default(),
    }
}

/// Digest of a request's `Authorization`.
pub(crate) fn authorization(headers: &HeaderMap) -> Option<[u8; 32]> {
    headers.get(header::AUTHORIZATION).map(|value| Sha256::digest(value.as_bytes()).into())
}

/// The session that a client wants to read on, and the last event that it has read.
///
/// # Errors
/// [`ApiError::NoStream`] or [`ApiError::LastEvent`].
pub(crate) fn wanted(request: &str, headers: &HeaderMap) -> Result<(SessionId, Option<u64>), ApiError> {
    let session = request.strip_prefix(REQUEST_PREFIX).and_then(|number| number.parse().ok()).map(SessionId);
    // One spelling only, the one that the client was told.
    let session = session.filter(|session| request_name(*session) == request);
    let session = session.ok_or_else(|| ApiError::NoStream { request: shortened(request) })?;
    let Some(last) = headers.get("last-event-id") else { return Ok((session, None)) };
    let text = last.to_str().unwrap_or_default();
    let read = text.strip_prefix(request).and_then(|rest| rest.strip_prefix(':')).and_then(|index| index.parse().ok());
    let read = read.ok_or_else(|| ApiError::LastEvent {
        expected: format!("the id of an event of this stream, like {request}:17, or none to read from the start"),
        got: shortened(text),
    })?;
    Ok((session, Some(read)))
}

/// Whether the event that a client says it has read can have been said. While the stream goes on, that is
/// any of its tokens: a coordinator that was taken for dead and came back may have told more than the log
/// held when this one read it, and this one comes to the same tokens.
///
/// # Errors
/// [`ApiError::LastEvent`].
pub(crate) fn check(attached: &Attached, session: SessionId, read: Option<u64>) -> Result<(), ApiError> {
    let tokens = u64::try_from(attached.tokens.len()).unwrap_or(u64::MAX);
    let most = tokens.max(u64::from(attached.request.max_new));
    let said = if attached.ended { tokens.saturating_add(LAST_EVENTS) } else { most };
    match read {
        Some(read) if read >= said => Err(ApiError::LastEvent {
            expected: format!("an event below {said}, for no more are sent"),
            got: format!("{}:{read}", request_name(session)),
        }),
        Some(_) | None => Ok(()),
    }
}

/// The request as it was asked, and when.
///
/// # Errors
/// [`ApiError::Internal`] where its form can't be read.
pub(crate) fn ask(attached: &Attached) -> Result<(Ask, u64), ApiError> {
    let unread = |why: serde_json::Error| ApiError::Internal { why: format!("the logged request: {why}") };
    let form: Form = serde_json::from_slice(&attached.form).map_err(unread)?;
    let ask = Ask {
        request: attached.request.clone(),
        stops: form.stops,
        stream: true,
        include_usage: form.include_usage,
        token_ids: form.token_ids,
        score_top: 0,
    };
    Ok((ask, form.created))
}

fn shortened(text: &str) -> String {
    text.chars().take(GOT_CHARS_MAX).collect()
}
