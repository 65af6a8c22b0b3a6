//! Which stage a missing reply is to be blamed on: pure.

use std::collections::BTreeMap;

use crate::ids::{LayerRange, Node, SessionId};
use crate::proto::control::StageReport;

/// A stage and what was seen of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blame {
    /// Who.
    pub peer: Node,
    /// Its layers.
    pub range: LayerRange,
    /// What was seen.
    pub why: String,
    /// It answers: it may be slow, or what it lacks may still be on its way.
    pub answers: bool,
}

/// Whether a stage takes in, computes or passes on frames of any session: two reports, the older first.
#[must_use]
pub fn moves(before: &StageReport, after: &StageReport) -> bool {
    after.sessions.iter().any(|now| {
        let then = before.sessions.iter().find(|then| then.session == now.session);
        then.is_none_or(|then| {
            now.received > then.received || now.computed > then.computed || now.forwarded > then.forwarded
        })
    })
}

/// Finds the stage at which a session's frames stop, from one report per stage taken at once.
///
/// In ring order, the first that does not answer; else the first that received less than the stage
/// before it forwarded; else the first that received more than it computed and dropped. `None` where every stage forwarded what it received: the reply itself was lost.
#[must_use]
pub fn blame(
    ring: &[(Node, LayerRange)],
    reports: &BTreeMap<Node, StageReport>,
    session: SessionId,
    sent: u64,
) -> Option<Blame> {
    for (peer, range) in ring {
        if !reports.contains_key(peer) {
            return Some(Blame {
                peer: *peer,
                range: *range,
                why: "it does not answer a probe".to_owned(),
                answers: false,
            });
        }
    }
    let mut forwarded = sent;
    for (peer, range) in ring {
        let report = reports.get(peer)?.sessions.iter().find(|report| report.session == session);
        let Some(report) = report else {
            return Some(Blame {
                peer: *peer,
                range: *range,
                why: "it does not know the session".to_owned(),
                answers: true,
            });
        };
        let why = if report.received < forwarded {
            format!("{forwarded} frames were sent to it, it received {}", report.received)
        } else if report.computed + report.dropped < report.received {
            format!(
                "it received {} frames, computed {} and dropped {}",
                report.received, report.computed, report.dropped
            )
        } else {
            forwarded = report.forwarded;
            continue;
        };
        return Some(Blame { peer: *peer, range: *range, why, answers: true });
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::control::SessionReport;

    fn ring() -> Vec<(Node, LayerRange)> {
        ["0:3", "3:5", "5:7"].iter().map(|range| (Node::random(), range.parse().unwrap())).collect()
    }

    fn report(received: u64, computed: u64, forwarded: u64) -> StageReport {
        let session =
            SessionReport { session: SessionId(1), received, computed, forwarded, ..SessionReport::default() };
        StageReport { sessions: vec![session], ..StageReport::default() }
    }

    fn blamed(counts: [Option<(u64, u64, u64)>; 3]) -> Option<(String, String)> {
        let ring = ring();
        let reports = ring
            .iter()
            .zip(counts)
            .filter_map(|((peer, _), counts)| counts.map(|(r, c, f)| (*peer, report(r, c, f))))
            .collect();
        blame(&ring, &reports, SessionId(1), 5).map(|blame| (blame.range.to_string(), blame.why))
    }

    #[test]
    fn the_first_gap_in_ring_order_is_blamed() {
        let all = Some((5, 5, 5));
        assert_eq!(blamed([all, all, all]), None);
        let (range, why) = blamed([all, None, Some((4, 4, 4))]).unwrap();
        assert_eq!((range.as_str(), why.as_str()), ("3:5", "it does not answer a probe"));
        assert_eq!(blamed([Some((4, 4, 4)), all, all]).unwrap().0, "0:3");
        assert_eq!(blamed([all, Some((5, 3, 3)), Some((3, 3, 3))]).unwrap().0, "3:5");
        assert_eq!(blamed([all, all, Some((2, 2, 2))]).unwrap().0, "5:7");
    }
}
