//! The folder of a log: names, order and retention of its files; reads them, begins the next one.

pub(crate) mod host;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use crate::clock;
use crate::config::LogSettings;
use crate::coordinator::log::book::{Book, Logged};
use crate::coordinator::log::record::{self, Entry, FileHead, LOG_VERSION, Next};
use crate::coordinator::log::{Disk, LogError};
use crate::ids::{SessionId, VIEW_MAX, View};

/// Sessions that ended lately which a new coordinator still knows: their clients may not have read all.
pub(crate) const ENDED_MAX: usize = 64;

/// What is known of a file without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) bytes: u64,
    /// Seconds since 1970.
    pub(crate) changed: u64,
}

/// Where the files of a log are: a folder of the host, or one of the simulator's.
pub(crate) trait Folder: Send + Sync + std::fmt::Debug {
    /// Names of everything in it, in any order.
    fn names(&self) -> io::Result<Vec<String>>;

    /// All bytes of a file.
    fn read(&self, name: &str) -> io::Result<Vec<u8>>;

    /// Begins a file that is not there yet.
    fn create(&self, name: &str) -> io::Result<Box<dyn Disk>>;

    /// Makes the names of its files durable.
    fn sync(&self) -> io::Result<()>;

    /// How large and how old a file is.
    fn facts(&self, name: &str) -> io::Result<Facts>;

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
}

/// A file's name: its order among the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name {
    pub(crate) view: u64,
    pub(crate) part: u32,
    pub(crate) start: u64,
}

impl Name {
    pub(crate) fn of(head: &FileHead) -> Self {
        Self { view: head.view.0, part: head.part, start: head.start }
    }

    pub(crate) fn file(self) -> String {
        format!("view-{:08}-{:016x}-{:04}.log", self.view, self.start, self.part)
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix("view-")?.strip_suffix(".log")?.split('-');
        let view = parts.next()?.parse().ok()?;
        let start = u64::from_str_radix(parts.next()?, 16).ok()?;
        let name_of = Self { view, start, part: parts.next()?.parse().ok()? };
        // One spelling only: a file is known by its name.
        (parts.next().is_none() && name_of.file() == name).then_some(name_of)
    }
}

/// The files of a log, lowest first; others in the folder are left alone.
pub(crate) fn list(folder: &dyn Folder) -> io::Result<Vec<Name>> {
    let mut names: Vec<Name> = folder.names()?.iter().filter_map(|name| Name::parse(name)).collect();
    names.sort_unstable();
    Ok(names)
}

/// What the files of a folder say.
pub(crate) struct Contents {
    pub(crate) view: View,
    pub(crate) sessions: BTreeMap<SessionId, Logged>,
}

/// Reads every file. One that has a torn end counts up to there; none is changed, for a coordinator
/// that is only frozen may still write to its own.
pub(crate) fn read((folder, at): (&dyn Folder, &Path), model: [u8; 32], numerics: &str) -> Result<Contents, LogError> {
    let mut book = Book::default();
    for name in list(folder).map_err(|why| LogError::Folder { path: at.to_owned(), why })? {
        let path = at.join(name.file());
        let bytes = folder.read(&name.file()).map_err(|why| LogError::Read { path: path.clone(), why })?;
        read_file(&path, name, &bytes, &mut book, (model, numerics))?;
    }
    book.forget(ENDED_MAX);
    Ok(Contents { view: book.view(), sessions: book.into_sessions() })
}

/// Reads one file into the book.
pub(crate) fn read_file(
    path: &Path,
    name: Name,
    bytes: &[u8],
    book: &mut Book,
    (model, numerics): ([u8; 32], &str),
) -> Result<(), LogError> {
    let broken = |offset: usize, why: String| LogError::Broken { path: path.to_owned(), offset, why };
    let (mut at, mut serial) = (0, 0);
    loop {
        let (payload, end) = match record::next(bytes, at, name.start, serial) {
            Next::Record { payload, end } => (payload, end),
            Next::End => return Ok(()),
            Next::Torn => {
                let lost = bytes.len() - at;
                tracing::warn!(file = %path.display(), offset = at, lost, "the last record is torn: cut off");
                return Ok(());
            }
            Next::Broken { why } => return Err(broken(at, why.to_owned())),
        };
        if serial == 0 {
            let head: FileHead = record::decode(payload).map_err(|why| broken(at, why))?;
            check_head(path, name, &head, (model, numerics))?;
            book.begin_file(head.view, ENDED_MAX);
        } else {
            let entries: Vec<Entry> = record::decode(payload).map_err(|why| broken(at, why))?;
            for entry in entries {
                book.take(entry).map_err(|error| broken(at, error.to_string()))?;
            }
        }
        at = end;
        serial += 1;
    }
}

fn check_head(path: &Path, name: Name, head: &FileHead, (model, numerics): ([u8; 32], &str)) -> Result<(), LogError> {
    let other = |what, got: String, expected: String| LogError::Other { path: path.to_owned(), what, got, expected };
    if head.version != LOG_VERSION {
        return Err(other("version", head.version.to_string(), LOG_VERSION.to_string()));
    }
    if Name::of(head) != name {
        return Err(other("name", name.file(), Name::of(head).file()));
    }
    if head.view > VIEW_MAX {
        return Err(other("view", head.view.to_string(), format!("at most {VIEW_MAX}")));
    }
    if head.model != model {
        let hex = |digest: [u8; 32]| digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        return Err(other("model", hex(head.model), hex(model)));
    }
    if head.numerics != numerics {
        return Err(other("numerics", head.numerics.clone(), numerics.to_owned()));
    }
    Ok(())
}

/// Removes files below `own` whose sessions `own` has taken over: the lowest first, while they are older
/// than `keep` or all files together larger than `keep_bytes`. A file stays as long as a lower one does,
/// so that no end is forgotten before its beginning.
pub(crate) fn clean(folder: &dyn Folder, settings: &LogSettings, own: Name) -> io::Result<()> {
    let old = |name: &Name| *name < own;
    let mut files = Vec::new();
    for name in list(folder)?.into_iter().filter(old) {
        let facts = folder.facts(&name.file())?;
        let age = clock::unix_seconds().saturating_sub(facts.changed);
        files.push((name, facts.bytes, age));
    }
    let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
    for (name, bytes, age) in files {
        if age <= settings.keep.as_secs() && total <= settings.keep_bytes {
            return Ok(());
        }
        folder.remove(&name.file())?;
        total -= bytes;
    }
    Ok(())
}
