//! The contract of a link, on every implementation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use libp2p::PeerId;
use ringfence::ids::Node;
use ringfence::transport::{
    BODY_BYTES_MAX, CONTROL_BYTES_MAX, Lane, LinkError, LinkEvent, REPLY_BYTES_MAX, SEND_QUEUE_MAX,
};

use super::nodes::{Network, STALL, join, until};

const LANES: [Lane; 3] = [Lane::Control, Lane::Data, Lane::Reply];

macro_rules! contract {
    ($($rule:ident),* $(,)?) => {
        mod memory {
            use super::Network;
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $rule() {
                super::$rule(Network::memory()).await;
            })*
        }
        mod quic {
            use super::Network;
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $rule() {
                super::$rule(Network::Quic).await;
            })*
        }
    };
}

contract!(
    bodies_arrive_whole_and_control_in_order,
    replies_wait_for_no_frames,
    bodies_up_to_the_limit_arrive_and_longer_ones_are_refused,
    empty_bodies_arrive,
    a_greeting_on_control_is_heard_before_data,
    dialling_at_once_from_both_sides_gives_one_connection,
    dialling_a_connected_peer_returns_at_once,
    a_dial_proves_who_answers,
    a_link_does_not_dial_itself,
    a_dial_to_nobody_fails,
    a_connection_can_be_made_anew,
    both_sides_may_dial_anew_after_a_disconnect,
    a_peer_that_does_not_read_stalls_the_sender_only,
    control_is_delivered_before_the_connection_closes,
    a_disconnect_says_why,
    a_shut_down_peer_is_noticed,
    a_link_that_is_shut_down_refuses,
    sends_to_strangers_are_refused,
    many_connections_leave_no_task_behind,
);

fn numbered(n: u32, bytes: usize) -> Bytes {
    let mut body = vec![0_u8; bytes.max(4)];
    body[..4].copy_from_slice(&n.to_le_bytes());
    Bytes::from(body)
}

fn number(body: &Bytes) -> u32 {
    u32::from_le_bytes(body[..4].try_into().unwrap())
}

async fn bodies_arrive_whole_and_control_in_order(network: Network) {
    const COUNT: u32 = 3000;
    let (a, mut b) = network.pair().await;
    let size = |lane, n: u32| match lane {
        Lane::Control => 4 + n as usize % 90,
        Lane::Data => 4 + (n as usize * 37) % 30_000,
        Lane::Reply => 4 + n as usize % 700,
    };
    let mut senders = Vec::new();
    for lane in LANES {
        let (sender, to) = (Arc::clone(&a.link), b.peer());
        senders.push(tokio::spawn(async move {
            for n in 0..COUNT {
                sender.send(to, lane, numbered(n, size(lane, n))).await.unwrap();
            }
        }));
    }
    let mut seen = BTreeMap::from(LANES.map(|lane| (lane, BTreeSet::new())));
    while seen.values().any(|seen| seen.len() < COUNT as usize) {
        let (lane, body) = b.expect_body(a.peer()).await;
        let (n, seen) = (number(&body), seen.get_mut(&lane).unwrap());
        assert_eq!(body.len(), size(lane, n), "{lane:?} {n}");
        assert!(lane != Lane::Control || n as usize == seen.len(), "control is in order");
        assert!(n < COUNT && seen.insert(n), "{lane:?} {n} came twice");
    }
    for sender in senders {
        sender.await.unwrap();
    }
    b.expect_quiet();
}

async fn bodies_up_to_the_limit_arrive_and_longer_ones_are_refused(network: Network) {
    let (a, mut b) = network.pair().await;
    let pattern = |bytes: usize| Bytes::from((0..bytes).map(|i| (i * 31 % 251) as u8).collect::<Vec<_>>());
    for (lane, bytes) in [
        (Lane::Data, 16 << 20),
        (Lane::Control, CONTROL_BYTES_MAX as usize),
        (Lane::Reply, REPLY_BYTES_MAX as usize),
        (Lane::Data, BODY_BYTES_MAX as usize),
    ] {
        let body = pattern(bytes);
        a.link.send(b.peer(), lane, body.clone()).await.unwrap();
        let (got_lane, got) = b.expect_body(a.peer()).await;
        assert_eq!(got_lane, lane);
        assert!(got == body, "{bytes} bytes differ");
    }
    let limits = [(Lane::Control, CONTROL_BYTES_MAX), (Lane::Data, BODY_BYTES_MAX), (Lane::Reply, REPLY_BYTES_MAX)];
    for (lane, limit) in limits {
        let body = Bytes::from(vec![0; limit as usize + 1]);
        let refused = Err(LinkError::TooLong { got: limit as usize + 1, limit, lane });
        assert_eq!(a.link.send(b.peer(), lane, body.clone()).await, refused);
        assert_eq!(a.link.try_send(b.peer(), lane, body), refused);
    }
    b.expect_quiet();
}

