//! Command lines: thin over library functions.

pub mod client;
pub mod generate;
pub mod ids;
pub mod score;
mod screen;
