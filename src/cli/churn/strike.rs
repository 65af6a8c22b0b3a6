//! Faults as they are done, and undone when their guard goes.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::process::Signal;
use serde_json::Value;

use super::plan::Fault;
use super::target::{Target, TargetError};
use super::watch::Member;
use crate::cli::ring::{LocalRing, udp_address};
use crate::clock;
use crate::wan::{ProxyHandle, Way};

/// How long a slow stage stands still, and how long it runs: a fifth of the time, with pauses that make
/// it suspect and not dead.
const SLOW_STOPPED: Duration = Duration::from_millis(1_200);
/// See [`SLOW_STOPPED`].
const SLOW_RUNNING: Duration = Duration::from_millis(300);
/// How long a slow stage's pause goes on after its guard is gone, at most.
const SLOW_LOOK: Duration = Duration::from_millis(20);

/// How long an emulated network may take to obey.
const CONTROL_WAIT: Duration = Duration::from_secs(5);
/// Longest line of its answer, in bytes.
const CONTROL_BYTES_MAX: u64 = 1 << 20;

/// Which way a hop is cut, seen by the stage that it leads into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Cut {
    /// What is sent to the stage is lost
    In,
    /// What it answers is lost
    Out,
    /// Both
    Both,
}

impl Cut {
    /// Every way.
    pub(crate) const ALL: [Self; 3] = [Self::In, Self::Out, Self::Both];

    fn ways(self) -> &'static [Way] {
        match self {
            Self::In => &[Way::In],
            Self::Out => &[Way::Out],
            Self::Both => &Way::BOTH,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
            Self::Both => "both",
        }
    }
}

/// Why a fault is not done.
#[derive(Debug, thiserror::Error)]
pub(super) enum StrikeError {
    /// The process is not to be signalled.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// Nothing stands in the hop's way.
    #[error("the hop into stage {peer} can't be cut: {why}")]
    NoProxy {
        /// The stage.
        peer: String,
        /// What was looked for.
        why: String,
    },
    /// The emulated network does not obey.
    #[error("--wan-control {}: {why}", socket.display())]
    Control {
        /// Its socket.
        socket: PathBuf,
        /// What it said.
        why: String,
    },
}

/// The emulated networks in front of stages.
#[derive(Debug, Clone)]
pub(crate) enum Hops {
    /// Of a ring that this command started: in front of each stage, for its neighbours and for the
    /// coordinator.
    Local(BTreeMap<String, [ProxyHandle; 2]>),
    /// Behind the socket of a `ringctl wan`.
    Control(PathBuf),
    /// There are none.
    None,
}

impl Hops {
    /// Those of a ring on this machine.
    pub(crate) fn of(ring: &LocalRing) -> Self {
        let both = ring
            .stages
            .iter()
            .filter_map(|stage| Some((stage.peer.clone(), [stage.wan.clone()?, stage.coordinator_wan.clone()?])));
        Self::Local(both.collect())
    }

    /// The hop into a stage; `first`: from the coordinator, not from a neighbour.
    fn find(&self, member: &Member, first: bool) -> Result<Hop, StrikeError> {
        let missing = |why: &str| StrikeError::NoProxy { peer: member.peer.clone(), why: why.to_owned() };
        match self {
            Self::Local(proxies) => {
                let both = proxies.get(&member.peer).ok_or_else(|| missing("no emulated network is in front of it"))?;
                Ok(Hop::Local(both[usize::from(first)].clone()))
            }
            Self::Control(socket) => {
                let answer = ask(socket, "list")?;
                let listens = |proxy: &Value| {
                    let listen = proxy["listen"].as_str().and_then(|text| text.parse().ok());
                    listen.is_some() && member.addresses.iter().any(|address| udp_address(address) == listen)
                };
                let at = answer["proxies"].as_array().and_then(|proxies| proxies.iter().position(listens));
                let at = at.ok_or_else(|| {
                    let at = member.addresses.join(", ");
                    missing(&format!("no proxy of {} listens at its address {at}", socket.display()))
                })?;
                Ok(Hop::Control { socket: socket.clone(), at })
            }
            Self::None => Err(missing(
                "no emulated network is known to be in front of it; start `ringctl wan --control FILE` there and give --wan-control FILE",
            )),
        }
    }
}

#[derive(Debug)]
enum Hop {
    Local(ProxyHandle),
    Control { socket: PathBuf, at: usize },
}

impl Hop {
    fn cut(&self, cut: Cut) -> Result<(), StrikeError> {
        match self {
            Self::Local(proxy) => cut.ways().iter().for_each(|way| proxy.cut(*way)),
            Self::Control { socket, at } => drop(ask(socket, &format!("{at} cut {}", cut.word()))?),
        }
        Ok(())
    }

