//! The canonical arithmetic on the CPU: pure functions on slices.
//!
//! Every reduction has one written order (`docs/numerics.md`), so the bits of a result depend on
//! its operands only. Each operation is written once, over eight lanes of `simd::Simd`; [`Isa`]
//! picks the lanes, once, as a value. Nothing here allocates while it computes: callers bring
//! outputs and scratch.

#![allow(clippy::needless_range_loop, reason = "lanes, tiles and rows are indices of several arrays at once")]

pub mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
pub mod compress;
#[cfg(test)]
pub(crate) mod golden;
pub mod hyper;
pub mod indexer;
mod isa;
mod lanes;
pub mod linear;
pub mod math;
pub mod pool;
pub mod quant;
pub mod rope;
pub mod select;
pub(crate) mod simd;
#[cfg(test)]
mod tests;
pub mod vector;

pub use isa::Isa;
pub(crate) use isa::Job;
