//! The pipelined stream is the plain one, whatever the drafter, the schedule and the end.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use ringfence::ids::TokenId;

use super::ring::{Case, Event, Ring, Script};
use super::toy::{Rng, VOCAB, plain_answers};

fn prompt(len: u32, seed: u64) -> Vec<TokenId> {
    let mut rng = Rng(seed);
    (0..len).map(|_| TokenId(rng.below(VOCAB as usize) as u32)).collect()
}

fn case() -> Case {
    Case {
        stages: 3,
        lanes: 1,
        prompt: prompt(7, 1),
        max_new: 24,
        eos: BTreeSet::new(),
        in_flight_max: 8,
        block: 5,
        draft_max: 5,
        chunk: 3,
        score: false,
        script: Script::Partial(60),
        stop_after: None,
        merge: 1,
    }
}

/// Runs a case to its end with a schedule that picks among the events that can happen.
fn run(case: Case, mut pick: impl FnMut(&[Event]) -> usize) -> Ring {
    const EVENTS_MAX: usize = 200_000;
    let mut ring = Ring::new(case);
    for _ in 0..EVENTS_MAX {
        let enabled = ring.enabled();
        if enabled.is_empty() {
            ring.check_end();
            return ring;
        }
        ring.step(enabled[pick(&enabled)]);
    }
    panic!("no end after {EVENTS_MAX} events");
}

fn at_random(case: Case, seed: u64) -> Ring {
    let mut rng = Rng(seed);
    run(case, |enabled| rng.below(enabled.len()))
}

/// Cancels travel last of all, so that every stage computes and answers what is dead.
fn cancels_last(case: Case, seed: u64) -> Ring {
    let mut rng = Rng(seed);
    run(case, |enabled| {
        let others: Vec<usize> = (0..enabled.len()).filter(|&i| !matches!(enabled[i], Event::Cancel { .. })).collect();
        if others.is_empty() { rng.below(enabled.len()) } else { others[rng.below(others.len())] }
    })
}

/// Cancels overtake everything.
fn cancels_first(case: Case, seed: u64) -> Ring {
    let mut rng = Rng(seed);
    run(case, |enabled| {
        let cancel = enabled.iter().position(|event| matches!(event, Event::Cancel { .. }));
        cancel.unwrap_or_else(|| rng.below(enabled.len()))
    })
}

/// Runs a case under every schedule there is and returns how many there are.
fn every_schedule(case: &Case, limit: usize) -> usize {
    // The choices taken, and how many there were each time: an odometer.
    let mut script: Vec<(usize, usize)> = Vec::new();
    for runs in 1..=limit {
        let mut at = 0;
        run(case.clone(), |enabled| {
            if at == script.len() {
                script.push((0, enabled.len()));
            }
            assert_eq!(script[at].1, enabled.len(), "the ring is deterministic");
            at += 1;
            script[at - 1].0
        });
        script.truncate(at);
        while script.last().is_some_and(|&(choice, of)| choice + 1 == of) {
            script.pop();
        }
        let Some(last) = script.last_mut() else { return runs };
        last.0 += 1;
    }
    panic!("more than {limit} schedules");
}

fn any_case() -> impl Strategy<Value = Case> {
    let script = prop_oneof![Just(Script::Zero), Just(Script::Full), (0..100_u64).prop_map(Script::Partial)];
    let shape = (1..5_usize, 1..4_usize, 1..20_u32, 1..40_u32, any::<u64>());
    let speed = (prop_oneof![Just(1_u32), Just(2), Just(8), Just(16), 1..20_u32], 0..16_u32, 1..9_u32, 1..4_usize);
    let end = (any::<bool>(), prop::option::of(0..40_usize), prop::option::of(1..40_u32));
    (shape, speed, end, script).prop_map(|(shape, speed, end, script)| {
        let (stages, lanes, prompt_len, max_new, seed) = shape;
        let (in_flight_max, block, chunk, merge) = speed;
        let (score, eos_at, stop_after) = end;
        let prompt = prompt(prompt_len, seed);
        let answers = plain_answers(stages, &prompt, 40);
        let eos = eos_at.map(|i| answers[prompt.len() - 1 + i]).into_iter().collect();
        Case {
            stages,
            lanes,
            prompt,
            max_new,
            eos,
            in_flight_max,
            block,
            chunk,
            score,
            script,
            stop_after,
            merge,
            draft_max: block,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1500, failure_persistence: None, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default()
    })]

    #[test]
    fn any_schedule_commits_the_plain_stream(case in any_case(), seed in any::<u64>(), cancels in 0..3_u8) {
        match cancels {
            0 => at_random(case, seed),
            1 => cancels_last(case, seed),
            _ => cancels_first(case, seed),
        };
    }

    #[test]
    fn scoring_alone_answers_every_prompt_position(case in any_case(), seed in any::<u64>()) {
        let ring = at_random(Case { max_new: 0, score: true, stop_after: None, ..case }, seed);
        prop_assert_eq!(ring.scored.len() as u32, ring.round.stats().prompt_tokens);
    }
}

