//! Greets peers: nothing is heard from a peer before its hello fits ours.
//!
//! Owns who has greeted. The shells of stage and coordinator send what it says and hear only what
//! it lets through.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::ids::Node;
use crate::proto::control::{Control, Hello};
use crate::proto::hello;

/// How long a connected peer may stay silent before it is cut off.
pub const GREETING_DEADLINE: Duration = Duration::from_secs(5);

/// Bodies of a peer that wait for its hello, at most: more than a frame for each draft of a window.
pub const EARLY_MAX: usize = 64;

/// Their bytes together, at most: some frames of a prompt.
pub const EARLY_BYTES_MAX: usize = 8 << 20;

/// What a control message turns out to be.
#[derive(Debug, Clone, PartialEq)]
pub enum Greeting {
    /// The peer's hello fits: it is heard from here on, what was kept of it first.
    Up(Hello, Vec<Bytes>),
    /// A message of a peer that has greeted.
    Pass(Control),
    /// The peer is refused: send it these words and disconnect.
    Refuse {
        /// What was expected, what came, who must change what.
        reason: String,
    },
    /// The peer refused us, in its words.
    RefusedBy {
        /// Its words.
        reason: String,
    },
    /// The message comes from a peer that is not connected, or was refused.
    Ignore,
}

#[derive(Debug)]
enum State {
    Waiting { until: Instant, early: Vec<Bytes> },
    Greeted,
    Refused,
}

/// What became of a body that came before its sender's hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Early {
    /// It waits: [`Greeter::handle_control`] gives it back with the hello.
    Kept,
    /// The peer is not connected, or was refused.
    Dropped,
    /// More wait than may.
    TooMuch,
}

/// Which connected peers have said a hello that fits.
#[derive(Debug)]
pub struct Greeter {
    ours: Hello,
    peers: BTreeMap<Node, State>,
}

impl Greeter {
    /// A greeter that compares with this hello.
    #[must_use]
    pub fn new(ours: Hello) -> Self {
        Self { ours, peers: BTreeMap::new() }
    }

    /// A connection stands; the returned hello is to be sent on its control lane first.
    pub fn handle_connected(&mut self, peer: Node, now: Instant) -> Control {
        self.peers.insert(peer, State::Waiting { until: now + GREETING_DEADLINE, early: Vec::new() });
        Control::Hello(self.ours.clone())
    }

    /// A connection is gone; says whether the peer had greeted.
    pub fn handle_disconnected(&mut self, peer: Node) -> bool {
        matches!(self.peers.remove(&peer), Some(State::Greeted))
    }

    /// Whether frames and replies of this peer are to be heard.
    #[must_use]
    pub fn is_greeted(&self, peer: Node) -> bool {
        matches!(self.peers.get(&peer), Some(State::Greeted))
    }

    /// A control message came in.
    pub fn handle_control(&mut self, peer: Node, message: Control) -> Greeting {
        let Some(state) = self.peers.get_mut(&peer) else { return Greeting::Ignore };
        match (state, message) {
            (State::Refused, _) => Greeting::Ignore,
            (_, Control::Refused { reason }) => Greeting::RefusedBy { reason },
            (state @ State::Waiting { .. }, Control::Hello(theirs)) => match hello::check(&self.ours, &theirs) {
                Ok(()) => match std::mem::replace(state, State::Greeted) {
                    State::Waiting { early, .. } => Greeting::Up(theirs, early),
                    State::Greeted | State::Refused => Greeting::Up(theirs, Vec::new()),
                },
                Err(refusal) => {
                    *state = State::Refused;
                    Greeting::Refuse { reason: refusal.to_string() }
                }
            },
            // Meant for the connection before this one, by an owner that has not heard of its end yet.
            (State::Waiting { .. }, _) => Greeting::Ignore,
            (State::Greeted, Control::Hello(_)) => {
                Greeting::Refuse { reason: "expected one hello a connection, a second one came".to_owned() }
            }
            (State::Greeted, message) => Greeting::Pass(message),
        }
    }

    /// Keeps what a peer sent on another lane, if its hello has not come: lanes overtake one another, so a
    /// frame can be here before the hello that was sent first.
    pub fn keep(&mut self, peer: Node, body: Bytes) -> Early {
        let Some(State::Waiting { early, .. }) = self.peers.get_mut(&peer) else { return Early::Dropped };
        let bytes = early.iter().map(Bytes::len).sum::<usize>().saturating_add(body.len());
        if early.len() >= EARLY_MAX || bytes > EARLY_BYTES_MAX {
            return Early::TooMuch;
        }
        early.push(body);
        Early::Kept
    }

