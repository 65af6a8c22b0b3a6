//! The membership under every event that it knows.

use super::*;
use crate::clock::now;
use crate::proto::control::Neighbour;

/// How long a successor may take to greet.
const REACH: Duration = Duration::from_millis(1_800);

fn drain(membership: &mut Membership) -> Vec<Output> {
    std::iter::from_fn(|| membership.poll_output()).collect()
}

fn join(view: u64, successor: Option<Node>) -> Join {
    let successor = successor.map(|peer| Neighbour { peer, addresses: vec!["/memory/1".to_owned()] });
    Join { view: View(view), predecessor: None, successor }
}

fn obeying(peer: Node) -> Membership {
    let mut membership = Membership::new(Obey::Peers(BTreeSet::from([peer.peer])), REACH);
    membership.handle_greeted(peer, Role::Coordinator, now());
    assert_eq!(drain(&mut membership), [Output::Offer { to: peer }]);
    membership
}

#[test]
fn a_join_is_done_when_the_successor_has_answered() {
    let (coordinator, successor) = (Node::random(), Node::random());
    let mut membership = obeying(coordinator);
    membership.handle_join(coordinator, &join(3, Some(successor)), now());
    let dial = Output::Dial { peer: successor, addresses: vec!["/memory/1".to_owned()] };
    assert_eq!(drain(&mut membership), [Output::Route(None), dial]);
    assert!(!membership.accepts(coordinator, View(3)), "frames wait for the join");
    membership.handle_greeted(successor, Role::Stage, now());
    let ask = Output::Send { to: successor, message: Control::Heartbeat { seq: join_seq(View(3)) } };
    assert_eq!(drain(&mut membership), [ask]);
    membership.handle_ack(coordinator, join_seq(View(3)));
    membership.handle_ack(successor, join_seq(View(2)));
    membership.handle_ack(successor, 3);
    assert_eq!(drain(&mut membership), [], "only the successor's answer to this view's heartbeat counts");
    membership.handle_ack(successor, join_seq(View(3)));
    let route =
        Route { view: View(3), coordinator, predecessor: coordinator, successor: Some(successor), shadows: false };
    let joined = Output::Send { to: coordinator, message: Control::Joined { view: View(3) } };
    assert_eq!(drain(&mut membership), [Output::Route(Some(route)), joined]);
    assert!(membership.accepts(coordinator, View(3)));
    assert!(!membership.accepts(successor, View(3)), "only the predecessor sends frames");
    assert!(!membership.accepts(coordinator, View(2)), "an older view is refused");
}

#[test]
fn the_view_never_falls() {
    let coordinator = Node::random();
    let mut membership = obeying(coordinator);
    membership.handle_join(coordinator, &join(3, None), now());
    drain(&mut membership);
    for view in [0, 2, 3] {
        membership.handle_join(coordinator, &join(view, None), now());
        let outputs = drain(&mut membership);
        assert!(
            matches!(&outputs[..], [Output::Send { message: Control::JoinRefused { current: View(3), .. }, .. }]),
            "{outputs:?}"
        );
    }
    assert_eq!(membership.view(), View(3));
}

#[test]
fn nobody_else_is_obeyed() {
    let (coordinator, other) = (Node::random(), Node::random());
    let mut membership = obeying(coordinator);
    membership.handle_greeted(other, Role::Coordinator, now());
    assert!(matches!(&drain(&mut membership)[..], [Output::Refuse { peer, .. }] if *peer == other));
    membership.handle_join(other, &join(9, None), now());
    let outputs = drain(&mut membership);
    assert!(matches!(&outputs[..], [Output::Send { message: Control::JoinRefused { .. }, .. }]));
    assert_eq!(membership.view(), View(0));
}

#[test]
fn a_lost_neighbour_is_reported_and_a_lost_coordinator_ends_the_view() {
    let (coordinator, successor) = (Node::random(), Node::random());
    let mut membership = obeying(coordinator);
    membership.handle_greeted(successor, Role::Stage, now());
    membership.handle_join(coordinator, &join(1, Some(successor)), now());
    membership.handle_ack(successor, join_seq(View(1)));
    drain(&mut membership);
    membership.handle_gone(successor, "reset", false, now());
    let lost = Control::NeighbourLost { view: View(1), peer: successor, reason: "reset".to_owned() };
    assert_eq!(drain(&mut membership), [Output::Send { to: coordinator, message: lost }]);
    membership.handle_gone(coordinator, "reset", false, now());
    assert_eq!(drain(&mut membership), [Output::Route(None)]);
    assert!(!membership.obeys(coordinator));
}

