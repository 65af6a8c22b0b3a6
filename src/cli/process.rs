//! Child processes that don't outlive their parent: this very program, started again.
//!
//! Owns both ends of the life line: the parent holds the write end of the child's stdin, and a
//! child that [`watch_parent`]s exits when it closes, however the parent ended. Children are in
//! process groups of their own, so a Ctrl-C reaches the parent alone, which stops them in order.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, BufReader};
use tokio::process::{ChildStdin, Command};
use tokio::sync::watch;
use tokio::time::timeout;

/// Longest line that is taken from a child, in bytes; the rest of a longer one is skipped.
const LINE_BYTES_MAX: usize = 64 << 10;

/// `EVENT` lines of a child that are kept.
const EVENTS_MAX: usize = 64;

/// Lines of a child's stderr that are kept for an error message.
const STDERR_LINES_MAX: usize = 20;

/// How long a child may take to end after a SIGTERM, before a SIGKILL.
pub const STOP_GRACE: Duration = Duration::from_secs(5);

/// How long a child that closed its stdout may take to end.
const EXIT_GRACE: Duration = Duration::from_secs(2);

/// Exit status of a child whose parent is gone.
const ORPHAN_STATUS: i32 = 3;

/// A child to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spawn {
    /// Its name in errors and logs, such as `stage 0:3`.
    pub name: String,
    /// Arguments of this program.
    pub args: Vec<String>,
}

/// What went wrong with a child.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It could not be started.
    #[error("cannot start {name} ({}): {why}", program.display())]
    Start {
        /// Its name.
        name: String,
        /// The program.
        program: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// It said `FATAL`.
    #[error("{name} failed ({phase}): {error}")]
    Fatal {
        /// Its name.
        name: String,
        /// In which phase.
        phase: String,
        /// Its own words.
        error: String,
    },
    /// It ended without a word.
    #[error("{name} ended before it was ready ({status}){stderr}")]
    Ended {
        /// Its name.
        name: String,
        /// How it ended.
        status: Ending,
        /// The end of its stderr.
        stderr: Tail,
    },
    /// It said a line that can't be read.
    #[error("{name} said {line:?}: expected READY or FATAL and a JSON object")]
    Garbled {
        /// Its name.
        name: String,
        /// The line, shortened.
        line: String,
    },
    /// It said nothing in time.
    #[error("{name} was not ready within {} s{stderr}", deadline.as_secs_f32())]
    Late {
        /// Its name.
        name: String,
        /// How long it had.
        deadline: Duration,
        /// The end of its stderr.
        stderr: Tail,
    },
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With a status, or by a signal.
    Status(ExitStatus),
    /// It closed its stdout and lives on.
    StdoutClosed,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => status.fmt(f),
            Self::StdoutClosed => f.write_str("its stdout is closed"),
        }
    }
}

/// The last lines of a child's stderr, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tail(pub Vec<String>);

impl fmt::Display for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        f.write_str("; the end of its stderr:")?;
        self.0.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// What a child last said on its stdout.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Said {
    Nothing,
    Ready(Value),
    Fatal {
        phase: String,
        error: String,
    },
    Garbled(String),
    /// Its stdout is closed.
    Ended,
}

type Lines = Arc<Mutex<VecDeque<String>>>;

/// The `EVENT` lines of a child as they came, oldest first.
#[derive(Debug, Clone, Default)]
pub struct Events(Arc<Mutex<VecDeque<(Instant, String)>>>);

impl Events {
    /// The first one at or after a time that has `word` in it.
    #[must_use]
    pub fn first_since(&self, time: Instant, word: &str) -> Option<Instant> {
        let events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        events.iter().find(|(at, text)| *at >= time && text.contains(word)).map(|(at, _)| *at)
    }

    fn keep(&self, text: &str) {
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() == EVENTS_MAX {
            events.pop_front();
        }
        events.push_back((crate::clock::now(), text.to_owned()));
    }
}

