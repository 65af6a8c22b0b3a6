//! The coordinator's durable log: sessions and their committed tokens, synced before a client sees them.
//!
//! Every coordinator appends to files of its own only, named after a view above all that were logged
//! before it started; what a frozen twin writes later is in a lower file and changes nothing. A new
//! coordinator reads all files: the highest one that opened a session says how it stands, and its tokens
//! are the union of what all files say, which must agree. Pure: `record` (bytes), `book` (what files say
//! together). Shell: `folder` (files), `writer` (the thread that writes and syncs).

pub(crate) mod book;
pub(crate) mod folder;
pub(crate) mod record;
#[cfg(test)]
mod tests;
pub(crate) mod writer;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config::LogSettings;
use crate::engine::NUMERICS_ID;
use crate::ids::{SessionId, VIEW_MAX, View};
use book::Logged;
use folder::Folder;
use folder::host::HostFolder;
use record::{Entry, FileHead, LOG_VERSION};
use writer::Scribe;

/// Why a log can't be had.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The folder can't be read.
    #[error("log folder {}: {why}; give a folder that this user may read and write", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// A file can't be read or removed.
    #[error("log file {}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// No file can be begun.
    #[error("log folder {}: no file can be begun there: {why}; it must be writable and its disk have room", path.display())]
    Create {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// No view is left above those that were logged.
    #[error("log folder {}: it says view {VIEW_MAX}, and none is left above: give another folder with --log, and start every stage again", path.display())]
    Views {
        /// The folder.
        path: PathBuf,
    },
    /// A record in the middle is damaged.
    #[error(
        "log file {}: the record at byte {offset} is broken: {why}; restore the file, or move it away and lose its sessions",
        path.display()
    )]
    Broken {
        /// The file.
        path: PathBuf,
        /// Where the record begins.
        offset: usize,
        /// What is wrong.
        why: String,
    },
    /// The log is another's.
    #[error("log file {}: {what} {got}, expected {expected}: give another folder with --log, or move the file away", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What the file says.
        got: String,
        /// What was expected.
        expected: String,
    },
}

/// What a log file is for its writer.
pub trait Disk: Send {
    /// Writes behind what is there.
    ///
    /// # Errors
    /// That of the system; a part may have been written.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Returns when everything appended is on the disk.
    ///
    /// # Errors
    /// That of the system; what is on the disk is not known then.
    fn sync(&mut self) -> io::Result<()>;

    /// Cuts off what is behind `length` bytes.
    ///
    /// # Errors
    /// That of the system.
    fn truncate(&mut self, length: u64) -> io::Result<()>;

    /// Removes the file.
    ///
    /// # Errors
    /// That of the system.
    fn remove(&mut self) -> io::Result<()>;
}

/// A log with a file of this coordinator's own, and what was in the others.
pub struct Log {
    /// The highest view logged before.
    pub(crate) view: View,
    /// The view that the own file is named after.
    pub(crate) own: View,
    pub(crate) sessions: BTreeMap<SessionId, Logged>,
    pub(crate) settings: LogSettings,
    pub(crate) scribe: Scribe,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("view", &self.view).field("sessions", &self.sessions.len()).finish_non_exhaustive()
    }
}

impl Log {
    /// Reads every file of the folder, which is made where it is missing, and begins the next one with the
    /// sessions that go on. `model` is the digest of the model served.
    ///
    /// # Errors
    /// [`LogError`]: nothing was lost, and nothing begun.
    pub fn open(settings: &LogSettings, model: [u8; 32]) -> Result<Self, LogError> {
        let path = settings.folder.clone();
        std::fs::create_dir_all(&path).map_err(|why| LogError::Folder { path: path.clone(), why })?;
        Self::open_in(Arc::new(HostFolder(path)), settings, model, rand::random())
    }

    /// The same in a folder of any kind; `start` is what this coordinator drew at its start.
    pub(crate) fn open_in(
        folder: Arc<dyn Folder>,
        settings: &LogSettings,
        model: [u8; 32],
        start: u64,
    ) -> Result<Self, LogError> {
        let path = settings.folder.clone();
        let contents = folder::read((folder.as_ref(), &path), model, NUMERICS_ID)?;
        let own = View(contents.view.0.saturating_add(1));
        if own > VIEW_MAX {
            return Err(LogError::Views { path });
        }
        let head =
            FileHead { version: LOG_VERSION, view: own, start, part: 0, model, numerics: NUMERICS_ID.to_owned() };
        let carried: Vec<Entry> = contents.sessions.values().flat_map(book::carried).collect();
        let create = |why| LogError::Create { path: path.clone(), why };
        let payload = record::encode(&carried).map_err(|why| create(io::Error::other(why)))?;
        let scribe = Scribe::begin(folder, settings.clone(), head, &payload).map_err(create)?;
        Ok(Self { view: contents.view, own, sessions: contents.sessions, settings: settings.clone(), scribe })
    }

    /// Puts a layer between the log and its present file: tests and simulations fill disks with it.
    #[must_use]
    pub fn wrapped(mut self, wrap: impl FnOnce(Box<dyn Disk>) -> Box<dyn Disk>) -> Self {
        self.scribe.wrap(wrap);
        self
    }
}
