//! Scores of a token sequence: what the model would have put at each position.

use serde::{Deserialize, Serialize};

use crate::ids::TokenId;
use crate::proto::frame::Answer;

/// Most top tokens per position that a request may ask for.
pub const SCORE_TOP_MAX: u32 = 20;

/// Scores of a sequence of `n` tokens; logarithms are natural.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ScoreReport {
    /// `[n]`: the model's most likely next token after each position.
    pub argmax: Vec<TokenId>,
    /// `[n − 1]`: log-probability of the actual next token after each position but the last.
    pub logprobs: Vec<f32>,
    /// `[n][top]`: the most likely next tokens with their log-probabilities, descending.
    pub top: Vec<Vec<(TokenId, f32)>>,
    /// Mean of `−logprobs`; `None` where there are none.
    pub mean_nll: Option<f64>,
}

/// Scores came that don't make up a report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScoreError {
    /// A position came out of order.
    #[error("scores of position {got} came, position {expected} was expected")]
    Order {
        /// Next position.
        expected: usize,
        /// The position that came.
        got: u32,
    },
    /// An answer lacks what was asked for.
    #[error("the answer at position {pos} has no {what}")]
    Lacks {
        /// The position.
        pos: u32,
        /// What is missing.
        what: &'static str,
    },
}

impl ScoreReport {
    /// Takes the answer at the next position; keeps the `top` most likely tokens of it.
    ///
    /// # Errors
    /// [`ScoreError`] where the position is not the next one or the answer has no scores.
    pub fn push(&mut self, pos: u32, answer: &Answer, top: u32) -> Result<(), ScoreError> {
        let expected = self.argmax.len();
        if u32::try_from(expected) != Ok(pos) {
            return Err(ScoreError::Order { expected, got: pos });
        }
        let scores = answer.scores.as_ref().ok_or(ScoreError::Lacks { pos, what: "scores" })?;
        let &(best, _) = scores.top.first().ok_or(ScoreError::Lacks { pos, what: "top token" })?;
        if pos > 0 {
            self.logprobs.push(scores.fed.ok_or(ScoreError::Lacks { pos, what: "log-probability of its token" })?);
        }
        self.argmax.push(best);
        self.top.push(scores.top.iter().take(usize::try_from(top).unwrap_or(usize::MAX)).copied().collect());
        let nll: f64 = self.logprobs.iter().map(|&x| -f64::from(x)).sum();
        self.mean_nll = u32::try_from(self.logprobs.len()).ok().filter(|&n| n > 0).map(|n| nll / f64::from(n));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::frame::Scores;

    fn answer(fed: Option<f32>, top: &[(u32, f32)]) -> Answer {
        let top = top.iter().map(|&(id, p)| (TokenId(id), p)).collect();
        // The sampled token is another one than the most likely.
        Answer { token: TokenId(99), scores: Some(Scores { fed, picked: None, top }) }
    }

    #[test]
    fn a_report_has_one_log_probability_less_than_positions() {
        let mut report = ScoreReport::default();
        report.push(0, &answer(None, &[(5, -0.5), (2, -1.5)]), 1).unwrap();
        assert_eq!((report.logprobs.len(), report.mean_nll), (0, None));
        report.push(1, &answer(Some(-2.0), &[(6, -0.25)]), 1).unwrap();
        report.push(2, &answer(Some(-1.0), &[(7, -0.25)]), 1).unwrap();
        assert_eq!(report.argmax, [TokenId(5), TokenId(6), TokenId(7)]);
        assert_eq!(report.logprobs, [-2.0, -1.0]);
        assert_eq!(report.top[0], [(TokenId(5), -0.5)]);
        assert_eq!(report.mean_nll, Some(1.5));
    }

    #[test]
    fn a_hole_or_a_missing_score_is_an_error() {
        let mut report = ScoreReport::default();
        assert_eq!(report.push(1, &answer(None, &[(5, 0.0)]), 1), Err(ScoreError::Order { expected: 0, got: 1 }));
        assert!(report.push(0, &answer(None, &[]), 1).is_err());
        assert!(report.push(0, &Answer { token: TokenId(1), scores: None }, 1).is_err());
        report.push(0, &answer(None, &[(5, 0.0)]), 1).unwrap();
        assert!(report.push(1, &answer(None, &[(5, 0.0)]), 1).is_err());
    }
}
