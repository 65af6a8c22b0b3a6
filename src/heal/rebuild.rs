//! Which positions each stage computes again: pure.
//!
//! Only what was lost: a stage that holds its state keeps it, and a stage that does not is fed from
//! the journal of the stage in front of it. Where that journal is gone, the stage in front starts
//! anew, too, and is fed in its turn; at the head, the coordinator has the token ids.

use std::ops::Range;

use crate::ids::Position;

/// What one stage of the ring has of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Has {
    /// Its state holds the positions below.
    pub next: Position,
    /// Positions whose results it can send again.
    pub journal: Range<Position>,
}

/// What one stage does. Stages are numbered from 0, the head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The first position that comes to it; 0 also where it has more and drops it.
    pub from: Position,
    /// Its results below are not forwarded: the next stage has them.
    pub forward_from: Position,
    /// Positions of its journal that it sends to the next stage first; may be empty.
    pub replay: Range<Position>,
}

/// The steps of every stage that bring all of them to `history`.
#[must_use]
pub fn plan(stages: &[Has], history: Position) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::with_capacity(stages.len());
    // The first position that the stage behind lacks.
    let mut lacks = history;
    for has in stages.iter().rev() {
        let own = has.next.min(history);
        let covered = has.journal.start <= lacks && own <= has.journal.end;
        let step = if lacks >= own {
            Step { from: own, forward_from: lacks, replay: own..own }
        } else if covered {
            Step { from: own, forward_from: own, replay: lacks..own }
        } else {
            Step { from: Position(0), forward_from: lacks, replay: Position(0)..Position(0) }
        };
        lacks = step.from;
        steps.push(step);
    }
    steps.reverse();
    steps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn has(next: u32, journal: Range<u32>) -> Has {
        Has { next: Position(next), journal: Position(journal.start)..Position(journal.end) }
    }

    /// `from→forward_from replay` of every stage.
    fn planned(stages: &[Has], history: u32) -> Vec<String> {
        let steps = plan(stages, Position(history));
        let tell = |step: Step| {
            let replay = match step.replay.is_empty() {
                true => String::new(),
                false => format!(" replays {}..{}", step.replay.start, step.replay.end),
            };
            format!("{}→{}{replay}", step.from, step.forward_from)
        };
        steps.into_iter().map(tell).collect()
    }

    #[test]
    fn survivors_keep_their_state_and_the_journal_in_front_feeds_the_spare() {
        let alive = has(100, 0..100);
        let (fresh, tail) = (has(0, 0..0), has(100, 0..0));
        assert_eq!(planned(&[alive.clone(), alive.clone(), tail.clone()], 90), ["90→90", "90→90", "90→90"]);
        assert_eq!(planned(&[fresh.clone(), alive.clone(), tail.clone()], 90), ["0→90", "90→90", "90→90"]);
        assert_eq!(
            planned(&[alive.clone(), fresh.clone(), tail], 90),
            ["90→90 replays 0..90", "0→90", "90→90"],
            "a middle"
        );
        assert_eq!(planned(&[alive.clone(), alive.clone(), fresh.clone()], 90)[1], "90→90 replays 0..90", "a tail");
        assert_eq!(
            planned(&[alive, fresh.clone(), fresh], 90),
            ["90→90 replays 0..90", "0→0", "0→90"],
            "two neighbours: outputs go on inside the run"
        );
    }

    #[test]
    fn without_a_journal_the_history_is_computed_from_the_head_on() {
        let gone = has(100, 40..100);
        let (fresh, tail) = (has(0, 0..0), has(100, 0..0));
        assert_eq!(
            planned(&[has(100, 0..100), gone.clone(), fresh.clone()], 90),
            ["90→90 replays 0..90", "0→0", "0→90"]
        );
        assert_eq!(planned(&[gone, fresh, tail], 90), ["0→0", "0→90", "90→90"]);
    }

    #[test]
    fn a_rebuild_that_was_broken_off_goes_on_where_it_was() {
        let (alive, half) = (has(100, 0..100), has(40, 0..40));
        assert_eq!(planned(&[alive, half, has(100, 0..0)], 90), ["90→90 replays 40..90", "40→90", "90→90"]);
    }

    #[test]
    fn a_broken_prefill_goes_on_with_what_each_stage_has() {
        let stages = [has(64, 0..64), has(32, 0..32), has(0, 0..0)];
        assert_eq!(planned(&stages, 64), ["64→64 replays 32..64", "32→32 replays 0..32", "0→64"]);
    }

    proptest! {
        /// Whatever is there, every stage gets every position once and in order.
        #[test]
        fn every_stage_comes_to_the_history_without_a_hole(
            stages in prop::collection::vec((0_u32..40, 0_u32..40), 1..6),
            history in 1_u32..40,
        ) {
            let stages: Vec<Has> =
                stages.into_iter().map(|(next, from)| has(next, from.min(next)..next)).collect();
            let steps = plan(&stages, Position(history));
            for (stage, step) in stages.iter().zip(&steps) {
                prop_assert!(step.from <= Position(history));
                prop_assert!(step.from == stage.next.min(Position(history)) || step.from == Position(0));
            }
            for (i, pair) in steps.windows(2).enumerate() {
                let (front, behind) = (&pair[0], &pair[1]);
                // From the journal up to where the stage in front computes, then what it computes.
                match front.replay.is_empty() {
                    true => prop_assert!(front.from <= behind.from),
                    false => {
                        prop_assert_eq!(&front.replay, &(behind.from..front.from));
                        prop_assert!(stages[i].journal.start <= behind.from && front.from <= stages[i].journal.end);
                    }
                }
                prop_assert_eq!(front.forward_from, behind.from.max(front.from));
            }
            prop_assert_eq!(steps.last().unwrap().forward_from, Position(history));
        }
    }
}