/// A child process. Dropped, it is stopped in the background; with the runtime, it is killed.
#[derive(Debug)]
pub struct Child {
    name: String,
    /// `None` once a drop has taken it.
    process: Option<tokio::process::Child>,
    /// The life line.
    stdin: Option<ChildStdin>,
    said: watch::Receiver<Said>,
    events: Events,
    stderr: Lines,
}

impl Child {
    /// Starts this program again with other arguments, on the tokio runtime it is called in.
    ///
    /// # Errors
    /// [`ProcessError::Start`].
    pub fn spawn(spawn: Spawn) -> Result<Self, ProcessError> {
        match std::env::current_exe() {
            Ok(program) => Self::spawn_program(&program, spawn),
            Err(why) => Err(ProcessError::Start { name: spawn.name, program: PathBuf::new(), why }),
        }
    }

    fn spawn_program(program: &Path, Spawn { name, args }: Spawn) -> Result<Self, ProcessError> {
        let started = Command::new(program)
            .args(&args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn();
        let mut process =
            started.map_err(|why| ProcessError::Start { name: name.clone(), program: program.to_owned(), why })?;
        let (sender, said) = watch::channel(Said::Nothing);
        let events = Events::default();
        if let Some(stdout) = process.stdout.take() {
            tokio::spawn(listen(BufReader::new(stdout), sender, events.clone()));
        }
        let stderr = Lines::default();
        if let Some(lines) = process.stderr.take() {
            tokio::spawn(keep(name.clone(), BufReader::new(lines), Arc::clone(&stderr)));
        }
        let stdin = process.stdin.take();
        Ok(Self { name, process: Some(process), stdin, said, events, stderr })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it said of its changes.
    #[must_use]
    pub fn events(&self) -> Events {
        self.events.clone()
    }

    /// Its process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().and_then(tokio::process::Child::id)
    }

    /// Waits for its `READY` line and gives the object on it; at once if it said so before.
    ///
    /// # Errors
    /// [`ProcessError`]: it failed, ended, said what can't be read, or took too long.
    pub async fn ready(&mut self, deadline: Duration) -> Result<Value, ProcessError> {
        let mut said = self.said.clone();
        let heard = timeout(deadline, said.wait_for(|said| *said != Said::Nothing)).await;
        let heard = match heard {
            Ok(Ok(said)) => said.clone(),
            Ok(Err(_)) => Said::Ended,
            Err(_) => return Err(ProcessError::Late { name: self.name.clone(), deadline, stderr: self.stderr() }),
        };
        let name = self.name.clone();
        match heard {
            Said::Ready(value) => Ok(value),
            Said::Fatal { phase, error } => Err(ProcessError::Fatal { name, phase, error }),
            Said::Garbled(line) => Err(ProcessError::Garbled { name, line }),
            Said::Nothing | Said::Ended => {
                let status = self.wait(EXIT_GRACE).await.map_or(Ending::StdoutClosed, Ending::Status);
                Err(ProcessError::Ended { name, status, stderr: self.stderr() })
            }
        }
    }

    /// Waits for its end; `None` if it goes on.
    pub async fn wait(&mut self, deadline: Duration) -> Option<ExitStatus> {
        // The pipe stays open: tokio's `wait` closes only what the process still holds.
        let process = self.process.as_mut()?;
        timeout(deadline, process.wait()).await.ok()?.ok()
    }

    /// The last lines of its stderr.
    #[must_use]
    pub fn stderr(&self) -> Tail {
        Tail(self.stderr.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect())
    }

    /// Stops it: SIGTERM, then SIGKILL after [`STOP_GRACE`]. Returns when it is gone.
    pub async fn stop(&mut self) {
        if let Some(process) = &mut self.process {
            stop_within(process, STOP_GRACE).await;
        }
        self.stdin = None;
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        if process.id().is_none() {
            return;
        }
        terminate(&process);
        // The life line goes with the task; without a runtime, both go at once.
        let stdin = self.stdin.take();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                stop_within(&mut process, STOP_GRACE).await;
                drop(stdin);
            });
        }
    }
}

