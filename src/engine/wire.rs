//! Hidden states on the wire: `[s, hc, dim]` bf16 to bytes and back.
