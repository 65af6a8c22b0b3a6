//! The tail's view of the truth: which positions have a true history, so may draft.
//!
//! Owns the tail's own answers at the last positions of one session. A position is true iff it is
//! prompt, or was fed the tail's own answer at the position before, and that one is true.

use std::collections::VecDeque;

use super::accept::{Verdict, judge};
use crate::ids::{Position, TokenId};

/// Why the tail's bookkeeping stops: its fence let something through that it must not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrontierError {
    /// The frame skips positions, or re-opens further back than answers are kept.
    #[error("tail is fed position {got}, it knows its answers from {oldest} to {next}")]
    Gap {
        /// Oldest position kept.
        oldest: Position,
        /// One past the last position fed.
        next: Position,
        /// The position fed.
        got: Position,
    },
    /// More answers than positions.
    #[error("tail made {answers} answers for {ids} positions from {pos}")]
    Answers {
        /// First position.
        pos: Position,
        /// Positions fed.
        ids: usize,
        /// Answers made.
        answers: usize,
    },
}

/// What a fed frame's positions are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fed {
    /// Positions of the frame, from its first one on, whose history is true.
    pub trues: u32,
    /// Positions of the frame.
    pub len: u32,
}

impl Fed {
    /// Whether the frame's last position is true: the tail may draft from it.
    #[must_use]
    pub fn may_draft(self) -> bool {
        self.trues == self.len
    }
}

/// One position the tail was fed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known {
    answer: Option<TokenId>,
    truth: bool,
}

/// One session's truth at the tail.
#[derive(Debug, Clone)]
pub struct Frontier {
    prompt_len: u32,
    /// Positions kept: the reach, and the one in front of it.
    keep: usize,
    /// Position of `known[0]`.
    oldest: Position,
    known: VecDeque<Known>,
}

impl Frontier {
    /// A session before its first frame; `reach` bounds what is kept.
    #[must_use]
    pub fn new(prompt_len: u32, reach: u32) -> Self {
        Self { prompt_len, keep: reach as usize + 1, oldest: Position(0), known: VecDeque::new() }
    }

    /// The same, of a session that goes on at `from`, a position of the prompt.
    #[must_use]
    pub fn starting_at(mut self, from: Position) -> Self {
        self.oldest = from;
        self
    }

    /// Takes in that `ids` were fed from `pos` on and answered: `answers` are the tail's tokens at
    /// the last `answers.len()` of these positions. A `pos` below the last one re-opens there.
    ///
    /// A position past the prompt whose predecessor was not answered is not true.
    ///
    /// # Errors
    /// [`FrontierError`]; nothing has changed then.
    pub fn handle_fed(&mut self, pos: Position, ids: &[TokenId], answers: &[TokenId]) -> Result<Fed, FrontierError> {
        let next = self.next();
        let Some(unanswered) = ids.len().checked_sub(answers.len()) else {
            return Err(FrontierError::Answers { pos, ids: ids.len(), answers: answers.len() });
        };
        // Past the prompt, the answer in front of the re-opened position is needed, too.
        let reopens_too_far = pos < self.oldest || (pos == self.oldest && pos.0 >= self.prompt_len);
        if pos > next || reopens_too_far {
            return Err(FrontierError::Gap { oldest: self.oldest, next, got: pos });
        }
        self.known.truncate((pos.0 - self.oldest.0) as usize);
        let mut trues = 0;
        for (i, &id) in ids.iter().enumerate() {
            let truth = self.is_true(pos.plus(i as u32), id);
            trues += u32::from(truth);
            let answer = i.checked_sub(unanswered).map(|k| answers[k]);
            self.known.push_back(Known { answer, truth });
        }
        while self.known.len() > self.keep {
            self.known.pop_front();
            self.oldest = self.oldest.plus(1);
        }
        Ok(Fed { trues, len: ids.len() as u32 })
    }

    /// One past the last position fed.
    #[must_use]
    pub fn next(&self) -> Position {
        self.oldest.plus(self.known.len() as u32)
    }

