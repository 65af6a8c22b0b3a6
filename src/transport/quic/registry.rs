//! Which connection to a peer is the one: pure decisions.
//!
//! Two sides that dial at once make two connections, and a side that lost a connection makes
//! another before its peer notices. Both must settle on the same one, without an event for the
//! others. The side with the smaller peer id decides: it takes the first connection whose hello
//! comes, and closes copies; the other side follows. A hello tells a copy from a successor: it
//! names the sender's process and its oldest connection that still lives, so a connection older
//! than that is dead on the sender's side. A copy stays one when the connection it copies has
//! ended: else a peer that was disconnected would come back through it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use libp2p::{Multiaddr, PeerId};
use tokio::sync::{Mutex, oneshot};

use super::note::Hello;
use crate::ids::Node;

/// Connections to one peer that wait to be settled, at most.
const PENDING_MAX: usize = 8;

/// Held by the one connection of a node whose events an owner sees: from connected to disconnected.
pub(super) type Turn = Arc<Mutex<()>>;

/// How a dial learns its end.
pub(super) type Waiter = oneshot::Sender<Result<Node, String>>;

/// The connections of a link, each with what its owner needs to use it (`H`).
#[derive(Debug)]
pub(super) struct Registry<H> {
    local: Node,
    /// Connections made.
    numbers: u64,
    /// Connections accepted.
    serials: u64,
    peers: BTreeMap<PeerId, Peer<H>>,
}

/// A key, and the processes that hold it: one, or more while one of them is taken for dead.
#[derive(Debug)]
struct Peer<H> {
    /// By the number that each drew at its start.
    processes: BTreeMap<u64, Process<H>>,
    /// Connections whose process is not known yet.
    pending: BTreeSet<u64>,
    /// Dials under way.
    attempts: usize,
    waiters: Vec<Waiter>,
}

#[derive(Debug)]
struct Process<H> {
    current: Option<Current<H>>,
    turn: Turn,
    /// The connection that was in use before, while copies of it may be pending.
    last: Option<Ended>,
}

#[derive(Debug, Clone, Copy)]
struct Ended {
    hello: Hello,
    /// Connections that had been made when it ended.
    numbers: u64,
}

#[derive(Debug)]
struct Current<H> {
    way: Way,
    serial: u64,
    hello: Hello,
    /// Whether the owner was told.
    up: bool,
    handle: H,
}

/// A connection, as this side sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Way {
    /// This side's number of it; rises.
    pub(super) number: u64,
    /// Where the other side is.
    pub(super) address: Multiaddr,
}

/// What to do about a dial.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// Dial.
    Start,
    /// A connection stands or is about to: wait.
    Wait,
}

/// What becomes of a connection.
#[derive(Debug)]
pub(super) enum Verdict<H> {
    /// It is the one.
    Accept {
        /// Its serial, to tell the peer.
        serial: u64,
        /// Its owner's events come in this turn.
        turn: Turn,
        /// Connections that end in its favour.
        bury: Vec<H>,
    },
    /// It is not: close it without a word.
    Refuse {
        /// Why, for the log.
        why: &'static str,
    },
}

impl<H> Default for Peer<H> {
    fn default() -> Self {
        Self { processes: BTreeMap::new(), pending: BTreeSet::new(), attempts: 0, waiters: Vec::new() }
    }
}

impl<H> Default for Process<H> {
    fn default() -> Self {
        Self { current: None, turn: Turn::default(), last: None }
    }
}

impl<H> Process<H> {
    /// Takes the connection in use away.
    fn end(&mut self, numbers: u64) -> Option<H> {
        let current = self.current.take()?;
        self.last = Some(Ended { hello: current.hello, numbers });
        Some(current.handle)
    }

    /// Whether a connection introduced by `hello` was made beside the one in use or the one before:
    /// neither side had seen the end of that one.
    fn is_copy(&self, way: &Way, hello: Hello) -> bool {
        let beside = |other: Hello| hello.oldest <= other.number;
        match (&self.current, self.last) {
            (Some(current), _) => beside(current.hello),
            (None, Some(last)) => way.number <= last.numbers && beside(last.hello),
            (None, None) => false,
        }
    }

    /// Whether the connection is to replace the one in use although both live.
    fn is_better(&self, way: &Way) -> bool {
        self.current.as_ref().is_some_and(|current| current.way.is_relayed() && !way.is_relayed())
    }
}

