//! The one accept rule, used by coordinator and tail.
//!
//! Owns two comparisons and no state: an answer with what was streamed at the next position, and a
//! fresh block with what is in flight behind it.

use crate::ids::TokenId;

/// What an answer at position `p` says about what was streamed at `p + 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The streamed token is the model's: what was computed from it stays.
    Confirmed,
    /// The streamed token is not the model's: everything from `p + 1` on is dead.
    Rejected,
    /// Nothing was streamed there yet.
    Open,
}

/// Compares the model's `answer` at a position with the token streamed at the next one.
#[must_use]
pub fn judge(answer: TokenId, streamed: Option<TokenId>) -> Verdict {
    match streamed {
        Some(token) if token == answer => Verdict::Confirmed,
        Some(_) => Verdict::Rejected,
        None => Verdict::Open,
    }
}

/// What a fresh `block` adds behind the drafts `in_flight` at the same positions: its rest if its
/// leading drafts equal all of them, else nothing.
///
/// `block[0]` and `in_flight[0]` propose the token at the same position. The result is empty where
/// the block disagrees or reaches no further than what is in flight.
#[must_use]
pub fn extension<'a>(block: &'a [TokenId], in_flight: &[TokenId]) -> &'a [TokenId] {
    block.strip_prefix(in_flight).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(values: &[u32]) -> Vec<TokenId> {
        values.iter().copied().map(TokenId).collect()
    }

    #[test]
    fn an_answer_confirms_only_the_same_token() {
        assert_eq!(judge(TokenId(7), Some(TokenId(7))), Verdict::Confirmed);
        assert_eq!(judge(TokenId(7), Some(TokenId(8))), Verdict::Rejected);
        assert_eq!(judge(TokenId(7), None), Verdict::Open);
    }

    #[test]
    fn a_block_extends_only_what_it_repeats() {
        let block = ids(&[1, 2, 3]);
        assert_eq!(extension(&block, &[]), &block[..]);
        assert_eq!(extension(&block, &ids(&[1, 2])), &ids(&[3])[..]);
        assert_eq!(extension(&block, &ids(&[1, 9])), &[]);
        assert_eq!(extension(&block, &ids(&[1, 2, 3])), &[]);
        assert_eq!(extension(&block, &ids(&[1, 2, 3, 4])), &[]);
    }
}
