//! The part of the membership for shadows: whose copies a stage outside the ring takes, and to whom a
//! member sends them. Neither is ever the coordinator's to know when it fails.

use std::time::{Duration, Instant};

use crate::ids::{Node, View};
use crate::node::membership::{Membership, Output, Route};
use crate::proto::control::Neighbour;

/// Pause before a shadow that can't be reached is dialled again.
const DIAL_PAUSE: Duration = Duration::from_secs(1);

impl Membership {
    /// A coordinator asks this stage, outside its ring, to be a shadow in its view.
    pub fn handle_shadow(&mut self, from: Node, view: View, source: Option<Node>) {
        let holds = |route: Route| !route.shadows && (route.coordinator != from || route.view >= view);
        let in_ring = self.route.is_some_and(holds);
        let joins = self.joining.as_ref().is_some_and(|joining| joining.route.view >= view);
        if !self.allows(from) || self.refusal_of_former(from, None).is_some() || view < self.view || in_ring || joins {
            return tracing::debug!(%from, %view, "this stage does not become a shadow");
        }
        self.joining = None;
        let Some(predecessor) = source else {
            if self.route.take_if(|route| route.coordinator == from).is_some() {
                self.copies_to = None;
                self.mends.clear();
                self.outputs.push_back(Output::Route(None));
            }
            return;
        };
        self.follow(from, view);
        let route = Route { view, coordinator: from, predecessor, successor: None, shadows: true };
        self.route = Some(route);
        self.outputs.push_back(Output::Route(Some(route)));
    }

    /// The coordinator says to whom copies go in its view.
    pub fn handle_copy(&mut self, from: Node, view: View, to: Option<Neighbour>, now: Instant) {
        let current = |route: &Route| route.coordinator == from && route.view == view && !route.shadows;
        if !self.route.as_ref().is_some_and(current) {
            return tracing::debug!(%from, %view, "copies of another view are not begun");
        }
        self.outputs.push_back(Output::Copy(to.as_ref().map(|to| to.peer)));
        self.copies_to = to.map(|to| {
            let dial_at = (!self.greeted.contains(&to.peer)).then_some(now);
            (to, dial_at)
        });
        self.dial_shadow(now);
    }

    /// Whether copies go to this peer in this view.
    #[must_use]
    pub fn copies_to(&self, peer: Node, view: View) -> bool {
        self.route.is_some_and(|route| route.view == view)
            && self.copies_to.as_ref().is_some_and(|(to, _)| to.peer == peer)
    }

    pub(super) fn dial_shadow(&mut self, now: Instant) {
        let Some((to, dial_at)) = &mut self.copies_to else { return };
        if dial_at.take_if(|at| *at <= now).is_some() {
            self.outputs.push_back(Output::Dial { peer: to.peer, addresses: to.addresses.clone() });
        }
    }

    /// A peer is gone or can't be reached: if it is the shadow, it is dialled again later.
    pub(super) fn lost_shadow(&mut self, peer: Node, now: Instant) {
        if let Some((_, dial_at)) = self.copies_to.as_mut().filter(|(to, _)| to.peer == peer) {
            *dial_at = Some(now + DIAL_PAUSE);
        }
    }
}
