//! A process that may be signalled: one of this machine and this user, whose program and peer id were
//! checked.
//!
//! A peer's word for its process id proves nothing. The id is opened first, then everything is read
//! of it, and signals go through what was opened: a process that takes a freed id over gets none.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;

use crate::transport::identity;

/// Longest file that is read of a process, or READY file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a process is not signalled.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The coordinator names no process.
    #[error("stage {peer} runs on another machine: its process can be signalled there only")]
    Elsewhere {
        /// The stage.
        peer: String,
    },
    /// There is no such process.
    #[error("process {pid}, which stage {peer} says it is: {why}")]
    Gone {
        /// The id.
        pid: u32,
        /// The stage.
        peer: String,
        /// What the system said.
        why: io::Error,
    },
    /// It is another user's.
    #[error("process {pid} belongs to user {uid}, not to user {ours}, who runs this command: nothing was done to it")]
    Foreign {
        /// The id.
        pid: u32,
        /// Whose it is.
        uid: u32,
        /// Who asks.
        ours: u32,
    },
    /// It runs another program.
    #[error("process {pid} runs {}, expected `stage`, or `ringctl stage`, of this installation: nothing was done to it", program.display())]
    Program {
        /// The id.
        pid: u32,
        /// What it runs.
        program: PathBuf,
    },
    /// Nothing shows which peer it is.
    #[error(
        "nothing shows that process {pid} is stage {peer}: {why}; start it with --identity FILE, or give the file of its READY line with --ready"
    )]
    Unproven {
        /// The id.
        pid: u32,
        /// The stage.
        peer: String,
        /// What was looked for.
        why: String,
    },
    /// It is another peer.
    #[error("process {pid} is stage {found}, not {peer}: nothing was done to it")]
    OtherPeer {
        /// The id.
        pid: u32,
        /// Whom it was said to be.
        peer: String,
        /// Who it is.
        found: String,
    },
    /// The system does not let it be signalled.
    #[error("process {pid} can't be signalled: {why}")]
    Signal {
        /// The id.
        pid: u32,
        /// What the system said.
        why: io::Error,
    },
}

/// A process that was checked.
#[derive(Debug)]
pub struct Target {
    pid: u32,
    process: OwnedFd,
}

