//! Links in memory, for tests and for simulating shells.
//!
//! Owns a network of named links with a one-way delay per hop, cuts that drop silently as a frozen
//! or partitioned peer does, and kills. Frames can be made to overtake one another, as they do on
//! several lanes. Time is tokio's, so a paused runtime drives it.
//!
//! Nothing is measured here and no credit is asked for: queues alone are bounded.

mod pump;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};
use tokio::sync::{mpsc, oneshot, watch};

use self::pump::{Parcel, Pump};
use super::credit::HopStats;
use super::events::{EventSender, event_queue};
use super::{Lane, Link, LinkError, LinkEvents, SEND_QUEUE_MAX, split_peer, with_peer};
use crate::ids::Node;

/// How a memory network behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySettings {
    /// One-way delay of every hop without a delay of its own; default 0. A dial takes two. tokio's
    /// timers round up to the next millisecond.
    pub delay: Duration,
    /// How long a send waits for room in its queue; default 5 s.
    pub stall_deadline: Duration,
    /// How long a dial may take; default 5 s.
    pub dial_deadline: Duration,
    /// Delivers frames that are under way together in a random order, drawn from this seed; default
    /// `None`: in the order they were sent. To have some together, each is held back for a
    /// millisecond.
    pub shuffle: Option<u64>,
}

impl Default for MemorySettings {
    fn default() -> Self {
        let (stall_deadline, dial_deadline) = (Duration::from_secs(5), Duration::from_secs(5));
        Self { delay: Duration::ZERO, stall_deadline, dial_deadline, shuffle: None }
    }
}

/// A set of links that can reach one another. Clones are handles to the same network.
#[derive(Debug, Clone, Default)]
pub struct MemoryNetwork {
    net: Arc<Net>,
}

#[derive(Debug)]
struct Net {
    settings: MemorySettings,
    state: Mutex<State>,
    /// Rises whenever a cut is made or healed.
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    hosts_made: u64,
    connections_made: u64,
    hosts: BTreeMap<Node, Host>,
    cuts: BTreeSet<(Node, Node)>,
    delays: BTreeMap<(Node, Node), Duration>,
}

/// A link that lives.
#[derive(Debug)]
struct Host {
    events: EventSender,
    sides: BTreeMap<Node, Side>,
    /// Closes when the last connection with a peer has had its last event.
    over: BTreeMap<Node, watch::Receiver<()>>,
}

/// One peer's end of a connection; dropped, the other end drains what was queued and ends.
#[derive(Debug)]
struct Side {
    connection: u64,
    lanes: [mpsc::Sender<Parcel>; 3],
    /// Ends this side's pump, with the reason for its owner.
    stop: Option<oneshot::Sender<String>>,
    /// Whether this side's owner was told of the connection.
    up: watch::Receiver<bool>,
    /// The reason that the other side gives to its owner.
    said: Arc<OnceLock<String>>,
    /// Bodies queued on control.
    control_taken: Arc<AtomicU64>,
}

fn pair(a: Node, b: Node) -> (Node, Node) {
    if a < b { (a, b) } else { (b, a) }
}

impl Default for Net {
    fn default() -> Self {
        Self { settings: MemorySettings::default(), state: Mutex::default(), changed: watch::Sender::new(0) }
    }
}

impl Net {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn delay(&self, a: Node, b: Node) -> Duration {
        self.lock().delays.get(&pair(a, b)).copied().unwrap_or(self.settings.delay)
    }

    fn is_cut(&self, a: Node, b: Node) -> bool {
        self.lock().cuts.contains(&pair(a, b))
    }

    async fn until_whole(&self, a: Node, b: Node) {
        let mut changed = self.changed.subscribe();
        while self.is_cut(a, b) {
            // The sender lives in `self`: this can't fail.
            let _ = changed.changed().await;
        }
    }

    /// Removes a link; its peers drain what it sent and then learn `why`.
    fn remove(&self, peer: Node, why: &str) {
        let Some(host) = ({
            let mut state = self.lock();
            state.hosts.remove(&peer)
        }) else {
            return;
        };
        for (_, side) in host.sides {
            side.end(why, why);
        }
    }
}

impl Side {
    fn end(mut self, own: &str, said: &str) {
        // Whoever spoke first is right.
        let _ = self.said.set(said.to_owned());
        if let Some(stop) = self.stop.take() {
            // A pump that ended by itself needs no reason.
            let _ = stop.send(own.to_owned());
        }
    }
}

