//! A whole ring behind slow hops: what pipelining gives, what it costs in frames, and what a cancel
//! out of band saves.
//!
//! `cargo bench --bench ring_wan`: a coordinator and three stages in this process, each a QUIC link of
//! its own, each stage behind a proxy that delays both ways; greedy, the tiny model. Stages compute as
//! fast as they can, or take as long a pass as a stage of a large model does (`--pass`). The kinds take
//! turns; medians. Every kind must give the same tokens.
//!
//! The ideal is the useful frames in flight over the round trip: a frame is useful if its token is
//! committed, so plain decoding has one in flight, and pipelined decoding as many as a rejection ends:
//! the acceptance length. The round trip is four hops and a pass in each stage.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench prints, and stops at the first surprise")]

#[path = "../tests/ring/rig.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod rig;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use futures::future::join_all;
use libp2p::Multiaddr;
use libp2p::identity::Keypair;
use libp2p::multiaddr::Protocol;
use ringfence::clock::now;
use ringfence::config::{Admit, CoordinatorSettings, DEAD_AFTER, HEARTBEAT, MAX_SESSIONS, StageSettings};
use ringfence::coordinator::handle::Coordinator;
use ringfence::coordinator::job::{JobStats, Mode, ModelFacts, Serve};
use ringfence::coordinator::run::{CoordinatorParts, ModelShape, start};
use ringfence::engine::cpu::CpuEngine;
use ringfence::engine::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use ringfence::ids::{Position, SessionId, TokenId, WireEncoding};
use ringfence::node::journal::JournalConfig;
use ringfence::node::membership::Obey;
use ringfence::node::serve::{StageParts, serve};
use ringfence::transport::quic::{QuicLink, QuicSettings};
use ringfence::transport::scope::Scope;
use ringfence::wan::{Proxy, ProxyHandle, ProxySettings};
use tokio::sync::watch;
use tokio::task::JoinSet;

use rig::{PATIENCE, Run, collect, engine, prompt, ranges, request, tiny};

/// Tokens of the first prompt; each further one has one more.
const PROMPT: usize = 24;

/// Measures a ring behind slow hops.
#[derive(Debug, Parser)]
#[command(name = "ring_wan")]
struct Args {
    /// One way from neighbour to neighbour, in ms
    #[arg(long, value_name = "MS", default_value_t = 25)]
    hop: u64,
    /// Layers of the stages
    #[arg(long, default_value = "0:2 2:4 4:7")]
    stages: String,
    /// Least time of a pass through a stage, in ms
    #[arg(long, value_name = "MS", value_delimiter = ',', default_values_t = [0, 10])]
    pass: Vec<u64>,
    /// Requests at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8])]
    sessions: Vec<u32>,
    /// New tokens of each
    #[arg(long, default_value_t = 64)]
    tokens: u32,
    /// Runs of each kind
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// What else the hops do, such as `loss=0.1%,rate=50mbit`
    #[arg(long, value_name = "WAN")]
    wan: Option<String>,
    /// What `cargo bench` adds
    #[arg(long, hide = true)]
    bench: bool,
}

/// A way to decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    pass: u64,
    sessions: u32,
    mode: Mode,
    cancel: bool,
}

/// An engine whose passes take their time.
struct Slow {
    inner: CpuEngine,
    pass: Duration,
}

impl Engine for Slow {
    fn facts(&self) -> &EngineFacts {
        self.inner.facts()
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        self.inner.state_bytes(shape)
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        self.inner.open(session, shape)
    }

    fn close(&mut self, session: SessionId) {
        self.inner.close(session);
    }

    fn forward(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        let begun = now();
        let done = self.inner.forward(batch, out);
        std::thread::sleep(self.pass.saturating_sub(now() - begun));
        done
    }

    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError> {
        self.inner.draft(session, at, anchor)
    }
}

/// A ring over QUIC.
struct Ring {
    coordinator: Coordinator,
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
    _proxies: Vec<ProxyHandle>,
}

