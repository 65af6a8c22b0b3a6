//! Settings, with default, unit and what a larger value costs; the only reader of the environment.

use std::path::PathBuf;
use std::time::Duration;

use libp2p::{Multiaddr, PeerId};

use crate::ids::WireEncoding;
use crate::node::journal::JournalConfig;
use crate::node::membership::Obey;
use crate::transport::scope::Scope;

/// How a stage serves.
#[derive(Debug, Clone)]
pub struct StageSettings {
    /// The coordinator to dial and offer itself to; `None`: wait to be dialled.
    pub coordinator: Option<Multiaddr>,
    /// Whom it obeys. Default: the peer in `coordinator`, else nobody.
    pub obey: Obey,
    /// Sessions held at once. Default 16; each costs its state's bytes when open.
    pub max_sessions: u32,
    /// Wire encodings it offers, best first. Default both.
    pub encodings: Vec<WireEncoding>,
    /// Addresses at which other peers reach it, each ending in `/p2p/<its peer>`. Default empty:
    /// those that its link listens on.
    pub announce: Vec<Multiaddr>,
    /// Which addresses of neighbours are dialled. Default: as near as this stage's own addresses.
    pub dial_scope: Scope,
    /// Whether it only replaces other stages of its range. Default no.
    pub spare: bool,
    /// Whether, as a spare outside the ring, it keeps the state of a stage of its range current. Default no;
    /// it computes what that stage does.
    pub shadow: bool,
    /// Pause between heartbeats to every peer. Default 300 ms; three missed make a peer suspect.
    pub heartbeat: Duration,
    /// Silence after which a peer is dead and cut off. Default 1.8 s; larger finds a dead one later,
    /// smaller takes a slow path for one. Where answers take longer than a heartbeat's pause, that much
    /// is added, at most as much again.
    pub dead_after: Duration,
    /// The journal of what it sent, for a successor's replacement. Default 256 MiB in memory, no files.
    pub journal: JournalConfig,
}

/// Default pause between heartbeats.
pub const HEARTBEAT: Duration = Duration::from_millis(300);

/// Default silence after which a peer is dead.
pub const DEAD_AFTER: Duration = Duration::from_millis(1_800);

/// MiB that a stage's journal has in memory by default.
pub const JOURNAL_MIB: u32 = 256;

/// Sessions that a stage holds at once by default.
pub const MAX_SESSIONS: u32 = 16;

/// How a coordinator drives the ring.
#[derive(Debug, Clone)]
pub struct CoordinatorSettings {
    /// Stages to dial; each address ends in `/p2p/<peer>`. Their peers are admitted.
    pub stages: Vec<Multiaddr>,
    /// Stages admitted when they dial in.
    pub admit: Admit,
    /// Wire encoding of sessions that don't ask for one. Default fp8; bf16 doubles the bytes.
    pub encoding: WireEncoding,
    /// Frames in flight per session, at most. Default 16; above block + 1 nothing is gained.
    pub in_flight_max: u32,
    /// Drafts streamed per block. Default: the block that the tail offers; 0 is plain decoding.
    pub draft_max: u32,
    /// Positions of a prompt chunk. Default 64; longer chunks overlap less across stages.
    pub prefill_chunk: u32,
    /// Sessions open at once. Default 16; the stages' own limits hold too.
    pub max_sessions: u32,
    /// Longest time without a reply to the oldest frame. Default 20 s; a larger value waits longer
    /// for a slow stage and finds a stuck one later.
    pub reply_deadline: Duration,
    /// The same for prompt chunks, which take every stage longer. Default 120 s.
    pub prefill_deadline: Duration,
    /// Whether a cancel goes to every stage on control, ahead of the frames that it cancels.
    /// Default yes; only there to measure what that saves. Without it, a stage learns of a new epoch
    /// by the frame that opens it, and has computed what was in front of that one.
    pub cancel_out_of_band: bool,
    /// How long a session whose ring was lost waits for the next one, from its last token on.
    /// Default 60 s; 0 fails it at once.
    pub heal_wait: Duration,
    /// How long a session that is in the log goes on after its reader's connection broke. Default 60 s;
    /// 0 cancels it at once, and without a log that is always so.
    pub reattach: Duration,
    /// Pause between heartbeats to a stage. Default 300 ms; three missed make a stage suspect.
    pub heartbeat: Duration,
    /// Silence after which a stage counts as dead, as of [`StageSettings::dead_after`]. Default 1.8 s.
    pub dead_after: Duration,
    /// Pause between probe tokens on an idle ring. Default 2 s.
    pub probe_every: Duration,
    /// `ready` needs a token that went round within this time. Default 10 s.
    pub ready_for: Duration,
}

impl Default for CoordinatorSettings {
    fn default() -> Self {
        Self {
            stages: Vec::new(),
            admit: Admit::Peers(Vec::new()),
            encoding: WireEncoding::Fp8,
            in_flight_max: 16,
            draft_max: u32::MAX,
            prefill_chunk: 64,
            max_sessions: MAX_SESSIONS,
            reply_deadline: Duration::from_secs(20),
            prefill_deadline: Duration::from_secs(120),
            cancel_out_of_band: true,
            heal_wait: Duration::from_secs(60),
            reattach: Duration::from_secs(60),
            heartbeat: HEARTBEAT,
            dead_after: DEAD_AFTER,
            probe_every: Duration::from_secs(2),
            ready_for: Duration::from_secs(10),
        }
    }
}

/// Where a coordinator logs, and how much of the past it keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// Folder of the log, of this ring's coordinators alone.
    pub folder: PathBuf,
    /// Age above which a file that is not needed is removed. Default a day; more is for people.
    pub keep: Duration,
    /// Bytes of such files together. Default 256 MiB; all of them are read at the next start.
    pub keep_bytes: u64,
    /// Size at which the next file is begun, with the sessions that go on. Default 16 MiB.
    pub file_bytes: u64,
}

impl LogSettings {
    /// The defaults for a folder.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, keep: Duration::from_secs(24 * 3_600), keep_bytes: 256 << 20, file_bytes: 16 << 20 }
    }
}

/// Which stages a coordinator takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admit {
    /// These.
    Peers(Vec<PeerId>),
    /// Whoever comes.
    Anyone,
}

/// Filter of the log on stderr: `RINGFENCE_LOG`, else `warn`.
///
/// The syntax is that of `tracing`: `info`, `ringfence::node=debug,warn`.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "the one reader of the environment")]
pub fn log_filter() -> String {
    std::env::var("RINGFENCE_LOG").unwrap_or_else(|_| "warn".to_owned())
}

/// Folders in which the CUDA compiler is looked for beside the loader's path: `CUDA_HOME`,
/// `CUDA_PATH`, then the usual place.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "the one reader of the environment")]
pub fn cuda_folders() -> Vec<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    named.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]).collect()
}

/// Folder of compiled kernels: `ringfence/kernels` in the user's cache, if there is one.
#[must_use]
#[allow(clippy::disallowed_methods, reason = "the one reader of the environment")]
pub fn kernel_cache() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(cache.join("ringfence").join("kernels"))
}
