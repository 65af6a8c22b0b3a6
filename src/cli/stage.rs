//! `stage`: a volunteer holds a layer range and serves it.
//!
//! Speaks to a program on stdout (`READY {…}`, `FATAL {…}`, with `--json-events` one `EVENT {…}` a
//! change) and to a person on stderr.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use libp2p::{Multiaddr, PeerId};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use crate::cli::console::{self, Failure, Signals};
use crate::cli::device::{DeviceName, Wanted};
use crate::cli::memory;
use crate::cli::seconds;
use crate::config::{DEAD_AFTER, HEARTBEAT, JOURNAL_MIB, MAX_SESSIONS, StageSettings};
use crate::engine::Engine;
use crate::engine::cpu::{BuildError, CpuEngine, CpuSettings, Need, THREADS_MAX};
use crate::ids::{LayerRange, WireEncoding};
use crate::model::Checkpoint;
use crate::node::journal::{JournalConfig, Journals, Retention, SpillConfig};
use crate::node::membership::Obey;
use crate::node::serve::{self, StageEvent, StageParts};
use crate::proto::codec::{ADDRESSES_MAX, SESSIONS_MAX};
use crate::transport::identity;
use crate::transport::quic::{QuicLink, QuicSettings};
use crate::transport::redial::peer_of;
use crate::transport::scope::Scope;

/// Events that wait to be printed.
const EVENTS_MAX: usize = 256;

/// Options of `stage`.
#[derive(Debug, Clone, Args)]
pub struct StageArgs {
    /// Layers to hold, half-open: 3:6 holds layers 3, 4 and 5
    #[arg(long, value_name = "LO:HI")]
    pub range: LayerRange,
    /// Folder of the checkpoint, or `tiny` for the small model inside this program
    #[arg(long, value_name = "DIR", default_value = "tiny")]
    pub model: String,
    /// Address to listen on; more than one may be given
    #[arg(long, value_name = "MULTIADDR", default_value = "/ip4/127.0.0.1/udp/0/quic-v1")]
    pub listen: Vec<Multiaddr>,
    /// Address at which others reach this stage, in place of those listened on: a forwarded port, a
    /// proxy; more than one may be given
    #[arg(long, value_name = "MULTIADDR")]
    pub announce: Vec<Multiaddr>,
    /// Which addresses of neighbours to dial: public ones only, private ones too, or loopback too;
    /// default: as near as the addresses given here
    #[arg(long, value_name = "public|private|loopback")]
    pub dial_scope: Option<Scope>,
    /// Seconds of silence after which a peer counts as dead; up to twice that where its answers were slow
    #[arg(long, value_name = "SECONDS", default_value_t = DEAD_AFTER.as_secs_f64())]
    pub dead_after: f64,
    /// Coordinator to dial and offer this stage to; ends in /p2p/PEERID, and only that peer is obeyed
    #[arg(long, value_name = "MULTIADDR")]
    pub coordinator: Option<Multiaddr>,
    /// Coordinator that is obeyed when it dials this stage; more than one may be given
    #[arg(long, value_name = "PEERID")]
    pub allow: Vec<PeerId>,
    /// Obey any coordinator that comes
    #[arg(long)]
    pub open: bool,
    /// Key file of this stage's identity, made on first use with mode 0600; without it an identity
    /// lasts for this run only
    #[arg(long, value_name = "FILE")]
    pub identity: Option<PathBuf>,
    /// Where to compute: cpu, or cuda:N for an NVIDIA GPU
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: String,
    /// Threads of the engine; default: the processors this process may use
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Longest session in positions; default: the model's
    #[arg(long, value_name = "POSITIONS")]
    pub max_context: Option<u32>,
    /// Sessions held at once
    #[arg(long, value_name = "N", default_value_t = MAX_SESSIONS)]
    pub max_sessions: u32,
    /// Wait to replace another stage: a ring takes this one only where no other stage holds its range
    #[arg(long)]
    pub spare: bool,
    /// While it waits, keep the state of the stage that it would replace current, so that it takes the
    /// place at once; with --spare, and at the price of computing what that stage does
    #[arg(long, requires = "spare")]
    pub shadow: bool,
    /// MiB of memory for the journal of what this stage sent, with which a stage that takes its
    /// successor's place is brought up to date; 0 keeps none, and the whole ring computes again
    #[arg(long, value_name = "MIB", default_value_t = JOURNAL_MIB)]
    pub journal_mib: u32,
    /// Folder for the part of the journal that memory has no room for; its files go with their session.
    /// They hold the ids of requests and answers
    #[arg(long, value_name = "DIR")]
    pub journal_dir: Option<PathBuf>,
    /// MiB of journals of closed sessions to keep in the folder, the newest; with --journal-keep
    #[arg(long, value_name = "MIB", requires_all = ["journal_dir", "journal_keep"])]
    pub journal_keep_mib: Option<u32>,
    /// Seconds for which journals of closed sessions are kept in the folder; with --journal-keep-mib
    #[arg(long, value_name = "SECONDS", requires_all = ["journal_dir", "journal_keep_mib"])]
    pub journal_keep: Option<f64>,
    /// Wire encodings to offer, best first; the coordinator chooses
    #[arg(long, value_name = "ENCODING", value_delimiter = ',', default_value = "fp8,bf16")]
    pub wire: Vec<WireEncoding>,
    /// Check config, index, the range's tensors and the memory, without network; the exit status says
    #[arg(long, conflicts_with = "shards")]
    pub check: bool,
    /// List the files that this range needs, with sizes
    #[arg(long)]
    pub shards: bool,
    /// Print what a GPU holds, tensor by tensor: form, bytes and the SHA-256 of the official bytes
    #[arg(long, conflicts_with_all = ["shards", "check"])]
    pub inventory: bool,
    /// Print one EVENT line on stdout for every change of ring
    #[arg(long)]
    pub json_events: bool,
    /// End when stdin closes: for a program that starts stages
    #[arg(long, hide = true)]
    pub parent_pipe: bool,
}

