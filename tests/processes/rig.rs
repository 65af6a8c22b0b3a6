//! Starts the real programs, reads what they say, waits for conditions with a deadline, and ends
//! what it started.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ringfence::clock;
use ringfence::transport::identity;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::http;

/// How long anything may take that is not measured: a busy machine is slow, a hang is endless.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Pause between two looks at a condition.
const LOOK: Duration = Duration::from_millis(10);

pub(crate) const RINGCTL: &str = env!("CARGO_BIN_EXE_ringctl");
pub(crate) const STAGE: &str = env!("CARGO_BIN_EXE_stage");
pub(crate) const COORDINATOR: &str = env!("CARGO_BIN_EXE_coordinator");

/// Waits until `look` sees something.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = clock::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(clock::now() - begun < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::park_timeout(LOOK);
    }
}

/// What a process has written so far.
#[derive(Clone, Default)]
struct Written(Arc<Pipe>);

#[derive(Default)]
struct Pipe {
    state: Mutex<Text>,
    grew: Condvar,
}

#[derive(Default)]
struct Text {
    bytes: Vec<u8>,
    ended: bool,
}

impl Written {
    /// Collects everything from `input` on a thread of its own.
    fn collect(mut input: impl Read + Send + 'static) -> Self {
        let written = Self::default();
        let theirs = written.clone();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            loop {
                let read = input.read(&mut piece).unwrap_or(0);
                let mut text = theirs.0.state.lock().unwrap();
                text.bytes.extend_from_slice(&piece[..read]);
                text.ended = read == 0;
                theirs.0.grew.notify_all();
                if read == 0 {
                    return;
                }
            }
        });
        written
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.state.lock().unwrap().bytes).into_owned()
    }

    /// Waits until `look` sees something in the text; `None` at its end or the deadline.
    fn wait<T>(&self, mut look: impl FnMut(&str) -> Option<T>) -> Option<T> {
        let begun = clock::now();
        let mut text = self.0.state.lock().unwrap();
        loop {
            if let Some(seen) = look(&String::from_utf8_lossy(&text.bytes)) {
                return Some(seen);
            }
            let left = PATIENCE.checked_sub(clock::now() - begun).filter(|_| !text.ended)?;
            text = self.0.grew.wait_timeout(text, left).unwrap().0;
        }
    }
}

/// A process under test. Dropped, it is killed.
pub(crate) struct Process {
    child: Child,
    // With `--parent-pipe` the process ends with this test, however that ends.
    _stdin: Option<ChildStdin>,
    out: Written,
    err: Written,
    /// Lines of stdout that were asked for.
    heard: usize,
}

/// A process that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Process {
    /// Starts `program`, in a folder that is not the repository's.
    pub(crate) fn start(program: &str, args: &[&str]) -> Self {
        let mut child = Command::new(program)
            .args(args)
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let out = Written::collect(child.stdout.take().unwrap());
        let err = Written::collect(child.stderr.take().unwrap());
        Self { _stdin: child.stdin.take(), child, out, err, heard: 0 }
    }

    /// Starts `program` and waits for its end.
    pub(crate) fn run(program: &str, args: &[&str]) -> Ended {
        Self::start(program, args).ended()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything on stdout so far.
    pub(crate) fn out(&self) -> String {
        self.out.text()
    }

    /// Waits for the next line on stdout that begins with `word`, and gives the JSON behind it.
    #[track_caller]
    pub(crate) fn says(&mut self, word: &str) -> Value {
        let skip = self.heard;
        let found = self.out.wait(|text| {
            // A line counts once it has ended.
            let complete = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
            let mut lines = complete.lines().enumerate().skip(skip);
            lines.find_map(|(at, line)| Some((at, line.strip_prefix(word)?.to_owned())))
        });
        let Some((at, json)) = found else { panic!("no {word} came: {}", self.describe()) };
        self.heard = at + 1;
        serde_json::from_str(&json).unwrap()
    }

    /// Waits until stderr has a line with all of `parts`.
    #[track_caller]
    pub(crate) fn notes(&self, parts: &[&str]) -> String {
        let line =
            |text: &str| text.lines().find(|line| parts.iter().all(|part| line.contains(part))).map(str::to_owned);
        self.err.wait(line).unwrap_or_else(|| panic!("no note with {parts:?}: {}", self.describe()))
    }

    /// Waits until stdout has this many bytes.
    #[track_caller]
    pub(crate) fn writes(&self, bytes: usize) {
        let enough = self.out.wait(|text| (text.len() >= bytes).then_some(()));
        assert!(enough.is_some(), "less than {bytes} bytes came: {}", self.describe());
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // The process is not reaped before `self.child` says so: its id is not another's.
        kill_process(Pid::from_raw(i32::try_from(self.pid()).unwrap()).unwrap(), signal).unwrap();
    }

    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn ended(mut self) -> Ended {
        let begun = clock::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(clock::now() - begun < PATIENCE, "it does not end: {}", self.describe());
            std::thread::park_timeout(LOOK);
        };
        let rest = |written: &Written| {
            // The pipes may be held open by a process that outlives this one.
            let _ = written.wait(|_| None::<()>);
            written.text()
        };
        Ended { status, out: rest(&self.out), err: rest(&self.err) }
    }

    /// Kills it with SIGKILL and waits for its end.
    #[track_caller]
    pub(crate) fn kill(self) {
        self.signal(Signal::KILL);
        self.ended();
    }

    fn describe(&self) -> String {
        format!("stdout:\n{}\nstderr:\n{}", self.out.text(), self.err.text())
    }
}

