//! All listeners and dials of a node, as libp2p's swarm wants them.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};

use futures::FutureExt;
use libp2p::core::Endpoint as Role;
use libp2p::core::transport::{DialOpts, ListenerId, PortUse, Transport, TransportError, TransportEvent};
use libp2p::identity::Keypair;
use libp2p::{Multiaddr, PeerId};
use quinn::TransportConfig;

use super::addr::{is_somewhere, reaches, to_multiaddr, to_socket};
use super::book::PathBook;
use super::listener::{Heard, Listener};
use super::muxer::Muxer;
use super::punch::Punches;
use super::reset::ResetKey;
use super::settings::PathSettings;
use super::tls::{SERVER_NAME, Tls};
use super::upgrade::{Context, Upgrade};
use super::{EndpointError, WrongPeer, socket};

/// Connections that wait, unanswered, for the swarm to take them; further ones are refused.
const INCOMING_MAX: usize = 1024;

/// Bytes that may come early on one connection that waits, and on all of them.
const INCOMING_BYTES_MAX: [u64; 2] = [64 << 10, 8 << 20];

/// QUIC's only version.
const VERSION: u32 = 1;

type Event = TransportEvent<Upgrade, EndpointError>;

/// A libp2p transport over QUIC.
///
/// Runs on the tokio runtime in which it listens and dials. A listener that is removed takes
/// nothing further; its connections go on. Dials go out from a listener's socket where one can
/// reach the remote, unless a new port is asked for. A dial in the role of a listener waits for the
/// remote to dial in, and meanwhile opens this side's NAT for it.
pub struct QuicTransport {
    identity: Keypair,
    settings: PathSettings,
    tls: Tls,
    path: Arc<TransportConfig>,
    context: Context,
    listeners: Vec<Listener>,
    /// The listener to ask first, so that none waits for a busy one.
    turn: usize,
    /// Sockets that only dial, of IPv4 and of IPv6.
    dialers: [Option<quinn::Endpoint>; 2],
    punches: Punches,
    events: VecDeque<Event>,
    waker: Option<Waker>,
}

impl std::fmt::Debug for QuicTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let listeners: Vec<SocketAddr> = self.listeners.iter().map(|listener| listener.local).collect();
        f.debug_struct("QuicTransport").field("listeners", &listeners).finish_non_exhaustive()
    }
}

