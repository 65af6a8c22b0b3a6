//! A ring in one process: stages and coordinator as they are, links in memory.

use std::sync::Arc;
use std::time::Duration;

use libp2p::Multiaddr;
use ringfence::config::{Admit, CoordinatorSettings, DEAD_AFTER, HEARTBEAT, MAX_SESSIONS, StageSettings};
use ringfence::coordinator::handle::Coordinator;
use ringfence::coordinator::job::{Event, Finish, Job, JobError, JobStats, Mode, ModelFacts, Request, Serve};
use ringfence::coordinator::log::Log;
use ringfence::coordinator::run::{CoordinatorParts, ModelShape, start, start_logged};
use ringfence::engine::Engine;
use ringfence::engine::cpu::{CpuEngine, CpuSettings};
use ringfence::ids::{LayerRange, Node, TokenId, WireEncoding};
use ringfence::model::Checkpoint;
use ringfence::node::journal::JournalConfig;
use ringfence::node::membership::Obey;
use ringfence::node::serve::{ServeError, StageEvent, StageParts, serve};
use ringfence::proto::control::Sampling;
use ringfence::transport::memory::MemoryNetwork;
use ringfence::transport::scope::Scope;
use ringfence::transport::{Link, LinkEvents};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Deadline of everything a test waits for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A stage of the rig.
pub(crate) struct Stage {
    pub(crate) peer: Node,
    pub(crate) address: Multiaddr,
    pub(crate) stop: watch::Sender<bool>,
    /// What it tells an operator.
    pub(crate) events: mpsc::Receiver<StageEvent>,
    pub(crate) task: JoinHandle<Result<(), ServeError>>,
}

/// A ring under test.
pub(crate) struct Rig {
    pub(crate) network: MemoryNetwork,
    pub(crate) stages: Vec<Stage>,
    pub(crate) coordinator: Coordinator,
    pub(crate) coordinator_peer: Node,
    pub(crate) coordinator_address: Multiaddr,
    settings: CoordinatorSettings,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// Wraps an engine before a stage gets it.
pub(crate) type Wrap<'a> = &'a dyn Fn(CpuEngine) -> Box<dyn Engine>;

pub(crate) fn tiny() -> Checkpoint {
    Checkpoint::tiny().unwrap()
}

pub(crate) fn ranges(text: &str) -> Vec<LayerRange> {
    text.split(' ').map(|range| range.parse().unwrap()).collect()
}

pub(crate) fn engine(checkpoint: &Checkpoint, range: LayerRange) -> CpuEngine {
    CpuEngine::new(checkpoint, range, &CpuSettings { max_context: Some(1_024), ..CpuSettings::default() }).unwrap()
}

/// Starts a stage that obeys `coordinator`, and with `dial` goes to it by itself.
pub(crate) fn start_stage(
    network: &MemoryNetwork,
    coordinator: Node,
    dial: Option<Multiaddr>,
    made: (Box<dyn Engine>, JournalConfig),
    digest: [u8; 32],
) -> Stage {
    start_waiting(network, coordinator, (dial, false), made, digest)
}

/// The same, as a spare that shadows if `shadow`.
fn start_waiting(
    network: &MemoryNetwork,
    coordinator: Node,
    (dial, shadow): (Option<Multiaddr>, bool),
    (engine, journal): (Box<dyn Engine>, JournalConfig),
    digest: [u8; 32],
) -> Stage {
    let (link, events) = network.link();
    let (peer, address) = (link.local(), link.addresses()[0].clone());
    let (stop, stopped) = watch::channel(false);
    let (observer, told) = mpsc::channel(256);
    let parts = StageParts { engine, link, events, model_digest: digest, stop: stopped, observer: Some(observer) };
    let settings = StageSettings {
        coordinator: dial,
        obey: Obey::Peers([coordinator.peer].into()),
        max_sessions: MAX_SESSIONS,
        encodings: vec![WireEncoding::Fp8, WireEncoding::Bf16],
        announce: Vec::new(),
        dial_scope: Scope::Public,
        spare: shadow,
        shadow,
        journal,
        heartbeat: HEARTBEAT,
        dead_after: DEAD_AFTER,
    };
    let task = tokio::spawn(async move { serve(parts, &settings).await });
    Stage { peer, address, stop, events: told, task }
}

impl Stage {
    /// Waits until it tells this of itself.
    pub(crate) async fn tells(&mut self, what: &StageEvent) {
        let told = async {
            while let Some(event) = self.events.recv().await {
                if event == *what {
                    return true;
                }
            }
            false
        };
        assert!(tokio::time::timeout(PATIENCE, told).await.expect("it tells in time"), "never told: {what:?}");
    }
}

/// Settings that keep a test short where something is lost.
pub(crate) fn quick() -> CoordinatorSettings {
    CoordinatorSettings {
        heartbeat: Duration::from_millis(100),
        dead_after: Duration::from_millis(1_500),
        reply_deadline: Duration::from_secs(10),
        heal_wait: Duration::ZERO,
        ..CoordinatorSettings::default()
    }
}

/// Starts a coordinator of the tiny model.
fn coordinate(
    (link, events): (Arc<dyn Link>, LinkEvents),
    settings: CoordinatorSettings,
    log: Option<Log>,
) -> (Coordinator, watch::Sender<bool>, JoinHandle<()>) {
    let checkpoint = tiny();
    let config = checkpoint.config();
    let model = ModelFacts {
        name: "tiny".to_owned(),
        vocab: u32::try_from(config.vocab).unwrap(),
        eos: config.eos.iter().copied().map(TokenId).collect(),
        context: config.max_positions,
    };
    let shape = ModelShape {
        layers: config.layers,
        hc: config.hc,
        dim: config.dim,
        probe_token: TokenId(config.bos),
        digest: checkpoint.digest(),
    };
    let (stop, stopped) = watch::channel(false);
    let parts = CoordinatorParts { link, events, model, shape, stop: stopped };
    let (coordinator, task) = match log {
        Some(log) => start_logged(parts, settings, log).unwrap(),
        None => start(parts, settings),
    };
    (coordinator, stop, task)
}

impl Rig {
    pub(crate) async fn new(cut: &[LayerRange], settings: CoordinatorSettings) -> Self {
        Self::wrapped(cut, settings, &|engine| Box::new(engine)).await
    }

