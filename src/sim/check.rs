//! The invariants, and what is remembered to check them after every event.

use std::collections::BTreeMap;
use std::fmt;

use crate::ids::{Epoch, Node, Position, SessionId, TokenId, View};
use crate::node::membership::Route;
use crate::sim::agenda::HostId;
use crate::sim::toy::Reference;

/// What must always hold; `docs/simulator.md` says each in a sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Invariant {
    /// Committed and told tokens are those of the reference.
    Text,
    /// Nothing is told before it is durable.
    Durable,
    /// No frame of another view or from another peer reaches a worker.
    View,
    /// Views, epochs and settled floors never fall.
    Falls,
    /// Queues are bounded.
    Bounds,
    /// A ready ring is whole.
    Ready,
    /// A reader is told one end, and it is the right one.
    End,
    /// Drafts are those of an unbroken run.
    Drafts,
    /// The log never contradicts itself, and can be read.
    Log,
    /// A join goes out behind the record of its view.
    Join,
    /// No process gives up or spins.
    Process,
    /// What is slow is not taken for dead.
    Slow,
    /// Once faults have stopped, the ring heals and every session ends.
    Liveness,
    /// What ended is freed everywhere.
    Leak,
}

impl Invariant {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Durable => "durable",
            Self::View => "view",
            Self::Falls => "falls",
            Self::Bounds => "bounds",
            Self::Ready => "ready",
            Self::End => "end",
            Self::Drafts => "drafts",
            Self::Log => "log",
            Self::Join => "join",
            Self::Process => "process",
            Self::Slow => "slow",
            Self::Liveness => "liveness",
            Self::Leak => "leak",
        }
    }
}

/// An invariant does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Broken {
    pub(super) invariant: Invariant,
    pub(super) why: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant.name(), self.why)
    }
}

/// Says that an invariant does not hold.
pub(super) fn broken<T>(invariant: Invariant, why: impl Into<String>) -> Result<T, Broken> {
    Err(Broken { invariant, why: why.into() })
}

/// Whose a session is: of a log's folder (0) or, without one, of one coordinator.
pub(super) type Owner = (HostId, SessionId);

/// What is remembered of a run.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// What each session must say.
    references: BTreeMap<Owner, Reference>,
    /// Committed tokens that were compared.
    compared: BTreeMap<(HostId, SessionId), usize>,
    /// Every place that a stage ever took.
    joined: BTreeMap<(Node, View, Node), Route>,
    views: BTreeMap<HostId, View>,
    floors: BTreeMap<(HostId, View, SessionId), (Epoch, Position)>,
    /// Draft blocks that were compared, and those that had a wrong token in them.
    pub(super) blocks: u64,
}

impl Memory {
    /// A session begins.
    pub(super) fn expect(&mut self, owner: Owner, reference: Reference) {
        self.references.insert(owner, reference);
    }

    /// Compares what a coordinator has committed to a session.
    pub(super) fn committed(&mut self, host: HostId, owner: Owner, tokens: &[TokenId]) -> Result<(), Broken> {
        let Some(reference) = self.references.get(&owner) else { return Ok(()) };
        let from = self.compared.entry((host, owner.1)).or_default();
        for (at, token) in tokens.iter().enumerate().skip(*from) {
            if reference.tokens.get(at) != Some(token) {
                let right = reference.tokens.get(at).map_or("the end".to_owned(), ToString::to_string);
                let session = owner.1;
                return broken(Invariant::Text, format!("session {session}: token {token} at {at}, it is {right}"));
            }
        }
        *from = tokens.len();
        Ok(())
    }

    /// Compares a block that a tail drafted from a position.
    pub(super) fn drafted(&mut self, owner: Owner, at: Position, block: &[TokenId]) -> Result<(), Broken> {
        let Some(right) = self.references.get(&owner).and_then(|reference| reference.block(at)) else { return Ok(()) };
        self.blocks += 1;
        if right.starts_with(block) {
            return Ok(());
        }
        let session = owner.1;
        broken(
            Invariant::Drafts,
            format!("session {session}: {block:?} are drafted from {at}, an unbroken run drafts {right:?}"),
        )
    }

    /// A stage is at a view, and maybe in a place of it.
    pub(super) fn at_view(&mut self, node: Node, view: View, route: Option<Route>) -> Result<(), Broken> {
        let last = self.views.entry(node.start).or_default();
        if view < *last {
            return broken(Invariant::Falls, format!("stage {} falls from view {last} to {view}", node.start));
        }
        *last = view;
        if let Some(route) = route {
            self.joined.insert((node, route.view, route.coordinator), route);
        }
        Ok(())
    }

    /// A session on a stage is at an epoch and a floor.
    pub(super) fn at_floor(
        &mut self,
        (host, view, session): (HostId, View, SessionId),
        now: (Epoch, Position),
    ) -> Result<(), Broken> {
        let last = self.floors.entry((host, view, session)).or_default();
        if now.0 < last.0 || now.1 < last.1 {
            let why = format!("session {session} falls from {last:?} to {now:?} on stage {host} in view {view}");
            return broken(Invariant::Falls, why);
        }
        *last = now;
        Ok(())
    }

    /// A coordinator takes its ring for whole: every member took its place in it.
    pub(super) fn whole(
        &self,
        coordinator: Node,
        view: View,
        ring: &[(Node, u16, u16)],
        layers: u16,
    ) -> Result<(), Broken> {
        let mut at = 0;
        for (place, (node, lo, hi)) in ring.iter().enumerate() {
            if *lo != at {
                return broken(Invariant::Ready, format!("view {view}: layers {at} and {lo} don't meet"));
            }
            at = *hi;
            let predecessor = place.checked_sub(1).map_or(coordinator, |before| ring[before].0);
            let successor = ring.get(place + 1).map(|after| after.0);
            let right = Route { view, coordinator, predecessor, successor, shadows: false };
            if self.joined.get(&(*node, view, coordinator)) != Some(&right) {
                let why =
                    format!("view {view} is whole, and stage {lo}:{hi} (process {}) never took its place", node.start);
                return broken(Invariant::Ready, why);
            }
        }
        if at == layers { Ok(()) } else { broken(Invariant::Ready, format!("view {view} ends at layer {at}")) }
    }
}
