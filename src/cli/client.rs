//! A client of a coordinator's HTTP API: requests, server-sent events, errors in words.

use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;

/// For the connection to be made.
const CONNECT_WAIT: Duration = Duration::from_secs(5);
/// Between two pieces of a stream: the server sends a comment far more often.
const STREAM_WAIT: Duration = Duration::from_secs(60);
/// For a small answer.
const QUESTION_WAIT: Duration = Duration::from_secs(5);
/// For an answer in one piece.
const ANSWER_WAIT: Duration = Duration::from_secs(600);
/// Longest line of a stream, in bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Longest answer in one piece, in bytes.
const ANSWER_BYTES_MAX: u64 = 512 << 20;
/// Longest error that is read, in bytes.
const ERROR_BYTES_MAX: u64 = 1 << 20;

/// Why a coordinator's answer is not there.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers.
    #[error("no answer from {url}: {why}; is a coordinator running there? (--url)")]
    Connect {
        /// The address.
        url: String,
        /// What the connection said.
        why: String,
    },
    /// The coordinator refused the request or failed.
    #[error("the coordinator answered {status}: {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Its words.
        message: String,
    },
    /// The coordinator failed after the answer had begun.
    #[error("the answer broke off: {message}")]
    Failed {
        /// Its words.
        message: String,
    },
    /// The stream ended before its last event.
    #[error("the connection ended in the middle of the answer: {why}")]
    Broken {
        /// What the connection said.
        why: String,
    },
    /// The answer is not of the shape that `docs/api.md` has.
    #[error("the answer is not that of a ringfence coordinator: {why}")]
    Shape {
        /// What was expected.
        why: String,
    },
}

/// A coordinator's address.
#[derive(Debug, Clone)]
pub struct Client {
    base: String,
    /// Keeps the connection of questions that are asked again and again.
    questions: ureq::Agent,
}

impl Client {
    /// A client of the coordinator at `url`, like `http://127.0.0.1:8080`.
    #[must_use]
    pub fn new(url: &str) -> Self {
        Self { base: url.trim_end_matches('/').to_owned(), questions: agent(QUESTION_WAIT) }
    }

    /// Asks for a small answer at a path, such as `/ring`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let url = format!("{}{path}", self.base);
        let answer = self.questions.get(&url).call();
        let mut answer = answer.map_err(|why| ClientError::Connect { url, why: why.to_string() })?;
        if !answer.status().is_success() {
            return Err(refusal(&mut answer));
        }
        let text = answer.body_mut().with_config().limit(ERROR_BYTES_MAX).read_to_string();
        let text = text.map_err(|why| ClientError::Broken { why: why.to_string() })?;
        serde_json::from_str(&text).map_err(|why| ClientError::Shape { why: format!("{path}: {why}") })
    }

    /// Asks for a completion in one piece.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn complete<T: DeserializeOwned>(&self, body: &Value) -> Result<T, ClientError> {
        let mut answer = self.post(body, ANSWER_WAIT)?;
        let reader = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).reader();
        serde_json::from_reader(BufReader::new(reader)).map_err(|why| {
            if why.is_io() {
                ClientError::Broken { why: why.to_string() }
            } else {
                ClientError::Shape { why: why.to_string() }
            }
        })
    }

    /// Asks for a completion as a stream and hands every event's JSON to `each`.
    ///
    /// # Errors
    /// [`ClientError`], also where the stream ends without its last event or with an error.
    pub fn stream<E: From<ClientError>>(
        &self,
        body: &Value,
        mut each: impl FnMut(Value) -> Result<(), E>,
    ) -> Result<(), E> {
        read_events(self.post(body, STREAM_WAIT)?, &mut each)
    }

    /// Reads a stream on that broke off behind event `last` of request `name`.
    ///
    /// # Errors
    /// As [`Client::stream`].
    pub fn read_on<E: From<ClientError>>(
        &self,
        (name, last): (&str, u64),
        mut each: impl FnMut(Value) -> Result<(), E>,
    ) -> Result<(), E> {
        let url = format!("{}/v1/streams/{name}", self.base);
        let answer = agent(STREAM_WAIT).get(&url).header("last-event-id", format!("{name}:{last}")).call();
        let mut answer = answer.map_err(|why| ClientError::Connect { url, why: why.to_string() })?;
        if !answer.status().is_success() {
            return Err(refusal(&mut answer).into());
        }
        read_events(answer, &mut each)
    }

    fn post(&self, body: &Value, wait: Duration) -> Result<ureq::http::Response<ureq::Body>, ClientError> {
        let url = format!("{}/v1/completions", self.base);
        let answer = agent(wait).post(&url).send_json(body);
        let mut answer = answer.map_err(|why| ClientError::Connect { url: url.clone(), why: why.to_string() })?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        Err(refusal(&mut answer))
    }
}

/// A client whose reads wait this long.
fn agent(wait: Duration) -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        // The proxy of the environment is for the web, not for a coordinator.
        .proxy(None)
        .timeout_connect(Some(CONNECT_WAIT))
        .timeout_per_read(Some(wait))
        .build();
    ureq::Agent::new_with_config(config)
}

/// What an answer without success says.
fn refusal(answer: &mut ureq::http::Response<ureq::Body>) -> ClientError {
    let text = answer.body_mut().with_config().limit(ERROR_BYTES_MAX).lossy_utf8(true).read_to_string();
    let text = text.unwrap_or_default();
    let message = serde_json::from_str::<Value>(&text).ok().and_then(|body| message_of(&body));
    let message = message.unwrap_or_else(|| text.chars().take(200).collect());
    ClientError::Refused { status: answer.status().as_u16(), message }
}

/// Hands every event of a stream to `each`.
fn read_events<E: From<ClientError>>(
    mut answer: ureq::http::Response<ureq::Body>,
    each: &mut impl FnMut(Value) -> Result<(), E>,
) -> Result<(), E> {
    let mut lines = BufReader::new(answer.body_mut().with_config().limit(u64::MAX).reader());
    let mut failure = None;
    loop {
        let line = next_line(&mut lines)?;
        let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
        if data == "[DONE]" {
            return failure.map_or(Ok(()), |message| Err(ClientError::Failed { message }.into()));
        }
        let event: Value =
            serde_json::from_str(data).map_err(|why| ClientError::Shape { why: format!("an event: {why}") })?;
        match message_of(&event) {
            Some(message) => failure = Some(message),
            None => each(event)?,
        }
    }
}

/// The message of an error object.
fn message_of(body: &Value) -> Option<String> {
    body.get("error")?.get("message")?.as_str().map(str::to_owned)
}

fn next_line(lines: &mut impl BufRead) -> Result<String, ClientError> {
    let mut line = Vec::new();
    let read = lines.take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
    read.map_err(|why| ClientError::Broken { why: why.to_string() })?;
    if line.last() != Some(&b'\n') {
        let why = if line.is_empty() { "it was closed".to_owned() } else { "a line is cut off".to_owned() };
        return Err(ClientError::Broken { why });
    }
    String::from_utf8(line).map_err(|why| ClientError::Shape { why: why.to_string() })
}