/// Runs the command.
pub fn run(args: &StageArgs) -> ExitCode {
    let result = if args.shards {
        list_shards(args)
    } else if args.inventory {
        inventory(args)
    } else if args.check {
        check(args)
    } else {
        serve(args)
    };
    console::exit(result)
}

fn open_model(args: &StageArgs) -> Result<Checkpoint, Failure> {
    let checkpoint = Checkpoint::open(&args.model).map_err(Failure::of("model"))?;
    checkpoint.check_range(args.range).map_err(Failure::of("range"))?;
    Ok(checkpoint)
}

fn settings(args: &StageArgs) -> Result<CpuSettings, Failure> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(processors.min(THREADS_MAX));
    if !(1..=THREADS_MAX).contains(&threads) {
        return Err(Failure::new("config", format!("--threads {threads}: expected 1 to {THREADS_MAX}")));
    }
    if args.max_sessions == 0 || args.max_sessions as usize > SESSIONS_MAX {
        let why = format!("--max-sessions {}: expected 1 to {SESSIONS_MAX}", args.max_sessions);
        return Err(Failure::new("config", why));
    }
    if args.announce.len() > ADDRESSES_MAX {
        let why = format!("--announce: {} addresses, expected {ADDRESSES_MAX} at most", args.announce.len());
        return Err(Failure::new("config", why));
    }
    Ok(CpuSettings { threads, max_context: args.max_context, ..CpuSettings::default() })
}

/// The GPU that is asked for, if one is.
fn gpu(args: &StageArgs) -> Result<Option<Wanted>, Failure> {
    let wanted =
        |ordinal| Wanted { ordinal, range: args.range, max_context: args.max_context, sessions: args.max_sessions };
    Ok(match args.device.parse()? {
        DeviceName::Cpu => None,
        DeviceName::Cuda(ordinal) => Some(wanted(ordinal)),
    })
}

fn inventory(args: &StageArgs) -> Result<(), Failure> {
    let Some(gpu) = gpu(args)? else {
        let why = format!("--inventory: --device {} keeps the weights in forms of its own; give a GPU", args.device);
        return Err(Failure::new("config", why));
    };
    gpu.inventory(&open_model(args)?)
}

fn list_shards(args: &StageArgs) -> Result<(), Failure> {
    let checkpoint = open_model(args)?;
    let shards = checkpoint.shards(args.range).map_err(Failure::of("model"))?;
    for shard in &shards {
        console::line(&format!("{}\t{}", shard.file, shard.describe()));
    }
    Ok(())
}

