//! Frames between peers: the trait [`Link`], one implementation over libp2p QUIC and one in memory.
//!
//! A link carries opaque bodies between named peers: control messages in their order, frames and
//! replies in whatever order they arrive. It knows connections and queues; it knows no view and no
//! session.

pub mod credit;
pub mod endpoint;
mod events;
pub mod identity;
mod inflow;
pub mod memory;
pub mod quic;
pub mod redial;
pub mod scope;

use bytes::Bytes;
use futures::future::BoxFuture;
use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};

use crate::ids::Node;

pub use credit::HopStats;
pub use events::LinkEvents;

/// Longest body that a lane carries, in bytes; longer ones are refused on both sides, before
/// allocation.
pub const BODY_BYTES_MAX: u32 = 64 << 20;

/// Longest body on the control lane, in bytes.
pub const CONTROL_BYTES_MAX: u32 = 1 << 20;

/// Longest reply, in bytes: they wait for no credit.
pub const REPLY_BYTES_MAX: u32 = 8 << 20;

/// Bodies that wait to be sent, per peer and lane.
pub const SEND_QUEUE_MAX: usize = 256;

/// Events that wait to be taken by the owner of a link; of one connection's bodies, an eighth of them
/// for each lane.
pub const EVENT_QUEUE_MAX: usize = 1024;

/// Bytes of bodies that wait to be taken by the owner of a link.
pub const EVENT_BYTES_MAX: u32 = 4 * BODY_BYTES_MAX;

/// What a body is, which says how it travels. Lanes don't block one another.
///
/// On a new connection, a body on [`Lane::Data`] or [`Lane::Reply`] comes after every body that was
/// queued on [`Lane::Control`] before the connection's first ones, so a greeting is heard before
/// what it introduces. From then on the lanes know no order between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Control messages: in the order they were queued, never behind frames or replies.
    Control,
    /// Frames: in any order; how many may be under way is bounded by what the peer's owner takes.
    Data,
    /// Replies: in any order, before frames that wait.
    Reply,
}

/// What happens on a link, in the order it happened per peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkEvent {
    /// A connection to a peer stands and all lanes can be used. Comes once per peer until
    /// [`LinkEvent::Disconnected`].
    Connected {
        /// The peer, proven by its key.
        peer: Node,
        /// The address it was reached at, or came from.
        address: Multiaddr,
        /// Whether this side dialled.
        dialled: bool,
    },
    /// The connection is gone; bodies in queues are lost.
    Disconnected {
        /// The peer.
        peer: Node,
        /// Why, for a log or an error message.
        reason: String,
    },
    /// A body came in.
    Received {
        /// From whom.
        peer: Node,
        /// On which lane.
        lane: Lane,
        /// The bytes, uncopied since the socket's buffer.
        body: Bytes,
    },
}

/// Why a link could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// No connection to the peer.
    #[error("not connected to {peer}")]
    NotConnected {
        /// The peer.
        peer: Node,
    },
    /// The peer takes nothing in.
    #[error("the send queue to {peer} stayed full for {waited_ms} ms: the peer does not read")]
    Stalled {
        /// The peer.
        peer: Node,
        /// How long the sender waited.
        waited_ms: u64,
    },
    /// The body is longer than the lane carries.
    #[error("body of {got} bytes, the {lane:?} lane carries {limit} at most")]
    TooLong {
        /// Bytes of the body.
        got: usize,
        /// Bytes allowed.
        limit: u32,
        /// The lane.
        lane: Lane,
    },
    /// A dial failed.
    #[error("cannot reach {address}: {why}")]
    Dial {
        /// The address dialled.
        address: Multiaddr,
        /// What went wrong.
        why: String,
    },
    /// The link was shut down.
    #[error("the link is shut down")]
    Closed,
}

/// A way to reach peers.
pub trait Link: Send + Sync + 'static {
    /// This side's name.
    fn local(&self) -> Node;

    /// Addresses this side listens on, each ending in `/p2p/<peer>`.
    fn addresses(&self) -> Vec<Multiaddr>;

    /// Connects to an address that ends in `/p2p/<peer>` and says which node of that peer answered;
    /// returns at once if connected through that address already.
    /// [`LinkEvent::Connected`] comes before this returns `Ok`.
    fn dial(&self, address: Multiaddr) -> BoxFuture<'_, Result<Node, LinkError>>;

    /// Puts a body into the send queue of a lane, waiting for room (bounded by the link's stall
    /// deadline). `Ok` means queued, not delivered.
    fn send(&self, peer: Node, lane: Lane, body: Bytes) -> BoxFuture<'_, Result<(), LinkError>>;

    /// Puts a body into the send queue if there is room now.
    ///
    /// # Errors
    /// [`LinkError::Stalled`] with `waited_ms` 0 where the queue is full.
    fn try_send(&self, peer: Node, lane: Lane, body: Bytes) -> Result<(), LinkError>;

    /// Closes the connection to a peer; [`LinkEvent::Disconnected`] follows with this reason.
    fn disconnect(&self, peer: Node, reason: &str);

    /// What is known of the hop to a peer; `None` where there is none, or where nothing is measured.
    fn hop_stats(&self, peer: Node) -> Option<HopStats>;

    /// Closes everything and stops listening.
    fn shutdown(&self) -> BoxFuture<'_, ()>;
}

impl Lane {
    /// Longest body that the lane carries, in bytes.
    #[must_use]
    pub fn bytes_max(self) -> u32 {
        match self {
            Self::Control => CONTROL_BYTES_MAX,
            Self::Data => BODY_BYTES_MAX,
            Self::Reply => REPLY_BYTES_MAX,
        }
    }

    /// Checks a body's length against the lane's limit.
    ///
    /// # Errors
    /// [`LinkError::TooLong`] with both numbers.
    pub fn check(self, body: &Bytes) -> Result<(), LinkError> {
        if body.len() > self.bytes_max() as usize {
            return Err(LinkError::TooLong { got: body.len(), limit: self.bytes_max(), lane: self });
        }
        Ok(())
    }
}

/// Takes the peer off the end of an address: `(address without it, peer)`.
///
/// # Errors
/// [`LinkError::Dial`] where the address doesn't end in `/p2p/<peer>`.
pub(crate) fn split_peer(address: &Multiaddr) -> Result<(Multiaddr, PeerId), LinkError> {
    let mut rest = address.clone();
    match rest.pop() {
        Some(Protocol::P2p(peer)) => Ok((rest, peer)),
        _ => Err(LinkError::Dial {
            address: address.clone(),
            why: "the address must end in /p2p/ and the peer's id, as in the peer's READY line".to_owned(),
        }),
    }
}

/// Puts the peer at the end of an address, unless it is there.
pub(crate) fn with_peer(address: Multiaddr, peer: PeerId) -> Multiaddr {
    address.with_p2p(peer).unwrap_or_else(|other| other)
}
