//! Names of processes, and the numbers that travel: those of the engine, and [`Node`].
//!
//! Owns the identity of nodes; the rest is [`ringfence_engine::ids`].

use std::fmt;

use libp2p::PeerId;
pub use ringfence_engine::ids::*;
use serde::{Deserialize, Serialize};

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
