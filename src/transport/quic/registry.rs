//! Which connection to a peer is the one: pure decisions.
//!
//! Two sides that dial at once make two connections, and a side that lost a connection makes
//! another before its peer notices. Both must settle on the same one, without an event for the
//! others. The side with the smaller peer id decides: it takes the first connection whose hello
//! comes, and closes copies; the other side follows. A hello tells a copy from a successor: it
//! names the sender's instance and its oldest connection that still lives, so a connection older
//! than that is dead on the sender's side. A copy stays one when the connection it copies has
//! ended: else a peer that was disconnected would come back through it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use libp2p::PeerId;
use tokio::sync::{Mutex, oneshot};

use super::lane::Hello;

/// Connections to one peer that wait to be settled, at most.
const PENDING_MAX: usize = 8;

/// Held by the one connection whose events an owner sees: from connected to disconnected.
pub(super) type Turn = Arc<Mutex<()>>;

/// How a dial learns its end.
pub(super) type Waiter = oneshot::Sender<Result<(), String>>;

/// The connections of a link, each with what its owner needs to use it (`H`).
#[derive(Debug)]
pub(super) struct Registry<H> {
    local: PeerId,
    instance: u64,
    /// Connections made.
    numbers: u64,
    /// Connections accepted.
    serials: u64,
    peers: BTreeMap<PeerId, Peer<H>>,
}

#[derive(Debug)]
struct Peer<H> {
    current: Option<Current<H>>,
    pending: BTreeSet<u64>,
    /// Dials under way.
    attempts: usize,
    waiters: Vec<Waiter>,
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
    number: u64,
    serial: u64,
    hello: Hello,
    /// Whether the owner was told.
    up: bool,
    handle: H,
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
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict<H> {
    /// It is the one.
    Accept {
        /// Its serial, to tell the peer.
        serial: u64,
        /// The one before, which is dead on the peer's side.
        bury: Option<H>,
    },
    /// It is not: close it without a word.
    Refuse {
        /// Why, for the log.
        why: &'static str,
    },
}

impl<H> Default for Peer<H> {
    fn default() -> Self {
        Self { current: None, pending: BTreeSet::new(), attempts: 0, waiters: Vec::new(), turn: Turn::default(), last: None }
    }
}

impl<H> Peer<H> {
    /// Fails the dials that nothing can fulfil any more.
    fn settle(&mut self, why: &str) {
        if self.current.is_none() && self.pending.is_empty() && self.attempts == 0 {
            for waiter in self.waiters.drain(..) {
                // A dial that was given up waits no more.
                let _ = waiter.send(Err(why.to_owned()));
            }
        }
    }

    /// Takes the connection in use away.
    fn end(&mut self, numbers: u64) -> Option<H> {
        let current = self.current.take()?;
        self.last = Some(Ended { hello: current.hello, numbers });
        Some(current.handle)
    }

    /// Whether connection `number`, introduced by `hello`, was made beside the one in use or the
    /// one before: neither side had seen the end of that one.
    fn is_copy(&self, number: u64, hello: Hello) -> bool {
        let beside = |other: Hello| other.instance == hello.instance && hello.oldest <= other.number;
        match (&self.current, self.last) {
            (Some(current), _) => beside(current.hello),
            (None, Some(last)) => number <= last.numbers && beside(last.hello),
            (None, None) => false,
        }
    }

    fn is_idle(&self) -> bool {
        self.current.is_none()
            && self.pending.is_empty()
            && self.attempts == 0
            && self.waiters.is_empty()
            && Arc::strong_count(&self.turn) == 1
    }
}

impl<H> Registry<H> {
    /// Makes the registry of a link that has just started.
    pub(super) fn new(local: PeerId, instance: u64) -> Self {
        Self { local, instance, numbers: 0, serials: 0, peers: BTreeMap::new() }
    }

    /// Whether this side decides which connection to `peer` is the one.
    pub(super) fn decides(&self, peer: PeerId) -> bool {
        self.local < peer
    }

