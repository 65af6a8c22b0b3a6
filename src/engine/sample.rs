//! From logits to a token: greedy, or sampled as a pure function of (logits, seed, position).