impl MemoryNetwork {
    /// Makes an empty network without delay.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes an empty network.
    #[must_use]
    pub fn with_settings(settings: MemorySettings) -> Self {
        Self { net: Arc::new(Net { settings, ..Net::default() }) }
    }

    /// Adds a link with a fresh name.
    #[must_use]
    pub fn link(&self) -> (Arc<dyn Link>, LinkEvents) {
        self.link_as(PeerId::random())
    }

    /// Adds a link with a given name, as a process that starts; another one of that name lives on.
    #[must_use]
    pub fn link_as(&self, peer: PeerId) -> (Arc<dyn Link>, LinkEvents) {
        let (events, receiver) = event_queue();
        let mut state = self.net.lock();
        state.hosts_made += 1;
        let node = Node { peer, start: state.hosts_made };
        state.hosts.insert(node, Host { events, sides: BTreeMap::new(), over: BTreeMap::new() });
        drop(state);
        (Arc::new(MemoryLink { net: Arc::clone(&self.net), node }), receiver)
    }

    /// Sets the one-way delay between two peers, for bodies sent from this moment on.
    pub fn set_delay(&self, a: Node, b: Node, delay: Duration) {
        self.net.lock().delays.insert(pair(a, b), delay);
    }

    /// Drops everything between two peers silently, until [`MemoryNetwork::heal`]: neither is
    /// told, sends succeed, dials time out.
    pub fn cut(&self, a: Node, b: Node) {
        self.net.lock().cuts.insert(pair(a, b));
        self.net.changed.send_modify(|n| *n += 1);
    }

    /// Ends a cut. What was dropped stays lost; a side that missed its peer's end learns it.
    pub fn heal(&self, a: Node, b: Node) {
        self.net.lock().cuts.remove(&pair(a, b));
        self.net.changed.send_modify(|n| *n += 1);
    }

    /// Whether `a` takes itself for connected to `b`.
    #[must_use]
    pub fn is_connected(&self, a: Node, b: Node) -> bool {
        self.net.lock().hosts.get(&a).is_some_and(|host| host.sides.contains_key(&b))
    }

    /// Kills a link as a process dies: its calls give [`LinkError::Closed`], its peers see it
    /// disconnected.
    pub fn kill(&self, peer: Node) {
        self.net.remove(peer, "the peer was killed");
    }
}

/// One link of a [`MemoryNetwork`]. Dropped, it is killed.
#[derive(Debug)]
struct MemoryLink {
    net: Arc<Net>,
    node: Node,
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        self.net.remove(self.node, "the peer was killed");
    }
}

impl MemoryLink {
    fn lives(&self, state: &State) -> bool {
        state.hosts.contains_key(&self.node)
    }

    fn up(&self, peer: Node) -> Result<Option<watch::Receiver<bool>>, LinkError> {
        let state = self.net.lock();
        if !self.lives(&state) {
            return Err(LinkError::Closed);
        }
        Ok(state.hosts.get(&self.node).and_then(|host| host.sides.get(&peer)).map(|side| side.up.clone()))
    }

    fn queue(&self, peer: Node, lane: Lane) -> Result<SendQueue, LinkError> {
        let state = self.net.lock();
        if !self.lives(&state) {
            return Err(LinkError::Closed);
        }
        let side = state.hosts.get(&self.node).and_then(|host| host.sides.get(&peer));
        let side = side.ok_or(LinkError::NotConnected { peer })?;
        let [control, data, reply] = &side.lanes;
        let queue = match lane {
            Lane::Control => control,
            Lane::Data => data,
            Lane::Reply => reply,
        };
        Ok(SendQueue { lane, queue: queue.clone(), control_taken: Arc::clone(&side.control_taken) })
    }

    /// The parcel to queue, or `None` where a cut swallows it.
    fn parcel(&self, peer: Node, queue: &SendQueue, body: Bytes) -> Option<Parcel> {
        if self.net.is_cut(self.node, peer) {
            return None;
        }
        let delay = self.net.delay(self.node, peer);
        let due = (!delay.is_zero()).then(|| Box::pin(tokio::time::sleep(delay)));
        Some(Parcel { due, after: queue.control_taken.load(Ordering::Acquire), body })
    }