    /// Registers a dial; `waiter` learns its end.
    pub(super) fn attempt(&mut self, peer: PeerId, waiter: Waiter) -> Attempt {
        let entry = self.peers.entry(peer).or_default();
        match &entry.current {
            Some(current) if current.up => {
                let _ = waiter.send(Ok(()));
                Attempt::Wait
            }
            Some(_) => {
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

    /// A dial led to no connection.
    pub(super) fn attempt_failed(&mut self, peer: PeerId, why: &str) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.attempts = entry.attempts.saturating_sub(1);
            entry.settle(why);
        }
        self.forget(peer);
    }

    /// A connection stands; gives its number and the turn it must have before its owner hears of
    /// it. `None` where the peer holds too many unsettled ones.
    pub(super) fn begin(&mut self, peer: PeerId, dialled: bool) -> Option<(u64, Turn)> {
        self.numbers += 1;
        let number = self.numbers;
        let entry = self.peers.entry(peer).or_default();
        if dialled {
            entry.attempts = entry.attempts.saturating_sub(1);
        }
        if entry.pending.len() >= PENDING_MAX {
            entry.settle("too many connections at once");
            return None;
        }
        entry.pending.insert(number);
        Some((number, Arc::clone(&entry.turn)))
    }

    /// What to say first on a connection.
    pub(super) fn hello(&self, peer: PeerId, number: u64) -> Hello {
        let entry = self.peers.get(&peer);
        let pending = entry.and_then(|entry| entry.pending.first().copied());
        let current = entry.and_then(|entry| entry.current.as_ref()).map(|current| current.number);
        let oldest = pending.into_iter().chain(current).fold(number, u64::min);
        Hello { instance: self.instance, number, oldest }
    }

    /// The deciding side heard the peer's hello.
    pub(super) fn judge(&mut self, peer: PeerId, number: u64, hello: Hello, handle: H) -> Verdict<H> {
        let entry = self.peers.entry(peer).or_default();
        entry.pending.remove(&number);
        if entry.is_copy(number, hello) {
            return Verdict::Refuse { why: "a copy of the connection in use" };
        }
        self.serials += 1;
        let serial = self.serials;
        let bury = entry.current.replace(Current { number, serial, hello, up: false, handle });
        Verdict::Accept { serial, bury: bury.map(|current| current.handle) }
    }

    /// The following side heard the peer accept.
    pub(super) fn follow(&mut self, peer: PeerId, number: u64, (hello, serial): (Hello, u64), handle: H) -> Verdict<H> {
        let entry = self.peers.entry(peer).or_default();
        entry.pending.remove(&number);
        if let Some(current) = &entry.current
            && current.hello.instance == hello.instance
            && current.serial > serial
        {
            return Verdict::Refuse { why: "the peer accepted a newer connection" };
        }
        let bury = entry.current.replace(Current { number, serial, hello, up: false, handle });
        Verdict::Accept { serial, bury: bury.map(|current| current.handle) }
    }

    /// The owner was told of the connection: dials are fulfilled.
    pub(super) fn up(&mut self, peer: PeerId, number: u64) {
        if let Some(entry) = self.peers.get_mut(&peer)
            && let Some(current) = &mut entry.current
            && current.number == number
        {
            current.up = true;
            for waiter in entry.waiters.drain(..) {
                let _ = waiter.send(Ok(()));
            }
        }
    }

    /// A connection ended, settled or not.
    pub(super) fn gone(&mut self, peer: PeerId, number: u64, why: &str) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.pending.remove(&number);
            if entry.current.as_ref().is_some_and(|current| current.number == number) {
                entry.end(self.numbers);
            }
            entry.settle(why);
        }
    }

    /// Drops what is known of a peer, if nothing is; call after every turn is given back.
    pub(super) fn forget(&mut self, peer: PeerId) {
        if self.peers.get(&peer).is_some_and(Peer::is_idle) {
            self.peers.remove(&peer);
        }
    }

    /// The connection in use.
    pub(super) fn current(&self, peer: PeerId) -> Option<&H> {
        self.peers.get(&peer)?.current.as_ref().map(|current| &current.handle)
    }

    /// Takes the connection in use away, to end it.
    pub(super) fn take(&mut self, peer: PeerId) -> Option<H> {
        self.peers.get_mut(&peer)?.end(self.numbers)
    }

    /// Takes every connection in use away and fails every dial.
    pub(super) fn take_all(&mut self, why: &str) -> Vec<H> {
        let mut handles = Vec::new();
        for entry in self.peers.values_mut() {
            handles.extend(entry.end(self.numbers));
            for waiter in entry.waiters.drain(..) {
                let _ = waiter.send(Err(why.to_owned()));
            }
        }
        handles
    }

    /// Peers that something is known of.
    #[cfg(test)]
    fn known(&self) -> usize {
        self.peers.len()
    }
}
