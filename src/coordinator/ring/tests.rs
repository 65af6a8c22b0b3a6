//! The ring under every event that it knows.

use super::*;
use crate::clock;
use crate::ids::WireEncoding;

fn offer(range: &str, view: u64) -> Offer {
    Offer {
        range: range.parse().unwrap(),
        device: "cpu".to_owned(),
        draft_block: 0,
        max_context: 64,
        max_sessions: 1,
        encodings: vec![WireEncoding::Fp8],
        addresses: vec![format!("/memory/{range}")],
        pid: 1,
        view: View(view),
        spare: false,
        shadow: false,
    }
}

fn drain(ring: &mut Ring) -> Vec<Output> {
    std::iter::from_fn(|| ring.poll_output()).collect()
}

fn joins(outputs: &[Output]) -> Vec<(Node, View, Option<Node>, Option<Node>)> {
    outputs
        .iter()
        .filter_map(|output| match output {
            Output::Send { to, message: Control::Join(join) } => Some((
                *to,
                join.view,
                join.predecessor.as_ref().map(|neighbour| neighbour.peer),
                join.successor.as_ref().map(|neighbour| neighbour.peer),
            )),
            Output::Send { .. }
            | Output::Shadow { .. }
            | Output::Broken { .. }
            | Output::Whole { .. }
            | Output::Waiting { .. } => None,
        })
        .collect()
}

#[test]
fn a_ring_is_whole_when_every_member_has_joined() {
    let now = clock::now();
    let (a, b) = (Node::random(), Node::random());
    let mut ring = Ring::new(Node::random(), 7);
    assert_eq!(drain(&mut ring), [Output::Waiting { why: "layers 0:7 are missing: start a stage for each".into() }]);
    ring.handle_offer(a, offer("0:3", 4), now);
    assert_eq!(drain(&mut ring), [Output::Waiting { why: "layers 3:7 are missing: start a stage for each".into() }]);
    ring.handle_offer(b, offer("3:7", 0), now);
    assert_eq!(joins(&drain(&mut ring)), [(a, View(5), None, Some(b)), (b, View(5), Some(a), None)]);
    ring.handle_joined(a, View(5));
    ring.handle_joined(b, View(4));
    assert!(ring.whole().is_empty(), "a stale joined changes nothing");
    ring.handle_joined(b, View(5));
    assert_eq!(drain(&mut ring), [Output::Whole { view: View(5) }]);
    assert_eq!(ring.whole().iter().map(|member| member.peer).collect::<Vec<_>>(), [a, b]);
}

#[test]
fn a_lost_member_breaks_the_ring_and_its_return_makes_a_new_view() {
    let now = clock::now();
    let (a, b) = (Node::random(), Node::random());
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(a, offer("0:3", 0), now);
    ring.handle_offer(b, offer("3:7", 0), now);
    ring.handle_joined(a, View(1));
    ring.handle_joined(b, View(1));
    drain(&mut ring);
    ring.handle_gone(b, "reset", now);
    let outputs = drain(&mut ring);
    assert_eq!(outputs[0], Output::Broken { peer: b, range: "3:7".parse().unwrap(), why: "reset".to_owned() });
    assert!(ring.missing().unwrap().contains("3:7"));
    ring.handle_offer(b, offer("3:7", 0), now);
    assert_eq!(joins(&drain(&mut ring)).len(), 2);
    assert_eq!(ring.view(), View(2));
}

#[test]
fn a_join_that_fails_is_tried_again_in_a_new_view() {
    let now = clock::now();
    let a = Node::random();
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(a, offer("0:7", 0), now);
    drain(&mut ring);
    ring.handle_join_refused(a, View(1), View(1), "its successor can't be reached", now);
    let at = ring.poll_timeout().unwrap();
    ring.handle_timeout(at);
    assert_eq!(joins(&drain(&mut ring)), [(a, View(2), None, None)]);
}

