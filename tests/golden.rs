//! The engine against vectors that the official code computed on the same checkpoint, within the
//! bounds of `tests/golden/README.md` (what a legal reordering of sums does).

#[path = "golden/layers.rs"]
mod layers;
#[path = "golden/read.rs"]
mod read;
#[path = "golden/whole.rs"]
mod whole;
