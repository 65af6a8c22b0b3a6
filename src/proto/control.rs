//! What travels on the control lane: postcard bodies of [`Control`].
//!
//! The coordinator speaks to every stage and every stage to the coordinator; neighbours only greet, and a
//! shadow says how far it came.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use crate::engine::sample::Sampling;
use crate::ids::{Epoch, LayerRange, Node, Position, SessionId, TokenId, View, WireEncoding};
use crate::proto::liveness::RoundTrip;

/// Version of everything in [`crate::proto`]; peers of other versions are refused.
pub const PROTOCOL_VERSION: u16 = 5;

/// First message on every connection, from both sides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`].
    pub protocol: u16,
    /// [`crate::engine::NUMERICS_ID`].
    pub numerics: String,
    /// sha256 over the bytes of config.json and model.safetensors.index.json.
    pub model_digest: [u8; 32],
    /// What this process is.
    pub role: Role,
    /// Program version, for people.
    pub software: String,
}

/// What a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Drives sessions, holds no layer.
    Coordinator,
    /// Holds a layer range.
    Stage,
}

/// What a stage offers to a coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Layers held.
    pub range: LayerRange,
    /// Device and kernels, as the engine reports them.
    pub device: String,
    /// Draft tokens per block; 0 where it does not draft.
    pub draft_block: u32,
    /// Longest session, in positions.
    pub max_context: u32,
    /// Sessions it holds at once.
    pub max_sessions: u32,
    /// Encodings it can send and receive.
    pub encodings: Vec<WireEncoding>,
    /// Multiaddrs at which a neighbour can dial it, each with its `/p2p/` part.
    pub addresses: Vec<String>,
    /// Process id, for an operator on the same host.
    pub pid: u32,
    /// Highest view it has obeyed.
    pub view: View,
    /// It waits to replace another stage: a ring takes it only where no other stage holds its range.
    pub spare: bool,
    /// Outside a ring, it keeps the state of a stage that it could replace current.
    pub shadow: bool,
}

/// A neighbour in a view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Who.
    pub peer: Node,
    /// Where to dial, in order of preference.
    pub addresses: Vec<String>,
}

/// A stage's place in a view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The membership.
    pub view: View,
    /// Who sends it frames; `None`: the coordinator (this stage is the head).
    pub predecessor: Option<Neighbour>,
    /// Whom it sends frames to; `None`: the coordinator gets replies (this stage is the tail).
    pub successor: Option<Neighbour>,
}

/// Extra results a session asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Want {
    /// Log-probabilities of the tokens that are fed, with this many top tokens of every answer.
    pub scores: Option<u32>,
    /// Log-probabilities of the tokens that are answered, with this many top tokens; not with `scores`.
    pub logprobs: Option<u32>,
}

/// Opens a session on a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Open {
    /// Membership it is opened in.
    pub view: View,
    /// The session.
    pub session: SessionId,
    /// Prompt tokens, all of which are true.
    pub prompt_len: u32,
    /// Positions the session may reach.
    pub positions: u32,
    /// Largest `pos + s − settled` ever in flight.
    pub reach: u32,
    /// Layers in front of which hidden states cross the wire, ascending: fixed for the session.
    pub boundaries: Vec<u16>,
    /// The encoding there; see [`Open::encoding_at`].
    pub encoding: WireEncoding,
    /// How the tail picks tokens.
    pub sampling: Sampling,
    /// Drafts per block that the tail makes; 0: none.
    pub draft_block: u32,
    /// Extra results.
    pub want: Want,
    /// It was open in an older view: the stage says what it kept of it, and waits for
    /// [`Control::Rebuild`] before it computes.
    pub resumes: bool,
}

/// sha256 of consecutive positions: what a hop carried there, see `docs/protocol.md`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Digests {
    /// First position.
    pub from: Position,
    /// One a position.
    pub list: Vec<[u8; 32]>,
}

