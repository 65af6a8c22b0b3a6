//! A peer that speaks libp2p and QUIC properly and everything above as it likes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures::{AsyncReadExt, AsyncWriteExt, StreamExt};
use libp2p::core::Endpoint;
use libp2p::core::muxing::StreamMuxerBox;
use libp2p::core::transport::{PortUse, Transport};
use libp2p::core::upgrade::{InboundUpgrade, ReadyUpgrade, UpgradeInfo};
use libp2p::identity::Keypair;
use libp2p::swarm::handler::{ConnectionEvent, FullyNegotiatedInbound, FullyNegotiatedOutbound};
use libp2p::swarm::{
    ConnectionDenied, ConnectionHandler, ConnectionHandlerEvent, ConnectionId, FromSwarm, NetworkBehaviour, Stream,
    SubstreamProtocol, SwarmEvent, THandlerInEvent, ToSwarm,
};
use libp2p::{Multiaddr, PeerId, StreamProtocol, Swarm, quic, swarm};
use tokio::task::JoinSet;

/// The control stream and the data lanes, as they are spoken.
pub(crate) const CONTROL: &str = "/ringfence/control/2";
pub(crate) const DATA: &str = "/ringfence/data/2";

/// Data lanes that a link under test opens.
pub(crate) const LANES: u64 = 3;

/// The bytes of a hello, as the first connection of a process that opens so many data lanes.
pub(crate) fn hello(lanes: u64) -> Vec<u8> {
    note(1, &[START, 1, 1, lanes, 1 << 20])
}

/// The bytes of an accept.
pub(crate) fn accept() -> Vec<u8> {
    note(2, &[1])
}

/// What a data lane says first.
pub(crate) fn lane(number: u64) -> Vec<u8> {
    note(5, &[number])
}

/// All lanes of the peer are here.
pub(crate) fn ready() -> Vec<u8> {
    note(6, &[LANES])
}

/// A return of credit.
pub(crate) fn returned(taken: u64) -> Vec<u8> {
    note(7, &[taken, 0, 0])
}

/// What is said on control up to an agreement, by a peer with one data lane.
pub(crate) fn introduction() -> Vec<u8> {
    [hello(1), ready(), accept()].concat()
}

/// A body with its prefix.
pub(crate) fn body(flags: u32, bytes: usize) -> Vec<u8> {
    [(flags | bytes as u32).to_le_bytes().to_vec(), vec![0; bytes]].concat()
}

pub(crate) fn note(kind: u8, numbers: &[u64]) -> Vec<u8> {
    let length = 1 + 8 * numbers.len() as u32;
    let mut bytes = (1 << 31 | length).to_le_bytes().to_vec();
    bytes.push(kind);
    numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes
}

/// The number that a rogue says it drew at its start.
pub(crate) const START: u64 = 7;

/// A stream to open, and what to write on it.
pub(crate) type Script = Vec<(&'static str, Vec<u8>)>;

/// A name that is smaller than the other: it decides which connection is used.
pub(crate) fn deciding(other: PeerId) -> Keypair {
    loop {
        let key = Keypair::generate_ed25519();
        if key.public().to_peer_id() < other {
            return key;
        }
    }
}

/// Protocols of streams to take.
pub(crate) type Takes = &'static [&'static str];

/// Streams of a peer that plays by the rules.
pub(crate) const CURRENT: Takes = &[CONTROL, DATA];

/// What a rogue read, all streams together.
pub(crate) type Heard = Arc<Mutex<Vec<u8>>>;

/// Dials an address and plays a script on the connection; the returned task ends with it.
pub(crate) fn dial(key: Keypair, address: Multiaddr, script: Script) -> JoinSet<()> {
    dial_as(CURRENT, key, address, script).0
}

/// Dials as a peer that takes these streams; also gives what it reads.
pub(crate) fn dial_as(takes: Takes, key: Keypair, address: Multiaddr, script: Script) -> (JoinSet<()>, Heard) {
    let heard = Heard::default();
    let mut swarm = swarm_of(key, Rogue { takes, script, heard: Arc::clone(&heard) });
    swarm.dial(address).unwrap();
    let mut task = JoinSet::new();
    task.spawn(async move {
        loop {
            match swarm.select_next_some().await {
                SwarmEvent::ConnectionClosed { .. } => return,
                SwarmEvent::OutgoingConnectionError { error, .. } => panic!("{error:?}"),
                _ => {}
            }
        }
    });
    (task, heard)
}

