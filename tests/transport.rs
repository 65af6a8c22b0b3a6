//! What every link promises, checked on both implementations through the trait.

#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test that fails, fails loudly")]

#[path = "transport/contract.rs"]
mod contract;
#[path = "transport/far.rs"]
mod far;
#[path = "transport/full.rs"]
mod full;
#[path = "transport/memory.rs"]
mod memory;
#[path = "transport/misbehave.rs"]
mod misbehave;
#[path = "transport/nodes.rs"]
mod nodes;
#[path = "transport/proxy.rs"]
mod proxy;
#[path = "transport/quic.rs"]
mod quic;
#[path = "transport/rogue.rs"]
mod rogue;