    async fn connect(&self, peer: Node) -> Result<(), String> {
        tokio::time::sleep(self.net.delay(self.node, peer) * 2).await;
        self.net.until_whole(self.node, peer).await;
        let mut up = match self.up(peer).map_err(|error| error.to_string())? {
            Some(up) => up,
            None => self.establish(peer)?,
        };
        up.wait_for(|up| *up).await.map(|_| ()).map_err(|_| "the connection ended at once".to_owned())
    }

    /// Makes both ends of a connection.
    fn establish(&self, peer: Node) -> Result<watch::Receiver<bool>, String> {
        let mut state = self.net.lock();
        match state.hosts.keys().find(|node| node.start == peer.start) {
            None => return Err(format!("nobody listens at /memory/{}", peer.start)),
            Some(found) if *found != peer => {
                return Err(format!("expected peer {peer}, found {found}: check the address"));
            }
            Some(_) => {}
        }
        state.connections_made += 1;
        let connection = state.connections_made;
        let (ours, theirs) = (address_of(self.node), address_of(peer));
        let (near_lanes, far_lanes) = (Wire::new(), Wire::new());
        let near = Seat { owner: self.node, other: peer, address: theirs, dialled: true, connection };
        let far = Seat { owner: peer, other: self.node, address: ours, dialled: false, connection };
        let missing = || "the link is shut down".to_owned();
        let (near_said, far_said) = (Arc::default(), Arc::default());
        let near_wires = Wires { out: near_lanes.sender, inward: far_lanes.receiver, said: near_said, heard: far_said };
        let far_wires = Wires {
            out: far_lanes.sender,
            inward: near_lanes.receiver,
            said: Arc::clone(&near_wires.heard),
            heard: Arc::clone(&near_wires.said),
        };
        let up = seat(&self.net, &mut state, near, near_wires).ok_or_else(missing)?;
        seat(&self.net, &mut state, far, far_wires).ok_or_else(missing)?;
        Ok(up)
    }
}

/// The owner's end of a lane's send queue.
struct SendQueue {
    lane: Lane,
    queue: mpsc::Sender<Parcel>,
    control_taken: Arc<AtomicU64>,
}

impl SendQueue {
    /// Counts a body that was queued.
    fn count(&self) {
        if self.lane == Lane::Control {
            self.control_taken.fetch_add(1, Ordering::Release);
        }
    }
}

/// The lanes of one direction: control, frames, replies.
struct Wire {
    sender: [mpsc::Sender<Parcel>; 3],
    receiver: [mpsc::Receiver<Parcel>; 3],
}

impl Wire {
    fn new() -> Self {
        let (control, control_rx) = mpsc::channel(SEND_QUEUE_MAX);
        let (data, data_rx) = mpsc::channel(SEND_QUEUE_MAX);
        let (reply, reply_rx) = mpsc::channel(SEND_QUEUE_MAX);
        Self { sender: [control, data, reply], receiver: [control_rx, data_rx, reply_rx] }
    }
}

/// Both directions, as one side holds them.
struct Wires {
    out: [mpsc::Sender<Parcel>; 3],
    inward: [mpsc::Receiver<Parcel>; 3],
    said: Arc<OnceLock<String>>,
    heard: Arc<OnceLock<String>>,
}

/// Whose end of which connection.
#[derive(Debug, Clone)]
struct Seat {
    owner: Node,
    other: Node,
    address: Multiaddr,
    dialled: bool,
    connection: u64,
}

/// Gives a side to its owner and starts its pump; a side left over from an older connection ends
/// first. `None` where the owner is dead.
fn seat(net: &Arc<Net>, state: &mut State, seat: Seat, wires: Wires) -> Option<watch::Receiver<bool>> {
    let host = state.hosts.get_mut(&seat.owner)?;
    if let Some(old) = host.sides.remove(&seat.other) {
        old.end("the peer connected anew", "the peer connected anew");
    }
    let (stop, stopped) = oneshot::channel();
    let (up_sender, up) = watch::channel(false);
    let (over_sender, over) = watch::channel(());
    let before = host.over.insert(seat.other, over);
    let side = Side {
        connection: seat.connection,
        lanes: wires.out,
        stop: Some(stop),
        up: up.clone(),
        said: wires.said,
        control_taken: Arc::default(),
    };
    host.sides.insert(seat.other, side);
    let pump = Pump {
        net: Arc::downgrade(net),
        seat,
        events: host.events.clone(),
        inward: wires.inward,
        stopped,
        up: up_sender,
        before,
        heard: wires.heard,
    };
    tokio::spawn(async move {
        pump.run().await;
        drop(over_sender);
    });
    Some(up)
}

