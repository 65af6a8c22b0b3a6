//! What a checkpoint says.

pub mod format;
