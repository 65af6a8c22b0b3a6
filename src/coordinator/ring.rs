//! The ring's membership in the coordinator: pure.
//!
//! Owns who offered what, the view, and whether the ring is waiting for layers, joining, or whole.
//! Whether it is *ready* is not said here: that takes a token that went round.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::heal::decide::{Decision, Evidence, Lost, Next, Policy, RingView, decide};
use crate::heal::tiling::{Candidate, plan};
use crate::ids::{LayerRange, Node, VIEW_MAX, View};
use crate::proto::control::{Control, Join, Neighbour, Offer, StageReport};

/// How long the members of a view may take to connect to each other.
const JOIN_DEADLINE: Duration = Duration::from_secs(10);

/// How long the first ring waits for other stages of the ranges that only spares hold.
const SPARE_GRACE: Duration = Duration::from_secs(1);

/// How long to wait after a join that failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A stage that offered itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Who.
    pub peer: Node,
    /// What it offered last.
    pub offer: Offer,
    /// What it reported last.
    pub report: Option<StageReport>,
    /// It finishes what is open and takes nothing new.
    pub draining: bool,
    /// It answers heartbeats late.
    pub suspect: bool,
    /// Which failure of all was its last: a ring broke on it, or could not form, though it answers. 0: none;
    /// others go first.
    pub failed: u64,
}

impl Member {
    fn neighbour(&self) -> Neighbour {
        Neighbour { peer: self.peer, addresses: self.offer.addresses.clone() }
    }
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
    /// The ring of the last view is no more: its sessions fail.
    Broken {
        /// The stage that is to blame.
        peer: Node,
        /// Its layers.
        range: LayerRange,
        /// What was seen.
        why: String,
    },
    /// A stage outside the ring shadows a member from here on: sessions are opened on it.
    Shadow {
        /// The shadow.
        peer: Node,
        /// The member.
        of: Node,
    },
    /// Every member has joined the view.
    Whole {
        /// The view.
        view: View,
    },
    /// Layers are missing, or stages don't fit together.
    Waiting {
        /// For what, in words for an operator.
        why: String,
    },
}

#[derive(Debug, Clone, PartialEq)]
enum State {
    Waiting {
        why: String,
        retry: Option<Instant>,
    },
    Joining {
        ring: Vec<Node>,
        pending: BTreeSet<Node>,
        until: Instant,
    },
    Whole {
        ring: Vec<Node>,
    },
    /// Another coordinator leads these stages: this one stops serving.
    Superseded {
        why: String,
    },
}

/// The membership.
#[derive(Debug)]
pub struct Ring {
    layers: u16,
    /// The coordinator's own name.
    local: Node,
    view: View,
    /// The last view that members were asked to join; below `view` where an offer told of a later one.
    asked: Option<View>,
    members: BTreeMap<Node, Member>,
    /// Members of the last view that was joined.
    incumbents: BTreeSet<Node>,
    /// Failures so far.
    failures: u64,
    /// When the first ring takes spares.
    spares_from: Option<Instant>,
    state: State,
    /// Shadows of the last view that was whole, and whom each shadows.
    shadows: BTreeMap<Node, Node>,
    outputs: VecDeque<Output>,
}

/// What decisions go by.
const POLICY: Policy = Policy { retry_after: RETRY_AFTER, look_after: Duration::from_secs(2), excuses_max: 8 };

impl Ring {
    /// The ring of coordinator `local` over `layers` layers, without members.
    #[must_use]
    pub fn new(local: Node, layers: u16) -> Self {
        let mut ring = Self {
            layers,
            local,
            view: View(0),
            asked: None,
            members: BTreeMap::new(),
            incumbents: BTreeSet::new(),
            failures: 0,
            spares_from: None,
            state: State::Waiting { why: String::new(), retry: None },
            shadows: BTreeMap::new(),
            outputs: VecDeque::new(),
        };
        ring.replan(None);
        ring
    }

    /// Its first view is above `view` too.
    pub fn start_above(&mut self, view: View) {
        self.view = self.view.max(view);
    }

    /// Another coordinator leads the ring.
    #[must_use]
    pub fn is_superseded(&self) -> bool {
        matches!(self.state, State::Superseded { .. })
    }

    /// The view can't be joined, for it can't be logged.
    pub fn handle_not_logged(&mut self, why: &str, now: Instant) {
        if matches!(self.state, State::Joining { .. }) {
            self.wait(format!("view {} can't be logged: {why}", self.view), Some(now + RETRY_AFTER));
        }
    }

