//! The answer to a request out of its sessions, one for each choice: in one piece, or as server-sent
//! events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::time::timeout;

use crate::api::answer::{Label, Written, finish_reason};
use crate::api::chat::parse::Piece;
use crate::api::error::ApiError;
use crate::api::session::Session;
use crate::api::transcript::{End, Step};

/// How long a stream's status waits for the first event: a failure until then is a plain 5xx.
const FIRST_EVENT_WAIT: Duration = Duration::from_secs(10);

/// The sessions of a request, at least one.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) sessions: Vec<Session>,
    pub(crate) label: Label,
    pub(crate) include_usage: bool,
}

impl Answer {
    /// Reads all sessions to their ends and answers in one piece.
    ///
    /// # Errors
    /// Whatever a session failed of.
    pub(crate) async fn whole(mut self) -> Result<Response, ApiError> {
        let ends = futures::future::join_all(self.sessions.iter_mut().map(Session::all)).await;
        let ends: Vec<(Piece, &'static str, _)> = ends
            .into_iter()
            .zip(&self.sessions)
            .map(|((said, end), session)| {
                let reason = finish_reason(end.verdict?, session.transcript.called());
                Ok((said, reason, session.extension(end.stats)))
            })
            .collect::<Result<_, ApiError>>()?;
        let (mut choices, mut extensions) = (Vec::new(), Vec::new());
        let (said, rest): (Vec<_>, Vec<_>) =
            ends.into_iter().map(|(said, reason, extension)| (said, (reason, extension))).unzip();
        for ((session, said), (reason, extension)) in self.sessions.iter().zip(&said).zip(rest) {
            choices.push(session.whole(said, reason));
            extensions.push(extension);
        }
        let mut only = None;
        if let [choice] = choices.as_mut_slice() {
            choice.ringfence = None;
            only = extensions.pop();
        } else {
            choices.iter_mut().zip(extensions).for_each(|(choice, extension)| choice.ringfence = Some(extension));
        }
        let answer = self.label.whole(choices).with_usage(&self.label, self.written());
        Ok(Json(answer.with_extension(only)).into_response())
    }

    /// Answers with server-sent events, one for each token, then the end. While nothing comes, a
    /// comment goes out every `keep_alive`.
    ///
    /// # Errors
    /// Whatever a session failed of before the first event.
    pub(crate) async fn stream(self, keep_alive: Duration) -> Result<Response, ApiError> {
        let mut events = EventStream::new(self, None);
        let first = timeout(FIRST_EVENT_WAIT, events.step()).await.ok();
        match first {
            Some((_, Step::End(End { verdict: Err(error), .. }))) => return Err(error),
            Some((at, step)) => events.write(at, step),
            None => {}
        }
        Ok(events.response(keep_alive))
    }

    /// Answers with the server-sent events behind the one that was `read` last.
    pub(crate) fn resume(self, read: Option<u64>, keep_alive: Duration) -> Response {
        EventStream::new(self, read).response(keep_alive)
    }

    fn written(&self) -> Written {
        self.sessions.iter().fold(Written::default(), |sum, session| {
            let written = session.transcript.written();
            Written { tokens: sum.tokens + written.tokens, reasoning: sum.reasoning + written.reasoning }
        })
    }
}

/// The events of a streamed answer. Nothing is read ahead: what the client does not read stays in
/// the jobs' bounded channels.
#[derive(Debug)]
struct EventStream {
    answer: Answer,
    ready: VecDeque<Bytes>,
    /// Sessions that are at their end.
    done: Vec<bool>,
    /// Which session is looked at first, so that none is heard before the others for long.
    turn: usize,
    index: u64,
    /// The last event that the client has read: those up to it are not said again.
    read: Option<u64>,
    ended: bool,
}

impl EventStream {
    fn new(answer: Answer, read: Option<u64>) -> Self {
        let done = vec![false; answer.sessions.len()];
        Self { answer, ready: VecDeque::new(), done, turn: 0, index: 0, read, ended: false }
    }

    fn response(self, keep_alive: Duration) -> Response {
        let events = self;
        let body = futures::stream::unfold(events, move |mut events| async move {
            let bytes = events.next(keep_alive).await?;
            Some((Ok::<_, Infallible>(bytes), events))
        });
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
            (header::CACHE_CONTROL, "no-cache"),
            // Proxies like nginx would hold the stream back otherwise.
            (header::HeaderName::from_static("x-accel-buffering"), "no"),
        ];
        (StatusCode::OK, headers, Body::from_stream(body)).into_response()
    }

