//! The simulated network: hosts, connections, delays, cuts, dials; every process has a [`SimLink`] on it.
//!
//! A connection keeps the promises of [`Link`](crate::transport::Link) and no others: control comes in its order,
//! frames and replies in any, and behind the control that was queued before the first of them. What a cut
//! holds back comes when it is healed, unless the connection ended meanwhile, as over QUIC. What is in a
//! connection when it ends may come or not.

mod dials;
mod faults;
mod link;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};

use crate::ids::Node;
use crate::sim::agenda::{Agenda, Event, HostId};
use crate::sim::draw::Draw;
use crate::transport::{Lane, LinkError, LinkEvent, SEND_QUEUE_MAX, with_peer};
use dials::DialState;
pub(super) use link::SimLink;

/// Silence after which a connection ends by itself, as the real one's.
pub(super) const IDLE: Duration = Duration::from_secs(5);

/// A machine: where processes listen, one at a time or, for a twin, beside one another.
pub(super) type Slot = u16;

/// One direction between two machines.
#[derive(Debug, Clone, Copy)]
pub(super) struct Path {
    delay: Duration,
    jitter_us: u64,
    cut: bool,
    /// Rises with every cut and heal.
    number: u64,
}

/// A process on the network.
#[derive(Debug)]
struct Host {
    node: Node,
    slot: Slot,
    sides: BTreeMap<Node, u64>,
    inbox: VecDeque<Arrived>,
    frozen: bool,
    /// Rises with every freeze and thaw.
    number: u64,
}

/// An event that waits for its process.
#[derive(Debug)]
struct Arrived {
    event: LinkEvent,
    /// The connection, way and lane whose queue it is counted in.
    from: Option<(u64, usize, Lane)>,
}

#[derive(Debug)]
struct Connection {
    /// Who dialled, and who was dialled.
    ends: [HostId; 2],
    nodes: [Node; 2],
    ways: [Way; 2],
}

/// One direction of a connection.
#[derive(Debug, Default)]
struct Way {
    /// Bodies of each lane that were sent and not yet taken.
    queued: [usize; 3],
    /// When the last control message comes.
    control_until: Duration,
    /// From when on frames and replies may come.
    barrier: Option<Duration>,
    /// Bodies that a cut holds back, by the order in which they were sent.
    held: BTreeMap<u64, (Lane, Bytes)>,
    held_end: Option<String>,
    serial: u64,
}

/// A body on its way, for the invariants and the trace.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) from: HostId,
    pub(super) to: Node,
    pub(super) lane: Lane,
    pub(super) body: Bytes,
}

/// The network of a run, with the agenda of everything.
#[derive(Debug)]
pub(super) struct Net {
    pub(super) agenda: Agenda,
    pub(super) now: Duration,
    draw: Draw,
    hosts: BTreeMap<HostId, Host>,
    connections: BTreeMap<u64, Connection>,
    dials: BTreeMap<u64, DialState>,
    paths: BTreeMap<(Slot, Slot), Path>,
    serial: u64,
    /// What was sent since it was looked at.
    pub(super) sent: Vec<Sent>,
    /// Most bodies that one lane of one connection held.
    pub(super) queued_max: usize,
}

/// The network, shared with the links of a run.
pub(super) type SharedNet = Arc<Mutex<Net>>;

/// Locks it; nothing ever panics while it does.
pub(super) fn lock(net: &SharedNet) -> MutexGuard<'_, Net> {
    net.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a process on a machine is dialled.
pub(super) fn address(slot: Slot, peer: PeerId) -> Multiaddr {
    with_peer(Multiaddr::from(Protocol::Memory(u64::from(slot))), peer)
}

fn lane_place(lane: Lane) -> usize {
    match lane {
        Lane::Control => 0,
        Lane::Data => 1,
        Lane::Reply => 2,
    }
}

impl Net {
    pub(super) fn new(draw: Draw) -> Self {
        Self {
            agenda: Agenda::default(),
            now: Duration::ZERO,
            draw,
            hosts: BTreeMap::new(),
            connections: BTreeMap::new(),
            dials: BTreeMap::new(),
            paths: BTreeMap::new(),
            serial: 0,
            sent: Vec::new(),
            queued_max: 0,
        }
    }

    /// Puts an event in so much later.
    pub(super) fn after(&mut self, wait: Duration, event: Event) {
        self.agenda.put(self.now + wait, event);
    }

