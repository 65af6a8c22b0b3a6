//! Command lines: thin over library functions.