    /// A later coordinator leads: this one serves no more.
    pub fn handle_superseded(&mut self, why: &str) {
        let why = format!("{why}; another coordinator leads the ring, and this one stops serving");
        self.wait(why.clone(), None);
        self.state = State::Superseded { why };
    }

    /// The current view; 0 before the first.
    #[must_use]
    pub fn view(&self) -> View {
        self.view
    }

    /// The members of the whole ring, head first; empty unless whole.
    #[must_use]
    pub fn whole(&self) -> Vec<&Member> {
        match &self.state {
            State::Whole { ring } => ring.iter().filter_map(|peer| self.members.get(peer)).collect(),
            State::Waiting { .. } | State::Joining { .. } | State::Superseded { .. } => Vec::new(),
        }
    }

    /// What is missing, unless whole.
    #[must_use]
    pub fn missing(&self) -> Option<String> {
        match &self.state {
            State::Waiting { why, .. } | State::Superseded { why } => Some(why.clone()),
            State::Joining { pending, .. } => {
                let names: Vec<String> = pending.iter().map(Node::to_string).collect();
                Some(format!("view {}: waiting for {} to join", self.view, names.join(", ")))
            }
            State::Whole { ring } => {
                let draining = ring.iter().filter_map(|peer| self.members.get(peer)).find(|member| member.draining)?;
                Some(format!("stage {} ({}) is draining", draining.offer.range, draining.peer))
            }
        }
    }

    /// Every stage that offered itself.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    /// One stage.
    #[must_use]
    pub fn member(&self, peer: Node) -> Option<&Member> {
        self.members.get(&peer)
    }

