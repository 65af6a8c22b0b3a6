//! The CPU engine: the model's semantics in the canonical arithmetic.

pub mod kernel;
