//! Reading an answer on over another connection: what is logged of its form, and what a client asks for.

use axum::http::{HeaderMap, header};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::api::answer::{REQUEST_PREFIX, request_name};
use crate::api::ask::Ask;
use crate::api::chat::Reading;
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
    /// How a chat's answer is read; a completion has none.
    #[serde(default)]
    chat: Option<Reading>,
}

/// The header with a client's own name of its request, as `OpenAI` calls it.
pub(crate) const NAME_HEADER: &str = "X-Client-Request-Id";

/// Bytes of a name.
const NAME_BYTES_MAX: usize = 128;

/// What the client calls its request.
///
/// # Errors
/// [`ApiError::Invalid`] for what could not be asked for again.
fn name(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(NAME_HEADER) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default();
    let fits = (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
    if fits && !text.starts_with(REQUEST_PREFIX) {
        return Ok(Some(text.to_owned()));
    }
    Err(ApiError::Invalid {
        field: NAME_HEADER,
        expected: format!("1 to {NAME_BYTES_MAX} visible ASCII characters that do not begin with {REQUEST_PREFIX}"),
        got: shortened(&String::from_utf8_lossy(value.as_bytes())),
    })
}

/// Who asks, for the coordinator.
///
/// # Errors
/// [`ApiError::Invalid`] where its name for the request is none.
pub(crate) fn client(ask: &Ask, created: u64, headers: &HeaderMap) -> Result<Client, ApiError> {
    let name = name(headers)?;
    if ask.choices > 1 {
        // Its choices are as many sessions, whose events have no order of their own.
        return match name {
            Some(_) => {
                Err(ApiError::Unsupported { field: "n", hint: "an answer that is read on by name has one choice" })
            }
            None => Ok(Client { resumable: false, authorization: authorization(headers), ..Client::default() }),
        };
    }
    let form = Form {
        created,
        stops: ask.stops.clone(),
        include_usage: ask.include_usage,
        token_ids: ask.token_ids,
        chat: ask.chat,
    };
    Ok(Client {
        resumable: ask.stream || name.is_some(),
        name,
        authorization: authorization(headers),
        // Strings and numbers of ours always serialize.
        form: serde_json::to_vec(&form).unwrap_or_default(),
    })
}

/// Digest of a request's `Authorization`.
pub(crate) fn authorization(headers: &HeaderMap) -> Option<[u8; 32]> {
    headers.get(header::AUTHORIZATION).map(|value| Sha256::digest(value.as_bytes()).into())
}

/// The session that a client names by its id; `None`: by what it called the request itself.
///
/// # Errors
/// [`ApiError::NoStream`].
pub(crate) fn session(request: &str) -> Result<Option<SessionId>, ApiError> {
    let Some(number) = request.strip_prefix(REQUEST_PREFIX) else { return Ok(None) };
    // One spelling only, the one that the client was told.
    let session = number.parse().ok().map(SessionId).filter(|session| request_name(*session) == request);
    session.map(Some).ok_or_else(|| no_stream(request))
}

/// There is nothing to read on.
pub(crate) fn no_stream(request: &str) -> ApiError {
    ApiError::NoStream { request: shortened(request) }
}

/// The last event of a session that a client has read.
///
/// # Errors
/// [`ApiError::LastEvent`].
pub(crate) fn read(session: SessionId, headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    let Some(last) = headers.get("last-event-id") else { return Ok(None) };
    let (text, request) = (last.to_str().unwrap_or_default(), request_name(session));
    let read = text.strip_prefix(&request).and_then(|rest| rest.strip_prefix(':')).and_then(|index| index.parse().ok());
    let read = read.ok_or_else(|| ApiError::LastEvent {
        expected: format!("the id of an event of this stream, like {request}:17, or none to read from the start"),
        got: shortened(text),
    })?;
    Ok(Some(read))
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
        choices: 1,
        stops: form.stops,
        stream: true,
        include_usage: form.include_usage,
        token_ids: form.token_ids,
        score_top: 0,
        chat: form.chat,
    };
    Ok((ask, form.created))
}

fn shortened(text: &str) -> String {
    text.chars().take(GOT_CHARS_MAX).collect()
}
