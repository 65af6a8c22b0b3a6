//! Hosts with a transport each, and streams between them.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use libp2p::core::Endpoint as Role;
use libp2p::core::muxing::{StreamMuxer, StreamMuxerExt};
use libp2p::core::transport::{DialOpts, ListenerId, PortUse, Transport, TransportError, TransportEvent};
use libp2p::identity::Keypair;
use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};
use ringfence::transport::endpoint::{EndpointError, Muxer, PathBook, PathSettings, QuicTransport};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Longest wait of a test for anything.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Where tests listen.
pub(crate) const ANY: &str = "/ip4/127.0.0.1/udp/0/quic-v1";

/// A connection that came in, or failed to.
pub(crate) type Inbound = Result<(PeerId, Muxer), EndpointError>;

/// A node with a transport and nothing above.
pub(crate) struct Host {
    pub(crate) peer: PeerId,
    pub(crate) book: PathBook,
    transport: Arc<Mutex<QuicTransport>>,
    inbound: mpsc::Receiver<Inbound>,
    news: mpsc::Receiver<News>,
    _task: JoinSet<()>,
}

/// What a listener says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum News {
    Up(Multiaddr),
    Closed(ListenerId),
}

impl Host {
    pub(crate) fn new(settings: PathSettings) -> Self {
        Self::of(&Keypair::generate_ed25519(), settings)
    }

    pub(crate) fn of(identity: &Keypair, settings: PathSettings) -> Self {
        settings.check().unwrap();
        let book = PathBook::new();
        let transport = Arc::new(Mutex::new(QuicTransport::new(identity, settings, book.clone()).unwrap()));
        let (came, inbound) = mpsc::channel(1024);
        let (said, news) = mpsc::channel(64);
        let mut task = JoinSet::new();
        let driven = Arc::clone(&transport);
        task.spawn(async move {
            let mut upgrades = JoinSet::new();
            loop {
                match poll_fn(|cx| Pin::new(&mut *driven.lock().unwrap()).poll(cx)).await {
                    TransportEvent::Incoming { upgrade, .. } => {
                        let came = came.clone();
                        upgrades.spawn(async move {
                            let _ = came.send(upgrade.await).await;
                        });
                    }
                    TransportEvent::NewAddress { listen_addr, .. } => {
                        let _ = said.send(News::Up(listen_addr)).await;
                    }
                    TransportEvent::ListenerClosed { listener_id, .. } => {
                        let _ = said.send(News::Closed(listener_id)).await;
                    }
                    TransportEvent::AddressExpired { .. } | TransportEvent::ListenerError { .. } => {}
                }
            }
        });
        Self { peer: identity.public().to_peer_id(), book, transport, inbound, news, _task: task }
    }

    /// A host that listens on loopback, and where.
    pub(crate) async fn listening(settings: PathSettings) -> (Self, Multiaddr) {
        let mut host = Self::new(settings);
        let (_, address) = host.listen(ANY).await;
        (host, address)
    }

    pub(crate) async fn listen(&mut self, address: &str) -> (ListenerId, Multiaddr) {
        let id = ListenerId::next();
        self.try_listen(id, address).unwrap();
        match self.news().await {
            News::Up(address) => (id, address),
            other @ News::Closed(_) => panic!("{other:?}"),
        }
    }

    pub(crate) fn try_listen(&self, id: ListenerId, address: &str) -> Result<(), TransportError<EndpointError>> {
        self.transport.lock().unwrap().listen_on(id, address.parse().unwrap())
    }

    pub(crate) fn stop_listening(&self, id: ListenerId) -> bool {
        self.transport.lock().unwrap().remove_listener(id)
    }

    pub(crate) async fn news(&mut self) -> News {
        tokio::time::timeout(PATIENCE, self.news.recv()).await.expect("news in time").unwrap()
    }

    pub(crate) async fn dial(&self, address: &Multiaddr) -> Inbound {
        self.dial_as(address, Role::Dialer, PortUse::Reuse).await
    }

