//! What every link promises, checked on both implementations through the trait.

#![allow(clippy::unwrap_used, reason = "a test that fails, fails loudly")]

#[path = "transport/contract.rs"]
mod contract;
#[path = "transport/memory.rs"]
mod memory;
#[path = "transport/nodes.rs"]
mod nodes;
