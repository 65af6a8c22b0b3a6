//! Which offers tile the layers: pure.
//!
//! Owns the choice of a ring; the same offers give the same ring in any order.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{LayerRange, Node};

/// What planning looks at of an offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Who.
    pub peer: Node,
    /// Layers held.
    pub range: LayerRange,
    /// Whether it holds the drafter.
    pub drafts: bool,
    /// Whether it failed a ring or is late: others of its range go first.
    pub faulted: bool,
    /// Which failure of all was its last, counted from 1; 0: none. Of several that failed, the one that did
    /// so the longest ago goes first.
    pub failed: u64,
    /// Whether it was in the ring before: it keeps its place.
    pub incumbent: bool,
    /// Whether it only replaces other stages of its range.
    pub spare: bool,
    /// Whether it was the shadow of one of its range: it has that one's state.
    pub shadow: bool,
}

/// The offers leave layers uncovered, or cut them so that no tiling exists.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Nobody holds these layers.
    #[error("layers {} are missing: start a stage for each", list(.ranges))]
    Missing {
        /// Runs of layers that no offer covers, ascending.
        ranges: Vec<LayerRange>,
    },
    /// Every layer is held, but no selection covers each exactly once.
    #[error("the offered ranges {} hold every layer but don't tile: start stages whose ranges meet end to end", list(.offered))]
    NoTiling {
        /// The ranges offered, ascending.
        offered: Vec<LayerRange>,
    },
}

fn list(ranges: &[LayerRange]) -> String {
    ranges.iter().map(LayerRange::to_string).collect::<Vec<_>>().join(", ")
}

/// Chooses stages that cover `0..layers` exactly once, in ring order.
///
/// Prefers a drafting tail, then the fewest stages that failed, the fewest layers held by stages that are
/// new to the ring, the fewest spares, the fewest stages, and lower peer ids.
///
/// # Errors
/// [`PlanError`] says which layers to add.
pub fn plan(layers: u16, offers: &[Candidate]) -> Result<Vec<Candidate>, PlanError> {
    // The preferred stage of each range, then the preferred way to cover layer..layers.
    let mut by_range: BTreeMap<(u16, u16), Candidate> = BTreeMap::new();
    for offer in offers {
        let key = (offer.range.lo(), offer.range.hi());
        let better = by_range.get(&key).is_none_or(|held| rank(offer) < rank(held));
        if better {
            by_range.insert(key, *offer);
        }
    }
    let mut best: BTreeMap<u16, Cover> = BTreeMap::from([(layers, Cover { drafts: true, ring: Vec::new() })]);
    for lo in (0..layers).rev() {
        let ways = by_range.range((lo, 0)..(lo + 1, 0)).filter_map(|(_, offer)| {
            let rest = best.get(&offer.range.hi())?;
            let drafts = if offer.range.hi() == layers { offer.drafts } else { rest.drafts };
            let ring = std::iter::once(*offer).chain(rest.ring.iter().copied()).collect();
            Some(Cover { drafts, ring })
        });
        if let Some(way) = ways.min_by_key(Cover::cost) {
            best.insert(lo, way);
        }
    }
    match best.remove(&0) {
        Some(cover) => Ok(cover.ring),
        None => Err(why_not(layers, offers)),
    }
}

/// Which of the stages that hold one range goes first: the lower.
fn rank(offer: &Candidate) -> (bool, u64, bool, bool, bool, bool, Node) {
    let Candidate { faulted, failed, drafts, incumbent, shadow, spare, peer, .. } = *offer;
    (faulted, failed, !drafts, !incumbent, !shadow, spare, peer)
}

/// A way to cover the layers from one on.
struct Cover {
    /// Whether its tail drafts.
    drafts: bool,
    ring: Vec<Candidate>,
}

impl Cover {
    /// The lower, the better.
    fn cost(&self) -> (bool, usize, usize, usize, usize) {
        let faulted = self.ring.iter().filter(|offer| offer.faulted).count();
        let new = self.ring.iter().filter(|offer| !offer.incumbent);
        let moved = new.map(|offer| usize::from(offer.range.hi() - offer.range.lo())).sum();
        // A spare that has a place already keeps it.
        let spares = self.ring.iter().filter(|offer| offer.spare && !offer.incumbent).count();
        (!self.drafts, faulted, moved, spares, self.ring.len())
    }
}

