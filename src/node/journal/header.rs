//! The first bytes of a journal's file, which say what is in the rest.

use sha2::{Digest as _, Sha256};

use crate::ids::{Position, SessionId};
use crate::proto::codec::FRAME_BYTES_MAX;

/// First bytes of a file.
pub const JOURNAL_MAGIC: [u8; 4] = *b"RFJL";

/// Version of the layout.
pub const JOURNAL_VERSION: u16 = 1;

/// Bytes of a header. Records follow: token id (4 bytes, little-endian), then the position's bytes.
pub const HEADER_BYTES: usize = 256;

/// Longest label, in bytes.
pub const LABEL_BYTES_MAX: usize = 128;

const LABEL_AT: usize = 52;
const ZERO_AT: usize = LABEL_AT + LABEL_BYTES_MAX;
const SUM_AT: usize = HEADER_BYTES - 32;

/// What a journal's file says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Tag of the encoding, as in a position's digest.
    pub tag: u8,
    /// The session.
    pub session: SessionId,
    /// Number drawn by the process that wrote it.
    pub start: u64,
    /// Bytes of a position.
    pub position_bytes: u32,
    /// First position.
    pub first: Position,
    /// How many positions.
    pub count: u32,
    /// Positions below it were settled.
    pub settled: Position,
    /// When the session was closed, seconds since 1970; 0: its process ended first.
    pub closed: u64,
    /// What the stage said of itself.
    pub label: String,
}

/// Why bytes are no header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Too few bytes.
    #[error("{got} bytes, a header has {HEADER_BYTES}")]
    Short {
        /// Bytes that there are.
        got: u64,
    },
    /// It is something else.
    #[error("it begins with {got:02x?}: no journal, which begins with {JOURNAL_MAGIC:02x?}")]
    Magic {
        /// Its first bytes.
        got: [u8; 4],
    },
    /// It is of another version.
    #[error("version {got}, this program reads {JOURNAL_VERSION}")]
    Version {
        /// Its version.
        got: u16,
    },
    /// The header is damaged.
    #[error("the header does not have the sha256 that it ends with: it is damaged")]
    Sum,
    /// A field can't be so.
    #[error("{what} is {got}, expected {expected}")]
    Field {
        /// The field.
        what: &'static str,
        /// Its value.
        got: u64,
        /// What it must be.
        expected: &'static str,
    },
    /// The label is no text.
    #[error("the label is no UTF-8")]
    Label,
}

impl Header {
    /// Bytes of a record.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        record_bytes(self.position_bytes as usize)
    }

    /// One past the last position.
    #[must_use]
    pub fn end(&self) -> Position {
        self.first.plus(self.count)
    }

    /// Bytes of the whole file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.offset(self.end().0)
    }

    /// Where the record of a position that is not below the first begins.
    pub(crate) fn offset(&self, pos: u32) -> u64 {
        HEADER_BYTES as u64 + u64::from(pos - self.first.0) * self.record_bytes() as u64
    }

    /// As bytes; a label that is too long is cut.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut label = self.label.len().min(LABEL_BYTES_MAX);
        while !self.label.is_char_boundary(label) {
            label -= 1;
        }
        bytes[0..4].copy_from_slice(&JOURNAL_MAGIC);
        bytes[4..6].copy_from_slice(&JOURNAL_VERSION.to_le_bytes());
        bytes[6] = self.tag;
        bytes[8..16].copy_from_slice(&self.session.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.start.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.position_bytes.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.first.0.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.count.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.settled.0.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.closed.to_le_bytes());
        bytes[48..52].copy_from_slice(&(label as u32).to_le_bytes());
        bytes[LABEL_AT..LABEL_AT + label].copy_from_slice(&self.label.as_bytes()[..label]);
        let sum = Sha256::digest(&bytes[..SUM_AT]);
        bytes[SUM_AT..].copy_from_slice(&sum);
        bytes
    }

    /// Reads the header at the beginning of `bytes`.
    ///
    /// # Errors
    /// [`HeaderError`] says what is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let (at, _) =
            bytes.split_first_chunk::<HEADER_BYTES>().ok_or(HeaderError::Short { got: bytes.len() as u64 })?;
        let magic = [at[0], at[1], at[2], at[3]];
        if magic != JOURNAL_MAGIC {
            return Err(HeaderError::Magic { got: magic });
        }
        let version = u16::from_le_bytes([at[4], at[5]]);
        if version != JOURNAL_VERSION {
            return Err(HeaderError::Version { got: version });
        }
        if Sha256::digest(&at[..SUM_AT])[..] != at[SUM_AT..] {
            return Err(HeaderError::Sum);
        }
        let field = |what, got, expected| Err(HeaderError::Field { what, got, expected });
        let header = Self {
            tag: at[6],
            session: SessionId(u64_at(at, 8)),
            start: u64_at(at, 16),
            position_bytes: u32_at(at, 24),
            first: Position(u32_at(at, 28)),
            count: u32_at(at, 32),
            settled: Position(u32_at(at, 36)),
            closed: u64_at(at, 40),
            label: label(at)?,
        };
        if at[7] != 0 {
            return field("the byte behind the tag", u64::from(at[7]), "0");
        }
        if header.position_bytes > FRAME_BYTES_MAX {
            return field("bytes of a position", u64::from(header.position_bytes), "no more than a frame holds");
        }
        if header.first.0.checked_add(header.count).is_none() {
            return field("number of positions", u64::from(header.count), "an end that is a position");
        }
        Ok(header)
    }
}

