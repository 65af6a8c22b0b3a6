//! Reads a lane: length-prefixed bodies, and the link's own notes between them.
//!
//! A length is four bytes, little-endian. Its upper bits say what follows: a note that the links
//! say to each other, a reply rather than a frame, and whether a frame's sender waits for its
//! credit. Lengths are checked before anything is allocated, and a buffer grows with what came in,
//! never with what was announced.

use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use futures::AsyncRead;
use tokio::time::Sleep;

use super::super::Lane;
use super::super::credit::{Flood, cost};
use super::super::inflow::Inflow;
use super::note::{NOTE_BYTES_MAX, Note};
use crate::clock;

/// Marks a note in the length prefix.
pub(super) const NOTE: u32 = 1 << 31;

/// Marks a reply, on a data lane.
pub(super) const REPLY: u32 = 1 << 30;

/// Marks a frame whose sender waits for its credit, on a data lane.
pub(super) const ASKED: u32 = 1 << 29;

/// Bytes of a length prefix.
pub(super) const PREFIX: usize = 4;

/// Smallest room that a read is offered, in bytes.
const READ_STEP: usize = 32 << 10;

/// Bodies up to this many bytes are copied out of the read buffer, so that a small body kept for
/// long doesn't keep a large buffer alive.
const COPY_MAX: usize = 1 << 10;

/// A stream's name in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Control,
    /// A data lane that has not said its number.
    Nameless,
    Data(u64),
}

impl Place {
    /// The error for something out of turn.
    pub(super) fn unexpected(self, got: &'static str, expected: &'static str) -> LaneError {
        LaneError::Unexpected { place: self, got, expected }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Control => f.write_str("control lane"),
            Self::Nameless => f.write_str("data lane"),
            Self::Data(number) => write!(f, "data lane {number}"),
        }
    }
}

/// What a lane brings.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    Body {
        lane: Lane,
        /// Whether its sender waits for its credit.
        asked: bool,
        body: Bytes,
    },
    Note(Note),
}

/// Why a lane can't be read on.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LaneError {
    #[error("{place}: a body of {got} bytes announced, {limit} at most")]
    TooLong { place: Place, got: u32, limit: u32 },
    #[error("{place}: a note of {got} bytes announced, {limit} at most")]
    NoteTooLong { place: Place, got: u32, limit: u32 },
    #[error("{place}: a note that is none that is known")]
    Malformed { place: Place },
    #[error("{place}: {got} where {expected} must come")]
    Unexpected { place: Place, got: &'static str, expected: &'static str },
    #[error("{place}: {flood}")]
    Flood { place: Place, flood: Flood },
    #[error("{place}: nothing came for {waited_ms} ms in the middle of {got} of {need} bytes")]
    Stalled { place: Place, waited_ms: u128, got: usize, need: usize },
    #[error("{place}: ended without a farewell")]
    Ended { place: Place },
    #[error("{place}: {why}")]
    Broken { place: Place, why: String },
}

/// An error with its causes, in one line.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.ends_with(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}

/// What a length prefix announces.
#[derive(Debug, Clone, Copy)]
struct Header {
    bytes: usize,
    /// Whose body; a note without.
    lane: Option<Lane>,
    asked: bool,
}

/// Reads a lane.
#[derive(Debug)]
pub(super) struct LaneReader<S> {
    place: Place,
    stream: S,
    /// `[..filled]` came in, the rest is room for the next read.
    buffer: BytesMut,
    filled: usize,
    header: Option<Header>,
    stall: Stall,
    /// Where frames are counted.
    inflow: Option<Arc<Inflow>>,
}

impl<S: AsyncRead + Unpin> LaneReader<S> {
    /// Reads a lane whose sender may pause for `patience` in the middle of a body.
    pub(super) fn new(place: Place, stream: S, patience: Duration) -> Self {
        let stall = Stall { patience, moved: clock::now(), sleep: None };
        Self { place, stream, buffer: BytesMut::new(), filled: 0, header: None, stall, inflow: None }
    }

    /// Says which data lane it is, and where its frames are counted.
    pub(super) fn name(&mut self, number: u64, inflow: Arc<Inflow>) {
        self.place = Place::Data(number);
        self.inflow = Some(inflow);
    }