#[test]
fn a_hop_that_can_not_be_made_is_gone_round() {
    let now = clock::now();
    let (head, tail, spares) = (Node::random(), Node::random(), [Node::random(), Node::random()]);
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(head, offer("0:3", 0), now);
    ring.handle_offer(tail, offer("3:7", 0), now);
    for (spare, range) in spares.into_iter().zip(["0:3", "3:7"]) {
        ring.handle_offer(spare, Offer { spare: true, ..offer(range, 0) }, now);
    }
    let mut rings = Vec::new();
    for view in [View(1), View(2), View(3)] {
        ring.handle_join_refused(head, view, view, "successor: no answer", now);
        let at_once = matches!(ring.state, State::Joining { .. });
        assert_eq!(at_once, view == View(1), "only a ring of stages that did not fail is joined at once");
        let outputs = drain(&mut ring);
        let blamed = |output: &Output| matches!(output, Output::Broken { peer, .. } if *peer == tail);
        assert_eq!(outputs.iter().any(blamed), at_once, "who lost its place is told: {outputs:?}");
        if !at_once {
            ring.handle_timeout(now + RETRY_AFTER);
        }
        let State::Joining { ring: members, .. } = &ring.state else { panic!("it does not join again") };
        rings.push(members.clone());
    }
    assert_eq!(rings, [[head, spares[1]], [head, tail], [spares[0], tail]]);
}

#[test]
fn stages_that_all_failed_once_take_turns() {
    let now = clock::now();
    let (head, stage, other) = (Node::random(), Node::random(), Node::random());
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(head, offer("0:3", 0), now);
    ring.handle_offer(stage, offer("3:7", 0), now);
    ring.handle_offer(other, Offer { spare: true, ..offer("3:7", 0) }, now);
    // Each in its turn is cut off from the head, long after the one before was mended.
    for (view, (lost, next)) in [(1, (stage, other)), (2, (other, stage)), (3, (stage, other))] {
        for member in [head, lost] {
            ring.handle_joined(member, View(view));
        }
        assert_eq!(ring.whole().len(), 2, "view {view}");
        ring.handle_neighbour_lost((head, lost), View(view), "no sign of life", now);
        ring.handle_timeout(now + RETRY_AFTER);
        let State::Joining { ring: members, .. } = &ring.state else { panic!("it does not join again") };
        assert_eq!(members, &[head, next]);
    }
}

#[test]
fn a_coordinator_refused_for_an_older_view_stops_serving() {
    let now = clock::now();
    let a = Node::random();
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(a, offer("0:7", 0), now);
    ring.handle_joined(a, View(1));
    drain(&mut ring);
    ring.handle_join_refused(a, View(1), View(8), "another coordinator took over", now);
    assert!(matches!(&drain(&mut ring)[..], [Output::Broken { .. }, Output::Waiting { .. }, Output::Waiting { .. }]));
    assert_eq!(ring.poll_timeout(), None);
    ring.handle_offer(a, offer("0:7", 8), now);
    assert_eq!(drain(&mut ring), [], "it takes no stage back");
    assert!(ring.missing().unwrap().contains("stops serving"));
}

/// One that stood still hears of the view that another coordinator leads in two ways, in any order.
#[test]
fn a_view_that_an_offer_tells_of_is_not_its_own() {
    for offer_first in [true, false] {
        let now = clock::now();
        let (head, tail) = (Node::random(), Node::random());
        let mut ring = Ring::new(Node::random(), 7);
        ring.handle_offer(head, offer("0:4", 0), now);
        ring.handle_offer(tail, offer("4:7", 0), now);
        ring.handle_joined(head, View(1));
        ring.handle_joined(tail, View(1));
        ring.handle_gone(tail, "no sign of life", now);
        if offer_first {
            ring.handle_gone(head, "no sign of life", now);
            ring.handle_offer(tail, offer("4:7", 2), now);
        }
        ring.handle_join_refused(head, View(1), View(2), "another coordinator took over", now);
        assert!(ring.is_superseded(), "offer first: {offer_first}");
    }
}

