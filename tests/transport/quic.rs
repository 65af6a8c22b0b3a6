//! What only the QUIC link must do: addresses, limits, networks that fail.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use libp2p::Multiaddr;
use libp2p::identity::Keypair;
use libp2p::multiaddr::Protocol;
use ringfence::transport::endpoint::{PathSettingError, PathSettings};
use ringfence::transport::quic::{QuicLink, QuicSettings, StartError};
use ringfence::transport::{Lane, LinkError, LinkEvent};

use super::nodes::{End, PATIENCE, join, quic_node, quic_settings};
use super::proxy::Proxy;

async fn node() -> End {
    quic_node(quic_settings()).await
}

fn port(address: &Multiaddr) -> u16 {
    address.iter().find_map(|part| if let Protocol::Udp(port) = part { Some(port) } else { None }).unwrap()
}

fn listening(address: &str) -> QuicSettings {
    QuicSettings { listen: vec![address.parse().unwrap()], ..quic_settings() }
}

#[tokio::test]
async fn a_link_says_its_real_addresses() {
    let loopback = node().await;
    let address = loopback.address();
    assert!(address.to_string().starts_with("/ip4/127.0.0.1/udp/"), "{address}");
    assert_ne!(port(&address), 0);
    let mut everywhere = quic_node(listening("/ip4/0.0.0.0/udp/0/quic-v1")).await;
    let everywhere_addresses = everywhere.link.addresses();
    assert!(everywhere_addresses.iter().any(|address| address.to_string().starts_with("/ip4/127.0.0.1/")));
    for address in everywhere_addresses {
        assert!(!address.to_string().contains("0.0.0.0"), "{address}");
        assert!(address.to_string().ends_with(&everywhere.peer().to_string()), "{address}");
    }
    let mut dials_only = quic_node(QuicSettings { listen: Vec::new(), ..quic_settings() }).await;
    assert_eq!(dials_only.link.addresses(), Vec::new());
    join(&mut dials_only, &mut everywhere).await;
}

/// A socket that is bound to loopback can't reach beyond it: such a dial must use another. (On one
/// host it would get through all the same, so the test looks at where the dial came from; a host
/// without any other address has nothing to look at.)
#[tokio::test]
async fn a_link_on_loopback_dials_other_addresses_from_another_socket() {
    let is_loopback = |address: &Multiaddr| address.to_string().starts_with("/ip4/127.");
    let (near, mut far) = (node().await, quic_node(listening("/ip4/0.0.0.0/udp/0/quic-v1")).await);
    let Some(outside) = far.link.addresses().into_iter().find(|address| !is_loopback(address)) else { return };
    near.link.dial(outside).await.unwrap();
    match far.next().await {
        LinkEvent::Connected { address, .. } => assert!(!is_loopback(&address), "{address}"),
        other => panic!("expected Connected, got {other:?}"),
    }
}

#[tokio::test]
async fn what_cannot_be_honoured_stops_the_start() {
    let held = node().await;
    let taken = format!("/ip4/127.0.0.1/udp/{}/quic-v1", port(&held.address()));
    for address in [taken.as_str(), "/ip4/127.0.0.1/tcp/0", "/ip4/203.0.113.7/udp/0/quic-v1"] {
        match QuicLink::start(listening(address)).await {
            Err(StartError::Listen { address: named, .. }) => assert_eq!(named.to_string(), address),
            other => panic!("{address}: {:?}", other.map(|_| ())),
        }
    }
    let good = PathSettings::default();
    let keep_alive = PathSettings { keep_alive: good.idle_timeout, ..good.clone() };
    let idle = PathSettings { idle_timeout: Duration::MAX, ..good.clone() };
    let dial = PathSettings { handshake_timeout: Duration::ZERO, ..good.clone() };
    let streams = PathSettings { streams_max: 71, ..good };
    let of = |path| QuicSettings { path, ..quic_settings() };
    for (wrong, settings) in [
        ("keep_alive", of(keep_alive)),
        ("idle_timeout", of(idle)),
        ("handshake_timeout", of(dial)),
        ("streams_max", of(streams)),
        ("lanes", QuicSettings { lanes: 0, ..quic_settings() }),
        ("lanes", QuicSettings { lanes: 65, ..quic_settings() }),
        ("window_max", QuicSettings { window_max: 65_535, ..quic_settings() }),
    ] {
        match QuicLink::start(settings).await {
            Err(StartError::Setting(PathSettingError { name, .. })) => assert_eq!(name, wrong),
            other => panic!("{wrong}: {:?}", other.map(|_| ())),
        }
    }
}

#[tokio::test]
async fn a_link_that_is_shut_down_frees_its_port() {
    for connected in [false, true] {
        let (mut a, mut b) = (node().await, node().await);
        if connected {
            join(&mut a, &mut b).await;
        }
        let address = format!("/ip4/127.0.0.1/udp/{}/quic-v1", port(&a.address()));
        a.link.shutdown().await;
        let freed = tokio::time::timeout(PATIENCE, async {
            while QuicLink::start(listening(&address)).await.is_err() {
                tokio::task::yield_now().await;
            }
        });
        freed.await.expect("the port is free again");
    }
}

