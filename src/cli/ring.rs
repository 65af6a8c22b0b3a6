//! A ring of real processes on this machine: stages and a coordinator, each this very program.
//!
//! Every process ends when its stdin closes, so none outlives the process that started it, however
//! that one ends.

use std::path::Path;
use std::time::Duration;

use libp2p::PeerId;
use serde_json::Value;

use crate::cli::console::Failure;
use crate::cli::process::{Child, Spawn};
use crate::ids::{LayerRange, WireEncoding};
use crate::transport::identity;

/// How long a stage may take to load its layers.
const STAGE_DEADLINE: Duration = Duration::from_secs(300);

/// How long the coordinator may take until a token has gone round.
const COORDINATOR_DEADLINE: Duration = Duration::from_secs(60);

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
            starting.push((*range, spawn_stage(options, *range, &identity, coordinator)?));
        }
        let mut stages = Vec::new();
        let mut addresses = Vec::new();
        for (range, mut child) in starting {
            let ready = child.ready(STAGE_DEADLINE).await.map_err(Failure::of("stage"))?;
            let peer = text(&ready, "/peer")?;
            addresses.push(text(&ready, "/addresses/0")?);
            stages.push(LocalStage { peer, range, child });
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
    identity: &Path,
    coordinator: PeerId,
) -> Result<Child, Failure> {
    let mut args = vec!["stage".to_owned(), "--parent-pipe".to_owned()];
    let mut flag = |name: &str, value: String| args.extend([name.to_owned(), value]);
    flag("--range", range.to_string());
    flag("--model", options.model.clone());
    flag("--identity", identity.display().to_string());
    flag("--allow", coordinator.to_string());
    flag("--threads", options.threads.to_string());
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

fn text(value: &Value, pointer: &str) -> Result<String, Failure> {
    let found = value.pointer(pointer).and_then(Value::as_str);
    found.map(str::to_owned).ok_or_else(|| Failure::new("protocol", format!("{pointer} is missing in READY {value}")))
}
