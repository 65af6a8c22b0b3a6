//! The bytes of a lane: length-prefixed bodies, and the link's own notes between them.
//!
//! A length is four bytes, little-endian. Its top bit marks a note: something that the links say
//! to each other and their owners never see. Lengths are checked before anything is allocated,
//! and a buffer grows with what came in, never with what was announced.

use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Buf, Bytes, BytesMut};
use futures::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::super::Lane;

/// Marks a note in the length prefix.
const NOTE: u32 = 1 << 31;

/// Bytes of a length prefix.
const PREFIX: usize = 4;

/// Longest note, in bytes.
const NOTE_BYTES_MAX: u32 = 1024;

/// Longest reason in a farewell, in bytes of UTF-8.
const REASON_BYTES_MAX: usize = 512;

/// Smallest room that a read is offered, in bytes.
const READ_STEP: usize = 32 << 10;

/// Bodies up to this many bytes are copied out of the read buffer, so that a small body kept for
/// long doesn't keep a large buffer alive.
const COPY_MAX: usize = 1 << 10;

/// Bodies that are queued are put together up to this many bytes a write.
const COALESCE: usize = 64 << 10;

/// What the links say to each other on the control lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Note {
    /// First on a connection, from both sides.
    Hello(Hello),
    /// From the smaller peer: this connection is the one to use.
    Accept {
        /// Rises with every connection that the sender accepted.
        serial: u64,
    },
    /// First on the data lane: what follows may be heard only after so many bodies on control.
    After {
        /// Bodies that were queued on control before.
        control: u64,
    },
    /// Last on a lane, from the side that closes.
    Farewell {
        /// Why.
        reason: String,
    },
}

/// How a side introduces a connection, so that the other can tell a copy of a living connection
/// from the successor of a dead one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// Drawn at the start of the sending process.
    pub(super) start: u64,
    /// The sender's number of this connection; rises within a process.
    pub(super) number: u64,
    /// The smallest number among the sender's living connections with the receiver.
    pub(super) oldest: u64,
}

/// What a lane brings.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    Body(Bytes),
    Note(Note),
}

/// What is put on a lane.
#[derive(Debug)]
pub(super) enum Outgoing {
    Body(Bytes),
    /// Ends the lane.
    Farewell(String),
}

/// Why a lane can't be read on.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LaneError {
    #[error("{lane:?} lane: a body of {got} bytes announced, {limit} at most")]
    TooLong { lane: Lane, got: u32, limit: u32 },
    #[error("{lane:?} lane: a note of {got} bytes announced, {limit} at most")]
    NoteTooLong { lane: Lane, got: u32, limit: u32 },
    #[error("{lane:?} lane: a note that is none that is known")]
    Malformed { lane: Lane },
    #[error("{lane:?} lane: {got} where {expected} must come")]
    Unexpected { lane: Lane, got: &'static str, expected: &'static str },
    #[error("{lane:?} lane: ended without a farewell")]
    Ended { lane: Lane },
    #[error("{lane:?} lane: {why}")]
    Broken { lane: Lane, why: String },
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

impl Note {
    fn encode(&self, into: &mut Vec<u8>) {
        let mut body = Vec::with_capacity(32);
        match self {
            Self::Hello(Hello { start, number, oldest }) => {
                body.push(1);
                for value in [start, number, oldest] {
                    body.extend_from_slice(&value.to_le_bytes());
                }
            }
            Self::Accept { serial } => {
                body.push(2);
                body.extend_from_slice(&serial.to_le_bytes());
            }
            Self::After { control } => {
                body.push(4);
                body.extend_from_slice(&control.to_le_bytes());
            }
            Self::Farewell { reason } => {
                body.push(3);
                let mut end = reason.len().min(REASON_BYTES_MAX);
                while !reason.is_char_boundary(end) {
                    end -= 1;
                }
                body.extend_from_slice(&reason.as_bytes()[..end]);
            }
        }
        // At most REASON_BYTES_MAX + 1 bytes.
        let length = body.len() as u32;
        into.extend_from_slice(&(NOTE | length).to_le_bytes());
        into.extend_from_slice(&body);
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        fn numbers<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
            let (words, []) = bytes.as_chunks::<8>() else { return None };
            <[[u8; 8]; N]>::try_from(words).ok().map(|words| words.map(u64::from_le_bytes))
        }
        let (kind, rest) = bytes.split_first()?;
        match kind {
            1 => {
                let [start, number, oldest] = numbers(rest)?;
                Some(Self::Hello(Hello { start, number, oldest }))
            }
            2 => {
                let [serial] = numbers(rest)?;
                Some(Self::Accept { serial })
            }
            4 => {
                let [control] = numbers(rest)?;
                Some(Self::After { control })
            }
            3 => {
                let text = std::str::from_utf8(rest).ok()?;
                // It goes into logs and onto terminals.
                Some(Self::Farewell { reason: text.chars().filter(|c| !c.is_control()).collect() })
            }
            _ => None,
        }
    }

    /// The note's name in an error message.
    fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "a hello",
            Self::Accept { .. } => "an accept",
            Self::After { .. } => "an after",
            Self::Farewell { .. } => "a farewell",
        }
    }
}

