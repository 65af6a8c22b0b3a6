//! What became of the rings that broke: when it was seen, when the next ring was whole, what was
//! computed again. A bounded history for `/ring`.

use std::collections::VecDeque;
use std::time::Instant;

use serde::Serialize;

use crate::ids::{LayerRange, Node, View};

/// Breaks that are remembered; the oldest one is forgotten first.
pub const HEALS_MAX: usize = 16;

/// A break of the ring and its heal. Times are in milliseconds since the coordinator started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HealStatus {
    /// The stage that was to blame.
    pub peer: String,
    /// Its layers, like `0:3`.
    pub range: String,
    /// What was seen.
    pub reason: String,
    /// The view that broke.
    pub view: View,
    /// The next view that was whole; `None` before.
    pub healed_view: Option<View>,
    /// When the break was seen.
    pub detected_ms: u64,
    /// When the next ring was whole; `None` before.
    pub whole_ms: Option<u64>,
    /// When every session that goes on had its state again; `None` before.
    pub rebuilt_ms: Option<u64>,
    /// Positions that were computed again, over all sessions and stages.
    pub replayed_positions: u64,
    /// Bytes that were sent into the ring and between its stages for that: token ids and hidden states,
    /// without headers.
    pub replayed_bytes: u64,
}

/// The history.
#[derive(Debug)]
pub(crate) struct Heals {
    begun: Instant,
    list: VecDeque<HealStatus>,
}

impl Heals {
    /// Nothing broke yet; `now` is the zero of every time.
    pub(crate) fn new(now: Instant) -> Self {
        Self { begun: now, list: VecDeque::new() }
    }

    /// The ring of `view` broke.
    pub(crate) fn detected(&mut self, (peer, range): (Node, LayerRange), view: View, reason: &str, now: Instant) {
        self.push(HealStatus {
            peer: peer.to_string(),
            range: range.to_string(),
            reason: reason.to_owned(),
            view,
            healed_view: None,
            detected_ms: self.since(now),
            whole_ms: None,
            rebuilt_ms: None,
            replayed_positions: 0,
            replayed_bytes: 0,
        });
    }

    /// The ring of `view` is whole: what broke before is healed.
    pub(crate) fn whole(&mut self, view: View, now: Instant) {
        let at = self.since(now);
        for heal in self.list.iter_mut().filter(|heal| heal.whole_ms.is_none()) {
            (heal.whole_ms, heal.healed_view) = (Some(at), Some(view));
        }
    }

    /// A session is computed again on the ring that is whole.
    /// With nothing broken, it is a session of the coordinator before this one, `ours`.
    pub(crate) fn replayed(&mut self, (positions, bytes): (u64, u64), (ours, view): (Node, View), now: Instant) {
        if self.list.back().is_none_or(|heal| heal.rebuilt_ms.is_some()) {
            let at = self.since(now);
            self.push(HealStatus {
                peer: ours.to_string(),
                range: String::new(),
                reason: "the coordinator was started anew".to_owned(),
                view,
                healed_view: Some(view),
                detected_ms: at,
                whole_ms: Some(at),
                rebuilt_ms: None,
                replayed_positions: 0,
                replayed_bytes: 0,
            });
        }
        if let Some(heal) = self.list.back_mut() {
            heal.replayed_positions += positions;
            heal.replayed_bytes += bytes;
        }
    }

    fn push(&mut self, heal: HealStatus) {
        if self.list.len() == HEALS_MAX {
            self.list.pop_front();
        }
        self.list.push_back(heal);
    }

    /// Whether a ring that is whole again waits for sessions to have their state.
    pub(crate) fn rebuilding(&self) -> bool {
        self.list.iter().any(|heal| heal.whole_ms.is_some() && heal.rebuilt_ms.is_none())
    }

    /// Every session has its state again.
    pub(crate) fn rebuilt(&mut self, now: Instant) {
        let at = self.since(now);
        for heal in self.list.iter_mut().filter(|heal| heal.whole_ms.is_some() && heal.rebuilt_ms.is_none()) {
            heal.rebuilt_ms = Some(at);
        }
    }

    /// The history, oldest first.
    pub(crate) fn list(&self) -> Vec<HealStatus> {
        self.list.iter().cloned().collect()
    }

    fn since(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.begun).as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_death_during_a_heal_is_a_break_of_its_own_and_both_heal_at_once() {
        let t0 = crate::clock::now();
        let at = |ms| t0 + Duration::from_millis(ms);
        let mut heals = Heals::new(t0);
        let lost = || (Node::random(), "2:4".parse().unwrap());
        heals.detected(lost(), View(1), "reset", at(10));
        heals.detected(lost(), View(2), "reset", at(20));
        assert!(!heals.rebuilding());
        heals.whole(View(3), at(30));
        heals.replayed((7, 700), (Node::random(), View(3)), at(31));
        assert!(heals.rebuilding());
        heals.rebuilt(at(40));
        heals.detected(lost(), View(3), "reset", at(50));
        let list = heals.list();
        let times: Vec<_> = list.iter().map(|heal| (heal.detected_ms, heal.whole_ms, heal.rebuilt_ms)).collect();
        assert_eq!(times, [(10, Some(30), Some(40)), (20, Some(30), Some(40)), (50, None, None)]);
        assert_eq!((list[0].replayed_bytes, list[1].replayed_bytes, list[1].healed_view), (0, 700, Some(View(3))));
    }

    #[test]
    fn the_history_is_bounded() {
        let t0 = crate::clock::now();
        let mut heals = Heals::new(t0);
        for view in 0..100 {
            heals.detected((Node::random(), "0:1".parse().unwrap()), View(view), "reset", t0);
        }
        let list = heals.list();
        assert_eq!((list.len(), list[0].view), (HEALS_MAX, View(100 - HEALS_MAX as u64)));
    }
}