fn why_not(layers: u16, offers: &[Candidate]) -> PlanError {
    let mut ranges = Vec::new();
    let mut lo = None;
    for layer in 0..=layers {
        let missing = layer < layers && !offers.iter().any(|offer| offer.range.contains(layer));
        match (missing, lo) {
            (true, None) => lo = Some(layer),
            (false, Some(from)) => {
                ranges.extend(LayerRange::new(from, layer));
                lo = None;
            }
            (true, Some(_)) | (false, None) => {}
        }
    }
    if ranges.is_empty() {
        let offered: BTreeSet<LayerRange> = offers.iter().map(|offer| offer.range).collect();
        PlanError::NoTiling { offered: offered.into_iter().collect() }
    } else {
        PlanError::Missing { ranges }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(text: &str, drafts: bool) -> Candidate {
        Candidate {
            peer: Node::random(),
            range: text.parse().unwrap(),
            drafts,
            faulted: false,
            failed: 0,
            incumbent: false,
            spare: false,
            shadow: false,
        }
    }

    fn ranges(ring: &[Candidate]) -> Vec<String> {
        ring.iter().map(|member| member.range.to_string()).collect()
    }

    #[test]
    fn every_layer_is_covered_exactly_once() {
        let offers = [offer("3:5", false), offer("0:3", false), offer("2:5", false), offer("5:7", true)];
        assert_eq!(ranges(&plan(7, &offers).unwrap()), ["0:3", "3:5", "5:7"]);
    }

    #[test]
    fn a_drafting_tail_beats_fewer_stages() {
        let offers = [offer("0:3", false), offer("3:7", false), offer("3:4", false), offer("4:7", true)];
        assert_eq!(ranges(&plan(7, &offers).unwrap()), ["0:3", "3:4", "4:7"]);
    }

    #[test]
    fn the_order_of_offers_does_not_matter() {
        let mut offers = vec![offer("0:4", false), offer("0:4", false), offer("4:7", true), offer("4:7", true)];
        let ring = plan(7, &offers).unwrap();
        offers.reverse();
        assert_eq!(plan(7, &offers).unwrap(), ring);
    }

    #[test]
    fn a_stage_that_failed_is_the_last_choice() {
        let failed = Candidate { faulted: true, ..offer("3:7", true) };
        let plain = offer("3:7", false);
        let head = offer("0:3", false);
        assert_eq!(plan(7, &[head, failed, plain]).unwrap(), [head, plain]);
        assert_eq!(plan(7, &[head, failed]).unwrap(), [head, failed]);
    }

    #[test]
    fn where_all_failed_they_take_turns() {
        let failed = |at| Candidate { faulted: true, failed: at, ..offer("3:7", true) };
        let (head, before, last) = (offer("0:3", false), failed(1), Candidate { incumbent: true, ..failed(2) });
        assert_eq!(plan(7, &[head, last, before]).unwrap(), [head, before]);
    }

    #[test]
    fn who_is_in_the_ring_stays_in_it() {
        let kept = |text| Candidate { incumbent: true, ..offer(text, false) };
        let (head, tail) = (kept("0:2"), kept("4:7"));
        let offers = [offer("0:2", false), head, offer("2:4", false), offer("0:4", false), tail];
        let ring = plan(7, &offers).unwrap();
        assert_eq!((ranges(&ring), ring[0], ring[2]), (vec!["0:2".into(), "2:4".into(), "4:7".into()], head, tail));
    }

    #[test]
    fn a_spare_replaces_and_does_nothing_else() {
        let spare = |text, drafts| Candidate { spare: true, ..offer(text, drafts) };
        let (head, tail) = (offer("0:3", false), offer("3:7", true));
        let spares = [spare("0:3", false), spare("3:7", true), spare("0:7", true)];
        let offers: Vec<Candidate> = spares.iter().copied().chain([head, tail]).collect();
        assert_eq!(plan(7, &offers).unwrap(), [head, tail]);
        let kept = Candidate { incumbent: true, ..tail };
        let failed = Candidate { faulted: true, incumbent: true, ..head };
        assert_eq!(plan(7, &[failed, spares[0], kept]).unwrap(), [spares[0], kept]);
        let shadow = Candidate { shadow: true, ..spares[0] };
        for waits in [Candidate { peer: Node::random(), ..shadow }, shadow] {
            let offers = [spare("0:3", false), offer("0:3", false), waits, spare("0:3", false), tail];
            assert_eq!(plan(7, &offers).unwrap(), [waits, tail], "a shadow has the state");
        }
        let placed = Candidate { incumbent: true, ..spares[0] };
        assert_eq!(plan(7, &[head, placed, kept]).unwrap(), [placed, kept], "it keeps the place that it took");
        assert_eq!(plan(7, &[spares[0], tail]).unwrap(), [spares[0], tail]);
    }

    #[test]
    fn missing_layers_are_named() {
        let offers = [offer("2:3", false), offer("5:7", true)];
        let error = plan(7, &offers).unwrap_err();
        assert_eq!(error.to_string(), "layers 0:2, 3:5 are missing: start a stage for each");
        let overlap = [offer("0:4", false), offer("3:7", true)];
        assert!(matches!(plan(7, &overlap).unwrap_err(), PlanError::NoTiling { .. }));
    }
}
