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
mod tests {
    use super::*;

    /// Two registries that talk over imagined connections; handles are the numbers at either end.
    struct Pair {
        small: Registry<u64>,
        large: Registry<u64>,
    }

    type Ends = (u64, u64);

    /// What an accepting verdict holds: its serial, and the handles it buries.
    type Accepted = Option<(u64, Vec<u64>)>;

    fn accepted(verdict: Verdict<u64>) -> Accepted {
        match verdict {
            Verdict::Accept { serial, bury, .. } => Some((serial, bury)),
            Verdict::Refuse { .. } => None,
        }
    }

    fn way(number: u64, address: &str) -> Way {
        Way { number, address: address.parse().unwrap() }
    }

    impl Pair {
        fn new() -> Self {
            let (a, b) = (PeerId::random(), PeerId::random());
            let node = |peer, start| Node { peer, start };
            Self { small: Registry::new(node(a.min(b), 1)), large: Registry::new(node(a.max(b), 2)) }
        }

        fn names(&self) -> (Node, Node) {
            (self.small.local, self.large.local)
        }

        /// A connection comes to stand on both sides.
        fn connect(&mut self) -> Ends {
            let (small, large) = self.names();
            (self.small.begin(large.peer, true).unwrap(), self.large.begin(small.peer, false).unwrap())
        }

        /// The hello that the large side sends.
        fn hello(&self, ends: Ends) -> Hello {
            self.large.hello(self.small.local.peer, ends.1)
        }

        /// The small side hears a hello on a connection from a socket of its own.
        fn judge(&mut self, ends: Ends, hello: Hello) -> Accepted {
            self.judge_from(&format!("/memory/{}", ends.0), ends, hello)
        }

        fn judge_from(&mut self, address: &str, ends: Ends, hello: Hello) -> Accepted {
            accepted(self.small.judge(self.large.local.peer, way(ends.0, address), hello, ends.0))
        }

        /// The large side hears that it was accepted.
        fn follow(&mut self, ends: Ends, serial: u64) -> Accepted {
            let hello = self.small.hello(self.large.local.peer, ends.0);
            let way = way(ends.1, &format!("/memory/{}", ends.1));
            accepted(self.large.follow(self.small.local.peer, way, (hello, serial), ends.1))
        }

        /// Settles a connection on both sides.
        fn settle(&mut self, ends: Ends) {
            let hello = self.hello(ends);
            let Some((serial, bury)) = self.judge(ends, hello) else { panic!("refused") };
            assert_eq!(bury, [0; 0]);
            assert_eq!(self.follow(ends, serial), Some((serial, vec![])));
        }
    }

    #[test]
    fn of_two_connections_the_first_introduced_is_used() {
        let mut pair = Pair::new();
        let (first, second) = (pair.connect(), pair.connect());
        let (first_hello, second_hello) = (pair.hello(first), pair.hello(second));
        let Some((serial, _)) = pair.judge(second, second_hello) else { panic!("refused") };
        assert_eq!(pair.judge(first, first_hello), None);
        assert_eq!(pair.follow(second, serial), Some((serial, vec![])));
        let (small, large) = pair.names();
        assert_eq!(pair.small.current(large), Some(&second.0));
        assert_eq!(pair.large.current(small), Some(&second.1));
        assert!(pair.small.decides(large.peer) && !pair.large.decides(small.peer));
    }

