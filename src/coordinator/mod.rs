//! Drives sessions: one task round the pure machine [`crate::proto::round`], the ring's
//! membership, and the deadlines that turn a dead stage into a typed error.
//!
//! Holds no layer and no tensor. [`job`] is what the API sees of it.

pub mod job;
pub mod plan;
