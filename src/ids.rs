//! Names of processes, and the numbers that travel: those of the engine, [`Node`] and the bound of views.
//!
//! Owns the identity of nodes and [`VIEW_MAX`]; the rest is [`ringfence_engine::ids`].

use std::fmt;

use libp2p::PeerId;
pub use ringfence_engine::ids::*;
use serde::{Deserialize, Serialize};

/// The highest view. What is derived of a view has room: session ids of a log begin at view · 2^32, the
/// question that completes a join is 2^63 + view.
pub const VIEW_MAX: View = View((1 << 31) - 1);

/// A process: its key, and the number that it drew when it started.
///
/// A process that is restarted, or a second one with a copy of the key, is another node of the same
/// peer: what is meant for one never reaches the other. People see the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Node {
    /// The public half of its key.
    pub peer: PeerId,
    /// Drawn at its start.
    pub start: u64,
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.peer.fmt(f)
    }
}

impl Node {
    /// A node with a random name, for tests.
    #[must_use]
    pub fn random() -> Self {
        Self { peer: PeerId::random(), start: rand::random() }
    }
}
