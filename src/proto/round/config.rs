//! What a session is set to, and which settings contradict one another.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::ids::{Position, SessionId, TokenId, View};
use crate::proto::codec::FRAME_IDS_MAX;

/// How long the oldest frame in flight may stay unanswered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// Single positions, past the prompt. Longer finds a frozen stage later.
    pub reply: Duration,
    /// Prompt chunks, which take every stage longer.
    pub prefill: Duration,
}

/// What is fixed about a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundConfig {
    /// Membership it runs in.
    pub view: View,
    /// The session.
    pub session: SessionId,
    /// Prompt tokens, at least one.
    pub prompt: Vec<TokenId>,
    /// New tokens at most; 0 only with `score`.
    pub max_new: u32,
    /// Tokens that end the sequence.
    pub eos: BTreeSet<TokenId>,
    /// Goes on past tokens of `eos`.
    pub ignore_eos: bool,
    /// W: frames in flight at most, prompt chunks included. More fills more stages at once and
    /// costs discarded work when a draft is wrong; more than draft block + 1 is of no use.
    pub in_flight_max: u32,
    /// Drafts taken from a block at most; 0 streams the truth only.
    pub draft_max: u32,
    /// Positions in a prompt chunk at most. Longer chunks cost latency where stages overlap.
    pub prefill_chunk: u32,
    /// R: the largest `pos + len − settled` in flight, as declared to the stages.
    pub reach: u32,
    /// Asks for answers at every prompt position.
    pub score: bool,
    /// When a frame is overdue.
    pub deadlines: Deadlines,
}

/// Which settings contradict one another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoundConfigError {
    /// No prompt.
    #[error("the prompt is empty, expected at least one token")]
    EmptyPrompt,
    /// Nothing to do.
    #[error("no new tokens are asked for and no scores: ask for at least one token, or for scores")]
    Nothing,
    /// More positions than there are numbers.
    #[error("prompt of {prompt} tokens + {max_new} new ones has more positions than a session can number")]
    TooLong {
        /// Prompt tokens.
        prompt: usize,
        /// New tokens.
        max_new: u32,
    },
    /// A setting is out of its range.
    #[error("{setting} is {got}, expected {expected}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        got: u32,
        /// What is allowed.
        expected: String,
    },
}

impl RoundConfig {
    /// One past the last position that the session feeds: a last token is never fed.
    #[must_use]
    pub fn end(&self) -> Position {
        Position(self.prompt_len().saturating_add(self.max_new.saturating_sub(1)))
    }

    /// Prompt tokens.
    #[must_use]
    pub fn prompt_len(&self) -> u32 {
        self.prompt.len() as u32
    }

    /// Whether `token` ends the sequence.
    #[must_use]
    pub fn is_end(&self, token: TokenId) -> bool {
        !self.ignore_eos && self.eos.contains(&token)
    }

    pub(super) fn check(&self) -> Result<(), RoundConfigError> {
        if self.prompt.is_empty() {
            return Err(RoundConfigError::EmptyPrompt);
        }
        if self.max_new == 0 && !self.score {
            return Err(RoundConfigError::Nothing);
        }
        let positions = self.prompt.len() as u64 + u64::from(self.max_new);
        if positions > u64::from(u32::MAX) {
            return Err(RoundConfigError::TooLong { prompt: self.prompt.len(), max_new: self.max_new });
        }
        let chunk = self.prefill_chunk.min(self.prompt_len());
        between("in_flight_max", self.in_flight_max, 1, u32::MAX)?;
        between("prefill_chunk", self.prefill_chunk, 1, FRAME_IDS_MAX)?;
        between("reach", self.reach, chunk, u32::MAX)
    }
}

fn between(setting: &'static str, got: u32, low: u32, high: u32) -> Result<(), RoundConfigError> {
    if (low..=high).contains(&got) {
        return Ok(());
    }
    Err(RoundConfigError::Setting { setting, got, expected: format!("{low} to {high}") })
}
