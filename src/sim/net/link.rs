//! The link of a simulated process.

use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::{self, BoxFuture};
use libp2p::Multiaddr;
use libp2p::multiaddr::Protocol;

use super::{SharedNet, Slot, address, lock};
use crate::ids::Node;
use crate::transport::{HopStats, Lane, Link, LinkError, split_peer};

/// One process's way to the others.
#[derive(Debug)]
pub(in crate::sim) struct SimLink {
    net: SharedNet,
    node: Node,
    slot: Slot,
}

impl SimLink {
    pub(in crate::sim) fn new(net: &SharedNet, node: Node, slot: Slot) -> Arc<Self> {
        Arc::new(Self { net: Arc::clone(net), node, slot })
    }

    fn begin(&self, address: &Multiaddr) -> Result<u64, LinkError> {
        let (rest, peer) = split_peer(address)?;
        let slot = match rest.iter().next() {
            Some(Protocol::Memory(slot)) => Slot::try_from(slot).ok(),
            _ => None,
        };
        let why = || "expected /memory/MACHINE/p2p/PEER".to_owned();
        let slot = slot.ok_or_else(|| LinkError::Dial { address: address.clone(), why: why() })?;
        Ok(lock(&self.net).begin_dial(self.node.start, (slot, peer), address.clone()))
    }
}

impl Link for SimLink {
    fn local(&self) -> Node {
        self.node
    }

    fn addresses(&self) -> Vec<Multiaddr> {
        vec![address(self.slot, self.node.peer)]
    }

    /// Whoever drives the process polls again when the process has a turn.
    fn dial(&self, address: Multiaddr) -> BoxFuture<'_, Result<Node, LinkError>> {
        let mut begun = None;
        future::poll_fn(move |_| {
            let dial = match begun.get_or_insert_with(|| self.begin(&address)) {
                Ok(dial) => *dial,
                Err(error) => return Poll::Ready(Err(error.clone())),
            };
            lock(&self.net).dialled(dial).map_or(Poll::Pending, Poll::Ready)
        })
        .boxed()
    }

    fn send(&self, peer: Node, lane: Lane, body: Bytes) -> BoxFuture<'_, Result<(), LinkError>> {
        future::ready(self.try_send(peer, lane, body)).boxed()
    }

    fn try_send(&self, peer: Node, lane: Lane, body: Bytes) -> Result<(), LinkError> {
        lock(&self.net).try_send(self.node.start, peer, lane, body)
    }

    fn disconnect(&self, peer: Node, reason: &str) {
        lock(&self.net).disconnect(self.node.start, peer, reason);
    }

    fn hop_stats(&self, _: Node) -> Option<HopStats> {
        None
    }

    fn shutdown(&self) -> BoxFuture<'_, ()> {
        lock(&self.net).kill(self.node.start, false);
        future::ready(()).boxed()
    }
}
