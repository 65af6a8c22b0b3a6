//! Sessions that ended in the present view.

use std::collections::VecDeque;

use crate::ids::SessionId;

/// The last sessions that ended are known, at most so many: what was on its way to them comes soon or never.
const ENDED_MAX: usize = 1024;

/// Sessions that ended, so that late frames of them are not taken for early ones.
///
/// Sessions are opened and closed in any order of their ids, so no id stands for those below it.
#[derive(Debug, Default)]
pub(super) struct Ended {
    ids: VecDeque<SessionId>,
}

impl Ended {
    /// A session ended, or will not begin.
    pub(super) fn put(&mut self, id: SessionId) {
        if self.has(id) {
            return;
        }
        if self.ids.len() == ENDED_MAX {
            self.ids.pop_front();
        }
        self.ids.push_back(id);
    }

    /// Whether it did. The latest are looked at first.
    pub(super) fn has(&self, id: SessionId) -> bool {
        self.ids.iter().rev().any(|ended| *ended == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_says_nothing_of_lower_ids_and_the_oldest_is_forgotten() {
        let mut ended = Ended::default();
        ended.put(SessionId(7));
        assert!(ended.has(SessionId(7)) && !ended.has(SessionId(5)));
        for id in 0..ENDED_MAX as u64 {
            ended.put(SessionId(100 + id));
            ended.put(SessionId(100 + id));
        }
        assert!(!ended.has(SessionId(7)) && ended.has(SessionId(100)));
        assert_eq!(ended.ids.len(), ENDED_MAX);
    }
}
