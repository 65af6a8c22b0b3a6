//! The registry on both sides of imagined connections.

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
