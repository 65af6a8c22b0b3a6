//! The one accept rule, used by coordinator and tail.