impl Way {
    /// Whether bytes go through a third node.
    fn is_relayed(&self) -> bool {
        self.address.iter().any(|part| part == libp2p::multiaddr::Protocol::P2pCircuit)
    }
}

impl<H> Peer<H> {
    /// The newest connection whose owner was told.
    fn newest(&self) -> Option<(u64, &Current<H>)> {
        let currents = self.processes.iter().filter_map(|(start, process)| Some((*start, process.current.as_ref()?)));
        currents.filter(|(_, current)| current.up).max_by_key(|(_, current)| current.way.number)
    }

    /// Ends the dials that nothing can bring further: a copy was refused since the peer is
    /// connected already, or there is no hope left.
    fn settle(&mut self, peer: PeerId, why: &str) {
        let hope = self.processes.values().any(|process| process.current.as_ref().is_some_and(|current| !current.up));
        if hope || !self.pending.is_empty() || self.attempts > 0 {
            return;
        }
        let outcome = self.newest().map(|(start, _)| Node { peer, start }).ok_or_else(|| why.to_owned());
        for waiter in self.waiters.drain(..) {
            // A dial that was given up waits no more.
            let _ = waiter.send(outcome.clone());
        }
    }

    /// Other processes whose socket this way leads to: two can't hold one, so they are dead.
    fn take_dead(&mut self, way: &Way, start: u64, numbers: u64) -> Vec<H> {
        let others = self.processes.iter_mut().filter(|(other, _)| **other != start);
        let dead = others.filter(|(_, process)| {
            process.current.as_ref().is_some_and(|current| current.way.address == way.address && !way.is_relayed())
        });
        dead.filter_map(|(_, process)| process.end(numbers)).collect()
    }

    /// Drops what is known of processes that are gone.
    fn forget(&mut self) {
        if self.pending.is_empty() && self.attempts == 0 {
            self.processes.retain(|_, process| process.current.is_some() || Arc::strong_count(&process.turn) > 1);
        }
    }

    fn is_idle(&self) -> bool {
        self.processes.is_empty() && self.pending.is_empty() && self.attempts == 0 && self.waiters.is_empty()
    }
}

impl<H> Registry<H> {
    /// Makes the registry of a link that has just started.
    pub(super) fn new(local: Node) -> Self {
        Self { local, numbers: 0, serials: 0, peers: BTreeMap::new() }
    }

    /// Whether this side decides which connection to `peer` is the one.
    pub(super) fn decides(&self, peer: PeerId) -> bool {
        self.local.peer < peer
    }

    /// Registers a dial to a peer at an address that ends in its id; `waiter` learns its end.
    pub(super) fn attempt(&mut self, peer: PeerId, address: &Multiaddr, waiter: Waiter) -> Attempt {
        let entry = self.peers.entry(peer).or_default();
        let there = entry.processes.iter().find_map(|(start, process)| {
            process
                .current
                .as_ref()
                .filter(|current| current.way.address == *address)
                .map(|current| (*start, current.up))
        });
        match there {
            Some((start, true)) => {
                let _ = waiter.send(Ok(Node { peer, start }));
                Attempt::Wait
            }
            Some((_, false)) => {
                entry.waiters.push(waiter);
                Attempt::Wait
            }
            None => {
                entry.waiters.push(waiter);
                entry.attempts += 1;
                Attempt::Start
            }
        }
    }

