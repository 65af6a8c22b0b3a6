//! One socket that listens: its addresses, and what comes in.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::FutureExt;
use futures::future::BoxFuture;
use if_watch::IfEvent;
use if_watch::tokio::IfWatcher;
use libp2p::Multiaddr;
use libp2p::core::transport::ListenerId;

use super::EndpointError;
use super::addr::to_multiaddr;

/// Handshakes at once of which nobody knows whether the sender's address is real; beyond them a
/// stranger must first show that it is.
const UNPROVEN_MAX: usize = 32;

/// What a listener says.
pub(super) enum Heard {
    /// It can be reached at an address.
    Up(Multiaddr),
    /// It can't any more.
    Down(Multiaddr),
    /// Somebody dials in.
    Incoming(Box<quinn::Incoming>),
    /// Something went wrong, and it goes on.
    Stumbled(EndpointError),
    /// It is over.
    Lost,
}

/// A socket that listens.
pub(super) struct Listener {
    pub(super) id: ListenerId,
    pub(super) endpoint: quinn::Endpoint,
    /// The endpoint's socket once more, to send what is no QUIC.
    pub(super) socket: Arc<UdpSocket>,
    pub(super) local: SocketAddr,
    accept: BoxFuture<'static, Option<quinn::Incoming>>,
    /// There for an unspecified address, which stands for all that the host has.
    watcher: Option<IfWatcher>,
    /// The one address of a specified one, until it is told.
    untold: Option<Multiaddr>,
    known: BTreeSet<IpAddr>,
    /// Held by every handshake that is under way.
    handshakes: Arc<()>,
}

impl Listener {
    pub(super) fn new(id: ListenerId, socket: UdpSocket, endpoint: quinn::Endpoint) -> Result<Self, EndpointError> {
        let local = socket.local_addr()?;
        let everywhere = local.ip().is_unspecified();
        Ok(Self {
            id,
            accept: accept(&endpoint),
            endpoint,
            socket: Arc::new(socket),
            local,
            watcher: if everywhere { Some(IfWatcher::new()?) } else { None },
            untold: (!everywhere).then(|| to_multiaddr(local)),
            known: BTreeSet::new(),
            handshakes: Arc::new(()),
        })
    }

    /// To be held for as long as a handshake takes.
    pub(super) fn handshake(&self) -> Arc<()> {
        Arc::clone(&self.handshakes)
    }

    /// Takes nothing further; connections that it made go on.
    pub(super) fn stop(&self) {
        self.endpoint.set_server_config(None);
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        if let Some(address) = self.untold.take() {
            return Poll::Ready(Heard::Up(address));
        }
        if let Poll::Ready(heard) = self.poll_interfaces(cx) {
            return Poll::Ready(heard);
        }
        loop {
            let Poll::Ready(incoming) = self.accept.poll_unpin(cx) else { return Poll::Pending };
            self.accept = accept(&self.endpoint);
            let Some(incoming) = incoming else { return Poll::Ready(Heard::Lost) };
            let crowded = Arc::strong_count(&self.handshakes) > UNPROVEN_MAX;
            if crowded && !incoming.remote_address_validated() && incoming.may_retry() {
                // It may be retried, so it is; the sender comes again with the proof.
                let _ = incoming.retry();
                continue;
            }
            return Poll::Ready(Heard::Incoming(Box::new(incoming)));
        }
    }

    /// Follows the addresses of the host.
    fn poll_interfaces(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        while let Some(watcher) = &mut self.watcher {
            let Poll::Ready(event) = watcher.poll_if_event(cx) else { return Poll::Pending };
            match event {
                Ok(IfEvent::Up(net)) if self.stands_for(net.addr()) && self.known.insert(net.addr()) => {
                    return Poll::Ready(Heard::Up(self.at(net.addr())));
                }
                Ok(IfEvent::Down(net)) if self.known.remove(&net.addr()) => {
                    return Poll::Ready(Heard::Down(self.at(net.addr())));
                }
                Ok(IfEvent::Up(_) | IfEvent::Down(_)) => {}
                Err(error) => {
                    // It would fail again, and forever.
                    self.watcher = None;
                    return Poll::Ready(Heard::Stumbled(error.into()));
                }
            }
        }
        Poll::Pending
    }

    /// Whether an address of the host is one that this socket stands for, and that others can use:
    /// one that holds on a single link says nothing without the link's name.
    fn stands_for(&self, ip: IpAddr) -> bool {
        let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        ip.is_ipv4() == self.local.is_ipv4() && !link_local
    }

    fn at(&self, ip: IpAddr) -> Multiaddr {
        to_multiaddr(SocketAddr::new(ip, self.local.port()))
    }
}

fn accept(endpoint: &quinn::Endpoint) -> BoxFuture<'static, Option<quinn::Incoming>> {
    let endpoint = endpoint.clone();
    async move { endpoint.accept().await }.boxed()
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use libp2p::core::Endpoint as Role;
    use libp2p::core::transport::{DialOpts, PortUse, Transport};
    use libp2p::identity::Keypair;
    use tokio::task::JoinSet;

    use super::super::{PathBook, PathSettings, QuicTransport};
    use super::*;

    fn transport() -> QuicTransport {
        QuicTransport::new(&Keypair::generate_ed25519(), PathSettings::default(), PathBook::new()).unwrap()
    }

    /// Whether the next who comes in has shown that it is where it says.
    async fn comes_proven(listener: &mut Listener) -> bool {
        loop {
            match poll_fn(|cx| listener.poll(cx)).await {
                Heard::Incoming(incoming) => return incoming.remote_address_validated(),
                Heard::Up(_) => {}
                Heard::Down(_) | Heard::Stumbled(_) | Heard::Lost => panic!("the listener failed"),
            }
        }
    }

    #[tokio::test]
    async fn in_a_crowd_a_stranger_proves_where_it_is() {
        let mut dialler = transport();
        let mut listener = transport().listener(ListenerId::next(), "127.0.0.1:0".parse().unwrap()).unwrap();
        let address = to_multiaddr(listener.local);
        let mut dials = JoinSet::new();
        let mut dial =
            || dialler.dial(address.clone(), DialOpts { role: Role::Dialer, port_use: PortUse::New }).unwrap();
        dials.spawn(dial());
        assert!(!comes_proven(&mut listener).await, "alone it need not");
        let crowd: Vec<_> = (0..UNPROVEN_MAX).map(|_| listener.handshake()).collect();
        dials.spawn(dial());
        assert!(comes_proven(&mut listener).await);
        drop(crowd);
        dials.spawn(dial());
        assert!(!comes_proven(&mut listener).await, "nor when the crowd is gone");
    }
}
