//! `ringctl generate`: text from a running coordinator, streamed to the terminal.
//!
//! Ctrl-C ends the process, the connection with it, and so the session on every stage.

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use crate::api::HTTP_PORT;
use crate::cli::answer::Answer;
use crate::cli::client::{Client, ClientError};
use crate::cli::ids::{IdsError, read_ids};
use crate::cli::screen::Screen;
use crate::ids::WireEncoding;

/// Largest prompt that is read from stdin, in bytes.
const PROMPT_BYTES_MAX: u64 = 64 << 20;

/// Options of `ringctl generate`.
#[derive(Debug, Clone, Args)]
pub struct GenerateArgs {
    /// HTTP address of the coordinator
    #[arg(long, value_name = "URL", default_value_t = default_url())]
    pub url: String,
    /// Prompt; - reads it from stdin
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_ids", conflicts_with = "prompt_ids")]
    pub prompt: Option<String>,
    /// File with a JSON array of token ids as the prompt
    #[arg(long, value_name = "FILE")]
    pub prompt_ids: Option<PathBuf>,
    /// New tokens, at most
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub max_new: u32,
    /// 0 is greedy, up to 2
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = finite)]
    pub temperature: f64,
    /// Probability mass kept, above 0, up to 1
    #[arg(long, value_name = "P", value_parser = finite)]
    pub top_p: Option<f64>,
    /// Most likely tokens kept; 0 keeps all
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Seed of the random numbers; drawn where not given
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Text that ends the answer; up to four may be given
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Whether drafts are streamed; the coordinator's choice where not given
    #[arg(long, value_name = "MODE", value_parser = ["pipelined", "plain"])]
    pub mode: Option<String>,
    /// Wire encoding, fp8 or bf16; the coordinator's choice where not given
    #[arg(long, value_name = "ENCODING")]
    pub wire: Option<WireEncoding>,
    /// Go on past the end-of-sequence token
    #[arg(long)]
    pub ignore_eos: bool,
    /// One JSON object on the last line of stdout
    #[arg(long)]
    pub json: bool,
}

/// A number that JSON can carry; its range is the coordinator's to check.
fn finite(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        Ok(_) | Err(_) => Err("expected a finite number".to_owned()),
    }
}

/// Where a coordinator serves unless told otherwise.
#[must_use]
pub fn default_url() -> String {
    format!("http://127.0.0.1:{HTTP_PORT}")
}

/// Why there is no text, or not all of it.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The coordinator did not answer, or not to the end.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The file of ids can't be used.
    #[error("--prompt-ids {0}")]
    Ids(#[from] IdsError),
    /// The prompt can't be read.
    #[error("--prompt -: {0}")]
    Stdin(std::io::Error),
    /// The text can't be written.
    #[error("stdout: {0}")]
    Output(std::io::Error),
}

/// Runs the command: streams the text to `out`, and progress to stderr where that is a terminal.
///
/// # Errors
/// [`GenerateError`]; text that came before a failure has been written.
pub fn run(args: &GenerateArgs, out: &mut dyn Write) -> Result<(), GenerateError> {
    let body = request(args)?;
    let mut screen = Screen::new(out, std::io::stdout().is_terminal(), u64::from(args.max_new));
    let mut answer = Answer::default();
    let streamed = Client::new(&args.url).stream(&body, |event| {
        let delta = answer.take(&event)?;
        screen.show(&delta, answer.completion_tokens).map_err(GenerateError::Output)
    });
    screen.finish().map_err(GenerateError::Output)?;
    streamed?;
    if args.json {
        writeln!(out, "{}", answer.json()).and_then(|()| out.flush()).map_err(GenerateError::Output)?;
    } else if std::io::stderr().is_terminal() {
        // A note for a person: stderr may be gone by then.
        let _ = writeln!(std::io::stderr(), "{}", answer.summary());
    }
    Ok(())
}

/// The body of the request.
fn request(args: &GenerateArgs) -> Result<Value, GenerateError> {
    let prompt = match (&args.prompt_ids, args.prompt.as_deref()) {
        (Some(path), _) => json!(read_ids(path)?),
        (None, Some("-")) => {
            let mut text = String::new();
            std::io::stdin().lock().take(PROMPT_BYTES_MAX).read_to_string(&mut text).map_err(GenerateError::Stdin)?;
            json!(text)
        }
        (None, prompt) => json!(prompt),
    };
    let mut body = json!({
        "prompt": prompt, "max_tokens": args.max_new, "temperature": args.temperature,
        "top_p": args.top_p, "top_k": args.top_k, "seed": args.seed, "mode": args.mode, "wire": args.wire,
        "ignore_eos": args.ignore_eos, "return_token_ids": true,
        "stream": true, "stream_options": {"include_usage": true},
    });
    if !args.stop.is_empty() {
        body["stop"] = json!(args.stop);
    }
    Ok(body)
}