    /// A dial came to nothing.
    pub(super) fn attempt_failed(&mut self, peer: PeerId, why: &str) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.attempts = entry.attempts.saturating_sub(1);
            entry.settle(peer, why);
        }
        self.forget(peer);
    }

    /// A connection stands: gives its number, or `None` where the peer holds too many unsettled
    /// ones.
    pub(super) fn begin(&mut self, peer: PeerId, dialled: bool) -> Option<u64> {
        let entry = self.peers.entry(peer).or_default();
        if dialled {
            entry.attempts = entry.attempts.saturating_sub(1);
        }
        if entry.pending.len() >= PENDING_MAX {
            entry.settle(peer, "too many connections at once");
            return None;
        }
        self.numbers += 1;
        entry.pending.insert(self.numbers);
        Some(self.numbers)
    }

    /// What to say first on a connection.
    pub(super) fn hello(&self, peer: PeerId, number: u64) -> Hello {
        let entry = self.peers.get(&peer);
        let pending = entry.and_then(|entry| entry.pending.first().copied());
        let processes = entry.into_iter().flat_map(|entry| entry.processes.values());
        let currents = processes.filter_map(|process| process.current.as_ref()).map(|current| current.way.number);
        let oldest = pending.into_iter().chain(currents).fold(number, u64::min);
        Hello { start: self.local.start, number, oldest }
    }

    /// The deciding side heard the peer's hello.
    pub(super) fn judge(&mut self, peer: PeerId, way: Way, hello: Hello, handle: H) -> Verdict<H> {
        let entry = self.peers.entry(peer).or_default();
        entry.pending.remove(&way.number);
        let process = entry.processes.entry(hello.start).or_default();
        if process.is_copy(&way, hello) && !process.is_better(&way) {
            return Verdict::Refuse { why: "a copy of the connection in use" };
        }
        self.serials += 1;
        let serial = self.serials;
        self.accept(peer, way, (hello, serial), handle)
    }

    /// The following side heard the peer accept.
    pub(super) fn follow(&mut self, peer: PeerId, way: Way, (hello, serial): (Hello, u64), handle: H) -> Verdict<H> {
        let entry = self.peers.entry(peer).or_default();
        entry.pending.remove(&way.number);
        let process = entry.processes.entry(hello.start).or_default();
        if process.current.as_ref().is_some_and(|current| current.serial > serial) {
            return Verdict::Refuse { why: "the peer accepted a newer connection" };
        }
        self.accept(peer, way, (hello, serial), handle)
    }

    fn accept(&mut self, peer: PeerId, way: Way, (hello, serial): (Hello, u64), handle: H) -> Verdict<H> {
        let entry = self.peers.entry(peer).or_default();
        let mut bury = entry.take_dead(&way, hello.start, self.numbers);
        let process = entry.processes.entry(hello.start).or_default();
        let old = process.current.replace(Current { way, serial, hello, up: false, handle });
        bury.extend(old.map(|current| current.handle));
        Verdict::Accept { serial, turn: Arc::clone(&process.turn), bury }
    }

    /// The owner was told of the connection: dials are fulfilled.
    pub(super) fn up(&mut self, node: Node, number: u64) {
        let Some(entry) = self.peers.get_mut(&node.peer) else { return };
        let process = entry.processes.get_mut(&node.start);
        let current =
            process.and_then(|process| process.current.as_mut()).filter(|current| current.way.number == number);
        if let Some(current) = current {
            current.up = true;
            for waiter in entry.waiters.drain(..) {
                // A dial that was given up waits no more.
                let _ = waiter.send(Ok(node));
            }
        }
    }

    /// A connection ended, settled or not.
    pub(super) fn gone(&mut self, peer: PeerId, number: u64, why: &str) {
        let numbers = self.numbers;
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.pending.remove(&number);
            for process in entry.processes.values_mut() {
                if process.current.as_ref().is_some_and(|current| current.way.number == number) {
                    process.end(numbers);
                }
            }
            entry.settle(peer, why);
        }
    }

    /// Drops what is known of a peer, if nothing is; call after every turn is given back.
    pub(super) fn forget(&mut self, peer: PeerId) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.forget();
            if entry.is_idle() {
                self.peers.remove(&peer);
            }
        }
    }

    /// The connection in use.
    pub(super) fn current(&self, node: Node) -> Option<&H> {
        let process = self.peers.get(&node.peer)?.processes.get(&node.start)?;
        process.current.as_ref().map(|current| &current.handle)
    }

    /// Takes the connection in use away, to end it.
    pub(super) fn take(&mut self, node: Node) -> Option<H> {
        self.peers.get_mut(&node.peer)?.processes.get_mut(&node.start)?.end(self.numbers)
    }

    /// Takes every connection in use away and fails every dial.
    pub(super) fn take_all(&mut self, why: &str) -> Vec<H> {
        let mut handles = Vec::new();
        for entry in self.peers.values_mut() {
            handles.extend(entry.processes.values_mut().filter_map(|process| process.end(self.numbers)));
            for waiter in entry.waiters.drain(..) {
                let _ = waiter.send(Err(why.to_owned()));
            }
        }
        handles
    }
}

#[cfg(test)]
mod tests;
