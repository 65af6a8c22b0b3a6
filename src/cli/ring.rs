//! A ring of real processes on this machine: stages and a coordinator, each this very program.
//!
//! Every process ends when its stdin closes, so none outlives the process that started it, however
//! that one ends.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};
use serde_json::Value;

use crate::cli::console::{Failure, Signals};
use crate::cli::process::{Child, Spawn};
use crate::ids::{LayerRange, WireEncoding};
use crate::transport::identity;
use crate::wan::{Proxy, ProxyHandle, ProxySettings, WanSettings};

/// How long a stage may take to load its layers.
const STAGE_DEADLINE: Duration = Duration::from_secs(300);

/// How long the coordinator may take until a token has gone round.
const COORDINATOR_DEADLINE: Duration = Duration::from_secs(60);

/// Where a coordinator serves until it has a port.
const ANY_PORT: &str = "127.0.0.1:0";

/// Where the proxies of an emulated network listen.
const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// How a local ring is made.
#[derive(Debug, Clone)]
pub struct LocalRingOptions {
    /// Checkpoint folder, or `tiny`.
    pub model: String,
    /// Ranges, head first.
    pub cut: Vec<LayerRange>,
    /// Ranges of stages that wait to replace others.
    pub spares: Vec<LayerRange>,
    /// Where stages compute, by their place in the cut, in turn; a spare computes where the stage does.
    /// Empty: on the processor.
    pub devices: Vec<String>,
    /// Wire encoding.
    pub wire: WireEncoding,
    /// Frames in flight per session, at most.
    pub in_flight: Option<u32>,
    /// Drafts streamed per block, at most.
    pub drafts: Option<u32>,
    /// Threads of each stage's engine.
    pub threads: usize,
    /// The emulated network in front of every stage; `None`: the ring talks over loopback alone.
    pub wan: Option<WanSettings>,
    /// Whether the coordinator keeps a log, so that it can be started again in the middle of a stream.
    pub log: bool,
    /// Whether the coordinator reaches each stage through an emulated network of its own, so that the hop
    /// between two stages can be cut alone.
    pub own_hops: bool,
    /// Seed of what is random on that network.
    pub seed: u64,
}

/// A stage of a local ring.
#[derive(Debug)]
pub struct LocalStage {
    /// Its name.
    pub peer: String,
    /// Its layers.
    pub range: LayerRange,
    /// Whether it waits to replace another.
    pub spare: bool,
    /// Its process.
    pub child: Child,
    /// The emulated network in front of it; each of its neighbours has paths of its own there.
    pub wan: Option<ProxyHandle>,
    /// The coordinator's own way to it, where there is one.
    pub coordinator_wan: Option<ProxyHandle>,
    /// That network before it is told where the stage listens.
    proxy: Option<Proxy>,
}

/// The coordinator's process, and how it is started again.
#[derive(Debug, Default)]
pub struct Lead {
    state: Mutex<LeadState>,
}

#[derive(Debug, Default)]
struct LeadState {
    args: Vec<String>,
    child: Option<Child>,
}

impl Lead {
    fn lock(&self) -> MutexGuard<'_, LeadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.lock().child.as_ref().and_then(Child::pid)
    }

    /// Starts it anew in place of the one that was, in the runtime this is called in.
    ///
    /// # Errors
    /// The system's.
    pub fn start(&self) -> Result<(), Failure> {
        let mut state = self.lock();
        let spawn = Spawn { name: "coordinator".to_owned(), args: state.args.clone() };
        state.child = Some(Child::spawn(spawn).map_err(Failure::of("coordinator"))?);
        Ok(())
    }
}

/// A ring under way; dropped, it ends.
#[derive(Debug)]
pub struct LocalRing {
    url: String,
    /// Its stages, head first.
    pub stages: Vec<LocalStage>,
    coordinator: Arc<Lead>,
    // Holds the identities; removed with the ring.
    folder: tempfile::TempDir,
}

