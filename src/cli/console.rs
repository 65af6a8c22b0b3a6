//! What the commands share: lines on stdout, notes on stderr, failures with a phase, signals.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::config;

/// Exit status of a command line that can't be read.
const USAGE_STATUS: u8 = 2;

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

    /// In which phase.
    #[must_use]
    pub fn phase(&self) -> &'static str {
        self.phase
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

/// Reads the command line. What can't be read is explained on stderr and, where a program may be
/// listening, in a `FATAL {…}` line on stdout.
///
/// # Errors
/// The exit status to end with, also after `--help` and `--version`.
pub fn arguments<A: Parser>(to_program: bool) -> Result<A, ExitCode> {
    A::try_parse().map_err(|error| {
        // A reader that is gone is no reason to fail otherwise.
        let _ = error.print();
        if !error.use_stderr() {
            return ExitCode::SUCCESS;
        }
        if to_program {
            line(&format!("FATAL {}", json!({ "error": complaint(&error.to_string()), "phase": "arguments" })));
        }
        ExitCode::from(USAGE_STATUS)
    })
}

/// What is wrong with a command line, in one line: clap's text without usage and hints on help.
fn complaint(text: &str) -> String {
    let text = text.split("\nUsage:").next().unwrap_or(text);
    let text = text.split("\nFor more information").next().unwrap_or(text);
    let text = text.strip_prefix("error: ").unwrap_or(text);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
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

/// SIGTERM and SIGINT, which no longer end the process by themselves.
#[derive(Debug)]
pub struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    /// Takes both over, from here on, in the runtime it is called in.
    ///
    /// # Errors
    /// The system's error where a signal can't be taken over.
    pub fn new() -> Result<Self, Failure> {
        let take = |kind| signal(kind).map_err(Failure::of("signals"));
        Ok(Self { term: take(SignalKind::terminate())?, int: take(SignalKind::interrupt())? })
    }

    /// Waits for one of them.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complaint_is_one_line_without_the_usage() {
        let text = "error: the following arguments were not provided:\n  --range <LO:HI>\n\n\
                    Usage: stage --range <LO:HI>\n\nFor more information, try '--help'.\n";
        assert_eq!(complaint(text), "the following arguments were not provided: --range <LO:HI>");
        let text = "error: invalid value 'a' for '--range <LO:HI>': no range\n\nFor more information, try '--help'.\n";
        assert_eq!(complaint(text), "invalid value 'a' for '--range <LO:HI>': no range");
    }
}
