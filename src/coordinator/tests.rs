//! The loop's state called as the loop calls it: what a tail says in a view that is over.

use std::sync::{Arc, PoisonError};

use tokio::sync::mpsc;

use crate::clock;
use crate::config::{Admit, CoordinatorSettings};
use crate::coordinator::durable::LogGate;
use crate::coordinator::handle::{Command, Coordinator};
use crate::coordinator::job::ModelFacts;
use crate::coordinator::run::{ModelShape, Shell};
use crate::ids::{Epoch, Node, Position, SessionId, TokenId, View, WireEncoding};
use crate::proto::codec::{encode_control, encode_reply};
use crate::proto::control::{Control, Hello, Offer, Role};
use crate::proto::frame::{Answer, Reply};
use crate::transport::memory::MemoryNetwork;
use crate::transport::{Lane, Link, LinkEvent};

const DIGEST: [u8; 32] = [7; 32];

/// A coordinator of a toy model of six layers, before its first event.
pub(crate) fn shell(link: Arc<dyn Link>, gate: LogGate) -> (Coordinator, mpsc::Receiver<Command>, Shell) {
    let model = ModelFacts { name: "toy".to_owned(), vocab: 8, eos: Vec::new(), context: 64 };
    let shape = ModelShape { layers: 6, hc: 1, dim: 1, probe_token: TokenId(0), digest: DIGEST };
    let settings = CoordinatorSettings { admit: Admit::Anyone, ..CoordinatorSettings::default() };
    Shell::new((link, model, shape), settings, gate)
}

fn tells(shell: &mut Shell, peer: Node, message: &Control) {
    let body = encode_control(message).unwrap();
    shell.handle_link(LinkEvent::Received { peer, lane: Lane::Control, body });
    shell.drain();
}

/// The tail answers the one position of a probe.
fn answers(shell: &mut Shell, peer: Node, view: View, session: SessionId) {
    let (epoch, pos) = (Epoch(0), Position(0));
    let answers = vec![Answer { token: TokenId(3), scores: None }];
    let reply = Reply { view, session, epoch, pos, len: 1, answers, draft: None };
    let body = encode_reply(&reply).unwrap();
    shell.handle_link(LinkEvent::Received { peer, lane: Lane::Reply, body });
    shell.drain();
}

fn went_round(shell: &Shell) -> bool {
    shell.shared.last_round.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// A tail that was given up thaws when it has its place again, in the next view: what it computed in the view
/// before is no answer in this one.
#[tokio::test]
async fn what_a_thawed_tail_says_of_the_view_before_changes_nothing() {
    let network = MemoryNetwork::new();
    let ((link, mut events), (stage, _stage_events)) = (network.link(), network.link());
    let tail = stage.local();
    stage.dial(link.addresses()[0].clone()).await.unwrap();
    let (_handle, _commands, mut shell) = shell(Arc::clone(&link), LogGate::closed());
    let connected = events.recv().await.unwrap();
    assert!(matches!(&connected, LinkEvent::Connected { peer, .. } if *peer == tail));
    shell.handle_link(connected);
    tells(&mut shell, tail, &Control::Hello(Hello::ours(Role::Stage, DIGEST)));
    let offer = Offer {
        range: "0:6".parse().unwrap(),
        device: "cpu".to_owned(),
        draft_block: 0,
        max_context: 64,
        max_sessions: 4,
        encodings: vec![WireEncoding::Fp8],
        addresses: Vec::new(),
        pid: 1,
        view: View(0),
        spare: false,
        shadow: false,
    };
    tells(&mut shell, tail, &Control::Offer(offer));
    tells(&mut shell, tail, &Control::Joined { view: View(1) });
    let first = *shell.sessions.keys().next().expect("a probe is under way");
    assert!(!went_round(&shell));

    shell.ring.handle_fault(tail, "it stands still", clock::now());
    shell.drain();
    let retry = shell.ring.poll_timeout().expect("it is tried again");
    shell.ring.handle_timeout(retry);
    shell.drain();
    tells(&mut shell, tail, &Control::Joined { view: View(2) });
    assert_eq!((shell.ring.view(), shell.ring.whole().len()), (View(2), 1));
    let second = *shell.sessions.keys().next().expect("another probe is under way");
    for session in [first, second] {
        answers(&mut shell, tail, View(1), session);
        assert!(!went_round(&shell), "a token of view 1 went round, not of view 2");
        assert!(shell.sessions[&second].committed.is_empty());
    }
    answers(&mut shell, tail, View(2), second);
    assert!(went_round(&shell));
    // Nor does anybody else speak for the tail.
    shell.forget_round();
    answers(&mut shell, Node::random(), View(2), second);
    assert!(!went_round(&shell));
}
