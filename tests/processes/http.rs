//! A client as plain as can be: one request a connection, the answer read to its end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

/// For something to come; the server says something far more often.
const WAIT: Duration = Duration::from_secs(60);

/// An answer whose head was read.
pub(crate) struct Answer {
    pub(crate) status: u16,
    lines: BufReader<TcpStream>,
}

/// One server-sent event.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) id: String,
    pub(crate) data: String,
}

impl Event {
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Asks, and reads the head of the answer; `None` where nobody answers.
fn ask(url: &str, method: &str, path: &str, body: &str) -> Option<Answer> {
    ask_as(url, (method, path), &[], body)
}

/// The same with more headers.
fn ask_as(url: &str, route: (&str, &str), headers: &[(&str, &str)], body: &str) -> Option<Answer> {
    Asked::send(url, route, headers, body)?.answer()
}

/// A request on its way. Of a stream, the head of the answer comes with the first event.
pub(crate) struct Asked(TcpStream);

impl Asked {
    fn send(url: &str, (method, path): (&str, &str), headers: &[(&str, &str)], body: &str) -> Option<Self> {
        let host = url.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(host).ok()?;
        stream.set_read_timeout(Some(WAIT)).unwrap();
        // Of HTTP/1.0, the answer ends with the connection.
        let more: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        let request =
            format!("{method} {path} HTTP/1.0\r\nhost: {host}\r\n{more}content-length: {length}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).ok()?;
        Some(Self(stream))
    }

    /// Reads the head of the answer; `None` where the connection ends without one.
    pub(crate) fn answer(self) -> Option<Answer> {
        let mut lines = BufReader::new(self.0);
        let mut line = String::new();
        lines.read_line(&mut line).ok()?;
        let status = line.split(' ').nth(1)?.parse().ok()?;
        while line.trim() != "" {
            line.clear();
            lines.read_line(&mut line).ok()?;
        }
        Some(Answer { status, lines })
    }
}

impl Answer {
    /// The body, which is JSON.
    pub(crate) fn json(mut self) -> (u16, Value) {
        let mut body = String::new();
        self.lines.read_to_string(&mut body).unwrap();
        (self.status, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}")))
    }

    /// The next event of a stream, `None` at its end, or the words of a comment in front of it.
    pub(crate) fn event_or_comment(&mut self) -> Result<Option<Event>, String> {
        let mut event = Event { id: String::new(), data: String::new() };
        loop {
            let mut line = String::new();
            // A connection may break, or end inside an event, with the server.
            if self.lines.read_line(&mut line).unwrap_or(0) == 0 || !line.ends_with('\n') {
                return Ok(None);
            }
            let line = line.trim_end_matches(['\r', '\n']);
            if let Some(id) = line.strip_prefix("id: ") {
                id.clone_into(&mut event.id);
            } else if let Some(data) = line.strip_prefix("data: ") {
                event.data.push_str(data);
            } else if let Some(words) = line.strip_prefix(": ") {
                return Err(words.to_owned());
            } else if line.is_empty() && !event.data.is_empty() {
                return Ok(Some(event));
            }
        }
    }

    /// The next event of a stream; `None` at its end.
    pub(crate) fn event(&mut self) -> Option<Event> {
        std::iter::repeat_with(|| self.event_or_comment()).find_map(Result::ok).flatten()
    }

    /// Everything that is left of a stream.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.event()).collect()
    }
}

/// `GET`, where the server must answer.
#[track_caller]
pub(crate) fn get(url: &str, path: &str) -> (u16, Value) {
    ask(url, "GET", path, "").unwrap_or_else(|| panic!("no answer from {url}{path}")).json()
}

/// A completion in one piece.
#[track_caller]
pub(crate) fn complete(url: &str, body: &Value) -> (u16, Value) {
    ask(url, "POST", "/v1/completions", &body.to_string()).expect("an answer").json()
}

/// A stream that is read on.
pub(crate) fn resume(url: &str, request: &str, headers: &[(&str, &str)]) -> Option<Answer> {
    ask_as(url, ("GET", &format!("/v1/streams/{request}")), headers, "")
}

/// Asks for a completion, and does not wait for the answer.
#[track_caller]
pub(crate) fn begin(url: &str, body: &Value, headers: &[(&str, &str)]) -> Asked {
    Asked::send(url, ("POST", "/v1/completions"), headers, &body.to_string()).expect("a connection")
}

/// A completion as a stream, with more headers.
#[track_caller]
pub(crate) fn stream_as(url: &str, body: &Value, headers: &[(&str, &str)]) -> Answer {
    let answer = ask_as(url, ("POST", "/v1/completions"), headers, &body.to_string()).expect("an answer");
    assert_eq!(answer.status, 200);
    answer
}

/// A completion as a stream.
#[track_caller]
pub(crate) fn stream(url: &str, body: &Value) -> Answer {
    let answer = ask(url, "POST", "/v1/completions", &body.to_string()).expect("an answer");
    assert_eq!(answer.status, 200);
    answer
}

/// The token ids of a stream that ended well.
#[track_caller]
pub(crate) fn ids(events: &[Event]) -> Vec<u64> {
    let [.., last, done] = events else { panic!("too few events: {events:?}") };
    assert_eq!(done.data, "[DONE]");
    assert_eq!(last.json()["choices"][0]["finish_reason"], "length", "{last:?}");
    let of = |event: &Event| event.json()["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
    events[..events.len() - 1].iter().flat_map(of).map(|id| id.as_u64().unwrap()).collect()
}
