//! The layers of a stage on an NVIDIA GPU, bit for bit what the CPU engine computes.
//!
//! [`driver`] is one device and its memory, [`nvrtc`] turns kernel sources into machine code,
//! [`kernels`] holds all of them. Nothing here needs CUDA to build, and nothing is process-wide.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests stop at the first surprise"))]

pub mod branch;
mod drafter;
pub mod driver;
pub mod engine;
pub mod error;
pub mod experts;
pub mod experts_tile;
mod fits;
mod floor;
mod graph;
pub mod kernels;
mod layer;
pub mod linear;
pub mod load;
mod many;
pub mod measure;
mod measure_many;
pub mod nvrtc;
pub mod ops;
mod params;
mod pass;
pub mod repack;
pub mod selftest;
pub mod state;
pub mod tile;
mod transfer;
pub mod weights;

pub use engine::{BuildError, CudaEngine, CudaSettings};
pub use error::CudaError;
