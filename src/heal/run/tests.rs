//! Rebuilds against scripted stages: the order of effects, and whatever else may come.

use expect_test::expect;

use super::*;

const VIEW: View = View(4);
const SESSION: SessionId = SessionId(9);

fn tokens(count: u32) -> Vec<TokenId> {
    (100..100 + count).map(TokenId).collect()
}

/// A prompt of 10 tokens, `history` tokens in all, chunks of 4.
fn run(stages: usize, history: u32) -> (Run, Instant) {
    let now = crate::clock::now();
    let config = RunConfig {
        view: VIEW,
        session: SESSION,
        stages,
        ids: tokens(history),
        prompt_len: 10,
        asked_from: Position(history - 1),
        committed: true,
        chunk: 4,
        deadline: Duration::from_secs(5),
    };
    (Run::new(config, now), now)
}

fn digest(at: u32) -> [u8; 32] {
    [at as u8; 32]
}

/// What a stage kept that had computed `next` positions of it.
fn kept(next: u32) -> Option<Kept> {
    let from = next.saturating_sub(6);
    Some(Kept {
        next: Position(next),
        ids: ids_digest(&tokens(next)),
        journal: (Position(0), Position(next)),
        inputs: outputs(from, next),
        outputs: outputs(from, next),
    })
}

/// One line an effect.
fn effects(run: &mut Run) -> String {
    let mut lines = String::new();
    while let Some(output) = run.poll_output() {
        let line = match output {
            Output::Tell { stage, message: Control::Rebuild { rebuild, .. } } => format!(
                "{stage}: from {}, forwards from {}, history {}",
                rebuild.from, rebuild.forward_from, rebuild.history
            ),
            Output::Tell { stage, message: Control::Replay { from, to, answer_from, .. } } => {
                format!("{stage}: replays {from}..{to}, answers from {answer_from}")
            }
            Output::Send { head, ids } => format!("head: {}..{} {:?}", head.pos, head.pos.plus(head.len), ids[0].0),
            Output::Done { from } => format!("done, asks from {from}"),
            other @ (Output::Tell { .. }
            | Output::Distrusted { .. }
            | Output::Differs { .. }
            | Output::Stuck { .. }) => format!("{other:?}"),
        };
        lines.push_str(&line);
        lines.push('\n');
    }
    lines
}

/// Every stage is ready, and computes whatever comes at once.
fn prepare(run: &mut Run, now: Instant) {
    for stage in 0..run.config.stages {
        run.handle_rebuilt(stage, Position(0), Digests::default(), now);
    }
}

fn outputs(from: u32, to: u32) -> Digests {
    Digests { from: Position(from), list: (from..to).map(digest).collect() }
}

