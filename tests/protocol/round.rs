//! The coordinator's machine by itself: what it sends, what it believes, how it fails.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ringfence::ids::{Epoch, Position, SessionId, TokenId, View};
use ringfence::proto::frame::{Answer, DraftBlock, Reply};
use ringfence::proto::round::{
    Deadlines, Divergence, Finish, Round, RoundConfig, RoundConfigError, RoundError, RoundOutput, RoundTimeout,
};

const EOS: u32 = 1;

/// Three prompt tokens in one chunk, W = 4.
fn config() -> RoundConfig {
    RoundConfig {
        view: View(2),
        session: SessionId(8),
        prompt: vec![TokenId(100), TokenId(101), TokenId(102)],
        max_new: 10,
        eos: BTreeSet::from([TokenId(EOS)]),
        ignore_eos: false,
        in_flight_max: 4,
        draft_max: 5,
        prefill_chunk: 8,
        reach: 16,
        score: false,
        deadlines: Deadlines { reply: Duration::from_secs(1), prefill: Duration::from_secs(5) },
    }
}

struct Bench {
    round: Round,
    now: Instant,
}

impl Bench {
    fn new(config: RoundConfig) -> Self {
        let now = ringfence::clock::now();
        Self { round: Round::new(config, now).unwrap(), now }
    }

    /// A session whose prompt is answered with 10, with drafts 11, 12, 13, 14, 15 behind it.
    fn decoding(config: RoundConfig) -> Self {
        let mut bench = Self::new(config);
        assert_eq!(bench.outputs(), ["send e0 start0 0+3 [100, 101, 102] settled0"]);
        bench.reply_with(0, 0, 3, 10, &[11, 12, 13, 14, 15]);
        bench
    }

    /// Everything that is to be done, in short.
    fn outputs(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.round.poll_output(self.now)).map(|output| brief(&output)).collect()
    }

    fn reply(&mut self, epoch: u32, pos: u32, answer: u32) {
        self.reply_with(epoch, pos, 1, answer, &[]);
    }

    fn reply_with(&mut self, epoch: u32, pos: u32, len: u32, answer: u32, draft: &[u32]) {
        self.round.handle_reply(reply(epoch, pos, len, answer, draft), self.now);
    }

    fn failure(&mut self) -> RoundError {
        let outputs: Vec<RoundOutput> = std::iter::from_fn(|| self.round.poll_output(self.now)).collect();
        let Some(RoundOutput::Failed(error)) = outputs.last() else { panic!("no failure in {outputs:?}") };
        assert!(self.round.is_done());
        error.clone()
    }
}

fn reply(epoch: u32, pos: u32, len: u32, answer: u32, draft: &[u32]) -> Reply {
    let draft = (!draft.is_empty()).then(|| DraftBlock {
        tokens: draft.iter().copied().map(TokenId).collect(),
        confidence: vec![0.0; draft.len()],
    });
    let answers = vec![Answer { token: TokenId(answer), scores: None }];
    Reply { view: View(2), session: SessionId(8), epoch: Epoch(epoch), pos: Position(pos), len, answers, draft }
}

fn brief(output: &RoundOutput) -> String {
    match output {
        RoundOutput::Send { head, ids } => {
            let ids: Vec<u32> = ids.iter().map(|id| id.0).collect();
            format!(
                "send e{} start{} {}+{} {ids:?} settled{}",
                head.epoch, head.start, head.pos, head.len, head.settled
            )
        }
        RoundOutput::Cancel { below } => format!("cancel below {below}"),
        RoundOutput::Commit { index, position, token, .. } => format!("commit {index} at {position}: {token}"),
        RoundOutput::Scored { position, answer } => format!("scored {position}: {}", answer.token),
        RoundOutput::Finished(finish) => format!("finished {finish:?}"),
        RoundOutput::Overdue { pos, len, waited } => {
            format!("overdue: the frame at {pos}, {len} positions, after {} ms", waited.as_millis())
        }
        RoundOutput::Failed(error) => format!("failed: {error}"),
    }
}

#[test]
fn truth_and_drafts_stream_without_waiting_up_to_w() {
    let mut bench = Bench::decoding(config());
    assert_eq!(
        bench.outputs(),
        [
            "commit 0 at 3: 10",
            "send e0 start0 3+1 [10] settled3",
            "send e0 start0 4+1 [11] settled3",
            "send e0 start0 5+1 [12] settled3",
            "send e0 start0 6+1 [13] settled3",
        ]
    );
    bench.reply(0, 3, 11);
    assert_eq!(bench.outputs(), ["commit 1 at 4: 11", "send e0 start0 7+1 [14] settled4"]);
}

