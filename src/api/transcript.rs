//! What a session has said so far, pure: events in, what its reader is shown out.

use std::sync::Arc;

use crate::api::answer::Written;
use crate::api::ask::Ask;
use crate::api::chat::parse::{Parser, Piece};
use crate::api::error::ApiError;
use crate::api::logprobs::Scored;
use crate::api::score::ScoreReport;
use crate::api::text::Vocabulary;
use crate::coordinator::job::{Event, Finish, JobStats};
use crate::ids::TokenId;

/// The state of one answer.
#[derive(Debug)]
pub(crate) struct Transcript {
    parser: Parser,
    /// Tokens of the reasoning.
    reasoning: usize,
    /// Committed tokens, up to the one that completed a stop string.
    pub(crate) ids: Vec<TokenId>,
    /// Scores, where they were asked for.
    pub(crate) scores: Option<ScoreReport>,
    score_top: u32,
    /// Log-probabilities of `ids`, where they were asked for.
    pub(crate) logprobs: Vec<Scored>,
    scored: bool,
    /// Characters that begin in the tokens so far.
    offset: usize,
    vocabulary: Arc<Vocabulary>,
    stopped: bool,
}

/// What an event means for the reader.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// Nothing to show.
    Quiet,
    /// A token with the text it lets out, which may be empty.
    Token {
        /// The token.
        token: TokenId,
        /// What is certain now.
        piece: Piece,
        /// A stop string is complete: the session has to be told.
        stopped: bool,
    },
    /// The last step.
    End(End),
}

/// How an answer ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct End {
    /// What was held back.
    pub(crate) tail: Piece,
    /// Why, or what went wrong.
    pub(crate) verdict: Result<Finish, ApiError>,
    /// What was measured; `None` where the session ended without saying.
    pub(crate) stats: Option<JobStats>,
}

impl Transcript {
    /// An answer to `ask` with nothing said.
    pub(crate) fn new(ask: &Ask, vocabulary: Arc<Vocabulary>) -> Self {
        Self {
            parser: Parser::new(ask.chat, ask.stops.clone(), Arc::clone(&vocabulary)),
            logprobs: Vec::new(),
            scored: ask.request.logprobs.is_some(),
            offset: 0,
            vocabulary,
            reasoning: 0,
            ids: Vec::new(),
            scores: ask.request.score.map(|_| ScoreReport::default()),
            score_top: ask.score_top,
            stopped: false,
        }
    }

    /// Whether a stop string is complete and only the verdict is awaited.
    pub(crate) fn stopped(&self) -> bool {
        self.stopped
    }

    /// Tokens taken.
    pub(crate) fn taken(&self) -> usize {
        self.ids.len()
    }

    /// Tokens written, for the usage.
    pub(crate) fn written(&self) -> Written {
        Written { tokens: self.ids.len(), reasoning: self.reasoning }
    }

    /// Whether a tool was called.
    pub(crate) fn called(&self) -> bool {
        self.parser.called()
    }

    /// Takes the session's next event.
    pub(crate) fn take(&mut self, event: Event) -> Step {
        match event {
            // Tokens that were on their way when the stop string was complete.
            Event::Token { .. } | Event::Scored { .. } if self.stopped => Step::Quiet,
            Event::Token { index, token, scores } => {
                if u32::try_from(self.ids.len()) != Ok(index) {
                    let why = format!("token {index} came, token {} was expected", self.ids.len());
                    return self.fail(ApiError::Internal { why });
                }
                self.ids.push(token);
                let reasoning = self.parser.reasons();
                self.reasoning += usize::from(reasoning);
                if self.scored {
                    let Some(scores) = scores else {
                        return self.fail(ApiError::Internal { why: format!("token {index} has no log-probability") });
                    };
                    self.logprobs.push(Scored { token, scores, reasoning, offset: self.offset });
                }
                self.offset += self.vocabulary.characters(token);
                let passed = self.parser.push(token);
                self.stopped = passed.stopped;
                Step::Token { token, piece: passed.piece, stopped: passed.stopped }
            }
            Event::Scored { pos, answer } => {
                let Some(scores) = &mut self.scores else { return Step::Quiet };
                match scores.push(pos, &answer, self.score_top) {
                    Ok(()) => Step::Quiet,
                    Err(why) => self.fail(ApiError::Internal { why: why.to_string() }),
                }
            }
            Event::Finished { reason, stats } => self.finish(reason, Some(stats)),
            // The text was complete before the failure.
            Event::Failed(_) if self.stopped => self.finish(Finish::Stop, None),
            Event::Failed(error) => self.fail(error.into()),
        }
    }

    /// The session hung up without a verdict.
    pub(crate) fn hung_up(&mut self) -> Step {
        if self.stopped { self.finish(Finish::Stop, None) } else { self.fail(ApiError::NoVerdict) }
    }

    fn finish(&mut self, reason: Finish, stats: Option<JobStats>) -> Step {
        let reason = if self.stopped { Finish::Stop } else { reason };
        Step::End(End { tail: self.tail(), verdict: Ok(reason), stats })
    }

    fn fail(&mut self, error: ApiError) -> Step {
        Step::End(End { tail: self.tail(), verdict: Err(error), stats: None })
    }

    /// What was held back, nothing after a stop string.
    fn tail(&mut self) -> Piece {
        if self.stopped { Piece::default() } else { self.parser.finish() }
    }
}
