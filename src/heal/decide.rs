//! Who is to blame for what was seen of a ring, and which ring comes next: pure.
//!
//! Whatever breaks a ring comes through [`decide`]: a connection that ended, a stage that fell silent,
//! a hop that a neighbour lost, a reply that is overdue. A stage that is merely slow breaks nothing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::heal::localize::{blame, moves};
use crate::heal::tiling::{Candidate, plan};
use crate::ids::{LayerRange, Node, SessionId};
use crate::proto::control::StageReport;

/// A ring and who could be in the next one.
#[derive(Debug, Clone, Copy)]
pub struct RingView<'a> {
    /// Layers of the model.
    pub layers: u16,
    /// The stages of the view, head first; empty where none is joined.
    pub ring: &'a [(Node, LayerRange)],
    /// Every stage that offers itself and is not on its way out, spares among them.
    pub candidates: &'a [Candidate],
}

/// What was seen.
#[derive(Debug, Clone, Copy)]
pub enum Evidence<'a> {
    /// The connection to a stage ended, or it gave no sign of life for too long: it is a candidate no more.
    Gone {
        /// The stage.
        peer: Node,
        /// What was seen.
        why: &'a str,
    },
    /// A stage answers, and does not do its part: a neighbour lost it, it takes no frames, it holds up a
    /// rebuild. It stays a candidate, behind all others of its range.
    Fault {
        /// The stage.
        peer: Node,
        /// What was seen.
        why: &'a str,
    },
    /// A stage can't reach the one behind it.
    Unreachable {
        /// The stage that tells it.
        from: Node,
    },
    /// A reply is overdue, and all stages were asked at once how far the frames came.
    Overdue {
        /// Of which session.
        session: SessionId,
        /// Frames that the coordinator sent into the head.
        sent: u64,
        /// For how long there was no reply.
        waited: Duration,
        /// What the stages that answered in time said.
        reports: &'a BTreeMap<Node, StageReport>,
        /// What they said a while ago, where they were asked before.
        before: Option<&'a BTreeMap<Node, StageReport>>,
        /// How often it was overdue since its last reply, and nobody was to blame.
        excused: u32,
    },
}

/// What is fixed about decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Pause before a ring with a stage that failed is tried again.
    pub retry_after: Duration,
    /// Pause before stages that answer are asked again whether they move.
    pub look_after: Duration,
    /// So often a ring that moves is excused for what it does not answer.
    pub excuses_max: u32,
}

/// A stage that is to blame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Which.
    pub peer: Node,
    /// Its layers.
    pub range: LayerRange,
    /// What was seen, for an operator.
    pub why: String,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// The ring goes on: it was no member, or nothing can be blamed.
    GoOn,
    /// The stages are asked again at this time: one may be slow, and that breaks nothing.
    AskAgain(Instant),
    /// This ring is joined at once, head first.
    Join(Vec<Node>),
    /// The ring is broken; at this time another one is tried.
    Retry(Instant),
    /// The ring is broken, and layers are missing: it is tried when a stage offers itself.
    Wait {
        /// What is missing.
        why: String,
    },
}

/// Whom a break costs its place, and the ring after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The stage to blame, if one is.
    pub lost: Option<Lost>,
    /// What comes next.
    pub next: Next,
}

/// Decides on one piece of evidence about the present ring.
#[must_use]
pub fn decide(view: &RingView<'_>, evidence: &Evidence<'_>, policy: &Policy, now: Instant) -> Decision {
    match *evidence {
        Evidence::Gone { peer, why } => {
            let left: Vec<Candidate> = view.candidates.iter().filter(|other| other.peer != peer).copied().collect();
            let next = |view: &RingView<'_>| match plan(view.layers, &left) {
                Ok(ring) => Next::Join(ring.iter().map(|member| member.peer).collect()),
                Err(error) => Next::Wait { why: error.to_string() },
            };
            broken(view, peer, why.to_owned(), next)
        }
        Evidence::Fault { peer, why } => fault(view, peer, why.to_owned(), policy, now),
        Evidence::Unreachable { from } => {
            let at = view.ring.iter().position(|(peer, _)| *peer == from);
            let behind = at.and_then(|at| view.ring.get(at + 1)).map(|(peer, _)| *peer);
            // The one behind loses its place first; once that was in vain, the one that can't reach it; then
            // they take turns.
            let order = |peer: &Node| {
                let other = view.candidates.iter().find(|other| other.peer == *peer);
                other.map_or((false, 0), |other| (other.faulted, other.failed))
            };
            let peer = behind.into_iter().chain([from]).min_by_key(order).unwrap_or(from);
            fault(view, peer, "a hop to it or from it can't be made".to_owned(), policy, now)
        }
        Evidence::Overdue { session, sent, waited, reports, before, excused } => {
            let waited = waited.as_millis();
            let (peer, why, answers) = match (blame(view.ring, reports, session, sent), view.ring.last()) {
                (Some(blame), _) => (blame.peer, format!("no reply for {waited} ms; {}", blame.why), blame.answers),
                // Every stage forwarded what it received: the reply itself was lost.
                (None, Some((tail, _))) => {
                    (*tail, format!("no reply for {waited} ms; every stage passed on what it received"), true)
                }
                (None, None) => return Decision { lost: None, next: Next::GoOn },
            };
            if answers && excused < policy.excuses_max {
                let Some(before) = before else {
                    return Decision { lost: None, next: Next::AskAgain(now + policy.look_after) };
                };
                if before.get(&peer).zip(reports.get(&peer)).is_some_and(|(before, after)| moves(before, after)) {
                    return Decision { lost: None, next: Next::GoOn };
                }
            }
            fault(view, peer, why, policy, now)
        }
    }
}

/// A stage that answers loses its place: to another at once, or after a pause it is tried again.
fn fault(view: &RingView<'_>, peer: Node, why: String, policy: &Policy, now: Instant) -> Decision {
    let mut candidates = view.candidates.to_vec();
    for candidate in candidates.iter_mut().filter(|candidate| candidate.peer == peer) {
        (candidate.faulted, candidate.failed) = (true, u64::MAX);
    }
    broken(view, peer, why, |view| match plan(view.layers, &candidates) {
        Ok(ring) if ring.iter().all(|member| !member.faulted) => {
            Next::Join(ring.iter().map(|member| member.peer).collect())
        }
        Ok(_) | Err(_) => Next::Retry(now + policy.retry_after),
    })
}

/// A loss breaks only the ring that it is a part of.
fn broken(view: &RingView<'_>, peer: Node, why: String, next: impl FnOnce(&RingView<'_>) -> Next) -> Decision {
    let Some((peer, range)) = view.ring.iter().find(|(member, _)| *member == peer).copied() else {
        return Decision { lost: None, next: Next::GoOn };
    };
    Decision { lost: Some(Lost { peer, range, why }), next: next(view) }
}

#[cfg(test)]
mod tests;
