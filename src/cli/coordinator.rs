//! `coordinator`: keeps a ring whole and serves it over HTTP.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use libp2p::{Multiaddr, PeerId};
use serde_json::json;

use crate::api;
use crate::cli::console::{self, Failure};
use crate::cli::seconds;
use crate::cli::stage::stop_on_signal;
use crate::config::{Admit, CoordinatorSettings, DEAD_AFTER, LogSettings};
use crate::coordinator::handle::Coordinator;
use crate::coordinator::job::{ModelFacts, Serve};
use crate::coordinator::log::Log;
use crate::coordinator::run::{CoordinatorParts, ModelShape, start, start_logged};
use crate::ids::{TokenId, WireEncoding};
use crate::model::Checkpoint;
use crate::transport::identity;
use crate::transport::quic::{QuicLink, QuicSettings};
use crate::transport::redial::peer_of;

/// Pause between looks at whether the ring is ready.
const READY_LOOK: Duration = Duration::from_millis(20);

/// Options of `coordinator`.
#[derive(Debug, Clone, Args)]
pub struct CoordinatorArgs {
    /// Folder of the checkpoint (its config, index and tokenizer are read, no weights), or `tiny`
    #[arg(long, value_name = "DIR", default_value = "tiny")]
    pub model: String,
    /// Stage to dial; ends in /p2p/PEERID; more than one may be given
    #[arg(long, value_name = "MULTIADDR")]
    pub stage: Vec<Multiaddr>,
    /// Stage that may dial in; more than one may be given
    #[arg(long, value_name = "PEERID")]
    pub allow: Vec<PeerId>,
    /// Take any stage that comes
    #[arg(long)]
    pub open: bool,
    /// Address to listen on for stages; more than one may be given
    #[arg(long, value_name = "MULTIADDR", default_value = "/ip4/127.0.0.1/udp/0/quic-v1")]
    pub listen: Vec<Multiaddr>,
    /// Address of the HTTP API; port 0 takes a free one
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8080")]
    pub http: SocketAddr,
    /// File of the API keys that requests must come with, one NAME KEY a line; without it anyone who reaches
    /// the port may use the ring
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// Key file of the coordinator's identity, made on first use with mode 0600; without it an
    /// identity lasts for this run only
    #[arg(long, value_name = "FILE")]
    pub identity: Option<PathBuf>,
    /// Wire encoding of sessions that ask for none
    #[arg(long, value_name = "ENCODING", default_value = "fp8")]
    pub wire: WireEncoding,
    /// Frames in flight per session, at most
    #[arg(long, value_name = "FRAMES", default_value_t = CoordinatorSettings::default().in_flight_max)]
    pub in_flight: u32,
    /// Drafts streamed per block, at most; 0 decodes plainly
    #[arg(long, value_name = "TOKENS")]
    pub drafts: Option<u32>,
    /// Positions of a prompt chunk
    #[arg(long, value_name = "POSITIONS", default_value_t = CoordinatorSettings::default().prefill_chunk)]
    pub prefill_chunk: u32,
    /// Sessions open at once
    #[arg(long, value_name = "N", default_value_t = CoordinatorSettings::default().max_sessions)]
    pub max_sessions: u32,
    /// Longest time without a reply before the stage that is to blame is looked for
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0)]
    pub reply_deadline: f64,
    /// Seconds that a request waits for a stage to take the place of one that was lost, from its last
    /// token on; 0 fails it at once
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    pub heal_wait: f64,
    /// Folder of a log: requests and their tokens are on the disk before a client sees them, and go on
    /// when the coordinator is started again
    #[arg(long, value_name = "DIR")]
    pub log: Option<PathBuf>,
    /// Seconds that a request that was streamed or named goes on after its client's connection broke, for the
    /// client to read on with GET /v1/streams/REQUEST; 60 with --log, 0 without, which can't have more
    #[arg(long, value_name = "SECONDS", requires = "log")]
    pub reattach: Option<f64>,
    /// Seconds after which log files that are not needed are removed
    #[arg(long, value_name = "SECONDS", requires = "log", default_value_t = 86_400.0)]
    pub log_keep: f64,
    /// MiB of log files that are not needed, above which the oldest are removed
    #[arg(long, value_name = "MIB", requires = "log", default_value_t = 256)]
    pub log_keep_mib: u32,
    /// Seconds of silence after which a stage counts as dead; up to twice that where its answers were slow
    #[arg(long, value_name = "SECONDS", default_value_t = DEAD_AFTER.as_secs_f64())]
    pub dead_after: f64,
    /// End when stdin closes: for a program that starts a coordinator
    #[arg(long, hide = true)]
    pub parent_pipe: bool,
}

/// Runs the command.
pub fn run(args: &CoordinatorArgs) -> ExitCode {
    console::exit(serve(args))
}

fn count(flag: &'static str, value: u32, least: u32, most: u32) -> Result<u32, Failure> {
    if (least..=most).contains(&value) {
        Ok(value)
    } else {
        Err(Failure::new("config", format!("{flag} {value}: expected {least} to {most}")))
    }
}

