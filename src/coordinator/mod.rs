//! Drives sessions: every session's pure [`crate::proto::round`], the ring's membership, and the
//! deadlines that turn a dead stage into a typed error.
//!
//! Holds no layer and no tensor. Pure: [`ring`] (the membership; what breaks it is decided in
//! [`crate::heal`]). Shell: [`run`] owns everything in one loop, `drive` is the part of it that moves
//! sessions, `rebuild` the part that brings them onto the next ring, `session` one of them, `status` what is told of the ring, `durable`
//! what waits for the [`log`], `attach` who reads on.
//! [`job`] is what the API sees, through [`handle`].

pub(crate) mod attach;
mod drive;
pub(crate) mod durable;
pub mod handle;
pub mod heals;
pub mod job;
pub mod log;
mod outbox;
mod rebuild;
pub mod ring;
pub mod run;
pub(crate) mod session;
mod shadow;
mod status;
#[cfg(test)]
mod tests;
mod unstarted;