    /// What to do next.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call [`Ring::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match &self.state {
            State::Waiting { retry, .. } => *retry,
            State::Joining { until, .. } => Some(*until),
            State::Whole { .. } | State::Superseded { .. } => None,
        }
    }

    /// Time has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        match &self.state {
            State::Waiting { retry: Some(at), .. } if *at <= now => self.replan(Some(now)),
            State::Joining { until, pending, .. } if *until <= now => {
                let names: Vec<String> = pending.iter().map(Node::to_string).collect();
                let why =
                    format!("{} did not join view {} in {} s", names.join(", "), self.view, JOIN_DEADLINE.as_secs());
                // A stage joins once it has heard of the one behind it: of that one, or of the stage itself,
                // another one takes the place, if there is one.
                let State::Joining { ring, pending, .. } = &self.state else { return };
                match ring.iter().rev().find(|peer| pending.contains(peer)).copied() {
                    Some(from) => self.doubt(from, why, now),
                    None => self.wait(why, Some(now + RETRY_AFTER)),
                }
            }
            State::Waiting { .. } | State::Joining { .. } | State::Whole { .. } | State::Superseded { .. } => {}
        }
    }

    /// A stage offered itself, or changed its offer.
    pub fn handle_offer(&mut self, peer: Node, offer: Offer, now: Instant) {
        let moved = self.members.get(&peer).is_some_and(|member| member.offer.range != offer.range);
        if moved {
            self.handle_gone(peer, "it offers another range", now);
        }
        self.view = self.view.max(offer.view);
        let member = Member { peer, offer, report: None, draining: false, suspect: false, failed: 0 };
        self.members.insert(peer, member);
        self.pair();
        if matches!(self.state, State::Waiting { .. }) {
            self.replan(Some(now));
        }
    }

    /// A stage is gone.
    pub fn handle_gone(&mut self, peer: Node, why: &str, now: Instant) {
        if !self.members.contains_key(&peer) {
            return;
        }
        let decision = self.decide(&Evidence::Gone { peer, why }, now);
        self.members.remove(&peer);
        self.carry_out(decision, now);
        self.pair();
        if matches!(self.state, State::Waiting { .. }) {
            self.replan(Some(now));
        }
    }

    /// A member says that its neighbour is gone. Of others it has nothing to say.
    pub fn handle_neighbour_lost(&mut self, (from, lost): (Node, Node), view: View, why: &str, now: Instant) {
        let ring: &[Node] = match &self.state {
            State::Joining { ring, .. } | State::Whole { ring } => ring,
            State::Waiting { .. } | State::Superseded { .. } => &[],
        };
        let neighbours = ring.windows(2).any(|pair| pair == [from, lost] || pair == [lost, from]);
        if view != self.view || !neighbours {
            return;
        }
        self.handle_fault(lost, &format!("a neighbour lost it: {why}"), now);
    }

    /// A stage answers, and does not do its part: the view is given up.
    pub fn handle_fault(&mut self, peer: Node, why: &str, now: Instant) {
        let decision = self.decide(&Evidence::Fault { peer, why }, now);
        self.fail(peer);
        self.carry_out(decision, now);
    }

    /// A stage goes behind all others of its range.
    fn fail(&mut self, peer: Node) {
        if let Some(member) = self.members.get_mut(&peer) {
            self.failures += 1;
            member.failed = self.failures;
        }
    }

    /// A reply is overdue, and the stages said how far the frames came: gives the stage to blame.
    ///
    /// # Errors
    /// What comes next, where nobody is blamed.
    pub fn handle_overdue(&mut self, evidence: &Evidence<'_>, now: Instant) -> Result<Lost, Next> {
        let decision = self.decide(evidence, now);
        let lost = decision.lost.clone().ok_or_else(|| decision.next.clone());
        if let Ok(lost) = &lost {
            self.fail(lost.peer);
        }
        self.carry_out(decision, now);
        lost
    }

    fn decide(&self, evidence: &Evidence<'_>, now: Instant) -> Decision {
        let peers: &[Node] = match &self.state {
            State::Joining { ring, .. } | State::Whole { ring } => ring,
            State::Waiting { .. } | State::Superseded { .. } => &[],
        };
        let range = |peer: &Node| Some((*peer, self.members.get(peer)?.offer.range));
        let ring: Vec<(Node, LayerRange)> = peers.iter().filter_map(range).collect();
        let view = RingView { layers: self.layers, ring: &ring, candidates: &self.candidates() };
        decide(&view, evidence, &POLICY, now)
    }

    /// A member can't reach the one behind it: one of the two loses its place, at once to a stage that did not
    /// fail.
    fn doubt(&mut self, from: Node, said: String, now: Instant) {
        let Decision { lost, next } = self.decide(&Evidence::Unreachable { from }, now);
        self.wait(said.clone(), Some(now + RETRY_AFTER));
        let Some(Lost { peer, range, why }) = lost else { return };
        self.fail(peer);
        if let Next::Join(ring) = next {
            self.outputs.push_back(Output::Broken { peer, range, why: format!("{why}: {said}") });
            self.join(ring, now);
        }
    }

    fn carry_out(&mut self, Decision { lost, next }: Decision, now: Instant) {
        let Some(Lost { peer, range, why }) = lost else { return };
        self.outputs.push_back(Output::Broken { peer, range, why: why.clone() });
        let retry = match next {
            Next::Retry(at) => Some(at),
            Next::Join(_) | Next::Wait { .. } | Next::GoOn | Next::AskAgain(_) => Some(now + RETRY_AFTER),
        };
        self.wait(format!("stage {range} ({peer}) was lost: {why}"), retry);
        match next {
            Next::Join(ring) => self.join(ring, now),
            Next::Wait { why } => self.wait(why, None),
            Next::Retry(_) | Next::GoOn | Next::AskAgain(_) => {}
        }
    }

    /// A member has joined.
    pub fn handle_joined(&mut self, peer: Node, view: View) {
        let State::Joining { ring, pending, .. } = &mut self.state else { return };
        if view != self.view {
            return;
        }
        pending.remove(&peer);
        if pending.is_empty() {
            self.state = State::Whole { ring: std::mem::take(ring) };
            self.pair_anew();
            self.outputs.push_back(Output::Whole { view });
        }
    }

    /// A member refuses the view, or leaves it for another coordinator's.
    pub fn handle_join_refused(&mut self, peer: Node, view: View, current: View, reason: &str, now: Instant) {
        // A view of which an offer told alone is not this coordinator's: a stage that left its view for that one
        // obeys another.
        let led = self.asked.map_or(self.view, |asked| if view <= asked { asked } else { self.view });
        if (view != self.view && current <= led) || self.is_superseded() || !self.incumbents.contains(&peer) {
            return;
        }
        let range = self.members.get(&peer).map(|member| member.offer.range);
        let name = range.map_or_else(|| format!("stage {peer}"), |range| format!("stage {range} ({peer})"));
        if current > led {
            let why = format!("{name} obeys a view above this coordinator's: {reason}");
            let decision = self.decide(&Evidence::Fault { peer, why: &why }, now);
            self.carry_out(Decision { next: Next::GoOn, ..decision }, now);
            return self.handle_superseded(&why);
        }
        if matches!(self.state, State::Whole { .. }) {
            // Sessions are open on it.
            return self.handle_fault(peer, &format!("it refuses view {view}: {reason}"), now);
        }
        let refusal = format!("{name} refuses view {view}: {reason}");
        if current == view {
            self.doubt(peer, refusal, now);
        } else {
            self.wait(refusal, Some(now + RETRY_AFTER));
        }
    }

    /// A stage finishes what is open and takes nothing new.
    pub fn handle_draining(&mut self, peer: Node) {
        if let Some(member) = self.members.get_mut(&peer) {
            member.draining = true;
        }
        self.pair();
    }

    /// A stage reported.
    pub fn handle_report(&mut self, peer: Node, report: StageReport) {
        if let Some(member) = self.members.get_mut(&peer) {
            member.report = Some(report);
        }
    }

    /// A stage answers late, or in time again.
    pub fn handle_suspect(&mut self, peer: Node, suspect: bool) {
        if let Some(member) = self.members.get_mut(&peer) {
            member.suspect = suspect;
        }
    }

    fn wait(&mut self, why: String, retry: Option<Instant>) {
        self.outputs.push_back(Output::Waiting { why: why.clone() });
        self.state = State::Waiting { why, retry };
    }

    fn candidates(&self) -> Vec<Candidate> {
        let offers = self.members.values().filter(|member| !member.draining);
        offers
            .map(|member| Candidate {
                peer: member.peer,
                range: member.offer.range,
                drafts: member.offer.draft_block > 0,
                faulted: member.failed > 0 || member.suspect,
                failed: member.failed,
                incumbent: self.incumbents.contains(&member.peer),
                spare: member.offer.spare,
                shadow: self.shadows.contains_key(&member.peer),
            })
            .collect()
    }

    fn replan(&mut self, now: Option<Instant>) {
        match (plan(self.layers, &self.candidates()), now) {
            (Ok(ring), Some(now)) if self.waits_for_others(&ring, now) => {}
            (Ok(ring), Some(now)) => self.join(ring.iter().map(|member| member.peer).collect(), now),
            (Ok(_), None) => {}
            (Err(error), _) => {
                let why = error.to_string();
                if !matches!(&self.state, State::Waiting { why: said, retry: None } if *said == why) {
                    self.wait(why, None);
                }
            }
        }
    }

    /// Before the first ring: stages that come together are not all there at once, and a spare must not
    /// take a place for being the first.
    fn waits_for_others(&mut self, ring: &[Candidate], now: Instant) -> bool {
        let Some(spare) = ring.iter().find(|candidate| candidate.spare) else { return false };
        let from = *self.spares_from.get_or_insert(now + SPARE_GRACE);
        let waits = self.incumbents.is_empty() && now < from;
        if waits {
            self.wait(
                format!("layers {} are held by a spare only: waiting for another stage", spare.range),
                Some(from),
            );
        }
        waits
    }

    fn join(&mut self, ring: Vec<Node>, now: Instant) {
        let Some(next) = self.view.0.checked_add(1).map(View).filter(|next| *next <= VIEW_MAX) else {
            let why = format!("a stage or the log says view {}, and none is left above it", self.view);
            return self
                .wait(format!("{why}: start the coordinator and every stage again, with a new log folder"), None);
        };
        self.view = next;
        self.asked = Some(self.view);
        self.incumbents = ring.iter().copied().collect();
        let neighbour = |at: Option<usize>| {
            at.and_then(|at| ring.get(at)).and_then(|peer| self.members.get(peer)).map(Member::neighbour)
        };
        for (at, peer) in ring.iter().enumerate() {
            let join = Join {
                view: self.view,
                predecessor: neighbour(at.checked_sub(1)),
                successor: neighbour(at.checked_add(1)),
            };
            self.outputs.push_back(Output::Send { to: *peer, message: Control::Join(Box::new(join)) });
        }
        self.state = State::Joining { pending: ring.iter().copied().collect(), ring, until: now + JOIN_DEADLINE };
    }
}

mod shadows;
#[cfg(test)]
mod tests;
