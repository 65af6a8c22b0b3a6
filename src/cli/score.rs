//! `ringctl score`: what the model thinks of a token sequence, from a running coordinator or from
//! a ring started for it.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;
use serde_json::json;

use crate::api::score::ScoreReport;
use crate::cli::client::{Client, ClientError};
use crate::cli::ids::{IdsError, read_ids};
use crate::ids::{TokenId, WireEncoding};

/// Top tokens shown per position.
pub const TOP: u32 = 5;

/// Options of `ringctl score`.
#[derive(Debug, Clone, Args)]
pub struct ScoreArgs {
    /// File with a JSON array of token ids
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// HTTP address of a coordinator; without it, a ring is started for this and stopped after it
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Folder of the checkpoint, or `tiny`, for a ring that is started
    #[arg(long, value_name = "DIR", default_value = "tiny", conflicts_with = "url")]
    pub model: String,
    /// Stages of a ring that is started
    #[arg(long, value_name = "N", default_value_t = 3, conflicts_with = "url")]
    pub stages: u16,
    /// Wire encoding, fp8 or bf16; the coordinator's choice where not given
    #[arg(long, value_name = "ENCODING")]
    pub wire: Option<WireEncoding>,
    /// One JSON object on the last line of stdout
    #[arg(long)]
    pub json: bool,
}

/// Why there are no scores.
#[derive(Debug, thiserror::Error)]
pub enum ScoreFailure {
    /// The file of ids can't be used.
    #[error("--ids {0}")]
    Ids(#[from] IdsError),
    /// The coordinator did not answer.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The ring that was started for it failed.
    #[error("the ring started for this: {0}")]
    Local(Box<dyn std::error::Error + Send + Sync>),
    /// The scores can't be written.
    #[error("stdout: {0}")]
    Output(std::io::Error),
}

/// Scores ids on a ring that it starts: the way taken without `--url`.
pub type LocalRing<'a> =
    dyn FnMut(&ScoreArgs, &[TokenId]) -> Result<ScoreReport, Box<dyn std::error::Error + Send + Sync>> + 'a;

/// Runs the command: asks the coordinator at `--url`, or `local`, and writes the scores to `out`.
///
/// # Errors
/// [`ScoreFailure`].
pub fn run(args: &ScoreArgs, out: &mut dyn Write, local: &mut LocalRing<'_>) -> Result<(), ScoreFailure> {
    let ids = read_ids(&args.ids)?;
    let report = match &args.url {
        Some(url) => score_over_http(url, &ids, TOP, args.wire)?,
        None => local(args, &ids).map_err(ScoreFailure::Local)?,
    };
    let text = if args.json { serde_json::to_string(&report) } else { Ok(table(&ids, &report)) };
    let text = text.map_err(|error| ScoreFailure::Output(error.into()))?;
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(ScoreFailure::Output)
}

/// Has the coordinator at `url` score `ids`, with the `top` most likely tokens per position.
///
/// # Errors
/// [`ClientError`], also where the report has not one entry per position.
pub fn score_over_http(
    url: &str,
    ids: &[TokenId],
    top: u32,
    wire: Option<WireEncoding>,
) -> Result<ScoreReport, ClientError> {
    #[derive(Deserialize)]
    struct Completion {
        choices: Vec<Choice>,
    }
    #[derive(Deserialize)]
    struct Choice {
        prompt_scores: Option<ScoreReport>,
    }
    let body = json!({"prompt": ids, "max_tokens": 0, "temperature": 0, "score": top, "wire": wire});
    let answer: Completion = Client::new(url).complete(&body)?;
    let report = answer.choices.into_iter().next().and_then(|choice| choice.prompt_scores);
    let report = report.ok_or_else(|| ClientError::Shape { why: "no prompt_scores".to_owned() })?;
    let counts = (report.argmax.len(), report.top.len(), report.logprobs.len());
    if counts != (ids.len(), ids.len(), ids.len().saturating_sub(1)) {
        let why = format!("{} ids got {counts:?} argmaxes, tops and log-probabilities", ids.len());
        return Err(ClientError::Shape { why });
    }
    Ok(report)
}

/// The scores for a person: a line per position.
fn table(ids: &[TokenId], report: &ScoreReport) -> String {
    let mut text = format!("{:>8} {:>8} {:>8} {:>10}  top\n", "position", "token", "argmax", "next");
    for (at, ((id, best), top)) in ids.iter().zip(&report.argmax).zip(&report.top).enumerate() {
        let next = report.logprobs.get(at).map_or_else(|| "-".to_owned(), |p| format!("{p:.4}"));
        let top: Vec<String> = top.iter().map(|(id, p)| format!("{id}:{p:.3}")).collect();
        text += &format!("{at:>8} {id:>8} {best:>8} {next:>10}  {}\n", top.join(" "));
    }
    let mean = report.mean_nll.map_or_else(|| "none (a single token)".to_owned(), |nll| format!("{nll:.6}"));
    text + &format!("mean negative log-likelihood: {mean}")
}
