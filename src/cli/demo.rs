//! `ringctl demo`: starts a ring of itself, streams a text through it, and proves the text right.
//!
//! The same request is then run undrafted in this process, with encode→decode at the same
//! boundaries: the token ids must be equal.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::api::text::Vocabulary;
use crate::cli::answer::Answer;
use crate::cli::churn::show::{Show, Shown};
use crate::cli::client::{Client, ClientError};
use crate::cli::console::{self, Failure, Signals};
use crate::cli::device::DeviceName;
use crate::cli::ids::read_ids;
use crate::cli::ring::{LocalRing, LocalRingOptions, LocalStage, interrupted, with_ring};
use crate::cli::screen::Screen;
use crate::cli::tiling::{tile, tile_plain};
use crate::coordinator::job::SubmitError;
use crate::engine::cpu::{CpuEngine, CpuSettings, DEFAULT_CONTEXT};
use crate::engine::solo;
use crate::ids::{LayerRange, TokenId, WireEncoding};
use crate::model::{Checkpoint, ModelConfig};
use crate::proto::control::Sampling;
use crate::wan::{PathStats, ProxyHandle, WanSettings};

/// The built-in prompt.
const PROMPT: &str = "It was a truth universally known in the neighbourhood, that";

/// The emulated network under which a pause can be seen.
const CHURN_WAN: &str = "rtt=40ms";

/// Positions over which the reference run reaches back at most.
const REFERENCE_CHUNK: u32 = 64;

/// Whether drafts are streamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DemoMode {
    /// Drafts are streamed through the ring without waiting.
    Pipelined,
    /// One position at a time.
    Plain,
}

impl DemoMode {
    fn name(self) -> &'static str {
        match self {
            Self::Pipelined => "pipelined",
            Self::Plain => "plain",
        }
    }
}

/// Options of `ringctl demo`.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Stages that share the layers
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub stages: u16,
    /// Text to continue
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_ids")]
    pub prompt: Option<String>,
    /// File with a JSON array of token ids to continue
    #[arg(long, value_name = "FILE")]
    pub prompt_ids: Option<PathBuf>,
    /// Folder of the checkpoint, or `tiny` for the small model inside this program
    #[arg(long, value_name = "DIR", default_value = "tiny")]
    pub model: String,
    /// New tokens, at most
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub max_new: u32,
    /// How hidden states are written on the wire, fp8 or bf16
    #[arg(long, value_name = "ENCODING", default_value = "fp8")]
    pub wire: WireEncoding,
    /// Whether drafts are streamed
    #[arg(long, value_name = "MODE", default_value = "pipelined")]
    pub mode: DemoMode,
    /// 0 is greedy, up to 2
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Frames in flight, at most
    #[arg(long, value_name = "FRAMES")]
    pub in_flight: Option<u32>,
    /// Drafts streamed per block, at most; default: the block the model was trained for
    #[arg(long, value_name = "TOKENS")]
    pub drafts: Option<u32>,
    /// Threads of each stage's engine
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: usize,
    /// Where stages compute, cpu or cuda:N: one for all, or one for each, head first, such as cpu,cuda:0,cpu
    #[arg(long, value_name = "DEVICE", value_delimiter = ',', default_value = "cpu")]
    pub device: Vec<String>,
    /// Put every hop behind an emulated network, such as rtt=40ms,loss=0.1%,rate=50mbit; each hop
    /// has it to itself
    #[arg(long, value_name = "SETTINGS")]
    pub wan: Option<WanSettings>,
    /// Kill a stage in the middle of the text: a spare takes its place, the text pauses and goes on; on a
    /// network of rtt=40ms unless --wan says otherwise
    #[arg(long)]
    pub churn: bool,
    /// One JSON object on the last line of stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command; success only if the ids are equal.
pub fn run(args: &DemoArgs) -> ExitCode {
    console::exit_quietly(start(args))
}

fn start(args: &DemoArgs) -> Result<(), Failure> {
    let demo = Arc::new(Demo::prepare(args.clone())?);
    let runtime = console::runtime()?;
    let done = runtime.block_on(demo.run());
    // Whatever still computes or reads after a signal is not waited for.
    runtime.shutdown_background();
    done
}

