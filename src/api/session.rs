//! One session of a request: reads its events and tells what they mean. Dropping it, at any point, drops
//! the job and so frees the session.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::api::answer::{Choice, Extension, Said};
use crate::api::ask::Ask;
use crate::api::chat::parse::Piece;
use crate::api::logprobs::{Logprobs, Scored};
use crate::api::text::Vocabulary;
use crate::api::transcript::{End, Step, Transcript};
use crate::coordinator::job::{Attached, Event, Job, JobStats, TokenScores};
use crate::ids::{SessionId, TokenId};

/// How long a stopped session may take to say what it measured.
const STOP_WAIT: Duration = Duration::from_secs(1);

/// A session and what it has said.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) session: SessionId,
    /// Which of the request's choices it is.
    pub(crate) choice: u32,
    events: mpsc::Receiver<Event>,
    alive: Option<oneshot::Sender<()>>,
    /// Tokens said to readers before, which come before any event.
    past: VecDeque<(TokenId, Option<TokenScores>)>,
    pub(crate) transcript: Transcript,
    /// The seed that was used.
    seed: u64,
    chat: bool,
    vocabulary: Arc<Vocabulary>,
    /// Token ids belong in the answer.
    token_ids: bool,
}

impl Session {
    /// Takes a job that is a choice of the answer to `ask`.
    pub(crate) fn new(job: Job, ask: &Ask, choice: u32, vocabulary: Arc<Vocabulary>) -> Self {
        Self {
            session: job.session,
            choice,
            events: job.events,
            alive: Some(job.alive),
            past: VecDeque::new(),
            transcript: Transcript::new(ask, Arc::clone(&vocabulary)),
            vocabulary,
            seed: ask.seed_of(choice),
            chat: ask.chat.is_some(),
            token_ids: ask.token_ids,
        }
    }

    /// Takes a job that was read before.
    pub(crate) fn resumed(attached: Attached, ask: &Ask, vocabulary: Arc<Vocabulary>) -> Self {
        let mut scores = attached.scores.into_iter();
        let past = attached.tokens.into_iter().map(|token| (token, scores.next())).collect();
        Self { past, ..Self::new(attached.job, ask, 0, vocabulary) }
    }

    /// The next step. Cancelling it loses nothing.
    pub(crate) async fn next(&mut self) -> Step {
        let event = if let Some((token, scores)) = self.past.pop_front() {
            let index = u32::try_from(self.transcript.taken()).unwrap_or(u32::MAX);
            Some(Event::Token { index, token, scores })
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

    /// Reads the session to its end; gives what it said, the end without its tail.
    pub(crate) async fn all(&mut self) -> (Piece, End) {
        let mut said = Piece::default();
        loop {
            match self.next().await {
                Step::Quiet => {}
                Step::Token { piece, .. } => said.absorb(piece),
                Step::End(mut end) => {
                    said.absorb(std::mem::take(&mut end.tail));
                    return (said, end);
                }
            }
        }
    }

    /// All that it said, as a choice of a whole answer.
    pub(crate) fn whole<'a>(&'a self, said: &'a Piece, reason: &'static str) -> Choice<'a> {
        let said = if self.chat { Said::message(said, self.session) } else { Said::Text(&said.content) };
        Choice {
            finish_reason: Some(reason),
            token_ids: self.token_ids.then_some(self.transcript.ids.as_slice()),
            prompt_scores: self.transcript.scores.as_ref(),
            logprobs: self.logprobs(&self.transcript.logprobs),
            ..Choice::new(self.choice, said)
        }
    }

    /// A token and what it let out, as a choice of a chunk.
    pub(crate) fn token<'a>(&self, ids: &'a [TokenId], piece: &'a Piece) -> Choice<'a> {
        let said = if self.chat {
            Said::delta(piece, self.session, self.transcript.taken() == 1, false)
        } else {
            Said::Text(&piece.content)
        };
        let token_ids = self.token_ids.then_some(ids);
        let logprobs = self.logprobs(self.transcript.logprobs.last().map_or(&[], std::slice::from_ref));
        Choice { token_ids, logprobs, ..Choice::new(self.choice, said) }
    }

    /// The end and what was held back, as a choice of a chunk.
    pub(crate) fn end<'a>(&self, tail: &'a Piece, reason: &'static str) -> Choice<'a> {
        let said = if self.chat {
            Said::delta(tail, self.session, self.transcript.taken() == 0, true)
        } else {
            Said::Text(&tail.content)
        };
        Choice { finish_reason: Some(reason), ..Choice::new(self.choice, said) }
    }

    /// Log-probabilities of tokens, where there are any.
    fn logprobs(&self, list: &[Scored]) -> Option<Logprobs> {
        (!list.is_empty()).then(|| Logprobs::new(self.chat, list, &self.vocabulary))
    }

    /// What OpenAI's objects have no place for.
    pub(crate) fn extension(&self, stats: Option<JobStats>) -> Extension {
        Extension::new(self.seed, stats)
    }
}