impl Drop for Process {
    #[allow(clippy::print_stderr, reason = "a failed test shows what every process said")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("process {}: {}", self.pid(), self.describe());
        }
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    /// The object on the last line of stdout.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        let last = self.out.lines().last().unwrap_or_else(|| panic!("nothing on stdout: {self:?}"));
        serde_json::from_str(last).unwrap_or_else(|error| panic!("{error} in {last:?}: {self:?}"))
    }

    /// What it failed of: the error and phase of its `FATAL` line.
    #[track_caller]
    pub(crate) fn fatal(&self) -> (String, String) {
        assert!(!self.status.success(), "{self:?}");
        let line = self.out.lines().last().and_then(|line| line.strip_prefix("FATAL "));
        let line = line.unwrap_or_else(|| panic!("no FATAL on the last line: {self:?}"));
        let value: Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| value[key].as_str().unwrap_or_else(|| panic!("no {key}: {self:?}")).to_owned();
        (text("error"), text("phase"))
    }
}

/// When a process of this id was started, in ticks; `None` where it has ended, reaped or not.
pub(crate) fn started(pid: u32) -> Option<u64> {
    let (state, _, started) = stat(pid)?;
    (!matches!(state, 'Z' | 'X')).then_some(started)
}

/// State, parent and start time of a process.
fn stat(pid: u32) -> Option<(char, u32, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in brackets and may hold anything.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some((fields.first()?.chars().next()?, fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

/// Children of a process that live, with their start times.
pub(crate) fn children(parent: u32) -> BTreeMap<u32, u64> {
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| stat(*pid).is_some_and(|(_, of, _)| of == parent))
        .filter_map(|pid| Some((pid, started(pid)?)))
        .collect()
}

/// Waits until every one of these processes is gone.
#[track_caller]
pub(crate) fn gone(processes: &BTreeMap<u32, u64>) {
    until("every child ends", || processes.iter().all(|(pid, since)| started(*pid) != Some(*since)).then_some(()));
}

/// A folder with the identities of a ring.
pub(crate) struct Keys(tempfile::TempDir);

impl Keys {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// The file of an identity.
    pub(crate) fn file(&self, name: &str) -> String {
        let path: PathBuf = self.0.path().join(format!("{}.key", name.replace(':', "-")));
        path.to_str().unwrap().to_owned()
    }

    /// The name of the peer with this identity.
    pub(crate) fn peer(&self, name: &str) -> String {
        identity::load_or_create(Path::new(&self.file(name))).unwrap().public().to_peer_id().to_string()
    }
}

/// A stage that is ready, and what it said of itself.
pub(crate) struct Stage {
    pub(crate) process: Process,
    pub(crate) range: String,
    pub(crate) peer: String,
    pub(crate) address: String,
    pub(crate) ready: Value,
}

impl Stage {
    /// Starts a stage whose identity is named after its range.
    #[track_caller]
    pub(crate) fn start(keys: &Keys, range: &str, more: &[&str]) -> Self {
        Self::start_as(keys, range, range, more)
    }

    /// Starts a stage with an identity of another name.
    #[track_caller]
    pub(crate) fn start_as(keys: &Keys, name: &str, range: &str, more: &[&str]) -> Self {
        let identity = keys.file(name);
        let args = [&["--range", range, "--identity", &identity, "--parent-pipe", "--threads", "1"], more].concat();
        let mut process = Process::start(STAGE, &args);
        let ready = process.says("READY ");
        let text = |pointer: &str| ready.pointer(pointer).and_then(Value::as_str).unwrap().to_owned();
        Self { process, range: range.to_owned(), peer: text("/peer"), address: text("/addresses/0"), ready }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }
}

/// A coordinator that listens, not yet ready.
pub(crate) struct Listening {
    pub(crate) process: Process,
    pub(crate) url: String,
    pub(crate) peer: String,
    pub(crate) address: String,
}

impl Listening {
    #[track_caller]
    pub(crate) fn start(keys: &Keys, more: &[&str]) -> Self {
        let identity = keys.file("coordinator");
        let common = ["--identity", &identity, "--parent-pipe"];
        let free: &[&str] = if more.contains(&"--http") { &[] } else { &["--http", "127.0.0.1:0"] };
        // Tests of what is lost want to hear of it.
        let at_once: &[&str] = if more.contains(&"--heal-wait") { &[] } else { &["--heal-wait", "0"] };
        let mut process = Process::start(COORDINATOR, &[&common, free, at_once, more].concat());
        let said = process.says("LISTENING ");
        let text = |pointer: &str| said.pointer(pointer).and_then(Value::as_str).unwrap().to_owned();
        Self { process, url: text("/http"), peer: text("/peer"), address: text("/addresses/0") }
    }

    /// The address that it listens on, without its name.
    pub(crate) fn listen(&self) -> String {
        self.address.split("/p2p/").next().unwrap().to_owned()
    }

    pub(crate) fn health(&self) -> (u16, Value) {
        http::get(&self.url, "/health")
    }

    pub(crate) fn ring(&self) -> Value {
        http::get(&self.url, "/ring").1
    }

    /// Waits until `/health` is green.
    #[track_caller]
    pub(crate) fn ready(&self) {
        let mut last = String::new();
        let begun = clock::now();
        while clock::now() - begun < PATIENCE {
            let (status, body) = self.health();
            if status == 200 {
                assert_eq!(body["ready"], true, "{body}");
                return;
            }
            assert_eq!((status, &body["ready"]), (503, &Value::from(false)), "{body}");
            last.clear();
            write!(last, "{body}").unwrap();
            std::thread::park_timeout(LOOK);
        }
        panic!("not ready: {last}; {}", self.ring());
    }

    /// Waits until `/health` is red with a reason that has all of `parts`.
    #[track_caller]
    pub(crate) fn misses(&self, parts: &[&str]) {
        until(&format!("/health says {parts:?}"), || {
            let (status, body) = self.health();
            let reason = body["reason"].as_str().unwrap_or_default();
            (status == 503 && parts.iter().all(|part| reason.contains(part))).then_some(())
        });
    }

    /// Process ids of the ring's members, head first.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let ring = self.ring();
        let members = ring["members"].as_array().unwrap().iter().filter(|member| member["in_ring"] == true);
        members.map(|member| u32::try_from(member["pid"].as_u64().unwrap()).unwrap()).collect()
    }
}

/// Three stages and the coordinator that dials them.
pub(crate) struct Ring {
    pub(crate) keys: Keys,
    pub(crate) stages: Vec<Stage>,
    pub(crate) coordinator: Listening,
}

/// The ranges of the usual ring.
pub(crate) const CUT: [&str; 3] = ["0:2", "2:4", "4:7"];

impl Ring {
    /// A ring of static addresses that is ready.
    #[track_caller]
    pub(crate) fn start(cut: &[&str]) -> Self {
        Self::start_with(cut, &[])
    }

    /// The same with more options of the coordinator.
    #[track_caller]
    pub(crate) fn start_with(cut: &[&str], more: &[&str]) -> Self {
        let keys = Keys::new();
        let coordinator = keys.peer("coordinator");
        let stages: Vec<Stage> =
            cut.iter().map(|range| Stage::start(&keys, range, &["--allow", &coordinator])).collect();
        let dial: Vec<&str> = stages.iter().flat_map(|stage| ["--stage", stage.address.as_str()]).collect();
        let coordinator = Listening::start(&keys, &[&dial, more].concat());
        coordinator.ready();
        Self { keys, stages, coordinator }
    }

    /// A ring whose stages dial in, ready; its coordinator allows the identity `spare` as well.
    #[track_caller]
    pub(crate) fn dialling(cut: &[&str]) -> Self {
        Self::dialling_with(cut, &[])
    }

    /// The same with more options of the coordinator.
    #[track_caller]
    pub(crate) fn dialling_with(cut: &[&str], more: &[&str]) -> Self {
        let keys = Keys::new();
        let peers: Vec<String> = cut.iter().chain(&["spare"]).map(|name| keys.peer(name)).collect();
        let allow: Vec<&str> = peers.iter().flat_map(|peer| ["--allow", peer.as_str()]).collect();
        let coordinator = Listening::start(&keys, &[&allow, more].concat());
        let dial = coordinator.address.clone();
        let stages = cut.iter().map(|range| Stage::start(&keys, range, &["--coordinator", &dial])).collect();
        coordinator.ready();
        Self { keys, stages, coordinator }
    }

    pub(crate) fn url(&self) -> &str {
        &self.coordinator.url
    }

    /// Process ids of its stages, head first.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.stages.iter().map(Stage::pid).collect()
    }
}
