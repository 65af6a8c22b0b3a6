//! The thread that writes a log: one batch at a time, each synced before it is said to be durable.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::sync::mpsc as wakes;

use crate::clock;
use crate::config::LogSettings;
use crate::coordinator::log::Disk;
use crate::coordinator::log::folder::{self, Folder, Name};
use crate::coordinator::log::record::{self, FileHead};

/// What became of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Synced {
    /// It is on the disk.
    Durable,
    /// The next file could not be begun: the batch is nowhere, and the present file goes on.
    Same { why: String },
    /// It is not in the file.
    Failed { why: String },
    /// It may be in the file or not, and nothing more can be written.
    Dead { why: String },
    /// It is on the disk, and so is the log of a coordinator that was started later and leads instead.
    Superseded { why: String },
}

/// What the thread is told.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Entries as they were encoded.
    pub(crate) payload: Vec<u8>,
    /// It begins a file, for it says everything that is still wanted of those before.
    pub(crate) fresh: bool,
    /// It has a view that is about to be joined: only the newest coordinator of the folder may.
    pub(crate) leads: bool,
}

/// The way to the thread.
#[derive(Debug)]
pub(crate) struct Writer {
    batches: mpsc::SyncSender<Batch>,
}

/// What is to be written, one batch at a time.
pub(crate) type Batches = mpsc::Receiver<Batch>;

/// Starts the thread, which ends with the writer.
pub(crate) fn start(mut scribe: Scribe, batches: Batches) -> io::Result<wakes::Receiver<Synced>> {
    let (done, synced) = wakes::channel(1);
    std::thread::Builder::new().name("log".to_owned()).spawn(move || {
        while let Ok(batch) = batches.recv() {
            if done.blocking_send(scribe.write(&batch)).is_err() {
                break;
            }
        }
        scribe.tell_cost();
    })?;
    Ok(synced)
}

impl Writer {
    /// A writer and the other end of it.
    pub(crate) fn new() -> (Self, Batches) {
        let (batches, inbox) = mpsc::sync_channel::<Batch>(1);
        (Self { batches }, inbox)
    }

    /// Hands a batch over; the one before has been answered.
    pub(crate) fn send(&self, batch: Batch) -> Result<(), &'static str> {
        self.batches.try_send(batch).map_err(|_| "its thread has ended")
    }
}

/// What the thread owns.
pub(crate) struct Scribe {
    folder: Arc<dyn Folder>,
    settings: LogSettings,
    head: FileHead,
    disk: Box<dyn Disk>,
    /// Bytes of whole records.
    length: u64,
    /// Number of the next record.
    serial: u32,
    /// Why nothing can be written any more: what is on the disk is not known.
    dead: Option<String>,
    batches: u32,
    spent: Duration,
}

impl Scribe {
    /// Begins the file that `head` names: its first record and one with `payload`, synced.
    pub(crate) fn begin(
        folder: Arc<dyn Folder>,
        settings: LogSettings,
        head: FileHead,
        payload: &[u8],
    ) -> io::Result<Self> {
        let disk = folder.create(&Name::of(&head).file())?;
        let (dead, spent) = (None, Duration::ZERO);
        let mut scribe = Self { folder, settings, head, disk, length: 0, serial: 0, dead, batches: 0, spent };
        let begun = scribe.begin_file(payload);
        if begun.is_err() {
            // A file without a whole first record says nothing; left behind it would only puzzle.
            let _ = scribe.disk.remove();
        }
        begun.map(|()| scribe)
    }

    /// Puts a layer over the file.
    pub(crate) fn wrap(&mut self, wrap: impl FnOnce(Box<dyn Disk>) -> Box<dyn Disk>) {
        let none: Box<dyn Disk> = Box::new(Nowhere);
        self.disk = wrap(std::mem::replace(&mut self.disk, none));
    }

    fn begin_file(&mut self, payload: &[u8]) -> io::Result<()> {
        let head = record::encode_head(&self.head).map_err(io::Error::other)?;
        let mut bytes = self.framed(0, &head)?;
        bytes.extend(self.framed(1, payload)?);
        self.disk.append(&bytes)?;
        self.disk.sync()?;
        self.folder.sync()?;
        self.length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.serial = 2;
        if let Err(error) = folder::clean(self.folder.as_ref(), &self.settings, Name::of(&self.head)) {
            tracing::warn!(%error, "old log files stay");
        }
        Ok(())
    }

    fn framed(&self, serial: u32, payload: &[u8]) -> io::Result<Vec<u8>> {
        record::frame(self.head.start, serial, payload).ok_or_else(|| io::Error::other("a record above 4 GiB"))
    }

    /// Writes a batch and syncs it.
    pub(crate) fn write(&mut self, batch: &Batch) -> Synced {
        if let Some(why) = &self.dead {
            return Synced::Dead { why: why.clone() };
        }
        let begun = clock::now();
        let synced = match if batch.fresh { self.next_file(&batch.payload) } else { self.append(&batch.payload) } {
            // Whoever starts from now on reads this view; whoever started before has a file by now.
            Synced::Durable if batch.leads => self.newer().map_or(Synced::Durable, |why| Synced::Superseded { why }),
            synced @ (Synced::Durable
            | Synced::Same { .. }
            | Synced::Failed { .. }
            | Synced::Dead { .. }
            | Synced::Superseded { .. }) => synced,
        };
        self.batches += 1;
        self.spent += clock::now().duration_since(begun);
        synced
    }

    /// The coordinator that was started after this one, if one was.
    fn newer(&self) -> Option<String> {
        let names = folder::list(self.folder.as_ref()).ok()?;
        let other = names.into_iter().rfind(|name| name.start != self.head.start && name.view > self.head.view.0)?;
        Some(format!("log file {} is of a coordinator that was started after this one", other.file()))
    }

    fn append(&mut self, payload: &[u8]) -> Synced {
        let failed = |why: &io::Error| Synced::Failed { why: why.to_string() };
        let bytes = match self.framed(self.serial, payload) {
            Ok(bytes) => bytes,
            Err(why) => return failed(&why),
        };
        if let Err(why) = self.disk.append(&bytes) {
            // Half a record must not stand in front of the next one.
            if let Err(cut) = self.disk.truncate(self.length) {
                return self.die(format!(
                    "{why}; and what was written of the record can't be cut off: {cut}; start the coordinator again"
                ));
            }
            return failed(&why);
        }
        if let Err(why) = self.disk.sync() {
            // Which of the pages came to the disk is unknown, and syncing again would not tell.
            return self.die(format!("it could not be synced: {why}; start the coordinator again"));
        }
        self.length += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.serial += 1;
        Synced::Durable
    }

    fn die(&mut self, why: String) -> Synced {
        self.dead = Some(why.clone());
        Synced::Dead { why }
    }

    fn next_file(&mut self, payload: &[u8]) -> Synced {
        let head = FileHead { part: self.head.part + 1, ..self.head.clone() };
        match Self::begin(Arc::clone(&self.folder), self.settings.clone(), head, payload) {
            Ok(next) => {
                let (batches, spent) = (self.batches, self.spent);
                *self = Self { batches, spent, ..next };
                Synced::Durable
            }
            Err(why) => Synced::Same { why: why.to_string() },
        }
    }

    fn tell_cost(&self) {
        let mean = self.spent.checked_div(self.batches).unwrap_or_default();
        tracing::info!(batches = self.batches, mean_us = mean.as_micros(), "log closed");
    }
}

/// In the place of a file while it is wrapped.
struct Nowhere;

impl Disk for Nowhere {
    fn append(&mut self, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn sync(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn truncate(&mut self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn remove(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }
}
