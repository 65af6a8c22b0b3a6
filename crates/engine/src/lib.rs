//! What a model is and how its layers are computed: no socket, no frame, no ring.
//!
//! [`model`] reads a checkpoint; [`engine`] runs a range of its layers and picks tokens; [`ids`] are
//! the numbers that both of them and the ring speak of. A crate of its own, so that it is compiled
//! for speed while the rest is compiled quickly.

pub mod engine;
pub mod ids;
pub mod model;