impl Ring {
    async fn start(args: &Args, kind: Kind) -> Self {
        let checkpoint = tiny();
        let (stop, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let (link, events) = QuicLink::start(QuicSettings::new(Keypair::generate_ed25519())).await.unwrap();
        let obey = Obey::Peers([link.local().peer].into());
        let (mut stages, mut proxies) = (Vec::new(), Vec::new());
        for range in ranges(&args.stages) {
            let (link, events) = QuicLink::start(QuicSettings::new(Keypair::generate_ed25519())).await.unwrap();
            let (address, proxy) = behind_proxy(args, &link.addresses()[0]);
            let engine = Slow { inner: engine(&checkpoint, range), pass: Duration::from_millis(kind.pass) };
            let parts = StageParts {
                engine: Box::new(engine),
                link,
                events,
                model_digest: checkpoint.digest(),
                stop: stopped.clone(),
                observer: None,
            };
            let settings = StageSettings {
                coordinator: None,
                obey: obey.clone(),
                max_sessions: MAX_SESSIONS,
                encodings: vec![WireEncoding::Fp8],
                announce: vec![address.clone()],
                dial_scope: Scope::Loopback,
                spare: false,
                shadow: false,
                heartbeat: HEARTBEAT,
                dead_after: DEAD_AFTER,
                journal: JournalConfig::default(),
            };
            tasks.spawn(async move { serve(parts, &settings).await.unwrap() });
            stages.push(address);
            proxies.push(proxy);
        }
        let settings = CoordinatorSettings {
            stages,
            admit: Admit::Anyone,
            cancel_out_of_band: kind.cancel,
            ..CoordinatorSettings::default()
        };
        let (model, shape) = facts();
        let parts = CoordinatorParts { link, events, model, shape, stop: stopped };
        let (coordinator, task) = start(parts, settings);
        tasks.spawn(async move { task.await.unwrap() });
        let ring = Self { coordinator, stop, tasks, _proxies: proxies };
        let ready = async {
            while !ring.coordinator.status().ready {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, ready).await.expect("the ring becomes ready");
        ring
    }

    async fn end(mut self) {
        self.stop.send(true).unwrap();
        while let Some(ended) = tokio::time::timeout(PATIENCE, self.tasks.join_next()).await.unwrap() {
            ended.unwrap();
        }
    }
}

/// Puts a proxy before a link: where to dial then.
fn behind_proxy(args: &Args, address: &Multiaddr) -> (Multiaddr, ProxyHandle) {
    let mut parts = address.iter();
    let (Some(Protocol::Ip4(ip)), Some(Protocol::Udp(port))) = (parts.next(), parts.next()) else {
        panic!("{address}: expected /ip4/…/udp/…");
    };
    let more = args.wan.iter().map(|more| format!(",{more}")).collect::<String>();
    let wan = format!("delay={}ms{more}", args.hop).parse().unwrap();
    let proxy = Proxy::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let settings = ProxySettings { wan, ..ProxySettings::default() };
    let proxy = proxy.start(SocketAddr::new(ip.into(), port), settings).unwrap();
    let change = |part| if let Protocol::Udp(_) = part { Protocol::Udp(proxy.address().port()) } else { part };
    (address.iter().map(change).collect(), proxy)
}

fn facts() -> (ModelFacts, ModelShape) {
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
    (model, shape)
}

/// Runs the requests of a kind at once.
async fn decode(args: &Args, kind: Kind) -> Vec<Run> {
    let ring = Ring::start(args, kind).await;
    let jobs = (0..kind.sessions as usize).map(|at| {
        let request = request(&prompt(PROMPT + at), args.tokens, kind.mode);
        collect(ring.coordinator.submit(request).unwrap())
    });
    let runs = join_all(jobs).await;
    ring.end().await;
    runs
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Every run's requests, averaged; then the median.
fn row(args: &Args, kind: Kind, runs: &[Vec<JobStats>]) {
    let sessions = f64::from(kind.sessions);
    let mean = |run: &[JobStats], read: &dyn Fn(&JobStats) -> f64| run.iter().map(read).sum::<f64>() / sessions;
    let of = |read: &dyn Fn(&JobStats) -> f64| median(runs.iter().map(|run| mean(run, read)).collect());
    let stages = runs[0][0].frames_computed_per_token.len();
    let length = of(&|stats| stats.acceptance_length.unwrap_or(1.0));
    let round_trip = (stages + 1) as f64 * args.hop as f64 + stages as f64 * kind.pass as f64;
    let (speed, ideal) = (sessions * of(&|stats| stats.tokens_per_second), sessions * length * 1e3 / round_trip);
    let computed: Vec<String> =
        (0..stages).map(|at| format!("{:.2}", of(&|stats| stats.frames_computed_per_token[at]))).collect();
    let name = match (kind.mode, kind.cancel) {
        (Mode::Plain, _) => "plain",
        (Mode::Pipelined, true) => "pipelined",
        (Mode::Pipelined, false) => "pipelined, no cancel out of band",
    };
    println!(
        "| {} | {} | {name} | {speed:.1} | {ideal:.1} | {:.2} | {length:.2} | {:.2} | {} |",
        kind.pass,
        kind.sessions,
        speed / ideal,
        of(&|stats| stats.frames_per_token),
        computed.join(", ")
    );
}

fn main() {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let modes = [(Mode::Plain, true), (Mode::Pipelined, true), (Mode::Pipelined, false)];
    let mut kinds = Vec::new();
    for pass in args.pass.iter().copied() {
        for sessions in args.sessions.iter().copied() {
            kinds.extend(modes.map(|(mode, cancel)| Kind { pass, sessions, mode, cancel }));
        }
    }
    let mut stats: Vec<Vec<Vec<JobStats>>> = vec![Vec::new(); kinds.len()];
    let mut tokens = BTreeMap::new();
    for _ in 0..args.runs.max(1) {
        for (kind, stats) in kinds.iter().zip(&mut stats) {
            let runs = runtime.block_on(decode(&args, *kind));
            for (at, run) in runs.iter().enumerate() {
                let expected = tokens.entry(at).or_insert_with(|| run.tokens.clone());
                assert_eq!(expected, &run.tokens, "{kind:?} gives other tokens to request {at}");
            }
            stats.push(runs.iter().map(|run| run.stats().clone()).collect());
        }
    }
    println!(
        "{} tokens, medians of {} runs, stages {}, {} ms a hop {}\n",
        args.tokens,
        args.runs,
        args.stages,
        args.hop,
        args.wan.as_deref().unwrap_or("")
    );
    let columns = [
        "pass ms",
        "requests",
        "mode",
        "tokens/s",
        "ideal",
        "of the ideal",
        "acceptance length",
        "frames sent a token",
        "frames computed a token, by stage",
    ];
    println!("| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
    for (kind, stats) in kinds.iter().zip(&stats) {
        row(&args, *kind, stats);
    }
}