/// A stage between two neighbours, in view 1: itself, coordinator, predecessor, successor.
fn between() -> (Membership, [Node; 3]) {
    let [coordinator, predecessor, successor] = [Node::random(), Node::random(), Node::random()];
    let mut membership = obeying(coordinator);
    membership.handle_greeted(successor, Role::Stage, now());
    let before = Neighbour { peer: predecessor, addresses: vec![] };
    let join = Join { predecessor: Some(before), ..join(1, Some(successor)) };
    membership.handle_join(coordinator, &join, now());
    membership.handle_ack(successor, join_seq(View(1)));
    membership.handle_greeted(predecessor, Role::Stage, now());
    drain(&mut membership);
    (membership, [coordinator, predecessor, successor])
}

#[test]
fn an_idle_hop_is_mended_without_a_word_to_the_coordinator() {
    let (mut membership, [_, predecessor, successor]) = between();
    let t0 = now();
    membership.handle_gone(successor, "reset", true, t0);
    let dial = Output::Dial { peer: successor, addresses: vec!["/memory/1".to_owned()] };
    assert_eq!(drain(&mut membership), std::slice::from_ref(&dial));
    membership.handle_gone(predecessor, "reset", true, t0);
    assert_eq!(drain(&mut membership), [], "it is the predecessor's to dial");
    membership.handle_dial_failed(successor, "no route", t0);
    let at = membership.poll_timeout().unwrap();
    assert_eq!(at, t0 + MEND_PAUSE);
    membership.handle_timeout(at);
    assert_eq!(drain(&mut membership), [dial]);
    for peer in [predecessor, successor] {
        assert!(membership.mends(peer));
        membership.handle_greeted(peer, Role::Stage, at);
        assert_eq!(drain(&mut membership), [Output::Mended { peer }]);
        assert!(!membership.mends(peer));
    }
    assert_eq!(membership.poll_timeout(), None);
    assert!(membership.accepts(predecessor, View(1)), "the view goes on");
}

#[test]
fn a_hop_that_is_not_mended_in_time_is_lost() {
    let (mut membership, [coordinator, predecessor, successor]) = between();
    let t0 = now();
    membership.handle_gone(predecessor, "reset", true, t0);
    membership.handle_gone(successor, "reset", true, t0);
    drain(&mut membership);
    membership.handle_timeout(t0 + MEND_DEADLINE);
    let told = [predecessor, successor].map(|peer| {
        let reason = "reset; the hop was not mended in 4000 ms".to_owned();
        Output::Send { to: coordinator, message: Control::NeighbourLost { view: View(1), peer, reason } }
    });
    assert_eq!(drain(&mut membership), told);
    assert_eq!(membership.poll_timeout(), None);
}

#[test]
fn a_new_view_ends_every_mend() {
    let (mut membership, [coordinator, _, successor]) = between();
    membership.handle_gone(successor, "reset", true, now());
    membership.handle_join(coordinator, &join(2, None), now());
    drain(&mut membership);
    assert_eq!(membership.poll_timeout(), None);
}

#[test]
fn an_unreachable_successor_refuses_the_join() {
    let (coordinator, successor) = (Node::random(), Node::random());
    let mut membership = obeying(coordinator);
    membership.handle_join(coordinator, &join(1, Some(successor)), now());
    drain(&mut membership);
    membership.handle_dial_failed(successor, "no route", now());
    let outputs = drain(&mut membership);
    assert!(matches!(&outputs[..], [Output::Send { message: Control::JoinRefused { view: View(1), .. }, .. }]));
    membership.handle_greeted(successor, Role::Stage, now());
    assert_eq!(drain(&mut membership), []);
}

#[test]
fn a_successor_that_died_without_a_word_is_dialled_anew() {
    let (coordinator, successor) = (Node::random(), Node::random());
    let mut membership = obeying(coordinator);
    membership.handle_greeted(successor, Role::Stage, now());
    membership.handle_join(coordinator, &join(1, Some(successor)), now());
    drain(&mut membership);
    let at = membership.poll_timeout().unwrap();
    membership.handle_timeout(at);
    let outputs = drain(&mut membership);
    assert!(
        matches!(&outputs[..], [Output::Disconnect { peer, .. }, Output::Dial { .. }] if *peer == successor),
        "{outputs:?}"
    );
    assert_eq!(membership.poll_timeout(), Some(at + REACH));
    membership.handle_greeted(successor, Role::Stage, now());
    membership.handle_ack(successor, join_seq(View(1)));
    assert_eq!(membership.route().map(|route| route.view), Some(View(1)));
    assert_eq!(membership.poll_timeout(), None);
}