fn settings(args: &CoordinatorArgs) -> Result<CoordinatorSettings, Failure> {
    if let Some(address) = args.stage.iter().find(|address| peer_of(address).is_none()) {
        let why = format!("--stage {address}: expected a multiaddr that ends in /p2p/PEERID");
        return Err(Failure::new("config", why));
    }
    if args.stage.is_empty() && args.allow.is_empty() && !args.open {
        console::note(
            "this coordinator takes no stage: name some with --stage MULTIADDR or --allow PEERID, or take any with --open",
        );
    }
    Ok(CoordinatorSettings {
        stages: args.stage.clone(),
        admit: if args.open { Admit::Anyone } else { Admit::Peers(args.allow.clone()) },
        encoding: args.wire,
        in_flight_max: count("--in-flight", args.in_flight, 1, 1_024)?,
        draft_max: args.drafts.unwrap_or(u32::MAX),
        prefill_chunk: count("--prefill-chunk", args.prefill_chunk, 1, 4_096)?,
        max_sessions: count("--max-sessions", args.max_sessions, 1, 4_096)?,
        reply_deadline: seconds("--reply-deadline", args.reply_deadline)?,
        dead_after: seconds("--dead-after", args.dead_after)?,
        heal_wait: if args.heal_wait == 0.0 { Duration::ZERO } else { seconds("--heal-wait", args.heal_wait)? },
        reattach: match args.reattach {
            Some(0.0) => Duration::ZERO,
            Some(wait) => seconds("--reattach", wait)?,
            None => CoordinatorSettings::default().reattach,
        },
        ..CoordinatorSettings::default()
    })
}

/// Opens the log that is asked for.
fn open_log(args: &CoordinatorArgs, model: [u8; 32]) -> Result<Option<Log>, Failure> {
    let Some(folder) = &args.log else { return Ok(None) };
    let settings = LogSettings {
        keep: if args.log_keep == 0.0 { Duration::ZERO } else { seconds("--log-keep", args.log_keep)? },
        keep_bytes: u64::from(args.log_keep_mib) << 20,
        ..LogSettings::new(folder.clone())
    };
    Log::open(&settings, model).map(Some).map_err(Failure::of("log"))
}

/// What the coordinator must know of a checkpoint.
pub(crate) fn model_facts(checkpoint: &Checkpoint) -> (ModelFacts, ModelShape) {
    let config = checkpoint.config();
    let facts = ModelFacts {
        name: checkpoint.name().to_owned(),
        vocab: u32::try_from(config.vocab).unwrap_or(u32::MAX),
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
    (facts, shape)
}

fn serve(args: &CoordinatorArgs) -> Result<(), Failure> {
    if args.parent_pipe {
        crate::cli::process::watch_parent();
    }
    let settings = settings(args)?;
    let checkpoint = Checkpoint::open(&args.model).map_err(Failure::of("model"))?;
    let (model, shape) = model_facts(&checkpoint);
    let speech = api::speech::Speech::open(&checkpoint, &model.eos).map_err(Failure::of("tokenizer"))?;
    let keys = match &args.api_keys {
        Some(file) => {
            let failed = |error| Failure::new("config", format!("--api-keys {}: {error}", file.display()));
            Some(api::keys::Keys::open(file).map_err(failed)?)
        }
        None => None,
    };
    let identity = match &args.identity {
        Some(file) => identity::load_or_create(Path::new(file)).map_err(Failure::of("identity"))?,
        None => identity::fresh(),
    };
    console::runtime()?.block_on(async {
        let stop = stop_on_signal()?;
        let listener = tokio::net::TcpListener::bind(args.http).await.map_err(|error| {
            Failure::new("listen", format!("--http {}: {error}; give another port, or 0 for a free one", args.http))
        })?;
        let http = listener.local_addr().map_err(Failure::of("listen"))?;
        let (link, events) =
            QuicLink::start(QuicSettings { listen: args.listen.clone(), ..QuicSettings::new(identity) })
                .await
                .map_err(Failure::of("listen"))?;
        let addresses: Vec<String> = link.addresses().iter().map(Multiaddr::to_string).collect();
        let peer = link.local().to_string();
        let log = open_log(args, shape.digest)?;
        let parts = CoordinatorParts { link, events, model, shape, stop: stop.clone() };
        let (coordinator, task) = match log {
            Some(log) => start_logged(parts, settings, log).map_err(Failure::of("log"))?,
            None => start(parts, settings),
        };
        console::line(&format!(
            "LISTENING {}",
            json!({ "peer": peer, "addresses": addresses, "http": format!("http://{http}"), "pid": std::process::id() })
        ));
        let ready = tokio::spawn(say_ready(coordinator.clone(), http));
        api::serve(listener, std::sync::Arc::new(coordinator), speech, keys, stop).await;
        ready.abort();
        task.await.map_err(Failure::of("serve"))
    })
}

/// Says what is missing while the ring is not ready, then `READY`, each time it changes.
async fn say_ready(coordinator: Coordinator, http: SocketAddr) {
    let mut said = None;
    loop {
        let status = coordinator.status();
        let state = if status.ready { None } else { status.missing };
        if said.as_ref() != Some(&state) {
            match &state {
                None => {
                    let ring: Vec<&str> = status
                        .members
                        .iter()
                        .filter(|member| member.in_ring)
                        .map(|member| member.range.as_str())
                        .collect();
                    console::line(&format!(
                        "READY {}",
                        json!({ "http": format!("http://{http}"), "view": status.view, "ring": ring, "pid": std::process::id() })
                    ));
                }
                Some(missing) => console::note(&format!("waiting: {missing}")),
            }
            said = Some(state);
        }
        tokio::time::sleep(READY_LOOK).await;
    }
}
