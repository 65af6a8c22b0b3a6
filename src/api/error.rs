//! What can go wrong with a request, as HTTP status and OpenAI's error object.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::api::text::EncodeError;
use crate::coordinator::job::{JobError, SubmitError};

/// Seconds after which a refused client may try again.
pub const RETRY_AFTER_SECONDS: u32 = 1;

/// Why a request was not answered, or not to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// No key that is known came with it.
    #[error("{}", if *given { "this API key is not known here" } else { "no API key: send one as Authorization: Bearer KEY" })]
    Key {
        /// Whether any came.
        given: bool,
    },
    /// The body is no JSON object.
    #[error("the body is not a JSON object: {why}")]
    NotJson {
        /// What the parser said.
        why: String,
    },
    /// The body is too large.
    #[error("the body is larger than {limit} bytes, the most that this context can need: shorten the prompt")]
    BodyTooLarge {
        /// The limit.
        limit: usize,
    },
    /// The body did not come to its end in time.
    #[error("the body did not come within {seconds} s")]
    BodyTimeout {
        /// The limit.
        seconds: u64,
    },
    /// The connection failed while the body came.
    #[error("the body broke off: {why}")]
    BodyBroken {
        /// What the connection said.
        why: String,
    },
    /// A field has an impossible value.
    #[error("{field}: expected {expected}, got {got}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// What is possible.
        expected: String,
        /// What came, shortened.
        got: String,
    },
    /// A field that is missing.
    #[error("{field}: missing, expected {expected}")]
    Missing {
        /// The field.
        field: &'static str,
        /// What is possible.
        expected: &'static str,
    },
    /// A field of OpenAI's API that would change the answer and is not supported.
    #[error("{field}: not supported by this server: {hint}")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// The prompt's text could not be turned into ids.
    #[error("prompt: {0}")]
    Prompt(#[from] EncodeError),
    /// The messages of a chat are none that the model's template takes.
    #[error("messages: {why}")]
    Messages {
        /// What the template said.
        why: String,
    },
    /// The coordinator did not take it.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The session failed.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The coordinator hung up without a verdict.
    #[error("the coordinator gave the session up without saying why: send the request again")]
    NoVerdict,
    /// The server itself failed.
    #[error("the server failed: {why}")]
    Internal {
        /// What failed.
        why: String,
    },
    /// No such stream.
    #[error(
        "no stream {request} for this authorization: it is unknown, was cancelled, or has ended and was read; \
         only a coordinator with --log keeps streams whose connection broke"
    )]
    NoStream {
        /// What the client called it.
        request: String,
    },
    /// Another coordinator has it.
    #[error(
        "stream {request} is another coordinator's, started after this one with the same log: read on there, or \
         where none is left start one again"
    )]
    StreamElsewhere {
        /// What the client called it.
        request: String,
    },
    /// An event that can't have been the last one.
    #[error("Last-Event-ID: expected {expected}, got {got}")]
    LastEvent {
        /// What is possible.
        expected: String,
        /// What came, shortened.
        got: String,
    },
    /// No such route.
    #[error(
        "no route {method} {path}; there are POST /v1/chat/completions, POST /v1/completions, GET /v1/streams/REQUEST, GET /v1/models, GET /health, GET /ring (docs/api.md)"
    )]
    NoRoute {
        /// The method.
        method: String,
        /// The path.
        path: String,
    },
    /// Another model is asked about.
    #[error("this server serves {served} alone")]
    NoModel {
        /// The model served.
        served: String,
    },
    /// The route has other methods.
    #[error("{path} does not take {method}")]
    Method {
        /// The method.
        method: String,
        /// The path.
        path: String,
    },
}

/// OpenAI's error object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorObject {
    /// For people.
    pub message: String,
    /// Kind of error.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field at fault, if one is.
    pub param: Option<&'static str>,
    /// For programs.
    pub code: &'static str,
}

/// An error as a body: `{"error": {…}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorObject,
}

