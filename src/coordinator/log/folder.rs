//! The folder of a log: names, order and retention of its files; reads them, begins the next one.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::clock;
use crate::config::LogSettings;
use crate::coordinator::log::book::{Book, Logged};
use crate::coordinator::log::record::{self, Entry, FileHead, LOG_VERSION, Next};
use crate::coordinator::log::{Disk, LogError};
use crate::ids::{SessionId, View};

/// Sessions that ended lately which a new coordinator still knows: their clients may not have read all.
pub(crate) const ENDED_MAX: usize = 64;

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

    fn parse(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix("view-")?.strip_suffix(".log")?.split('-');
        let view = parts.next()?.parse().ok()?;
        let start = u64::from_str_radix(parts.next()?, 16).ok()?;
        let name_of = Self { view, start, part: parts.next()?.parse().ok()? };
        // One spelling only: a file is known by its name.
        (parts.next().is_none() && name_of.file() == name).then_some(name_of)
    }
}

/// The files of a log, lowest first; others in the folder are left alone.
pub(crate) fn list(folder: &Path) -> Result<Vec<Name>, LogError> {
    let failed = |why| LogError::Folder { path: folder.to_owned(), why };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().to_str().and_then(Name::parse));
    }
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
pub(crate) fn read(folder: &Path, model: [u8; 32], numerics: &str) -> Result<Contents, LogError> {
    let mut book = Book::default();
    for name in list(folder)? {
        let path = folder.join(name.file());
        let bytes = fs::read(&path).map_err(|why| LogError::Read { path: path.clone(), why })?;
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
    if head.model != model {
        let hex = |digest: [u8; 32]| digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        return Err(other("model", hex(head.model), hex(model)));
    }
    if head.numerics != numerics {
        return Err(other("numerics", head.numerics.clone(), numerics.to_owned()));
    }
    Ok(())
}

/// A file that its coordinator appends to.
#[derive(Debug)]
pub(crate) struct LogFile {
    file: File,
    path: PathBuf,
}

impl LogFile {
    /// Begins a file that is not there yet.
    pub(crate) fn create(folder: &Path, head: &FileHead) -> io::Result<Self> {
        let path = folder.join(Name::of(head).file());
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Self { file, path })
    }
}

impl Disk for LogFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }

    fn remove(&mut self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

/// Makes the names of files in the folder durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Removes files below `own` whose sessions `own` has taken over: the lowest first, while they are older
/// than `keep` or all files together larger than `keep_bytes`. A file stays as long as a lower one does,
/// so that no end is forgotten before its beginning.
pub(crate) fn clean(settings: &LogSettings, own: Name) -> Result<(), LogError> {
    let folder = &settings.folder;
    let old = |name: &Name| *name < own;
    let mut files = Vec::new();
    for name in list(folder)?.into_iter().filter(old) {
        let path = folder.join(name.file());
        let facts = fs::metadata(&path).map_err(|why| LogError::Read { path: path.clone(), why })?;
        let age = clock::unix_seconds().saturating_sub(u64::try_from(facts.mtime()).unwrap_or(0));
        files.push((path, facts.len(), age));
    }
    let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
    for (path, bytes, age) in files {
        if age <= settings.keep.as_secs() && total <= settings.keep_bytes {
            return Ok(());
        }
        fs::remove_file(&path).map_err(|why| LogError::Read { path: path.clone(), why })?;
        total -= bytes;
    }
    Ok(())
}
