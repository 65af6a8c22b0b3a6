//! Positions in a file: a header, then records of one size.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use bytes::Bytes;

use crate::ids::{Position, TokenId};
use crate::node::journal::header::{HEADER_BYTES, Header};
use crate::node::journal::runs::Runs;

/// Bytes that are written or hashed at once, unless a record is longer.
const BATCH_BYTES: usize = 1 << 20;

/// What a file is for a journal.
pub(crate) trait Disk: Send {
    /// Writes all bytes at an offset; after an error a part may have been written.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Fills all bytes from an offset on; the file ending before is an error.
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Cuts the file off.
    fn truncate(&mut self, length: u64) -> io::Result<()>;
}

impl Disk for File {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(bytes, offset)
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }
}

/// A journal's file. Its header is true after every change, so that what a killed process leaves behind
/// can be read.
pub(crate) struct Records {
    disk: Box<dyn Disk>,
    header: Header,
}

impl Records {
    /// Begins a file without positions.
    pub(crate) fn begin(disk: Box<dyn Disk>, header: Header) -> io::Result<Self> {
        let mut records = Self { disk, header: Header { count: 0, ..header } };
        records.write_header()?;
        Ok(records)
    }

    /// Takes a file whose header was read from it and checked.
    pub(crate) fn existing(disk: Box<dyn Disk>, header: Header) -> Self {
        Self { disk, header }
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    pub(crate) fn first(&self) -> u32 {
        self.header.first.0
    }

    pub(crate) fn end(&self) -> u32 {
        self.header.end().0
    }

    fn write_header(&mut self) -> io::Result<()> {
        self.disk.write_at(0, &self.header.encode())
    }

    /// Positions that fit in a batch.
    fn batch(&self) -> u32 {
        (BATCH_BYTES / self.header.record_bytes()).max(1) as u32
    }

    /// Appends positions that `runs` hold, up to `to`. After an error nothing is known of the file.
    pub(crate) fn append(&mut self, runs: &Runs, from: u32, to: u32) -> io::Result<()> {
        if self.header.count == 0 {
            self.header.first = Position(from);
        }
        debug_assert_eq!(from, self.end(), "records follow one another");
        let most = self.batch();
        let mut bytes = Vec::with_capacity(most.min(to - from) as usize * self.header.record_bytes());
        let mut pos = from;
        while pos < to {
            let end = pos + most.min(to - pos);
            bytes.clear();
            for (_, id, payload) in runs.positions(pos, end) {
                bytes.extend_from_slice(&id.0.to_le_bytes());
                bytes.extend_from_slice(payload);
            }
            self.disk.write_at(self.header.offset(pos), &bytes)?;
            pos = end;
        }
        let header = Header { count: self.header.count + (to - from), ..self.header.clone() };
        self.disk.write_at(0, &header.encode())?;
        self.header = header;
        Ok(())
    }

    /// Drops the positions at or above `end`.
    pub(crate) fn truncate(&mut self, end: u32) -> io::Result<()> {
        if end >= self.end() {
            return Ok(());
        }
        self.header.count = end.saturating_sub(self.first());
        self.write_header()?;
        self.disk.truncate(self.header.file_bytes())
    }

    /// Says how the session stood when it was closed.
    pub(crate) fn finish(&mut self, settled: Position, closed: u64) -> io::Result<()> {
        self.header.settled = settled;
        self.header.closed = closed;
        self.write_header()
    }

    /// Remembers the settled floor for the next header that is written.
    pub(crate) fn settle(&mut self, settled: Position) {
        self.header.settled = settled;
    }

    /// Ids and payload of the positions `from..to`, which are in the file.
    pub(crate) fn read(&mut self, from: u32, to: u32) -> io::Result<(Vec<TokenId>, Bytes)> {
        let (position, count) = (self.header.position_bytes as usize, (to - from) as usize);
        let mut bytes = vec![0; count * self.header.record_bytes()];
        self.disk.read_at(self.header.offset(from), &mut bytes)?;
        let mut ids = Vec::with_capacity(count);
        // Payloads move to the front, over the ids that were read.
        for at in 0..count {
            let record = at * self.header.record_bytes();
            let mut id = [0; 4];
            id.copy_from_slice(&bytes[record..record + 4]);
            ids.push(TokenId(u32::from_le_bytes(id)));
            bytes.copy_within(record + 4..record + 4 + position, at * position);
        }
        bytes.truncate(count * position);
        Ok((ids, Bytes::from(bytes)))
    }

    /// Gives position, id and bytes of each of `from..to` to `each`.
    pub(crate) fn for_each(&mut self, from: u32, to: u32, mut each: impl FnMut(u32, TokenId, &[u8])) -> io::Result<()> {
        let position = self.header.position_bytes as usize;
        let mut pos = from;
        while pos < to {
            let end = pos + self.batch().min(to - pos);
            let (ids, payload) = self.read(pos, end)?;
            for (at, id) in ids.into_iter().enumerate() {
                each(pos + at as u32, id, &payload[at * position..(at + 1) * position]);
            }
            pos = end;
        }
        Ok(())
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.header.file_bytes()
    }
}

const _: () = assert!(BATCH_BYTES > HEADER_BYTES, "a batch is longer than a header");
