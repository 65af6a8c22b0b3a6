//! A stage dies: the session ends with an error that names it, and the ring serves again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use ringfence::config::CoordinatorSettings;
use ringfence::coordinator::job::{Event, Finish, JobError, Mode, Serve, SubmitError};
use ringfence::engine::cpu::CpuEngine;
use ringfence::engine::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use ringfence::ids::{Position, SessionId, TokenId};
use ringfence::node::journal::JournalConfig;
use ringfence::node::serve::StageEvent;

use crate::rig::{Rig, collect, engine, prompt, quick, ranges, request, start_stage, tiny};

fn names(error: &JobError, layers: &str) -> bool {
    matches!(error, JobError::StageLost { range, .. } if range == layers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_stage_is_named_and_its_return_makes_the_ring_whole() {
    let (checkpoint, cut) = (tiny(), ranges("0:2 2:4 4:7"));
    for lost in 0..cut.len() {
        let rig = Rig::new(&cut, quick()).await;
        let mut job = rig.coordinator.submit(request(&prompt(20), 900, Mode::Pipelined)).unwrap();
        assert!(matches!(job.events.recv().await, Some(Event::Token { .. })));
        rig.network.kill(rig.stages[lost].peer);
        let mut last = None;
        while let Some(event) = job.events.recv().await {
            last = Some(event);
        }
        let Some(Event::Failed(error)) = last else { panic!("{last:?}") };
        assert!(names(&error, &cut[lost].to_string()), "{error}");
        let refused = rig.coordinator.submit(request(&prompt(5), 3, Mode::Pipelined));
        assert!(matches!(refused, Err(SubmitError::NotReady { .. })), "{refused:?}");
        assert!(!rig.coordinator.status().ready);
        assert!(rig.coordinator.status().missing.unwrap().contains(&cut[lost].to_string()));
        let stage = Box::new(engine(&checkpoint, cut[lost]));
        let dial = Some(rig.coordinator_address.clone());
        let stage = start_stage(
            &rig.network,
            rig.coordinator_peer,
            dial,
            (stage, JournalConfig::default()),
            checkpoint.digest(),
        );
        rig.ready().await;
        assert_eq!(rig.run(request(&prompt(20), 30, Mode::Pipelined)).await.tokens.len(), 30);
        let _ = stage.stop.send(true);
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_stage_is_found_by_its_silence() {
    let cut = ranges("0:2 2:4 4:7");
    let rig = Rig::new(&cut, quick()).await;
    let mut job = rig.coordinator.submit(request(&prompt(20), 900, Mode::Pipelined)).unwrap();
    assert!(matches!(job.events.recv().await, Some(Event::Token { .. })));
    let frozen = rig.stages[1].peer;
    for other in [rig.coordinator_peer, rig.stages[0].peer, rig.stages[2].peer] {
        rig.network.cut(frozen, other);
        rig.network.cut(other, frozen);
    }
    let run = collect_rest(&mut job).await;
    assert!(names(&run, "2:4"), "{run}");
    for other in [rig.coordinator_peer, rig.stages[0].peer, rig.stages[2].peer] {
        rig.network.heal(frozen, other);
        rig.network.heal(other, frozen);
    }
    rig.ready().await;
    assert_eq!(rig.run(request(&prompt(20), 12, Mode::Pipelined)).await.tokens.len(), 12);
    rig.end().await;
}

async fn collect_rest(job: &mut ringfence::coordinator::job::Job) -> JobError {
    let mut last = None;
    while let Some(event) = tokio::time::timeout(Duration::from_secs(30), job.events.recv()).await.unwrap() {
        last = Some(event);
    }
    match last {
        Some(Event::Failed(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_edge_between_two_stages_is_localized() {
    let cut = ranges("0:2 2:4 4:7");
    let settings = CoordinatorSettings { reply_deadline: Duration::from_millis(800), ..quick() };
    let rig = Rig::new(&cut, settings).await;
    let mut job = rig.coordinator.submit(request(&prompt(20), 900, Mode::Pipelined)).unwrap();
    assert!(matches!(job.events.recv().await, Some(Event::Token { .. })));
    rig.network.cut(rig.stages[0].peer, rig.stages[1].peer);
    let error = collect_rest(&mut job).await;
    assert!(names(&error, "2:4"), "{error}");
    rig.network.heal(rig.stages[0].peer, rig.stages[1].peer);
    rig.ready().await;
    assert_eq!(rig.run(request(&prompt(20), 12, Mode::Pipelined)).await.tokens.len(), 12);
    rig.end().await;
}

/// A ring that no probe keeps busy.
async fn quiet() -> Rig {
    let settings = CoordinatorSettings { probe_every: Duration::from_secs(600), ..quick() };
    let rig = Rig::new(&ranges("0:2 2:4 4:7"), settings).await;
    rig.until("the probe is over", |rig| rig.coordinator.status().sessions == 0).await;
    rig
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hop_that_died_idle_is_mended_in_its_view_before_a_frame_is_lost() {
    let mut rig = quiet().await;
    let expected = rig.run(request(&prompt(20), 12, Mode::Pipelined)).await.tokens;
    let view = rig.coordinator.status().view;
    let (first, second) = (rig.stages[0].peer, rig.stages[1].peer);
    rig.network.cut(first, second);
    // The predecessor finds the silence, drops the connection and dials; nobody answers yet.
    rig.until("the silence is found", |rig| !rig.network.is_connected(first, second)).await;
    let job = rig.coordinator.submit(request(&prompt(20), 12, Mode::Pipelined)).unwrap();
    rig.network.heal(first, second);
    let run = collect(job).await;
    assert_eq!((run.finish(), run.tokens), (Finish::Length, expected));
    rig.stages[0].tells(&StageEvent::Mended { peer: second.to_string() }).await;
    rig.stages[1].tells(&StageEvent::Mended { peer: first.to_string() }).await;
    let status = rig.coordinator.status();
    assert_eq!((status.view, status.missing), (view, None), "the ring goes on as it was");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hop_that_can_not_be_mended_breaks_the_ring_and_names_the_stage() {
    let rig = quiet().await;
    let view = rig.coordinator.status().view;
    let (first, second) = (rig.stages[0].peer, rig.stages[1].peer);
    rig.network.cut(first, second);
    rig.until("the hop is given up", |rig| rig.coordinator.status().missing.is_some()).await;
    rig.network.heal(first, second);
    rig.ready().await;
    assert!(rig.coordinator.status().view > view);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ring_says_how_far_its_members_are() {
    let rig = quiet().await;
    let (head, tail) = (rig.stages[0].peer, rig.stages[2].peer);
    rig.network.set_delay(rig.coordinator_peer, head, Duration::from_millis(20));
    rig.network.set_delay(rig.coordinator_peer, tail, Duration::from_millis(40));
    rig.until("round trips are as the delays", |rig| {
        let status = rig.coordinator.status();
        let least = |at: usize, ms: u64| status.hops.get(at).and_then(|hop| hop.rtt_us) >= Some(ms * 1_000);
        least(0, 39) && least(3, 79) && status.hops.len() == 4
    })
    .await;
    let status = rig.coordinator.status();
    let ways: Vec<_> = status.hops.iter().map(|hop| (hop.from.clone(), hop.to.clone())).collect();
    let names: Vec<String> = [rig.coordinator_peer, head, rig.stages[1].peer, tail].map(|node| node.to_string()).into();
    let expected: Vec<_> = (0..4).map(|at| (names[at].clone(), names[(at + 1) % 4].clone())).collect();
    assert_eq!(ways, expected);
    assert!(status.hops[1].rtt_us < Some(30_000), "{:?}", status.hops);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_stage_finishes_what_is_open() {
    let cut = ranges("0:2 2:4 4:7");
    let mut rig = Rig::new(&cut, quick()).await;
    let job = rig.coordinator.submit(request(&prompt(20), 200, Mode::Pipelined)).unwrap();
    rig.until("the session is under way", |rig| rig.coordinator.status().in_flight > 0).await;
    rig.stages[1].stop.send(true).unwrap();
    let run = collect(job).await;
    assert_eq!((run.tokens.len(), run.finish()), (200, Finish::Length));
    let drained = &mut rig.stages[1].task;
    tokio::time::timeout(Duration::from_secs(20), drained).await.unwrap().unwrap().unwrap();
    rig.until("the ring says what is missing", |rig| {
        rig.coordinator.status().missing.is_some_and(|missing| missing.contains("2:4"))
    })
    .await;
    rig.stages.remove(1);
    rig.end().await;
}

/// An engine that takes its time, and says when.
struct Slow(CpuEngine, Arc<AtomicBool>, Arc<AtomicU32>);

impl Engine for Slow {
    fn facts(&self) -> &EngineFacts {
        self.0.facts()
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        self.0.state_bytes(shape)
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        self.0.open(session, shape)
    }

    fn close(&mut self, session: SessionId) {
        self.0.close(session);
    }

    fn forward(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        self.2.fetch_add(1, Ordering::AcqRel);
        self.1.store(true, Ordering::Release);
        std::thread::sleep(Duration::from_millis(100));
        self.1.store(false, Ordering::Release);
        self.0.forward(batch, out)
    }

    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError> {
        self.0.draft(session, at, anchor)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_ends_while_it_computes() {
    let busy = Arc::new(AtomicBool::new(false));
    let mut rig =
        Rig::wrapped(&ranges("0:7"), quick(), &|engine| Box::new(Slow(engine, Arc::clone(&busy), Arc::default())))
            .await;
    let mut job = rig.coordinator.submit(request(&prompt(20), 200, Mode::Pipelined)).unwrap();
    assert!(matches!(job.events.recv().await, Some(Event::Token { .. })));
    rig.until("the stage computes", |_| busy.load(Ordering::Acquire)).await;
    rig.network.kill(rig.stages[0].peer);
    let ended = tokio::time::timeout(Duration::from_secs(10), &mut rig.stages[0].task).await.unwrap().unwrap();
    assert!(ended.is_err(), "its network is gone");
    rig.stages.clear();
    rig.end().await;
}

/// An engine that breaks after some passes, as a defect of ours would.
struct Broken(CpuEngine, u32);

impl Engine for Broken {
    fn facts(&self) -> &EngineFacts {
        self.0.facts()
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        self.0.state_bytes(shape)
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        self.0.open(session, shape)
    }

    fn close(&mut self, session: SessionId) {
        self.0.close(session);
    }

    fn forward(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        assert!(self.1 > 0, "this engine breaks on purpose");
        self.1 -= 1;
        self.0.forward(batch, out)
    }

    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError> {
        self.0.draft(session, at, anchor)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_whose_engine_breaks_ends_and_is_named() {
    let mut rig = Rig::wrapped(&ranges("0:7"), quick(), &|engine| Box::new(Broken(engine, 20))).await;
    let mut job = rig.coordinator.submit(request(&prompt(20), 200, Mode::Plain)).unwrap();
    let error = collect_rest(&mut job).await;
    assert!(names(&error, "0:7"), "{error}");
    let ended = tokio::time::timeout(Duration::from_secs(20), &mut rig.stages[0].task).await.unwrap().unwrap();
    assert!(ended.is_err(), "a stage without its engine does not go on");
    rig.stages.clear();
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_is_gone_costs_no_more_than_the_pass_under_way() {
    let (busy, passes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let wrap = |engine| -> Box<dyn Engine> { Box::new(Slow(engine, Arc::clone(&busy), Arc::clone(&passes))) };
    let settings = CoordinatorSettings { prefill_chunk: 8, ..quick() };
    let rig = Rig::wrapped(&ranges("0:7"), settings, &wrap).await;
    let before = passes.load(Ordering::Acquire);
    // The head has up to sixteen chunks of it at once, of which only the first is computed.
    let job = rig.coordinator.submit(request(&prompt(300), 5, Mode::Plain)).unwrap();
    rig.until("the stage computes", |_| passes.load(Ordering::Acquire) > before).await;
    drop(job);
    assert_eq!(rig.run(request(&prompt(5), 1, Mode::Plain)).await.tokens.len(), 1);
    let after = passes.load(Ordering::Acquire) - before;
    // The pass under way, the second request's, and at most two of probes or of a late close.
    assert!(after <= 4, "{after} passes");
    rig.end().await;
}
