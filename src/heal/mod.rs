//! What to do when a ring broke: pure decisions, no I/O, no clock of its own, no model.
//!
//! [`rebuild`] says which positions each stage of the next ring has to compute again, and who sends
//! them; [`run`] carries that out for one session and checks the result before the session goes on.

pub mod rebuild;
pub mod run;