#[tokio::test]
async fn connections_that_come_in_are_limited() {
    let mut host = quic_node(QuicSettings { inbound_max: 1, ..quic_settings() }).await;
    let (mut first, mut second) = (node().await, node().await);
    join(&mut first, &mut host).await;
    assert!(matches!(second.link.dial(host.address()).await, Err(LinkError::Dial { .. })));
    second.expect_quiet();
    host.expect_quiet();
    // Its own dials don't count.
    join(&mut host, &mut second).await;
    second.link.disconnect(host.peer(), "make room");
    second.expect_disconnected(host.peer()).await;
    host.expect_disconnected(second.peer()).await;
    first.link.disconnect(host.peer(), "make room");
    first.expect_disconnected(host.peer()).await;
    host.expect_disconnected(first.peer()).await;
    let retried = tokio::time::timeout(PATIENCE, async { while second.link.dial(host.address()).await.is_err() {} });
    retried.await.expect("room again");
    host.expect_connected(second.peer()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_takes_no_events_any_more_ends_its_connections() {
    let (mut a, mut b) = (node().await, node().await);
    join(&mut a, &mut b).await;
    drop(b.events);
    a.link.send(b.link.local(), Lane::Data, Bytes::from_static(b"hear me")).await.unwrap();
    let reason = a.expect_disconnected(b.link.local()).await;
    assert!(reason.contains("takes no events"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_side_has_as_many_lanes_as_it_likes() {
    for (near, far) in [(1, 64), (3, 1), (64, 64)] {
        let of = |lanes| QuicSettings { lanes, ..quic_settings() };
        let (mut a, mut b) = (quic_node(of(near)).await, quic_node(of(far)).await);
        join(&mut a, &mut b).await;
        for n in 0..200_u8 {
            a.link.send(b.peer(), Lane::Data, Bytes::from(vec![n; 5_000])).await.unwrap();
            b.link.send(a.peer(), Lane::Reply, Bytes::from(vec![n; 50])).await.unwrap();
        }
        let (mut frames, mut replies) = (BTreeSet::new(), BTreeSet::new());
        for _ in 0..200 {
            let (lane, body) = b.expect_body(a.peer()).await;
            assert!(lane == Lane::Data && body.len() == 5_000 && frames.insert(body[0]));
            let (lane, body) = a.expect_body(b.peer()).await;
            assert!(lane == Lane::Reply && body.len() == 50 && replies.insert(body[0]));
        }
    }
}

/// Of a link that takes a silent peer for dead sooner: a busy machine is silent for a while too.
fn alert() -> QuicSettings {
    let QuicSettings { path, .. } = quic_settings();
    let (idle_timeout, keep_alive) = (Duration::from_secs(2), Duration::from_millis(100));
    QuicSettings { path: PathSettings { idle_timeout, keep_alive, ..path }, ..quic_settings() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_vanished_is_noticed_and_may_come_back() {
    let (mut a, mut b) = (quic_node(alert()).await, quic_node(alert()).await);
    let proxy = Proxy::before(&b.address()).await;
    for _ in 0..2 {
        a.link.dial(proxy.address()).await.unwrap();
        a.expect_connected(b.peer()).await;
        b.expect_connected(a.peer()).await;
        proxy.cut();
        for reason in [a.expect_disconnected(b.peer()).await, b.expect_disconnected(a.peer()).await] {
            assert!(reason.contains("timed out"), "{reason}");
        }
        proxy.heal();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_of_one_key_is_connected_beside_the_first() {
    let (key, mut host) = (Keypair::generate_ed25519(), node().await);
    let settings = || QuicSettings { identity: key.clone(), ..quic_settings() };
    let (mut first, mut second) = (quic_node(settings()).await, quic_node(settings()).await);
    for twin in [&mut first, &mut second] {
        join(twin, &mut host).await;
    }
    assert_ne!(first.peer(), second.peer());
    for twin in [&mut first, &mut second] {
        let name = Bytes::copy_from_slice(&twin.peer().start.to_le_bytes());
        host.link.send(twin.peer(), Lane::Data, name.clone()).await.unwrap();
        assert_eq!(twin.expect_body(host.peer()).await, (Lane::Data, name));
        twin.link.send(host.peer(), Lane::Control, Bytes::new()).await.unwrap();
        host.expect_body(twin.peer()).await;
    }
    first.link.shutdown().await;
    host.expect_disconnected(first.peer()).await;
    let lost = LinkError::NotConnected { peer: first.peer() };
    assert_eq!(host.link.try_send(first.peer(), Lane::Control, Bytes::new()), Err(lost));
    host.link.send(second.peer(), Lane::Control, Bytes::new()).await.unwrap();
    second.expect_body(host.peer()).await;
    host.expect_quiet();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_starts_again_is_reached_while_its_old_connection_dies() {
    let (key, mut host) = (Keypair::generate_ed25519(), quic_node(alert()).await);
    let settings = || QuicSettings { identity: key.clone(), ..alert() };
    let mut dead = quic_node(settings()).await;
    let proxy = Proxy::before(&host.address()).await;
    dead.link.dial(proxy.address()).await.unwrap();
    dead.expect_connected(host.peer()).await;
    host.expect_connected(dead.peer()).await;
    proxy.cut();
    let mut again = quic_node(settings()).await;
    join(&mut again, &mut host).await;
    host.link.send(again.peer(), Lane::Data, Bytes::from_static(b"welcome back")).await.unwrap();
    again.expect_body(host.peer()).await;
    let reason = host.expect_disconnected(dead.peer()).await;
    assert!(reason.contains("timed out"), "{reason}");
    again.expect_quiet();
}
