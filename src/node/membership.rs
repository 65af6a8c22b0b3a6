//! Whom a stage obeys and which view it is in: pure.
//!
//! Owns the view (which never falls), the coordinator obeyed, and the two neighbours that the view
//! names. Frames are accepted in the current view from the named predecessor only. A hop that dies
//! while nothing is on it is mended in place: this side dials its successor anew, and waits for its
//! predecessor to do the same; only what can't be mended is the coordinator's to know. A join is refused
//! as soon as its successor counts as unreachable, so that another stage can take its place.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use libp2p::PeerId;

use crate::ids::{Node, View};
use crate::proto::control::{Control, Join, Neighbour, Role};
use crate::proto::heartbeats::ASIDE;

/// How long a connected successor may take to answer a heartbeat before it is dialled anew: it may
/// have died without a word, or restarted.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2);

/// How long a hop that died while idle may take to be mended.
pub const MEND_DEADLINE: Duration = Duration::from_secs(4);

/// Pause before a dial of a mend is tried again.
const MEND_PAUSE: Duration = Duration::from_millis(200);

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
    /// As a shadow: outside the ring, it gets copies from its predecessor and sends nothing on.
    pub shadows: bool,
}

/// Coordinators that lost this stage to another one and are remembered.
const FORMER_MAX: usize = 8;

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
    /// Who sends this shadow copies can be asked.
    Ask,
    /// Send final positions to this shadow of the successor, too.
    Copy(Option<Node>),
    /// Frees every session and takes this route (`None`: outside any ring).
    Route(Option<Route>),
    /// A hop that had died while idle stands again.
    Mended {
        /// To or from whom.
        peer: Node,
    },
}

#[derive(Debug)]
struct Joining {
    route: Route,
    addresses: Vec<String>,
    /// What was done to reach the successor.
    step: Step,
    /// Until when it is waited for.
    until: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It is dialled, and is to greet.
    Dialled,
    /// It is connected, and is to answer a heartbeat.
    Asked,
}

/// A hop that died while idle.
#[derive(Debug)]
struct Mend {
    peer: Node,
    /// Why it died.
    reason: String,
    /// Until when it is hoped for.
    until: Instant,
    /// When the successor is dialled again.
    dial_at: Option<Instant>,
}

/// A stage's place.
#[derive(Debug)]
pub struct Membership {
    obey: Obey,
    /// After how long a successor that is dialled and says nothing counts as unreachable.
    reach: Duration,
    view: View,
    greeted: BTreeSet<Node>,
    route: Option<Route>,
    joining: Option<Joining>,
    /// Addresses of the successor in `route`.
    successor_at: Vec<String>,
    /// The neighbours in `route` that are not connected, one at most for each side.
    mends: Vec<Mend>,
    /// Whose join was obeyed last, and in which view.
    leader: Option<(Node, View)>,
    /// Those whose place another coordinator took, the last ones, and their last views.
    former: VecDeque<(Node, View)>,
    /// The shadow of the successor in `route`, and when it is dialled again.
    copies_to: Option<(Neighbour, Option<Instant>)>,
    outputs: VecDeque<Output>,
}

impl Membership {
    /// A stage outside any ring. A successor that is dialled for a join has `reach` to greet, as long as
    /// silence may last on a connection: a longer dial may go on, but no view waits for it.
    #[must_use]
    pub fn new(obey: Obey, reach: Duration) -> Self {
        Self {
            obey,
            reach,
            view: View(0),
            greeted: BTreeSet::new(),
            route: None,
            joining: None,
            successor_at: Vec::new(),
            mends: Vec::new(),
            leader: None,
            former: VecDeque::new(),
            copies_to: None,
            outputs: VecDeque::new(),
        }
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
        let joining = self.joining.as_ref().map(|joining| joining.until);
        let copies = self.copies_to.as_ref().and_then(|(_, at)| *at);
        let mends = self.mends.iter().flat_map(|mend| [Some(mend.until), mend.dial_at]);
        mends.chain([joining, copies]).flatten().min()
    }

