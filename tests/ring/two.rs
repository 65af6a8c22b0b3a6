//! More than one thing goes wrong under a stream: two stages die, one answers and moves nothing, a spare freezes
//! while it takes its place, one that was replaced goes on. The tokens are those of a run that never failed.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ringfence::config::CoordinatorSettings;
use ringfence::coordinator::job::{Mode, Serve};
use ringfence::engine::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use ringfence::ids::{Node, Position, SessionId, TokenId};

use crate::heal::{NEW, patient, read, rest};
use crate::rig::{Rig, prompt, ranges, request};

/// Kills these stages at once, each of which has a spare.
async fn killed(lost: [usize; 2]) {
    let cut = ranges("0:2 2:4 4:7");
    for mode in [Mode::Pipelined, Mode::Plain] {
        let mut rig = Rig::new(&cut, patient()).await;
        let asked = request(&prompt(60), NEW, mode);
        let expected = rig.run(asked.clone()).await.tokens;
        for lost in lost {
            rig.add(cut[lost]);
        }
        rig.members(5).await;
        let mut job = rig.coordinator.submit(asked).unwrap();
        let first = read(&mut job, 9).await;
        for lost in lost {
            rig.network.kill(rig.stages[lost].peer);
        }
        let (tokens, heals) = rest(job, first).await;
        assert_eq!(tokens, expected, "{lost:?}");
        assert!(heals >= 1);
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn head_and_tail_die_at_once() {
    killed([0, 2]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_neighbours_die_at_once() {
    killed([0, 1]).await;
    killed([1, 2]).await;
}

/// Whether an engine stands still.
#[derive(Debug, Default)]
struct Brake {
    on: Mutex<bool>,
    changed: Condvar,
}

impl Brake {
    fn set(&self, on: bool) {
        *self.on.lock().unwrap() = on;
        self.changed.notify_all();
    }
}

/// An engine that stands still while its brake is on: its stage answers, and moves nothing.
struct Braked(Box<dyn Engine>, Arc<Brake>);

impl Engine for Braked {
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
        drop(self.1.changed.wait_while(self.1.on.lock().unwrap(), |on| *on).unwrap());
        self.0.forward(batch, out)
    }

    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError> {
        self.0.draft(session, at, anchor)
    }
}

/// Stage `stuck` answers on control and moves no frame; then it goes on, and what it still says is of no use.
async fn stuck(stuck: usize) {
    let cut = ranges("0:2 2:4 4:7");
    let brakes: Vec<Arc<Brake>> = cut.iter().map(|_| Arc::default()).collect();
    let wrapped = Mutex::new(brakes.iter());
    let settings = CoordinatorSettings { reply_deadline: Duration::from_secs(1), ..patient() };
    let mut rig = Rig::wrapped(&cut, settings, &|engine| {
        let brake = wrapped.lock().unwrap().next().unwrap();
        Box::new(Braked(Box::new(engine), Arc::clone(brake)))
    })
    .await;
    let asked = request(&prompt(60), 400, Mode::Pipelined);
    let expected = rig.run(asked.clone()).await.tokens;
    rig.add(cut[stuck]);
    rig.members(4).await;
    let mut job = rig.coordinator.submit(asked).unwrap();
    let mut tokens = read(&mut job, 9).await;
    brakes[stuck].set(true);
    let spare = rig.stages[3].peer.to_string();
    let replaced = |rig: &Rig| {
        let status = rig.coordinator.status();
        status.members.iter().any(|member| member.in_ring && member.peer == spare)
    };
    rig.until("the spare takes its place", replaced).await;
    // It goes on while the stream does: it computes what it had, in the view that it was in.
    brakes[stuck].set(false);
    let (all, heals) = rest(job, std::mem::take(&mut tokens)).await;
    assert_eq!(all, expected, "stage {stuck}");
    assert!(heals >= 1);
    let heals = rig.coordinator.status().heals;
    assert_eq!(heals[0].peer, rig.stages[stuck].peer.to_string(), "{heals:?}");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_that_answers_and_moves_no_frame_is_replaced() {
    for at in 0..3 {
        stuck(at).await;
    }
}

/// Nothing comes through to or from it.
fn freeze(rig: &Rig, frozen: Node) {
    let others = rig.stages.iter().map(|stage| stage.peer).filter(|other| *other != frozen);
    for other in others.chain([rig.coordinator_peer]) {
        rig.network.cut(frozen, other);
        rig.network.cut(other, frozen);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_that_freezes_while_it_takes_its_place_is_replaced_by_another() {
    let cut = ranges("0:2 2:4 4:7");
    for lost in 0..3 {
        let mut rig = Rig::new(&cut, patient()).await;
        let asked = request(&prompt(60), NEW, Mode::Pipelined);
        let expected = rig.run(asked.clone()).await.tokens;
        rig.add(cut[lost]);
        rig.add(cut[lost]);
        rig.members(5).await;
        let mut job = rig.coordinator.submit(asked).unwrap();
        let first = read(&mut job, 9).await;
        // Of two that are as good, the lower name is taken.
        let (chosen, other) = {
            let (a, b) = (rig.stages[3].peer, rig.stages[4].peer);
            if a < b { (a, b) } else { (b, a) }
        };
        freeze(&rig, chosen);
        rig.network.kill(rig.stages[lost].peer);
        let (tokens, heals) = rest(job, first).await;
        assert_eq!((tokens, heals), (expected, 1), "stage {lost}");
        let status = rig.coordinator.status();
        let in_ring = status.members.iter().filter(|member| member.in_ring).map(|member| member.peer.clone());
        assert!(in_ring.into_iter().any(|peer| peer == other.to_string()), "{status:?}");
        assert!(status.view.0 >= 3, "the one that froze had its turn first: {status:?}");
        rig.end().await;
    }
}