    /// Marks a peer as refused for another reason (bytes that can't be read).
    pub fn refuse(&mut self, peer: Node) {
        if let Some(state) = self.peers.get_mut(&peer) {
            *state = State::Refused;
        }
    }

    /// The next moment at which a silent peer is overdue.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.peers
            .values()
            .filter_map(|state| match state {
                State::Waiting { until, .. } => Some(*until),
                State::Greeted | State::Refused => None,
            })
            .min()
    }

    /// Peers whose greeting is overdue; each is named once and refused.
    pub fn handle_timeout(&mut self, now: Instant) -> Vec<Node> {
        let mut overdue = Vec::new();
        for (peer, state) in &mut self.peers {
            if matches!(state, State::Waiting { until, .. } if *until <= now) {
                *state = State::Refused;
                overdue.push(*peer);
            }
        }
        overdue
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Node;
    use crate::proto::control::{PROTOCOL_VERSION, Role};

    fn hello(numerics: &str) -> Hello {
        Hello {
            protocol: PROTOCOL_VERSION,
            numerics: numerics.to_owned(),
            model_digest: [7; 32],
            role: Role::Stage,
            software: "test".to_owned(),
        }
    }

    #[test]
    fn nothing_is_heard_before_a_hello_that_fits() {
        let now = crate::clock::now();
        let mut greeter = Greeter::new(hello("a"));
        let peer = Node::random();
        let heartbeat = Control::Heartbeat { seq: 1 };
        assert_eq!(greeter.handle_control(peer, heartbeat.clone()), Greeting::Ignore);
        assert_eq!(greeter.handle_connected(peer, now), Control::Hello(hello("a")));
        assert!(!greeter.is_greeted(peer));
        assert_eq!(greeter.handle_control(peer, heartbeat.clone()), Greeting::Ignore);
        assert_eq!(greeter.handle_control(peer, Control::Hello(hello("a"))), Greeting::Up(hello("a"), vec![]));
        assert!(greeter.is_greeted(peer));
        assert_eq!(greeter.handle_control(peer, heartbeat.clone()), Greeting::Pass(heartbeat));
        assert!(matches!(greeter.handle_control(peer, Control::Hello(hello("a"))), Greeting::Refuse { .. }));
        assert!(greeter.handle_disconnected(peer));
        assert!(!greeter.is_greeted(peer));
    }

    #[test]
    fn what_overtook_the_hello_comes_with_it_and_has_a_bound() {
        let now = crate::clock::now();
        let mut greeter = Greeter::new(hello("a"));
        let (peer, frame) = (Node::random(), Bytes::from_static(b"frame"));
        assert_eq!(greeter.keep(peer, frame.clone()), Early::Dropped);
        greeter.handle_connected(peer, now);
        assert_eq!(greeter.keep(peer, frame.clone()), Early::Kept);
        assert_eq!(greeter.keep(peer, Bytes::from(vec![0; EARLY_BYTES_MAX])), Early::TooMuch);
        let early = vec![frame.clone()];
        assert_eq!(greeter.handle_control(peer, Control::Hello(hello("a"))), Greeting::Up(hello("a"), early));
        assert_eq!(greeter.keep(peer, frame.clone()), Early::Dropped, "it has greeted");
        greeter.handle_connected(peer, now);
        for _ in 0..EARLY_MAX {
            assert_eq!(greeter.keep(peer, frame.clone()), Early::Kept, "of the new connection");
        }
        assert_eq!(greeter.keep(peer, frame.clone()), Early::TooMuch);
        greeter.refuse(peer);
        assert_eq!(greeter.keep(peer, frame), Early::Dropped);
    }

    #[test]
    fn a_refused_peer_stays_unheard() {
        let now = crate::clock::now();
        let mut greeter = Greeter::new(hello("a"));
        let peer = Node::random();
        greeter.handle_connected(peer, now);
        assert!(matches!(greeter.handle_control(peer, Control::Hello(hello("b"))), Greeting::Refuse { .. }));
        assert_eq!(greeter.handle_control(peer, Control::Hello(hello("a"))), Greeting::Ignore);
        assert!(!greeter.is_greeted(peer));
    }

    #[test]
    fn a_silent_peer_is_overdue_once() {
        let now = crate::clock::now();
        let mut greeter = Greeter::new(hello("a"));
        let peer = Node::random();
        greeter.handle_connected(peer, now);
        assert_eq!(greeter.poll_timeout(), Some(now + GREETING_DEADLINE));
        assert_eq!(greeter.handle_timeout(now), vec![]);
        assert_eq!(greeter.handle_timeout(now + GREETING_DEADLINE), vec![peer]);
        assert_eq!(greeter.handle_timeout(now + GREETING_DEADLINE), vec![]);
        assert_eq!(greeter.poll_timeout(), None);
    }
}