/// Asks a process to end; one that was reaped has no id and is left alone.
fn terminate(process: &tokio::process::Child) {
    let pid = process.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // A process that ended meanwhile waits to be reaped: its id is not another's.
        let _ = kill_process(pid, Signal::TERM);
    }
}

async fn stop_within(process: &mut tokio::process::Child, grace: Duration) {
    terminate(process);
    if timeout(grace, process.wait()).await.is_err() {
        // It can't refuse; one that ended meanwhile is as good.
        let _ = process.kill().await;
    }
}

/// Follows a child's stdout.
async fn listen(mut stdout: impl AsyncBufRead + Unpin, said: watch::Sender<Said>, events: Events) {
    let mut line = Vec::new();
    while let Ok(true) = next_line(&mut stdout, &mut line).await {
        let text = String::from_utf8_lossy(&line);
        if let Some(event) = text.strip_prefix("EVENT ") {
            events.keep(event);
        }
        if let Some(heard) = understand(&text) {
            said.send_if_modified(|said| {
                // What was fatal stays the reason, whatever follows.
                let changed = !matches!(said, Said::Fatal { .. });
                if changed {
                    *said = heard;
                }
                changed
            });
        }
    }
    said.send_if_modified(|said| {
        let changed = !matches!(said, Said::Fatal { .. } | Said::Garbled(_));
        if changed {
            *said = Said::Ended;
        }
        changed
    });
}

/// What a line of a child says, if it is meant for the parent.
fn understand(line: &str) -> Option<Said> {
    let garbled = || Said::Garbled(line.chars().take(200).collect());
    if let Some(rest) = line.strip_prefix("READY ") {
        return Some(serde_json::from_str(rest).map_or_else(|_| garbled(), Said::Ready));
    }
    let rest = line.strip_prefix("FATAL ")?;
    let Ok(value) = serde_json::from_str::<Value>(rest) else { return Some(garbled()) };
    let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    Some(match (text("error"), text("phase")) {
        (Some(error), phase) => Said::Fatal { phase: phase.unwrap_or_else(|| "unknown phase".to_owned()), error },
        (None, _) => garbled(),
    })
}

/// Keeps the end of a child's stderr, and passes it on to the log.
async fn keep(name: String, mut stderr: impl AsyncBufRead + Unpin, kept: Lines) {
    let mut line = Vec::new();
    while let Ok(true) = next_line(&mut stderr, &mut line).await {
        let text = String::from_utf8_lossy(&line).into_owned();
        tracing::debug!(process = %name, "{text}");
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == STDERR_LINES_MAX {
            kept.pop_front();
        }
        kept.push_back(text.chars().take(500).collect());
    }
}