impl QuicTransport {
    /// Makes a transport for a node; its connections are listed in the book.
    ///
    /// What [`PathSettings::check`] refuses is cut to what can be honoured.
    ///
    /// # Errors
    /// [`EndpointError::Certificate`] where the node's key makes none.
    pub fn new(identity: &Keypair, settings: PathSettings, book: PathBook) -> Result<Self, EndpointError> {
        let context = Context {
            handshake_timeout: settings.handshake_timeout,
            priorities: settings.priorities.clone().into(),
            book,
        };
        Ok(Self {
            identity: identity.clone(),
            tls: Tls::new(identity)?,
            path: settings.transport_config(),
            settings,
            context,
            listeners: Vec::new(),
            turn: 0,
            dialers: [None, None],
            punches: Punches::default(),
            events: VecDeque::new(),
            waker: None,
        })
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn endpoint(
        &self,
        mut config: quinn::EndpointConfig,
        server: Option<quinn::ServerConfig>,
        socket: UdpSocket,
    ) -> Result<quinn::Endpoint, EndpointError> {
        let payload = self.settings.udp_payload_taken();
        config.supported_versions(vec![VERSION]);
        config.max_udp_payload_size(payload).map_err(|error| std::io::Error::other(error.to_string()))?;
        Ok(quinn::Endpoint::new(config, server, socket, Arc::new(quinn::TokioRuntime))?)
    }

    fn server_config(&self) -> quinn::ServerConfig {
        let mut config = quinn::ServerConfig::with_crypto(self.tls.server());
        let [of_one, of_all] = INCOMING_BYTES_MAX;
        config
            .transport_config(Arc::clone(&self.path))
            .migration(true)
            .max_incoming(INCOMING_MAX)
            .incoming_buffer_size(of_one)
            .incoming_buffer_size_total(of_all);
        config
    }

    pub(super) fn listener(&self, id: ListenerId, local: SocketAddr) -> Result<Listener, EndpointError> {
        let socket = socket::bound(local, &self.settings)?;
        let local = socket.local_addr()?;
        let key = ResetKey::derive(&self.identity, local);
        let config = key.map_or_else(quinn::EndpointConfig::default, ResetKey::endpoint_config);
        let endpoint = self.endpoint(config, Some(self.server_config()), socket.try_clone()?)?;
        Listener::new(id, socket, endpoint)
    }

    /// A listener whose socket can send to a remote; always the same one while there are the same.
    fn listener_towards(&self, remote: SocketAddr) -> Option<&Listener> {
        let able: Vec<&Listener> = self.listeners.iter().filter(|listener| reaches(listener.local, remote)).collect();
        let mut hasher = DefaultHasher::new();
        remote.hash(&mut hasher);
        let chosen = hasher.finish().checked_rem(able.len() as u64)?;
        able.get(usize::try_from(chosen).ok()?).copied()
    }

    /// The endpoint that a dial goes out from.
    fn dialer(&mut self, remote: SocketAddr, port_use: PortUse) -> Result<quinn::Endpoint, EndpointError> {
        let family = usize::from(remote.is_ipv6());
        if port_use == PortUse::Reuse {
            let listening = self.listener_towards(remote).map(|listener| &listener.endpoint);
            if let Some(endpoint) = listening.or(self.dialers[family].as_ref()) {
                return Ok(endpoint.clone());
            }
        }
        let socket = socket::unbound(remote, &self.settings)?;
        let endpoint = self.endpoint(quinn::EndpointConfig::default(), None, socket)?;
        if port_use == PortUse::Reuse {
            self.dialers[family] = Some(endpoint.clone());
        }
        Ok(endpoint)
    }

    fn dial_out(
        &mut self,
        remote: SocketAddr,
        peer: Option<PeerId>,
        port_use: PortUse,
    ) -> Result<Upgrade, EndpointError> {
        let endpoint = self.dialer(remote, port_use)?;
        let (client, witness) = self.tls.client(peer)?;
        let mut config = quinn::ClientConfig::new(Arc::new(client));
        config.transport_config(Arc::clone(&self.path)).version(VERSION);
        let context = self.context.clone();
        Ok(async move {
            let connecting = endpoint.connect_with(config, remote, SERVER_NAME)?;
            context.dialled(connecting, &witness).await
        }
        .boxed())
    }

    fn dial_as_listener(&self, remote: SocketAddr, expected: PeerId) -> Result<Upgrade, EndpointError> {
        let listener = self.listener_towards(remote).ok_or(EndpointError::NoListener { remote })?;
        let (socket, context) = (Arc::clone(&listener.socket), self.context.clone());
        let punch = self.punches.wait_for(remote)?;
        Ok(async move {
            let incoming = punch.run(&socket, context.handshake_timeout).await.ok_or_else(|| context.timed_out())?;
            let (obtained, muxer) = context.accepted(incoming).await?;
            WrongPeer::check(expected, obtained)?;
            Ok((obtained, muxer))
        }
        .boxed())
    }

    fn incoming(&self, listener: &Listener, incoming: quinn::Incoming) -> Event {
        let send_back_addr = to_multiaddr(incoming.remote_address());
        let local = SocketAddr::new(incoming.local_ip().unwrap_or(listener.local.ip()), listener.local.port());
        let (context, handshake) = (self.context.clone(), listener.handshake());
        let upgrade = async move {
            let reached = context.accepted(incoming).await;
            drop(handshake);
            reached
        };
        TransportEvent::Incoming {
            listener_id: listener.id,
            upgrade: upgrade.boxed(),
            local_addr: to_multiaddr(local),
            send_back_addr,
        }
    }

    /// Asks one listener; `Ready(None)` where it said something that concerns nobody.
    fn poll_listener(&mut self, index: usize, cx: &mut TaskContext<'_>) -> Poll<Option<Event>> {
        let Some(listener) = self.listeners.get_mut(index) else { return Poll::Pending };
        let Poll::Ready(heard) = listener.poll(cx) else { return Poll::Pending };
        let listener_id = listener.id;
        Poll::Ready(match heard {
            Heard::Up(listen_addr) => Some(TransportEvent::NewAddress { listener_id, listen_addr }),
            Heard::Down(listen_addr) => Some(TransportEvent::AddressExpired { listener_id, listen_addr }),
            Heard::Stumbled(error) => Some(TransportEvent::ListenerError { listener_id, error }),
            Heard::Incoming(incoming) => {
                let unclaimed = self.punches.claim(*incoming);
                unclaimed.map(|incoming| self.incoming(&self.listeners[index], incoming))
            }
            Heard::Lost => {
                self.listeners.remove(index);
                Some(TransportEvent::ListenerClosed { listener_id, reason: Err(EndpointError::ListenerLost) })
            }
        })
    }
}

impl Transport for QuicTransport {
    type Output = (PeerId, Muxer);
    type Error = EndpointError;
    type ListenerUpgrade = Upgrade;
    type Dial = Upgrade;

    fn listen_on(&mut self, id: ListenerId, addr: Multiaddr) -> Result<(), TransportError<EndpointError>> {
        let Some((local, _)) = to_socket(&addr) else { return Err(TransportError::MultiaddrNotSupported(addr)) };
        let listener = self.listener(id, local).map_err(TransportError::Other)?;
        self.listeners.push(listener);
        // Dials go out from the listener from here on; connections of the old socket go on.
        self.dialers[usize::from(local.is_ipv6())] = None;
        self.wake();
        Ok(())
    }

    fn remove_listener(&mut self, id: ListenerId) -> bool {
        let Some(index) = self.listeners.iter().position(|listener| listener.id == id) else { return false };
        self.listeners.remove(index).stop();
        self.events.push_back(TransportEvent::ListenerClosed { listener_id: id, reason: Ok(()) });
        self.wake();
        true
    }

    fn dial(&mut self, addr: Multiaddr, opts: DialOpts) -> Result<Upgrade, TransportError<EndpointError>> {
        let (remote, peer) = match to_socket(&addr) {
            Some((remote, peer)) if is_somewhere(remote) => (remote, peer),
            Some(_) | None => return Err(TransportError::MultiaddrNotSupported(addr)),
        };
        let dial = match (opts.role, peer) {
            (Role::Dialer, peer) => self.dial_out(remote, peer, opts.port_use),
            (Role::Listener, Some(peer)) => self.dial_as_listener(remote, peer),
            // Whoever comes in must be whom this side waits for.
            (Role::Listener, None) => return Err(TransportError::MultiaddrNotSupported(addr)),
        };
        dial.map_err(TransportError::Other)
    }

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Event> {
        let this = &mut *self;
        if let Some(event) = this.events.pop_front() {
            return Poll::Ready(event);
        }
        let mut quiet = 0;
        while quiet < this.listeners.len() {
            this.turn = (this.turn + 1) % this.listeners.len();
            match this.poll_listener(this.turn, cx) {
                Poll::Ready(Some(event)) => return Poll::Ready(event),
                Poll::Ready(None) => quiet = 0,
                Poll::Pending => quiet += 1,
            }
        }
        this.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}