#[test]
fn a_dead_middle_is_fed_from_the_journal_in_front_and_checked() {
    let (mut run, now) = run(3, 21);
    run.handle_opened(0, kept(21), now);
    run.handle_opened(2, kept(21), now);
    assert_eq!(effects(&mut run), "", "nothing is decided before all have said what they have");
    run.handle_opened(1, None, now);
    let mut said = effects(&mut run);
    said.push_str("-- ready\n");
    prepare(&mut run, now);
    said.push_str(&effects(&mut run));
    said.push_str("-- computed\n");
    run.handle_rebuilt(1, Position(20), outputs(8, 20), now);
    said.push_str(&effects(&mut run));
    expect![[r#"
        0: from 20, forwards from 20, history 20
        1: from 0, forwards from 20, history 20
        2: from 20, forwards from 20, history 20
        -- ready
        0: replays 0..20, answers from 9
        -- computed
        done, asks from 20
    "#]]
    .assert_eq(&said);
}

#[test]
fn a_dead_head_is_fed_with_token_ids() {
    let (mut run, now) = run(2, 11);
    run.handle_opened(0, None, now);
    run.handle_opened(1, kept(11), now);
    prepare(&mut run, now);
    let mut said = effects(&mut run);
    run.handle_rebuilt(0, Position(10), outputs(0, 10), now);
    said.push_str(&effects(&mut run));
    expect![[r#"
        0: from 0, forwards from 10, history 10
        1: from 10, forwards from 10, history 10
        head: 0..4 100
        head: 4..8 104
        head: 8..10 108
        done, asks from 10
    "#]]
    .assert_eq(&said);
}

#[test]
fn results_that_differ_from_what_was_received_end_it() {
    let (mut run, now) = run(3, 21);
    for (stage, kept) in [(0, kept(21)), (1, None), (2, kept(21))] {
        run.handle_opened(stage, kept, now);
    }
    prepare(&mut run, now);
    effects(&mut run);
    let mut wrong = outputs(8, 20);
    wrong.list[18 - 8] = [0; 32];
    run.handle_rebuilt(1, Position(20), wrong, now);
    assert_eq!(run.poll_output(), Some(Output::Differs { stage: 1, at: Position(18) }));
    assert_eq!((run.poll_output(), run.poll_timeout()), (None, None));
}

#[test]
fn a_state_whose_results_differ_from_what_was_received_is_made_anew() {
    let (mut run, now) = run(3, 21);
    let mut false_one = kept(19).unwrap();
    false_one.outputs.list[2] = [0; 32];
    for (stage, kept) in [(0, kept(21)), (1, Some(false_one)), (2, kept(21))] {
        run.handle_opened(stage, kept, now);
    }
    assert_eq!(run.poll_output(), Some(Output::Distrusted { stage: 1, at: Position(15) }));
    let mut said = effects(&mut run);
    prepare(&mut run, now);
    said.push_str(&effects(&mut run));
    run.handle_rebuilt(1, Position(20), outputs(8, 20), now);
    said.push_str(&effects(&mut run));
    expect![[r#"
        0: from 20, forwards from 20, history 20
        1: from 0, forwards from 20, history 20
        2: from 20, forwards from 20, history 20
        0: replays 0..20, answers from 9
        done, asks from 20
    "#]]
    .assert_eq(&said);
}

#[test]
fn a_stage_that_shadowed_is_fed_what_it_lacks() {
    let (mut run, now) = run(3, 21);
    for (stage, kept) in [(0, kept(21)), (1, kept(17)), (2, kept(21))] {
        run.handle_opened(stage, kept, now);
    }
    let mut said = effects(&mut run);
    prepare(&mut run, now);
    said.push_str(&effects(&mut run));
    run.handle_rebuilt(1, Position(20), outputs(17, 20), now);
    said.push_str(&effects(&mut run));
    expect![[r#"
        0: from 20, forwards from 20, history 20
        1: from 17, forwards from 20, history 20
        2: from 20, forwards from 20, history 20
        0: replays 17..20, answers from 9
        done, asks from 20
    "#]]
    .assert_eq(&said);
}

#[test]
fn what_a_stage_took_in_of_a_dead_speculation_is_compared_with_nothing() {
    let (mut run, now) = run(2, 21);
    // It had position 18 from a speculation that was re-opened there, and has not computed it again.
    let mut behind = kept(18).unwrap();
    behind.inputs.list.extend([[1; 32], [2; 32], [3; 32]]);
    run.handle_opened(0, kept(21), now);
    run.handle_opened(1, Some(behind), now);
    prepare(&mut run, now);
    effects(&mut run);
    run.handle_rebuilt(1, Position(20), Digests::default(), now);
    assert_eq!(run.poll_output(), Some(Output::Done { from: Position(20) }));
}

#[test]
fn a_state_of_other_tokens_counts_as_none() {
    let (mut run, now) = run(2, 11);
    let mut other = kept(11).unwrap();
    other.ids = ids_digest(&tokens(10));
    run.handle_opened(0, Some(other), now);
    run.handle_opened(1, kept(11), now);
    assert!(effects(&mut run).starts_with("0: from 0,"));
}

#[test]
fn the_feed_nearest_to_the_tail_comes_first_and_is_bounded() {
    let (mut run, now) = run(3, 201);
    for (stage, next) in [(0, 201), (1, 120), (2, 0)] {
        run.handle_opened(stage, kept(next), now);
    }
    prepare(&mut run, now);
    let mut said = effects(&mut run);
    for next in [32, 64, 120] {
        run.handle_rebuilt(2, Position(next), Digests::default(), now);
        said.push_str(&format!("-- 2 has {next}\n{}", effects(&mut run)));
    }
    for next in [160, 200] {
        run.handle_rebuilt(1, Position(next), outputs(136, next), now);
        run.handle_rebuilt(2, Position(next), Digests::default(), now);
        said.push_str(&format!("-- all have {next}\n{}", effects(&mut run)));
    }
    expect![[r#"
        0: from 200, forwards from 200, history 200
        1: from 120, forwards from 120, history 200
        2: from 0, forwards from 200, history 200
        1: replays 0..32, answers from 9
        1: replays 32..64, answers from 9
        -- 2 has 32
        1: replays 64..96, answers from 9
        -- 2 has 64
        1: replays 96..120, answers from 9
        -- 2 has 120
        0: replays 120..152, answers from 9
        0: replays 152..184, answers from 9
        -- all have 160
        0: replays 184..200, answers from 9
        -- all have 200
        done, asks from 200
    "#]]
    .assert_eq(&said);
}

#[test]
fn a_stage_that_says_nothing_is_named() {
    let (mut asked, now) = run(3, 21);
    asked.handle_opened(0, kept(21), now);
    let late = asked.poll_timeout().unwrap();
    asked.handle_timeout(late - Duration::from_millis(1));
    assert_eq!(asked.poll_output(), None);
    asked.handle_timeout(late);
    let Some(Output::Stuck { stage: 1, why }) = asked.poll_output() else { panic!("it is stage 1") };
    assert_eq!(why, "it did not say in 5000 ms what it kept of session 9");

    let (mut fed, now) = run(3, 21);
    for (stage, kept) in [(0, kept(21)), (1, None), (2, kept(21))] {
        fed.handle_opened(stage, kept, now);
    }
    prepare(&mut fed, now);
    effects(&mut fed);
    fed.handle_rebuilt(1, Position(8), Digests::default(), now + Duration::from_secs(3));
    fed.handle_timeout(now + Duration::from_secs(6));
    assert_eq!(fed.poll_output(), None, "there was progress");
    fed.handle_timeout(now + Duration::from_secs(8));
    let Some(Output::Stuck { stage: 1, why }) = fed.poll_output() else { panic!("it is stage 1") };
    assert_eq!(why, "its rebuild stood still at position 8 of 20 for 5000 ms");
}

#[test]
fn a_stage_that_is_fed_later_is_not_the_one_that_stands_still() {
    let (mut run, now) = run(3, 21);
    for (stage, kept) in [(0, None), (1, kept(21)), (2, None)] {
        run.handle_opened(stage, kept, now);
    }
    prepare(&mut run, now);
    assert!(effects(&mut run).contains("1: replays"), "the tail is fed first");
    run.handle_timeout(now + Duration::from_secs(5));
    let Some(Output::Stuck { stage, .. }) = run.poll_output() else { panic!("nothing moves") };
    assert_eq!(stage, 2);
}

#[test]
fn no_more_results_are_kept_than_are_compared() {
    let (mut run, now) = run(2, 401);
    for (stage, kept) in [(0, None), (1, kept(401))] {
        assert_eq!(run.handle_opened(stage, kept, now), stage == 1, "the last one is said to be");
    }
    prepare(&mut run, now);
    effects(&mut run);
    for next in (4..=400).step_by(4) {
        run.handle_rebuilt(0, Position(next), outputs(next - 4, next), now);
    }
    assert!(run.stages[0].outputs.list.len() <= CHECKED_POSITIONS as usize);
    assert_eq!(run.stages[0].outputs.get(Position(399)), Some(&digest(399)));
}

#[test]
fn nothing_that_a_stage_says_out_of_turn_panics_or_counts() {
    let (mut run, now) = run(2, 11);
    run.handle_rebuilt(0, Position(5), outputs(0, 5), now);
    run.handle_opened(7, kept(3), now);
    run.handle_opened(0, kept(11), now);
    run.handle_opened(1, None, now);
    prepare(&mut run, now);
    effects(&mut run);
    run.handle_opened(1, kept(11), now);
    run.handle_rebuilt(9, Position(5), outputs(0, 5), now);
    run.handle_rebuilt(1, Position(4_000), outputs(0, 5), now);
    run.handle_rebuilt(1, Position(0), outputs(0, 5), now);
    assert_eq!(effects(&mut run), "");
    run.handle_rebuilt(1, Position(10), Digests::default(), now);
    assert_eq!(effects(&mut run), "done, asks from 10\n");
}