    #[test]
    fn a_direct_connection_replaces_a_relayed_one_and_not_the_other_way() {
        let mut pair = Pair::new();
        let (small, large) = pair.names();
        let relayed = format!("/memory/9/p2p/{}/p2p-circuit", PeerId::random());
        let (first, second, third) = (pair.connect(), pair.connect(), pair.connect());
        let hellos = [first, second, third].map(|ends| pair.hello(ends));
        let Some((serial, _)) = pair.judge_from(&relayed, first, hellos[0]) else { panic!("refused") };
        assert_eq!(pair.follow(first, serial), Some((serial, vec![])));
        let Some((serial, bury)) = pair.judge(second, hellos[1]) else { panic!("refused") };
        assert_eq!(bury, [first.0]);
        assert_eq!(pair.follow(second, serial), Some((serial, vec![first.1])));
        assert_eq!(pair.judge_from(&relayed, third, hellos[2]), None);
        assert_eq!(pair.small.current(large), Some(&second.0));
        assert_eq!(pair.large.current(small), Some(&second.1));
    }

    #[test]
    fn a_copy_stays_one_when_the_connection_ended() {
        let mut pair = Pair::new();
        let (small, large) = pair.names();
        let (first, copy) = (pair.connect(), pair.connect());
        let copy_hello = pair.hello(copy);
        pair.settle(first);
        assert_eq!(pair.small.take(large), Some(first.0));
        pair.large.gone(small.peer, first.1, "ended");
        assert_eq!(pair.judge(copy, copy_hello), None);
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
                pair.large.gone(small.peer, first.1, "ended");
            }
            let second = pair.connect();
            let hello = pair.hello(second);
            let Some((serial, bury)) = pair.judge(second, hello) else { panic!("refused") };
            assert_eq!(bury, [0; 0]);
            let bury = if large_knows { vec![] } else { vec![first.1] };
            assert_eq!(pair.follow(second, serial), Some((serial, bury)));
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
        assert_eq!(pair.judge(second, hello), Some((2, vec![first.0])));
    }

    #[test]
    fn two_processes_of_one_key_are_both_connected() {
        let mut pair = Pair::new();
        let (_, large) = pair.names();
        let first = pair.connect();
        pair.settle(first);
        let twin = Node { start: 3, ..large };
        pair.large = Registry::new(twin);
        let (near, far) = pair.connect();
        assert_eq!(far, first.1, "the numbers start over");
        let hello = pair.hello((near, far));
        assert_eq!(pair.judge((near, far), hello), Some((2, vec![])));
        assert_eq!(pair.small.current(large), Some(&first.0));
        assert_eq!(pair.small.current(twin), Some(&near));
        pair.small.gone(large.peer, first.0, "frozen");
        assert_eq!((pair.small.current(large), pair.small.current(twin)), (None, Some(&near)));
    }

    #[test]
    fn a_process_at_the_socket_of_another_takes_its_place() {
        let mut pair = Pair::new();
        let (_, large) = pair.names();
        let first = pair.connect();
        let hello = pair.hello(first);
        assert_eq!(pair.judge_from("/memory/7", first, hello), Some((1, vec![])));
        let restarted = Node { start: 3, ..large };
        pair.large = Registry::new(restarted);
        let second = pair.connect();
        let hello = pair.hello(second);
        assert_eq!(pair.judge_from("/memory/7", second, hello), Some((2, vec![first.0])));
        assert_eq!((pair.small.current(large), pair.small.current(restarted)), (None, Some(&second.0)));
    }

    #[test]
    fn an_accept_that_was_overtaken_is_refused() {
        let mut pair = Pair::new();
        let (small, large) = pair.names();
        let (first, second) = (pair.connect(), pair.connect());
        let hello = pair.hello(first);
        let Some((early, _)) = pair.judge(first, hello) else { panic!("refused") };
        pair.small.take(large);
        let third = pair.connect();
        pair.large.gone(small.peer, second.1, "broke");
        let hello = Hello { oldest: third.1, ..pair.hello(third) };
        let Some((late, _)) = pair.judge(third, hello) else { panic!("refused") };
        assert_eq!(pair.follow(third, late), Some((late, vec![])));
        assert_eq!(pair.follow(first, early), None);
        assert_eq!(pair.large.current(small), Some(&third.1));
    }

    #[test]
    fn a_dial_ends_with_the_last_hope() {
        let (mut registry, peer) = (Registry::<u64>::new(Node::random()), PeerId::random());
        let address = "/memory/1".parse().unwrap();
        let (waiter, mut outcome) = oneshot::channel();
        assert_eq!(registry.attempt(peer, &address, waiter), Attempt::Start);
        let (other, mut other_outcome) = oneshot::channel();
        assert_eq!(registry.attempt(peer, &address, other), Attempt::Start);
        registry.attempt_failed(peer, "no route");
        assert!(outcome.try_recv().is_err(), "the other dial may succeed");
        let number = registry.begin(peer, true).unwrap();
        registry.gone(peer, number, "closed at once");
        assert_eq!(outcome.try_recv().unwrap(), Err("closed at once".to_owned()));
        assert_eq!(other_outcome.try_recv().unwrap(), Err("closed at once".to_owned()));
        registry.forget(peer);
        assert_eq!(registry.peers.len(), 0);
    }

    #[test]
    fn a_process_is_remembered_while_its_turn_is_out() {
        let mut pair = Pair::new();
        let (_, large) = pair.names();
        let ends = pair.connect();
        let hello = pair.hello(ends);
        let verdict = pair.small.judge(large.peer, way(ends.0, "/memory/1"), hello, ends.0);
        pair.small.gone(large.peer, ends.0, "ended");
        pair.small.forget(large.peer);
        assert_eq!(pair.small.peers.len(), 1, "a turn is out");
        drop(verdict);
        pair.small.forget(large.peer);
        assert_eq!(pair.small.peers.len(), 0);
    }

    #[test]
    fn a_dial_is_fulfilled_when_the_owner_knows() {
        let mut pair = Pair::new();
        let (_, large) = pair.names();
        let address = "/memory/1".parse().unwrap();
        let (waiter, mut outcome) = oneshot::channel();
        assert_eq!(pair.small.attempt(large.peer, &address, waiter), Attempt::Start);
        let ends = pair.connect();
        assert_eq!(ends.0, 1);
        pair.settle(ends);
        let (late, mut late_outcome) = oneshot::channel();
        assert_eq!(pair.small.attempt(large.peer, &address, late), Attempt::Wait);
        assert!(outcome.try_recv().is_err() && late_outcome.try_recv().is_err());
        pair.small.up(large, ends.0);
        assert_eq!((outcome.try_recv(), late_outcome.try_recv()), (Ok(Ok(large)), Ok(Ok(large))));
        let (after, mut after_outcome) = oneshot::channel();
        assert_eq!(pair.small.attempt(large.peer, &address, after), Attempt::Wait);
        assert_eq!(after_outcome.try_recv(), Ok(Ok(large)));
    }

    #[test]
    fn a_dial_to_another_address_of_a_connected_process_finds_it() {
        let mut pair = Pair::new();
        let (_, large) = pair.names();
        let ends = pair.connect();
        pair.settle(ends);
        pair.small.up(large, ends.0);
        let (waiter, mut outcome) = oneshot::channel();
        assert_eq!(pair.small.attempt(large.peer, &"/memory/2".parse().unwrap(), waiter), Attempt::Start);
        let copy = pair.connect();
        let hello = pair.hello(copy);
        assert_eq!(pair.judge(copy, hello), None);
        pair.small.gone(large.peer, copy.0, "a copy");
        assert_eq!(outcome.try_recv(), Ok(Ok(large)));
    }

    #[test]
    fn unsettled_connections_of_a_peer_are_bounded() {
        let (mut registry, peer) = (Registry::<u64>::new(Node::random()), PeerId::random());
        let numbers: Vec<_> = (0..PENDING_MAX).map(|_| registry.begin(peer, false).unwrap()).collect();
        assert!(registry.begin(peer, false).is_none());
        registry.gone(peer, numbers[0], "silent");
        assert!(registry.begin(peer, false).is_some());
    }
}
