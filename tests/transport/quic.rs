//! What only the QUIC link must do: addresses, limits, peers that misbehave, networks that fail.

use std::time::Duration;

use bytes::Bytes;
use libp2p::Multiaddr;
use libp2p::identity::Keypair;
use libp2p::multiaddr::Protocol;
use ringfence::ids::Node;
use ringfence::transport::endpoint::{PathSettingError, PathSettings};
use ringfence::transport::quic::{QuicLink, QuicSettings, StartError};
use ringfence::transport::{Lane, LinkError, LinkEvent};

use super::nodes::{End, PATIENCE, join, quic_node, quic_settings};
use super::proxy::Proxy;
use super::rogue::{self, Script, accept, hello};

const CONTROL: &str = "/ringfence/control/1";
const DATA: &str = "/ringfence/data/1";

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
    let dial = PathSettings { handshake_timeout: Duration::ZERO, ..good };
    for (wrong, path) in [("keep_alive", keep_alive), ("idle_timeout", idle), ("handshake_timeout", dial)] {
        match QuicLink::start(QuicSettings { path, ..quic_settings() }).await {
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

/// Plays a script to a node and gives the reason of the disconnect.
async fn played(control: Vec<Vec<u8>>, data: Vec<Vec<u8>>) -> String {
    let mut victim = node().await;
    let key = rogue::deciding(victim.peer().peer);
    let peer = Node { peer: key.public().to_peer_id(), start: rogue::START };
    let script = vec![(CONTROL, control.concat()), (DATA, data.concat())];
    let _rogue = rogue::dial(key, victim.address(), script);
    victim.expect_connected(peer).await;
    let reason = victim.expect_disconnected(peer).await;
    victim.expect_quiet();
    // The victim is none the worse for it.
    join(&mut victim, &mut node().await).await;
    reason
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_on_a_lane_ends_the_connection_with_a_reason() {
    let too_long = (1_u32 << 30).to_le_bytes().to_vec();
    let long_note = u32::MAX.to_le_bytes().to_vec();
    let odd_note = [(1_u32 << 31 | 2).to_le_bytes().to_vec(), vec![9, 9]].concat();
    let start = || vec![hello(), accept()];
    let with = |bytes: &Vec<u8>| [start(), vec![bytes.clone()]].concat();
    for (control, data, expected) in [
        (with(&too_long), vec![], "Control lane: a body of 1073741824 bytes announced, 1048576 at most"),
        (start(), vec![too_long], "Data lane: a body of 1073741824 bytes announced, 67108864 at most"),
        (with(&long_note), vec![], "Control lane: a note of 2147483647 bytes announced, 1024 at most"),
        (with(&odd_note), vec![], "Control lane: a note that is none that is known"),
        (with(&hello()), vec![], "Control lane: a hello where a body or a farewell must come"),
        (start(), vec![accept()], "Data lane: an accept where a body or a farewell must come"),
    ] {
        assert_eq!(played(control, data).await, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_too_many_ends_the_connection() {
    let mut victim = node().await;
    let key = rogue::deciding(victim.peer().peer);
    let peer = key.public().to_peer_id();
    let mut script: Script = vec![(CONTROL, [hello(), accept()].concat()), (DATA, Vec::new())];
    script.extend((0..6).map(|_| (DATA, Vec::new())));
    closed(rogue::dial(key, victim.address(), script)).await;
    // The surplus may come before the connection is settled: then nobody hears of it.
    while let Some(event) = victim.events.try_recv() {
        match event {
            LinkEvent::Connected { .. } => {}
            LinkEvent::Disconnected { reason, .. } => assert_eq!(reason, "a second Data lane"),
            LinkEvent::Received { .. } => panic!("a body from {peer}"),
        }
    }
}

/// Waits until the victim has closed the connection.
async fn closed(mut rogue: tokio::task::JoinSet<()>) {
    let ended = tokio::time::timeout(PATIENCE, rogue.join_next()).await;
    ended.expect("the victim closes the connection").unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_instead_of_an_introduction_is_no_event() {
    let mut victim = node().await;
    for script in [
        vec![(CONTROL, accept()), (DATA, Vec::new())],
        vec![(CONTROL, vec![0xff; 100]), (DATA, Vec::new())],
        vec![(CONTROL, vec![0; 100]), (DATA, vec![0xff; 100])],
        vec![(CONTROL, hello()), (CONTROL, hello()), (DATA, Vec::new())],
        // Silence, until the deadline.
        vec![(CONTROL, hello()), (DATA, Vec::new())],
        vec![],
    ] {
        closed(rogue::dial(rogue::deciding(victim.peer().peer), victim.address(), script)).await;
        victim.expect_quiet();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_speaks_something_else_is_named_so() {
    let mut a = node().await;
    // It takes control and no data.
    let (address, _rogue) = rogue::listen(&[CONTROL]).await;
    match a.link.dial(address).await {
        Err(LinkError::Dial { why, .. }) => assert!(why.contains("does not speak /ringfence/data/1"), "{why}"),
        other => panic!("expected a refusal, got {other:?}"),
    }
    a.expect_quiet();
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

fn impatient() -> QuicSettings {
    let QuicSettings { path, .. } = quic_settings();
    let (idle_timeout, keep_alive) = (Duration::from_millis(600), Duration::from_millis(100));
    QuicSettings { path: PathSettings { idle_timeout, keep_alive, ..path }, ..quic_settings() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_vanished_is_noticed_and_may_come_back() {
    let (mut a, mut b) = (quic_node(impatient()).await, quic_node(impatient()).await);
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
    let (key, mut host) = (Keypair::generate_ed25519(), quic_node(impatient()).await);
    let settings = || QuicSettings { identity: key.clone(), ..impatient() };
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