    pub(crate) async fn wrapped(cut: &[LayerRange], settings: CoordinatorSettings, wrap: Wrap<'_>) -> Self {
        Self::over(MemoryNetwork::new(), cut, settings, wrap).await
    }

    pub(crate) async fn over(
        network: MemoryNetwork,
        cut: &[LayerRange],
        settings: CoordinatorSettings,
        wrap: Wrap<'_>,
    ) -> Self {
        Self::logged(network, cut, settings, (wrap, None)).await
    }

    /// Stages that journal so much.
    pub(crate) async fn journaling(cut: &[LayerRange], settings: CoordinatorSettings, journal: JournalConfig) -> Self {
        Self::made(MemoryNetwork::new(), cut, settings, (&|engine| Box::new(engine), None, journal)).await
    }

    /// The same with a log.
    pub(crate) async fn logged(
        network: MemoryNetwork,
        cut: &[LayerRange],
        settings: CoordinatorSettings,
        (wrap, log): (Wrap<'_>, Option<Log>),
    ) -> Self {
        Self::made(network, cut, settings, (wrap, log, JournalConfig::default())).await
    }

    pub(crate) async fn made(
        network: MemoryNetwork,
        cut: &[LayerRange],
        settings: CoordinatorSettings,
        (wrap, log, journal): (Wrap<'_>, Option<Log>, JournalConfig),
    ) -> Self {
        // Shown where a test fails.
        let _ = tracing_subscriber::fmt().with_test_writer().with_max_level(tracing::Level::INFO).try_init();
        let checkpoint = tiny();
        let (link, events) = network.link();
        let (coordinator_peer, coordinator_address) = (link.local(), link.addresses()[0].clone());
        let digest = checkpoint.digest();
        let stages: Vec<Stage> = cut
            .iter()
            .map(|range| {
                let made = (wrap(engine(&checkpoint, *range)), journal.clone());
                start_stage(&network, coordinator_peer, None, made, digest)
            })
            .collect();
        let settings = CoordinatorSettings {
            stages: stages.iter().map(|stage| stage.address.clone()).collect(),
            admit: Admit::Anyone,
            ..settings
        };
        let (coordinator, stop, task) = coordinate((link, events), settings.clone(), log);
        let rig = Self { network, stages, coordinator, coordinator_peer, coordinator_address, settings, stop, task };
        rig.ready().await;
        rig
    }

    /// Starts another coordinator with the same key and settings; gives what ends the one before.
    pub(crate) fn take_over_beside(&mut self, log: Log) -> (watch::Sender<bool>, JoinHandle<()>) {
        let (link, events) = self.network.link_as(self.coordinator_peer.peer);
        (self.coordinator_peer, self.coordinator_address) = (link.local(), link.addresses()[0].clone());
        let (coordinator, stop, task) = coordinate((link, events), self.settings.clone(), Some(log));
        self.coordinator = coordinator;
        (std::mem::replace(&mut self.stop, stop), std::mem::replace(&mut self.task, task))
    }

    /// Kills the coordinator where it stands, and starts another one.
    pub(crate) async fn restart(&mut self, open: impl FnOnce() -> Log) {
        self.network.kill(self.coordinator_peer);
        self.task.abort();
        let _ = (&mut self.task).await;
        let _before = self.take_over_beside(open());
    }

    /// Waits until a token went round.
    pub(crate) async fn ready(&self) {
        self.until("the ring is ready", |rig| rig.coordinator.status().ready).await;
    }

    /// Adds a stage that dials in.
    pub(crate) fn add(&mut self, range: LayerRange) {
        self.add_with(Box::new(engine(&tiny(), range)));
    }

    /// Adds a stage with this engine, which dials in.
    pub(crate) fn add_with(&mut self, engine: Box<dyn Engine>) {
        let dial = Some(self.coordinator_address.clone());
        let made = (engine, JournalConfig::default());
        let stage = start_stage(&self.network, self.coordinator_peer, dial, made, tiny().digest());
        self.stages.push(stage);
    }

    /// Adds a shadow with this engine, which dials in, and waits until it has its place.
    pub(crate) async fn add_shadow(&mut self, engine: Box<dyn Engine>) {
        let dial = Some(self.coordinator_address.clone());
        let made = (engine, JournalConfig::default());
        let stage = start_waiting(&self.network, self.coordinator_peer, (dial, true), made, tiny().digest());
        let name = stage.peer.to_string();
        self.stages.push(stage);
        let shadows = |rig: &Self| {
            rig.coordinator.status().members.iter().any(|member| member.peer == name && member.shadow_of.is_some())
        };
        self.until("it shadows a stage", shadows).await;
    }

    /// Waits until so many stages have offered themselves.
    pub(crate) async fn members(&self, count: usize) {
        self.until("every stage has offered itself", |rig| rig.coordinator.status().members.len() == count).await;
    }

    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let waiting = async {
            while !holds(self) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
            panic!("never came: {what}; {:?}", self.coordinator.status());
        }
    }

    /// Sessions of readers that are not yet freed everywhere.
    pub(crate) fn coordinator_sessions(&self) -> u32 {
        self.coordinator.status().sessions
    }

    pub(crate) async fn run(&self, request: Request) -> Run {
        collect(self.coordinator.submit(request).unwrap()).await
    }

    /// Ends every task.
    pub(crate) async fn end(self) {
        let _ = self.stop.send(true);
        tokio::time::timeout(PATIENCE, self.task).await.unwrap().unwrap();
        for stage in self.stages {
            let _ = stage.stop.send(true);
            let _ = tokio::time::timeout(PATIENCE, stage.task).await.unwrap();
        }
    }
}

/// What a job said.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) end: Option<Result<(Finish, JobStats), JobError>>,
}

impl Run {
    pub(crate) fn finish(&self) -> Finish {
        self.end.as_ref().unwrap().as_ref().unwrap().0
    }

