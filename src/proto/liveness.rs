//! Tells a slow peer from a dead one.
