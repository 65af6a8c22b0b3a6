//! Listening and dialling: who answers, from which port, and what can't be dialled.

use std::net::UdpSocket;
use std::time::Duration;

use libp2p::PeerId;
use libp2p::core::Endpoint as Role;
use libp2p::core::muxing::StreamMuxerExt;
use libp2p::core::transport::{ListenerId, PortUse, TransportError};
use ringfence::clock;
use ringfence::transport::endpoint::{EndpointError, PathSettings};

use super::rig::{ANY, Host, News, PATIENCE, accept, address_of, connect, converse, open, read, socket_of, until};

#[tokio::test]
async fn a_connection_carries_streams_both_ways_and_is_listed_while_it_lives() {
    let (dialler, (mut host, address)) =
        (Host::new(PathSettings::default()), Host::listening(PathSettings::default()).await);
    let named = address.clone().with_p2p(host.peer).unwrap();
    let (mut near, mut far) = connect(&dialler, &mut host, &named).await;
    converse(&mut near, &mut far).await;
    converse(&mut far, &mut near).await;
    let stats = dialler.book.stats(host.peer).unwrap();
    assert_eq!((stats.peer, &stats.remote, stats.dialled), (host.peer, &address, true));
    assert!(stats.packets_sent > 0 && stats.bytes_sent > 0 && stats.bytes_received > 0, "{stats:?}");
    assert!(stats.window >= 1 << 20 && stats.mtu >= 1200 && stats.rtt_min <= PATIENCE, "{stats:?}");
    let paths = host.book.paths(dialler.peer);
    assert_eq!(paths.iter().map(|path| path.dialled).collect::<Vec<_>>(), [false]);
    assert_eq!(host.book.paths(host.peer), []);

    // A second one to the same peer is listed behind the first.
    let (again, _far_again) = connect(&dialler, &mut host, &address).await;
    assert_eq!(dialler.book.paths(host.peer).len(), 2);
    drop(near);
    assert_eq!(dialler.book.paths(host.peer).len(), 1);
    // The other side hears of the end, and then lists it no more.
    let ended = std::future::poll_fn(|cx| far.poll_inbound_unpin(cx));
    assert!(tokio::time::timeout(PATIENCE, ended).await.unwrap().is_err());
    assert_eq!(host.book.paths(dialler.peer).len(), 1, "an ended connection is not live");
    drop((again, far));
    assert!(dialler.book.is_empty());
    assert_eq!(dialler.book.stats(host.peer), None);
}

#[tokio::test]
async fn to_close_is_to_say_so() {
    let (dialler, (mut host, address)) =
        (Host::new(PathSettings::default()), Host::listening(PathSettings::default()).await);
    let (near, mut far) = connect(&dialler, &mut host, &address).await;
    tokio::time::timeout(PATIENCE, near.close()).await.unwrap().unwrap();
    let ended = std::future::poll_fn(|cx| far.poll_inbound_unpin(cx)).await;
    assert!(matches!(ended, Err(EndpointError::Connection(quinn::ConnectionError::ApplicationClosed(_)))));
    // To close what has ended comes to an end, too.
    let closed = std::future::poll_fn(|cx| far.poll_close_unpin(cx));
    let _ = tokio::time::timeout(PATIENCE, closed).await.unwrap();
}

#[tokio::test]
async fn a_stranger_who_answers_is_named_and_learns_nothing() {
    let (dialler, (mut host, address)) =
        (Host::new(PathSettings::default()), Host::listening(PathSettings::default()).await);
    let expected = PeerId::random();
    let address = address.with_p2p(expected).unwrap();
    match dialler.dial(&address).await {
        Err(EndpointError::WrongPeer(wrong)) => assert_eq!((wrong.expected, wrong.obtained), (expected, host.peer)),
        other => panic!("{other:?}"),
    }
    assert!(host.inbound().await.is_err(), "no connection came of it");
    assert!(dialler.book.is_empty() && host.book.is_empty());
}

#[tokio::test]
async fn a_dial_to_a_silent_address_ends_in_time() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let handshake_timeout = Duration::from_millis(150);
    let dialler = Host::new(PathSettings { handshake_timeout, ..PathSettings::default() });
    let begun = clock::now();
    match dialler.dial(&address_of(silent.local_addr().unwrap())).await {
        Err(EndpointError::HandshakeTimedOut { after_ms }) => assert_eq!(after_ms, 150),
        other => panic!("{other:?}"),
    }
    assert!(begun.elapsed() >= handshake_timeout);
    assert!(dialler.book.is_empty());
}

