//! The fault of `ringctl demo --churn`: a stage killed in the middle of its text.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::plan::Fault;
use super::strike::{Aim, Cut, Hops};
use super::watch::Ring;
use crate::cli::client::Client;
use crate::cli::console::Failure;
use crate::clock;

/// Strikes once, and measures the pause.
#[derive(Debug, Clone)]
pub struct Show {
    client: Client,
    /// Tokens after which it strikes.
    after: u64,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    aim: Option<Aim>,
    words: String,
    /// When it struck, and the time of the coordinator's clock a moment earlier.
    struck: Option<(Instant, u64)>,
    last: Option<Instant>,
    stall: Duration,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Shown {
    /// Rows of the table.
    pub rows: Vec<(&'static str, String)>,
    /// For `--json`.
    pub json: Value,
}

impl Show {
    /// Chooses a stage in the middle of the ring of the coordinator at `url`, to be killed after as many
    /// tokens.
    ///
    /// # Errors
    /// Why nothing can be struck.
    pub fn aim(url: &str, after: u64) -> Result<Self, Failure> {
        let client = Client::new(url);
        let ring: Ring = client.get("/ring")?;
        let serving = ring.serving();
        let victim = *serving.get(serving.len() / 2).ok_or_else(|| Failure::new("churn", "the ring has no stage"))?;
        let none: &[PathBuf] = &[];
        let aim =
            Aim::take(Fault::Kill, Cut::Both, (victim, false), &Hops::None, none).map_err(Failure::of("churn"))?;
        let words = format!("stage {} ({}) is killed: SIGKILL", victim.range, aim.describe());
        let state = State { aim: Some(aim), words, ..State::default() };
        Ok(Self { client, after, state: Arc::new(Mutex::new(state)) })
    }

    /// Takes notice of a token; gives the words for what was done, once.
    ///
    /// # Errors
    /// Why the fault can't be done.
    pub fn token(&self, tokens: u64) -> Result<Option<String>, Failure> {
        let now = clock::now();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = state.last.replace(now) {
            state.stall = state.stall.max(now - last);
        }
        if tokens < self.after {
            return Ok(None);
        }
        let Some(aim) = state.aim.take() else { return Ok(None) };
        let ring: Ring = self.client.get("/ring")?;
        let strike = aim.strike().map_err(Failure::of("churn"))?;
        state.struck = Some((strike.at, ring.uptime_ms));
        Ok(Some(state.words.clone()))
    }

    /// What the ring says of it, once the stream has ended.
    ///
    /// # Errors
    /// Where the fault came too late to be healed under the stream.
    pub fn shown(&self) -> Result<Shown, Failure> {
        let ring: Ring = self.client.get("/ring")?;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let late =
            || Failure::new("churn", "the text was over before the stage was killed: ask for more with --max-new");
        let (_, struck) = state.struck.ok_or_else(late)?;
        let heal = ring.heals.iter().find(|heal| heal.detected_ms >= struck).ok_or_else(late)?;
        let rebuilt = heal.rebuilt_ms.ok_or_else(late)?;
        let detect = (heal.detected_ms - struck).max(1);
        let rebuild = rebuilt.saturating_sub(heal.detected_ms);
        let stall = state.stall.as_millis();
        let rows = vec![
            ("in the middle of the text", state.words.clone()),
            ("seen after, ms", detect.to_string()),
            ("a spare rebuilt its state in, ms", format!("{rebuild} ({} bytes)", heal.replayed_bytes)),
            ("longest pause of the text, ms", stall.to_string()),
        ];
        let json = json!({
            "what": state.words, "detect_ms": detect, "rebuild_ms": rebuild, "rebuild_bytes": heal.replayed_bytes,
            "stall_ms": u64::try_from(stall).unwrap_or(u64::MAX),
        });
        Ok(Shown { rows, json })
    }
}
