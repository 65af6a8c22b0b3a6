//! What a peer's queue does not take now, in its order, pure: a full queue is no fault of the peer's.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::ids::Node;
use crate::transport::Lane;

/// Pause between looks at whether a queue takes more.
const LOOK: Duration = Duration::from_millis(2);

/// How long a queue may take nothing before its peer counts as stuck.
pub(super) const STALL_DEADLINE: Duration = Duration::from_secs(5);

/// What waits for one lane of one peer.
#[derive(Debug)]
struct Waiting {
    bodies: VecDeque<Bytes>,
    /// When the queue took something last.
    since: Instant,
    look_at: Instant,
}

/// What waits for peers.
///
/// It is bounded by what is under way: at most W frames a session, and as many control messages as were
/// sent in [`STALL_DEADLINE`].
#[derive(Debug, Default)]
pub(super) struct Outbox {
    lanes: BTreeMap<(Node, Lane), Waiting>,
}

impl Outbox {
    /// Whether something waits already, behind which all that follows has to wait too.
    pub(super) fn holds(&self, to: Node, lane: Lane) -> bool {
        !self.lanes.is_empty() && self.lanes.contains_key(&(to, lane))
    }

    /// Puts something behind what waits.
    pub(super) fn put(&mut self, to: Node, lane: Lane, body: Bytes, now: Instant) {
        let fresh = || Waiting { bodies: VecDeque::new(), since: now, look_at: now + LOOK };
        self.lanes.entry((to, lane)).or_insert_with(fresh).bodies.push_back(body);
    }

    /// A peer is gone, and what waits for it is in vain.
    pub(super) fn handle_gone(&mut self, peer: Node) {
        self.lanes.retain(|(to, _), _| *to != peer);
    }

    /// The next thing to try to send.
    pub(super) fn poll_send(&self, now: Instant) -> Option<(Node, Lane, Bytes)> {
        let (&(to, lane), waiting) = self.lanes.iter().find(|(_, waiting)| waiting.look_at <= now)?;
        Some((to, lane, waiting.bodies.front()?.clone()))
    }

    /// What [`Outbox::poll_send`] gave was queued.
    pub(super) fn handle_sent(&mut self, to: Node, lane: Lane, now: Instant) {
        let Some(waiting) = self.lanes.get_mut(&(to, lane)) else { return };
        waiting.bodies.pop_front();
        waiting.since = now;
        if waiting.bodies.is_empty() {
            self.lanes.remove(&(to, lane));
        }
    }

    /// It was not: the queue is full. Says for how long, once that is too long; nothing waits for it then.
    pub(super) fn handle_full(&mut self, to: Node, lane: Lane, now: Instant) -> Option<Duration> {
        let waiting = self.lanes.get_mut(&(to, lane))?;
        waiting.look_at = now + LOOK;
        let waited = now.saturating_duration_since(waiting.since);
        if waited < STALL_DEADLINE {
            return None;
        }
        self.lanes.remove(&(to, lane));
        Some(waited)
    }

    /// When to look again.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.lanes.values().map(|waiting| waiting.look_at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn body(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    #[test]
    fn what_waits_keeps_its_order_and_holds_up_no_other_lane() {
        let (peer, now) = (Node::random(), clock::now());
        let mut outbox = Outbox::default();
        assert!(!outbox.holds(peer, Lane::Data));
        outbox.put(peer, Lane::Data, body("first"), now);
        outbox.put(peer, Lane::Data, body("second"), now);
        assert!(outbox.holds(peer, Lane::Data) && !outbox.holds(peer, Lane::Control));
        assert_eq!(outbox.poll_send(now), None, "the queue is looked at again in a while");
        let later = outbox.poll_timeout().unwrap();
        assert_eq!(outbox.poll_send(later), Some((peer, Lane::Data, body("first"))));
        outbox.handle_sent(peer, Lane::Data, later);
        assert_eq!(outbox.poll_send(later), Some((peer, Lane::Data, body("second"))));
        assert_eq!(outbox.handle_full(peer, Lane::Data, later), None);
        assert_eq!(outbox.poll_send(later), None);
        outbox.handle_gone(peer);
        assert_eq!(outbox.poll_timeout(), None);
    }

    #[test]
    fn a_queue_that_takes_nothing_is_given_up_and_one_that_is_slow_is_not() {
        let (peer, mut now) = (Node::random(), clock::now());
        let mut outbox = Outbox::default();
        for _ in 0..20 {
            outbox.put(peer, Lane::Data, body("slow"), now);
        }
        for _ in 0..19 {
            now += STALL_DEADLINE - LOOK;
            assert_eq!(outbox.handle_full(peer, Lane::Data, now), None);
            outbox.handle_sent(peer, Lane::Data, now);
        }
        now += STALL_DEADLINE;
        assert_eq!(outbox.handle_full(peer, Lane::Data, now), Some(STALL_DEADLINE));
        assert!(!outbox.holds(peer, Lane::Data));
    }
}