async fn empty_bodies_arrive(network: Network) {
    let (a, mut b) = network.pair().await;
    for lane in LANES {
        a.link.send(b.peer(), lane, Bytes::new()).await.unwrap();
        assert_eq!(b.expect_body(a.peer()).await, (lane, Bytes::new()));
    }
}

async fn a_greeting_on_control_is_heard_before_data(network: Network) {
    const GREETINGS: u32 = 5;
    let (mut a, mut b) = (network.node().await, network.node().await);
    for turn in 0..20 {
        let data = if turn % 2 == 0 { Lane::Data } else { Lane::Reply };
        join(&mut a, &mut b).await;
        for n in 0..GREETINGS {
            a.link.try_send(b.peer(), Lane::Control, numbered(n, 200_000)).unwrap();
        }
        a.link.try_send(b.peer(), data, numbered(GREETINGS, 4)).unwrap();
        for n in 0..=GREETINGS {
            let lane = if n < GREETINGS { Lane::Control } else { data };
            let (got_lane, body) = b.expect_body(a.peer()).await;
            assert_eq!((got_lane, number(&body)), (lane, n));
        }
        a.link.disconnect(b.peer(), "again");
        a.expect_disconnected(b.peer()).await;
        b.expect_disconnected(a.peer()).await;
    }
}

/// The peer takes nothing: frames wait with their sender. Replies and control go past them.
async fn replies_wait_for_no_frames(network: Network) {
    const FRAMES: u32 = 200;
    let (a, mut b) = network.pair().await;
    for n in 0..FRAMES {
        a.link.try_send(b.peer(), Lane::Data, numbered(n, 100_000)).unwrap();
    }
    for n in 0..20 {
        a.link.try_send(b.peer(), Lane::Reply, numbered(n, 100)).unwrap();
        a.link.try_send(b.peer(), Lane::Control, numbered(n, 100)).unwrap();
    }
    let (mut frames, mut before) = (0, Vec::new());
    while frames < FRAMES || before.len() < 40 {
        match b.expect_body(a.peer()).await.0 {
            Lane::Data => frames += 1,
            Lane::Control | Lane::Reply => before.push(frames),
        }
    }
    if let Some(stats) = a.link.hop_stats(b.peer()) {
        assert!(before.iter().all(|before| *before < FRAMES / 2), "frames in front of replies: {before:?}");
        assert!(stats.rate > 0 && stats.rtt_min.is_some() && stats.queued == 0, "{stats:?}");
    }
}

async fn dialling_at_once_from_both_sides_gives_one_connection(network: Network) {
    for _ in 0..20 {
        let (mut a, mut b) = (network.node().await, network.node().await);
        let (to_a, to_b) = (a.address(), b.address());
        let (near, far) = tokio::join!(a.link.dial(to_b), b.link.dial(to_a));
        assert_eq!((near, far), (Ok(b.peer()), Ok(a.peer())));
        let a_dialled = a.expect_connected(b.peer()).await;
        let b_dialled = b.expect_connected(a.peer()).await;
        assert!(a_dialled != b_dialled, "both settled on the same connection");
        for n in 0..10 {
            a.link.send(b.peer(), Lane::Data, numbered(n, 10)).await.unwrap();
            b.link.send(a.peer(), Lane::Data, numbered(n, 10)).await.unwrap();
        }
        let (mut to_a, mut to_b) = (BTreeSet::new(), BTreeSet::new());
        for _ in 0..10 {
            to_a.insert(number(&a.expect_body(b.peer()).await.1));
            to_b.insert(number(&b.expect_body(a.peer()).await.1));
        }
        assert_eq!((&to_a, &to_b), (&(0..10).collect(), &to_a));
        a.expect_quiet();
        b.expect_quiet();
        a.link.shutdown().await;
        b.expect_disconnected(a.peer()).await;
        b.link.shutdown().await;
    }
}

async fn dialling_a_connected_peer_returns_at_once(network: Network) {
    let (mut a, mut b) = network.pair().await;
    assert_eq!(a.link.dial(b.address()).await, Ok(b.peer()));
    assert_eq!(b.link.dial(a.address()).await, Ok(a.peer()));
    a.expect_quiet();
    b.expect_quiet();
}

