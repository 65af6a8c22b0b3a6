//! What a shadow costs the ring that it shadows, in processor time a token: `cargo bench --bench shadow`.
//!
//! A coordinator and three stages in this process over QUIC on loopback, and `stage --spare --shadow` as a
//! process of its own, so that the time of this process is that of the ring alone: the copies and their way
//! into the network are in it, what the shadow takes in and computes is not. The same ring serves the same
//! request without and with a shadow of each stage in turn; medians, and the median of the ratios of runs
//! that are next to one another.
//!
//! Once more with a shadow that takes in every copy, reports, and computes nothing: a shadow is meant for a
//! machine of its own, and one that computes beside the ring takes the caches and the shared core from it,
//! which is counted as the ring's time. What remains is what the ring itself does for a shadow.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench prints, and stops at the first surprise")]

#[path = "../tests/ring/rig.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod rig;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Parser;
use libp2p::Multiaddr;
use libp2p::identity::Keypair;
use ringfence::config::{Admit, CoordinatorSettings, DEAD_AFTER, HEARTBEAT, MAX_SESSIONS, StageSettings};
use ringfence::coordinator::handle::Coordinator;
use ringfence::coordinator::job::{Mode, ModelFacts, Serve};
use ringfence::coordinator::run::{CoordinatorParts, ModelShape, start};
use ringfence::engine::cpu::CpuEngine;
use ringfence::engine::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use ringfence::ids::{LayerRange, Position, SessionId, TokenId, WireEncoding};
use ringfence::node::journal::JournalConfig;
use ringfence::node::membership::Obey;
use ringfence::node::serve::{StageParts, serve};
use ringfence::transport::quic::{QuicLink, QuicSettings};
use ringfence::transport::scope::Scope;
use tokio::sync::watch;

use rig::{PATIENCE, collect, engine, prompt, ranges, request, tiny};

/// Layers of the stages.
const CUT: &str = "0:2 2:4 4:7";

/// Measures what a shadow costs.
#[derive(Debug, Parser)]
#[command(name = "shadow")]
struct Args {
    /// Pairs of runs of each kind
    #[arg(long, default_value_t = 9)]
    runs: usize,
    /// New tokens of each run
    #[arg(long, default_value_t = 600)]
    tokens: u32,
    /// What `cargo bench` adds
    #[arg(long, hide = true)]
    bench: bool,
    /// Serve as the shadow that computes nothing, of this range
    #[arg(long, hide = true, requires = "coordinator")]
    absent: Option<LayerRange>,
    /// Whose ring that is
    #[arg(long, hide = true)]
    coordinator: Option<Multiaddr>,
}

/// An engine that holds sessions and computes nothing: its hidden states are zeros.
struct Absent(CpuEngine);

impl Engine for Absent {
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
        let facts = self.0.facts();
        let positions: usize = batch.iter().map(|chunk| chunk.ids.len()).sum();
        out.logits.clear();
        out.hidden.clear();
        let values = if facts.is_tail() { 0 } else { positions * facts.hc * facts.dim };
        out.hidden.resize(values, half::bf16::ZERO);
        Ok(())
    }

    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError> {
        self.0.draft(session, at, anchor)
    }
}

fn stage_settings(obey: Obey, coordinator: Option<Multiaddr>, shadow: bool) -> StageSettings {
    StageSettings {
        coordinator,
        obey,
        max_sessions: MAX_SESSIONS,
        encodings: vec![WireEncoding::Fp8],
        announce: Vec::new(),
        dial_scope: Scope::Loopback,
        spare: shadow,
        shadow,
        heartbeat: HEARTBEAT,
        dead_after: DEAD_AFTER,
        journal: JournalConfig::default(),
    }
}

/// A ring in this process.
struct Ring {
    coordinator: Coordinator,
    address: Multiaddr,
    _stop: watch::Sender<bool>,
}

impl Ring {
    async fn start() -> Self {
        let checkpoint = tiny();
        let (stop, stopped) = watch::channel(false);
        let (link, events) = QuicLink::start(QuicSettings::new(Keypair::generate_ed25519())).await.unwrap();
        let (local, address) = (link.local(), link.addresses()[0].clone());
        let mut stages = Vec::new();
        for range in ranges(CUT) {
            let (link, events) = QuicLink::start(QuicSettings::new(Keypair::generate_ed25519())).await.unwrap();
            stages.push(link.addresses()[0].clone());
            let engine = Box::new(engine(&checkpoint, range));
            let (model_digest, stop) = (checkpoint.digest(), stopped.clone());
            let parts = StageParts { engine, link, events, model_digest, stop, observer: None };
            let settings = stage_settings(Obey::Peers([local.peer].into()), None, false);
            tokio::spawn(async move { serve(parts, &settings).await.unwrap() });
        }
        let settings = CoordinatorSettings { stages, admit: Admit::Anyone, ..CoordinatorSettings::default() };
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
        let (coordinator, _task) = start(CoordinatorParts { link, events, model, shape, stop: stopped }, settings);
        let ring = Self { coordinator, address, _stop: stop };
        ring.until(|ring| ring.coordinator.status().ready).await;
        ring
    }