/// Starts a ring, does `work` on it once a token went round, and stops it. A signal ends the work.
/// Every process has ended when this returns.
///
/// # Errors
/// What the process that failed said of it, the work's failure, or that a signal came.
pub async fn with_ring<T>(
    options: &LocalRingOptions,
    signals: &mut Signals,
    work: impl AsyncFnOnce(&LocalRing) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mut ring = LocalRing::spawn(options)?;
    let done = tokio::select! {
        done = async {
            ring.ready(options).await?;
            work(&ring).await
        } => done,
        () = signals.next() => Err(interrupted()),
    };
    ring.stop().await;
    done
}

/// The failure of a command that a signal ended.
#[must_use]
pub fn interrupted() -> Failure {
    Failure::new("interrupted", "stopped by a signal; every process was stopped")
}

impl LocalRing {
    /// Starts the stages.
    fn spawn(options: &LocalRingOptions) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("ringfence-").tempdir().map_err(Failure::of("folder"))?;
        let mut ring = Self { url: String::new(), stages: Vec::new(), coordinator: Arc::default(), folder };
        let coordinator = identity::load_or_create(&ring.coordinator_key()).map_err(Failure::of("identity"))?;
        let coordinator = coordinator.public().to_peer_id();
        let ranges = options.cut.iter().map(|range| (range, false));
        for (at, (range, spare)) in ranges.chain(options.spares.iter().map(|range| (range, true))).enumerate() {
            let identity = ring.folder.path().join(format!("stage-{at}-{}-{}.key", range.lo(), range.hi()));
            // The proxy's address must be known before that of the stage behind it.
            let proxy = options.wan.as_ref().map(|_| Proxy::bind(LOOPBACK)).transpose().map_err(Failure::of("wan"))?;
            let announce = proxy.as_ref().map(|proxy| quic_address(proxy.address()));
            let place = at % options.cut.len().max(1);
            let child = spawn_stage(options, (*range, spare, place), (&identity, coordinator), announce)?;
            let (peer, range) = (String::new(), *range);
            ring.stages.push(LocalStage { peer, range, spare, child, proxy, wan: None, coordinator_wan: None });
        }
        Ok(ring)
    }

    /// Waits for the stages, starts the coordinator and waits until a token went round.
    async fn ready(&mut self, options: &LocalRingOptions) -> Result<(), Failure> {
        let mut addresses = Vec::new();
        let count = self.stages.len();
        for (at, stage) in self.stages.iter_mut().enumerate() {
            let ready = stage.child.ready(STAGE_DEADLINE).await.map_err(Failure::of("stage"))?;
            stage.peer = text(&ready, "/peer")?;
            let listens = text(&ready, "/addresses/0")?;
            let Some(proxy) = stage.proxy.take() else {
                addresses.push(listens);
                continue;
            };
            stage.wan = Some(join_wan(options, at, proxy, &listens)?);
            if options.own_hops {
                let proxy = Proxy::bind(LOOPBACK).map_err(Failure::of("wan"))?;
                let own = stage.coordinator_wan.insert(join_wan(options, count + at, proxy, &listens)?);
                addresses.push(format!("{}/p2p/{}", quic_address(own.address()), stage.peer));
            } else {
                addresses.push(text(&ready, "/announced/0")?);
            }
        }
        let mut args = coordinator_args(options, &self.coordinator_key(), &addresses);
        if options.log {
            args.extend(["--log".to_owned(), self.folder.path().join("log").display().to_string()]);
        }
        let spawn = Spawn { name: "coordinator".to_owned(), args: args.clone() };
        let mut child = Child::spawn(spawn).map_err(Failure::of("coordinator"))?;
        let ready = child.ready(COORDINATOR_DEADLINE).await;
        self.url = text(&ready.map_err(Failure::of("coordinator"))?, "/http")?;
        // The next one serves where this one did.
        for arg in args.iter_mut().filter(|arg| *arg == ANY_PORT) {
            self.url.trim_start_matches("http://").clone_into(arg);
        }
        *self.coordinator.lock() = LeadState { args, child: Some(child) };
        Ok(())
    }

    fn coordinator_key(&self) -> PathBuf {
        self.folder.path().join("coordinator.key")
    }

    /// Its coordinator's process.
    #[must_use]
    pub fn lead(&self) -> Arc<Lead> {
        Arc::clone(&self.coordinator)
    }

    /// Where its coordinator serves HTTP.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Stops every process, the coordinator first.
    async fn stop(mut self) {
        let coordinator = self.coordinator.lock().child.take();
        if let Some(mut coordinator) = coordinator {
            coordinator.stop().await;
        }
        join_all(self.stages.iter_mut().map(|stage| stage.child.stop())).await;
    }
}

