//! A stage's fence: which frames are computed, held or dropped. It saves work; the load-bearing
//! fence is the coordinator's receiver ([`crate::proto::round`]).
//!
//! Owns one session's epoch, next position, settled floor and held frames on one stage.