impl Target {
    /// Checks that process `pid` is stage `peer`, run by this user on this machine. `ready` are files
    /// with the stdout of stages, which prove stages without an identity file.
    ///
    /// # Errors
    /// [`TargetError`] says what was expected and what was found.
    pub fn check(pid: Option<u32>, peer: &str, ready: &[PathBuf]) -> Result<Self, TargetError> {
        let pid = pid.ok_or_else(|| TargetError::Elsewhere { peer: peer.to_owned() })?;
        let gone = |why: io::Error| TargetError::Gone { pid, peer: peer.to_owned(), why };
        let id = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let id = id.ok_or_else(|| gone(io::Error::from(io::ErrorKind::NotFound)))?;
        let process = pidfd_open(id, PidfdFlags::empty()).map_err(|why| gone(why.into()))?;
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let (uid, ours) = (fs::metadata(&folder).map_err(gone)?.uid(), rustix::process::geteuid().as_raw());
        if uid != ours {
            return Err(TargetError::Foreign { pid, uid, ours });
        }
        let args = arguments(&folder).map_err(gone)?;
        check_program(pid, &folder, &args)?;
        match proof(pid, &folder, &args, ready) {
            Ok(found) if found == peer => Ok(Self { pid, process }),
            Ok(found) => Err(TargetError::OtherPeer { pid, peer: peer.to_owned(), found }),
            Err(why) => Err(TargetError::Unproven { pid, peer: peer.to_owned(), why }),
        }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// [`TargetError::Signal`], also where it has ended.
    pub fn signal(&self, signal: Signal) -> Result<(), TargetError> {
        pidfd_send_signal(&self.process, signal).map_err(|why| TargetError::Signal { pid: self.pid, why: why.into() })
    }
}

/// Its command line.
fn arguments(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let bytes = read_bounded(&folder.join("cmdline"))?;
    let texts = bytes.split(|byte| *byte == 0);
    Ok(texts.map(|text| PathBuf::from(std::ffi::OsStr::from_bytes(text))).collect())
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// It must be this very program, asked to be a stage, or the `stage` beside it.
fn check_program(pid: u32, folder: &Path, args: &[PathBuf]) -> Result<(), TargetError> {
    let link = folder.join("exe");
    let other = || TargetError::Program { pid, program: fs::read_link(&link).unwrap_or_else(|_| link.clone()) };
    let file = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let ours = std::env::current_exe().map_err(|_| other())?;
    let theirs = file(&link).ok_or_else(other)?;
    let asked = args.get(1).is_some_and(|arg| arg.as_os_str() == "stage");
    let here = file(&ours) == Some(theirs) && asked;
    if here || file(&ours.with_file_name("stage")) == Some(theirs) { Ok(()) } else { Err(other()) }
}

/// Which peer it is, by the key that it was started with or by a READY line.
fn proof(pid: u32, folder: &Path, args: &[PathBuf], ready: &[PathBuf]) -> Result<String, String> {
    let mut why = "it has no --identity".to_owned();
    if let Some(file) = identity_file(args) {
        // Its own idea of a relative path.
        match identity::load(&folder.join("cwd").join(file)) {
            Ok(key) => return Ok(key.public().to_peer_id().to_string()),
            Err(error) => why = error.to_string(),
        }
    }
    for file in ready {
        let text = read_bounded(file).map_err(|error| format!("--ready {}: {error}", file.display()))?;
        if let Some(peer) = ready_peer(&String::from_utf8_lossy(&text), pid) {
            return Ok(peer);
        }
    }
    Err(if ready.is_empty() { why } else { format!("{why}, and no file of --ready has its READY line") })
}

fn identity_file(args: &[PathBuf]) -> Option<PathBuf> {
    let glued = |arg: &PathBuf| {
        arg.as_os_str()
            .as_bytes()
            .strip_prefix(b"--identity=")
            .map(|file| PathBuf::from(std::ffi::OsStr::from_bytes(file)))
    };
    let apart = || args.iter().skip_while(|arg| arg.as_os_str() != "--identity").nth(1).cloned();
    args.iter().find_map(glued).or_else(apart)
}

/// The peer of the READY line that has this process id.
fn ready_peer(text: &str, pid: u32) -> Option<String> {
    let said = text.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("READY ")?).ok());
    let mut of_it = said.filter(|ready| ready["pid"].as_u64() == Some(u64::from(pid)));
    of_it.find_map(|ready| Some(ready["peer"].as_str()?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(args: &[&str]) -> Vec<PathBuf> {
        args.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn the_identity_file_is_found_in_a_command_line() {
        let file = |args: &[&str]| identity_file(&paths(args));
        assert_eq!(file(&["stage", "--identity", "a.key", "--open"]), Some("a.key".into()));
        assert_eq!(file(&["stage", "--identity=a.key"]), Some("a.key".into()));
        assert_eq!(file(&["stage", "--identity"]), None);
        assert_eq!(file(&["stage"]), None);
    }

    #[test]
    fn a_ready_line_counts_for_its_process_alone() {
        let text = "noise\nREADY {\"peer\":\"a\",\"pid\":7}\nREADY {\"peer\":\"b\",\"pid\":8}\nREADY x\n";
        assert_eq!(ready_peer(text, 8).as_deref(), Some("b"));
        assert_eq!(ready_peer(text, 9), None);
    }

    #[test]
    fn what_is_not_proven_is_not_signalled() {
        let error = Target::check(None, "p", &[]).unwrap_err();
        assert!(matches!(error, TargetError::Elsewhere { .. }), "{error}");
        // The test program is no stage, though its process is this user's.
        let error = Target::check(Some(std::process::id()), "p", &[]).unwrap_err();
        assert!(matches!(error, TargetError::Program { .. }), "{error}");
        for none in [0, u32::MAX] {
            let error = Target::check(Some(none), "p", &[]).unwrap_err();
            assert!(matches!(error, TargetError::Gone { .. }), "{error}");
        }
        let error = proof(7, Path::new("/proc/self"), &paths(&["stage"]), &[]).unwrap_err();
        assert!(error.contains("no --identity"), "{error}");
    }
}
