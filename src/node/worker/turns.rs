//! Whose frames a pass computes, pure: sessions take turns, and so do prompts and texts.
//!
//! Frames of texts that are being written go together, as many sessions as have one, since a pass over
//! several costs little more than over one. A prompt chunk is long: it goes alone, and after each of them
//! what else waits goes first. So a frame of a text waits behind one chunk at most, whoever sends prompts,
//! and a prompt behind one pass of texts.

use crate::ids::SessionId;

/// What a session's next frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A chunk of a prompt.
    Prompt,
    /// A position or some behind a prompt.
    Text,
}

/// Whose turn it is.
#[derive(Debug)]
pub(super) struct Turns {
    /// The sessions that were served last, of each kind.
    prompt: SessionId,
    text: SessionId,
    /// What was served last.
    last: Kind,
}

impl Default for Turns {
    fn default() -> Self {
        Self { prompt: SessionId(0), text: SessionId(0), last: Kind::Text }
    }
}

impl Turns {
    /// Of those that have work, by ascending id: what is served next, and those sessions that may be in the
    /// same pass, the one whose turn it is first.
    pub(super) fn next(&self, ready: &[(SessionId, Kind)]) -> Option<(Kind, impl Iterator<Item = SessionId>)> {
        let waits = |kind| ready.iter().any(|(_, its)| *its == kind);
        let kind = match (waits(Kind::Prompt), waits(Kind::Text)) {
            (false, false) => return None,
            (true, false) => Kind::Prompt,
            (false, true) => Kind::Text,
            (true, true) if self.last == Kind::Prompt => Kind::Text,
            (true, true) => Kind::Prompt,
        };
        let after = match kind {
            Kind::Prompt => self.prompt,
            Kind::Text => self.text,
        };
        let (before, behind) = ready.split_at(ready.partition_point(|(session, _)| *session <= after));
        let order = behind.iter().chain(before).filter(move |(_, its)| *its == kind).map(|(session, _)| *session);
        let together = if kind == Kind::Prompt { 1 } else { usize::MAX };
        Some((kind, order.take(together)))
    }

    /// A pass of this kind was begun, this session the last in it.
    pub(super) fn handle_served(&mut self, kind: Kind, session: SessionId) {
        self.last = kind;
        match kind {
            Kind::Prompt => self.prompt = session,
            Kind::Text => self.text = session,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Kind::{Prompt, Text};
    use super::*;

    fn next(turns: &Turns, ready: &[(u64, Kind)]) -> Option<(Kind, Vec<u64>)> {
        let ready: Vec<_> = ready.iter().map(|(session, kind)| (SessionId(*session), *kind)).collect();
        turns.next(&ready).map(|(kind, order)| (kind, order.map(|session| session.0).collect()))
    }

    #[test]
    fn texts_go_together_and_begin_behind_the_one_served_last() {
        let mut turns = Turns::default();
        assert_eq!(next(&turns, &[]), None);
        let ready = [(2, Text), (5, Text), (9, Text)];
        assert_eq!(next(&turns, &ready), Some((Text, vec![2, 5, 9])));
        turns.handle_served(Text, SessionId(5));
        assert_eq!(next(&turns, &ready), Some((Text, vec![9, 2, 5])));
        turns.handle_served(Text, SessionId(9));
        assert_eq!(next(&turns, &[(2, Text), (5, Text)]), Some((Text, vec![2, 5])));
    }

    #[test]
    fn a_prompt_goes_alone_and_neither_waits_for_two_of_the_other() {
        let mut turns = Turns::default();
        let ready = [(1, Prompt), (2, Text), (3, Prompt), (4, Text)];
        assert_eq!(next(&turns, &ready), Some((Prompt, vec![1])));
        turns.handle_served(Prompt, SessionId(1));
        assert_eq!(next(&turns, &ready), Some((Text, vec![2, 4])));
        turns.handle_served(Text, SessionId(4));
        assert_eq!(next(&turns, &ready), Some((Prompt, vec![3])), "each prompt has its turn");
        turns.handle_served(Prompt, SessionId(3));
        assert_eq!(next(&turns, &[(1, Prompt), (3, Prompt)]), Some((Prompt, vec![1])), "no text waits");
    }
}
