//! The identity file.