    async fn next(&mut self, keep_alive: Duration) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(bytes);
            }
            if self.ended {
                return None;
            }
            match timeout(keep_alive, self.step()).await {
                Ok((at, step)) => self.write(at, step),
                Err(_) => return Some(Bytes::from_static(b": waiting\n\n")),
            }
        }
    }

    /// The next step of any session that is not at its end. Cancelling it loses nothing.
    async fn step(&mut self) -> (usize, Step) {
        let (turn, count) = (self.turn, self.done.len());
        let open = self.answer.sessions.iter_mut().enumerate().filter(|(at, _)| !self.done[*at]);
        let mut steps: Vec<_> = open.map(|(at, session)| (at, Box::pin(session.next()))).collect();
        steps.sort_by_key(|(at, _)| (at + count - turn) % count);
        let step = std::future::poll_fn(|context| {
            for (at, step) in &mut steps {
                if let Poll::Ready(step) = pin!(step).poll(context) {
                    return Poll::Ready((*at, step));
                }
            }
            Poll::Pending
        });
        let (at, step) = step.await;
        drop(steps);
        self.turn = (at + 1) % count;
        (at, step)
    }

    fn write(&mut self, at: usize, step: Step) {
        match step {
            Step::Quiet => {}
            Step::Token { token, piece, .. } => {
                let choice = self.answer.sessions[at].token(std::slice::from_ref(&token), &piece);
                let data = json(&self.answer.label.chunk(vec![choice]));
                self.push(&data);
            }
            Step::End(end) => self.write_end(at, end),
        }
    }

    fn write_end(&mut self, at: usize, end: End) {
        let (session, label) = (&self.answer.sessions[at], &self.answer.label);
        match end.verdict {
            Ok(reason) => {
                let choice = session.end(&end.tail, finish_reason(reason, session.transcript.called()));
                let data = json(&label.chunk(vec![choice]).with_extension(Some(session.extension(end.stats))));
                self.push(&data);
                self.done[at] = true;
                self.ended = self.done.iter().all(|done| *done);
                if self.ended {
                    if self.answer.include_usage {
                        self.push(&self.usage());
                    }
                    self.push("[DONE]");
                }
            }
            Err(error) => self.write_error(at, &end.tail, &error),
        }
    }

    /// Ends a stream that failed. Its session may go on elsewhere, so these events have no ids: the last
    /// token's stays the one to read on from, and text held back is left to whoever does.
    fn write_error(&mut self, at: usize, tail: &Piece, error: &ApiError) {
        let (session, label) = (&self.answer.sessions[at], &self.answer.label);
        let open = matches!(error, ApiError::Job(error) if error.leaves_open());
        let nothing = Piece::default();
        let choice = session.end(if open { &nothing } else { tail }, "error");
        let chunk = json(&label.chunk(vec![choice]).with_extension(Some(session.extension(None))));
        let usage = self.answer.include_usage.then(|| self.usage());
        for data in [Some(chunk), Some(json(&error.body())), usage, Some("[DONE]".to_owned())].into_iter().flatten() {
            self.ready.push_back(Bytes::from(format!("data: {data}\n\n")));
        }
        // Whatever else the answer has is cancelled with the sessions.
        self.ended = true;
    }

    fn usage(&self) -> String {
        let label = &self.answer.label;
        json(&label.chunk(Vec::new()).with_usage(label, self.answer.written()))
    }

    fn push(&mut self, data: &str) {
        if self.read.is_none_or(|read| self.index > read) {
            let id = &self.answer.label.id;
            // Several choices come in whatever order they are ready: there is no place to read on from.
            let place = if self.done.len() == 1 { format!("id: {id}:{}\n", self.index) } else { String::new() };
            self.ready.push_back(Bytes::from(format!("{place}data: {data}\n\n")));
        }
        self.index += 1;
    }
}

/// Writes one of our own shapes, which have string keys only and so always serialize.
fn json(data: &impl Serialize) -> String {
    serde_json::to_string(data).unwrap_or_default()
}
