//! Dialling as the listener: the peer that dials at the same time is the outcome.

use std::net::UdpSocket;
use std::time::Duration;

use libp2p::core::Endpoint as Role;
use libp2p::core::transport::PortUse;
use ringfence::transport::endpoint::{EndpointError, PathSettings};

use super::rig::{ANY, Host, address_of, converse};

fn quick() -> PathSettings {
    PathSettings { handshake_timeout: Duration::from_millis(300), ..PathSettings::default() }
}

#[tokio::test]
async fn the_peer_that_dials_in_is_the_outcome_of_the_dial() {
    let (mut waiting, waiting_at) = Host::listening(PathSettings::default()).await;
    let (dialling, dialling_at) = Host::listening(PathSettings::default()).await;
    let dialling_at = dialling_at.with_p2p(dialling.peer).unwrap();
    for _ in 0..2 {
        let (waited, dialled) =
            tokio::join!(waiting.dial_as(&dialling_at, Role::Listener, PortUse::Reuse), dialling.dial(&waiting_at));
        let ((comer, mut far), (reached, mut near)) = (waited.unwrap(), dialled.unwrap());
        assert_eq!((comer, reached), (dialling.peer, waiting.peer));
        converse(&mut near, &mut far).await;
        waiting.expect_nobody();
    }
}

#[tokio::test]
async fn noise_opens_the_way_until_the_time_is_up() {
    let (host, _) = Host::listening(quick()).await;
    let remote = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = address_of(remote.local_addr().unwrap()).with_p2p(Host::new(quick()).peer).unwrap();
    match host.dial_as(&address, Role::Listener, PortUse::New).await {
        Err(EndpointError::HandshakeTimedOut { after_ms: 300 }) => {}
        other => panic!("{other:?}"),
    }
    let mut datagrams = Vec::new();
    remote.set_nonblocking(true).unwrap();
    let mut buffer = [0; 2048];
    while let Ok(bytes) = remote.recv(&mut buffer) {
        datagrams.push(buffer[..bytes].to_vec());
    }
    assert!(datagrams.len() >= 2, "{}", datagrams.len());
    assert!(datagrams.iter().all(|noise| noise.len() == 64 && noise[0] < 0x40), "none looks like QUIC");
    assert_ne!(datagrams[0], datagrams[1]);
}

#[tokio::test]
async fn only_the_expected_peer_is_taken() {
    let (waiting, waiting_at) = Host::listening(PathSettings::default()).await;
    let (stranger, stranger_at) = Host::listening(PathSettings::default()).await;
    let expected = Host::new(quick()).peer;
    let address = stranger_at.with_p2p(expected).unwrap();
    let (waited, _) =
        tokio::join!(waiting.dial_as(&address, Role::Listener, PortUse::Reuse), stranger.dial(&waiting_at));
    match waited {
        Err(EndpointError::WrongPeer(wrong)) => assert_eq!((wrong.expected, wrong.obtained), (expected, stranger.peer)),
        other => panic!("{other:?}"),
    }
    assert!(waiting.book.is_empty());
}

#[tokio::test]
async fn a_peer_is_waited_for_once_and_only_where_somebody_listens() {
    let mut host = Host::new(quick());
    let remote = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = address_of(remote).with_p2p(Host::new(quick()).peer).unwrap();
    match host.dial_as(&address, Role::Listener, PortUse::Reuse).await {
        Err(EndpointError::NoListener { remote: named }) => assert_eq!(named, remote),
        other => panic!("{other:?}"),
    }
    host.listen(ANY).await;
    let twice = tokio::join!(
        host.dial_as(&address, Role::Listener, PortUse::Reuse),
        host.dial_as(&address, Role::Listener, PortUse::Reuse)
    );
    assert!(matches!(twice.0, Err(EndpointError::HandshakeTimedOut { .. })), "{:?}", twice.0);
    assert!(matches!(twice.1, Err(EndpointError::PunchInProgress { .. })), "{:?}", twice.1);
    let after = host.dial_as(&address, Role::Listener, PortUse::Reuse).await;
    assert!(matches!(after, Err(EndpointError::HandshakeTimedOut { .. })), "{after:?}");
}