/// What a stage has of a session that was open in an older view.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Its state holds the positions below, and at most those of the prompt.
    pub next: Position,
    /// sha256 of the token ids that made that state, as [`ids_digest`] does it.
    pub ids: [u8; 32],
    /// Positions whose results it can send again: from, and one past the last.
    pub journal: (Position, Position),
    /// The last frames that it took in; none at the head, whose frames are ids alone.
    pub inputs: Digests,
    /// Its last results that the journal has; none at the tail.
    pub outputs: Digests,
}

/// How a stage goes on with a session from an older view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuild {
    /// The first position that comes: what its state holds from there on is dropped. 0: all of it.
    pub from: Position,
    /// Positions below are history: true, never opened again, and reported when they are computed.
    pub history: Position,
    /// Results below stay in the stage's journal: the next stage has them.
    pub forward_from: Position,
    /// Results from here on are digested in the reports.
    pub digests_from: Position,
}

/// Counters of one session on one stage, to localize a fault.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SessionReport {
    /// The session.
    pub session: SessionId,
    /// Epoch adopted.
    pub epoch: Epoch,
    /// Next position to compute.
    pub next: Position,
    /// Frames received, computed, forwarded (replies, at the tail) and dropped by the fence.
    pub received: u64,
    /// See `received`.
    pub computed: u64,
    /// Those of `computed` that hold a single position past the prompt.
    pub decoded: u64,
    /// See `received`.
    pub forwarded: u64,
    /// See `received`.
    pub dropped: u64,
}

/// What a stage tells about itself.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StageReport {
    /// View obeyed.
    pub view: View,
    /// Open sessions.
    pub sessions: Vec<SessionReport>,
    /// Engine passes since start.
    pub passes: u64,
    /// Time in engine passes since start, in microseconds.
    pub busy_us: u64,
    /// Median of the last passes over single positions, in microseconds (drafting included).
    pub service_us: u64,
    /// Frames waiting for the engine.
    pub queued: u32,
    /// Weight tensors loaded since start, in bytes.
    pub loaded_bytes: u64,
    /// The hop that it sends on; `None` outside a ring.
    pub hop: Option<HopReport>,
}

/// A hop, as its sender measured it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HopReport {
    /// The next stage; for the tail, the coordinator.
    pub to: Node,
    /// From heartbeats; `None` before the first answer.
    pub rtt: Option<RoundTrip>,
    /// Bytes of frames sent and not yet taken in at the other end.
    pub in_flight: u64,
    /// Bytes of frames that may be.
    pub window: u64,
    /// Bytes per second that get through at most; 0 before anything did.
    pub rate: u64,
    /// Frames that wait to be sent.
    pub queued: u32,
}