    /// Which lane it is.
    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Reads the next body or note. Dropped while waiting, it loses nothing.
    pub(super) async fn next(&mut self) -> Result<Incoming, LaneError> {
        let header = match self.header {
            Some(header) => header,
            None => {
                self.fill(PREFIX).await?;
                let header = self.announced()?;
                self.header = Some(header);
                header
            }
        };
        let place = self.place;
        self.fill(PREFIX + header.bytes).await?;
        self.header = None;
        self.buffer.advance(PREFIX);
        self.filled -= PREFIX + header.bytes;
        let Some(lane) = header.lane else {
            let note = Note::decode(&self.buffer[..header.bytes]).ok_or(LaneError::Malformed { place })?;
            self.buffer.advance(header.bytes);
            return Ok(Incoming::Note(note));
        };
        let body = if header.bytes <= COPY_MAX {
            let body = Bytes::copy_from_slice(&self.buffer[..header.bytes]);
            self.buffer.advance(header.bytes);
            body
        } else {
            self.buffer.split_to(header.bytes).freeze()
        };
        Ok(Incoming::Body { lane, asked: header.asked, body })
    }

    /// Judges the length prefix, which is there.
    fn announced(&self) -> Result<Header, LaneError> {
        let place = self.place;
        let mut prefix = [0; PREFIX];
        prefix.copy_from_slice(&self.buffer[..PREFIX]);
        let prefix = u32::from_le_bytes(prefix);
        if prefix & NOTE != 0 {
            let (got, limit) = (prefix & !NOTE, NOTE_BYTES_MAX);
            if got > limit {
                return Err(LaneError::NoteTooLong { place, got, limit });
            }
            return Ok(Header { bytes: got as usize, lane: None, asked: false });
        }
        let (lane, flags) = match place {
            Place::Control => (Lane::Control, 0),
            Place::Nameless | Place::Data(_) if prefix & REPLY != 0 => (Lane::Reply, REPLY),
            Place::Nameless | Place::Data(_) => (Lane::Data, ASKED),
        };
        let (got, limit) = (prefix & !flags, lane.bytes_max());
        if got > limit {
            return Err(LaneError::TooLong { place, got, limit });
        }
        let bytes = got as usize;
        if let (Lane::Data, Some(inflow)) = (lane, &self.inflow) {
            inflow.arrived(cost(bytes)).map_err(|flood| LaneError::Flood { place, flood })?;
        }
        Ok(Header { bytes, lane: Some(lane), asked: prefix & flags & ASKED != 0 })
    }

    /// Reads the next note, where nothing else may come.
    pub(super) async fn note(&mut self, expected: &'static str) -> Result<Note, LaneError> {
        match self.next().await? {
            Incoming::Note(note) => Ok(note),
            Incoming::Body { .. } => Err(self.place.unexpected("a body", expected)),
        }
    }

    /// Reads until `need` bytes are there.
    async fn fill(&mut self, need: usize) -> Result<(), LaneError> {
        if self.filled < need {
            // Until here it was the owner who took nothing.
            self.stall.moved = clock::now();
        }
        while self.filled < need {
            if self.buffer.len() < need.min(self.filled + READ_STEP) {
                let room = need.min(2 * self.filled).max(self.filled + READ_STEP);
                self.buffer.resize(room, 0);
            }
            let read = poll_fn(|cx| self.poll_fill(cx)).await;
            let place = self.place;
            match read {
                Ok(None) => {
                    let waited_ms = self.stall.patience.as_millis();
                    return Err(LaneError::Stalled { place, waited_ms, got: self.filled, need });
                }
                Ok(Some(0)) => return Err(LaneError::Ended { place }),
                Ok(Some(bytes)) => {
                    self.filled += bytes;
                    self.stall.moved = clock::now();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(LaneError::Broken { place, why: chain(&error) }),
            }
        }
        Ok(())
    }

    /// Reads what is there; `None` where the sender paused too long in the middle of something.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<usize>>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, &mut self.buffer[self.filled..]);
        if read.is_pending() && self.filled > 0 {
            return self.stall.poll(cx).map(|()| Ok(None));
        }
        read.map_ok(Some)
    }
}

/// Watches over a pause. Its timer is set once and looked at when it rings, so that bytes which
/// come set none.
#[derive(Debug)]
struct Stall {
    patience: Duration,
    /// When bytes came last.
    moved: Instant,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Stall {
    /// Ready when nothing has come for too long.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let due = self.moved + self.patience;
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due.into())));
        loop {
            ready!(sleep.as_mut().poll(cx));
            if clock::now() >= due {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(due.into());
        }
    }
}

#[cfg(test)]
mod tests;