#[test]
fn a_disagreement_commits_the_models_token_and_re_opens_with_the_fresh_block() {
    let mut bench = Bench::decoding(config());
    bench.outputs();
    bench.reply(0, 3, 11);
    bench.reply_with(0, 4, 1, 50, &[51, 52]);
    assert_eq!(
        bench.outputs(),
        [
            "commit 1 at 4: 11",
            "commit 2 at 5: 50",
            "cancel below 1",
            "send e1 start5 5+1 [50] settled5",
            "send e1 start5 6+1 [51] settled5",
            "send e1 start5 7+1 [52] settled5",
        ]
    );
    let stats = bench.round.stats();
    assert_eq!((stats.rejections, stats.decoded, stats.committed), (1, 2, 3));
    assert_eq!((&stats.judged[..], &stats.confirmed[..]), (&[1, 1][..], &[1, 0][..]));
}

#[test]
fn a_reply_of_an_old_epoch_or_view_changes_nothing() {
    let mut bench = Bench::decoding(config());
    bench.reply_with(0, 3, 1, 50, &[]);
    bench.outputs();
    bench.reply_with(0, 3, 1, 50, &[51, 52]);
    assert_eq!(bench.round.epoch(), Epoch(0), "nothing was sent at 4 when the answer came");

    let mut bench = Bench::decoding(config());
    bench.outputs();
    bench.reply_with(0, 3, 1, 50, &[51, 52]);
    bench.outputs();
    let before = format!("{:?}", bench.round.committed());
    bench.reply_with(0, 4, 1, 77, &[78]);
    let mut old_view = reply(9, 4, 1, 77, &[78]);
    old_view.view = View(1);
    bench.round.handle_reply(old_view, bench.now);
    assert_eq!(bench.outputs(), Vec::<String>::new());
    assert_eq!((format!("{:?}", bench.round.committed()), bench.round.stats().stale_replies), (before, 2));
    bench.reply(1, 4, 51);
    assert_eq!(bench.outputs(), ["commit 2 at 5: 51"]);
}

#[test]
fn early_replies_wait_and_are_judged_in_position_order() {
    let mut bench = Bench::decoding(config());
    bench.outputs();
    bench.reply(0, 5, 60);
    bench.reply(0, 6, 61);
    bench.reply(0, 4, 12);
    assert_eq!((bench.outputs(), bench.round.early()), (vec![], 3));
    bench.reply(0, 3, 11);
    assert_eq!(
        bench.outputs(),
        [
            "commit 1 at 4: 11",
            "commit 2 at 5: 12",
            "commit 3 at 6: 60",
            "cancel below 1",
            "send e1 start6 6+1 [60] settled6",
        ],
        "the reply at 6 answered a dead draft"
    );
    assert_eq!((bench.round.early(), bench.round.stats().max_early), (0, 3));
}

#[test]
fn a_fresh_block_extends_only_what_it_repeats() {
    let mut bench = Bench::decoding(RoundConfig { in_flight_max: 6, ..config() });
    bench.outputs();
    bench.reply_with(0, 3, 1, 11, &[12, 13, 14, 15, 16]);
    assert_eq!(bench.outputs(), ["commit 1 at 4: 11", "send e0 start0 9+1 [16] settled4"]);
    bench.reply_with(0, 4, 1, 12, &[13, 99, 15, 16, 17]);
    assert_eq!(bench.outputs(), ["commit 2 at 5: 12"]);
}

#[test]
fn what_waits_to_be_sent_gives_way_to_a_fresh_block() {
    let mut bench = Bench::decoding(RoundConfig { in_flight_max: 2, ..config() });
    bench.outputs();
    bench.reply_with(0, 3, 1, 11, &[70, 71]);
    assert_eq!(bench.outputs(), ["commit 1 at 4: 11", "send e0 start0 5+1 [70] settled4"]);
    let mut bench = Bench::decoding(RoundConfig { in_flight_max: 1, ..config() });
    bench.outputs();
    bench.reply(0, 3, 40);
    assert_eq!(bench.outputs(), ["commit 1 at 4: 40", "send e0 start0 4+1 [40] settled4"]);
    assert_eq!(bench.round.stats().rejections, 0, "the draft at 4 was never streamed");
}

#[test]
fn nothing_is_sent_past_the_end_nor_beyond_reach() {
    let mut bench = Bench::decoding(RoundConfig { max_new: 3, ..config() });
    assert_eq!(bench.outputs().len(), 3, "the last token is never fed");
    bench.reply(0, 3, 11);
    bench.reply(0, 4, 12);
    assert_eq!(bench.outputs(), ["commit 1 at 4: 11", "commit 2 at 5: 12", "finished Length"]);

    let mut bench = Bench::decoding(RoundConfig { reach: 3, ..config() });
    assert_eq!(bench.outputs().len(), 1 + 3, "pos + 1 − settled ≤ 3");
}