async fn a_dial_proves_who_answers(network: Network) {
    let (mut a, b) = (network.node().await, network.node().await);
    let stranger = PeerId::random();
    let mut address = b.address();
    address.pop();
    let wrong = address.clone().with_p2p(stranger).unwrap();
    match a.link.dial(wrong.clone()).await {
        Err(LinkError::Dial { address, why }) => {
            assert_eq!(address, wrong);
            assert!(why.contains(&stranger.to_string()) && why.contains(&b.peer().to_string()), "{why}");
        }
        other => panic!("expected a refusal, got {other:?}"),
    }
    match a.link.dial(address.clone()).await {
        Err(LinkError::Dial { why, .. }) => assert!(why.contains("/p2p/"), "{why}"),
        other => panic!("expected a refusal, got {other:?}"),
    }
    a.expect_quiet();
}

async fn a_link_does_not_dial_itself(network: Network) {
    let a = network.node().await;
    match a.link.dial(a.address()).await {
        Err(LinkError::Dial { why, .. }) => assert!(why.contains("own address"), "{why}"),
        other => panic!("expected a refusal, got {other:?}"),
    }
}

async fn a_dial_to_nobody_fails(network: Network) {
    let (a, b) = (network.node().await, network.node().await);
    let address = b.address();
    b.link.shutdown().await;
    assert!(matches!(a.link.dial(address).await, Err(LinkError::Dial { .. })));
}

async fn a_connection_can_be_made_anew(network: Network) {
    let (mut a, mut b) = (network.node().await, network.node().await);
    for n in 0..10 {
        join(&mut a, &mut b).await;
        a.link.send(b.peer(), Lane::Data, numbered(n, 8)).await.unwrap();
        assert_eq!(number(&b.expect_body(a.peer()).await.1), n);
        let (near, far) = if n % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
        near.link.disconnect(far.peer(), "once more");
        near.expect_disconnected(far.peer()).await;
        far.expect_disconnected(near.peer()).await;
    }
}

/// The dial may overtake the news of the disconnect: the other side must not take the new
/// connection for a copy of the old one.
async fn both_sides_may_dial_anew_after_a_disconnect(network: Network) {
    let (mut a, mut b) = network.pair().await;
    for n in 0..20 {
        let (near, far) = if n % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
        near.link.disconnect(far.peer(), "anew");
        assert_eq!(near.link.dial(far.address()).await, Ok(far.peer()));
        near.expect_disconnected(far.peer()).await;
        near.expect_connected(far.peer()).await;
        far.expect_disconnected(near.peer()).await;
        far.expect_connected(near.peer()).await;
        far.link.send(near.peer(), Lane::Data, numbered(n, 8)).await.unwrap();
        assert_eq!(number(&near.expect_body(far.peer()).await.1), n);
    }
    a.expect_quiet();
    b.expect_quiet();
}

async fn a_peer_that_does_not_read_stalls_the_sender_only(network: Network) {
    let (network, mut a, mut b) = network.impatient_pair().await;
    let mut c = network.node().await;
    join(&mut a, &mut c).await;
    let body = Bytes::from(vec![7; 1 << 20]);
    let mut sent = 0_usize;
    let stalled = loop {
        match a.link.send(b.peer(), Lane::Data, body.clone()).await {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 10_000, "the sender was never held back");
    };
    let waited_ms = STALL.as_millis() as u64;
    assert_eq!(stalled, LinkError::Stalled { peer: b.peer(), waited_ms });
    assert_eq!(
        a.link.try_send(b.peer(), Lane::Data, body.clone()),
        Err(LinkError::Stalled { peer: b.peer(), waited_ms: 0 })
    );
    assert!(sent >= SEND_QUEUE_MAX);
    // Neither the other peer nor the other lane's queue is held up.
    a.link.send(c.peer(), Lane::Data, numbered(1, 4)).await.unwrap();
    assert_eq!(number(&c.expect_body(a.peer()).await.1), 1);
    a.link.send(b.peer(), Lane::Control, numbered(2, 4)).await.unwrap();
    // Once the peer reads again, everything that was queued arrives.
    let (mut bodies, mut control) = (0, 0);
    while bodies < sent || control < 1 {
        match b.expect_body(a.peer()).await {
            (Lane::Data, got) => {
                assert!(got == body);
                bodies += 1;
            }
            (Lane::Control, got) => {
                assert_eq!(number(&got), 2);
                control += 1;
            }
            (Lane::Reply, got) => panic!("a reply of {} bytes", got.len()),
        }
    }
    b.expect_quiet();
}

