//! Bytes of frames, replies and control messages.
//!
//! Owns the layouts written down in `docs/protocol.md`, their caps, and every refusal of malformed
//! bytes. All numbers are little-endian. Decoding never panics, checks every count against the cap
//! and against the bytes that are there before it allocates, and refuses trailing bytes.

mod control;
mod data;
mod read;

pub use control::{
    ADDRESSES_MAX, CONTROL_HEADER_BYTES, CONTROL_MAGIC, DIGESTS_MAX, SESSIONS_MAX, bounded_reason, decode_control,
    encode_control,
};
pub use data::{
    DATA_MAGIC, Data, FRAME_HEADER_BYTES, FrameBuffer, REPLY_HEADER_BYTES, decode_data, encode_frame, encode_reply,
    frame_header_bytes,
};

use crate::ids::{Position, VIEW_MAX, View};

/// Longest frame or reply, in bytes, header included. Equals what a data lane carries.
pub const FRAME_BYTES_MAX: u32 = 64 << 20;

/// Most positions in one frame.
pub const FRAME_IDS_MAX: u32 = 8192;

/// Most tokens in one draft block.
pub const DRAFT_TOKENS_MAX: u32 = 64;

/// Most top tokens in the scores of one position.
pub const TOP_TOKENS_MAX: u16 = 64;

/// Longest control message, in bytes, header included. Equals what a control lane carries.
pub const CONTROL_BYTES_MAX: u32 = 1 << 20;

/// Why something of our own was not written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The head and the ids disagree, or there are none.
    #[error("frame head says {len} positions and comes with {ids} token ids: they must be equal and at least 1")]
    Ids {
        /// Positions in the head.
        len: u32,
        /// Ids given.
        ids: usize,
    },
    /// A list is longer than its cap.
    #[error("{what}: {got}, the limit is {limit}")]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// How many.
        got: usize,
        /// How many are allowed.
        limit: usize,
    },
    /// The whole message is longer than its lane carries.
    #[error("message of {got} bytes, the limit is {limit}: send fewer positions at once")]
    TooLong {
        /// Bytes of the message.
        got: usize,
        /// Bytes allowed.
        limit: u32,
    },
    /// A draft block without one confidence per token.
    #[error("draft block of {tokens} tokens with {confidence} confidences: they must be equal")]
    Draft {
        /// Tokens.
        tokens: usize,
        /// Confidences.
        confidence: usize,
    },
    /// A number that is no number.
    #[error("{what} is {got}, expected a finite number")]
    NotFinite {
        /// Which number.
        what: &'static str,
        /// What it is.
        got: String,
    },
    /// A view that no peer takes.
    #[error("view {got}, the highest one is {VIEW_MAX}")]
    View {
        /// The view.
        got: View,
    },
    /// The serializer refused.
    #[error("control message cannot be written: {why}")]
    Body {
        /// Its words.
        why: String,
    },
}

/// Why bytes of a peer were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not a message of this program.
    #[error("message starts with bytes {got:02x?}, expected {expected:02x?}: the peer does not speak this protocol")]
    Magic {
        /// What a message of this lane starts with.
        expected: [u8; 4],
        /// What came.
        got: [u8; 4],
    },
    /// Another version of the protocol, readable whatever follows it.
    #[error("peer speaks protocol {theirs}, this program speaks {ours}: {} must be upgraded", older(*.ours, *.theirs))]
    Version {
        /// Version of this program.
        ours: u16,
        /// Version of the peer.
        theirs: u16,
    },
    /// Neither frame nor reply.
    #[error("data message of kind {got}, expected 1 (frame) or 2 (reply)")]
    Kind {
        /// The kind that came.
        got: u8,
    },
    /// A byte or bit that must be zero is not.
    #[error("{what} holds {got:#x}, only zero is known there")]
    Reserved {
        /// Where.
        what: &'static str,
        /// What came.
        got: u32,
    },
    /// The message ends too early.
    #[error("message ends inside {what}: needs {needed} bytes more, has {got}")]
    Short {
        /// What was read.
        what: &'static str,
        /// Bytes needed.
        needed: usize,
        /// Bytes left.
        got: usize,
    },
    /// The message goes on after its end.
    #[error("message has {extra} bytes after its end")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// The whole message is longer than its lane carries.
    #[error("message of {got} bytes, the limit is {limit}")]
    TooLong {
        /// Bytes of the message.
        got: usize,
        /// Bytes allowed.
        limit: u32,
    },
    /// A count is above its cap.
    #[error("{what}: {got}, the limit is {limit}")]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// How many were announced.
        got: u64,
        /// How many are allowed.
        limit: u64,
    },
    /// No position, or positions past the last number.
    #[error("{len} positions from position {pos}: expected at least one and an end below 2^32")]
    Span {
        /// First position.
        pos: Position,
        /// How many.
        len: u32,
    },
    /// A number that is no number.
    #[error("{what} is {got}, expected a finite number")]
    NotFinite {
        /// Which number.
        what: &'static str,
        /// What it is.
        got: String,
    },
    /// A field is out of its range.
    #[error("{field} is {got}, expected {expected}")]
    Field {
        /// The field.
        field: &'static str,
        /// What came.
        got: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// The body of a control message does not parse.
    #[error("control message does not parse: {why}")]
    Body {
        /// What the parser said.
        why: String,
    },
}

/// Who has the lower version.
fn older(ours: u16, theirs: u16) -> &'static str {
    if ours < theirs { "this program" } else { "the peer" }
}

/// Checks that a view is one that a coordinator can give.
fn view_in_range(field: &'static str, view: View) -> Result<(), DecodeError> {
    let expected = "a view below 2^31";
    if view <= VIEW_MAX { Ok(()) } else { Err(DecodeError::Field { field, got: view.to_string(), expected }) }
}
