//! Which stages outside the ring shadow which members.
//!
//! They are paired on the whole ring, in its view: a shadow comes and goes without a new one.

use std::collections::BTreeMap;

use crate::coordinator::ring::{Member, Output, Ring, State};
use crate::ids::Node;
use crate::proto::control::Control;

impl Ring {
    /// Whom a stage shadows in the whole ring.
    #[must_use]
    pub fn shadow_of(&self, peer: Node) -> Option<Node> {
        self.pairs().find(|(shadow, _)| *shadow == peer).map(|(_, of)| of)
    }

    /// Who shadows a member of the whole ring.
    #[must_use]
    pub fn shadowed_by(&self, peer: Node) -> Option<Node> {
        self.pairs().find(|(_, of)| *of == peer).map(|(shadow, _)| shadow)
    }

    /// Shadows of the whole ring, each with the member that it shadows.
    pub fn pairs(&self) -> impl Iterator<Item = (Node, Node)> {
        let whole = matches!(self.state, State::Whole { .. });
        self.shadows.iter().filter(move |_| whole).map(|(shadow, of)| (*shadow, *of))
    }

    /// A view is whole: its stages know of no shadow yet.
    pub(super) fn pair_anew(&mut self) {
        let before = std::mem::take(&mut self.shadows);
        let State::Whole { ring } = &self.state else { return };
        let idle = before.keys().copied().filter(|shadow| !ring.contains(shadow)).collect::<Vec<_>>();
        self.shadows = self.chosen(&before);
        for (shadow, of) in self.shadows.clone() {
            self.begin(shadow, of);
        }
        for shadow in idle {
            self.end(shadow);
        }
    }

    /// Stages came or went: fills the gaps and keeps the pairs that hold.
    pub(super) fn pair(&mut self) {
        if !matches!(self.state, State::Whole { .. }) {
            return;
        }
        let chosen = self.chosen(&self.shadows);
        let before = std::mem::replace(&mut self.shadows, chosen);
        for (shadow, of) in &before {
            if self.shadows.get(shadow) != Some(of) {
                if !self.shadows.values().any(|still| still == of) {
                    self.copy(*of, None);
                }
                self.end(*shadow);
            }
        }
        for (shadow, of) in self.shadows.clone() {
            if before.get(&shadow) != Some(&of) {
                self.begin(shadow, of);
            }
        }
    }

    /// One shadow a member at most: the one it has, else the one with the lowest name.
    fn chosen(&self, before: &BTreeMap<Node, Node>) -> BTreeMap<Node, Node> {
        let State::Whole { ring } = &self.state else { return BTreeMap::new() };
        let pair = |of: &Node| {
            let range = self.members.get(of)?.offer.range;
            let fits = |member: &&Member| {
                let offer = &member.offer;
                offer.spare && offer.shadow && offer.range == range && !member.draining && member.failed == 0
            };
            let outside = self.members.values().filter(|member| !ring.contains(&member.peer)).filter(fits);
            let shadow = outside.map(|member| member.peer).min_by_key(|peer| (before.get(peer) != Some(of), *peer))?;
            Some((shadow, *of))
        };
        ring.iter().filter_map(pair).collect()
    }

    fn begin(&mut self, peer: Node, of: Node) {
        // The coordinator says of itself who it is: a head's shadow gets copies from there.
        let source = self.in_front(of).unwrap_or(self.local);
        let message = Control::Shadow { view: self.view, source: Some(source) };
        self.outputs.push_back(Output::Send { to: peer, message });
        self.copy(of, Some(peer));
        self.outputs.push_back(Output::Shadow { peer, of });
    }

    fn end(&mut self, shadow: Node) {
        if self.members.contains_key(&shadow) && !self.shadows.contains_key(&shadow) {
            let message = Control::Shadow { view: self.view, source: None };
            self.outputs.push_back(Output::Send { to: shadow, message });
        }
    }

    /// Tells the stage in front of a member to whom it sends copies.
    fn copy(&mut self, of: Node, shadow: Option<Node>) {
        let Some(to) = self.in_front(of) else { return };
        let to_whom = shadow.and_then(|shadow| self.members.get(&shadow)).map(Member::neighbour);
        let message = Control::Copy { view: self.view, to: to_whom };
        self.outputs.push_back(Output::Send { to, message });
    }

    fn in_front(&self, of: Node) -> Option<Node> {
        let State::Whole { ring } = &self.state else { return None };
        let at = ring.iter().position(|peer| *peer == of)?;
        ring.get(at.checked_sub(1)?).copied()
    }
}
