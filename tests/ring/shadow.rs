//! A shadow holds the state of the stage that it shadows: when that one dies, next to nothing is computed
//! again; and whatever becomes of a shadow, no stream notices.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ringfence::coordinator::job::{Event, Job, JobError, Mode, Request, Serve};
use ringfence::engine::cpu::CpuEngine;
use ringfence::engine::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use ringfence::ids::{LayerRange, Position, SessionId, TokenId};

use crate::heal::{patient, read, rest};
use crate::rebuild::{Watched, healed};
use crate::rig::{Rig, engine, prompt, ranges, request, tiny, warm};
use crate::scripted::Scripted;

const PROMPT: usize = 60;
const NEW: u32 = 240;
/// Tokens that are read before a stage is killed.
const READ_FIRST: usize = 50;
/// What a shadow may lack when its stage is killed: less than a copy, what is in flight, and what it is just
/// computing.
const BEHIND: usize = 32;
/// Positions that are computed again at most: what the shadow lacked, and what was committed until the ring
/// stood. Without it, more than a hundred.
const AGAIN: u64 = BEHIND as u64 + 24;

/// A slow ring, so that a shadow keeps up with it on any machine.
async fn slow(cut: &[LayerRange]) -> Rig {
    let rig = Rig::new(cut, patient()).await;
    slow_down(&rig);
    rig
}

fn slow_down(rig: &Rig) {
    let peers: Vec<_> =
        std::iter::once(rig.coordinator_peer).chain(rig.stages.iter().map(|stage| stage.peer)).collect();
    for (at, from) in peers.iter().enumerate() {
        for to in &peers[at + 1..] {
            rig.network.set_delay(*from, *to, Duration::from_millis(3));
        }
    }
}

fn watched(range: LayerRange) -> (Box<dyn Engine>, Arc<AtomicU64>) {
    let positions = Arc::<AtomicU64>::default();
    let inner = Box::new(engine(&tiny(), range));
    (Box::new(Watched { inner, positions: Arc::clone(&positions), false_at: None, lies: u32::MAX }), positions)
}

/// Reads on until a shadow that computed `positions` is hardly behind.
async fn read_until_current(job: &mut Job, mut tokens: Vec<TokenId>, positions: &AtomicU64) -> Vec<TokenId> {
    while tokens.len() < READ_FIRST || (positions.load(Ordering::Relaxed) as usize) + BEHIND < PROMPT + tokens.len() {
        match job.events.recv().await {
            Some(Event::Token { token, .. }) => tokens.push(token),
            other => panic!("the shadow did not keep up: {other:?} after {} tokens", tokens.len()),
        }
    }
    tokens
}

/// Reads so many tokens more.
async fn read_more(job: &mut Job, mut tokens: Vec<TokenId>, more: usize) -> Vec<TokenId> {
    let end = tokens.len() + more;
    while tokens.len() < end {
        match job.events.recv().await {
            Some(Event::Token { token, .. }) => tokens.push(token),
            other => panic!("{other:?} after {} tokens", tokens.len()),
        }
    }
    tokens
}

fn asked(mode: Mode, hot: bool) -> Request {
    let asked = request(&prompt(PROMPT), NEW, mode);
    if hot { Request { sampling: warm(7), ..asked } } else { asked }
}

