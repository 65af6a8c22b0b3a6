//! The QUIC transport below the link, as libp2p's swarm uses it.

#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test that fails, fails loudly")]

#[path = "endpoint/dial.rs"]
mod dial;
#[path = "endpoint/interop.rs"]
mod interop;
#[path = "endpoint/path.rs"]
mod path;
#[path = "endpoint/priority.rs"]
mod priority;
#[path = "endpoint/punch.rs"]
mod punch;
#[path = "endpoint/rig.rs"]
mod rig;
#[path = "endpoint/settings.rs"]
mod settings;