struct Demo {
    args: DemoArgs,
    checkpoint: Checkpoint,
    prompt: Vec<TokenId>,
    cut: Vec<LayerRange>,
    wan: Option<WanSettings>,
}

impl Demo {
    /// Refuses what can't work before a process is started.
    fn prepare(args: DemoArgs) -> Result<Self, Failure> {
        let checkpoint = Checkpoint::open(&args.model).map_err(Failure::of("model"))?;
        let config = checkpoint.config();
        let prompt = match &args.prompt_ids {
            Some(file) => read_ids(file).map_err(Failure::of("prompt"))?,
            None => {
                let json = checkpoint.tokenizer_json().map_err(Failure::of("tokenizer"))?;
                let text = Vocabulary::from_bytes(&json, &[]).map_err(Failure::of("tokenizer"))?;
                text.encode(args.prompt.as_deref().unwrap_or(PROMPT)).map_err(Failure::of("prompt"))?
            }
        };
        check(&args, &prompt, config)?;
        let taps = config.draft.as_ref().map(|draft| draft.targets.as_slice());
        let cut = match args.mode {
            DemoMode::Plain => tile_plain(config.layers, args.stages, taps),
            DemoMode::Pipelined if taps.is_none() => {
                return Err(Failure::new("config", "this model has no drafter: use --mode plain"));
            }
            DemoMode::Pipelined => tile(config.layers, args.stages, taps),
        }
        .map_err(Failure::of("config"))?;
        let wan = match (&args.wan, args.churn) {
            (None, true) => Some(CHURN_WAN.parse().map_err(Failure::of("wan"))?),
            (wan, _) => wan.clone(),
        };
        Ok(Self { args, prompt, cut, checkpoint, wan })
    }

    async fn run(self: &Arc<Self>) -> Result<(), Failure> {
        let args = &self.args;
        let options = LocalRingOptions {
            model: args.model.clone(),
            cut: self.cut.clone(),
            spares: if args.churn { self.cut.clone() } else { Vec::new() },
            devices: args.device.clone(),
            log: false,
            own_hops: false,
            wire: args.wire,
            in_flight: args.in_flight,
            drafts: args.drafts,
            threads: args.threads,
            wan: self.wan.clone(),
            seed: args.seed,
        };
        let mut signals = Signals::new()?;
        let work = async |ring: &LocalRing| {
            self.introduce(ring);
            let (answer, shown) = self.ask(ring).await?;
            let stages: Vec<Value> = ring.stages.iter().filter(|stage| !stage.spare).map(stage_json).collect();
            Ok((answer, stages, self.wan.as_ref().map(|wan| path_row(wan, &ring.stages)), shown))
        };
        let (answer, stages, path, shown) = with_ring(&options, &mut signals, work).await?;
        let demo = Arc::clone(self);
        let reference = tokio::select! {
            reference = tokio::task::spawn_blocking(move || demo.reference()) => {
                reference.map_err(Failure::of("reference"))??
            }
            () = signals.next() => return Err(interrupted()),
        };
        let ids = answer.ids()?;
        let equal = reference == ids;
        let path = path.map(|path| ("emulated path of every hop", path));
        let more: Vec<_> = path.into_iter().chain(shown.iter().flat_map(|shown| shown.rows.clone())).collect();
        report(&answer, more, equal, &reference);
        if args.json {
            let mut object = self.json(&answer, equal, &stages);
            object["churn"] = shown.map_or(Value::Null, |shown| shown.json);
            console::line(&object.to_string());
        }
        if equal { Ok(()) } else { Err(Failure::new("equality", first_difference(&ids, &reference))) }
    }

    fn introduce(&self, ring: &LocalRing) {
        for stage in &ring.stages {
            let pid = stage.child.pid().map_or_else(|| "-".to_owned(), |pid| pid.to_string());
            let kind = if stage.spare { "spare" } else { "stage" };
            console::note(&format!("{kind} {:>5}  pid {pid:>7}  {}", stage.range.to_string(), stage.peer));
        }
        console::note(&format!("coordinator at {}\n", ring.url()));
    }