    fn heal(&self) {
        match self {
            Self::Local(proxy) => proxy.heal(),
            // A network that has ended cuts nothing.
            Self::Control { socket, at } => drop(ask(socket, &format!("{at} heal"))),
        }
    }
}

/// Asks an emulated network and reads its one answer.
fn ask(socket: &Path, command: &str) -> Result<Value, StrikeError> {
    let failed = |why: String| StrikeError::Control { socket: socket.to_owned(), why };
    let broken = |error: std::io::Error| failed(format!("{error}; is `ringctl wan --control` running there?"));
    let mut stream = UnixStream::connect(socket).map_err(broken)?;
    stream.set_read_timeout(Some(CONTROL_WAIT)).map_err(broken)?;
    stream.write_all(format!("{command}\n").as_bytes()).map_err(broken)?;
    let mut line = String::new();
    BufReader::new(stream.take(CONTROL_BYTES_MAX)).read_line(&mut line).map_err(broken)?;
    let said = line.strip_prefix("OK ").and_then(|text| serde_json::from_str(text).ok());
    said.ok_or_else(|| failed(format!("`{command}` was answered {:?}", line.trim_end())))
}

/// A fault that was checked and can be done.
#[derive(Debug)]
pub(crate) struct Aim {
    fault: Fault,
    way: Cut,
    at: At,
}

#[derive(Debug)]
enum At {
    Process(Target),
    Hop(Hop),
}

impl Aim {
    /// Checks what `fault` needs at a stage; `first`: it is the head, or outside of the ring.
    pub(crate) fn take(
        fault: Fault,
        way: Cut,
        (member, first): (&Member, bool),
        hops: &Hops,
        ready: &[PathBuf],
    ) -> Result<Self, StrikeError> {
        let at = match fault {
            Fault::Cut => At::Hop(hops.find(member, first)?),
            Fault::Kill | Fault::Freeze | Fault::Slow | Fault::Coordinator => {
                At::Process(Target::check(member.pid, &member.peer, ready)?)
            }
        };
        Ok(Self { fault, way, at })
    }

    /// What is done to whom, for a person.
    pub(crate) fn describe(&self) -> String {
        match &self.at {
            At::Process(target) => format!("pid {}", target.pid()),
            At::Hop(_) => format!("packets {} are lost", self.way.word()),
        }
    }

    /// Does it.
    pub(crate) fn strike(self) -> Result<Strike, StrikeError> {
        let at = clock::now();
        let undo = match (self.at, self.fault) {
            (At::Hop(hop), _) => {
                hop.cut(self.way)?;
                Undo::Mend(hop)
            }
            (At::Process(target), Fault::Freeze) => {
                target.signal(Signal::STOP)?;
                Undo::Thaw(target)
            }
            (At::Process(target), Fault::Slow) => slow(target)?,
            (At::Process(target), Fault::Kill | Fault::Cut | Fault::Coordinator) => {
                target.signal(Signal::KILL)?;
                Undo::Nothing
            }
        };
        Ok(Strike { at, undo })
    }
}

/// Stops and continues a process in turns, until the guard goes.
fn slow(target: Target) -> Result<Undo, StrikeError> {
    target.signal(Signal::STOP)?;
    let done = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&done);
    let thread = std::thread::spawn(move || {
        let pause = |time: Duration| {
            let begun = clock::now();
            while clock::now() - begun < time && !theirs.load(Ordering::Acquire) {
                std::thread::sleep(SLOW_LOOK);
            }
        };
        loop {
            pause(SLOW_STOPPED);
            // A process that has ended is slow no more.
            let runs = target.signal(Signal::CONT).is_ok();
            if !runs || theirs.load(Ordering::Acquire) {
                return;
            }
            pause(SLOW_RUNNING);
            if theirs.load(Ordering::Acquire) || target.signal(Signal::STOP).is_err() {
                return;
            }
        }
    });
    Ok(Undo::Quicken { done, thread: Some(thread) })
}

/// A fault under way; dropped, it is undone as far as it can be.
#[derive(Debug)]
pub(crate) struct Strike {
    /// Just before it was done.
    pub(crate) at: Instant,
    undo: Undo,
}

#[derive(Debug)]
enum Undo {
    Nothing,
    Thaw(Target),
    Mend(Hop),
    Quicken { done: Arc<AtomicBool>, thread: Option<JoinHandle<()>> },
}

impl Drop for Strike {
    fn drop(&mut self) {
        match &mut self.undo {
            Undo::Nothing => {}
            // One that was ended meanwhile needs nothing.
            Undo::Thaw(target) => drop(target.signal(Signal::CONT)),
            Undo::Mend(hop) => hop.heal(),
            Undo::Quicken { done, thread } => {
                done.store(true, Ordering::Release);
                // A thread that panicked has said so on stderr.
                drop(thread.take().map(JoinHandle::join));
            }
        }
    }
}
