//! The ring protocol, pure: no I/O, no clock, no tensors.
//!
//! [`frame`] and [`control`] are what travels, [`codec`] how it is written. [`fence`] guards a
//! stage, [`frontier`] the tail's drafting, [`round`] drives one session in the coordinator with
//! the rule of [`accept`], [`liveness`] tells a slow peer from a dead one
//! and [`heartbeats`] keeps one for each, [`hello`] who fits.
//! `docs/protocol.md` has the rules and the byte layouts.

pub mod accept;
pub mod codec;
pub mod control;
pub mod fence;
pub mod frame;
pub mod frontier;
pub mod greeter;
pub mod heartbeats;
pub mod hello;
pub mod liveness;
pub mod round;