/// What the members of two rings of three do to a ring that stands.
fn three() -> (Ring, [Node; 3], Node, Instant) {
    let (now, nodes, spare) = (clock::now(), [Node::random(), Node::random(), Node::random()], Node::random());
    let mut ring = Ring::new(Node::random(), 7);
    for (peer, range) in nodes.iter().zip(["0:3", "3:5", "5:7"]) {
        ring.handle_offer(*peer, offer(range, 0), now);
    }
    ring.handle_offer(spare, Offer { spare: true, ..offer("5:7", 0) }, now);
    drain(&mut ring);
    (ring, nodes, spare, now)
}

#[test]
fn only_a_neighbour_says_that_a_stage_is_lost_and_only_a_member_that_it_refuses() {
    let (mut ring, [head, middle, tail], spare, now) = three();
    for peer in [head, middle, tail] {
        ring.handle_joined(peer, View(1));
    }
    drain(&mut ring);
    ring.handle_neighbour_lost((head, tail), View(1), "reset", now);
    ring.handle_neighbour_lost((spare, tail), View(1), "reset", now);
    ring.handle_join_refused(spare, View(1), View(9), "it says so", now);
    assert_eq!((drain(&mut ring), ring.is_superseded()), (vec![], false));
    ring.handle_neighbour_lost((middle, tail), View(1), "reset", now);
    assert!(matches!(&drain(&mut ring)[0], Output::Broken { peer, .. } if *peer == tail));
}

#[test]
fn a_ring_whose_member_refuses_it_afterwards_is_broken_and_not_only_waited_for() {
    let (mut ring, [head, middle, tail], _, now) = three();
    for peer in [head, middle, tail] {
        ring.handle_joined(peer, View(1));
    }
    drain(&mut ring);
    ring.handle_join_refused(middle, View(1), View(1), "successor: no answer", now);
    assert!(matches!(&drain(&mut ring)[0], Output::Broken { peer, .. } if *peer == middle));
}

#[test]
fn a_join_that_hangs_takes_the_spare_the_next_time() {
    let (mut ring, [head, middle, tail], spare, _) = three();
    ring.handle_joined(head, View(1));
    ring.handle_joined(tail, View(1));
    ring.handle_timeout(ring.poll_timeout().unwrap());
    let said = drain(&mut ring);
    let peers: Vec<Node> = joins(&said).into_iter().map(|(peer, ..)| peer).collect();
    assert_eq!(peers, [head, middle, spare]);
    let named = |output: &Output| matches!(output, Output::Broken { peer, why, .. } if *peer == tail && why.contains(&format!("{middle} did not join view 1")));
    assert!(said.iter().any(named), "{said:?}");
}

/// A refusal that was long under way is of a view that this coordinator has left behind itself.
#[test]
fn a_late_refusal_is_not_heard() {
    let now = clock::now();
    let (head, tail) = (Node::random(), Node::random());
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(head, offer("0:4", 0), now);
    ring.handle_offer(tail, offer("4:7", 0), now);
    ring.handle_gone(tail, "no sign of life", now);
    ring.handle_offer(tail, offer("4:7", 0), now);
    assert_eq!(ring.view(), View(2));
    ring.handle_join_refused(head, View(1), View(2), "late", now);
    assert!(!ring.is_superseded());
}

#[test]
fn no_ring_is_joined_above_the_highest_view() {
    let now = clock::now();
    let a = Node::random();
    for view in [VIEW_MAX, View(u64::MAX)] {
        let mut ring = Ring::new(Node::random(), 7);
        ring.handle_offer(a, offer("0:7", view.0), now);
        assert_eq!(joins(&drain(&mut ring)), []);
        assert!(ring.missing().unwrap().contains(&format!("view {view}, and none is left above it")));
        assert_eq!(ring.poll_timeout(), None);
    }
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(a, offer("0:7", VIEW_MAX.0 - 1), now);
    assert_eq!(joins(&drain(&mut ring)), [(a, VIEW_MAX, None, None)]);
}

