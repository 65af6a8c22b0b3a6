//! libp2p over QUIC: one swarm per process.
