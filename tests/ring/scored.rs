//! Log-probabilities of new tokens, and sampling that cuts by a share of the likeliest: the same bits
//! drafted or not, through a dead stage and through a dead coordinator.

use ringfence::coordinator::job::{Event, Job, Mode, Request, Serve, TokenScores};
use ringfence::ids::TokenId;
use ringfence::proto::control::Sampling;
use ringfence::proto::frame::Answer;

use crate::heal::patient;
use crate::restart;
use crate::rig::{PATIENCE, Rig, prompt, ranges, request, warm};

const NEW: u32 = 30;
const TOP: u32 = 4;

type Scored = Vec<(TokenId, TokenScores)>;

fn asked(mode: Mode) -> Request {
    let sampling = Sampling { min_p: 0.05, top_p: 1.0, ..warm(7) };
    Request { logprobs: Some(TOP), sampling, ..request(&prompt(60), NEW, mode) }
}

/// Reads until `count` tokens came, or the end.
async fn read(job: &mut Job, count: usize) -> Scored {
    let mut said = Vec::new();
    while said.len() < count {
        match tokio::time::timeout(PATIENCE, job.events.recv()).await.expect("an event comes") {
            Some(Event::Token { token, scores, .. }) => said.push((token, scores.expect("every token has scores"))),
            Some(Event::Finished { .. }) => break,
            other => panic!("{other:?} after {} tokens", said.len()),
        }
    }
    said
}

async fn run(rig: &Rig, request: Request) -> Scored {
    read(&mut rig.coordinator.submit(request).unwrap(), usize::MAX).await
}

/// The answers to the prompt and `said` behind it, as a request for scores gives them.
async fn answers(rig: &Rig, said: &Scored) -> Vec<Answer> {
    let mut ids = asked(Mode::Plain).prompt;
    ids.extend(said.iter().map(|(token, _)| *token));
    let scoring = Request { prompt: ids, max_new: 0, score: Some(TOP), logprobs: None, ..asked(Mode::Plain) };
    let mut job = rig.coordinator.submit(scoring).unwrap();
    let mut answers = Vec::new();
    while let Some(event) = tokio::time::timeout(PATIENCE, job.events.recv()).await.unwrap() {
        if let Event::Scored { answer, .. } = event {
            answers.push(answer);
        }
    }
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_gives_the_log_probabilities_that_scoring_the_same_text_gives() {
    let rig = Rig::new(&ranges("0:2 2:4 4:7"), patient()).await;
    let expected = run(&rig, asked(Mode::Plain)).await;
    assert_eq!(expected.len(), NEW as usize);
    let answers = answers(&rig, &expected).await;
    let first = asked(Mode::Plain).prompt.len();
    for (at, (token, scores)) in expected.iter().enumerate() {
        let before = answers[first + at - 1].scores.as_ref().unwrap();
        let fed = answers[first + at].scores.as_ref().unwrap().fed.unwrap();
        assert_eq!((scores.logprob.to_bits(), &scores.top), (fed.to_bits(), &before.top), "token {at}");
        assert_eq!(scores.top.len(), TOP as usize);
        let listed = scores.top.iter().find(|(id, _)| id == token);
        assert!(listed.is_none_or(|(_, logprob)| *logprob == scores.logprob), "token {at}");
        // At a temperature of 0.8, nothing below a twentieth of the likeliest is ever picked.
        let least = scores.top[0].1 - 0.8 * 20.0_f32.ln() - 1e-4;
        assert!(scores.logprob >= least, "token {at}: {scores:?}");
    }
    assert!(expected.iter().any(|(token, scores)| scores.top[0].0 != *token), "some tokens are not the likeliest");
    assert_eq!(run(&rig, asked(Mode::Pipelined)).await, expected);
    let plain = Request { logprobs: None, ..asked(Mode::Pipelined) };
    let mut job = rig.coordinator.submit(plain).unwrap();
    let first = job.events.recv().await;
    assert!(matches!(first, Some(Event::Token { scores: None, .. })), "nobody asked: {first:?}");
    drop(job);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_healed_ring_gives_the_same_log_probabilities() {
    for (lost, spare) in [(1, "2:4"), (2, "4:7")] {
        let mut rig = Rig::new(&ranges("0:2 2:4 4:7"), patient()).await;
        let expected = run(&rig, asked(Mode::Pipelined)).await;
        for spare in ranges(spare) {
            rig.add(spare);
        }
        rig.members(rig.stages.len()).await;
        let mut job = rig.coordinator.submit(asked(Mode::Pipelined)).unwrap();
        let mut said = read(&mut job, 7).await;
        rig.network.kill(rig.stages[lost].peer);
        said.extend(read(&mut job, usize::MAX).await);
        assert_eq!(said, expected);
        assert_eq!(rig.coordinator.status().view.0, 2, "it was healed");
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_has_the_log_probabilities_that_were_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = restart::rig(restart::patient(), restart::open(folder.path())).await;
    let expected = run(&rig, asked(Mode::Pipelined)).await;
    let mut job = rig.coordinator.submit(asked(Mode::Pipelined)).unwrap();
    read(&mut job, 9).await;
    for _ in 0..2 {
        rig.restart(|| restart::open(folder.path())).await;
        let attached = restart::attach(&rig, &job).await;
        let mut said: Scored = attached.tokens.iter().copied().zip(attached.scores.iter().cloned()).collect();
        assert!(said.len() >= 9 && said.len() == attached.tokens.len() && said.len() == attached.scores.len());
        assert_eq!(said, expected[..said.len()]);
        job = attached.job;
        let more = expected.len() - said.len();
        said.extend(read(&mut job, 6.min(more)).await);
        assert_eq!(said, expected[..said.len()]);
    }
    read(&mut job, usize::MAX).await;
    // One that is at its end is read on with all of them.
    let attached = restart::attach(&rig, &job).await;
    let said: Scored = attached.tokens.into_iter().zip(attached.scores).collect();
    assert_eq!((said, attached.ended), (expected, true));
    rig.end().await;
}
