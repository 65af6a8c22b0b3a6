//! A stage's life: starts the worker's thread and the shell, and ends both.
//!
//! Owns what a stage runs on, what it tells its operator, and how it ends.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::config::StageSettings;
use crate::engine::Engine;
use crate::ids::Node;
use crate::node::counters::Counters;
use crate::node::journal::{JournalError, Journals};
use crate::node::shell::{Shell, ShellParts};
use crate::node::worker::thread::{self, Started, WorkerParts};
use crate::transport::{Link, LinkEvents};

/// Why a stage stopped serving.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The coordinator it was told to dial does not take it.
    #[error("the coordinator {peer} refuses this stage: {reason}")]
    Refused {
        /// Who.
        peer: Node,
        /// Its words.
        reason: String,
    },
    /// What answers where it was told to dial is not its coordinator.
    #[error("the coordinator {peer} does not fit: {reason}")]
    Unfit {
        /// Who.
        peer: Node,
        /// What was expected, what came.
        reason: String,
    },
    /// The engine's thread can't be started, or has ended by itself.
    #[error("the engine's thread ended: {why}")]
    Worker {
        /// What happened.
        why: String,
    },
    /// What is sent can't be kept.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The link is gone.
    #[error("the link to the network ended")]
    LinkEnded,
}

/// A change that an operator may want to see, for `--json-events`.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum StageEvent {
    /// A view was joined.
    Joined {
        /// The view.
        view: u64,
        /// The coordinator.
        coordinator: String,
    },
    /// It is the shadow of a stage of the ring.
    Shadowing {
        /// The view.
        view: u64,
        /// The coordinator.
        coordinator: String,
    },
    /// The stage is in no ring.
    Left,
    /// A coordinator was reached or lost.
    Coordinator {
        /// Who.
        peer: String,
        /// Whether it is connected.
        connected: bool,
    },
    /// A hop that had died while nothing was on it stands again, in the same view.
    Mended {
        /// The neighbour.
        peer: String,
    },
    /// It finishes what is open.
    Draining,
}

/// What a stage runs on.
pub struct StageParts {
    /// The layers.
    pub engine: Box<dyn Engine>,
    /// The way to peers.
    pub link: Arc<dyn Link>,
    /// What happens there.
    pub events: LinkEvents,
    /// Digest of the model, for the hello.
    pub model_digest: [u8; 32],
    /// Becomes `true` when the stage should drain and end.
    pub stop: watch::Receiver<bool>,
    /// Gets changes, where somebody listens.
    pub observer: Option<mpsc::Sender<StageEvent>>,
}

/// Serves until told to stop.
///
/// # Errors
/// [`ServeError`] when it can't go on.
pub async fn serve(parts: StageParts, settings: &StageSettings) -> Result<(), ServeError> {
    let StageParts { engine, link, events, model_digest, stop, observer } = parts;
    let facts = engine.facts().clone();
    let journals = Journals::new(settings.journal.clone(), &facts.range.to_string())?;
    let counters = Arc::new(Counters::default());
    let Started { inputs, ended, thread } = thread::start(WorkerParts {
        engine,
        journals,
        link: Arc::clone(&link),
        runtime: tokio::runtime::Handle::current(),
        counters: Arc::clone(&counters),
        max_sessions: settings.max_sessions,
    })
    .map_err(|error| ServeError::Worker { why: error.to_string() })?;
    let mut shell = Shell::new(ShellParts { link, facts, counters, inputs, model_digest, observer }, settings);
    let result = shell.run(events, ended, stop).await;
    shell.end().await;
    let joined = tokio::task::spawn_blocking(move || thread.join()).await;
    match (result, joined) {
        (Ok(()), Ok(Err(_))) => Err(ServeError::Worker { why: "it panicked; the log says where".to_owned() }),
        (result, _) => result,
    }
}