    pub(crate) async fn dial_as(&self, address: &Multiaddr, role: Role, port_use: PortUse) -> Inbound {
        let dial = self.transport.lock().unwrap().dial(address.clone(), DialOpts { role, port_use });
        match dial {
            Ok(dial) => tokio::time::timeout(PATIENCE, dial).await.expect("a dial ends"),
            Err(TransportError::Other(error)) => Err(error),
            Err(TransportError::MultiaddrNotSupported(address)) => panic!("{address} is not supported"),
        }
    }

    /// Whether a transport dials such addresses at all.
    pub(crate) fn supports(&self, address: &Multiaddr, role: Role) -> bool {
        let dial = self.transport.lock().unwrap().dial(address.clone(), DialOpts { role, port_use: PortUse::Reuse });
        !matches!(dial, Err(TransportError::MultiaddrNotSupported(_)))
    }

    pub(crate) async fn inbound(&mut self) -> Inbound {
        tokio::time::timeout(PATIENCE, self.inbound.recv()).await.expect("somebody comes in time").unwrap()
    }

    pub(crate) fn expect_nobody(&mut self) {
        assert!(self.inbound.try_recv().is_err());
    }
}

/// Connects two hosts: the dialler's end, and the other's.
pub(crate) async fn connect(from: &Host, to: &mut Host, address: &Multiaddr) -> (Muxer, Muxer) {
    let (dialled, came) = tokio::join!(from.dial(address), to.inbound());
    let ((reached, near), (comer, far)) = (dialled.unwrap(), came.unwrap());
    assert_eq!((reached, comer), (to.peer, from.peer));
    (near, far)
}

/// Opens a stream, and says something so that the other side hears of it.
pub(crate) async fn open<M>(muxer: &mut M, first: &[u8]) -> M::Substream
where
    M: StreamMuxer + Unpin,
    M::Substream: Unpin,
{
    let mut stream = poll_fn(|cx| muxer.poll_outbound_unpin(cx)).await.unwrap();
    stream.write_all(first).await.unwrap();
    stream
}

pub(crate) async fn accept<M: StreamMuxer + Unpin>(muxer: &mut M) -> M::Substream {
    let accepted = poll_fn(|cx| muxer.poll_inbound_unpin(cx));
    tokio::time::timeout(PATIENCE, accepted).await.expect("a stream in time").unwrap()
}

/// Reads exactly so many bytes.
pub(crate) async fn read(stream: &mut (impl AsyncRead + Unpin), bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0; bytes];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut buffer)).await.expect("bytes in time").unwrap();
    buffer
}

/// Sends a word there and an answer back on a new stream.
pub(crate) async fn converse<N, F>(near: &mut N, far: &mut F)
where
    N: StreamMuxer + Unpin,
    N::Substream: Unpin,
    F: StreamMuxer + Unpin,
    F::Substream: Unpin,
{
    let (mut asking, mut asked) = tokio::join!(open(near, b"question"), accept(far));
    assert_eq!(read(&mut asked, 8).await, b"question");
    asked.write_all(b"answer").await.unwrap();
    asked.close().await.unwrap();
    asked.close().await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, asking.read_to_end(&mut answer)).await.unwrap().unwrap();
    assert_eq!(answer, b"answer");
}

/// The socket that an address stands for.
pub(crate) fn socket_of(address: &Multiaddr) -> SocketAddr {
    let mut parts = address.iter();
    let (Some(Protocol::Ip4(ip)), Some(Protocol::Udp(port))) = (parts.next(), parts.next()) else {
        panic!("{address}");
    };
    SocketAddr::new(ip.into(), port)
}

/// The address of a socket, as a transport dials it.
pub(crate) fn address_of(socket: SocketAddr) -> Multiaddr {
    format!("/ip4/{}/udp/{}/quic-v1", socket.ip(), socket.port()).parse().unwrap()
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(waited.await.is_ok(), "waited in vain until {what}");
}
