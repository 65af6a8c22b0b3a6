//! What the tail drafts: off which position of a pass, and how many tokens of the block are of use.
//!
//! Owns decisions only; the block itself is computed by [`crate::engine::Engine::draft`], which
//! keeps the drafter's windows with the rest of a session's state.

use crate::ids::{Position, TokenId};

/// Where a block starts: the model's token `token` stands at `pos + 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anchor {
    /// Which frame of the pass is answered with the block.
    pub frame: usize,
    /// That frame's last position.
    pub pos: Position,
    /// The model's answer there.
    pub token: TokenId,
}

/// Chooses the anchor of a pass: the last position with a true history and an answer.
///
/// A pass may hold several frames that queued up. The blocks of the true positions before the last
/// one could only repeat what is in flight, since the frames behind them fed just that.
#[derive(Debug, Clone, Copy, Default)]
pub struct Chooser {
    anchor: Option<Anchor>,
}

impl Chooser {
    /// Takes in a frame of the pass: its last position, whether that is true, and its answer.
    pub fn take(&mut self, frame: usize, pos: Position, truth: bool, answer: Option<TokenId>) {
        if let (true, Some(token)) = (truth, answer) {
            self.anchor = Some(Anchor { frame, pos, token });
        }
    }

    /// The anchor, if the pass has one.
    #[must_use]
    pub fn anchor(self) -> Option<Anchor> {
        self.anchor
    }
}

/// How many tokens of a block of `block` from `pos` can still be fed in a session of `positions`.
///
/// The first one stands at `pos + 2`.
#[must_use]
pub fn useful(block: u32, pos: Position, positions: u32) -> u32 {
    block.min(positions.saturating_sub(pos.0.saturating_add(2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_true_and_answered_position_is_drafted_from() {
        let mut chooser = Chooser::default();
        assert_eq!(chooser.anchor(), None);
        chooser.take(0, Position(4), true, Some(TokenId(7)));
        chooser.take(1, Position(5), true, Some(TokenId(8)));
        chooser.take(2, Position(6), false, Some(TokenId(9)));
        assert_eq!(chooser.anchor(), Some(Anchor { frame: 1, pos: Position(5), token: TokenId(8) }));
        let mut prompt = Chooser::default();
        prompt.take(0, Position(4), true, None);
        assert_eq!(prompt.anchor(), None, "a prompt chunk without an answer has no anchor");
    }

    #[test]
    fn nothing_past_the_end_is_of_use() {
        assert_eq!(useful(5, Position(0), 100), 5);
        assert_eq!(useful(5, Position(94), 100), 4);
        assert_eq!(useful(5, Position(97), 100), 1);
        assert_eq!(useful(5, Position(98), 100), 0);
        assert_eq!(useful(5, Position(u32::MAX), 100), 0);
    }
}