    /// Streams the text to the terminal as it comes.
    async fn ask(&self, ring: &LocalRing) -> Result<(Answer, Option<Shown>), Failure> {
        let args = &self.args;
        let ids: Vec<u32> = self.prompt.iter().map(|id| id.0).collect();
        let body = json!({
            "prompt": ids, "max_tokens": args.max_new, "temperature": args.temperature, "top_p": 1.0,
            "seed": args.seed, "mode": args.mode.name(), "wire": args.wire.to_string(),
            "return_token_ids": true, "stream": true, "stream_options": { "include_usage": true },
        });
        let (client, max_new) = (Client::new(ring.url()), u64::from(args.max_new));
        let (url, churn) = (ring.url().to_owned(), args.churn);
        let streaming = tokio::task::spawn_blocking(move || {
            let mut out = std::io::stdout();
            let terminal = out.is_terminal();
            let show = churn.then(|| Show::aim(&url, (max_new / 3).max(1))).transpose()?;
            let mut screen = Screen::new(&mut out, terminal, max_new);
            let mut answer = Answer::default();
            let streamed = client.stream(&body, |event| {
                let delta = answer.take(&event)?;
                screen.show(&delta, answer.completion_tokens).map_err(Failure::of("stdout"))?;
                let done = show.as_ref().map(|show| show.token(answer.completion_tokens)).transpose()?;
                done.flatten().map_or(Ok(()), |words| screen.say(&words).map_err(Failure::of("stdout")))
            });
            screen.finish().map_err(Failure::of("stdout"))?;
            streamed?;
            let shown = show.map(|show| show.shown()).transpose()?;
            Ok((answer, shown))
        });
        streaming.await.map_err(Failure::of("client"))?
    }

    /// The same request undrafted, in this process, with the same boundaries emulated.
    fn reference(&self) -> Result<Vec<TokenId>, Failure> {
        let args = &self.args;
        let settings = CpuSettings { threads: args.threads.max(1), ..CpuSettings::default() };
        let mut engine = CpuEngine::new(&self.checkpoint, self.checkpoint.all_layers(), &settings)
            .map_err(Failure::of("reference"))?;
        let request = solo::Request {
            prompt: &self.prompt,
            max_new: args.max_new,
            sampling: Sampling { temperature: args.temperature, top_k: 0, top_p: 1.0, min_p: 0.0, seed: args.seed },
            eos: &self.checkpoint.config().eos.iter().copied().map(TokenId).collect::<Vec<_>>(),
            boundaries: self.cut.iter().skip(1).map(|range| range.lo()).collect(),
            encoding: args.wire,
            chunk: REFERENCE_CHUNK,
        };
        solo::generate(&mut engine, &request).map_err(Failure::of("reference"))
    }

    fn json(&self, answer: &Answer, equal: bool, stages: &[Value]) -> Value {
        let mut object = answer.json();
        object["reference_equal"] = json!(equal);
        object["mode"] = json!(self.args.mode.name());
        object["wire"] = json!(self.args.wire);
        object["wan"] = json!(self.wan.as_ref().map(ToString::to_string));
        object["stages"] = json!(stages);
        object
    }
}

