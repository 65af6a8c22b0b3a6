//! Journals against a plain list of positions; files as others leave them.

mod files;
mod model;
mod recent;

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};

use super::file::Disk;
use super::folder::Wrap;
use super::*;

/// What a test's disk does, shared with the test.
#[derive(Debug, Clone)]
struct Faults(Arc<Mutex<Limits>>);

#[derive(Debug)]
struct Limits {
    /// Files that can still be begun.
    files: u32,
    /// Bytes that can still be written.
    bytes: u64,
    /// Reads that still succeed.
    reads: u32,
    /// Cuts that still succeed.
    cuts: u32,
}

impl Faults {
    fn none() -> Self {
        Self(Arc::new(Mutex::new(Limits { files: u32::MAX, bytes: u64::MAX, reads: u32::MAX, cuts: u32::MAX })))
    }

    fn set(&self, change: impl FnOnce(&mut Limits)) {
        change(&mut self.0.lock().unwrap());
    }

    /// A layer with these faults.
    fn wrap(&self) -> Wrap {
        let faults = self.clone();
        Box::new(move |disk| {
            faults.take(|limits| limits.files.checked_sub(1).map(|left| limits.files = left), "no file")?;
            Ok(Box::new(Faulty { disk, faults: faults.clone() }))
        })
    }

    fn take(&self, take: impl FnOnce(&mut Limits) -> Option<()>, why: &str) -> io::Result<()> {
        take(&mut self.0.lock().unwrap()).ok_or_else(|| io::Error::new(io::ErrorKind::StorageFull, why.to_owned()))
    }
}

struct Faulty {
    disk: Box<dyn Disk>,
    faults: Faults,
}

impl Disk for Faulty {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let len = bytes.len() as u64;
        let room = self.faults.take(|limits| limits.bytes.checked_sub(len).map(|left| limits.bytes = left), "full");
        if room.is_err() {
            // As a full disk does: a part of it.
            self.disk.write_at(offset, &bytes[..bytes.len() / 2])?;
        }
        room.and_then(|()| self.disk.write_at(offset, bytes))
    }

    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.faults.take(|limits| limits.reads.checked_sub(1).map(|left| limits.reads = left), "unreadable")?;
        self.disk.read_at(offset, bytes)
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.faults.take(|limits| limits.cuts.checked_sub(1).map(|left| limits.cuts = left), "uncut")?;
        self.disk.truncate(length)
    }
}

/// Bytes of a position in most tests.
const EACH: usize = 24;

/// What such a position costs in memory.
const COST: u64 = EACH as u64 + 128;

fn config(memory: u64, folder: Option<&Path>, keep: Option<Retention>) -> JournalConfig {
    JournalConfig { memory, spill: folder.map(|folder| SpillConfig { folder: folder.to_owned(), keep }) }
}

fn journals(memory: u64, folder: Option<&Path>, keep: Option<Retention>) -> Journals {
    Journals::new(config(memory, folder, keep), "0:3").unwrap()
}

fn forever() -> Retention {
    Retention { bytes: u64::MAX, time: Duration::from_secs(86_400) }
}

/// The id and the bytes of a position, another one for every `round`.
fn row(pos: u32, round: u32, each: usize) -> (TokenId, Vec<u8>) {
    let seed = pos.wrapping_mul(0x9e37_79b9) ^ round.wrapping_mul(0x85eb_ca6b);
    (TokenId(seed >> 7), (0..each as u32).map(|i| (seed >> (i % 24)) as u8 ^ i as u8).collect())
}

/// Ids and payload of a frame; the payload is a part of the frame's buffer.
fn frame(pos: u32, len: u32, round: u32, each: usize) -> (Vec<TokenId>, Bytes) {
    let (mut ids, mut body) = (Vec::new(), BytesMut::new());
    body.put_bytes(0xee, 52);
    for pos in pos..pos + len {
        let (id, bytes) = row(pos, round, each);
        ids.push(id);
        body.extend_from_slice(&bytes);
    }
    (ids, body.freeze().slice(52..))
}

fn put(journals: &mut Journals, session: SessionId, pos: u32, len: u32) {
    let (ids, payload) = frame(pos, len, 0, EACH);
    journals.record(session, Position(pos), &ids, payload);
}

fn span(journals: &Journals, session: SessionId) -> (u32, u32) {
    let span = journals.span(session);
    (span.start.0, span.end.0)
}

/// The names in a folder, without the lock of a living process.
fn names(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| !name.ends_with(".lock")).collect();
    names.sort();
    names
}
