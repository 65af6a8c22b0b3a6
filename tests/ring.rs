//! The ring against one process: stages and coordinator as they are, over links in memory.
//!
//! Equal token ids for every cut of the layers, both encodings, drafted and plain, any number of
//! frames in flight, greedy and sampled; clean ends inside a block; one session never touches
//! another; a stage that dies is named, and the ring serves again once it is whole; with another stage
//! for its layers, the session goes on as if nothing had been, as it does with another coordinator.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "ring/disk.rs"]
mod disk;
#[path = "ring/ends.rs"]
mod ends;
#[path = "ring/equal.rs"]
mod equal;
#[path = "ring/faults.rs"]
mod faults;
#[path = "ring/heal.rs"]
mod heal;
#[path = "ring/rebuild.rs"]
mod rebuild;
#[path = "ring/restart.rs"]
mod restart;
#[path = "ring/rig.rs"]
mod rig;
#[path = "ring/scored.rs"]
mod scored;
#[path = "ring/scripted.rs"]
mod scripted;
#[path = "ring/shadow.rs"]
mod shadow;
#[path = "ring/two.rs"]
mod two;
