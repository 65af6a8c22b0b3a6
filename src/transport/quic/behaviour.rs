//! Starts the task of every connection, bounds how many come in, and closes on request.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use libp2p::core::Endpoint;
use libp2p::core::transport::PortUse;
use libp2p::swarm::{
    CloseConnection, ConnectionClosed, ConnectionDenied, ConnectionId, FromSwarm, ListenFailure, NetworkBehaviour,
    THandler, THandlerInEvent, THandlerOutEvent, ToSwarm,
};
use libp2p::{Multiaddr, PeerId};
use tokio::sync::mpsc;

use super::super::events::EventSender;
use super::super::with_peer;
use super::connection::Connection;
use super::handler::LaneHandler;
use super::{LANES_MAX, Shared};

/// Parts of a connection that wait for its task: all lanes of both sides, and what is too much.
const PARTS_MAX: usize = 2 * (LANES_MAX as usize + 1) + 6;

/// Requests to close that wait for the swarm.
const CLOSES_MAX: usize = 64;

/// Why a connection is not taken.
#[derive(Debug, thiserror::Error)]
enum Denied {
    #[error("{limit} connections came in already: raise the limit of inbound connections, or wait")]
    Full { limit: usize },
    #[error("the peer holds too many unsettled connections")]
    Unsettled,
    #[error("the link is shutting down")]
    Closing,
}

/// The one behaviour of the swarm.
#[derive(Debug)]
pub(super) struct Behaviour {
    shared: Arc<Shared>,
    events: EventSender,
    /// Connections that came in, from the first packet on.
    inbound: BTreeSet<ConnectionId>,
    close_requests: mpsc::Receiver<(PeerId, ConnectionId)>,
    close_requester: mpsc::Sender<(PeerId, ConnectionId)>,
}

impl Behaviour {
    pub(super) fn new(shared: Arc<Shared>, events: EventSender) -> Self {
        let (close_requester, close_requests) = mpsc::channel(CLOSES_MAX);
        Self { shared, events, inbound: BTreeSet::new(), close_requests, close_requester }
    }

    fn admit(&self) -> Result<(), ConnectionDenied> {
        let limit = self.shared.settings.inbound_max;
        if self.shared.is_closed() {
            return Err(ConnectionDenied::new(Denied::Closing));
        }
        if self.inbound.len() >= limit {
            return Err(ConnectionDenied::new(Denied::Full { limit }));
        }
        Ok(())
    }

    fn start(
        &self,
        id: ConnectionId,
        peer: PeerId,
        address: &Multiaddr,
        dialled: bool,
    ) -> Result<LaneHandler, ConnectionDenied> {
        let Some(number) = self.shared.registry().begin(peer, dialled) else {
            return Err(ConnectionDenied::new(Denied::Unsettled));
        };
        let (parts_sender, parts) = mpsc::channel(PARTS_MAX);
        let connection = Connection {
            shared: Arc::clone(&self.shared),
            events: self.events.clone(),
            peer,
            number,
            dialled,
            address: with_peer(address.clone(), peer),
            parts,
        };
        let close = self.close_requester.clone();
        tokio::spawn(async move {
            connection.run().await;
            // Without a swarm there is nothing left to close.
            let _ = close.send((peer, id)).await;
        });
        Ok(LaneHandler::new(parts_sender, self.shared.settings.terms().lanes))
    }
}

impl NetworkBehaviour for Behaviour {
    type ConnectionHandler = LaneHandler;
    type ToSwarm = Infallible;

    fn handle_pending_inbound_connection(
        &mut self,
        id: ConnectionId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<(), ConnectionDenied> {
        self.admit()?;
        self.inbound.insert(id);
        Ok(())
    }

    fn handle_established_inbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.start(id, peer, remote, false)
    }

    fn handle_established_outbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        address: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.start(id, peer, address, true)
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "the enum is libp2p's, and open-ended")]
    fn on_swarm_event(&mut self, event: FromSwarm<'_>) {
        match event {
            FromSwarm::ConnectionClosed(ConnectionClosed { connection_id, .. })
            | FromSwarm::ListenFailure(ListenFailure { connection_id, .. }) => {
                self.inbound.remove(&connection_id);
            }
            _ => {}
        }
    }

    fn on_connection_handler_event(&mut self, _: PeerId, _: ConnectionId, event: THandlerOutEvent<Self>) {
        match event {}
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        match self.close_requests.poll_recv(cx) {
            Poll::Ready(Some((peer_id, id))) => {
                Poll::Ready(ToSwarm::CloseConnection { peer_id, connection: CloseConnection::One(id) })
            }
            // The behaviour holds a sender itself: the queue never ends.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}
