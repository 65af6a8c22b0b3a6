//! What happened last, and a sum over everything that happened.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

use crate::ids::Node;
use crate::proto::codec::{self, Data};
use crate::proto::control::Control;
use crate::sim::agenda::HostId;
use crate::sim::draw::mix;
use crate::transport::{Lane, LinkEvent};

/// Something that happened.
#[derive(Debug, Clone)]
pub(super) enum Note {
    /// A process was told of something on its link.
    Link { host: HostId, event: LinkEvent },
    /// A worker finished a pass over so many positions.
    Pass { host: HostId, positions: usize },
    /// A batch of the log is written.
    Logged { host: HostId, what: String },
    /// A client does or is told something.
    Client { client: usize, what: String },
    /// A fault begins or ends.
    Fault { what: String },
    /// A process starts or ends.
    Process { host: HostId, what: String },
}

/// The last events, and the sum.
#[derive(Debug, Default)]
pub(super) struct Trace {
    shown: usize,
    last: VecDeque<(Duration, Note)>,
    sum: u64,
    /// Events so far, heartbeats among them.
    pub(super) events: u64,
    /// Those that are no heartbeats.
    pub(super) steps: u64,
}

impl Trace {
    /// One that remembers so many events.
    pub(super) fn new(shown: usize) -> Self {
        Self { shown, ..Self::default() }
    }

    /// Takes down what happened.
    pub(super) fn note(&mut self, at: Duration, note: Note) {
        self.events += 1;
        let nanos = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        self.sum = mix(mix(self.sum, nanos), weight(&note));
        if is_beat(&note) {
            return;
        }
        self.steps += 1;
        self.last.push_back((at, note));
        if self.last.len() > self.shown {
            self.last.pop_front();
        }
    }

    /// The same for the same run, event by event.
    pub(super) fn sum(&self) -> u64 {
        self.sum
    }

    /// The last events, oldest first, in words.
    pub(super) fn lines(&self) -> Vec<String> {
        self.last.iter().map(|(at, note)| format!("{:>10.6} s  {}", at.as_secs_f64(), words(note))).collect()
    }
}

fn weight(note: &Note) -> u64 {
    let text = |text: &str| text.bytes().fold(3, |sum, byte| mix(sum, u64::from(byte)));
    match note {
        Note::Link { host, event } => mix(*host, weight_of(event)),
        Note::Pass { host, positions } => mix(*host, *positions as u64),
        Note::Logged { host, what } | Note::Process { host, what } => mix(*host, text(what)),
        Note::Client { client, what } => mix(*client as u64, text(what)),
        Note::Fault { what } => text(what),
    }
}

fn weight_of(event: &LinkEvent) -> u64 {
    match event {
        LinkEvent::Connected { peer, dialled, .. } => mix(peer.start, u64::from(*dialled)),
        LinkEvent::Disconnected { peer, reason } => mix(peer.start, reason.len() as u64),
        LinkEvent::Received { peer, lane, body } => {
            let words = body.chunks(8).map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_le_bytes(word)
            });
            words.fold(mix(peer.start, *lane as u64), mix)
        }
    }
}

fn is_beat(note: &Note) -> bool {
    let Note::Link { event: LinkEvent::Received { lane: Lane::Control, body, .. }, .. } = note else { return false };
    matches!(codec::decode_control(body), Ok(Control::Heartbeat { .. } | Control::HeartbeatAck { .. }))
}

fn words(note: &Note) -> String {
    match note {
        Note::Link { host, event } => format!("process {host}: {}", words_of(event)),
        Note::Pass { host, positions } => format!("process {host}: computed {positions} positions"),
        Note::Logged { host, what } => format!("process {host}: log: {what}"),
        Note::Client { client, what } => format!("client {client}: {what}"),
        Note::Fault { what } => format!("fault: {what}"),
        Note::Process { host, what } => format!("process {host}: {what}"),
    }
}

fn words_of(event: &LinkEvent) -> String {
    match event {
        LinkEvent::Connected { peer, dialled, .. } => {
            format!("connected {} {}", if *dialled { "to" } else { "by" }, number(*peer))
        }
        LinkEvent::Disconnected { peer, reason } => format!("{} is disconnected: {reason}", number(*peer)),
        LinkEvent::Received { peer, lane, body } => format!("from {}: {}", number(*peer), content(*lane, body)),
    }
}

fn number(node: Node) -> u64 {
    node.start
}

/// A body in words.
pub(super) fn content(lane: Lane, body: &Bytes) -> String {
    match lane {
        Lane::Control => match codec::decode_control(body) {
            Ok(message) => control(&message),
            Err(error) => error.to_string(),
        },
        Lane::Data | Lane::Reply => match codec::decode_data(body.clone()) {
            Ok(Data::Frame(frame)) => {
                let head = frame.head;
                format!(
                    "frame view {} session {} epoch {} start {} pos {}+{} settled {} answer from {}",
                    head.view, head.session, head.epoch, head.start, head.pos, head.len, head.settled, head.answer_from
                )
            }
            Ok(Data::Reply(reply)) => {
                let answers: Vec<String> = reply.answers.iter().map(|answer| answer.token.to_string()).collect();
                let draft = reply.draft.map(|block| block.tokens.iter().map(ToString::to_string).collect::<Vec<_>>());
                format!(
                    "reply view {} session {} epoch {} pos {}+{} answers {} draft {}",
                    reply.view,
                    reply.session,
                    reply.epoch,
                    reply.pos,
                    reply.len,
                    answers.join(","),
                    draft.map_or("none".to_owned(), |draft| draft.join(","))
                )
            }
            Err(error) => error.to_string(),
        },
    }
}

/// A control message in words: peers by the numbers of their processes.
#[allow(clippy::wildcard_enum_match_arm, reason = "most messages are shown as they are")]
fn control(message: &Control) -> String {
    match message {
        Control::Join(join) => {
            let place = |neighbour: &Option<crate::proto::control::Neighbour>| {
                neighbour.as_ref().map_or("none".to_owned(), |neighbour| neighbour.peer.start.to_string())
            };
            format!("join view {} between {} and {}", join.view, place(&join.predecessor), place(&join.successor))
        }
        Control::Offer(offer) => format!("offer {} view {}", offer.range, offer.view),
        Control::Open(open) => format!(
            "open view {} session {} prompt {} of {} reach {} boundaries {:?}",
            open.view, open.session, open.prompt_len, open.positions, open.reach, open.boundaries
        ),
        Control::NeighbourLost { view, peer, reason } => format!("lost {} in view {view}: {reason}", peer.start),
        Control::Hello(hello) => format!("hello of a {:?}", hello.role),
        Control::Report { nonce, report } => {
            let sessions: Vec<String> = report
                .sessions
                .iter()
                .map(|session| {
                    format!(
                        "{}: next {} received {} computed {} forwarded {} dropped {}",
                        session.session,
                        session.next,
                        session.received,
                        session.computed,
                        session.forwarded,
                        session.dropped
                    )
                })
                .collect();
            format!("report {nonce} view {} [{}]", report.view, sessions.join("; "))
        }
        other => format!("{other:?}"),
    }
}
