//! The simulated disk under a coordinator's log: full at times, slow, and torn where its owner dies.
//!
//! What was synced stays; of what was only appended a part may be there after a crash. It reads what is
//! synced by itself, so that the invariants know what is durable without asking the coordinator.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::clock;
use crate::coordinator::log::Disk;
use crate::coordinator::log::folder::{Facts, Folder, Name};
use crate::coordinator::log::record::{self, Entry, Next};
use crate::ids::{SessionId, TokenId, View};
use crate::sim::draw::Draw;

#[derive(Debug, Default)]
struct File {
    bytes: Vec<u8>,
    /// So many of them are on the disk for sure.
    synced: usize,
    changed: u64,
    /// Up to where, and up to which record, it was read for what is durable.
    read: (usize, u32),
}

/// What is on a disk.
#[derive(Debug)]
pub(super) struct Store {
    files: BTreeMap<String, File>,
    draw: Draw,
    /// Nothing more fits.
    pub(super) full: bool,
    /// Tokens of each session that are synced, from the first on.
    durable: BTreeMap<SessionId, Vec<TokenId>>,
    view: View,
    /// What a record said that an earlier one contradicts.
    pub(super) contradiction: Option<String>,
}

/// A disk that processes of one machine share.
#[derive(Debug, Clone)]
pub(super) struct SimDisk(Arc<Mutex<Store>>);

impl SimDisk {
    pub(super) fn new(draw: Draw) -> Self {
        Self(Arc::new(Mutex::new(Store {
            files: BTreeMap::new(),
            draw,
            full: false,
            durable: BTreeMap::new(),
            view: View(0),
            contradiction: None,
        })))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Store> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes half a record behind what is there, as a process that dies while it writes.
    pub(super) fn tear(&self, payload: &[u8]) {
        let mut store = self.lock();
        let kept = store.draw.index(payload.len() + 1);
        if let Some(file) = store.files.values_mut().next_back() {
            // Not a whole record: its head is of no use without the rest.
            file.bytes.extend_from_slice(&record::frame(0, 0, payload).unwrap_or_default()[..kept]);
        }
    }
}

impl Store {
    /// How many tokens of a session are synced.
    pub(super) fn durable(&self, session: SessionId) -> &[TokenId] {
        self.durable.get(&session).map_or(&[], Vec::as_slice)
    }

    /// The highest view that is synced.
    pub(super) fn durable_view(&self) -> View {
        self.view
    }

    /// Reads what a file has synced since the last time.
    fn learn(&mut self, name: &str) {
        let Some(start) = Name::parse(name).map(|name| name.start) else { return };
        let Some(file) = self.files.get_mut(name) else { return };
        let mut entries = Vec::new();
        while let Next::Record { payload, end } =
            record::next(&file.bytes[..file.synced], file.read.0, start, file.read.1)
        {
            if file.read.1 > 0 {
                entries.extend(record::decode::<Vec<Entry>>(payload).unwrap_or_default());
            }
            file.read = (end, file.read.1 + 1);
        }
        for entry in entries {
            match entry {
                Entry::View(view) => self.view = self.view.max(view),
                Entry::Tokens { session, first, ids, .. } => self.learn_tokens(session, first as usize, &ids),
                Entry::Opened(_) | Entry::Ended { .. } => {}
            }
        }
    }

    fn learn_tokens(&mut self, session: SessionId, first: usize, ids: &[TokenId]) {
        let known = self.durable.entry(session).or_default();
        if first > known.len() {
            self.contradiction =
                Some(format!("tokens of session {session} from {first} on, {} are synced", known.len()));
            return;
        }
        if known[first..].iter().zip(ids).any(|(a, b)| a != b) {
            self.contradiction = Some(format!("session {session} has other tokens from {first} on than before"));
        }
        known.extend_from_slice(ids.get(known.len() - first..).unwrap_or_default());
    }
}

impl Folder for SimDisk {
    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.lock().files.keys().cloned().collect())
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        self.lock().files.get(name).map(|file| file.bytes.clone()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn Disk>> {
        let mut store = self.lock();
        if store.full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if store.files.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        store.files.insert(name.to_owned(), File { changed: clock::unix_seconds(), ..File::default() });
        drop(store);
        Ok(Box::new(SimFile { disk: self.clone(), name: name.to_owned() }))
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn facts(&self, name: &str) -> io::Result<Facts> {
        let store = self.lock();
        let file = store.files.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(Facts { bytes: file.bytes.len() as u64, changed: file.changed })
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.lock().files.remove(name).map(|_| ()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// A file on a simulated disk.
#[derive(Debug)]
struct SimFile {
    disk: SimDisk,
    name: String,
}

impl Disk for SimFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut store = self.disk.lock();
        let (full, now) = (store.full, clock::unix_seconds());
        let part = if full { store.draw.index(bytes.len() + 1) } else { bytes.len() };
        let file = store.files.get_mut(&self.name).ok_or(io::ErrorKind::NotFound)?;
        file.bytes.extend_from_slice(&bytes[..part]);
        file.changed = now;
        if full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut store = self.disk.lock();
        if store.full && store.draw.chance(30) {
            return Err(io::Error::other("input/output error"));
        }
        let file = store.files.get_mut(&self.name).ok_or(io::ErrorKind::NotFound)?;
        file.synced = file.bytes.len();
        store.learn(&self.name);
        Ok(())
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        let mut store = self.disk.lock();
        if store.draw.chance(20) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let file = store.files.get_mut(&self.name).ok_or(io::ErrorKind::NotFound)?;
        file.bytes.truncate(usize::try_from(length).unwrap_or(usize::MAX));
        Ok(())
    }

    fn remove(&mut self) -> io::Result<()> {
        Folder::remove(&self.disk, &self.name)
    }
}