    pub(crate) fn stats(&self) -> &JobStats {
        &self.end.as_ref().unwrap().as_ref().unwrap().1
    }
}

pub(crate) async fn collect(mut job: Job) -> Run {
    let mut run = Run::default();
    let reading = async {
        while let Some(event) = job.events.recv().await {
            assert!(run.end.is_none(), "nothing follows the last event");
            match event {
                Event::Token { index, token, .. } => {
                    assert_eq!(index as usize, run.tokens.len(), "commits are contiguous");
                    run.tokens.push(token);
                }
                Event::Scored { .. } => {}
                Event::Finished { reason, stats } => run.end = Some(Ok((reason, stats))),
                Event::Failed(error) => run.end = Some(Err(error)),
            }
        }
    };
    tokio::time::timeout(PATIENCE, reading).await.expect("a job ends within its deadlines");
    assert!(run.end.is_some(), "a job says how it ended");
    run
}

pub(crate) fn greedy() -> Sampling {
    Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
}

pub(crate) fn warm(seed: u64) -> Sampling {
    Sampling { temperature: 0.8, top_k: 0, top_p: 0.95, min_p: 0.0, seed }
}

pub(crate) fn request(prompt: &[u32], max_new: u32, mode: Mode) -> Request {
    Request {
        prompt: prompt.iter().copied().map(TokenId).collect(),
        max_new,
        sampling: greedy(),
        mode: Some(mode),
        encoding: None,
        score: None,
        logprobs: None,
        ignore_eos: true,
    }
}

/// A prompt of real text, `n` tokens from the golden set's longest one.
pub(crate) fn prompt(n: usize) -> Vec<u32> {
    let bytes =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/crates/engine/tests/golden/p5-long.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids = tensors.tensor("prompt_ids").unwrap();
    ids.data().chunks_exact(4).take(n).map(|id| u32::from_le_bytes(id.try_into().unwrap())).collect()
}

/// Every way to cut `layers` layers into at most `most` ranges.
pub(crate) fn cuts(layers: u16, most: usize) -> Vec<Vec<LayerRange>> {
    let mut all = Vec::new();
    for mask in 0..1u32 << (layers - 1) {
        if mask.count_ones() as usize >= most {
            continue;
        }
        let mut edges = vec![0];
        edges.extend((1..layers).filter(|layer| mask & (1 << (layer - 1)) != 0));
        edges.push(layers);
        all.push(edges.windows(2).map(|edge| LayerRange::new(edge[0], edge[1]).unwrap()).collect());
    }
    all
}

pub(crate) fn shared<T>(value: T) -> Arc<T> {
    Arc::new(value)
}
