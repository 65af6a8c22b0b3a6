//! Every fault at every place of a ring, and what is decided.

use super::*;
use crate::proto::control::SessionReport;

const SESSION: SessionId = SessionId(7);
const POLICY: Policy =
    Policy { retry_after: Duration::from_secs(1), look_after: Duration::from_secs(2), excuses_max: 3 };

/// A ring `0:2 2:4 4:7` with a spare for each place or none.
struct Case {
    ring: Vec<(Node, LayerRange)>,
    candidates: Vec<Candidate>,
}

impl Case {
    fn new(spares: bool) -> Self {
        let ranges: Vec<LayerRange> = ["0:2", "2:4", "4:7"].iter().map(|range| range.parse().unwrap()).collect();
        let node = |at: usize| {
            let mut node = Node::random();
            node.start = at as u64;
            node
        };
        let ring: Vec<(Node, LayerRange)> = ranges.iter().enumerate().map(|(at, range)| (node(at), *range)).collect();
        let candidate = |peer, range: LayerRange, spare: bool| Candidate {
            peer,
            range,
            drafts: range.hi() == 7,
            faulted: false,
            failed: 0,
            incumbent: !spare,
            spare,
            shadow: false,
        };
        let mut candidates: Vec<Candidate> = ring.iter().map(|(peer, range)| candidate(*peer, *range, false)).collect();
        if spares {
            candidates.extend(ranges.iter().enumerate().map(|(at, range)| candidate(node(10 + at), *range, true)));
        }
        Self { ring, candidates }
    }

    /// `LOST → NEXT`: numbers of stages by place, spares from 10 on.
    fn decided(&self, evidence: &Evidence<'_>, now: Instant) -> String {
        let view = RingView { layers: 7, ring: &self.ring, candidates: &self.candidates };
        let Decision { lost, next } = decide(&view, evidence, &POLICY, now);
        let lost = lost.map_or_else(|| "nobody".to_owned(), |lost| format!("{} ({})", lost.peer.start, lost.why));
        let next = match next {
            Next::GoOn => "goes on".to_owned(),
            Next::AskAgain(at) => format!("asks again in {:?}", at - now),
            Next::Join(ring) => {
                format!("joins {:?}", ring.iter().map(|peer| peer.start).collect::<Vec<_>>())
            }
            Next::Retry(at) => format!("retries in {:?}", at - now),
            Next::Wait { why } => why,
        };
        format!("{lost} → {next}")
    }

    fn peer(&self, place: usize) -> Node {
        self.ring[place].0
    }
}

fn report(received: u64, computed: u64, forwarded: u64) -> StageReport {
    let session = SessionReport { session: SESSION, received, computed, forwarded, ..SessionReport::default() };
    StageReport { sessions: vec![session], ..StageReport::default() }
}

/// What each stage of a ring has received, computed and forwarded; `None`: it does not answer.
type Answers = [Option<(u64, u64, u64)>; 3];

/// What is decided where the stages answer so, and answered so before.
fn overdue_after(case: &Case, before: Option<Answers>, answers: Answers, excused: u32) -> String {
    let reports = |answers: Answers| -> BTreeMap<Node, StageReport> {
        let some = case.ring.iter().zip(answers);
        some.filter_map(|((peer, _), answer)| answer.map(|(r, c, f)| (*peer, report(r, c, f)))).collect()
    };
    let (before, reports) = (before.map(reports), reports(answers));
    let waited = Duration::from_millis(20_000);
    let evidence =
        Evidence::Overdue { session: SESSION, sent: 5, waited, reports: &reports, before: before.as_ref(), excused };
    case.decided(&evidence, crate::clock::now())
}

/// What is decided where the stages answered the same before.
fn overdue(case: &Case, answers: Answers) -> String {
    overdue_after(case, Some(answers), answers, 0)
}

#[test]
fn stages_that_answer_are_asked_again_and_one_that_moves_is_excused_for_a_while() {
    let case = Case::new(true);
    let all = Some((5, 5, 5));
    let (then, now) = ([all, Some((5, 2, 2)), Some((2, 2, 2))], [all, Some((5, 3, 3)), Some((3, 3, 3))]);
    assert_eq!(overdue_after(&case, None, now, 0), "nobody → asks again in 2s");
    assert_eq!(overdue_after(&case, Some(then), now, 2), "nobody → goes on");
    let late = "no reply for 20000 ms;";
    let blamed = format!("1 ({late} it received 5 frames, computed 3 and dropped 0) → joins [0, 11, 2]");
    assert_eq!(overdue_after(&case, Some(now), now, 0), blamed, "it stands still");
    assert_eq!(overdue_after(&case, Some(then), now, 3), blamed, "it moves, and not for this session");
    // What does not answer is not asked again.
    let silent = format!("1 ({late} it does not answer a probe) → joins [0, 11, 2]");
    assert_eq!(overdue_after(&case, None, [all, None, all], 0), silent);
    // A gap may be on its way; a reply too.
    let gap = |count| [all, all, Some((count, count, count))];
    assert_eq!(overdue_after(&case, Some(gap(3)), gap(4), 0), "nobody → goes on");
    assert_eq!(overdue_after(&case, Some([all, all, Some((5, 4, 4))]), [all, all, all], 0), "nobody → goes on");
}