/// What the engine needs for every session that the stage offers to hold.
fn need(args: &StageArgs, checkpoint: &Checkpoint, settings: &CpuSettings) -> Result<Need, Failure> {
    let one = CpuEngine::need(checkpoint, args.range, settings).map_err(unbuilt)?;
    Ok(Need { sessions: u64::from(args.max_sessions), ..one })
}

/// A setting that can't be honoured is not the model's fault.
fn unbuilt(error: BuildError) -> Failure {
    let phase = match &error {
        BuildError::Setting { .. } => "config",
        BuildError::Thread { .. } => "threads",
        BuildError::Model(_) => "model",
    };
    Failure::new(phase, error)
}

/// The journal that is asked for, in a folder that can be used.
fn journal(args: &StageArgs) -> Result<JournalConfig, Failure> {
    let refused = |why: String| Err(Failure::new("config", why));
    let keep = match (args.journal_keep_mib, args.journal_keep) {
        (None, None) => None,
        (Some(0), _) => {
            return refused("--journal-keep-mib 0: expected at least 1, or none to keep nothing".to_owned());
        }
        (Some(mib), Some(time)) => {
            Some(Retention { bytes: u64::from(mib) << 20, time: seconds("--journal-keep", time)? })
        }
        (Some(_), None) => return refused("--journal-keep-mib: give --journal-keep SECONDS too".to_owned()),
        (None, Some(_)) => return refused("--journal-keep: give --journal-keep-mib MIB too".to_owned()),
    };
    if let (0, Some(folder)) = (args.journal_mib, &args.journal_dir) {
        let folder = folder.display();
        return refused(format!(
            "--journal-mib 0 keeps no journal, so there is nothing for --journal-dir {folder}: give one of the two"
        ));
    }
    let spill = args.journal_dir.clone().map(|folder| SpillConfig { folder, keep });
    let journal = JournalConfig { memory: u64::from(args.journal_mib) << 20, spill };
    Journals::check(&journal).map_err(Failure::of("config"))?;
    Ok(journal)
}

/// Range and sessions must fit, and the journal beside them.
fn check_memory(need: &Need, journal: &JournalConfig, free: u64) -> Result<(), Failure> {
    need.check(free).map_err(Failure::of("memory"))?;
    let needed = need.total();
    if needed.saturating_add(journal.memory) > free {
        let mib = journal.memory >> 20;
        let why = format!(
            "--journal-mib {mib}: {free} bytes of memory are free, and range and sessions need {needed} of them; give the journal less"
        );
        return Err(Failure::new("memory", why));
    }
    Ok(())
}

/// What is free on the device, if everything fits there and the journal beside it.
fn fits(gpu: Option<Wanted>, need: &Need, journal: &JournalConfig) -> Result<u64, Failure> {
    let Some(gpu) = gpu else {
        let free = memory::free();
        check_memory(need, journal, free)?;
        return Ok(free);
    };
    let (_, free) = gpu.probe()?;
    need.check(free).map_err(Failure::of("memory"))?;
    if journal.memory > memory::free() {
        let mib = journal.memory >> 20;
        return Err(Failure::new("memory", format!("--journal-mib {mib}: more than is free; give the journal less")));
    }
    Ok(free)
}

fn check(args: &StageArgs) -> Result<(), Failure> {
    obey(args)?;
    let journal = journal(args)?;
    let checkpoint = open_model(args)?;
    let gpu = gpu(args)?;
    let settings = settings(args)?;
    let need = need(args, &checkpoint, &settings)?;
    let free = fits(gpu, &need, &journal)?;
    let weights = checkpoint.weights(args.range).map_err(Failure::of("model"))?;
    weights.check_values().map_err(Failure::of("model"))?;
    console::line(&format!(
        "OK {}",
        json!({
            "model": checkpoint.name(),
            "range": args.range.to_string(),
            "drafts": checkpoint.drafts(args.range),
            "stored_bytes": weights.stored_bytes(),
            "needed_bytes": need.total(),
            "session_bytes": need.session_bytes,
            "free_bytes": free,
        })
    ));
    Ok(())
}

