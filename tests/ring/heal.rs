//! A stage dies under a session: the session goes on on another ring, and the tokens are those of a
//! run that never failed.

use std::time::Duration;

use ringfence::config::CoordinatorSettings;
use ringfence::coordinator::job::{Event, Finish, Job, JobError, Mode, Request, Serve};
use ringfence::ids::TokenId;

use crate::rig::{Rig, prompt, quick, ranges, request, warm};

pub(crate) const NEW: u32 = 40;

pub(crate) fn patient() -> CoordinatorSettings {
    CoordinatorSettings { heal_wait: Duration::from_secs(30), prefill_chunk: 16, ..quick() }
}

/// Requests of every mode.
fn requests() -> Vec<Request> {
    let hot = |mode| Request { sampling: warm(7), ..request(&prompt(60), NEW, mode) };
    vec![
        request(&prompt(60), NEW, Mode::Pipelined),
        request(&prompt(60), NEW, Mode::Plain),
        hot(Mode::Pipelined),
        hot(Mode::Plain),
    ]
}

/// Reads tokens until `count` came.
pub(crate) async fn read(job: &mut Job, count: usize) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    while tokens.len() < count {
        match job.events.recv().await {
            Some(Event::Token { index, token, .. }) => {
                assert_eq!(index as usize, tokens.len());
                tokens.push(token);
            }
            other => panic!("{other:?} after {} tokens", tokens.len()),
        }
    }
    tokens
}

/// Reads the rest behind `tokens`.
pub(crate) async fn rest(mut job: Job, mut tokens: Vec<TokenId>) -> (Vec<TokenId>, u32) {
    loop {
        match job.events.recv().await {
            Some(Event::Token { index, token, .. }) => {
                assert_eq!(index as usize, tokens.len(), "nothing is repeated and nothing is missed");
                tokens.push(token);
            }
            Some(Event::Finished { reason, stats }) => {
                assert_eq!((reason, stats.committed as usize), (Finish::Length, tokens.len()));
                return (tokens, stats.heals);
            }
            other => panic!("{other:?} after {} tokens", tokens.len()),
        }
    }
}

/// Kills stage `lost` of a ring with `spares` under every request, after `read_first` tokens.
async fn killed(cut: &str, lost: usize, spares: &str, read_first: usize) {
    for request in requests() {
        let cut = ranges(cut);
        let mut rig = Rig::new(&cut, patient()).await;
        let expected = rig.run(request.clone()).await.tokens;
        assert_eq!(expected.len(), NEW as usize);
        for spare in ranges(spares) {
            rig.add(spare);
        }
        rig.members(rig.stages.len()).await;
        let mut job = rig.coordinator.submit(request.clone()).unwrap();
        rig.until("its prompt is under way", |rig| rig.coordinator.status().in_flight > 0).await;
        let first = read(&mut job, read_first).await;
        let view = rig.coordinator.status().view;
        rig.network.kill(rig.stages[lost].peer);
        let (tokens, heals) = rest(job, first).await;
        assert_eq!(tokens, expected, "{request:?}");
        assert_eq!(heals, 1);
        assert!(rig.coordinator.status().view > view);
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_takes_the_place_of_a_killed_head() {
    killed("0:2 2:4 4:7", 0, "0:2", 9).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_takes_the_place_of_a_killed_middle() {
    killed("0:2 2:4 4:7", 1, "2:4", 9).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_takes_the_place_of_a_killed_tail() {
    killed("0:2 2:4 4:7", 2, "4:7", 9).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_that_dies_during_prefill_costs_no_token() {
    killed("0:2 2:4 4:7", 1, "2:4", 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_cut_of_the_layers_changes_no_token() {
    killed("0:2 2:4 4:7", 1, "2:3 3:4", 9).await;
    killed("0:2 2:4 4:7", 0, "0:4", 9).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_waits_for_a_stage_that_comes_later() {
    let cut = ranges("0:2 2:4 4:7");
    let mut rig = Rig::new(&cut, patient()).await;
    let asked = request(&prompt(20), NEW, Mode::Pipelined);
    let expected = rig.run(asked.clone()).await.tokens;
    let mut job = rig.coordinator.submit(asked).unwrap();
    let first = read(&mut job, 5).await;
    rig.network.kill(rig.stages[1].peer);
    rig.until("the ring is broken", |rig| rig.coordinator.status().missing.is_some()).await;
    rig.add(cut[1]);
    let (tokens, heals) = rest(job, first).await;
    assert_eq!((tokens, heals), (expected, 1));
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_during_the_heal_is_healed_too() {
    let cut = ranges("0:2 2:4 4:7");
    let mut rig = Rig::new(&cut, patient()).await;
    let asked = request(&prompt(200), NEW, Mode::Pipelined);
    let expected = rig.run(asked.clone()).await.tokens;
    for range in ["2:4", "2:4", "0:2"] {
        rig.add(range.parse().unwrap());
    }
    rig.members(6).await;
    let mut job = rig.coordinator.submit(asked).unwrap();
    let first = read(&mut job, 5).await;
    for lost in [1, 0] {
        let view = rig.coordinator.status().view;
        rig.network.kill(rig.stages[lost].peer);
        rig.until("another view is joined", |rig| rig.coordinator.status().view > view).await;
    }
    let in_ring =
        rig.coordinator.status().members.into_iter().filter(|member| member.in_ring).map(|member| member.peer);
    let spare = in_ring.into_iter().find(|peer| [3, 4].iter().any(|at| rig.stages[*at].peer.to_string() == *peer));
    if let Some(spare) = spare {
        let at = [3, 4].into_iter().find(|at| rig.stages[*at].peer.to_string() == spare).unwrap();
        rig.network.kill(rig.stages[at].peer);
    }
    let (tokens, heals) = rest(job, first).await;
    assert_eq!(tokens, expected);
    assert!(heals >= 1);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_waits_in_vain_says_for_what() {
    let cut = ranges("0:2 2:4 4:7");
    let settings = CoordinatorSettings { heal_wait: Duration::from_millis(600), ..patient() };
    let rig = Rig::new(&cut, settings).await;
    let mut job = rig.coordinator.submit(request(&prompt(20), 900, Mode::Pipelined)).unwrap();
    read(&mut job, 3).await;
    rig.network.kill(rig.stages[1].peer);
    let mut last = None;
    while let Some(event) = job.events.recv().await {
        last = Some(event);
    }
    match last {
        Some(Event::Failed(JobError::StageLost { range, why, .. })) => {
            assert_eq!(range, "2:4");
            assert!(why.contains("0.6 s") && why.contains("layers 2:4 are missing"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    rig.end().await;
}
