//! Whom a stage obeys and which view it is in: pure.
//!
//! Owns the view (which never falls), the coordinator obeyed, and the two neighbours that the view
//! names. Frames are accepted in the current view from the named predecessor only.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use libp2p::PeerId;

use crate::ids::{Node, View};
use crate::proto::control::{Control, Join, Role};

/// How long a connected successor may take to answer a heartbeat before it is dialled anew: it may
/// have died without a word, or restarted.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2);

/// Whom a stage lets coordinate it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obey {
    /// These peers; none of them: nobody.
    Peers(BTreeSet<PeerId>),
    /// Whoever comes with a higher view.
    Anyone,
}

impl Obey {
    /// Whether this peer may coordinate.
    #[must_use]
    pub fn allows(&self, peer: PeerId) -> bool {
        match self {
            Self::Peers(peers) => peers.contains(&peer),
            Self::Anyone => true,
        }
    }
}

/// Where frames come from and go to in a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The view.
    pub view: View,
    /// Who coordinates.
    pub coordinator: Node,
    /// Who sends frames: a stage, or at the head the coordinator.
    pub predecessor: Node,
    /// Who gets frames; at the tail `None`, and the coordinator gets replies.
    pub successor: Option<Node>,
}

/// What the shell is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Send a control message.
    Send {
        /// To whom.
        to: Node,
        /// What.
        message: Control,
    },
    /// Send this stage's offer; the shell fills it in.
    Offer {
        /// To whom.
        to: Node,
    },
    /// Tell a peer why it is not obeyed, and disconnect it.
    Refuse {
        /// Whom.
        peer: Node,
        /// Why, and what to change.
        reason: String,
    },
    /// Connect to the successor.
    Dial {
        /// Whom.
        peer: Node,
        /// Where, best first.
        addresses: Vec<String>,
    },
    /// Close a connection that no longer answers.
    Disconnect {
        /// To whom.
        peer: Node,
        /// Why.
        reason: String,
    },
    /// Frees every session and takes this route (`None`: outside any ring).
    Route(Option<Route>),
}

#[derive(Debug)]
struct Joining {
    route: Route,
    addresses: Vec<String>,
    /// When the successor is taken for dead, where it is connected.
    until: Option<Instant>,
}

/// A stage's place.
#[derive(Debug)]
pub struct Membership {
    obey: Obey,
    view: View,
    greeted: BTreeSet<Node>,
    route: Option<Route>,
    joining: Option<Joining>,
    outputs: VecDeque<Output>,
}

impl Membership {
    /// A stage outside any ring.
    #[must_use]
    pub fn new(obey: Obey) -> Self {
        Self { obey, view: View(0), greeted: BTreeSet::new(), route: None, joining: None, outputs: VecDeque::new() }
    }

    /// The highest view obeyed.
    #[must_use]
    pub fn view(&self) -> View {
        self.view
    }

    /// The route in force.
    #[must_use]
    pub fn route(&self) -> Option<Route> {
        self.route
    }

    /// Whether this peer may coordinate this stage.
    #[must_use]
    pub fn allows(&self, peer: Node) -> bool {
        self.obey.allows(peer.peer)
    }

    /// Whether a control message of this peer, other than a join, is obeyed.
    #[must_use]
    pub fn obeys(&self, peer: Node) -> bool {
        self.coordinator() == Some(peer)
    }

    /// Whose view this stage is in, or is joining.
    #[must_use]
    pub fn coordinator(&self) -> Option<Node> {
        self.route.or(self.joining.as_ref().map(|joining| joining.route)).map(|route| route.coordinator)
    }

    /// Whether frames of `view` are accepted from `peer`.
    #[must_use]
    pub fn accepts(&self, peer: Node, view: View) -> bool {
        self.route.is_some_and(|route| route.view == view && route.predecessor == peer)
    }

