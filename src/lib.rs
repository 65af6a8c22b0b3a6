//! Pipeline-ring inference of very large models on volunteers' GPUs.
//!
//! The path of a token, in the order of the modules:
//!
//! 1. [`api`] takes a request over HTTP and turns text into token ids;
//! 2. [`coordinator`] drives one session per request round the pure machine [`proto::round`];
//! 3. [`transport`] carries frames to the head and from stage to stage;
//! 4. [`node`] is one stage: it fences a frame, runs it through its [`engine`], and at the tail
//!    answers with the model's token and a fresh [`draft`] block;
//! 5. the reply travels back over [`transport`];
//! 6. [`api`] streams what the coordinator committed.
//!
//! [`proto`] is pure: no I/O, no clock, no tensors; so is [`heal`], which decides what a dead stage's
//! successor needs. [`model`] is what a checkpoint says; it and the engine are
//! a crate of their own, `crates/engine`. [`wan`]
//! emulates the network between the stages; [`sim`] runs all of it without one, under faults.

pub mod api;
pub mod cli;
pub mod clock;
pub mod config;
pub mod coordinator;
pub mod draft;
pub mod heal;
pub mod ids;
pub mod node;
pub mod proto;
pub mod sim;
pub mod transport;
pub mod wan;

pub use ringfence_engine::{engine, model};