/// The table behind the text; `more` are rows in front.
fn report(answer: &Answer, more: Vec<(&'static str, String)>, equal: bool, reference: &[TokenId]) {
    let number = |name: &str| answer.measured.get(name).and_then(Value::as_f64);
    let list = |name: &str| {
        let values = answer.measured.get(name).and_then(Value::as_array);
        let shown =
            values.map(|values| values.iter().map(|value| format!("{:.2}", value.as_f64().unwrap_or(f64::NAN))));
        shown.map_or_else(|| "-".to_owned(), |shown| shown.collect::<Vec<_>>().join("  "))
    };
    let shown =
        |value: Option<f64>, digits: usize| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"));
    let rows = [
        ("tokens per second", shown(number("tokens_per_second"), 1)),
        ("time to first token, ms", shown(number("ttft_ms"), 1)),
        ("acceptance length", shown(number("acceptance_length"), 2)),
        ("acceptance by depth", list("accept_by_depth")),
        ("frames per token", shown(number("frames_per_token"), 2)),
        ("frames computed per token, by stage", list("frames_computed_per_token")),
        ("most frames in flight", shown(number("max_in_flight"), 0)),
        ("bytes per position and hop", shown(number("wire_bytes_per_position"), 0)),
        (
            "ids equal to one undrafted process",
            format!("{} ({} tokens)", if equal { "yes" } else { "NO" }, reference.len()),
        ),
    ];
    let mut table = String::from("\n");
    for (name, value) in more.into_iter().chain(rows) {
        table += &format!("{name:<38} {value}\n");
    }
    let mut out = std::io::stdout().lock();
    let _ = write!(out, "{table}").and_then(|()| out.flush());
}

/// Refuses what a ring of this model would refuse.
fn check(args: &DemoArgs, prompt: &[TokenId], config: &ModelConfig) -> Result<(), Failure> {
    let tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let context = config.max_positions.min(DEFAULT_CONTEXT);
    if prompt.is_empty() {
        return Err(Failure::new("prompt", "the prompt is empty, expected at least one token"));
    }
    if let Some(id) = prompt.iter().find(|id| usize::try_from(id.0).map_or(true, |id| id >= config.vocab)) {
        let last = config.vocab.saturating_sub(1);
        return Err(Failure::new("prompt", format!("the prompt has token id {id}, expected 0 to {last}")));
    }
    if args.max_new == 0 {
        return Err(Failure::new("config", "--max-new 0: expected at least 1"));
    }
    if tokens.saturating_add(args.max_new) > context {
        let error = SubmitError::TooLong { prompt: tokens, max_new: args.max_new, context };
        return Err(Failure::new("config", error));
    }
    if ![1, usize::from(args.stages)].contains(&args.device.len()) {
        let (names, got, stages) = (args.device.join(","), args.device.len(), args.stages);
        let why = format!("--device {names}: {got} devices, expected 1 or {stages}, one to a stage");
        return Err(Failure::new("config", why));
    }
    args.device.iter().try_for_each(|device| device.parse::<DeviceName>().map(|_| ()))?;
    if !(0.0..=2.0).contains(&args.temperature) {
        return Err(Failure::new("config", format!("--temperature {}: expected 0 to 2", args.temperature)));
    }
    Ok(())
}

fn stage_json(stage: &LocalStage) -> Value {
    let mut object = json!({ "peer": stage.peer, "pid": stage.child.pid(), "range": stage.range.to_string() });
    if let Some(wan) = &stage.wan {
        object["wan"] = json!(wan.stats());
    }
    object
}

/// What the emulated network is, and what it did to the packets of all hops.
fn path_row(wan: &WanSettings, stages: &[LocalStage]) -> String {
    let (mut sum, mut machine) = (PathStats::default(), 0);
    for stats in stages.iter().filter_map(|stage| stage.wan.as_ref()).map(ProxyHandle::stats) {
        sum += stats.inward;
        sum += stats.outward;
        machine += stats.inward.overflowed + stats.outward.overflowed + stats.unsent + stats.overrun.unwrap_or(0);
    }
    let mut row =
        format!("{wan} ({} packets, {} lost, {} found a full queue)", sum.entered, sum.lost, sum.queue_dropped);
    if machine > 0 {
        row += &format!("; this machine is too busy for it: it dropped {machine} packets of its own");
    }
    row
}

fn first_difference(got: &[TokenId], reference: &[TokenId]) -> String {
    let at = got.iter().zip(reference).position(|(a, b)| a != b).unwrap_or(got.len().min(reference.len()));
    format!(
        "the ring's {} ids differ from the reference's {} at index {at}: {:?} and {:?}",
        got.len(),
        reference.len(),
        got.get(at),
        reference.get(at)
    )
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::new("client", error)
    }
}