fn serve(args: &StageArgs) -> Result<(), Failure> {
    if args.parent_pipe {
        crate::cli::process::watch_parent();
    }
    let obey = obey(args)?;
    if obey == Obey::Peers(BTreeSet::new()) {
        console::note(
            "this stage obeys nobody: start it with --coordinator MULTIADDR, --allow PEERID of its coordinator, or --open",
        );
    }
    let journal = journal(args)?;
    let checkpoint = open_model(args)?;
    let gpu = gpu(args)?;
    let mut settings = settings(args)?;
    let need = need(args, &checkpoint, &settings)?;
    fits(gpu, &need, &journal)?;
    settings.max_state_bytes = settings.max_state_bytes.max(need.sessions.saturating_mul(need.session_bytes));
    let identity = match &args.identity {
        Some(file) => identity::load_or_create(Path::new(file)).map_err(Failure::of("identity"))?,
        None => identity::fresh(),
    };
    let announce = announce(args, identity.public().to_peer_id())?;
    let engine: Box<dyn Engine> = match gpu {
        Some(gpu) => Box::new(gpu.engine(&checkpoint)?),
        None => Box::new(CpuEngine::new(&checkpoint, args.range, &settings).map_err(unbuilt)?),
    };
    let settings = StageSettings {
        coordinator: args.coordinator.clone(),
        obey,
        max_sessions: args.max_sessions,
        encodings: args.wire.clone(),
        dial_scope: args
            .dial_scope
            .unwrap_or_else(|| Scope::shown_by(args.listen.iter().chain(&args.announce).chain(&args.coordinator))),
        spare: args.spare,
        shadow: args.shadow,
        heartbeat: HEARTBEAT,
        dead_after: seconds("--dead-after", args.dead_after)?,
        announce,
        journal,
    };
    let digest = checkpoint.digest();
    console::runtime()?.block_on(async {
        let stop = stop_on_signal()?;
        let (link, events) =
            QuicLink::start(QuicSettings { listen: args.listen.clone(), ..QuicSettings::new(identity) })
                .await
                .map_err(Failure::of("listen"))?;
        let facts = engine.facts().clone();
        let texts = |addresses: &[Multiaddr]| addresses.iter().map(Multiaddr::to_string).collect::<Vec<_>>();
        console::line(&format!(
            "READY {}",
            json!({
                "peer": link.local().to_string(),
                "addresses": texts(&link.addresses()),
                "announced": texts(&settings.announce),
                "range": facts.range.to_string(),
                "device": facts.device,
                "draft_block": facts.draft_block,
                "max_context": facts.max_context,
                "pid": std::process::id(),
            })
        ));
        let observer = args.json_events.then(print_events);
        let parts = StageParts { engine, link, events, model_digest: digest, stop, observer };
        serve::serve(parts, &settings).await.map_err(Failure::of("serve"))
    })
}

fn obey(args: &StageArgs) -> Result<Obey, Failure> {
    let mut peers: BTreeSet<PeerId> = args.allow.iter().copied().collect();
    if let Some(address) = &args.coordinator {
        let Some(peer) = peer_of(address) else {
            let why = format!("--coordinator {address}: expected a multiaddr that ends in /p2p/PEERID");
            return Err(Failure::new("config", why));
        };
        peers.insert(peer);
    }
    Ok(if args.open { Obey::Anyone } else { Obey::Peers(peers) })
}

/// The addresses to announce, with this stage's name at the end.
fn announce(args: &StageArgs, peer: PeerId) -> Result<Vec<Multiaddr>, Failure> {
    let named = args.announce.iter().map(|address| {
        address.clone().with_p2p(peer).map_err(|_| {
            let why = format!("--announce {address}: expected an address of this stage, whose name is {peer}");
            Failure::new("config", why)
        })
    });
    named.collect()
}

fn print_events() -> mpsc::Sender<StageEvent> {
    let (sender, mut receiver) = mpsc::channel::<StageEvent>(EVENTS_MAX);
    tokio::spawn(async move {
        while let Some(event) = receiver.recv().await {
            if let Ok(text) = serde_json::to_string(&event) {
                console::line(&format!("EVENT {text}"));
            }
        }
    });
    sender
}

/// Becomes `true` at the first SIGTERM or SIGINT that comes after this call.
pub(crate) fn stop_on_signal() -> Result<watch::Receiver<bool>, Failure> {
    let mut signals = Signals::new()?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        signals.next().await;
        let _ = sender.send(true);
        // The receivers decide when to end; the sender stays so that they see `true`, not a loss.
        std::future::pending::<()>().await;
    });
    Ok(receiver)
}
