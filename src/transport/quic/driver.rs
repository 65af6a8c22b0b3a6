//! The one task that drives the swarm: dials, addresses, the end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use libp2p::core::transport::ListenerId;
use libp2p::swarm::dial_opts::{DialOpts, PeerCondition};
use libp2p::swarm::{ConnectionId, DialError, SwarmEvent};
use libp2p::{Multiaddr, PeerId, Swarm};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::behaviour::Behaviour;
use super::connection::Stop;
use super::lane::chain;
use super::{Shared, StartError};
use crate::transport::with_peer;

/// How long listeners may take to close, and to say their first address.
const LISTENER_DEADLINE: Duration = Duration::from_secs(2);

/// What a link asks of its driver.
#[derive(Debug)]
pub(super) enum Command {
    /// Dial a peer at an address without its id; the registry learns the end.
    Dial { peer: PeerId, address: Multiaddr },
    /// Close everything.
    Shutdown { done: oneshot::Sender<()> },
}

/// Drives a swarm.
pub(super) struct Driver {
    pub(super) swarm: Swarm<Behaviour>,
    pub(super) shared: Arc<Shared>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) dials: BTreeMap<ConnectionId, PeerId>,
}

impl Driver {
    /// Listens on all addresses and waits until each has said where it really is.
    pub(super) async fn listen(&mut self, addresses: &[Multiaddr]) -> Result<(), StartError> {
        let mut waiting: Vec<(ListenerId, Multiaddr)> = Vec::new();
        for address in addresses {
            let fail = |why: String| StartError::Listen { address: address.clone(), why };
            let id = self.swarm.listen_on(address.clone()).map_err(|error| fail(chain(&error)))?;
            waiting.push((id, address.clone()));
        }
        let heard = timeout(LISTENER_DEADLINE, async {
            while !waiting.is_empty() {
                let event = self.swarm.select_next_some().await;
                if let SwarmEvent::NewListenAddr { listener_id, .. } = &event {
                    waiting.retain(|(id, _)| id != listener_id);
                }
                if let SwarmEvent::ListenerClosed { listener_id, reason, .. } = &event
                    && let Some((_, address)) = waiting.iter().find(|(id, _)| id == listener_id)
                {
                    let why = reason.as_ref().err().map_or_else(|| "closed".to_owned(), |error| chain(error));
                    return Err(StartError::Listen { address: address.clone(), why });
                }
                self.handle(event);
            }
            // An unspecified address stands for many: they come one after another, all at once.
            while let Some(event) = self.swarm.select_next_some().now_or_never() {
                self.handle(event);
            }
            Ok(())
        })
        .await;
        match (heard, waiting.into_iter().next()) {
            (Ok(heard), _) => heard,
            (Err(_), Some((_, address))) => Err(StartError::Listen {
                address,
                why: format!("no address within {} ms", LISTENER_DEADLINE.as_millis()),
            }),
            (Err(_), None) => Ok(()),
        }
    }

    /// Runs until the link is shut down or dropped.
    pub(super) async fn run(mut self) {
        let done = loop {
            tokio::select! {
                command = self.commands.recv() => match command {
                    Some(Command::Dial { peer, address }) => self.dial(peer, address),
                    Some(Command::Shutdown { done }) => break Some(done),
                    None => break None,
                },
                event = self.swarm.select_next_some() => self.handle(event),
            }
        };
        self.close().await;
        drop(self);
        if let Some(done) = done {
            // The caller may have given up waiting.
            let _ = done.send(());
        }
    }

    fn dial(&mut self, peer: PeerId, address: Multiaddr) {
        let options = DialOpts::peer_id(peer).condition(PeerCondition::Always).addresses(vec![address]).build();
        let id = options.connection_id();
        match self.swarm.dial(options) {
            Ok(()) => {
                self.dials.insert(id, peer);
            }
            Err(error) => self.shared.registry().attempt_failed(peer, &explain(peer, &error)),
        }
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "the enum is libp2p's, and open-ended")]
    fn handle(&mut self, event: SwarmEvent<std::convert::Infallible>) {
        match event {
            SwarmEvent::NewListenAddr { address, .. } => {
                let address = with_peer(address, self.shared.local.peer);
                let mut addresses = self.shared.addresses();
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
            SwarmEvent::ExpiredListenAddr { address, .. } => self.forget_address(address),
            SwarmEvent::ListenerClosed { addresses, reason, .. } => {
                for address in addresses {
                    self.forget_address(address);
                }
                if let Err(error) = reason {
                    tracing::error!(error = %chain(&error), "a listener closed: nobody can connect to it");
                }
            }
            SwarmEvent::ListenerError { error, .. } => {
                tracing::debug!(error = %chain(&error), "a listener stumbled");
            }
            SwarmEvent::ConnectionEstablished { connection_id, .. } => {
                self.dials.remove(&connection_id);
            }
            SwarmEvent::OutgoingConnectionError { connection_id, error, .. } => {
                if let Some(peer) = self.dials.remove(&connection_id) {
                    self.shared.registry().attempt_failed(peer, &explain(peer, &error));
                }
            }
            SwarmEvent::IncomingConnectionError { send_back_addr, error, .. } => {
                tracing::debug!(from = %send_back_addr, error = %chain(&error), "a connection was not taken");
            }
            _ => {}
        }
    }

    fn forget_address(&self, address: Multiaddr) {
        let address = with_peer(address, self.shared.local.peer);
        self.shared.addresses().retain(|known| *known != address);
    }

    /// Says farewell to every peer, closes what is left, and frees the sockets.
    async fn close(&mut self) {
        self.shared.close();
        let handles = self.shared.registry().take_all("the link was shut down");
        for handle in handles {
            let stop =
                Stop { reason: "the link was shut down".to_owned(), farewell: Some("the peer shut down".to_owned()) };
            // A connection that ends by itself needs no reason.
            let _ = handle.stop.send(stop);
        }
        // Connections end within the grace of a farewell; what doesn't is cut off.
        if timeout(self.shared.settings.close_grace * 2, self.until_alone()).await.is_err() {
            let peers: Vec<PeerId> = self.swarm.connected_peers().copied().collect();
            for peer in peers {
                // Closed meanwhile is as good.
                let _ = self.swarm.disconnect_peer_id(peer);
            }
            let _ = timeout(self.shared.settings.close_grace, self.until_alone()).await;
        }
        self.shared.addresses().clear();
    }

    async fn until_alone(&mut self) {
        while self.swarm.network_info().connection_counters().num_established() > 0 {
            let event = self.swarm.select_next_some().await;
            self.handle(event);
        }
    }
}

/// A failed dial in words that say what to do.
fn explain(expected: PeerId, error: &DialError) -> String {
    match error {
        DialError::WrongPeerId { obtained, .. } => {
            format!("expected peer {expected}, but {obtained} answered: check the address")
        }
        DialError::LocalPeerId { .. } => "this is the link's own address".to_owned(),
        DialError::Transport(errors) => {
            let causes: Vec<String> = errors.iter().map(|(_, error)| chain(error)).collect();
            if causes.is_empty() { "no transport for this address".to_owned() } else { causes.join("; ") }
        }
        DialError::Denied { cause } => chain(cause),
        DialError::NoAddresses | DialError::DialPeerConditionFalse(_) | DialError::Aborted => chain(error),
    }
}
