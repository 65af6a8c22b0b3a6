//! A ring of real processes on this machine: stages and a coordinator, each this very program.
//!
//! Every process ends when its stdin closes, so none outlives the process that started it, however
//! that one ends.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::future::join_all;
use libp2p::PeerId;
use serde_json::Value;

use crate::cli::console::{Failure, Signals};
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
    url: String,
    /// Its stages, head first.
    pub stages: Vec<LocalStage>,
    coordinator: Option<Child>,
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
        let mut ring = Self { url: String::new(), stages: Vec::new(), coordinator: None, folder };
        let coordinator = identity::load_or_create(&ring.coordinator_key()).map_err(Failure::of("identity"))?;
        let coordinator = coordinator.public().to_peer_id();
        for range in &options.cut {
            let identity = ring.folder.path().join(format!("stage-{}-{}.key", range.lo(), range.hi()));
            let child = spawn_stage(options, *range, &identity, coordinator)?;
            ring.stages.push(LocalStage { peer: String::new(), range: *range, child });
        }
        Ok(ring)
    }

    /// Waits for the stages, starts the coordinator and waits until a token went round.
    async fn ready(&mut self, options: &LocalRingOptions) -> Result<(), Failure> {
        let mut addresses = Vec::new();
        for stage in &mut self.stages {
            let ready = stage.child.ready(STAGE_DEADLINE).await.map_err(Failure::of("stage"))?;
            stage.peer = text(&ready, "/peer")?;
            addresses.push(text(&ready, "/addresses/0")?);
        }
        let coordinator = spawn_coordinator(options, &self.coordinator_key(), &addresses)?;
        let ready = self.coordinator.insert(coordinator).ready(COORDINATOR_DEADLINE).await;
        self.url = text(&ready.map_err(Failure::of("coordinator"))?, "/http")?;
        Ok(())
    }

    fn coordinator_key(&self) -> PathBuf {
        self.folder.path().join("coordinator.key")
    }

    /// Where its coordinator serves HTTP.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Stops every process, the coordinator first.
    async fn stop(mut self) {
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.stop().await;
        }
        join_all(self.stages.iter_mut().map(|stage| stage.child.stop())).await;
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