#[test]
fn a_killed_or_frozen_stage_is_replaced_wherever_it_was() {
    let (with, without, now) = (Case::new(true), Case::new(false), crate::clock::now());
    // A kill ends the connection, a freeze ends the signs of life: both are gone.
    let gone = |case: &Case, place| case.decided(&Evidence::Gone { peer: case.peer(place), why: "gone" }, now);
    assert_eq!(gone(&with, 0), "0 (gone) → joins [10, 1, 2]");
    assert_eq!(gone(&with, 1), "1 (gone) → joins [0, 11, 2]");
    assert_eq!(gone(&with, 2), "2 (gone) → joins [0, 1, 12]");
    assert_eq!(gone(&without, 0), "0 (gone) → layers 0:2 are missing: start a stage for each");
    assert_eq!(gone(&without, 1), "1 (gone) → layers 2:4 are missing: start a stage for each");
    assert_eq!(gone(&without, 2), "2 (gone) → layers 4:7 are missing: start a stage for each");
}

#[test]
fn a_spare_that_is_gone_or_faulty_breaks_nothing() {
    let (case, now) = (Case::new(true), crate::clock::now());
    let spare = case.candidates[4].peer;
    assert_eq!(case.decided(&Evidence::Gone { peer: spare, why: "gone" }, now), "nobody → goes on");
    assert_eq!(case.decided(&Evidence::Fault { peer: spare, why: "odd" }, now), "nobody → goes on");
}

#[test]
fn a_cut_hop_costs_the_stage_behind_it_its_place_and_then_the_one_in_front() {
    let (mut case, now) = (Case::new(true), crate::clock::now());
    // In a view in force, the stage that can't send tells whom it lost.
    let lost = Evidence::Fault { peer: case.peer(1), why: "a neighbour lost it: timed out" };
    assert_eq!(case.decided(&lost, now), "1 (a neighbour lost it: timed out) → joins [0, 11, 2]");
    // While one forms, the stage that can't reach its successor tells that.
    let from = case.peer(0);
    let unreachable = Evidence::Unreachable { from };
    assert_eq!(case.decided(&unreachable, now), "1 (a hop to it or from it can't be made) → joins [0, 11, 2]");
    case.candidates[1].faulted = true;
    assert_eq!(case.decided(&unreachable, now), "0 (a hop to it or from it can't be made) → joins [10, 11, 2]");
    // Where nobody is left who did not fail, they take turns.
    for (at, candidate) in case.candidates.iter_mut().enumerate() {
        (candidate.faulted, candidate.failed) = (true, [2, 1, 3, 4, 5, 6][at]);
    }
    assert_eq!(case.decided(&unreachable, now), "1 (a hop to it or from it can't be made) → retries in 1s");
    case.candidates[1].failed = 7;
    assert_eq!(case.decided(&unreachable, now), "0 (a hop to it or from it can't be made) → retries in 1s");
}

#[test]
fn without_another_stage_for_its_layers_a_faulty_one_is_tried_again_after_a_pause() {
    let (case, now) = (Case::new(false), crate::clock::now());
    for place in 0..3 {
        let evidence = Evidence::Fault { peer: case.peer(place), why: "it takes no frames" };
        assert_eq!(case.decided(&evidence, now), format!("{place} (it takes no frames) → retries in 1s"));
    }
}

#[test]
fn a_stage_that_answers_and_moves_no_frames_is_found_by_the_first_gap() {
    let case = Case::new(true);
    let all = Some((5, 5, 5));
    let late = "no reply for 20000 ms;";
    assert_eq!(
        overdue(&case, [Some((4, 4, 4)), all, all]),
        format!("0 ({late} 5 frames were sent to it, it received 4) → joins [10, 1, 2]")
    );
    assert_eq!(
        overdue(&case, [all, Some((5, 3, 3)), Some((3, 3, 3))]),
        format!("1 ({late} it received 5 frames, computed 3 and dropped 0) → joins [0, 11, 2]")
    );
    // Cut one way between the second and the third: what was forwarded never came.
    assert_eq!(
        overdue(&case, [all, all, Some((3, 3, 3))]),
        format!("2 ({late} 5 frames were sent to it, it received 3) → joins [0, 1, 12]")
    );
    // The way back from the tail.
    assert_eq!(
        overdue(&case, [all, all, all]),
        format!("2 ({late} every stage passed on what it received) → joins [0, 1, 12]")
    );
}

#[test]
fn of_two_stages_at_fault_the_first_is_found_first() {
    let case = Case::new(true);
    let late = "no reply for 20000 ms;";
    let silent = format!("0 ({late} it does not answer a probe) → joins [10, 1, 2]");
    assert_eq!(overdue(&case, [None, None, Some((0, 0, 0))]), silent);
    // Once it is replaced, the other one is a case of its own.
    let mut left = Case::new(true);
    left.candidates.retain(|candidate| candidate.peer.start != 0);
    left.ring[0] = (left.candidates.iter().find(|other| other.peer.start == 10).unwrap().peer, left.ring[0].1);
    let now = crate::clock::now();
    let second = left.decided(&Evidence::Gone { peer: left.peer(1), why: "gone" }, now);
    assert_eq!(second, "1 (gone) → joins [10, 11, 2]");
}

#[test]
fn a_slow_stage_breaks_nothing_while_it_moves_frames() {
    // It answers heartbeats, so no evidence comes; late replies come before they are overdue. What is
    // left is suspicion, and that costs only the choice between stages of one range.
    let mut case = Case::new(true);
    case.candidates[1].faulted = true;
    let now = crate::clock::now();
    let decided = case.decided(&Evidence::Gone { peer: case.peer(2), why: "gone" }, now);
    assert_eq!(decided, "2 (gone) → joins [0, 11, 12]", "another break is the moment to replace it");
}