fn address_of(node: Node) -> Multiaddr {
    with_peer(Multiaddr::from(Protocol::Memory(node.start)), node.peer)
}

impl Link for MemoryLink {
    fn local(&self) -> Node {
        self.node
    }

    fn addresses(&self) -> Vec<Multiaddr> {
        if self.lives(&self.net.lock()) { vec![address_of(self.node)] } else { Vec::new() }
    }

    fn dial(&self, address: Multiaddr) -> BoxFuture<'_, Result<Node, LinkError>> {
        async move {
            let (rest, peer) = split_peer(&address)?;
            let fail = |why: String| LinkError::Dial { address: address.clone(), why };
            if peer == self.node.peer {
                return Err(fail("this is the link's own address".to_owned()));
            }
            let mut parts = rest.iter();
            let (Some(Protocol::Memory(number)), None) = (parts.next(), parts.next()) else {
                return Err(fail("expected /memory/NUMBER/p2p/PEER".to_owned()));
            };
            let peer = Node { peer, start: number };
            let deadline = self.net.settings.dial_deadline;
            let connected = match self.up(peer)? {
                Some(mut up) => {
                    tokio::time::timeout(deadline, async {
                        up.wait_for(|up| *up).await.map(|_| ()).map_err(|_| "the connection ended".to_owned())
                    })
                    .await
                }
                None => tokio::time::timeout(deadline, self.connect(peer)).await,
            };
            match connected {
                Ok(Ok(())) => Ok(peer),
                Ok(Err(why)) => Err(fail(why)),
                Err(_) => Err(fail(format!("no answer within {} ms", deadline.as_millis()))),
            }
        }
        .boxed()
    }

    fn send(&self, peer: Node, lane: Lane, body: Bytes) -> BoxFuture<'_, Result<(), LinkError>> {
        async move {
            lane.check(&body)?;
            let queue = self.queue(peer, lane)?;
            let Some(parcel) = self.parcel(peer, &queue, body) else { return Ok(()) };
            let deadline = self.net.settings.stall_deadline;
            match tokio::time::timeout(deadline, queue.queue.send(parcel)).await {
                Ok(sent) => sent.map(|()| queue.count()).map_err(|_| LinkError::NotConnected { peer }),
                Err(_) => {
                    Err(LinkError::Stalled { peer, waited_ms: u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX) })
                }
            }
        }
        .boxed()
    }

    fn try_send(&self, peer: Node, lane: Lane, body: Bytes) -> Result<(), LinkError> {
        lane.check(&body)?;
        let queue = self.queue(peer, lane)?;
        let Some(parcel) = self.parcel(peer, &queue, body) else { return Ok(()) };
        queue.queue.try_send(parcel).map(|()| queue.count()).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => LinkError::Stalled { peer, waited_ms: 0 },
            mpsc::error::TrySendError::Closed(_) => LinkError::NotConnected { peer },
        })
    }

    fn disconnect(&self, peer: Node, reason: &str) {
        let side = {
            let mut state = self.net.lock();
            if !self.lives(&state) {
                return;
            }
            state.hosts.get_mut(&self.node).and_then(|host| host.sides.remove(&peer))
        };
        if let Some(side) = side {
            side.end(reason, &format!("the peer closed the connection: {reason}"));
        }
    }

    fn hop_stats(&self, _: Node) -> Option<HopStats> {
        None
    }

    fn shutdown(&self) -> BoxFuture<'_, ()> {
        async move {
            self.net.remove(self.node, "the peer shut down");
        }
        .boxed()
    }
}

/// Takes a side away whose connection ended by itself.
fn unseat(net: &Weak<Net>, seat: &Seat) {
    let Some(net) = net.upgrade() else { return };
    let mut state = net.lock();
    let Some(host) = state.hosts.get_mut(&seat.owner) else { return };
    if host.sides.get(&seat.other).is_some_and(|side| side.connection == seat.connection) {
        host.sides.remove(&seat.other);
    }
}
