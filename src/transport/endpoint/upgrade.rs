//! From a first packet to a connection with a named peer.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use libp2p::PeerId;
use tokio::time::timeout;

use super::EndpointError;
use super::book::PathBook;
use super::muxer::Muxer;
use super::stream::Priorities;
use super::tls::{Witness, peer_of};

/// A peer and the connection to it.
pub(super) type Reached = (PeerId, Muxer);

/// A connection on its way.
pub(super) type Upgrade = BoxFuture<'static, Result<Reached, EndpointError>>;

/// What every connection of a transport needs.
#[derive(Debug, Clone)]
pub(super) struct Context {
    pub(super) handshake_timeout: Duration,
    pub(super) priorities: Priorities,
    pub(super) book: PathBook,
}

impl Context {
    /// Follows a dial to its end.
    pub(super) async fn dialled(
        &self,
        connecting: quinn::Connecting,
        witness: &Witness,
    ) -> Result<Reached, EndpointError> {
        match self.connected(connecting, true).await {
            Ok(reached) => Ok(reached),
            Err(error) => Err(witness.mismatch().unwrap_or(error)),
        }
    }

    /// Takes what came in. Until this is polled nothing is answered, and to drop it before that
    /// refuses the connection at the cost of one packet.
    pub(super) async fn accepted(&self, incoming: quinn::Incoming) -> Result<Reached, EndpointError> {
        self.connected(incoming.accept()?, false).await
    }

    async fn connected(&self, connecting: quinn::Connecting, dialled: bool) -> Result<Reached, EndpointError> {
        let connection = timeout(self.handshake_timeout, connecting).await.map_err(|_| self.timed_out())??;
        let peer = peer_of(connection.peer_identity())?;
        let connection = Arc::new(connection);
        let listed = self.book.list(peer, dialled, &connection);
        Ok((peer, Muxer::new(connection, listed, Arc::clone(&self.priorities))))
    }

    /// No handshake in time.
    pub(super) fn timed_out(&self) -> EndpointError {
        let after_ms = u64::try_from(self.handshake_timeout.as_millis()).unwrap_or(u64::MAX);
        EndpointError::HandshakeTimedOut { after_ms }
    }
}
