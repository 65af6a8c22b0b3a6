//! One request's life in the API: reads its session's events and writes the answer, whole or as
//! server-sent events. Dropping it, at any point, drops the job and so frees the session.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::api::answer::{Choice, Label, finish_reason};
use crate::api::ask::Ask;
use crate::api::error::ApiError;
use crate::api::text::Vocabulary;
use crate::api::transcript::{End, Step, Transcript};
use crate::coordinator::job::{Attached, Event, Job};
use crate::ids::TokenId;

/// How long a stopped session may take to say what it measured.
const STOP_WAIT: Duration = Duration::from_secs(1);
/// How long a stream's status waits for the first event: a failure until then is a plain 5xx.
const FIRST_EVENT_WAIT: Duration = Duration::from_secs(10);

/// A session and what it has said.
#[derive(Debug)]
pub(crate) struct Session {
    events: mpsc::Receiver<Event>,
    alive: Option<oneshot::Sender<()>>,
    /// Tokens said to readers before, which come before any event.
    past: VecDeque<TokenId>,
    transcript: Transcript,
    label: Label,
    /// Token ids belong in the answer.
    token_ids: bool,
    include_usage: bool,
}

impl Session {
    /// Takes a job that answers `ask`.
    pub(crate) fn new(job: Job, ask: &Ask, label: Label, vocabulary: Arc<Vocabulary>) -> Self {
        let label = label.of(job.session);
        Self {
            events: job.events,
            alive: Some(job.alive),
            past: VecDeque::new(),
            transcript: Transcript::new(ask, vocabulary),
            label,
            token_ids: ask.token_ids,
            include_usage: ask.include_usage,
        }
    }

    /// Takes a job that was read before.
    pub(crate) fn resumed(attached: Attached, ask: &Ask, label: Label, vocabulary: Arc<Vocabulary>) -> Self {
        let past = attached.tokens.into();
        Self { past, ..Self::new(attached.job, ask, label, vocabulary) }
    }

    /// The next step. Cancelling it loses nothing.
    async fn next(&mut self) -> Step {
        let event = if let Some(token) = self.past.pop_front() {
            Some(Event::Token { index: u32::try_from(self.transcript.taken()).unwrap_or(u32::MAX), token })
        } else if self.transcript.stopped() {
            timeout(STOP_WAIT, self.events.recv()).await.unwrap_or(None)
        } else {
            self.events.recv().await
        };
        let step = match event {
            Some(event) => self.transcript.take(event),
            None => self.transcript.hung_up(),
        };
        if self.transcript.stopped()
            && let Some(alive) = self.alive.take()
        {
            // An error means that the session has ended by itself: its verdict is in the channel.
            let _ = alive.send(());
        }
        step
    }

    /// Reads the session to its end and answers in one piece.
    ///
    /// # Errors
    /// Whatever the session failed of.
    pub(crate) async fn whole(mut self) -> Result<Response, ApiError> {
        let mut text = String::new();
        let end = loop {
            match self.next().await {
                Step::Quiet => {}
                Step::Token { text: delta, .. } => text.push_str(&delta),
                Step::End(end) => break end,
            }
        };
        text.push_str(&end.tail);
        let choice = Choice {
            text: &text,
            finish_reason: Some(finish_reason(end.verdict?)),
            token_ids: self.token_ids.then_some(self.transcript.ids.as_slice()),
            prompt_scores: self.transcript.scores.as_ref(),
            ..Choice::default()
        };
        let answer = self.label.completion(vec![choice]).with_usage(&self.label, self.transcript.ids.len());
        Ok(Json(answer.with_stats(&self.label, end.stats)).into_response())
    }

    /// Answers with server-sent events, one for each token, then the end. While nothing comes, a
    /// comment goes out every `keep_alive`.
    ///
    /// # Errors
    /// Whatever the session failed of before its first event.
    pub(crate) async fn stream(mut self, keep_alive: Duration) -> Result<Response, ApiError> {
        let first = timeout(FIRST_EVENT_WAIT, self.next()).await.ok();
        let first = match first {
            Some(Step::End(End { verdict: Err(error), .. })) => return Err(error),
            other => other,
        };
        let mut events = EventStream::new(self, None);
        if let Some(step) = first {
            events.write(step);
        }
        Ok(events.response(keep_alive))
    }

    /// Answers with the server-sent events behind the one that was `read` last.
    pub(crate) fn resume(self, read: Option<u64>, keep_alive: Duration) -> Response {
        EventStream::new(self, read).response(keep_alive)
    }
}

/// The events of a streamed answer. Nothing is read ahead: what the client does not read stays in
/// the job's bounded channel.
#[derive(Debug)]
struct EventStream {
    session: Session,
    ready: VecDeque<Bytes>,
    index: u64,
    /// The last event that the client has read: those up to it are not said again.
    read: Option<u64>,
    ended: bool,
}

impl EventStream {
    fn new(session: Session, read: Option<u64>) -> Self {
        Self { session, ready: VecDeque::new(), index: 0, read, ended: false }
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
            match timeout(keep_alive, self.session.next()).await {
                Ok(step) => self.write(step),
                Err(_) => return Some(Bytes::from_static(b": waiting\n\n")),
            }
        }
    }

    fn write(&mut self, step: Step) {
        match step {
            Step::Quiet => {}
            Step::Token { token, text, .. } => {
                let ids = [token];
                let token_ids = self.session.token_ids.then_some(ids.as_slice());
                let choice = Choice { text: &text, token_ids, ..Choice::default() };
                let data = json(&self.session.label.completion(vec![choice]));
                self.push(&data);
            }
            Step::End(end) => self.write_end(end),
        }
    }

    fn write_end(&mut self, end: End) {
        let label = self.session.label.clone();
        match end.verdict {
            Ok(reason) => {
                let choice =
                    Choice { text: &end.tail, finish_reason: Some(finish_reason(reason)), ..Choice::default() };
                self.push(&json(&label.completion(vec![choice]).with_stats(&label, end.stats)));
                if self.session.include_usage {
                    self.push(&self.usage());
                }
                self.push("[DONE]");
            }
            Err(error) => self.write_error(&end.tail, &error),
        }
        self.ended = true;
    }

    /// Ends a stream that failed. Its session may go on elsewhere, so these events have no ids: the last
    /// token's stays the one to read on from, and text held back is left to whoever does.
    fn write_error(&mut self, tail: &str, error: &ApiError) {
        let label = self.session.label.clone();
        let open = matches!(error, ApiError::Job(error) if error.leaves_open());
        let text = if open { "" } else { tail };
        let choice = Choice { text, finish_reason: Some("error"), ..Choice::default() };
        let chunk = json(&label.completion(vec![choice]).with_stats(&label, None));
        let usage = self.session.include_usage.then(|| self.usage());
        for data in [Some(chunk), Some(json(&error.body())), usage, Some("[DONE]".to_owned())].into_iter().flatten() {
            self.ready.push_back(Bytes::from(format!("data: {data}\n\n")));
        }
    }

    fn usage(&self) -> String {
        let label = &self.session.label;
        json(&label.completion(Vec::new()).with_usage(label, self.session.transcript.ids.len()))
    }

    fn push(&mut self, data: &str) {
        if self.read.is_none_or(|read| self.index > read) {
            let id = &self.session.label.id;
            self.ready.push_back(Bytes::from(format!("id: {id}:{}\ndata: {data}\n\n", self.index)));
        }
        self.index += 1;
    }
}

/// Writes one of our own shapes, which have string keys only and so always serialize.
fn json(data: &impl Serialize) -> String {
    serde_json::to_string(data).unwrap_or_default()
}