#[test]
fn every_schedule_of_small_rings_commits_the_plain_stream() {
    let small = Case { prompt: prompt(1, 3), block: 2, draft_max: 2, merge: 0, ..case() };
    // (stages, lanes, new tokens, W, drafter): the number of schedules grows fast with each.
    let cases = [
        (1, 1, 4, 2, Script::Zero),
        (1, 2, 3, 3, Script::Zero),
        (1, 2, 4, 3, Script::Partial(50)),
        (2, 2, 3, 3, Script::Zero),
        (2, 1, 4, 3, Script::Full),
        (2, 2, 4, 3, Script::Full),
    ];
    let mut schedules = 0;
    for (stages, lanes, max_new, in_flight_max, script) in cases {
        let case = Case { stages, lanes, max_new, in_flight_max, script, ..small.clone() };
        schedules += every_schedule(&case, 100_000);
    }
    assert!(schedules > 100_000, "only {schedules} schedules: the cases are too small to show anything");
}

#[test]
fn every_w_and_every_block_commits_the_plain_stream() {
    for in_flight_max in [1, 2, 8, 16] {
        for block in [0, 1, 5, 15] {
            for script in [Script::Zero, Script::Full, Script::Partial(50), Script::Partial(90)] {
                for lanes in [1, 3] {
                    let case = Case { in_flight_max, block, draft_max: block, script, lanes, ..case() };
                    at_random(case.clone(), 7);
                    cancels_last(case, 8);
                }
            }
        }
    }
}

#[test]
fn an_end_at_every_place_inside_a_block_is_clean() {
    for script in [Script::Zero, Script::Full, Script::Partial(70)] {
        for max_new in 1..20 {
            at_random(Case { max_new, script, ..case() }, u64::from(max_new));
            at_random(Case { stop_after: Some(max_new), script, ..case() }, u64::from(max_new));
        }
        let answers = plain_answers(3, &case().prompt, 24);
        for token in &answers[case().prompt.len() - 1..] {
            cancels_last(Case { eos: BTreeSet::from([*token]), script, ..case() }, 5);
        }
    }
}

#[test]
fn full_acceptance_sends_one_frame_a_token_and_rejects_nothing() {
    let ring = at_random(Case { script: Script::Full, ..case() }, 1);
    let stats = ring.round.stats();
    assert_eq!((stats.rejections, stats.singles_sent, stats.cancelled), (0, 23, 0));
    assert_eq!((stats.decoded, stats.acceptance_length()), (23, 23.0));
    assert!(stats.accept_by_depth().iter().zip(&stats.judged).all(|(&share, &judged)| judged == 0 || share == 1.0));
    assert!(stats.max_in_flight > 1);
}

#[test]
fn zero_acceptance_rejects_the_first_draft_of_every_block() {
    // All frames of a block reach the ring before the first answer, cancels after it.
    let ring = cancels_first(Case { script: Script::Zero, ..case() }, 2);
    let stats = ring.round.stats();
    // Behind the last fed token nothing is streamed.
    assert_eq!((stats.decoded, stats.rejections), (23, 22));
    assert_eq!(stats.accept_by_depth(), vec![0.0]);
    assert!((stats.acceptance_length() - 1.0).abs() < 1e-12);
}

#[test]
fn plain_mode_sends_the_truth_only() {
    let ring = at_random(Case { draft_max: 0, ..case() }, 3);
    let stats = ring.round.stats();
    assert_eq!((stats.singles_sent, stats.rejections, stats.cancelled), (23, 0, 0));
    assert!(stats.judged.is_empty());
    assert_eq!(ring.work(), ((3 + 23) * 3, 0));
}

#[test]
fn a_cancel_that_overtakes_saves_the_work_of_a_dead_epoch() {
    let case = Case { script: Script::Zero, in_flight_max: 6, ..case() };
    let (late, _) = cancels_last(case.clone(), 4).work();
    let ring = cancels_first(case, 4);
    let (early, dropped) = ring.work();
    assert!(early < late, "computed {early} with early cancels, {late} with late ones");
    assert!(dropped > 0);
}

#[test]
fn prompt_chunks_overlap_up_to_reach() {
    let ring =
        at_random(Case { prompt: prompt(40, 9), chunk: 2, in_flight_max: 16, block: 0, draft_max: 0, ..case() }, 6);
    assert_eq!(ring.round.stats().max_in_flight, 4, "chunk × (stages + 1) is the reach");
}