impl ApiError {
    /// Status, code for programs, and the field at fault.
    fn facts(&self) -> (StatusCode, &'static str, Option<&'static str>) {
        match self {
            Self::Key { .. } => (StatusCode::UNAUTHORIZED, "invalid_api_key", None),
            Self::NotJson { .. } => (StatusCode::BAD_REQUEST, "invalid_json", None),
            Self::BodyTooLarge { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", None),
            Self::BodyTimeout { .. } => (StatusCode::REQUEST_TIMEOUT, "body_timeout", None),
            Self::BodyBroken { .. } => (StatusCode::BAD_REQUEST, "body_broken", None),
            Self::Invalid { field, .. } => (StatusCode::BAD_REQUEST, "invalid_value", Some(field)),
            Self::Missing { field, .. } => (StatusCode::BAD_REQUEST, "missing_field", Some(field)),
            Self::Unsupported { field, .. } => (StatusCode::BAD_REQUEST, "unsupported_field", Some(field)),
            Self::Prompt(_) => (StatusCode::BAD_REQUEST, "invalid_value", Some("prompt")),
            Self::Messages { .. } => (StatusCode::BAD_REQUEST, "invalid_value", Some("messages")),
            Self::Submit(SubmitError::NotReady { .. }) | Self::Job(JobError::NotReady { .. }) => {
                (StatusCode::SERVICE_UNAVAILABLE, "ring_not_ready", None)
            }
            Self::Submit(SubmitError::TooLong { .. }) => {
                (StatusCode::BAD_REQUEST, "context_length_exceeded", Some("max_tokens"))
            }
            Self::Submit(SubmitError::Invalid { field, .. }) => (StatusCode::BAD_REQUEST, "invalid_value", Some(field)),
            Self::Submit(SubmitError::Busy { .. }) => (StatusCode::TOO_MANY_REQUESTS, "busy", None),
            Self::Job(JobError::StageLost { .. }) => (StatusCode::BAD_GATEWAY, "stage_lost", None),
            Self::Job(JobError::Deadline { .. }) => (StatusCode::GATEWAY_TIMEOUT, "deadline", None),
            Self::Job(JobError::Refused { .. }) => (StatusCode::BAD_GATEWAY, "stage_refused", None),
            Self::Job(JobError::Diverged { .. }) => (StatusCode::INTERNAL_SERVER_ERROR, "ring_diverged", None),
            Self::Job(JobError::SlowReader { .. }) => (StatusCode::INTERNAL_SERVER_ERROR, "slow_reader", None),
            Self::Job(JobError::Detached { .. }) => (StatusCode::CONFLICT, "detached", None),
            Self::Job(JobError::NotLogged { .. }) => (StatusCode::INSUFFICIENT_STORAGE, "not_logged", None),
            Self::Job(JobError::Shutdown) => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down", None),
            Self::NoVerdict => (StatusCode::INTERNAL_SERVER_ERROR, "no_verdict", None),
            Self::Internal { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "internal", None),
            Self::NoStream { .. } => (StatusCode::NOT_FOUND, "no_stream", None),
            Self::StreamElsewhere { .. } => (StatusCode::CONFLICT, "detached", None),
            Self::LastEvent { .. } => (StatusCode::BAD_REQUEST, "invalid_value", Some("last-event-id")),
            Self::NoRoute { .. } => (StatusCode::NOT_FOUND, "no_route", None),
            Self::NoModel { .. } => (StatusCode::NOT_FOUND, "model_not_found", Some("model")),
            Self::Method { .. } => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", None),
        }
    }

    /// The HTTP status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.facts().0
    }

    /// The error as a body.
    #[must_use]
    pub fn body(&self) -> ErrorBody {
        let (status, code, param) = self.facts();
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            other if other.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        ErrorBody { error: ErrorObject { message: self.to_string(), kind, param, code } }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = self.status();
        let mut response = (status, Json(self.body())).into_response();
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECONDS));
        }
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