    /// What to do next.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call [`Membership::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.joining.as_ref().and_then(|joining| joining.until)
    }

    /// Time has come: a successor that is connected and does not answer is dialled anew.
    pub fn handle_timeout(&mut self, now: Instant) {
        let Some(joining) = &mut self.joining else { return };
        let (Some(peer), Some(until)) = (joining.route.successor, joining.until) else { return };
        if until > now {
            return;
        }
        joining.until = None;
        self.greeted.remove(&peer);
        let reason = format!("it did not answer a heartbeat in {} ms", ANSWER_DEADLINE.as_millis());
        self.outputs.push_back(Output::Disconnect { peer, reason });
        self.outputs.push_back(Output::Dial { peer, addresses: joining.addresses.clone() });
    }

    /// A peer has greeted.
    pub fn handle_greeted(&mut self, peer: Node, role: Role, now: Instant) {
        self.greeted.insert(peer);
        match role {
            Role::Coordinator if self.obey.allows(peer.peer) => self.outputs.push_back(Output::Offer { to: peer }),
            Role::Coordinator => {
                let reason = format!(
                    "this stage does not obey {peer}: its volunteer must start it with --allow {peer} (or --coordinator, or --open)"
                );
                self.outputs.push_back(Output::Refuse { peer, reason });
            }
            Role::Stage => {}
        }
        if self.joining.as_ref().is_some_and(|joining| joining.route.successor == Some(peer)) {
            self.ask_successor(now);
        }
    }

    /// A peer answered a heartbeat.
    pub fn handle_ack(&mut self, peer: Node, seq: u64) {
        let answers = |joining: &mut Joining| joining.route.successor == Some(peer) && joining.route.view.0 == seq;
        if let Some(joining) = self.joining.take_if(answers) {
            self.joined(joining.route);
        }
    }

    /// A greeted peer is gone.
    pub fn handle_gone(&mut self, peer: Node, reason: &str) {
        self.greeted.remove(&peer);
        if self.joining.as_ref().is_some_and(|joining| joining.route.coordinator == peer) {
            self.joining = None;
        }
        let Some(route) = self.route else { return };
        if route.coordinator == peer {
            self.route = None;
            self.outputs.push_back(Output::Route(None));
        } else if route.predecessor == peer || route.successor == Some(peer) {
            let message = Control::NeighbourLost { view: route.view, peer, reason: reason.to_owned() };
            self.outputs.push_back(Output::Send { to: route.coordinator, message });
        }
    }

    /// A join came.
    pub fn handle_join(&mut self, from: Node, join: &Join, now: Instant) {
        if !self.obey.allows(from.peer) {
            return self.refuse_join(from, join.view, format!("this stage does not obey {from}"));
        }
        if join.view <= self.view {
            let reason = format!("view {} is not above view {}, which this stage obeys", join.view, self.view);
            return self.refuse_join(from, join.view, reason);
        }
        if let Some(left) = self.route.filter(|route| route.coordinator != from) {
            let message = Control::JoinRefused {
                view: left.view,
                current: join.view,
                reason: format!("coordinator {from} took over"),
            };
            self.outputs.push_back(Output::Send { to: left.coordinator, message });
        }
        self.view = join.view;
        self.route = None;
        self.outputs.push_back(Output::Route(None));
        let route = Route {
            view: join.view,
            coordinator: from,
            predecessor: join.predecessor.as_ref().map_or(from, |neighbour| neighbour.peer),
            successor: join.successor.as_ref().map(|neighbour| neighbour.peer),
        };
        let Some(successor) = &join.successor else {
            self.joining = None;
            return self.joined(route);
        };
        self.joining = Some(Joining { route, addresses: successor.addresses.clone(), until: None });
        if self.greeted.contains(&successor.peer) {
            self.ask_successor(now);
        } else {
            self.outputs.push_back(Output::Dial { peer: successor.peer, addresses: successor.addresses.clone() });
        }
    }

    /// Makes sure that the successor lives: its answer completes the join.
    fn ask_successor(&mut self, now: Instant) {
        let Some(joining) = &mut self.joining else { return };
        let Some(to) = joining.route.successor else { return };
        joining.until = Some(now + ANSWER_DEADLINE);
        let message = Control::Heartbeat { seq: joining.route.view.0 };
        self.outputs.push_back(Output::Send { to, message });
    }

    /// The successor can't be reached.
    pub fn handle_dial_failed(&mut self, peer: Node, reason: &str) {
        let Some(joining) = self.joining.take_if(|joining| joining.route.successor == Some(peer)) else { return };
        self.refuse_join(joining.route.coordinator, joining.route.view, format!("successor {peer}: {reason}"));
    }

    fn refuse_join(&mut self, to: Node, view: View, reason: String) {
        let message = Control::JoinRefused { view, current: self.view, reason };
        self.outputs.push_back(Output::Send { to, message });
    }

    fn joined(&mut self, route: Route) {
        self.route = Some(route);
        self.outputs.push_back(Output::Route(Some(route)));
        let message = Control::Joined { view: route.view };
        self.outputs.push_back(Output::Send { to: route.coordinator, message });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::now;
    use crate::proto::control::Neighbour;

    fn drain(membership: &mut Membership) -> Vec<Output> {
        std::iter::from_fn(|| membership.poll_output()).collect()
    }

    fn join(view: u64, successor: Option<Node>) -> Join {
        let successor = successor.map(|peer| Neighbour { peer, addresses: vec!["/memory/1".to_owned()] });
        Join { view: View(view), predecessor: None, successor }
    }

    fn obeying(peer: Node) -> Membership {
        let mut membership = Membership::new(Obey::Peers(BTreeSet::from([peer.peer])));
        membership.handle_greeted(peer, Role::Coordinator, now());
        assert_eq!(drain(&mut membership), [Output::Offer { to: peer }]);
        membership
    }

    #[test]
    fn a_join_is_done_when_the_successor_has_answered() {
        let (coordinator, successor) = (Node::random(), Node::random());
        let mut membership = obeying(coordinator);
        membership.handle_join(coordinator, &join(3, Some(successor)), now());
        let dial = Output::Dial { peer: successor, addresses: vec!["/memory/1".to_owned()] };
        assert_eq!(drain(&mut membership), [Output::Route(None), dial]);
        assert!(!membership.accepts(coordinator, View(3)), "frames wait for the join");
        membership.handle_greeted(successor, Role::Stage, now());
        let ask = Output::Send { to: successor, message: Control::Heartbeat { seq: 3 } };
        assert_eq!(drain(&mut membership), [ask]);
        membership.handle_ack(coordinator, 3);
        membership.handle_ack(successor, 2);
        assert_eq!(drain(&mut membership), [], "only the successor's answer to this view's heartbeat counts");
        membership.handle_ack(successor, 3);
        let route = Route { view: View(3), coordinator, predecessor: coordinator, successor: Some(successor) };
        let joined = Output::Send { to: coordinator, message: Control::Joined { view: View(3) } };
        assert_eq!(drain(&mut membership), [Output::Route(Some(route)), joined]);
        assert!(membership.accepts(coordinator, View(3)));
        assert!(!membership.accepts(successor, View(3)), "only the predecessor sends frames");
        assert!(!membership.accepts(coordinator, View(2)), "an older view is refused");
    }

    #[test]
    fn the_view_never_falls() {
        let coordinator = Node::random();
        let mut membership = obeying(coordinator);
        membership.handle_join(coordinator, &join(3, None), now());
        drain(&mut membership);
        for view in [0, 2, 3] {
            membership.handle_join(coordinator, &join(view, None), now());
            let outputs = drain(&mut membership);
            assert!(
                matches!(&outputs[..], [Output::Send { message: Control::JoinRefused { current: View(3), .. }, .. }]),
                "{outputs:?}"
            );
        }
        assert_eq!(membership.view(), View(3));
    }

    #[test]
    fn nobody_else_is_obeyed() {
        let (coordinator, other) = (Node::random(), Node::random());
        let mut membership = obeying(coordinator);
        membership.handle_greeted(other, Role::Coordinator, now());
        assert!(matches!(&drain(&mut membership)[..], [Output::Refuse { peer, .. }] if *peer == other));
        membership.handle_join(other, &join(9, None), now());
        let outputs = drain(&mut membership);
        assert!(matches!(&outputs[..], [Output::Send { message: Control::JoinRefused { .. }, .. }]));
        assert_eq!(membership.view(), View(0));
    }

    #[test]
    fn a_lost_neighbour_is_reported_and_a_lost_coordinator_ends_the_view() {
        let (coordinator, successor) = (Node::random(), Node::random());
        let mut membership = obeying(coordinator);
        membership.handle_greeted(successor, Role::Stage, now());
        membership.handle_join(coordinator, &join(1, Some(successor)), now());
        membership.handle_ack(successor, 1);
        drain(&mut membership);
        membership.handle_gone(successor, "reset");
        let lost = Control::NeighbourLost { view: View(1), peer: successor, reason: "reset".to_owned() };
        assert_eq!(drain(&mut membership), [Output::Send { to: coordinator, message: lost }]);
        membership.handle_gone(coordinator, "reset");
        assert_eq!(drain(&mut membership), [Output::Route(None)]);
        assert!(!membership.obeys(coordinator));
    }

    #[test]
    fn an_unreachable_successor_refuses_the_join() {
        let (coordinator, successor) = (Node::random(), Node::random());
        let mut membership = obeying(coordinator);
        membership.handle_join(coordinator, &join(1, Some(successor)), now());
        drain(&mut membership);
        membership.handle_dial_failed(successor, "no route");
        let outputs = drain(&mut membership);
        assert!(matches!(&outputs[..], [Output::Send { message: Control::JoinRefused { view: View(1), .. }, .. }]));
        membership.handle_greeted(successor, Role::Stage, now());
        assert_eq!(drain(&mut membership), []);
    }

    #[test]
    fn a_successor_that_died_without_a_word_is_dialled_anew() {
        let (coordinator, successor) = (Node::random(), Node::random());
        let mut membership = obeying(coordinator);
        membership.handle_greeted(successor, Role::Stage, now());
        membership.handle_join(coordinator, &join(1, Some(successor)), now());
        drain(&mut membership);
        let at = membership.poll_timeout().unwrap();
        membership.handle_timeout(at);
        let outputs = drain(&mut membership);
        assert!(
            matches!(&outputs[..], [Output::Disconnect { peer, .. }, Output::Dial { .. }] if *peer == successor),
            "{outputs:?}"
        );
        assert_eq!(membership.poll_timeout(), None);
        membership.handle_greeted(successor, Role::Stage, now());
        membership.handle_ack(successor, 1);
        assert_eq!(membership.route().map(|route| route.view), Some(View(1)));
    }

    #[test]
    fn a_coordinator_that_is_left_is_told_so() {
        let (first, second) = (Node::random(), Node::random());
        let mut membership = Membership::new(Obey::Anyone);
        membership.handle_greeted(first, Role::Coordinator, now());
        membership.handle_join(first, &join(1, None), now());
        drain(&mut membership);
        membership.handle_join(second, &join(2, None), now());
        let told = drain(&mut membership).into_iter().next();
        let Some(Output::Send { to, message: Control::JoinRefused { view, current, .. } }) = told else {
            panic!("{told:?}")
        };
        assert_eq!((to, view, current), (first, View(1), View(2)));
    }
}
