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
        Self {
            current: None,
            pending: BTreeSet::new(),
            attempts: 0,
            waiters: Vec::new(),
            turn: Turn::default(),
            last: None,
        }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two registries that talk over imagined connections; handles are the numbers at either end.
    struct Pair {
        small: Registry<u64>,
        large: Registry<u64>,
    }

    type Ends = (u64, u64);

    impl Pair {
        fn new() -> Self {
            let (a, b) = (PeerId::random(), PeerId::random());
            Self { small: Registry::new(a.min(b), 1), large: Registry::new(a.max(b), 2) }
        }

        fn names(&self) -> (PeerId, PeerId) {
            (self.small.local, self.large.local)
        }

        /// A connection comes to stand on both sides.
        fn connect(&mut self) -> Ends {
            let (small, large) = self.names();
            (self.small.begin(large, true).unwrap().0, self.large.begin(small, false).unwrap().0)
        }

        /// The hello that the large side sends.
        fn hello(&self, ends: Ends) -> Hello {
            self.large.hello(self.small.local, ends.1)
        }

        /// The small side hears a hello.
        fn judge(&mut self, ends: Ends, hello: Hello) -> Verdict<u64> {
            self.small.judge(self.large.local, ends.0, hello, ends.0)
        }

        /// The large side hears that it was accepted.
        fn follow(&mut self, ends: Ends, serial: u64) -> Verdict<u64> {
            let hello = self.small.hello(self.large.local, ends.0);
            self.large.follow(self.small.local, ends.1, (hello, serial), ends.1)
        }

        /// Settles a connection on both sides.
        fn settle(&mut self, ends: Ends) {
            let hello = self.hello(ends);
            let Verdict::Accept { serial, bury: None } = self.judge(ends, hello) else { panic!("refused") };
            assert_eq!(self.follow(ends, serial), Verdict::Accept { serial, bury: None });
        }
    }

    fn refused(verdict: &Verdict<u64>) -> bool {
        matches!(verdict, Verdict::Refuse { .. })
    }

    #[test]
    fn of_two_connections_the_first_introduced_is_used() {
        let mut pair = Pair::new();
        let (first, second) = (pair.connect(), pair.connect());
        let (first_hello, second_hello) = (pair.hello(first), pair.hello(second));
        let Verdict::Accept { serial, bury: None } = pair.judge(second, second_hello) else { panic!("refused") };
        assert!(refused(&pair.judge(first, first_hello)));
        assert_eq!(pair.follow(second, serial), Verdict::Accept { serial, bury: None });
        let (small, large) = pair.names();
        assert_eq!(pair.small.current(large), Some(&second.0));
        assert_eq!(pair.large.current(small), Some(&second.1));
        assert!(pair.small.decides(large) && !pair.large.decides(small));
    }

    #[test]
    fn a_copy_stays_one_when_the_connection_ended() {
        let mut pair = Pair::new();
        let (small, large) = pair.names();
        let (first, copy) = (pair.connect(), pair.connect());
        let copy_hello = pair.hello(copy);
        pair.settle(first);
        assert_eq!(pair.small.take(large), Some(first.0));
        pair.large.gone(small, first.1, "ended");
        assert!(refused(&pair.judge(copy, copy_hello)));
    }

    #[test]
    fn a_connection_made_after_the_end_is_none() {
        for large_knows in [true, false] {
            let mut pair = Pair::new();
            let (small, large) = pair.names();
            let first = pair.connect();
            pair.settle(first);
            // The small side ends it and dials again; the large side may not know yet.
            pair.small.take(large);
            if large_knows {
                pair.large.gone(small, first.1, "ended");
            }
            let second = pair.connect();
            let hello = pair.hello(second);
            let Verdict::Accept { serial, bury: None } = pair.judge(second, hello) else { panic!("refused") };
            let bury = (!large_knows).then_some(first.1);
            assert_eq!(pair.follow(second, serial), Verdict::Accept { serial, bury });
        }
    }

    #[test]
    fn a_peer_that_lost_the_connection_gets_another() {
        let mut pair = Pair::new();
        let (small, _) = pair.names();
        let first = pair.connect();
        pair.settle(first);
        // Only the large side knows of the end.
        pair.large.take(small);
        let second = pair.connect();
        let hello = pair.hello(second);
        assert_eq!(pair.judge(second, hello), Verdict::Accept { serial: 2, bury: Some(first.0) });
    }

    #[test]
    fn a_peer_that_restarted_gets_another() {
        let mut pair = Pair::new();
        let (small, large) = pair.names();
        let first = pair.connect();
        pair.settle(first);
        pair.large = Registry::new(large, 3);
        let (near, far) = pair.connect();
        assert_eq!(far, first.1, "the numbers start over");
        let hello = pair.hello((near, far));
        assert_eq!(pair.judge((near, far), hello), Verdict::Accept { serial: 2, bury: Some(first.0) });
        assert_eq!(pair.large.current(small), None);
    }

    #[test]
    fn an_accept_that_was_overtaken_is_refused() {
        let mut pair = Pair::new();
        let (small, large) = pair.names();
        let (first, second) = (pair.connect(), pair.connect());
        let hello = pair.hello(first);
        let Verdict::Accept { serial: early, .. } = pair.judge(first, hello) else { panic!("refused") };
        pair.small.take(large);
        let third = pair.connect();
        pair.large.gone(small, second.1, "broke");
        let hello = Hello { oldest: third.1, ..pair.hello(third) };
        let Verdict::Accept { serial: late, .. } = pair.judge(third, hello) else { panic!("refused") };
        assert_eq!(pair.follow(third, late), Verdict::Accept { serial: late, bury: None });
        assert!(refused(&pair.follow(first, early)));
        assert_eq!(pair.large.current(small), Some(&third.1));
    }

    #[test]
    fn a_dial_ends_with_the_last_hope() {
        let (mut registry, peer) = (Registry::<u64>::new(PeerId::random(), 1), PeerId::random());
        let (waiter, mut outcome) = oneshot::channel();
        assert_eq!(registry.attempt(peer, waiter), Attempt::Start);
        let (other, mut other_outcome) = oneshot::channel();
        assert_eq!(registry.attempt(peer, other), Attempt::Start);
        registry.attempt_failed(peer, "no route");
        assert!(outcome.try_recv().is_err(), "the other dial may succeed");
        let (number, turn) = registry.begin(peer, true).unwrap();
        registry.gone(peer, number, "closed at once");
        assert_eq!(outcome.try_recv().unwrap(), Err("closed at once".to_owned()));
        assert_eq!(other_outcome.try_recv().unwrap(), Err("closed at once".to_owned()));
        registry.forget(peer);
        assert_eq!(registry.peers.len(), 1, "a turn is out");
        drop(turn);
        registry.forget(peer);
        assert_eq!(registry.peers.len(), 0);
    }

    #[test]
    fn a_dial_is_fulfilled_when_the_owner_knows() {
        let mut pair = Pair::new();
        let (_, large) = pair.names();
        let (waiter, mut outcome) = oneshot::channel();
        assert_eq!(pair.small.attempt(large, waiter), Attempt::Start);
        let ends = pair.connect();
        pair.settle(ends);
        let (late, mut late_outcome) = oneshot::channel();
        assert_eq!(pair.small.attempt(large, late), Attempt::Wait);
        assert!(outcome.try_recv().is_err() && late_outcome.try_recv().is_err());
        pair.small.up(large, ends.0);
        assert_eq!((outcome.try_recv(), late_outcome.try_recv()), (Ok(Ok(())), Ok(Ok(()))));
        let (after, mut after_outcome) = oneshot::channel();
        assert_eq!(pair.small.attempt(large, after), Attempt::Wait);
        assert_eq!(after_outcome.try_recv(), Ok(Ok(())));
    }

    #[test]
    fn unsettled_connections_of_a_peer_are_bounded() {
        let (mut registry, peer) = (Registry::<u64>::new(PeerId::random(), 1), PeerId::random());
        let turns: Vec<_> = (0..PENDING_MAX).map(|_| registry.begin(peer, false).unwrap()).collect();
        assert!(registry.begin(peer, false).is_none());
        registry.gone(peer, turns[0].0, "silent");
        assert!(registry.begin(peer, false).is_some());
    }
}