#[test]
fn an_end_token_ends_cleanly_and_is_never_fed() {
    let mut bench = Bench::new(config());
    bench.outputs();
    bench.reply_with(0, 0, 3, 10, &[11, EOS, 13]);
    assert_eq!(bench.outputs().len(), 3, "neither the end token nor what follows it is streamed");
    bench.reply(0, 3, EOS);
    assert_eq!(bench.outputs(), ["commit 1 at 4: 1", "cancel below 1", "finished Eos"]);
    bench.reply(0, 4, 12);
    assert_eq!(bench.outputs(), Vec::<String>::new());
    assert_eq!(bench.round.poll_timeout(), None);

    let mut bench = Bench::decoding(RoundConfig { ignore_eos: true, ..config() });
    bench.outputs();
    bench.reply_with(0, 3, 1, EOS, &[5, 6]);
    assert_eq!(bench.outputs()[..2], ["commit 1 at 4: 1", "cancel below 1"]);
    assert!(!bench.round.is_done());
}

#[test]
fn a_stop_cancels_what_is_in_flight_once() {
    let mut bench = Bench::decoding(config());
    bench.outputs();
    bench.round.handle_stop();
    bench.round.handle_stop();
    assert_eq!(bench.outputs(), ["cancel below 1", "finished Stopped"]);
}

#[test]
fn scoring_asks_for_every_position_in_chunks() {
    let scoring = RoundConfig { max_new: 0, score: true, prefill_chunk: 2, ..config() };
    let mut bench = Bench::new(scoring);
    assert_eq!(bench.outputs(), ["send e0 start0 0+2 [100, 101] settled0", "send e0 start0 2+1 [102] settled0"]);
    bench.reply(0, 2, 7);
    let mut first = reply(0, 0, 2, 5, &[]);
    first.answers.push(Answer { token: TokenId(6), scores: None });
    bench.round.handle_reply(first, bench.now);
    assert_eq!(bench.outputs(), ["scored 0: 5", "scored 1: 6", "scored 2: 7", "finished Scored"]);
}

#[test]
fn chunks_stream_up_to_reach_and_the_floor_follows_their_replies() {
    let prompt = (0..7).map(TokenId).collect();
    let mut bench = Bench::new(RoundConfig { prompt, prefill_chunk: 2, reach: 4, ..config() });
    assert_eq!(bench.outputs(), ["send e0 start0 0+2 [0, 1] settled0", "send e0 start0 2+2 [2, 3] settled0"]);
    let unanswered = |pos| Reply { answers: vec![], ..reply(0, pos, 2, 0, &[]) };
    bench.round.handle_reply(unanswered(2), bench.now);
    assert_eq!(bench.outputs(), Vec::<String>::new());
    bench.round.handle_reply(unanswered(0), bench.now);
    assert_eq!(bench.outputs(), ["send e0 start0 4+2 [4, 5] settled4", "send e0 start0 6+1 [6] settled4"]);
    assert_eq!(bench.round.frontier(), Position(4));
}

#[test]
fn the_oldest_frame_has_a_deadline_from_when_it_became_the_oldest() {
    let mut bench = Bench::decoding(config());
    bench.outputs();
    let t0 = bench.now;
    assert_eq!(bench.round.poll_timeout(), Some((t0 + Duration::from_secs(1), RoundTimeout::Reply)));
    bench.now = t0 + Duration::from_millis(900);
    bench.reply(0, 3, 11);
    bench.outputs();
    assert_eq!(bench.round.poll_timeout(), Some((t0 + Duration::from_millis(1900), RoundTimeout::Reply)));
    bench.now = t0 + Duration::from_millis(1899);
    bench.round.handle_timeout(bench.now);
    assert_eq!(bench.outputs(), Vec::<String>::new());
    bench.now = t0 + Duration::from_millis(1900);
    bench.round.handle_timeout(bench.now);
    assert_eq!(bench.outputs(), ["overdue: the frame at 4, 1 positions, after 1900 ms"]);
    // Nothing is sent and no time counts, until patience says so or a reply comes.
    assert_eq!(bench.round.poll_timeout(), None);
    bench.now = t0 + Duration::from_millis(9_000);
    bench.round.handle_patience(bench.now);
    assert_eq!(bench.round.poll_timeout(), Some((t0 + Duration::from_millis(10_000), RoundTimeout::Reply)));
    bench.now = t0 + Duration::from_millis(10_000);
    bench.round.handle_timeout(bench.now);
    assert_eq!(bench.outputs(), ["overdue: the frame at 4, 1 positions, after 10000 ms"]);
    assert!(bench.round.is_overdue());
    bench.reply(0, 4, 12);
    assert!(!bench.round.is_overdue() && !bench.outputs().is_empty(), "a late reply is as good as any");
    let mut bench = Bench::new(config());
    bench.outputs();
    assert_eq!(bench.round.poll_timeout(), Some((bench.now + Duration::from_secs(5), RoundTimeout::Reply)));
}

