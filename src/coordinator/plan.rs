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
/// Prefers a drafting tail, then fewer stages, then lower peer ids; of several stages with one range,
/// those that did not fail.
///
/// # Errors
/// [`PlanError`] says which layers to add.
pub fn plan(layers: u16, offers: &[Candidate]) -> Result<Vec<Candidate>, PlanError> {
    // best[layer]: the preferred way to cover layer..layers, by (drafts, stages, peer).
    let mut by_range: BTreeMap<(u16, u16), Candidate> = BTreeMap::new();
    for offer in offers {
        let key = (offer.range.lo(), offer.range.hi());
        let better = by_range.get(&key).is_none_or(|held| rank(offer) < rank(held));
        if better {
            by_range.insert(key, *offer);
        }
    }
    let mut best: BTreeMap<u16, (bool, usize, Vec<Candidate>)> = BTreeMap::from([(layers, (true, 0, Vec::new()))]);
    for lo in (0..layers).rev() {
        let ways = by_range.range((lo, 0)..(lo + 1, 0)).filter_map(|(_, offer)| {
            let (drafts, stages, rest) = best.get(&offer.range.hi())?;
            let drafts = if offer.range.hi() == layers { offer.drafts } else { *drafts };
            let mut ring = vec![*offer];
            ring.extend_from_slice(rest);
            Some((drafts, stages + 1, ring))
        });
        if let Some(way) = ways.min_by_key(|(drafts, stages, _)| (!drafts, *stages)) {
            best.insert(lo, way);
        }
    }
    match best.remove(&0) {
        Some((_, _, ring)) => Ok(ring),
        None => Err(why_not(layers, offers)),
    }
}

/// Which of the stages that hold one range goes first: the lower.
fn rank(offer: &Candidate) -> (bool, bool, Node) {
    (offer.faulted, !offer.drafts, offer.peer)
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
        Candidate { peer: Node::random(), range: text.parse().unwrap(), drafts, faulted: false }
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
    fn missing_layers_are_named() {
        let offers = [offer("2:3", false), offer("5:7", true)];
        let error = plan(7, &offers).unwrap_err();
        assert_eq!(error.to_string(), "layers 0:2, 3:5 are missing: start a stage for each");
        let overlap = [offer("0:4", false), offer("3:7", true)];
        assert!(matches!(plan(7, &overlap).unwrap_err(), PlanError::NoTiling { .. }));
    }
}