/// Reads a line without its end, up to [`LINE_BYTES_MAX`]; `false` at the end of the input.
async fn next_line(input: &mut (impl AsyncBufRead + Unpin), line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let mut any = false;
    loop {
        let chunk = input.fill_buf().await?;
        if chunk.is_empty() {
            return Ok(any);
        }
        any = true;
        let end = chunk.iter().position(|&byte| byte == b'\n');
        let text = &chunk[..end.unwrap_or(chunk.len())];
        line.extend_from_slice(&text[..text.len().min(LINE_BYTES_MAX - line.len())]);
        let used = end.map_or(chunk.len(), |end| end + 1);
        input.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

/// Ends this process when its stdin closes: call it first in a child, once.
///
/// A thread of its own watches, so it works whatever the runtime does.
pub fn watch_parent() {
    std::thread::spawn(|| {
        until_closed(io::stdin());
        std::process::exit(ORPHAN_STATUS);
    });
}

/// Reads until the input ends, or can't be read.
fn until_closed(mut input: impl Read) {
    let mut scratch = [0; 64];
    loop {
        match input.read(&mut scratch) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Child {
        let spawn = Spawn { name: "stage 0:3".to_owned(), args: vec!["-c".to_owned(), script.to_owned()] };
        Child::spawn_program(Path::new("/bin/sh"), spawn).unwrap()
    }

    /// Whether a child of this process lives, reaped or not.
    fn lives(pid: u32) -> bool {
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        rustix::process::test_kill_process(pid).is_ok()
    }

    async fn until_dead(pid: u32) {
        timeout(PATIENCE, async {
            while lives(pid) {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the process ends");
    }

    #[tokio::test]
    async fn a_child_says_that_it_is_ready() {
        let mut child = shell("echo noise; echo 'READY {\"peer\":\"p\"}'; cat");
        assert_eq!(child.ready(PATIENCE).await.unwrap(), json!({ "peer": "p" }));
        assert_eq!(child.ready(PATIENCE).await.unwrap(), json!({ "peer": "p" }), "it stays ready");
        let pid = child.pid().unwrap();
        assert!(lives(pid));
        child.stop().await;
        assert_eq!(child.pid(), None);
        assert!(!lives(pid));
    }

    #[tokio::test]
    async fn a_fatal_line_is_the_error() {
        let mut child = shell("echo 'FATAL {\"error\":\"no such range\",\"phase\":\"model\"}'; exit 1");
        let error = child.ready(PATIENCE).await.unwrap_err().to_string();
        assert_eq!(error, "stage 0:3 failed (model): no such range");
    }

    #[tokio::test]
    async fn a_silent_end_shows_the_end_of_stderr() {
        let mut child = shell("for i in $(seq 30); do echo line $i >&2; done; exec 2>&-; exit 7");
        let error = child.ready(PATIENCE).await.unwrap_err();
        let ProcessError::Ended { status: Ending::Status(status), .. } = &error else { panic!("{error:?}") };
        assert_eq!(status.code(), Some(7));
        timeout(PATIENCE, async {
            while child.stderr().0.last().map(String::as_str) != Some("line 30") {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
        assert_eq!(child.stderr().0.len(), STDERR_LINES_MAX);
    }

    #[tokio::test]
    async fn a_garbled_line_and_a_late_child_are_errors() {
        let error = shell("echo 'READY soon'; cat").ready(PATIENCE).await.unwrap_err();
        assert!(matches!(error, ProcessError::Garbled { .. }), "{error:?}");
        let error = shell("cat").ready(Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, ProcessError::Late { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn a_stubborn_child_is_killed() {
        let mut child = shell("trap '' TERM; echo 'READY {}'; while true; do sleep 1; done");
        child.ready(PATIENCE).await.unwrap();
        let pid = child.pid().unwrap();
        stop_within(child.process.as_mut().unwrap(), Duration::from_millis(50)).await;
        assert!(!lives(pid));
    }

    #[tokio::test]
    async fn a_dropped_child_is_stopped() {
        let mut child = shell("echo 'READY {}'; cat");
        child.ready(PATIENCE).await.unwrap();
        let pid = child.pid().unwrap();
        drop(child);
        until_dead(pid).await;
    }

    #[test]
    fn children_end_with_the_runtime() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let pid = runtime.block_on(async {
            let mut child = shell("trap '' TERM; echo 'READY {}'; exec cat");
            child.ready(PATIENCE).await.unwrap();
            child.pid().unwrap()
        });
        drop(runtime);
        // Reaping is another runtime's: a process that is a zombie or gone has ended.
        let waited = crate::clock::now();
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        while let Ok(None) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG) {
            assert!(crate::clock::now() - waited < PATIENCE, "the process lives on");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_child_learns_that_its_parent_is_gone() {
        let (reader, writer) = io::pipe().unwrap();
        let watching = std::thread::spawn(move || until_closed(reader));
        assert!(!watching.is_finished());
        drop(writer);
        watching.join().unwrap();
    }

    #[tokio::test]
    async fn a_line_without_end_takes_bounded_memory() {
        let long = [vec![b'x'; 3 * LINE_BYTES_MAX], b"\nnext".to_vec()].concat();
        let mut input = BufReader::new(&long[..]);
        let mut line = Vec::new();
        assert!(next_line(&mut input, &mut line).await.unwrap());
        assert_eq!(line.len(), LINE_BYTES_MAX);
        assert!(next_line(&mut input, &mut line).await.unwrap());
        assert_eq!(line, b"next");
        assert!(!next_line(&mut input, &mut line).await.unwrap());
    }
}