    /// Time has come: a successor that is connected and does not answer is dialled anew, as is one
    /// to which the hop died; one that is dialled in vain refuses the join; a neighbour that did not come
    /// back is lost.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.dial_shadow(now);
        for mend in &mut self.mends {
            if mend.dial_at.take_if(|at| *at <= now).is_some() {
                self.outputs.push_back(Output::Dial { peer: mend.peer, addresses: self.successor_at.clone() });
            }
        }
        for mend in self.mends.extract_if(.., |mend| mend.until <= now).collect::<Vec<_>>() {
            let waited = MEND_DEADLINE.as_millis();
            self.lost(mend.peer, &format!("{}; the hop was not mended in {waited} ms", mend.reason));
        }
        let Some(joining) = self.joining.as_ref().filter(|joining| joining.until <= now) else { return };
        let Some(peer) = joining.route.successor else { return };
        match joining.step {
            Step::Asked => {
                self.greeted.remove(&peer);
                let reason = format!("it did not answer a heartbeat in {} ms", ANSWER_DEADLINE.as_millis());
                self.outputs.push_back(Output::Disconnect { peer, reason });
                self.dial_successor(now);
            }
            Step::Dialled => self.give_up(peer, &format!("no answer within {} ms", self.reach.as_millis())),
        }
    }

    /// Dials the successor of the join under way.
    fn dial_successor(&mut self, now: Instant) {
        let until = now + self.reach;
        let Some(joining) = &mut self.joining else { return };
        let Some(peer) = joining.route.successor else { return };
        (joining.step, joining.until) = (Step::Dialled, until);
        self.outputs.push_back(Output::Dial { peer, addresses: joining.addresses.clone() });
    }

    /// Refuses the join under way if this is its successor, who can't be reached.
    fn give_up(&mut self, peer: Node, reason: &str) {
        let Some(joining) = self.joining.take_if(|joining| joining.route.successor == Some(peer)) else { return };
        self.refuse_join(joining.route.coordinator, joining.route.view, format!("successor {peer}: {reason}"));
    }

    /// A greeted peer gave no sign of life for so long that it counts as dead: no join waits for it. That
    /// its connection is gone is said by [`Membership::handle_gone`].
    pub fn handle_silent(&mut self, peer: Node, reason: &str) {
        self.give_up(peer, reason);
    }

    /// A peer has greeted.
    pub fn handle_greeted(&mut self, peer: Node, role: Role, now: Instant) {
        self.greeted.insert(peer);
        match role {
            Role::Coordinator if self.obey.allows(peer.peer) => {
                let message = self.refusal_of_former(peer, None);
                self.outputs.push_back(message.unwrap_or(Output::Offer { to: peer }));
            }
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
        if self.route.is_some_and(|route| route.shadows && route.predecessor == peer) {
            self.outputs.push_back(Output::Ask);
        }
        if self.mends.extract_if(.., |mend| mend.peer == peer).count() > 0 {
            self.outputs.push_back(Output::Mended { peer });
        }
    }

    /// A peer answered a heartbeat.
    pub fn handle_ack(&mut self, peer: Node, seq: u64) {
        let answers =
            |joining: &mut Joining| joining.route.successor == Some(peer) && join_seq(joining.route.view) == seq;
        if let Some(joining) = self.joining.take_if(answers) {
            self.joined(joining.route, joining.addresses);
        }
    }

    /// A greeted peer is gone; `idle`: no session is open, so nothing was on the way.
    pub fn handle_gone(&mut self, peer: Node, reason: &str, idle: bool, now: Instant) {
        self.greeted.remove(&peer);
        if self.joining.as_ref().is_some_and(|joining| joining.route.coordinator == peer) {
            self.joining = None;
        }
        let asked = |joining: &Joining| joining.route.successor == Some(peer) && joining.step == Step::Asked;
        if self.joining.as_ref().is_some_and(asked) {
            self.dial_successor(now);
        }
        self.lost_shadow(peer, now);
        let Some(route) = self.route else { return };
        if route.coordinator == peer {
            self.route = None;
            self.outputs.push_back(Output::Route(None));
            self.mends.clear();
        } else if route.shadows {
            // Who sends copies dials again.
        } else if route.successor == Some(peer) && !idle {
            self.mends.retain(|mend| mend.peer != peer);
            self.lost(peer, reason);
        } else if (route.successor == Some(peer) || route.predecessor == peer) && !self.mends(peer) {
            // What a predecessor had on the way is its own to tell, so it is waited for in any case.
            let dial_at = (route.successor == Some(peer)).then_some(now);
            self.mends.push(Mend { peer, reason: reason.to_owned(), until: now + MEND_DEADLINE, dial_at });
            self.handle_timeout(now);
        }
    }

    /// Whether the hop to or from this neighbour is being mended.
    #[must_use]
    pub fn mends(&self, peer: Node) -> bool {
        self.mends.iter().any(|mend| mend.peer == peer)
    }

    fn lost(&mut self, peer: Node, reason: &str) {
        let Some(route) = self.route else { return };
        let message = Control::NeighbourLost { view: route.view, peer, reason: reason.to_owned() };
        self.outputs.push_back(Output::Send { to: route.coordinator, message });
    }

    /// A join came.
    pub fn handle_join(&mut self, from: Node, join: &Join, now: Instant) {
        if !self.obey.allows(from.peer) {
            return self.refuse_join(from, join.view, format!("this stage does not obey {from}"));
        }
        if let Some(refusal) = self.refusal_of_former(from, Some(join.view)) {
            return self.outputs.push_back(refusal);
        }
        if join.view <= self.view {
            let reason = format!("view {} is not above view {}, which this stage obeys", join.view, self.view);
            return self.refuse_join(from, join.view, reason);
        }
        if let Some(left) = self.route.filter(|route| route.coordinator != from && !route.shadows) {
            let message = Control::JoinRefused {
                view: left.view,
                current: join.view,
                reason: format!("coordinator {from} took over"),
            };
            self.outputs.push_back(Output::Send { to: left.coordinator, message });
        }
        self.follow(from, join.view);
        let route = Route {
            view: join.view,
            coordinator: from,
            predecessor: join.predecessor.as_ref().map_or(from, |neighbour| neighbour.peer),
            successor: join.successor.as_ref().map(|neighbour| neighbour.peer),
            shadows: false,
        };
        let Some(successor) = &join.successor else {
            self.joining = None;
            return self.joined(route, Vec::new());
        };
        let addresses = successor.addresses.clone();
        self.joining = Some(Joining { route, addresses, step: Step::Dialled, until: now });
        if self.greeted.contains(&successor.peer) {
            self.ask_successor(now);
        } else {
            self.dial_successor(now);
        }
    }

    /// Takes this coordinator's view, and is outside any ring.
    fn follow(&mut self, from: Node, view: View) {
        if let Some(left) = self.leader.replace((from, view)).filter(|(leader, _)| *leader != from) {
            self.former.push_back(left);
            if self.former.len() > FORMER_MAX {
                self.former.pop_front();
            }
        }
        self.former.retain(|(former, _)| *former != from);
        self.view = view;
        self.route = None;
        self.copies_to = None;
        self.mends.clear();
        self.outputs.push_back(Output::Route(None));
    }

    /// What a coordinator is told that was frozen while another one took its place, and comes back: this
    /// stage is not its own while the other one leads.
    ///
    /// Views are no guide here: its own rises with every try.
    fn refusal_of_former(&self, peer: Node, asks: Option<View>) -> Option<Output> {
        let leader = self.coordinator().filter(|leader| *leader != peer)?;
        let (_, last) = self.former.iter().find(|(former, _)| *former == peer)?;
        let view = asks.unwrap_or(*last);
        let current = self.view.max(View(view.0.saturating_add(1)));
        let reason = format!("coordinator {leader} took over");
        let message = Control::JoinRefused { view, current, reason };
        Some(Output::Send { to: peer, message })
    }

    /// Makes sure that the successor lives: its answer completes the join.
    fn ask_successor(&mut self, now: Instant) {
        let Some(joining) = &mut self.joining else { return };
        let Some(to) = joining.route.successor else { return };
        (joining.step, joining.until) = (Step::Asked, now + ANSWER_DEADLINE);
        let message = Control::Heartbeat { seq: join_seq(joining.route.view) };
        self.outputs.push_back(Output::Send { to, message });
    }

    /// The successor can't be reached.
    pub fn handle_dial_failed(&mut self, peer: Node, reason: &str, now: Instant) {
        for mend in self.mends.iter_mut().filter(|mend| mend.peer == peer) {
            mend.dial_at = Some(now + MEND_PAUSE);
        }
        self.lost_shadow(peer, now);
        self.give_up(peer, reason);
    }

    fn refuse_join(&mut self, to: Node, view: View, reason: String) {
        let message = Control::JoinRefused { view, current: self.view, reason };
        self.outputs.push_back(Output::Send { to, message });
    }

    fn joined(&mut self, route: Route, successor_at: Vec<String>) {
        self.route = Some(route);
        self.successor_at = successor_at;
        self.outputs.push_back(Output::Route(Some(route)));
        let message = Control::Joined { view: route.view };
        self.outputs.push_back(Output::Send { to: route.coordinator, message });
    }
}

/// The heartbeat whose answer proves that a successor hears this view's messages.
fn join_seq(view: View) -> u64 {
    ASIDE | view.0
}

mod shadow;
#[cfg(test)]
mod tests;