/// Bytes of a record of positions of so many bytes.
pub(crate) fn record_bytes(position_bytes: usize) -> usize {
    4 + position_bytes
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn label(bytes: &[u8; HEADER_BYTES]) -> Result<String, HeaderError> {
    let len = u32_at(bytes, 48) as usize;
    if len > LABEL_BYTES_MAX {
        return Err(HeaderError::Field { what: "length of the label", got: len as u64, expected: "128 at most" });
    }
    if let Some(&byte) = bytes[LABEL_AT + len..SUM_AT].iter().find(|&&byte| byte != 0) {
        return Err(HeaderError::Field { what: "a byte behind the label", got: u64::from(byte), expected: "0" });
    }
    let text = std::str::from_utf8(&bytes[LABEL_AT..LABEL_AT + len]).map_err(|_| HeaderError::Label)?;
    Ok(text.to_owned())
}

const _: () = assert!(ZERO_AT <= SUM_AT, "the label ends in front of the sum");

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            tag: 2,
            session: SessionId(7 << 32 | 9),
            start: u64::MAX - 1,
            position_bytes: 16_424,
            first: Position(5),
            count: 1_000,
            settled: Position(900),
            closed: 1_790_000_000,
            label: "40:43".to_owned(),
        }
    }

    /// The header with another byte, and a sum that is right.
    fn with(at: usize, bytes: &[u8]) -> [u8; HEADER_BYTES] {
        let mut all = header().encode();
        all[at..at + bytes.len()].copy_from_slice(bytes);
        let sum = Sha256::digest(&all[..SUM_AT]);
        all[SUM_AT..].copy_from_slice(&sum);
        all
    }

    #[test]
    fn a_header_says_what_was_written() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
        let longest = Header { label: "x".repeat(LABEL_BYTES_MAX), ..header() };
        assert_eq!(Header::decode(&longest.encode()), Ok(longest));
        let cut = Header { label: format!("x{}", "é".repeat(64)), ..header() };
        assert_eq!(Header::decode(&cut.encode()).map(|header| header.label), Ok(format!("x{}", "é".repeat(63))));
    }

    #[test]
    fn every_bit_of_a_header_counts() {
        let good = header().encode();
        for bit in 0..8 * HEADER_BYTES {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn fields_that_can_t_be_are_refused_though_the_sum_is_right() {
        let refused = |at, bytes: &[u8]| Header::decode(&with(at, bytes)).unwrap_err().to_string();
        assert_eq!(refused(7, &[1]), "the byte behind the tag is 1, expected 0");
        assert!(refused(24, &[255; 4]).starts_with("bytes of a position is 4294967295"));
        assert!(refused(32, &[255; 4]).starts_with("number of positions is 4294967295"));
        assert_eq!(refused(48, &[129, 0, 0, 0]), "length of the label is 129, expected 128 at most");
        assert_eq!(refused(LABEL_AT, &[0xff]), "the label is no UTF-8");
        assert_eq!(refused(SUM_AT - 1, &[3]), "a byte behind the label is 3, expected 0");
        assert_eq!(refused(4, &[2]), "version 2, this program reads 1");
        assert!(refused(0, b"GGUF").contains("no journal"));
        assert_eq!(Header::decode(&[0; 3]), Err(HeaderError::Short { got: 3 }));
    }
}