fn spawn_stage(
    options: &LocalRingOptions,
    (range, spare, place): (LayerRange, bool, usize),
    (identity, coordinator): (&Path, PeerId),
    announce: Option<Multiaddr>,
) -> Result<Child, Failure> {
    let mut args = vec!["stage".to_owned(), "--parent-pipe".to_owned()];
    let mut flag = |name: &str, value: String| args.extend([name.to_owned(), value]);
    flag("--range", range.to_string());
    flag("--model", options.model.clone());
    flag("--identity", identity.display().to_string());
    flag("--allow", coordinator.to_string());
    flag("--threads", options.threads.to_string());
    if let Some(device) = options.devices.iter().cycle().nth(place) {
        flag("--device", device.clone());
    }
    if let Some(address) = announce {
        flag("--announce", address.to_string());
    }
    if options.log {
        args.push("--json-events".to_owned());
    }
    if spare {
        args.push("--spare".to_owned());
    }
    let name = if spare { format!("spare {range}") } else { format!("stage {range}") };
    Child::spawn(Spawn { name, args }).map_err(Failure::of("stage"))
}

fn coordinator_args(options: &LocalRingOptions, identity: &Path, stages: &[String]) -> Vec<String> {
    let mut args = vec!["coordinator".to_owned(), "--parent-pipe".to_owned()];
    let mut flag = |name: &str, value: String| args.extend([name.to_owned(), value]);
    flag("--model", options.model.clone());
    flag("--identity", identity.display().to_string());
    flag("--http", ANY_PORT.to_owned());
    flag("--wire", options.wire.to_string());
    if let Some(frames) = options.in_flight {
        flag("--in-flight", frames.to_string());
    }
    if let Some(drafts) = options.drafts {
        flag("--drafts", drafts.to_string());
    }
    for stage in stages {
        flag("--stage", stage.clone());
    }
    args
}

/// Puts a proxy in front of a stage that has said where it listens.
fn join_wan(options: &LocalRingOptions, at: usize, proxy: Proxy, address: &str) -> Result<ProxyHandle, Failure> {
    let wan = options.wan.clone().unwrap_or_default();
    let settings = ProxySettings { wan, seed: options.seed.wrapping_add(at as u64), ..ProxySettings::default() };
    let target = udp_address(address).ok_or_else(|| {
        Failure::new("wan", format!("a stage listens on {address}: expected /ip4/IP/udp/PORT or /ip6/IP/udp/PORT"))
    })?;
    proxy.start(target, settings).map_err(Failure::of("wan"))
}

fn quic_address(address: SocketAddr) -> Multiaddr {
    Multiaddr::from(address.ip()).with(Protocol::Udp(address.port())).with(Protocol::QuicV1)
}

/// The UDP address that a multiaddr begins with.
#[allow(clippy::wildcard_enum_match_arm, reason = "the enum is libp2p's, and open-ended")]
pub(crate) fn udp_address(address: &str) -> Option<SocketAddr> {
    let address: Multiaddr = address.parse().ok()?;
    let mut parts = address.iter();
    let ip: IpAddr = match parts.next()? {
        Protocol::Ip4(ip) => ip.into(),
        Protocol::Ip6(ip) => ip.into(),
        _ => return None,
    };
    match parts.next()? {
        Protocol::Udp(port) => Some(SocketAddr::new(ip, port)),
        _ => None,
    }
}

fn text(value: &Value, pointer: &str) -> Result<String, Failure> {
    let found = value.pointer(pointer).and_then(Value::as_str);
    found.map(str::to_owned).ok_or_else(|| Failure::new("protocol", format!("{pointer} is missing in READY {value}")))
}