/// Kills a stage that is shadowed, in the middle of a stream.
async fn killed(lost: usize, mode: Mode, hot: bool) {
    let cut = ranges("0:2 2:4 4:7");
    let mut rig = slow(&cut).await;
    let expected = rig.run(asked(mode, hot)).await.tokens;
    let (engine, positions) = watched(cut[lost]);
    rig.add_shadow(engine).await;
    let mut job = rig.coordinator.submit(asked(mode, hot)).unwrap();
    let first = read_until_current(&mut job, Vec::new(), &positions).await;
    rig.network.kill(rig.stages[lost].peer);
    let (tokens, heals) = rest(job, first).await;
    assert_eq!((tokens, heals), (expected, 1), "stage {lost}, {mode:?}, hot {hot}");
    let again = healed(&rig).replayed_positions;
    assert!(again <= AGAIN, "{again} positions were computed again for stage {lost}");
    let status = rig.coordinator.status();
    let shadow = status.members.iter().find(|member| member.peer == rig.stages[3].peer.to_string()).unwrap();
    assert!(shadow.in_ring && shadow.shadow_of.is_none(), "{shadow:?}");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadowed_head_is_replaced_at_once() {
    killed(0, Mode::Pipelined, false).await;
    killed(0, Mode::Pipelined, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadowed_middle_is_replaced_at_once() {
    killed(1, Mode::Pipelined, false).await;
    killed(1, Mode::Pipelined, true).await;
    killed(1, Mode::Plain, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadowed_tail_is_replaced_at_once() {
    killed(2, Mode::Pipelined, false).await;
    killed(2, Mode::Pipelined, true).await;
}

/// Waits in every pass for as long as somebody holds the lock.
struct Held {
    inner: Box<dyn Engine>,
    gate: Arc<Mutex<()>>,
}

impl Engine for Held {
    fn facts(&self) -> &EngineFacts {
        self.inner.facts()
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        self.inner.state_bytes(shape)
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        self.inner.open(session, shape)
    }

    fn forward(&mut self, chunks: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        drop(self.gate.lock().unwrap());
        self.inner.forward(chunks, out)
    }

    fn draft(&mut self, session: SessionId, pos: Position, token: TokenId) -> Result<Drafts, EngineError> {
        self.inner.draft(session, pos, token)
    }

    fn close(&mut self, session: SessionId) {
        self.inner.close(session);
    }
}

/// The engine behind a gate stands still until this is opened, or dropped.
struct Shut {
    open: SyncSender<()>,
    holder: JoinHandle<()>,
}

impl Shut {
    fn new(gate: &Arc<Mutex<()>>) -> Self {
        let gate = Arc::clone(gate);
        let (open, opened) = sync_channel(1);
        let (locked, is_locked) = sync_channel(1);
        let holder = std::thread::spawn(move || {
            let _held = gate.lock().unwrap();
            locked.send(()).unwrap();
            let _ = opened.recv();
        });
        is_locked.recv().unwrap();
        Self { open, holder }
    }

    fn open(self) {
        drop(self.open);
        self.holder.join().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_that_stalls_or_is_killed_costs_nothing() {
    for (at, range) in ranges("0:2 2:4 4:7").into_iter().enumerate() {
        let mut rig = Rig::new(&ranges("0:2 2:4 4:7"), patient()).await;
        let expected = rig.run(asked(Mode::Pipelined, true)).await.tokens;
        let (gate, inner) = (Arc::new(Mutex::new(())), Box::new(engine(&tiny(), range)));
        rig.add_shadow(Box::new(Held { inner, gate: Arc::clone(&gate) })).await;
        let view = rig.coordinator.status().view;
        let shut = Shut::new(&gate);
        let run = rig.run(asked(Mode::Pipelined, true)).await;
        assert_eq!((&run.tokens, run.stats().heals), (&expected, 0), "stalled, range {at}");
        let mut job = rig.coordinator.submit(asked(Mode::Pipelined, true)).unwrap();
        let first = read(&mut job, 9).await;
        rig.network.kill(rig.stages[3].peer);
        let (tokens, heals) = rest(job, first).await;
        assert_eq!((tokens, heals), (expected, 0), "killed, range {at}");
        let status = rig.coordinator.status();
        assert_eq!((status.view, status.heals.len()), (view, 0));
        shut.open();
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_that_comes_late_or_misses_copies_is_caught_up() {
    for lost in 0..3 {
        let cut = ranges("0:2 2:4 4:7");
        let mut rig = slow(&cut).await;
        let asked = request(&prompt(PROMPT), 800, Mode::Pipelined);
        let mut job = rig.coordinator.submit(asked.clone()).unwrap();
        let mut first = read(&mut job, 10).await;
        let (engine, positions) = watched(cut[lost]);
        rig.add_shadow(engine).await;
        let view = rig.coordinator.status().view;
        let source = lost.checked_sub(1).map_or(rig.coordinator_peer, |at| rig.stages[at].peer);
        first = read_until_current(&mut job, first, &positions).await;
        // What is sent meanwhile is lost without a word.
        rig.network.cut(source, rig.stages[3].peer);
        first = read_more(&mut job, first, 60).await;
        assert_eq!(rig.coordinator.status().view, view, "a shadow breaks nothing");
        assert!((positions.load(Ordering::Relaxed) as usize) + BEHIND < PROMPT + first.len(), "it is behind");
        rig.network.heal(source, rig.stages[3].peer);
        first = read_until_current(&mut job, first, &positions).await;
        assert_eq!(rig.coordinator.status().view, view);
        rig.network.kill(rig.stages[lost].peer);
        let (tokens, heals) = rest(job, first).await;
        let again = healed(&rig).replayed_positions;
        assert_eq!(heals, 1);
        assert!(again <= AGAIN, "{again} positions were computed again for stage {lost}");
        assert_eq!(rig.run(asked).await.tokens, tokens);
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn speculation_that_fails_all_the_time_leaves_a_shadow_right() {
    for lost in 0..3 {
        let cut = ranges("0:2 2:4 4:7");
        let plain = Rig::new(&cut, patient()).await;
        let expected = plain.run(asked(Mode::Plain, true)).await.tokens;
        plain.end().await;
        let truth: Arc<BTreeMap<u32, TokenId>> = Arc::new((PROMPT as u32..).zip(expected.iter().copied()).collect());
        let wrap = |inner: CpuEngine| -> Box<dyn Engine> {
            let facts = inner.facts().clone();
            if facts.draft_block == 0 {
                return Box::new(inner);
            }
            Box::new(Scripted { inner, facts, truth: Arc::clone(&truth), right: |at| at % 3 })
        };
        let mut rig = Rig::wrapped(&cut, patient(), &wrap).await;
        slow_down(&rig);
        let positions = Arc::<AtomicU64>::default();
        let inner = wrap(engine(&tiny(), cut[lost]));
        rig.add_shadow(Box::new(Watched { inner, positions: Arc::clone(&positions), false_at: None, lies: u32::MAX }))
            .await;
        let mut job = rig.coordinator.submit(asked(Mode::Pipelined, true)).unwrap();
        let first = read_until_current(&mut job, Vec::new(), &positions).await;
        assert!(rig.coordinator.status().rejections > 5);
        let computed = positions.load(Ordering::Relaxed);
        assert!(computed <= (PROMPT + first.len()) as u64 + 64, "what is rejected never comes to a shadow");
        rig.network.kill(rig.stages[lost].peer);
        let (tokens, heals) = rest(job, first).await;
        assert_eq!((tokens, heals), (expected, 1));
        let again = healed(&rig).replayed_positions;
        assert!(again <= AGAIN, "{again} positions were computed again for stage {lost}");
        rig.end().await;
    }
}

/// Waits until so many rings that broke are whole again.
async fn whole_again(rig: &Rig, breaks: usize) {
    let whole = |rig: &Rig| {
        let heals = rig.coordinator.status().heals;
        heals.len() == breaks && heals.iter().all(|heal| heal.whole_ms.is_some())
    };
    rig.until("the next ring is whole", whole).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_that_is_behind_gets_what_it_lacks_and_no_more() {
    const LAG: usize = 80;
    for lost in 0..3 {
        let cut = ranges("0:2 2:4 4:7");
        let mut rig = slow(&cut).await;
        let expected = rig.run(asked(Mode::Pipelined, true)).await.tokens;
        let gate = Arc::new(Mutex::new(()));
        let (inner, positions) = watched(cut[lost]);
        rig.add_shadow(Box::new(Held { inner, gate: Arc::clone(&gate) })).await;
        let mut job = rig.coordinator.submit(asked(Mode::Pipelined, true)).unwrap();
        let first = read_until_current(&mut job, Vec::new(), &positions).await;
        let shut = Shut::new(&gate);
        let first = read_more(&mut job, first, LAG).await;
        rig.network.kill(rig.stages[lost].peer);
        // It goes on only when what it was sent as a shadow counts no more.
        whole_again(&rig, 1).await;
        shut.open();
        let (tokens, heals) = rest(job, first).await;
        assert_eq!((tokens, heals), (expected, 1), "stage {lost}");
        let again = healed(&rig).replayed_positions;
        // One pass may have been under way.
        let lacked = LAG as u64 - 16..LAG as u64 + AGAIN;
        assert!(lacked.contains(&again), "{again} positions were computed again for stage {lost}");
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_takes_a_place_during_the_heal_of_another_stage() {
    for (first_lost, then) in [(0, 1), (1, 2), (2, 0)] {
        let cut = ranges("0:2 2:4 4:7");
        let mut rig = slow(&cut).await;
        let expected = rig.run(asked(Mode::Pipelined, true)).await.tokens;
        let gate = Arc::new(Mutex::new(()));
        let (inner, positions) = watched(cut[first_lost]);
        rig.add_shadow(Box::new(Held { inner, gate: Arc::clone(&gate) })).await;
        let (other, others) = watched(cut[then]);
        rig.add_shadow(other).await;
        let mut job = rig.coordinator.submit(asked(Mode::Pipelined, true)).unwrap();
        let first = read_until_current(&mut job, Vec::new(), &positions).await;
        let first = read_until_current(&mut job, first, &others).await;
        let shut = Shut::new(&gate);
        rig.network.kill(rig.stages[first_lost].peer);
        // The session can't go on: its stage has not said what it kept.
        whole_again(&rig, 1).await;
        rig.network.kill(rig.stages[then].peer);
        whole_again(&rig, 2).await;
        shut.open();
        let (tokens, _) = rest(job, first).await;
        assert_eq!(tokens, expected, "stages {first_lost} and {then}");
        let status = rig.coordinator.status();
        let again: u64 = status.heals.iter().map(|heal| heal.replayed_positions).sum();
        assert!(again <= 2 * AGAIN, "{again} positions were computed again for stages {first_lost} and {then}");
        let in_ring = |at: usize| {
            let name = rig.stages[at].peer.to_string();
            status.members.iter().any(|member| member.peer == name && member.in_ring)
        };
        assert!(in_ring(3) && in_ring(4), "{:?}", status.members);
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_that_computed_something_else_once_is_made_anew() {
    for lost in 0..3 {
        let cut = ranges("0:2 2:4 4:7");
        let mut rig = slow(&cut).await;
        let expected = rig.run(asked(Mode::Pipelined, true)).await.tokens;
        let at = PROMPT as u32 + READ_FIRST as u32;
        let positions = Arc::<AtomicU64>::default();
        let liar = Watched {
            inner: Box::new(engine(&tiny(), cut[lost])),
            positions: Arc::clone(&positions),
            false_at: Some(Position(at)),
            lies: 1,
        };
        rig.add_shadow(Box::new(liar)).await;
        let mut job = rig.coordinator.submit(asked(Mode::Pipelined, true)).unwrap();
        let mut first = Vec::new();
        // A tail sees it at the next position.
        while positions.load(Ordering::Relaxed) < u64::from(at) + 2 {
            first = read_more(&mut job, first, 1).await;
        }
        let first = read_more(&mut job, first, 5).await;
        rig.network.kill(rig.stages[lost].peer);
        let (tokens, heals) = rest(job, first).await;
        assert_eq!((tokens, heals), (expected, 1), "stage {lost}");
        let again = healed(&rig).replayed_positions;
        assert!(again >= u64::from(at), "{again} positions were computed again for stage {lost}: not all of them");
        rig.end().await;
    }
}

/// A shadow that computes something else at a position, when its stage dies: the session fails, and says so.
async fn refused(lost: usize, said: &str) {
    let cut = ranges("0:2 2:4 4:7");
    let mut rig = slow(&cut).await;
    let positions = Arc::<AtomicU64>::default();
    let inner = Box::new(engine(&tiny(), cut[lost]));
    let at = PROMPT as u32 + READ_FIRST as u32;
    rig.add_shadow(Box::new(Watched {
        inner,
        positions: Arc::clone(&positions),
        false_at: Some(Position(at)),
        lies: u32::MAX,
    }))
    .await;
    let mut job = rig.coordinator.submit(request(&prompt(PROMPT), 900, Mode::Pipelined)).unwrap();
    let mut count = 0;
    while count < READ_FIRST + BEHIND {
        assert!(matches!(job.events.recv().await, Some(Event::Token { .. })));
        count += 1;
    }
    rig.network.kill(rig.stages[lost].peer);
    let mut last = None;
    while let Some(event) = job.events.recv().await {
        last = Some(event);
    }
    match last {
        Some(Event::Failed(JobError::Diverged { why } | JobError::Refused { why, .. })) => {
            assert!(why.contains(said), "{why}");
        }
        other => panic!("{other:?}"),
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_that_computes_something_else_is_found_before_the_session_goes_on() {
    refused(0, "puts out at position 110").await;
    refused(1, "puts out at position 110").await;
    refused(2, "answers position 110").await;
}
