//! Records of a log file, pure: bytes to entries and back, and what a damaged file still says.
//!
//! A record is a batch that was synced as one: magic, length, number in the file, checksum, payload.
//! The checksum is keyed with the file's own number, so nobody who supplies a payload can put a valid
//! record into it.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::coordinator::job::{Client, Finish, Request, TokenScores};
use crate::coordinator::session::Arithmetic;
use crate::ids::{SessionId, TokenId, View};

/// Version of the format.
pub(crate) const LOG_VERSION: u16 = 3;

/// First bytes of every record.
const MAGIC: [u8; 4] = *b"RFLR";

/// Bytes in front of a payload: magic, length, number, checksum.
pub(crate) const HEAD_BYTES: usize = 20;

/// What the first record of a file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileHead {
    /// [`LOG_VERSION`].
    pub(crate) version: u16,
    /// Above every view in the files that were there when its coordinator started.
    pub(crate) view: View,
    /// Drawn by the coordinator at its start.
    pub(crate) start: u64,
    /// Files of one coordinator, from 0.
    pub(crate) part: u32,
    /// Digest of the model.
    pub(crate) model: [u8; 32],
    /// Name of the arithmetic.
    pub(crate) numerics: String,
}

/// A session as it was opened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Opened {
    pub(crate) session: SessionId,
    pub(crate) request: Request,
    pub(crate) arithmetic: Arithmetic,
    pub(crate) client: Client,
}

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ended {
    /// Well.
    Finished(Finish),
    /// Its client was told an error.
    Failed,
    /// Its client left and did not come back in time.
    Cancelled,
}

/// What a log is told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Entry {
    /// A view that is about to be joined.
    View(View),
    /// A session is opened.
    Opened(Box<Opened>),
    /// Tokens of a session are final.
    Tokens {
        session: SessionId,
        /// Place of the first one among the session's new tokens.
        first: u32,
        ids: Vec<TokenId>,
        /// One for each of them where the request asks for log-probabilities, else none.
        scores: Vec<TokenScores>,
    },
    /// A session is over.
    Ended { session: SessionId, how: Ended },
}

/// What is at a place of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next<'a> {
    /// A whole record and where the next one begins.
    Record { payload: &'a [u8], end: usize },
    /// The end of the file.
    End,
    /// A record that was not written to its end, and nothing behind it.
    Torn,
    /// A damaged record with whole ones behind it, or one that is missing.
    Broken { why: &'static str },
}

/// Frames a payload as record `serial` of the file keyed `start`; `None` where it is too long.
pub(crate) fn frame(start: u64, serial: u32, payload: &[u8]) -> Option<Vec<u8>> {
    let length = u32::try_from(payload.len()).ok()?;
    let mut bytes = Vec::with_capacity(HEAD_BYTES + payload.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&serial.to_le_bytes());
    bytes.extend_from_slice(&checksum(start, serial, payload));
    bytes.extend_from_slice(payload);
    Some(bytes)
}

/// Looks at the record at `at`, which should have the number `serial`.
pub(crate) fn next(bytes: &[u8], at: usize, start: u64, serial: u32) -> Next<'_> {
    if at >= bytes.len() {
        return Next::End;
    }
    match parse(bytes, at, start) {
        Some((found, payload, end)) if found == serial => Next::Record { payload, end },
        Some(_) => Next::Broken { why: "a record is missing in front of it" },
        None => {
            let behind = at + 1..bytes.len();
            let whole = behind.into_iter().any(|at| bytes[at] == MAGIC[0] && parse(bytes, at, start).is_some());
            if whole { Next::Broken { why: "its checksum does not fit, and whole records follow" } } else { Next::Torn }
        }
    }
}

/// A whole record at `at`: its number, its payload, its end.
fn parse(bytes: &[u8], at: usize, start: u64) -> Option<(u32, &[u8], usize)> {
    let (head, rest) = bytes.get(at..)?.split_at_checked(HEAD_BYTES)?;
    let (magic, head) = head.split_first_chunk::<4>()?;
    let (length, head) = head.split_first_chunk::<4>()?;
    let (serial, check) = head.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
    let payload = rest.get(..length)?;
    let serial = u32::from_le_bytes(*serial);
    (*magic == MAGIC && *check == checksum(start, serial, payload)).then_some((
        serial,
        payload,
        at + HEAD_BYTES + length,
    ))
}

/// The length is bound by the payload that is hashed.
fn checksum(start: u64, serial: u32, payload: &[u8]) -> [u8; 8] {
    let mut hash = Sha256::new();
    hash.update(start.to_le_bytes());
    hash.update(serial.to_le_bytes());
    hash.update(payload);
    let digest = hash.finalize();
    let mut check = [0; 8];
    check.copy_from_slice(&digest[..8]);
    check
}

/// The payload of a file's first record.
///
/// # Errors
/// That of postcard.
pub(crate) fn encode_head(head: &FileHead) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_allocvec(head)
}

/// The payload of a batch.
///
/// # Errors
/// That of postcard.
pub(crate) fn encode(entries: &[Entry]) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_allocvec(entries)
}

/// What a payload says; trailing bytes are refused.
///
/// # Errors
/// What can't be read, in words.
pub(crate) fn decode<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<T, String> {
    match postcard::take_from_bytes(payload) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(format!("{} bytes follow its last entry", rest.len())),
        Err(why) => Err(why.to_string()),
    }
}
