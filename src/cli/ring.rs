//! A ring of real processes on this machine: stages and a coordinator, each this very program.
//!
//! Every process ends when its stdin closes, so none outlives the process that started it, however
//! that one ends.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};
use serde_json::Value;

use crate::cli::console::Failure;
use crate::cli::process::{Child, Spawn};
use crate::ids::{LayerRange, WireEncoding};
use crate::transport::identity;
use crate::wan::{Proxy, ProxyHandle, ProxySettings, WanSettings};

/// How long a stage may take to load its layers.
const STAGE_DEADLINE: Duration = Duration::from_secs(300);

/// How long the coordinator may take until a token has gone round.
const COORDINATOR_DEADLINE: Duration = Duration::from_secs(60);

/// Where the proxies of an emulated network listen.
const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// How a local ring is made.
#[derive(Debug, Clone)]
pub struct LocalRingOptions {
    /// Checkpoint folder, or `tiny`.
    pub model: String,
    /// Ranges, head first.
    pub cut: Vec<LayerRange>,
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
    /// Its process.
    pub child: Child,
    /// The emulated network in front of it; each of its neighbours has paths of its own there.
    pub wan: Option<ProxyHandle>,
}

/// A ring under way; dropped, it ends.
#[derive(Debug)]
pub struct LocalRing {
    /// Where its coordinator serves HTTP.
    pub url: String,
    /// Its stages, head first.
    pub stages: Vec<LocalStage>,
    coordinator: Child,
    // Holds the identities; removed with the ring.
    _folder: tempfile::TempDir,
}

impl LocalRing {
    /// Starts every process and waits until a token went round.
    ///
    /// # Errors
    /// What the process that failed said of it.
    pub async fn start(options: &LocalRingOptions) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("ringfence-").tempdir().map_err(Failure::of("folder"))?;
        let key = folder.path().join("coordinator.key");
        let coordinator = identity::load_or_create(&key).map_err(Failure::of("identity"))?.public().to_peer_id();
        let mut starting = Vec::new();
        for range in &options.cut {
            let identity = folder.path().join(format!("stage-{}-{}.key", range.lo(), range.hi()));
            // The proxy's address must be known before that of the stage behind it.
            let proxy = options.wan.as_ref().map(|_| Proxy::bind(LOOPBACK)).transpose().map_err(Failure::of("wan"))?;
            let announce = proxy.as_ref().map(|proxy| quic_address(proxy.address()));
            starting.push((*range, spawn_stage(options, *range, (&identity, coordinator), announce)?, proxy));
        }
        let mut stages = Vec::new();
        let mut addresses = Vec::new();
        for (range, mut child, proxy) in starting {
            let ready = child.ready(STAGE_DEADLINE).await.map_err(Failure::of("stage"))?;
            let peer = text(&ready, "/peer")?;
            let wan = match proxy {
                Some(proxy) => Some(join_wan(options, stages.len(), proxy, &text(&ready, "/addresses/0")?)?),
                None => None,
            };
            let announced = if wan.is_some() { "/announced/0" } else { "/addresses/0" };
            addresses.push(text(&ready, announced)?);
            stages.push(LocalStage { peer, range, child, wan });
        }
        let mut coordinator = spawn_coordinator(options, &key, &addresses)?;
        let ready = coordinator.ready(COORDINATOR_DEADLINE).await.map_err(Failure::of("coordinator"))?;
        Ok(Self { url: text(&ready, "/http")?, stages, coordinator, _folder: folder })
    }

    /// Stops every process, the coordinator first.
    pub async fn stop(mut self) {
        self.coordinator.stop().await;
        for stage in &mut self.stages {
            stage.child.stop().await;
        }
    }
}

fn spawn_stage(
    options: &LocalRingOptions,
    range: LayerRange,
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
    if let Some(address) = announce {
        flag("--announce", address.to_string());
    }
    Child::spawn(Spawn { name: format!("stage {range}"), args }).map_err(Failure::of("stage"))
}

fn spawn_coordinator(options: &LocalRingOptions, identity: &Path, stages: &[String]) -> Result<Child, Failure> {
    let mut args = vec!["coordinator".to_owned(), "--parent-pipe".to_owned()];
    let mut flag = |name: &str, value: String| args.extend([name.to_owned(), value]);
    flag("--model", options.model.clone());
    flag("--identity", identity.display().to_string());
    flag("--http", "127.0.0.1:0".to_owned());
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
    Child::spawn(Spawn { name: "coordinator".to_owned(), args }).map_err(Failure::of("coordinator"))
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
fn udp_address(address: &str) -> Option<SocketAddr> {
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