    /// Positions kept, at most the reach and one.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.known.len()
    }

    /// Whether `fed` at `pos`, the next position, has a true history.
    fn is_true(&self, pos: Position, fed: TokenId) -> bool {
        if pos.0 < self.prompt_len {
            return true;
        }
        let Some(before) = self.known.back() else { return false };
        let Some(answer) = before.answer else { return false };
        before.truth && judge(answer, Some(fed)) == Verdict::Confirmed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(values: &[u32]) -> Vec<TokenId> {
        values.iter().copied().map(TokenId).collect()
    }

    fn feed(tail: &mut Frontier, pos: u32, fed: &[u32], answers: &[u32]) -> bool {
        tail.handle_fed(Position(pos), &ids(fed), &ids(answers)).unwrap().may_draft()
    }

    #[test]
    fn the_prompt_is_true_whatever_was_answered() {
        let mut tail = Frontier::new(4, 8);
        assert_eq!(tail.handle_fed(Position(0), &ids(&[1, 2]), &[]), Ok(Fed { trues: 2, len: 2 }));
        assert!(feed(&mut tail, 2, &[3, 4], &[50]));
        assert!(feed(&mut tail, 4, &[50], &[51]));
    }

    #[test]
    fn a_wrong_token_makes_everything_behind_it_untrue() {
        let mut tail = Frontier::new(1, 8);
        assert!(feed(&mut tail, 0, &[1], &[10]));
        assert!(!feed(&mut tail, 1, &[99], &[11]));
        assert!(!feed(&mut tail, 2, &[11], &[12]), "true to its own answer on a false history");
    }

    #[test]
    fn re_opening_keeps_the_answers_below() {
        let mut tail = Frontier::new(1, 8);
        assert!(feed(&mut tail, 0, &[1], &[10]));
        assert!(feed(&mut tail, 1, &[10], &[11]));
        assert!(!feed(&mut tail, 2, &[99], &[55]));
        assert!(!feed(&mut tail, 3, &[55], &[56]));
        assert!(feed(&mut tail, 2, &[11], &[12]), "the answer at 1 stands");
        assert!(!feed(&mut tail, 3, &[55], &[57]), "the answer at 2 is the new one");
        assert!(feed(&mut tail, 3, &[12], &[13]));
    }

    #[test]
    fn a_chunk_over_the_prompts_end_counts_its_true_positions() {
        let mut tail = Frontier::new(2, 8);
        assert_eq!(
            tail.handle_fed(Position(0), &ids(&[1, 2, 30, 7]), &ids(&[20, 30, 40, 50])),
            Ok(Fed { trues: 3, len: 4 })
        );
    }

    #[test]
    fn memory_is_bounded_by_the_reach() {
        let mut tail = Frontier::new(1, 4);
        assert!(feed(&mut tail, 0, &[0], &[1]));
        for pos in 1..100 {
            assert!(feed(&mut tail, pos, &[pos], &[pos + 1]));
            assert!(tail.kept() <= 5);
        }
        assert!(feed(&mut tail, 96, &[96], &[97]), "re-opening the whole reach back");
        assert_eq!(
            tail.handle_fed(Position(95), &ids(&[95]), &ids(&[96])),
            Err(FrontierError::Gap { oldest: Position(95), next: Position(97), got: Position(95) })
        );
        assert_eq!(
            tail.handle_fed(Position(98), &ids(&[98]), &ids(&[99])),
            Err(FrontierError::Gap { oldest: Position(95), next: Position(97), got: Position(98) })
        );
    }

    #[test]
    fn an_unanswered_position_makes_the_next_one_untrue() {
        let mut tail = Frontier::new(2, 8);
        assert!(feed(&mut tail, 0, &[1, 2], &[]));
        assert!(!feed(&mut tail, 2, &[3], &[4]));
        assert_eq!(
            tail.handle_fed(Position(3), &ids(&[3]), &ids(&[4, 5])),
            Err(FrontierError::Answers { pos: Position(3), ids: 1, answers: 2 })
        );
    }
}
