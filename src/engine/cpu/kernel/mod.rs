//! The canonical arithmetic on the CPU.