async fn control_is_delivered_before_the_connection_closes(network: Network) {
    let (mut a, mut b) = (network.node().await, network.node().await);
    for _ in 0..10 {
        join(&mut a, &mut b).await;
        for n in 0..50 {
            b.link.try_send(a.peer(), Lane::Control, numbered(n, 900)).unwrap();
        }
        b.link.disconnect(a.peer(), "refused: another model");
        for n in 0..50 {
            assert_eq!(number(&a.expect_body(b.peer()).await.1), n);
        }
        let reason = a.expect_disconnected(b.peer()).await;
        assert!(reason.contains("refused: another model"), "{reason}");
        b.expect_disconnected(a.peer()).await;
    }
}

async fn a_disconnect_says_why(network: Network) {
    let (mut a, mut b) = network.pair().await;
    a.link.disconnect(b.peer(), "wrong numerics id");
    assert_eq!(a.expect_disconnected(b.peer()).await, "wrong numerics id");
    let reason = b.expect_disconnected(a.peer()).await;
    assert!(reason.contains("the peer closed") && reason.contains("wrong numerics id"), "{reason}");
    let body = numbered(0, 4);
    assert_eq!(a.link.send(b.peer(), Lane::Data, body.clone()).await, Err(LinkError::NotConnected { peer: b.peer() }));
    assert_eq!(b.link.try_send(a.peer(), Lane::Data, body), Err(LinkError::NotConnected { peer: a.peer() }));
    a.expect_quiet();
    b.expect_quiet();
}

async fn a_shut_down_peer_is_noticed(network: Network) {
    let (a, mut b) = network.pair().await;
    let mut c = network.node().await;
    b.link.dial(c.address()).await.unwrap();
    b.expect_connected(c.peer()).await;
    c.expect_connected(b.peer()).await;
    let started = ringfence::clock::now();
    a.link.shutdown().await;
    let reason = b.expect_disconnected(a.peer()).await;
    assert!(reason.contains("shut down"), "{reason}");
    assert!(ringfence::clock::now() - started < std::time::Duration::from_secs(2), "noticed by a time-out only");
    // A link that is dropped without a word.
    let gone = c.peer();
    drop(c);
    b.expect_disconnected(gone).await;
}

async fn a_link_that_is_shut_down_refuses(network: Network) {
    let (mut a, b) = network.pair().await;
    a.link.shutdown().await;
    a.link.shutdown().await;
    let body = numbered(0, 4);
    assert_eq!(a.link.send(b.peer(), Lane::Data, body.clone()).await, Err(LinkError::Closed));
    assert_eq!(a.link.try_send(b.peer(), Lane::Data, body), Err(LinkError::Closed));
    assert_eq!(a.link.dial(b.address()).await, Err(LinkError::Closed));
    assert_eq!(a.link.addresses(), Vec::new());
    a.link.disconnect(b.peer(), "nothing to do");
    // What is left ends: the owner isn't left waiting.
    while let Some(event) = tokio::time::timeout(super::nodes::PATIENCE, a.events.recv()).await.unwrap() {
        assert!(matches!(event, LinkEvent::Disconnected { .. }), "{event:?}");
    }
}

async fn sends_to_strangers_are_refused(network: Network) {
    let a = network.node().await;
    let peer = Node::random();
    assert_eq!(a.link.send(peer, Lane::Data, Bytes::new()).await, Err(LinkError::NotConnected { peer }));
    assert_eq!(a.link.try_send(peer, Lane::Control, Bytes::new()), Err(LinkError::NotConnected { peer }));
    a.link.disconnect(peer, "nobody");
}

async fn many_connections_leave_no_task_behind(network: Network) {
    let (mut a, mut b) = (network.node().await, network.node().await);
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    for _ in 0..3 {
        join(&mut a, &mut b).await;
        a.link.disconnect(b.peer(), "warm");
        a.expect_disconnected(b.peer()).await;
        b.expect_disconnected(a.peer()).await;
    }
    let before = tasks();
    for _ in 0..100 {
        join(&mut a, &mut b).await;
        a.link.send(b.peer(), Lane::Data, numbered(3, 2048)).await.unwrap();
        b.expect_body(a.peer()).await;
        b.link.disconnect(a.peer(), "done");
        a.expect_disconnected(b.peer()).await;
        b.expect_disconnected(a.peer()).await;
    }
    until("the tasks of closed connections are gone", || tasks() <= before).await;
}
