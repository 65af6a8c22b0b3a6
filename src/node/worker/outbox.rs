//! Results that wait for the next hop, pure: in their order, for a while where it is being mended.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::ids::Node;
use crate::node::membership::{MEND_DEADLINE, Route};
use crate::node::worker::Send;
use crate::transport::{Lane, LinkError};

/// Pause between looks at whether a hop is mended.
const MEND_LOOK: Duration = Duration::from_millis(5);

/// The next hop does not take what it was sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Lost {
    pub(super) to: Node,
    pub(super) why: String,
}

/// What one pass computed and the next hop has not got.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    bodies: VecDeque<Bytes>,
    /// Where they go, and until when it is hoped for.
    hop: Option<(Node, Lane, Instant)>,
    look_at: Option<Instant>,
}

impl Outbox {
    /// Puts in the results of a pass, to go where the route says.
    pub(super) fn put(&mut self, route: &Route, bodies: impl IntoIterator<Item = Bytes>, now: Instant) {
        let (to, lane) = match route.successor {
            Some(successor) => (successor, Lane::Data),
            None => (route.coordinator, Lane::Reply),
        };
        self.hop = Some((to, lane, now + MEND_DEADLINE));
        self.bodies.extend(bodies);
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.bodies.is_empty()
    }

    /// Forgets what waits.
    pub(super) fn clear(&mut self) {
        self.bodies.clear();
        self.look_at = None;
    }

    /// What to send next.
    pub(super) fn poll_send(&mut self, now: Instant) -> Option<Send> {
        let (to, lane, _) = self.hop?;
        let body = self.bodies.front().filter(|_| self.look_at.is_none_or(|at| at <= now))?;
        Some(Send { to, lane, body: body.clone() })
    }

    /// When to ask again.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.look_at
    }

    /// The first of them was queued, or could not be.
    ///
    /// # Errors
    /// [`Lost`]: the hop is given up, and nothing waits for it.
    pub(super) fn handle_sent(&mut self, sent: Result<(), LinkError>, now: Instant) -> Result<(), Lost> {
        self.look_at = None;
        match (sent, self.hop) {
            (Ok(()), _) => {
                self.bodies.pop_front();
                Ok(())
            }
            (Err(LinkError::NotConnected { .. }), Some((_, _, until))) if now < until => {
                self.look_at = Some(now + MEND_LOOK);
                Ok(())
            }
            (Err(error), Some((to, _, _))) => {
                self.clear();
                Err(Lost { to, why: error.to_string() })
            }
            (Err(_), None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::View;

    fn route(successor: Option<Node>) -> Route {
        let coordinator = Node::random();
        Route { view: View(3), coordinator, predecessor: coordinator, successor, shadows: false }
    }

    #[test]
    fn results_wait_for_a_hop_that_is_mended_and_keep_their_order() {
        let t0 = crate::clock::now();
        let to = Node::random();
        let mut outbox = Outbox::default();
        outbox.put(&route(Some(to)), [Bytes::from_static(b"a"), Bytes::from_static(b"b")], t0);
        let first = Send { to, lane: Lane::Data, body: Bytes::from_static(b"a") };
        assert_eq!(outbox.poll_send(t0).as_ref(), Some(&first));
        assert_eq!(outbox.handle_sent(Err(LinkError::NotConnected { peer: to }), t0), Ok(()));
        assert_eq!((outbox.poll_send(t0), outbox.poll_timeout()), (None, Some(t0 + MEND_LOOK)));
        assert_eq!(outbox.poll_send(t0 + MEND_LOOK), Some(first));
        assert_eq!(outbox.handle_sent(Ok(()), t0 + MEND_LOOK), Ok(()));
        assert_eq!(outbox.poll_send(t0 + MEND_LOOK).unwrap().body, Bytes::from_static(b"b"));
        let late = outbox.handle_sent(Err(LinkError::NotConnected { peer: to }), t0 + MEND_DEADLINE);
        assert_eq!(late, Err(Lost { to, why: LinkError::NotConnected { peer: to }.to_string() }));
        assert!(outbox.is_empty());
    }

    #[test]
    fn replies_go_to_the_coordinator() {
        let t0 = crate::clock::now();
        let route = route(None);
        let mut outbox = Outbox::default();
        outbox.put(&route, [Bytes::from_static(b"r")], t0);
        let send = outbox.poll_send(t0).unwrap();
        assert_eq!((send.to, send.lane), (route.coordinator, Lane::Reply));
        let stalled = LinkError::Stalled { peer: route.coordinator, waited_ms: 5_000 };
        assert!(outbox.handle_sent(Err(stalled), t0).is_err(), "only a missing connection is waited for");
    }
}
