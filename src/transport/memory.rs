//! In-memory links for tests and simulation.
