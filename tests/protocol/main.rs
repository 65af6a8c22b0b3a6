//! The machines of the protocol together: a toy model's ring in memory, every delivery order that
//! lanes and cancels allow, and the bytes of everything that travels.

#![allow(clippy::unwrap_used, reason = "in a test a failed unwrap is a failed test")]

mod arbitrary;
mod codec;
mod counting;
mod fence_orders;
mod ring;
mod rings;
mod round;
mod toy;
mod views;
