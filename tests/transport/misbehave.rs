//! Peers that break the rules of a QUIC link: cut off by name, at no cost to others.

use std::time::Duration;

use bytes::Bytes;
use libp2p::identity::Keypair;
use ringfence::ids::Node;
use ringfence::transport::quic::QuicSettings;
use ringfence::transport::{Lane, LinkError, LinkEvent};
use tokio::task::JoinSet;

use super::nodes::{End, PATIENCE, STALL, impatient, join, quic_node, quic_settings, until};
use super::rogue::{
    self, CONTROL, CURRENT, DATA, LANES, Script, accept, body, hello, introduction, lane, note, ready, returned,
};

const NOTE: u32 = 1 << 31;
const REPLY: u32 = 1 << 30;

/// What the link under test bears.
const WINDOW_MAX: u64 = 64 << 10;

fn settings() -> QuicSettings {
    QuicSettings { lanes: LANES, window_max: WINDOW_MAX, ..quic_settings() }
}

async fn victim() -> End {
    quic_node(settings()).await
}

/// A rogue that plays a script to a node, and its name.
fn play(victim: &End, script: Script) -> (Node, JoinSet<()>) {
    let key = rogue::deciding(victim.peer().peer);
    let peer = Node { peer: key.public().to_peer_id(), start: rogue::START };
    (peer, rogue::dial(key, victim.address(), script))
}

/// A peer with one data lane that introduced itself, and what it says then.
fn script(control: &[u8], data: &[u8]) -> Script {
    vec![(CONTROL, [&introduction(), control].concat()), (DATA, [&lane(0), data].concat())]
}

/// Plays to a node, beside a hop that must not suffer, and gives the reason of the disconnect.
async fn played(script: Script) -> String {
    played_to(victim().await, script).await
}