#[tokio::test]
async fn what_is_no_address_is_not_supported() {
    let host = Host::new(PathSettings::default());
    let peer = PeerId::random();
    for address in [
        "/ip4/0.0.0.0/udp/9/quic-v1".to_owned(),
        "/ip4/127.0.0.1/udp/0/quic-v1".to_owned(),
        "/ip4/127.0.0.1/tcp/9".to_owned(),
        format!("/ip4/127.0.0.1/udp/9/quic-v1/p2p/{peer}/p2p-circuit"),
    ] {
        assert!(!host.supports(&address.parse().unwrap(), Role::Dialer), "{address}");
    }
    let nameless = "/ip4/127.0.0.1/udp/9/quic-v1".parse().unwrap();
    assert!(host.supports(&nameless, Role::Dialer));
    assert!(!host.supports(&nameless, Role::Listener), "a listener must know whom it waits for");
    let refused = host.try_listen(ListenerId::next(), "/ip4/127.0.0.1/tcp/0");
    assert!(matches!(refused, Err(TransportError::MultiaddrNotSupported(_))));
}

#[tokio::test]
async fn a_port_that_is_taken_is_an_error() {
    let (_host, address) = Host::listening(PathSettings::default()).await;
    let other = Host::new(PathSettings::default());
    match other.try_listen(ListenerId::next(), &address.to_string()) {
        Err(TransportError::Other(EndpointError::Socket(why))) => {
            assert_eq!(why.kind(), std::io::ErrorKind::AddrInUse);
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_listener_that_is_removed_takes_nobody_and_keeps_its_connections() {
    let settings = || PathSettings { handshake_timeout: Duration::from_millis(500), ..PathSettings::default() };
    let (dialler, mut host) = (Host::new(settings()), Host::new(settings()));
    let (id, address) = host.listen(ANY).await;
    let (other_id, other_address) = host.listen(ANY).await;
    let (mut near, mut far) = connect(&dialler, &mut host, &address).await;
    assert!(host.stop_listening(id));
    assert!(!host.stop_listening(id), "it is gone");
    assert_eq!(host.news().await, News::Closed(id));
    assert!(dialler.dial(&address).await.is_err());
    host.expect_nobody();
    converse(&mut near, &mut far).await;
    connect(&dialler, &mut host, &other_address).await;
    assert!(host.stop_listening(other_id));
    drop((near, far));
    // With its last connection the socket goes too.
    let socket = socket_of(&address);
    until("the port is free", || UdpSocket::bind(socket).is_ok()).await;
}

#[tokio::test]
async fn an_unspecified_address_stands_for_those_of_the_host() {
    let (dialler, mut host) = (Host::new(PathSettings::default()), Host::new(PathSettings::default()));
    let (_, mut address) = host.listen("/ip4/0.0.0.0/udp/0/quic-v1").await;
    while !socket_of(&address).ip().is_loopback() {
        assert!(!socket_of(&address).ip().is_unspecified());
        match host.news().await {
            News::Up(next) => address = next,
            other @ News::Closed(_) => panic!("{other:?}"),
        }
    }
    connect(&dialler, &mut host, &address).await;
}

#[tokio::test]
async fn dials_go_out_from_the_listener_unless_a_new_port_is_asked_for() {
    let (mut dialler, (mut host, address)) =
        (Host::new(PathSettings::default()), Host::listening(PathSettings::default()).await);
    let mut kept = Vec::new();
    let mut port = async |dialler: &Host, port_use| {
        let known = host.book.paths(dialler.peer).len();
        let (near, far) = tokio::join!(dialler.dial_as(&address, Role::Dialer, port_use), host.inbound());
        kept.push((near.unwrap(), far.unwrap()));
        socket_of(&host.book.paths(dialler.peer)[known].remote).port()
    };
    let shared = port(&dialler, PortUse::Reuse).await;
    assert_eq!(port(&dialler, PortUse::Reuse).await, shared, "those that only dial share a socket");
    let own = port(&dialler, PortUse::New).await;
    assert_ne!(own, shared);
    let (_, listening) = dialler.listen(ANY).await;
    assert_eq!(port(&dialler, PortUse::Reuse).await, socket_of(&listening).port());
    assert_ne!(port(&dialler, PortUse::New).await, socket_of(&listening).port());
}

#[tokio::test]
async fn a_peer_opens_as_many_streams_as_are_allowed() {
    let few = PathSettings { streams_max: 2, ..PathSettings::default() };
    let (dialler, (mut host, address)) = (Host::new(PathSettings::default()), Host::listening(few).await);
    let (mut near, mut far) = connect(&dialler, &mut host, &address).await;
    let _open = (open(&mut near, b"1").await, open(&mut near, b"2").await);
    let third = std::future::poll_fn(|cx| near.poll_outbound_unpin(cx));
    assert!(tokio::time::timeout(Duration::from_millis(50), third).await.is_err(), "a third waits");
    let mut first = accept(&mut far).await;
    assert_eq!(read(&mut first, 1).await, b"1");
}
