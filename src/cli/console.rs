//! What the commands share: lines on stdout, notes on stderr, failures with a phase, signals.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use serde_json::json;
use tracing_subscriber::EnvFilter;

use crate::config;

/// Threads of a process's async runtime: they move bytes, they don't compute.
const RUNTIME_THREADS: usize = 2;

/// Why a command ended badly.
#[derive(Debug, thiserror::Error)]
#[error("{phase}: {why}")]
pub struct Failure {
    phase: &'static str,
    why: String,
}

impl Failure {
    /// A failure in a phase.
    #[must_use]
    pub fn new(phase: &'static str, why: impl Display) -> Self {
        Self { phase, why: why.to_string() }
    }

    /// Turns errors of a phase into failures.
    pub fn of<E: Display>(phase: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::new(phase, error)
    }

    /// In words, without the phase.
    #[must_use]
    pub fn why(&self) -> &str {
        &self.why
    }
}

/// Prints a line on stdout, at once. A reader that is gone is no reason to fail.
pub fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Prints a note for a person on stderr.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Turns a result into an exit status; a failure is one `FATAL {…}` line on stdout and a note on
/// stderr.
#[must_use]
pub fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            line(&format!("FATAL {}", json!({ "error": failure.why, "phase": failure.phase })));
            note(&format!("fatal: {failure}"));
            ExitCode::FAILURE
        }
    }
}

/// Turns the result of a command for a person into an exit status; a failure is a note on stderr.
#[must_use]
pub fn exit_quietly(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            note(&format!("error: {}", failure.why));
            ExitCode::FAILURE
        }
    }
}

/// Starts the log on stderr.
pub fn start_log() {
    let filter = EnvFilter::try_new(config::log_filter()).unwrap_or_else(|error| {
        note(&format!("RINGFENCE_LOG is not a filter ({error}): logging warnings"));
        EnvFilter::new("warn")
    });
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if let Err(error) = log.try_init() {
        note(&format!("the log can't be started: {error}"));
    }
}

/// An async runtime.
///
/// # Errors
/// The system's error where no thread can be started.
pub fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(RUNTIME_THREADS)
        .enable_all()
        .build()
        .map_err(Failure::of("runtime"))
}

/// Waits for SIGTERM or SIGINT.
pub async fn signalled() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}

/// Bytes of memory that this host can still give out, from `/proc/meminfo`; unlimited where the
/// host does not say.
#[must_use]
pub fn memory_free() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")).and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib.saturating_mul(1_024))
}
