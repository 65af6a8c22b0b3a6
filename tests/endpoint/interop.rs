//! The stock libp2p QUIC transport at the other end.

use std::future::poll_fn;
use std::pin::Pin;

use libp2p::core::Endpoint as Role;
use libp2p::core::transport::{DialOpts, ListenerId, PortUse, Transport, TransportEvent};
use libp2p::identity::Keypair;
use libp2p::quic;
use ringfence::transport::endpoint::PathSettings;

use super::rig::{ANY, Host, PATIENCE, converse};

fn stock() -> (libp2p::PeerId, quic::tokio::Transport) {
    let identity = Keypair::generate_ed25519();
    (identity.public().to_peer_id(), quic::tokio::Transport::new(quic::Config::new(&identity)))
}

#[tokio::test]
async fn stock_libp2p_dials_in() {
    let (mut host, address) = Host::listening(PathSettings::default()).await;
    let (peer, mut stock) = stock();
    let options = DialOpts { role: Role::Dialer, port_use: PortUse::Reuse };
    let dial = stock.dial(address.with_p2p(host.peer).unwrap(), options).unwrap();
    let (dialled, came) = tokio::join!(dial, host.inbound());
    let ((reached, mut near), (comer, mut far)) = (dialled.unwrap(), came.unwrap());
    assert_eq!((reached, comer), (host.peer, peer));
    converse(&mut near, &mut far).await;
    converse(&mut far, &mut near).await;
}

#[tokio::test]
async fn stock_libp2p_is_dialled() {
    let (peer, mut stock) = stock();
    stock.listen_on(ListenerId::next(), ANY.parse().unwrap()).unwrap();
    let next = poll_fn(|cx| Pin::new(&mut stock).poll(cx));
    let TransportEvent::NewAddress { listen_addr, .. } = tokio::time::timeout(PATIENCE, next).await.unwrap() else {
        panic!("no address")
    };
    let dialler = Host::new(PathSettings::default());
    let address = listen_addr.with_p2p(peer).unwrap();
    let arrival = async {
        match poll_fn(|cx| Pin::new(&mut stock).poll(cx)).await {
            TransportEvent::Incoming { upgrade, .. } => upgrade.await.unwrap(),
            _ => panic!("nobody came"),
        }
    };
    let (dialled, came) = tokio::join!(dialler.dial(&address), arrival);
    let ((reached, mut near), (comer, mut far)) = (dialled.unwrap(), came);
    assert_eq!((reached, comer), (peer, dialler.peer));
    converse(&mut near, &mut far).await;
    converse(&mut far, &mut near).await;
}