/// The refusals that were said, with their reasons.
fn refusals(membership: &mut Membership) -> Vec<String> {
    let refusal = |output| {
        let Output::Send { message: Control::JoinRefused { reason, .. }, .. } = output else { return None };
        Some(reason)
    };
    drain(membership).into_iter().filter_map(refusal).collect()
}

#[test]
fn no_join_waits_longer_for_a_dial_than_silence_may_last() {
    let (coordinator, successor) = (Node::random(), Node::random());
    let (mut membership, t0) = (obeying(coordinator), now());
    membership.handle_join(coordinator, &join(1, Some(successor)), t0);
    drain(&mut membership);
    assert_eq!(membership.poll_timeout(), Some(t0 + REACH));
    membership.handle_timeout(t0 + REACH - Duration::from_millis(1));
    assert_eq!(drain(&mut membership), []);
    membership.handle_timeout(t0 + REACH);
    assert_eq!(refusals(&mut membership), [format!("successor {successor}: no answer within 1800 ms")]);
    // The dial goes on, and comes to its end in a later view.
    membership.handle_greeted(successor, Role::Stage, t0 + REACH * 2);
    assert_eq!((drain(&mut membership), membership.poll_timeout()), (vec![], None));
    membership.handle_join(coordinator, &join(2, Some(successor)), t0 + REACH * 2);
    membership.handle_ack(successor, join_seq(View(2)));
    assert_eq!(membership.route().map(|route| route.view), Some(View(2)));
}

#[test]
fn a_successor_that_falls_silent_under_a_join_refuses_it_and_one_that_hangs_up_is_dialled_at_once() {
    let (coordinator, successor) = (Node::random(), Node::random());
    let (mut membership, t0) = (obeying(coordinator), now());
    membership.handle_greeted(successor, Role::Stage, t0);
    membership.handle_join(coordinator, &join(1, Some(successor)), t0);
    drain(&mut membership);
    membership.handle_gone(successor, "reset", false, t0);
    let dial = Output::Dial { peer: successor, addresses: vec!["/memory/1".to_owned()] };
    assert_eq!((drain(&mut membership), membership.poll_timeout()), (vec![dial], Some(t0 + REACH)));
    membership.handle_greeted(successor, Role::Stage, t0);
    membership.handle_silent(coordinator, "no sign of life for 1800 ms");
    drain(&mut membership);
    membership.handle_silent(successor, "no sign of life for 1800 ms");
    membership.handle_gone(successor, "no sign of life for 1800 ms", false, t0);
    assert_eq!(refusals(&mut membership), [format!("successor {successor}: no sign of life for 1800 ms")]);
    assert_eq!(membership.poll_timeout(), None);
}

#[test]
fn a_coordinator_that_is_left_is_told_so() {
    let (first, second) = (Node::random(), Node::random());
    let mut membership = Membership::new(Obey::Anyone, REACH);
    membership.handle_greeted(first, Role::Coordinator, now());
    membership.handle_join(first, &join(1, None), now());
    drain(&mut membership);
    membership.handle_join(second, &join(2, None), now());
    let told = drain(&mut membership).into_iter().next();
    let Some(Output::Send { to, message: Control::JoinRefused { view, current, .. } }) = told else {
        panic!("{told:?}")
    };
    assert_eq!((to, view, current), (first, View(1), View(2)));
}

/// Two processes of one key: the second one took over while the first was frozen.
#[test]
fn a_coordinator_whose_place_was_taken_gets_no_offer_while_the_other_leads() {
    let first = Node::random();
    let second = Node { start: first.start.wrapping_add(1), ..first };
    let mut membership = obeying(first);
    membership.handle_join(first, &join(1, None), now());
    membership.handle_gone(first, "silent", false, now());
    membership.handle_greeted(second, Role::Coordinator, now());
    membership.handle_join(second, &join(2, None), now());
    drain(&mut membership);
    let refused = |view, current| {
        let reason = format!("coordinator {second} took over");
        Output::Send { to: first, message: Control::JoinRefused { view: View(view), current: View(current), reason } }
    };
    membership.handle_greeted(first, Role::Coordinator, now());
    assert_eq!(drain(&mut membership), [refused(1, 2)]);
    membership.handle_join(first, &join(7, None), now());
    assert_eq!(drain(&mut membership), [refused(7, 8)], "a higher view does not help");
    membership.handle_gone(second, "silent", false, now());
    membership.handle_greeted(first, Role::Coordinator, now());
    assert_eq!(drain(&mut membership), [Output::Route(None), Output::Offer { to: first }]);
}

