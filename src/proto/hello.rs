//! Who fits: checks a peer's hello.