/// Listens on loopback, takes the streams of some protocols, and plays a script.
pub(crate) async fn listen(takes: Takes, key: Keypair, script: Script) -> (Multiaddr, JoinSet<()>) {
    let peer = key.public().to_peer_id();
    let mut swarm = swarm_of(key, Rogue { takes, script, heard: Heard::default() });
    swarm.listen_on("/ip4/127.0.0.1/udp/0/quic-v1".parse().unwrap()).unwrap();
    let address = loop {
        if let SwarmEvent::NewListenAddr { address, .. } = swarm.select_next_some().await {
            break address.with_p2p(peer).unwrap();
        }
    };
    let mut task = JoinSet::new();
    task.spawn(async move {
        loop {
            swarm.select_next_some().await;
        }
    });
    (address, task)
}

fn swarm_of(key: Keypair, rogue: Rogue) -> Swarm<Rogue> {
    let transport = quic::tokio::Transport::new(quic::Config::new(&key))
        .map(|(peer, connection), _| (peer, StreamMuxerBox::new(connection)))
        .boxed();
    Swarm::new(transport, rogue, key.public().to_peer_id(), swarm::Config::with_tokio_executor())
}

struct Rogue {
    takes: Takes,
    script: Script,
    heard: Heard,
}

struct Player {
    takes: Takes,
    script: VecDeque<(&'static str, Vec<u8>)>,
    heard: Heard,
}

impl Rogue {
    fn player(&self) -> Player {
        let script = self.script.clone().into();
        Player { takes: self.takes, script, heard: Arc::clone(&self.heard) }
    }
}

struct Take(Takes);

impl UpgradeInfo for Take {
    type Info = StreamProtocol;
    type InfoIter = Vec<StreamProtocol>;

    fn protocol_info(&self) -> Self::InfoIter {
        self.0.iter().map(|name| StreamProtocol::new(name)).collect()
    }
}

impl InboundUpgrade<Stream> for Take {
    type Output = Stream;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Stream, Infallible>>;

    fn upgrade_inbound(self, stream: Stream, _: StreamProtocol) -> Self::Future {
        std::future::ready(Ok(stream))
    }
}

impl ConnectionHandler for Player {
    type FromBehaviour = Infallible;
    type ToBehaviour = Infallible;
    type InboundProtocol = Take;
    type OutboundProtocol = ReadyUpgrade<StreamProtocol>;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = Vec<u8>;

    fn listen_protocol(&self) -> SubstreamProtocol<Self::InboundProtocol> {
        SubstreamProtocol::new(Take(self.takes), ())
    }

    fn connection_keep_alive(&self) -> bool {
        true
    }

    fn poll(
        &mut self,
        _: &mut Context<'_>,
    ) -> Poll<ConnectionHandlerEvent<Self::OutboundProtocol, Vec<u8>, Infallible>> {
        let Some((name, bytes)) = self.script.pop_front() else { return Poll::Pending };
        let upgrade = ReadyUpgrade::new(StreamProtocol::new(name));
        Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest {
            protocol: SubstreamProtocol::new(upgrade, bytes),
        })
    }

    fn on_behaviour_event(&mut self, event: Infallible) {
        match event {}
    }

    fn on_connection_event(
        &mut self,
        event: ConnectionEvent<'_, Self::InboundProtocol, Self::OutboundProtocol, (), Vec<u8>>,
    ) {
        match event {
            ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound { protocol: mut stream, info: bytes }) => {
                tokio::spawn(async move {
                    if stream.write_all(&bytes).await.is_ok() && stream.flush().await.is_ok() {
                        // Open until the connection ends.
                        let _ = stream.read(&mut [0]).await;
                    }
                });
            }
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound { protocol: mut stream, .. }) => {
                let heard = Arc::clone(&self.heard);
                tokio::spawn(async move {
                    let mut buffer = [0; 1024];
                    while let Ok(bytes @ 1..) = stream.read(&mut buffer).await {
                        heard.lock().unwrap().extend(&buffer[..bytes]);
                    }
                });
            }
            _ => {}
        }
    }
}

impl NetworkBehaviour for Rogue {
    type ConnectionHandler = Player;
    type ToSwarm = Infallible;

    fn handle_established_inbound_connection(
        &mut self,
        _: ConnectionId,
        _: PeerId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<Player, ConnectionDenied> {
        Ok(self.player())
    }

    fn handle_established_outbound_connection(
        &mut self,
        _: ConnectionId,
        _: PeerId,
        _: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<Player, ConnectionDenied> {
        Ok(self.player())
    }

    fn on_swarm_event(&mut self, _: FromSwarm<'_>) {}

    fn on_connection_handler_event(&mut self, _: PeerId, _: ConnectionId, event: Infallible) {
        match event {}
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<Infallible, THandlerInEvent<Self>>> {
        Poll::Pending
    }
}