#[test]
fn a_shadow_takes_copies_in_the_view_and_its_losses_are_nobodys_to_know() {
    let (coordinator, source) = (Node::random(), Node::random());
    let mut membership = obeying(coordinator);
    membership.handle_shadow(Node::random(), View(3), Some(source));
    assert_eq!(drain(&mut membership), [], "nobody else's");
    membership.handle_shadow(coordinator, View(3), Some(source));
    let route = Route { view: View(3), coordinator, predecessor: source, successor: None, shadows: true };
    assert_eq!(drain(&mut membership), [Output::Route(None), Output::Route(Some(route))]);
    assert!(membership.accepts(source, View(3)) && !membership.accepts(coordinator, View(3)));
    membership.handle_greeted(source, Role::Stage, now());
    assert_eq!(drain(&mut membership), [Output::Ask]);
    membership.handle_gone(source, "reset", false, now());
    assert_eq!((drain(&mut membership), membership.poll_timeout()), (vec![], None));
    membership.handle_join(coordinator, &join(4, None), now());
    let outputs = drain(&mut membership);
    assert!(matches!(&outputs[..], [Output::Route(None), Output::Route(Some(_)), Output::Send { .. }]), "{outputs:?}");
    membership.handle_shadow(coordinator, View(4), Some(source));
    assert_eq!(drain(&mut membership), [], "a member is no shadow");
    membership.handle_shadow(Node::random(), View(5), Some(source));
    assert_eq!(drain(&mut membership), [], "nor for another coordinator");
    membership.handle_shadow(coordinator, View(5), Some(source));
    let route = Route { view: View(5), ..route };
    let expected = [Output::Route(None), Output::Route(Some(route))];
    assert_eq!(drain(&mut membership), expected, "in a later view it is no member");
}

#[test]
fn a_shadow_that_is_not_wanted_is_outside_again() {
    let coordinator = Node::random();
    let mut membership = obeying(coordinator);
    membership.handle_shadow(coordinator, View(3), Some(coordinator));
    drain(&mut membership);
    membership.handle_shadow(coordinator, View(4), None);
    assert_eq!((drain(&mut membership), membership.route()), (vec![Output::Route(None)], None));
}

#[test]
fn a_member_dials_the_shadow_behind_it_until_it_is_there() {
    let (coordinator, shadow, t0) = (Node::random(), Node::random(), now());
    let mut membership = obeying(coordinator);
    membership.handle_join(coordinator, &join(3, None), t0);
    drain(&mut membership);
    let to = || Some(Neighbour { peer: shadow, addresses: vec!["/memory/9".to_owned()] });
    membership.handle_copy(coordinator, View(2), to(), t0);
    assert_eq!(drain(&mut membership), [], "of another view");
    membership.handle_copy(coordinator, View(3), to(), t0);
    let dial = Output::Dial { peer: shadow, addresses: vec!["/memory/9".to_owned()] };
    assert_eq!(drain(&mut membership), [Output::Copy(Some(shadow)), dial.clone()]);
    membership.handle_dial_failed(shadow, "nobody listens", t0);
    let at = membership.poll_timeout().unwrap();
    assert!(at > t0);
    membership.handle_timeout(at);
    assert_eq!(drain(&mut membership), std::slice::from_ref(&dial));
    membership.handle_greeted(shadow, Role::Stage, at);
    assert!(membership.copies_to(shadow, View(3)) && !membership.copies_to(shadow, View(2)));
    membership.handle_gone(shadow, "reset", false, at);
    let at = membership.poll_timeout().unwrap();
    membership.handle_timeout(at);
    assert_eq!(drain(&mut membership), [dial], "and nobody is told");
    membership.handle_copy(coordinator, View(3), None, at);
    assert_eq!(drain(&mut membership), [Output::Copy(None)]);
    assert!(!membership.copies_to(shadow, View(3)));
}
