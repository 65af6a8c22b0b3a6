//! The engine against vectors that the official code computed on the same checkpoint, within the
//! bounds of `crates/engine/tests/golden/README.md` (what a legal reordering of sums does).
//!
//! `cargo test -p ringfence-engine --test golden -- --nocapture` prints what was measured.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stdout, reason = "the distances are worth reading")]

#[path = "golden/layers.rs"]
mod layers;
#[path = "golden/read.rs"]
mod read;
#[path = "golden/whole.rs"]
mod whole;