/// Everything that is said on the control lane.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Control {
    /// First message, both ways.
    Hello(Hello),
    /// The sender does not go on with this peer; the connection closes.
    Refused {
        /// What was expected, what came, who must change what.
        reason: String,
    },
    /// Stage → coordinator, after hello and after every change.
    Offer(Offer),
    /// Coordinator → stage.
    Join(Box<Join>),
    /// Stage → coordinator: neighbours are connected, frames of the view may come.
    Joined {
        /// The view.
        view: View,
    },
    /// Stage → coordinator.
    JoinRefused {
        /// The view refused.
        view: View,
        /// The view it obeys.
        current: View,
        /// Why.
        reason: String,
    },
    /// Coordinator → stage.
    Open(Open),
    /// Stage → coordinator: the session's state is allocated.
    Opened {
        /// Membership.
        view: View,
        /// The session.
        session: SessionId,
        /// What it has, where [`Open::resumes`]; `None`: nothing.
        kept: Option<Box<Kept>>,
    },
    /// Coordinator → stage: go on with a session of an older view.
    Rebuild {
        /// The session.
        session: SessionId,
        /// How.
        rebuild: Rebuild,
    },
    /// Coordinator → stage: send the results of `from..to` to the next stage again.
    Replay {
        /// The session.
        session: SessionId,
        /// First position.
        from: Position,
        /// One past the last one.
        to: Position,
        /// The tail answers from this position on, to check itself.
        answer_from: Position,
    },
    /// Stage → coordinator: its journal has not what [`Control::Replay`] asks for, and is dropped.
    ReplayFailed {
        /// Membership.
        view: View,
        /// The session.
        session: SessionId,
        /// Why.
        reason: String,
    },
    /// Stage → coordinator: a part of the history is computed.
    Rebuilt {
        /// Membership.
        view: View,
        /// The session.
        session: SessionId,
        /// One past the last position computed.
        next: Position,
        /// Of the results; empty where none were asked for, and at the tail.
        outputs: Digests,
    },
    /// Stage → coordinator: the session fails here.
    Failed {
        /// Membership.
        view: View,
        /// The session.
        session: SessionId,
        /// Why, for the client and the log.
        reason: String,
    },
    /// Coordinator → stage: frees the session.
    Close {
        /// The session.
        session: SessionId,
        /// Positions that were settled.
        settled: Position,
    },
    /// Stage → coordinator: the session is freed; its final counters.
    Closed {
        /// The counters.
        report: SessionReport,
    },
    /// Coordinator → stage: frames of epochs below need not be computed. Idempotent.
    Cancel {
        /// The session.
        session: SessionId,
        /// First epoch that still matters.
        below: Epoch,
    },
    /// Coordinator → stage: report.
    Probe {
        /// Comes back in the report.
        nonce: u64,
    },
    /// Stage → coordinator.
    Report {
        /// Of the probe.
        nonce: u64,
        /// The report.
        report: Box<StageReport>,
    },
    /// Either way: alive?
    Heartbeat {
        /// Comes back in the answer.
        seq: u64,
    },
    /// Answer to a heartbeat.
    HeartbeatAck {
        /// Of the heartbeat.
        seq: u64,
    },
    /// Stage → coordinator: finishes what is open and takes nothing new.
    Draining,
    /// Coordinator → stage outside the ring: be a shadow in this view.
    Shadow {
        /// The view.
        view: View,
        /// Who sends copies: the stage in front of the one that is shadowed, or the coordinator; `None`: be
        /// none any more.
        source: Option<Node>,
    },
    /// Coordinator → stage: send final positions to the shadow of the next stage, too.
    Copy {
        /// Membership.
        view: View,
        /// The shadow; `None`: there is none any more.
        to: Option<Neighbour>,
    },
    /// Shadow → who sends it copies.
    Shadowed {
        /// Membership.
        view: View,
        /// The session.
        session: SessionId,
        /// The first position that it has not computed.
        next: Position,
        /// Nothing is waiting there: what was sent at or above `next` is to be sent again.
        again: bool,
    },
    /// Stage → coordinator: a neighbour is gone.
    NeighbourLost {
        /// Membership.
        view: View,
        /// The neighbour.
        peer: Node,
        /// What the link said.
        reason: String,
    },
}

impl Open {
    /// How hidden states cross the wire in front of `layer`. A hop at a layer that was no boundary when
    /// the session was first opened must change no bit, so it carries them as they are.
    #[must_use]
    pub fn encoding_at(&self, layer: u16) -> WireEncoding {
        if self.boundaries.contains(&layer) { self.encoding } else { WireEncoding::Bf16 }
    }
}

/// sha256 of token ids, each as four bytes, little-endian: names a history.
#[must_use]
pub fn ids_digest(ids: &[TokenId]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for id in ids {
        hash.update(id.0.to_le_bytes());
    }
    hash.finalize().into()
}

impl Hello {
    /// What this process says of itself.
    #[must_use]
    pub fn ours(role: Role, model_digest: [u8; 32]) -> Self {
        Self {
            protocol: PROTOCOL_VERSION,
            numerics: crate::engine::NUMERICS_ID.to_owned(),
            model_digest,
            role,
            software: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}
