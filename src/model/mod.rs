//! What a checkpoint says.
