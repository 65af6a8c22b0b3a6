//! What only the network in memory can do: delays, cuts, kills.

use std::time::Duration;

use bytes::Bytes;
use libp2p::PeerId;
use ringfence::transport::memory::{MemoryNetwork, MemorySettings};
use ringfence::transport::{Lane, LinkError};

use super::nodes::{End, join};

const DELAY: Duration = Duration::from_millis(5);

fn node(network: &MemoryNetwork) -> End {
    let (link, events) = network.link();
    End { link, events }
}

fn delayed() -> MemoryNetwork {
    let dial_deadline = Duration::from_millis(100);
    MemoryNetwork::with_settings(MemorySettings { delay: DELAY, dial_deadline, ..MemorySettings::default() })
}

#[tokio::test]
async fn a_delay_delays_and_does_not_add_up() {
    let network = delayed();
    let (mut a, mut b) = (node(&network), node(&network));
    join(&mut a, &mut b).await;
    let started = ringfence::clock::now();
    for n in 0..100_u8 {
        a.link.send(b.peer(), Lane::Data, Bytes::from(vec![n])).await.unwrap();
    }
    for n in 0..100_u8 {
        assert_eq!(b.expect_body(a.peer()).await, (Lane::Data, Bytes::from(vec![n])));
    }
    let took = started.elapsed();
    assert!(took >= DELAY && took < DELAY * 50, "{took:?}");
}

#[tokio::test]
async fn frames_overtake_one_another_if_asked_and_the_seed_says_how() {
    let order = async |seed| {
        let network = MemoryNetwork::with_settings(MemorySettings { shuffle: Some(seed), ..MemorySettings::default() });
        let (mut a, mut b) = (node(&network), node(&network));
        join(&mut a, &mut b).await;
        for n in 0..50_u8 {
            for lane in [Lane::Control, Lane::Data, Lane::Reply] {
                a.link.try_send(b.peer(), lane, Bytes::from(vec![n])).unwrap();
            }
        }
        let mut order: [Vec<u8>; 3] = Default::default();
        for _ in 0..150 {
            let (lane, body) = b.expect_body(a.peer()).await;
            order[lane as usize].push(body[0]);
        }
        let [control, data, reply] = order;
        let sent: Vec<u8> = (0..50).collect();
        assert!(control == sent && reply == sent && data != sent);
        assert_eq!(data.iter().copied().collect::<std::collections::BTreeSet<_>>().len(), 50);
        data
    };
    assert_eq!(order(1).await, order(1).await);
    assert_ne!(order(1).await, order(2).await);
}

#[tokio::test]
async fn a_hop_can_have_a_delay_of_its_own() {
    let network = delayed();
    let (mut a, mut b) = (node(&network), node(&network));
    join(&mut a, &mut b).await;
    network.set_delay(a.peer(), b.peer(), Duration::from_millis(40));
    let started = ringfence::clock::now();
    b.link.send(a.peer(), Lane::Control, Bytes::new()).await.unwrap();
    a.expect_body(b.peer()).await;
    assert!(started.elapsed() >= Duration::from_millis(40));
}

#[tokio::test]
async fn a_cut_drops_silently_until_it_is_healed() {
    let network = delayed();
    let (mut a, mut b, c) = (node(&network), node(&network), node(&network));
    join(&mut a, &mut b).await;
    a.link.send(b.peer(), Lane::Data, Bytes::from_static(b"lost under way")).await.unwrap();
    network.cut(a.peer(), b.peer());
    a.link.send(b.peer(), Lane::Data, Bytes::from_static(b"lost")).await.unwrap();
    // The way takes as long as a dial's half: by the end of this one, everything would be there.
    assert!(a.link.dial(c.address()).await.is_ok());
    network.heal(b.peer(), a.peer());
    a.link.send(b.peer(), Lane::Data, Bytes::from_static(b"found")).await.unwrap();
    assert_eq!(b.expect_body(a.peer()).await, (Lane::Data, Bytes::from_static(b"found")));
}

#[tokio::test]
async fn a_cut_hides_an_end_and_stops_a_dial() {
    let network = delayed();
    let (mut a, mut b) = (node(&network), node(&network));
    join(&mut a, &mut b).await;
    network.cut(a.peer(), b.peer());
    a.link.disconnect(b.peer(), "no answer");
    a.expect_disconnected(b.peer()).await;
    match a.link.dial(b.address()).await {
        Err(LinkError::Dial { why, .. }) => assert!(why.contains("100 ms"), "{why}"),
        other => panic!("expected a time-out, got {other:?}"),
    }
    b.expect_quiet();
    network.heal(a.peer(), b.peer());
    b.expect_disconnected(a.peer()).await;
    join(&mut a, &mut b).await;
}

#[tokio::test]
async fn a_killed_link_is_gone_and_may_start_again() {
    let network = delayed();
    let (mut a, mut b) = (node(&network), node(&network));
    join(&mut a, &mut b).await;
    let peer = b.peer();
    network.kill(peer);
    let reason = a.expect_disconnected(peer).await;
    assert!(reason.contains("killed"), "{reason}");
    assert_eq!(b.link.send(a.peer(), Lane::Data, Bytes::new()).await, Err(LinkError::Closed));
    let (link, events) = network.link_as(peer.peer);
    let mut again = End { link, events };
    join(&mut a, &mut again).await;
    drop(b);
    assert_ne!(again.peer(), peer);
    let lost = LinkError::NotConnected { peer };
    assert_eq!(a.link.try_send(peer, Lane::Data, Bytes::from_static(b"for the dead")), Err(lost));
    a.link.send(again.peer(), Lane::Data, Bytes::from_static(b"x")).await.unwrap();
    again.expect_body(a.peer()).await;
}

#[tokio::test]
async fn a_stranger_at_an_address_is_named() {
    let network = MemoryNetwork::new();
    let a = node(&network);
    let nobody = format!("/memory/99/p2p/{}", PeerId::random()).parse().unwrap();
    match a.link.dial(nobody).await {
        Err(LinkError::Dial { why, .. }) => assert!(why.contains("nobody listens"), "{why}"),
        other => panic!("expected a refusal, got {other:?}"),
    }
}
