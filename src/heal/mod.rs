//! What to do when a ring broke: pure decisions, no I/O, no clock of its own, no model.
//!
//! [`decide`] says who is to blame for what was seen, and which ring comes next: [`localize`] finds the
//! stage at which frames stop, [`tiling`] which offers cover the layers. [`rebuild`] says which positions
//! each stage of that ring has to compute again, and who sends them; [`run`] carries that out for one
//! session and checks the result before the session goes on. [`copies`] says what a shadow gets before
//! anything broke.

pub mod copies;
pub mod decide;
pub mod localize;
pub mod rebuild;
pub mod run;
pub mod tiling;