#[test]
fn a_reply_that_cannot_be_fails_the_session_and_names_both_values() {
    let pos = Position(4);
    let cases: [(Reply, Divergence); 6] = [
        (
            Reply { session: SessionId(9), ..reply(0, 4, 1, 12, &[]) },
            Divergence::Session { expected: SessionId(8), got: SessionId(9) },
        ),
        (
            reply(1, 4, 1, 12, &[]),
            Divergence::Future { view: View(2), epoch: Epoch(0), got_view: View(2), got_epoch: Epoch(1) },
        ),
        (
            reply(0, 7, 1, 12, &[]),
            Divergence::NeverSent { epoch: Epoch(0), got: Position(7), first: Position(3), end: Position(7) },
        ),
        (reply(0, 4, 2, 12, &[]), Divergence::Len { pos, expected: 1, got: 2 }),
        (Reply { answers: vec![], ..reply(0, 4, 1, 12, &[]) }, Divergence::Answers { pos, expected: 1, got: 0 }),
        (
            Reply {
                draft: Some(DraftBlock { tokens: vec![TokenId(1)], confidence: vec![] }),
                ..reply(0, 4, 1, 12, &[])
            },
            Divergence::Draft { pos, tokens: 1, confidence: 0 },
        ),
    ];
    for (reply, divergence) in cases {
        let mut bench = Bench::decoding(config());
        bench.outputs();
        bench.round.handle_reply(reply, bench.now);
        assert_eq!(bench.failure(), RoundError::Diverged(divergence));
    }
}

#[test]
fn a_reply_that_comes_twice_is_ignored_unless_it_changed() {
    let mut bench = Bench::decoding(config());
    bench.outputs();
    bench.reply(0, 4, 12);
    bench.reply(0, 4, 12);
    bench.reply(0, 3, 11);
    bench.reply(0, 3, 11);
    bench.reply(0, 4, 12);
    assert_eq!(bench.round.stats().stale_replies, 3);
    assert_eq!(bench.round.committed(), 3);
    bench.reply(0, 6, 14);
    bench.reply(0, 6, 15);
    assert_eq!(
        bench.failure().to_string(),
        "the ring contradicts the coordinator: two replies at position 6 of epoch 0 answer [14] and [15]"
    );
}

#[test]
fn settings_that_contradict_one_another_are_refused() {
    let now = ringfence::clock::now();
    let refused = |config| Round::new(config, now).map(|_| ()).unwrap_err();
    assert_eq!(refused(RoundConfig { prompt: vec![], ..config() }), RoundConfigError::EmptyPrompt);
    assert_eq!(refused(RoundConfig { max_new: 0, ..config() }), RoundConfigError::Nothing);
    assert_eq!(
        refused(RoundConfig { max_new: u32::MAX, ..config() }),
        RoundConfigError::TooLong { prompt: 3, max_new: u32::MAX }
    );
    assert_eq!(
        refused(RoundConfig { reach: 2, ..config() }).to_string(),
        format!("reach is 2, expected 3 to {}", u32::MAX)
    );
    assert!(matches!(
        refused(RoundConfig { in_flight_max: 0, ..config() }),
        RoundConfigError::Setting { setting: "in_flight_max", .. }
    ));
    assert_eq!(config().end(), Position(12));
    assert_eq!(RoundConfig { max_new: 0, ..config() }.end(), Position(3));
    assert_eq!(bench_bounds(), (16, 0));
}

/// Frames in flight of a whole block, and after the end.
fn bench_bounds() -> (usize, usize) {
    let block: Vec<u32> = (20..35).collect();
    let mut bench = Bench::new(RoundConfig { in_flight_max: 16, draft_max: 15, max_new: 30, ..config() });
    bench.outputs();
    bench.reply_with(0, 0, 3, 10, &block);
    bench.outputs();
    let full = bench.round.in_flight();
    bench.round.handle_stop();
    assert_eq!(bench.outputs(), ["cancel below 1", format!("finished {:?}", Finish::Stopped).as_str()]);
    (full, bench.round.in_flight())
}
