//! One stage: holds a layer range and serves the sessions of the ring it joined.
//!
//! Two owners. The shell (`shell.rs`, started by [`serve`]) is async and never computes: it
//! greets peers, obeys one coordinator, answers heartbeats and probes at once, and hands frames on. The worker
//! ([`worker`], driven by [`worker::thread`]) owns the engine and every session ([`session`], at the tail
//! with [`tail`]): it fences, computes and forwards. They share only counters ([`counters`]). What was
//! sent is in the [`journal`].

pub mod counters;
pub(crate) mod dial;
pub mod hop;
pub mod journal;
pub mod leave;
pub mod membership;
pub mod serve;
pub mod session;
pub(crate) mod shell;
pub mod tail;
pub mod worker;