async fn played_to(mut victim: End, script: Script) -> String {
    let mut other = quic_node(quic_settings()).await;
    join(&mut other, &mut victim).await;
    let (peer, _rogue) = play(&victim, script);
    victim.expect_connected(peer).await;
    let reason = victim.expect_disconnected(peer).await;
    victim.expect_quiet();
    other.expect_quiet();
    for n in 0..9 {
        other.link.send(victim.peer(), Lane::Data, Bytes::from(vec![n; 9])).await.unwrap();
        victim.expect_body(other.peer()).await;
    }
    reason
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_on_a_lane_ends_the_connection_with_a_reason() {
    let prefix = |prefix: u32| prefix.to_le_bytes().to_vec();
    let odd_note = [prefix(NOTE | 2), vec![9, 9]].concat();
    let after = note(4, &[0]);
    for (control, data, expected) in [
        (prefix(1 << 28), vec![], "control lane: a body of 268435456 bytes announced, 1048576 at most"),
        (vec![], prefix(1 << 28), "data lane 0: a body of 268435456 bytes announced, 67108864 at most"),
        (vec![], prefix(REPLY | 1 << 28), "data lane 0: a body of 268435456 bytes announced, 8388608 at most"),
        (prefix(u32::MAX), vec![], "control lane: a note of 2147483647 bytes announced, 1024 at most"),
        (odd_note, vec![], "control lane: a note that is none that is known"),
        (hello(1), vec![], "control lane: a hello where a body or a farewell must come"),
        (ready(), vec![], "control lane: a ready where a body or a farewell must come"),
        (after.clone(), vec![], "control lane: an after where a body or a farewell must come"),
        (vec![], accept(), "data lane 0: an accept where a body or a farewell must come"),
        (vec![], lane(0), "data lane 0: a lane's number where a body or a farewell must come"),
        (vec![], returned(0), "data lane 0: a return of credit where a body or a farewell must come"),
        (vec![], [after.clone(), after].concat(), "data lane 0: an after where a body or a farewell must come"),
        (returned(1), vec![], "credit for 1 bytes returned, but 0 were sent"),
    ] {
        assert_eq!(played(script(&control, &data)).await, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_stalls_in_the_middle_of_a_body_is_cut_off() {
    let cut_off = async |script| played_to(quic_node(impatient(settings())).await, script).await;
    let (waited, half) = (STALL.as_millis(), [1_000_u32.to_le_bytes().to_vec(), vec![0; 500]].concat());
    let reason = cut_off(script(&[], &half)).await;
    assert_eq!(reason, format!("data lane 0: nothing came for {waited} ms in the middle of 504 of 1004 bytes"));
    let reason = cut_off(script(&half, &[])).await;
    assert_eq!(reason, format!("control lane: nothing came for {waited} ms in the middle of 504 of 1004 bytes"));
    let reason = cut_off(script(&[], &[7])).await;
    assert_eq!(reason, format!("data lane 0: nothing came for {waited} ms in the middle of 1 of 4 bytes"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_says_nothing_between_bodies_stays() {
    let mut victim = quic_node(impatient(settings())).await;
    let (peer, _rogue) = play(&victim, script(&body(0, 3), &body(0, 3)));
    victim.expect_connected(peer).await;
    for _ in 0..2 {
        victim.expect_body(peer).await;
    }
    tokio::time::sleep(STALL * 3).await;
    victim.expect_quiet();
    assert_eq!(victim.link.try_send(peer, Lane::Control, Bytes::new()), Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_sends_without_credit_is_cut_off() {
    let mut victim = victim().await;
    let (peer, _rogue) = play(&victim, script(&[], &body(0, 40_000).repeat(3)));
    // Nobody takes anything, until it is over.
    until("the connection ends", || {
        let sent = victim.link.try_send(peer, Lane::Control, Bytes::new());
        matches!(sent, Err(LinkError::NotConnected { .. })) && victim.events.try_recv().is_some()
    })
    .await;
    for _ in 0..2 {
        assert_eq!(victim.expect_body(peer).await, (Lane::Data, Bytes::from(vec![0; 40_000])));
    }
    let reason = victim.expect_disconnected(peer).await;
    assert_eq!(reason, "data lane 0: 120012 bytes of frames sent without credit: 80008 at most may be under way");
}

/// Replies and control need no credit: who sends more than is taken waits, and holds up no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_sends_more_than_is_taken_holds_up_no_other() {
    const FLOOD: usize = 20_000;
    let mut victim = victim().await;
    let (peer, _rogue) = play(&victim, script(&body(0, 8).repeat(FLOOD), &body(REPLY, 8).repeat(FLOOD)));
    victim.expect_connected(peer).await;
    tokio::time::sleep(STALL).await;
    let other = quic_node(quic_settings()).await;
    let dialled = other.link.dial(victim.address()).await.unwrap();
    assert_eq!(dialled, victim.peer());
    other.link.send(victim.peer(), Lane::Data, Bytes::from_static(b"hear me")).await.unwrap();
    // Long enough for the frame to come: there is room for it.
    tokio::time::sleep(STALL).await;
    let (mut before, mut flood) = (0, 0);
    while flood < 2 * FLOOD {
        match victim.next().await {
            LinkEvent::Received { peer: from, .. } if from == peer => flood += 1,
            LinkEvent::Received { peer: from, .. } => {
                assert_eq!(from, other.peer());
                before = flood;
            }
            LinkEvent::Connected { peer: from, .. } => assert_eq!(from, other.peer()),
            gone @ LinkEvent::Disconnected { .. } => panic!("{gone:?}"),
        }
    }
    assert!((1..=256).contains(&before), "the frame came behind {before} bodies of the flood");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_too_many_ends_the_connection() {
    let mut victim = victim().await;
    let mut script = script(&[], &[]);
    script.extend((0..6).map(|_| (DATA, lane(0))));
    let (peer, rogue) = play(&victim, script);
    closed(rogue).await;
    // The surplus may come before the connection is settled: then nobody hears of it.
    while let Some(event) = victim.events.try_recv() {
        match event {
            LinkEvent::Connected { .. } => {}
            LinkEvent::Disconnected { reason, .. } => {
                assert_eq!(reason, "the peer opened more than the 1 data lanes that it may");
            }
            LinkEvent::Received { .. } => panic!("a body from {peer}"),
        }
    }
}

/// Waits until the victim has closed the connection.
async fn closed(mut rogue: JoinSet<()>) {
    let ended = tokio::time::timeout(PATIENCE, rogue.join_next()).await;
    ended.expect("the victim closes the connection").unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_instead_of_an_introduction_is_no_event() {
    let mut victim = victim().await;
    for script in [
        vec![(CONTROL, accept()), (DATA, lane(0))],
        vec![(CONTROL, vec![0xff; 100]), (DATA, lane(0))],
        vec![(CONTROL, vec![0; 100]), (DATA, vec![0xff; 100])],
        vec![(CONTROL, introduction()), (DATA, vec![0xff; 100])],
        vec![(CONTROL, introduction()), (CONTROL, introduction())],
        // Silence, until the deadline.
        vec![(CONTROL, hello(1)), (DATA, lane(0))],
        vec![(CONTROL, introduction()), (DATA, vec![])],
        vec![(CONTROL, introduction())],
        vec![],
    ] {
        closed(play(&victim, script).1).await;
        victim.expect_quiet();
    }
}

/// Dials a rogue and gives the reason why that fails.
async fn refused(takes: rogue::Takes, script: Script) -> String {
    let mut victim = victim().await;
    let (address, _rogue) = rogue::listen(takes, rogue::deciding(victim.peer().peer), script).await;
    let dialled = victim.link.dial(address.clone()).await;
    victim.expect_quiet();
    match dialled {
        Err(LinkError::Dial { address: named, why }) if named == address => why,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_introduction_that_does_not_fit_is_refused_with_a_reason() {
    let control = |bytes: Vec<u8>| vec![(CONTROL, bytes), (DATA, lane(0))];
    let lanes = |count, numbers: &[u64]| {
        let mut script = vec![(CONTROL, [hello(count), ready(), accept()].concat())];
        script.extend(numbers.iter().map(|number| (DATA, lane(*number))));
        script
    };
    for (script, expected) in [
        (control(accept()), "control lane: an accept where a hello must come"),
        (control(body(0, 3)), "control lane: a body where a hello must come"),
        (control(hello(0)), "the peer announced 0 data lanes: must be 1 to 64"),
        (control(hello(65)), "the peer announced 65 data lanes: must be 1 to 64"),
        (control(note(1, &[7, 1, 1, 1, 1])), "the peer lets 1 bytes of frames be under way: must be 65536 or more"),
        (control([hello(1), note(6, &[2])].concat()), "the peer took 2 data lanes, but 3 were announced"),
        (control([hello(1), accept()].concat()), "control lane: an accept where a ready must come"),
        (control([hello(1), ready(), ready()].concat()), "control lane: a ready where an accept must come"),
        (lanes(1, &[1]), "the peer opened data lane 1, but announced 1, numbered from 0"),
        (lanes(1, &[u64::MAX]), "the peer opened data lane 18446744073709551615, but announced 1, numbered from 0"),
        (lanes(2, &[1, 1]), "the peer opened data lane 1 twice"),
        (control([farewell("not you")].concat()), "the peer closed the connection: not you"),
        (
            // One after the other, with what is to be heard in between missing.
            vec![(CONTROL, introduction()), (CONTROL, introduction())],
            "the peer opened a second control lane",
        ),
        (vec![(CONTROL, introduction()), (DATA, body(0, 1))], "data lane: a body where a lane's number must come"),
    ] {
        assert_eq!(refused(CURRENT, script).await, expected);
    }
    for silence in [vec![(CONTROL, hello(1))], vec![]] {
        let why = refused(CURRENT, silence).await;
        // The dial has the same deadline as the introduction.
        let words = ["no answer within 2000 ms", "the peer did not introduce itself within 2000 ms"];
        assert!(words.contains(&why.as_str()), "{why}");
    }
}

fn farewell(reason: &str) -> Vec<u8> {
    [&(NOTE | (1 + reason.len() as u32)).to_le_bytes()[..], &[3], reason.as_bytes()].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_speaks_something_else_is_named_so() {
    let why = refused(&[CONTROL], Vec::new()).await;
    assert!(why.contains("does not speak /ringfence/data/2"), "{why}");
    let why = refused(&[], Vec::new()).await;
    assert!(why.contains("does not speak /ringfence/control/2"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_of_an_older_version_is_named_so_and_told() {
    const OLD: rogue::Takes = &["/ringfence/control/1", "/ringfence/data/1"];
    let script = || vec![(OLD[0], note(1, &[7, 1, 1])), (OLD[1], Vec::new())];
    let words = "the peer speaks /ringfence/control/1 and this side /ringfence/control/2: upgrade the peer";
    assert_eq!(refused(OLD, script()).await, words);
    let mut victim = victim().await;
    let (rogue, heard) = rogue::dial_as(OLD, Keypair::generate_ed25519(), victim.address(), script());
    closed(rogue).await;
    assert_eq!(*heard.lock().unwrap(), farewell(words));
    victim.expect_quiet();
}

/// What a slow reader costs: it returns no credit, and the frames wait with their sender.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_returns_no_credit_gets_no_more_than_the_window() {
    let victim = victim().await;
    let (peer, _rogue) = play(&victim, script(&[], &[]));
    until("the peer is connected", || victim.link.try_send(peer, Lane::Control, Bytes::new()).is_ok()).await;
    for _ in 0..20 {
        victim.link.send(peer, Lane::Data, Bytes::from(vec![0; 20_000])).await.unwrap();
    }
    let sent = || victim.link.hop_stats(peer).unwrap();
    until("the window is full", || sent().in_flight == 3 * 20_004).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let stats = sent();
    assert_eq!((stats.in_flight, stats.window, stats.queued), (3 * 20_004, WINDOW_MAX, 16));
}