    async fn until(&self, holds: impl Fn(&Self) -> bool) {
        let waiting = async {
            while !holds(self) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.expect("the ring comes to it");
    }

    async fn shadowed(&self, shadowed: bool) {
        let any = |ring: &Self| ring.coordinator.status().members.iter().any(|member| member.shadowed_by.is_some());
        self.until(|ring| any(ring) == shadowed).await;
    }

    /// Microseconds of this process a token.
    async fn run(&self, tokens: u32, mode: Mode) -> f64 {
        let before = cpu();
        let run = collect(self.coordinator.submit(request(&prompt(24), tokens, mode)).unwrap()).await;
        assert_eq!(run.tokens.len(), tokens as usize);
        (cpu() - before).as_secs_f64() * 1e6 / f64::from(tokens)
    }
}

/// Processor time of this process.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap()
}

/// What is beside the ring.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// `stage --spare --shadow`.
    Stage,
    /// The one that computes nothing.
    Absent,
}

/// A shadow, as a process that ends with this value.
struct Shadow(Child);

impl Shadow {
    fn start(kind: Kind, range: &str, coordinator: &Multiaddr) -> Self {
        let mut command = match kind {
            Kind::Stage => Command::new(env!("CARGO_BIN_EXE_stage")),
            Kind::Absent => Command::new(std::env::current_exe().unwrap()),
        };
        match kind {
            Kind::Stage => command.args(["--range", range, "--spare", "--shadow", "--threads", "1"]),
            Kind::Absent => command.args(["--absent", range]),
        };
        command.arg("--coordinator").arg(coordinator.to_string());
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

async fn measure(args: &Args) {
    let ring = Ring::start().await;
    let (runs, tokens) = (args.runs, args.tokens);
    println!("{tokens} tokens, medians of {runs} interleaved pairs; processor time of the ring alone, µs a token");
    println!("{:<32} {:>10} {:>10} {:>10}", "shadowed", "without", "with", "more");
    let kinds = [Kind::Absent, Kind::Stage];
    for (kind, range) in kinds.iter().flat_map(|kind| CUT.split(' ').map(move |range| (*kind, range))) {
        for mode in [Mode::Plain, Mode::Pipelined] {
            let mut pairs = Vec::new();
            for _ in 0..runs {
                let without = ring.run(tokens, mode).await;
                let shadow = Shadow::start(kind, range, &ring.address);
                ring.shadowed(true).await;
                // A first one, so that the hop to the shadow stands.
                ring.run(16, mode).await;
                pairs.push((without, ring.run(tokens, mode).await));
                drop(shadow);
                ring.shadowed(false).await;
                ring.run(16, mode).await;
            }
            let of = |read: fn(&(f64, f64)) -> f64| median(pairs.iter().map(read).collect());
            let more = (of(|(without, with)| with / without) - 1.0) * 100.0;
            let name = match kind {
                Kind::Stage => format!("{range}, {mode:?}, by a stage"),
                Kind::Absent => format!("{range}, {mode:?}, the ring's part"),
            };
            println!("{name:<32} {:>10.0} {:>10.0} {more:>9.1}%", of(|pair| pair.0), of(|pair| pair.1));
        }
    }
}

/// Serves as a shadow that computes nothing, until it is killed.
async fn be_absent(range: LayerRange, coordinator: Multiaddr) {
    let checkpoint = tiny();
    let (link, events) = QuicLink::start(QuicSettings::new(Keypair::generate_ed25519())).await.unwrap();
    let (_stop, stop) = watch::channel(false);
    let engine = Box::new(Absent(engine(&checkpoint, range)));
    let parts = StageParts { engine, link, events, model_digest: checkpoint.digest(), stop, observer: None };
    serve(parts, &stage_settings(Obey::Anyone, Some(coordinator), true)).await.unwrap();
}

fn main() {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match (args.absent, args.coordinator.clone()) {
        (Some(range), Some(coordinator)) => runtime.block_on(be_absent(range, coordinator)),
        _ => runtime.block_on(measure(&args)),
    }
}