#[test]
fn a_spare_takes_no_place_for_being_the_first() {
    let now = clock::now();
    let (spare, stage) = (Node::random(), Node::random());
    let waiting = || Offer { spare: true, ..offer("0:7", 0) };
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(spare, waiting(), now);
    assert_eq!(joins(&drain(&mut ring)), []);
    ring.handle_offer(stage, offer("0:7", 0), now);
    assert_eq!(joins(&drain(&mut ring)), [(stage, View(1), None, None)]);
    ring.handle_joined(stage, View(1));
    ring.handle_gone(stage, "reset", now);
    assert_eq!(joins(&drain(&mut ring)), [(spare, View(2), None, None)], "a heal waits for nobody");
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(spare, waiting(), now);
    ring.handle_timeout(ring.poll_timeout().unwrap());
    assert_eq!(joins(&drain(&mut ring)), [(spare, View(1), None, None)], "nobody else came");
}

#[test]
fn a_member_that_does_not_join_is_named() {
    let now = clock::now();
    let a = Node::random();
    let mut ring = Ring::new(Node::random(), 7);
    ring.handle_offer(a, offer("0:7", 0), now);
    let at = ring.poll_timeout().unwrap();
    ring.handle_timeout(at);
    assert!(ring.missing().unwrap().contains(&a.to_string()));
}

/// Who is told to shadow behind whom, and who is told to send copies to whom.
type Pairing = (Vec<(Node, Option<Node>)>, Vec<(Node, Option<Node>)>);

fn pairing(outputs: &[Output]) -> Pairing {
    let (mut shadows, mut copies) = (Vec::new(), Vec::new());
    for output in outputs {
        match output {
            Output::Send { to, message: Control::Shadow { source, .. } } => shadows.push((*to, *source)),
            Output::Send { to, message: Control::Copy { to: shadow, .. } } => {
                copies.push((*to, shadow.as_ref().map(|shadow| shadow.peer)));
            }
            Output::Send { .. }
            | Output::Broken { .. }
            | Output::Shadow { .. }
            | Output::Whole { .. }
            | Output::Waiting { .. } => {}
        }
    }
    (shadows, copies)
}

#[test]
fn shadows_come_and_go_without_a_new_view() {
    let now = clock::now();
    let shadow = |range| Offer { spare: true, shadow: true, ..offer(range, 0) };
    let (head, tail, local) = (Node::random(), Node::random(), Node::random());
    let mut waiting = [Node::random(), Node::random()];
    waiting.sort();
    let [first, second] = waiting;
    let mut ring = Ring::new(local, 7);
    ring.handle_offer(second, shadow("3:7"), now);
    ring.handle_offer(head, offer("0:3", 0), now);
    ring.handle_offer(tail, offer("3:7", 0), now);
    ring.handle_joined(head, View(1));
    drain(&mut ring);
    ring.handle_joined(tail, View(1));
    let outputs = drain(&mut ring);
    assert_eq!(pairing(&outputs), (vec![(second, Some(head))], vec![(head, Some(second))]));
    assert_eq!(outputs.last(), Some(&Output::Whole { view: View(1) }), "sessions begin when shadows are known");
    ring.handle_offer(first, shadow("3:7"), now);
    assert_eq!(drain(&mut ring), [], "the pair holds");
    ring.handle_gone(second, "reset", now);
    assert_eq!(pairing(&drain(&mut ring)), (vec![(first, Some(head))], vec![(head, Some(first))]));
    ring.handle_draining(first);
    assert_eq!(pairing(&drain(&mut ring)), (vec![(first, None)], vec![(head, None)]));
    let heads = Node::random();
    ring.handle_offer(heads, shadow("0:3"), now);
    assert_eq!(pairing(&drain(&mut ring)), (vec![(heads, Some(local))], vec![]), "the coordinator is in front");
    assert_eq!(
        (ring.shadow_of(heads), ring.shadowed_by(head), ring.shadowed_by(tail)),
        (Some(head), Some(heads), None)
    );
    assert_eq!(ring.view(), View(1));
    ring.handle_gone(head, "reset", now);
    assert_eq!(ring.shadow_of(heads), None, "no ring is whole");
    let joined = joins(&drain(&mut ring));
    assert_eq!(joined.iter().map(|(peer, ..)| *peer).collect::<Vec<_>>(), [heads, tail]);
}