    fn number(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Sets the delay of one direction between two machines.
    pub(super) fn set_path(&mut self, from: Slot, to: Slot, delay: Duration, jitter_us: u64) {
        self.paths.insert((from, to), Path { delay, jitter_us, cut: false, number: 0 });
    }

    fn path(&mut self, from: Slot, to: Slot) -> &mut Path {
        let idle = Path { delay: Duration::from_micros(100), jitter_us: 50, cut: false, number: 0 };
        self.paths.entry((from, to)).or_insert(idle)
    }

    /// How long the next thing takes from one machine to another.
    fn trip(&mut self, from: Slot, to: Slot) -> Duration {
        let Path { delay, jitter_us, .. } = *self.path(from, to);
        delay + self.draw.micros(0, jitter_us)
    }

    /// A process starts on a machine.
    pub(super) fn add_host(&mut self, peer: PeerId, slot: Slot) -> Node {
        let id = self.number();
        let node = Node { peer, start: id };
        // What a former process there left open is ended by this one.
        let left: Vec<(u64, usize)> = self
            .connections
            .iter()
            .filter_map(|(number, connection)| {
                let way = connection.nodes.iter().position(|end| end.peer == peer)?;
                (!self.hosts.contains_key(&connection.ends[way])).then_some((*number, way))
            })
            .collect();
        for (connection, way) in left {
            let wait = self.draw.millis(1, 400);
            let reason = "reset by the peer: it was started anew".to_owned();
            self.after(wait, Event::End { connection, way, reason, sure: false });
        }
        let host = Host { node, slot, sides: BTreeMap::new(), inbox: VecDeque::new(), frozen: false, number: 0 };
        self.hosts.insert(id, host);
        node
    }

    fn slots(&self, connection: u64, way: usize) -> Option<(Slot, Slot)> {
        let connection = self.connections.get(&connection)?;
        // A process that is gone has no machine; what it sent is on its way all the same.
        let slot = |end: usize| self.hosts.get(&connection.ends[end]).map(|host| host.slot);
        let to = slot(1 - way)?;
        Some((slot(way).unwrap_or(to), to))
    }

    /// Whether a side takes itself for connected by this connection.
    fn has_side(&self, connection: u64, end: usize) -> bool {
        let Some(found) = self.connections.get(&connection) else { return false };
        let host = self.hosts.get(&found.ends[end]);
        host.is_some_and(|host| host.sides.get(&found.nodes[1 - end]) == Some(&connection))
    }

    fn try_send(&mut self, from: HostId, to: Node, lane: Lane, body: Bytes) -> Result<(), LinkError> {
        lane.check(&body)?;
        let Some(host) = self.hosts.get(&from) else { return Err(LinkError::Closed) };
        let missing = LinkError::NotConnected { peer: to };
        let number = *host.sides.get(&to).ok_or(missing.clone())?;
        let connection = self.connections.get_mut(&number).ok_or(missing)?;
        let way = usize::from(connection.ends[0] != from);
        let queued = &mut connection.ways[way].queued[lane_place(lane)];
        if *queued >= SEND_QUEUE_MAX {
            return Err(LinkError::Stalled { peer: to, waited_ms: 0 });
        }
        *queued += 1;
        self.queued_max = self.queued_max.max(*queued);
        connection.ways[way].serial += 1;
        let serial = connection.ways[way].serial;
        self.sent.push(Sent { from, to, lane, body: body.clone() });
        self.post((number, way), lane, body, serial);
        Ok(())
    }

    /// A body sets out.
    fn post(&mut self, (number, way): (u64, usize), lane: Lane, body: Bytes, serial: u64) {
        let Some((from, to)) = self.slots(number, way) else { return };
        let cut = self.path(from, to).cut;
        let at = self.now + self.trip(from, to);
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let passage = &mut connection.ways[way];
        if cut {
            passage.held.insert(serial, (lane, body));
            return;
        }
        let at = match lane {
            Lane::Control => {
                passage.control_until = passage.control_until.max(at);
                passage.control_until
            }
            Lane::Data | Lane::Reply => at.max(*passage.barrier.get_or_insert(passage.control_until)),
        };
        self.agenda.put(at, Event::Deliver { connection: number, way, lane, body, serial });
    }

    /// A body has come to the end of its way.
    pub(super) fn deliver(&mut self, (number, way): (u64, usize), lane: Lane, body: Bytes, serial: u64) {
        let Some((from, to)) = self.slots(number, way) else { return };
        if self.path(from, to).cut {
            if let Some(connection) = self.connections.get_mut(&number) {
                connection.ways[way].held.insert(serial, (lane, body));
            }
            return;
        }
        if !self.has_side(number, 1 - way) {
            return;
        }
        let Some(connection) = self.connections.get(&number) else { return };
        let (receiver, peer) = (connection.ends[1 - way], connection.nodes[way]);
        let event = LinkEvent::Received { peer, lane, body };
        self.arrive(receiver, event, Some((number, way, lane)));
    }

    fn arrive(&mut self, host: HostId, event: LinkEvent, from: Option<(u64, usize, Lane)>) {
        if let Some(found) = self.hosts.get_mut(&host) {
            found.inbox.push_back(Arrived { event, from });
            self.after(Duration::ZERO, Event::Turn { host });
        }
    }

    /// The next event for a process.
    pub(super) fn take(&mut self, host: HostId) -> Option<LinkEvent> {
        let Arrived { event, from } = self.hosts.get_mut(&host)?.inbox.pop_front()?;
        if let Some((number, way, lane)) = from
            && let Some(connection) = self.connections.get_mut(&number)
        {
            let queued = &mut connection.ways[way].queued[lane_place(lane)];
            *queued = queued.saturating_sub(1);
        }
        Some(event)
    }

    /// Makes a connection that both sides hear of; one that is there ends first.
    fn connect(&mut self, dialler: HostId, dialled: HostId) {
        let node = |id: HostId| self.hosts.get(&id).map(|host| (host.node, host.slot));
        let (Some((near, from)), Some((far, to))) = (node(dialler), node(dialled)) else { return };
        for (host, peer) in [(dialler, far), (dialled, near)] {
            if let Some(old) = self.hosts.get_mut(&host).and_then(|host| host.sides.remove(&peer)) {
                self.purge(host, old);
                let reason = "the peer connected anew".to_owned();
                self.arrive(host, LinkEvent::Disconnected { peer, reason }, None);
            }
        }
        let number = self.number();
        let connection = Connection { ends: [dialler, dialled], nodes: [near, far], ways: Default::default() };
        self.connections.insert(number, connection);
        let addresses = [address(to, far.peer), address(from, near.peer)];
        for ((host, peer), (address, ours)) in
            [(dialler, far), (dialled, near)].into_iter().zip(addresses.into_iter().zip([true, false]))
        {
            if let Some(found) = self.hosts.get_mut(&host) {
                found.sides.insert(peer, number);
            }
            self.arrive(host, LinkEvent::Connected { peer, address, dialled: ours }, None);
        }
    }

    /// Of the bodies of a connection that ended and that wait for their process, all are lost, or none.
    fn purge(&mut self, host: HostId, connection: u64) {
        if self.draw.chance(50)
            && let Some(found) = self.hosts.get_mut(&host)
        {
            found.inbox.retain(|arrived| arrived.from.is_none_or(|(number, _, _)| number != connection));
        }
    }

    /// A side ends a connection; the other one hears of it.
    fn disconnect(&mut self, from: HostId, peer: Node, reason: &str) {
        let Some(number) = self.hosts.get_mut(&from).and_then(|host| host.sides.remove(&peer)) else { return };
        self.arrive(from, LinkEvent::Disconnected { peer, reason: reason.to_owned() }, None);
        self.end_far(number, from, reason);
    }

    /// Lets the other side know of the end.
    fn end_far(&mut self, number: u64, from: HostId, reason: &str) {
        let Some(connection) = self.connections.get(&number) else { return };
        let way = usize::from(connection.ends[0] != from);
        let until = connection.ways[way].control_until;
        let Some((near, far)) = self.slots(number, way) else { return };
        let mut at = self.now + self.trip(near, far);
        if self.draw.chance(50) {
            at = at.max(until);
        }
        let reason = format!("the peer closed: {reason}");
        self.agenda.put(at, Event::End { connection: number, way, reason, sure: false });
    }

    /// The end of a connection has come to the other side.
    pub(super) fn end(&mut self, (number, way): (u64, usize), reason: String, sure: bool) {
        if !self.has_side(number, 1 - way) {
            return;
        }
        let cut = !sure && self.slots(number, way).is_some_and(|(from, to)| self.path(from, to).cut);
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if cut {
            connection.ways[way].held_end = Some(reason);
            return;
        }
        let (host, peer) = (connection.ends[1 - way], connection.nodes[way]);
        if let Some(found) = self.hosts.get_mut(&host) {
            found.sides.remove(&peer);
        }
        self.purge(host, number);
        self.arrive(host, LinkEvent::Disconnected { peer, reason: reason.clone() }, None);
        if sure && self.has_side(number, way) {
            let other = self.connections.get(&number).map(|connection| connection.ends[1 - way]);
            if let Some(other) = other {
                self.end_far(number, other, &reason);
            }
        }
    }

    /// Whether two processes take themselves for connected to each other, by the same connection.
    pub(super) fn connected(&self, a: HostId, b: HostId) -> bool {
        self.connection_of(a, b).is_some()
    }

    fn connection_of(&self, a: HostId, b: HostId) -> Option<u64> {
        let (near, far) = (self.hosts.get(&a)?, self.hosts.get(&b)?);
        let number = near.sides.get(&far.node)?;
        (far.sides.get(&near.node) == Some(number)).then_some(*number)
    }
}
