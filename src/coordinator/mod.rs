//! Drives sessions: every session's pure [`crate::proto::round`], the ring's membership, and the
//! deadlines that turn a dead stage into a typed error.
//!
//! Holds no layer and no tensor. Pure: [`plan`] (which offers tile the layers), [`ring`] (the
//! membership), [`localize`] (whom a missing reply is blamed on). Shell: [`run`] owns everything
//! in one loop, `drive` is the part of it that moves sessions, `session` one of them, `durable` what
//! waits for the [`log`], `attach` who reads on.
//! [`job`] is what the API sees, through [`handle`].

mod attach;
mod drive;
mod durable;
pub mod handle;
pub mod heals;
pub mod job;
pub mod localize;
pub mod log;
pub mod plan;
mod rebuild;
pub mod ring;
pub mod run;
mod session;
mod unstarted;
