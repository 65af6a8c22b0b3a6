//! Bytes of frames, replies and control messages.