/// Reads a lane.
#[derive(Debug)]
pub(super) struct LaneReader<S> {
    lane: Lane,
    stream: S,
    /// `[..filled]` came in, the rest is room for the next read.
    buffer: BytesMut,
    filled: usize,
}

impl<S: AsyncRead + Unpin> LaneReader<S> {
    pub(super) fn new(lane: Lane, stream: S) -> Self {
        Self { lane, stream, buffer: BytesMut::new(), filled: 0 }
    }

    /// Reads the next body or note. Dropped while waiting, it loses nothing.
    pub(super) async fn next(&mut self) -> Result<Incoming, LaneError> {
        self.fill(PREFIX).await?;
        let mut prefix = [0; PREFIX];
        prefix.copy_from_slice(&self.buffer[..PREFIX]);
        let prefix = u32::from_le_bytes(prefix);
        let (lane, got) = (self.lane, prefix & !NOTE);
        let is_note = prefix & NOTE != 0;
        if is_note && got > NOTE_BYTES_MAX {
            return Err(LaneError::NoteTooLong { lane, got, limit: NOTE_BYTES_MAX });
        }
        if !is_note && got > lane.bytes_max() {
            return Err(LaneError::TooLong { lane, got, limit: lane.bytes_max() });
        }
        let length = got as usize;
        self.fill(PREFIX + length).await?;
        self.buffer.advance(PREFIX);
        self.filled -= PREFIX + length;
        if is_note {
            let note = Note::decode(&self.buffer[..length]).ok_or(LaneError::Malformed { lane })?;
            self.buffer.advance(length);
            return Ok(Incoming::Note(note));
        }
        if length <= COPY_MAX {
            let body = Bytes::copy_from_slice(&self.buffer[..length]);
            self.buffer.advance(length);
            return Ok(Incoming::Body(body));
        }
        Ok(Incoming::Body(self.buffer.split_to(length).freeze()))
    }

    /// Reads the next note, where nothing else may come.
    pub(super) async fn note(&mut self, expected: &'static str) -> Result<Note, LaneError> {
        match self.next().await? {
            Incoming::Note(note) => Ok(note),
            Incoming::Body(_) => Err(self.unexpected("a body", expected)),
        }
    }

    /// The error for something out of turn.
    pub(super) fn unexpected(&self, got: &'static str, expected: &'static str) -> LaneError {
        LaneError::Unexpected { lane: self.lane, got, expected }
    }

    /// The error for a note out of turn.
    pub(super) fn unexpected_note(&self, note: &Note, expected: &'static str) -> LaneError {
        self.unexpected(note.name(), expected)
    }

    /// Reads until `need` bytes are there.
    async fn fill(&mut self, need: usize) -> Result<(), LaneError> {
        while self.filled < need {
            if self.buffer.len() < need.min(self.filled + READ_STEP) {
                let room = need.min(2 * self.filled).max(self.filled + READ_STEP);
                self.buffer.resize(room, 0);
            }
            let Self { stream, buffer, filled, .. } = self;
            let read = poll_fn(|cx| Pin::new(&mut *stream).poll_read(cx, &mut buffer[*filled..])).await;
            let lane = self.lane;
            match read {
                Ok(0) => return Err(LaneError::Ended { lane }),
                Ok(bytes) => self.filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(LaneError::Broken { lane, why: chain(&error) }),
            }
        }
        Ok(())
    }
}

/// Writes a lane.
#[derive(Debug)]
pub(super) struct LaneWriter<S> {
    stream: S,
    scratch: Vec<u8>,
    /// Bodies queued on control; taken by the first body of the data lane.
    after: Option<Arc<AtomicU64>>,
}

