//! The tail's view of the truth: which positions have a true history, so may draft.
