//! How sessions end: by token, by number, by their reader.

use ringfence::coordinator::job::{Event, Finish, Mode, Request, Serve, SubmitError};
use ringfence::ids::TokenId;

use crate::equal::reference;
use crate::rig::{Rig, collect, greedy, prompt, quick, ranges, request, tiny};

/// A prompt after which the tiny model soon ends the sequence: the end of a document.
const SOON: u32 = 400;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_number_of_new_tokens_ends_inside_a_block() {
    let (checkpoint, cut) = (tiny(), ranges("0:2 2:4 4:7"));
    let rig = Rig::new(&cut, quick()).await;
    let longest = request(&prompt(25), 14, Mode::Pipelined);
    let expected = reference(&checkpoint, &cut, &longest, ringfence::ids::WireEncoding::Fp8, &[]);
    for max_new in 1..=14 {
        let run = rig.run(request(&prompt(25), max_new, Mode::Pipelined)).await;
        assert_eq!(run.tokens, expected[..max_new as usize]);
        assert_eq!(run.finish(), Finish::Length);
    }
    rig.until("every session is freed", |rig| rig.coordinator_sessions() == 0).await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_token_ends_the_stream_and_is_its_last() {
    let (checkpoint, cut) = (tiny(), ranges("0:2 2:4 4:7"));
    let rig = Rig::new(&cut, quick()).await;
    let eos: Vec<TokenId> = rig.coordinator.model().eos;
    // Sampled hot, the small model ends a text sooner or later; the seeds make it the same each run.
    let mut ended = 0;
    for seed in 0..12 {
        let mut request = request(&prompt(12), SOON, Mode::Pipelined);
        request.sampling = ringfence::proto::control::Sampling { temperature: 1.5, seed, ..greedy() };
        request.ignore_eos = false;
        let expected = reference(&checkpoint, &cut, &request, ringfence::ids::WireEncoding::Fp8, &eos);
        let run = rig.run(request).await;
        assert_eq!(run.tokens, expected);
        let last_is_end = run.tokens.last().is_some_and(|token| eos.contains(token));
        assert_eq!(run.finish(), if last_is_end { Finish::Stop } else { Finish::Length });
        ended += usize::from(last_is_end);
        if ended >= 2 {
            break;
        }
    }
    assert!(ended > 0, "no seed reached the end token: this test shows nothing");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_has_enough_stops_its_session_alone() {
    let cut = ranges("0:2 2:4 4:7");
    let rig = Rig::new(&cut, quick()).await;
    let mut job = rig.coordinator.submit(request(&prompt(20), 600, Mode::Pipelined)).unwrap();
    let other = rig.coordinator.submit(request(&prompt(20), 60, Mode::Pipelined)).unwrap();
    let first = job.events.recv().await.unwrap();
    assert!(matches!(first, Event::Token { index: 0, .. }));
    job.alive.send(()).unwrap();
    let mut last = first;
    while let Some(event) = job.events.recv().await {
        last = event;
    }
    assert!(matches!(last, Event::Finished { reason: Finish::Stop, .. }), "{last:?}");
    assert_eq!(collect(other).await.tokens.len(), 60);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_is_gone_frees_its_session_on_every_stage() {
    let cut = ranges("0:2 2:4 4:7");
    let rig = Rig::new(&cut, quick()).await;
    for read in [0, 1, 7] {
        let mut job = rig.coordinator.submit(request(&prompt(20), 900, Mode::Pipelined)).unwrap();
        for _ in 0..read {
            job.events.recv().await.unwrap();
        }
        drop(job);
        rig.until("the session is gone", |rig| rig.coordinator_sessions() == 0).await;
    }
    // Every place is free again: as many sessions as the ring takes can be opened.
    let requests = (0..16).map(|_| rig.run(request(&prompt(5), 3, Mode::Pipelined)));
    for run in futures::future::join_all(requests).await {
        assert_eq!(run.tokens.len(), 3);
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_served_is_refused_with_both_numbers() {
    let rig = Rig::new(&ranges("0:3 3:7"), quick()).await;
    let submit = |request: Request| rig.coordinator.submit(request).unwrap_err();
    let too_long = submit(request(&prompt(100), 1_000, Mode::Plain));
    assert_eq!(too_long, SubmitError::TooLong { prompt: 100, max_new: 1_000, context: 1_024 });
    assert!(matches!(submit(request(&[], 1, Mode::Plain)), SubmitError::Invalid { field: "prompt", .. }));
    assert!(matches!(submit(request(&[2_048], 1, Mode::Plain)), SubmitError::Invalid { field: "prompt", .. }));
    assert!(matches!(submit(request(&[1], 0, Mode::Plain)), SubmitError::Invalid { field: "max_tokens", .. }));
    rig.end().await;
    let rig = Rig::new(&ranges("0:5 5:7"), quick()).await;
    let refused = rig.coordinator.submit(request(&[1], 4, Mode::Pipelined)).unwrap_err();
    assert!(matches!(refused, SubmitError::Invalid { field: "mode", .. }), "a tail without every tap can't draft");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scores_of_a_ring_equal_those_of_one_process() {
    let (checkpoint, cut) = (tiny(), ranges("0:2 2:4 4:7"));
    let ids = prompt(90);
    let mut engine = crate::rig::engine(&checkpoint, checkpoint.all_layers());
    let tokens: Vec<TokenId> = ids.iter().copied().map(TokenId).collect();
    let expected =
        ringfence::engine::solo::score(&mut engine, &tokens, &[2, 4], ringfence::ids::WireEncoding::Fp8, 5, 11)
            .unwrap();
    let rig = Rig::new(&cut, quick()).await;
    let mut scored = request(&ids, 0, Mode::Plain);
    scored.score = Some(5);
    let mut job = rig.coordinator.submit(scored).unwrap();
    let mut argmax = Vec::new();
    let mut fed = Vec::new();
    while let Some(event) = job.events.recv().await {
        match event {
            Event::Scored { pos, answer } => {
                assert_eq!(pos as usize, argmax.len());
                let scores = answer.scores.unwrap();
                assert_eq!(scores.top, expected.top[pos as usize]);
                fed.extend(scores.fed);
                argmax.push(answer.token);
            }
            Event::Finished { reason, .. } => assert_eq!(reason, Finish::Length),
            other @ (Event::Token { .. } | Event::Failed(_)) => panic!("{other:?}"),
        }
    }
    assert_eq!(argmax, expected.argmax);
    assert_eq!(fed, expected.logprobs);
    rig.end().await;
}