impl<S: AsyncWrite + Unpin> LaneWriter<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, scratch: Vec::new(), after: None }
    }

    /// Makes the first body say how many bodies were queued on control before it.
    pub(super) fn after(&mut self, control: Arc<AtomicU64>) {
        self.after = Some(control);
    }

    /// Writes a note at once.
    pub(super) async fn note(&mut self, note: &Note) -> io::Result<()> {
        note.encode(&mut self.scratch);
        self.flush_scratch().await?;
        self.stream.flush().await
    }

    /// Writes what is queued, as it comes, until a farewell or until nobody can queue any more.
    ///
    /// What waits goes out in one write; a body alone does too, with its prefix.
    pub(super) async fn run(&mut self, queue: &mut mpsc::Receiver<Outgoing>) -> io::Result<()> {
        while let Some(first) = queue.recv().await {
            let mut next = Some(first);
            while let Some(outgoing) = next.take() {
                match outgoing {
                    Outgoing::Body(body) => self.body(body).await?,
                    Outgoing::Farewell(reason) => {
                        Note::Farewell { reason }.encode(&mut self.scratch);
                        self.flush_scratch().await?;
                        return self.stream.close().await;
                    }
                }
                if self.scratch.len() < COALESCE {
                    next = queue.try_recv().ok();
                }
            }
            self.flush_scratch().await?;
            self.stream.flush().await?;
        }
        self.stream.close().await
    }

    /// Puts a body into the scratch buffer, writing out what doesn't fit.
    async fn body(&mut self, body: Bytes) -> io::Result<()> {
        if let Some(control) = self.after.take() {
            Note::After { control: control.load(Ordering::Acquire) }.encode(&mut self.scratch);
        }
        // The sender checked the lane's limit, far below the note's bit.
        let length = body.len() as u32;
        self.scratch.extend_from_slice(&length.to_le_bytes());
        let (near, far) = body.split_at(body.len().min(COALESCE.saturating_sub(self.scratch.len())));
        self.scratch.extend_from_slice(near);
        if !far.is_empty() {
            self.flush_scratch().await?;
            self.stream.write_all(far).await?;
        }
        Ok(())
    }

    async fn flush_scratch(&mut self) -> io::Result<()> {
        let written = self.stream.write_all(&self.scratch).await;
        self.scratch.clear();
        written
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll};

    use futures::io::Cursor;
    use proptest::prelude::*;

    use super::*;

    /// Gives its bytes a few at a time, with a pause before each.
    struct Drip {
        bytes: Vec<u8>,
        at: usize,
        step: usize,
        paused: bool,
    }

    impl AsyncRead for Drip {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
            self.paused = !self.paused;
            if self.paused {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let bytes = into.len().min(self.step).min(self.bytes.len() - self.at);
            into[..bytes].copy_from_slice(&self.bytes[self.at..self.at + bytes]);
            self.at += bytes;
            Poll::Ready(Ok(bytes))
        }
    }

    async fn written(outgoing: Vec<Outgoing>) -> Vec<u8> {
        let (sender, mut queue) = mpsc::channel(outgoing.len().max(1));
        for item in outgoing {
            sender.try_send(item).unwrap();
        }
        drop(sender);
        let mut writer = LaneWriter::new(Cursor::new(Vec::new()));
        writer.run(&mut queue).await.unwrap();
        writer.stream.into_inner()
    }

    async fn all(mut reader: LaneReader<impl AsyncRead + Unpin>) -> (Vec<Incoming>, LaneError) {
        let mut heard = Vec::new();
        loop {
            match reader.next().await {
                Ok(incoming) => heard.push(incoming),
                Err(error) => return (heard, error),
            }
        }
    }

    fn announced(prefix: u32) -> LaneReader<Cursor<Vec<u8>>> {
        LaneReader::new(Lane::Control, Cursor::new(prefix.to_le_bytes().to_vec()))
    }

    #[tokio::test]
    async fn bodies_of_every_size_come_back_however_the_bytes_come() {
        let sizes = [0, 1, 3, COPY_MAX, COPY_MAX + 1, READ_STEP - 4, READ_STEP, COALESCE - 4, COALESCE, COALESCE + 1];
        let sizes = [&sizes[..], &[300_000, 2, 0, 70_000]].concat();
        let body = |size: usize| Bytes::from((0..size).map(|i| (i * 7 % 256) as u8).collect::<Vec<_>>());
        let bytes = written(sizes.iter().map(|&size| Outgoing::Body(body(size))).collect()).await;
        for step in [1_000_000, 4096, 1000, 7] {
            let drip = Drip { bytes: bytes.clone(), at: 0, step, paused: false };
            let (heard, end) = all(LaneReader::new(Lane::Data, drip)).await;
            assert_eq!(end, LaneError::Ended { lane: Lane::Data });
            assert_eq!(heard.len(), sizes.len());
            for (incoming, &size) in heard.iter().zip(&sizes) {
                assert!(*incoming == Incoming::Body(body(size)), "a body of {size} bytes in steps of {step}");
            }
        }
    }

    #[tokio::test]
    async fn lengths_are_refused_before_anything_is_allocated() {
        let lane = Lane::Control;
        let limit = lane.bytes_max();
        let mut reader = announced(limit + 1);
        assert_eq!(reader.next().await, Err(LaneError::TooLong { lane, got: limit + 1, limit }));
        assert!(reader.buffer.capacity() <= 2 * READ_STEP);
        let mut reader = announced(NOTE | (NOTE_BYTES_MAX + 1));
        let refused = LaneError::NoteTooLong { lane, got: NOTE_BYTES_MAX + 1, limit: NOTE_BYTES_MAX };
        assert_eq!(reader.next().await, Err(refused));
        // A length that is allowed takes no memory until the bytes come.
        let mut reader = announced(limit);
        assert_eq!(reader.next().await, Err(LaneError::Ended { lane }));
        assert!(reader.buffer.capacity() <= 2 * READ_STEP);
    }

    #[tokio::test]
    async fn notes_come_back_and_a_farewell_ends_the_lane() {
        let hello = Note::Hello(Hello { start: u64::MAX, number: 3, oldest: 2 });
        for note in [
            hello,
            Note::Accept { serial: 7 },
            Note::After { control: 2 },
            Note::Farewell { reason: "wrong numerics id".to_owned() },
        ] {
            let mut writer = LaneWriter::new(Cursor::new(Vec::new()));
            writer.note(&note).await.unwrap();
            let mut reader = LaneReader::new(Lane::Control, Cursor::new(writer.stream.into_inner()));
            assert_eq!(reader.next().await, Ok(Incoming::Note(note)));
        }
        let bodies = |n| Outgoing::Body(Bytes::from(vec![n]));
        let bytes = written(vec![bodies(1), Outgoing::Farewell("done".to_owned()), bodies(2)]).await;
        let (heard, _) = all(LaneReader::new(Lane::Control, Cursor::new(bytes))).await;
        let farewell = Note::Farewell { reason: "done".to_owned() };
        assert_eq!(heard, [Incoming::Body(Bytes::from_static(&[1])), Incoming::Note(farewell)]);
    }

    #[tokio::test]
    async fn a_reason_is_shortened_between_characters_and_cleaned() {
        let reason = "é".repeat(REASON_BYTES_MAX) + "\n";
        let bytes = written(vec![Outgoing::Farewell(reason)]).await;
        let (heard, _) = all(LaneReader::new(Lane::Control, Cursor::new(bytes))).await;
        assert_eq!(heard, [Incoming::Note(Note::Farewell { reason: "é".repeat(REASON_BYTES_MAX / 2) })]);
        let bytes = written(vec![Outgoing::Farewell("a\x1b[31m\nb".to_owned())]).await;
        let (heard, _) = all(LaneReader::new(Lane::Control, Cursor::new(bytes))).await;
        assert_eq!(heard, [Incoming::Note(Note::Farewell { reason: "a[31mb".to_owned() })]);
    }

    proptest! {
        #[test]
        fn no_input_panics_or_takes_more_memory_than_it_is_long(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let mut reader = LaneReader::new(Lane::Data, Cursor::new(bytes));
                while reader.next().await.is_ok() {}
                assert!(reader.buffer.capacity() <= 2 * READ_STEP);
            });
        }

        #[test]
        fn a_note_is_what_it_was_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some(note) = Note::decode(&bytes) {
                let mut again = Vec::new();
                note.encode(&mut again);
                prop_assert_eq!(Note::decode(&again[PREFIX..]), Some(note));
            }
        }
    }
}
