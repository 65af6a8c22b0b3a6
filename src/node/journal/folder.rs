//! The folder of journals: names, whose files they are, what a killed process left, how much is kept.
//!
//! | file | what |
//! |---|---|
//! | `START.lock` | locked as long as the process that drew START lives |
//! | `START-SERIAL-SESSION.part` | a session of that process |
//! | `START-SERIAL-SESSION.journal` | a closed session that is kept |

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::clock;
use crate::ids::SessionId;
use crate::node::journal::file::{Disk, Records};
use crate::node::journal::header::Header;
use crate::node::journal::kept::KeptJournal;
use crate::node::journal::{JournalError, Retention, SpillConfig};

/// Numbers drawn for a process until one is free.
const DRAWS_MAX: usize = 8;

/// Puts a layer over every file, or refuses it: tests fill disks so.
pub(crate) type Wrap = Box<dyn FnMut(Box<dyn Disk>) -> io::Result<Box<dyn Disk>> + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Lock,
    Part,
    Kept,
}

/// The name of one of our files: its kind and the number of its process.
fn parse(name: &str) -> Option<(Kind, u64)> {
    let number = |text: &str, digits: usize| {
        let plain = text.len() == digits && text.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
        plain.then(|| u64::from_str_radix(text, 16).ok()).flatten()
    };
    let (stem, kind) = name.split_once('.')?;
    let kind = match kind {
        "lock" => return number(stem, 16).map(|start| (Kind::Lock, start)),
        "part" => Kind::Part,
        "journal" => Kind::Kept,
        _ => return None,
    };
    let mut parts = stem.split('-');
    let start = number(parts.next()?, 16)?;
    number(parts.next()?, 8)?;
    number(parts.next()?, 16)?;
    parts.next().is_none().then_some((kind, start))
}

/// Our files in the folder, by name; others are left alone.
fn list(folder: &Path) -> io::Result<Vec<(PathBuf, Kind, u64)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if let Some((kind, start)) = name.to_str().and_then(parse)
            && entry.file_type()?.is_file()
        {
            files.push((entry.path(), kind, start));
        }
    }
    files.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    Ok(files)
}

/// A session's file, which is removed when it is dropped.
pub(crate) struct SpillFile {
    pub(crate) records: Records,
    /// `None` once it is kept.
    path: Option<PathBuf>,
}

impl SpillFile {
    pub(crate) fn path(&self) -> &Path {
        self.path.as_deref().unwrap_or(Path::new(""))
    }

    /// Gives it the name of a journal that is kept.
    pub(crate) fn keep(mut self) -> io::Result<()> {
        if let Some(path) = &self.path {
            fs::rename(path, path.with_extension("journal"))?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for SpillFile {
    fn drop(&mut self) {
        if let Some(path) = &self.path
            && let Err(error) = fs::remove_file(path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(file = %path.display(), %error, "a journal's file stays");
        }
    }
}

/// The folder as one process sees it.
pub(crate) struct Folder {
    path: PathBuf,
    start: u64,
    serial: u32,
    label: String,
    wrap: Option<Wrap>,
    /// Locked until the process ends.
    _lock: File,
}

impl Folder {
    /// Makes the folder where it is missing, and clears away what dead processes left.
    pub(crate) fn open(config: &SpillConfig, label: &str) -> Result<Self, JournalError> {
        let path = config.folder.clone();
        let failed = |why| JournalError::Folder { path: path.clone(), why };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(failed)?;
        let (start, lock) = own_lock(&path).map_err(failed)?;
        let folder = Self { path: path.clone(), start, serial: 0, label: label.to_owned(), wrap: None, _lock: lock };
        folder.clear(config.keep.as_ref()).map_err(failed)?;
        Ok(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    #[cfg(test)]
    pub(crate) fn wrap(&mut self, wrap: Wrap) {
        self.wrap = Some(wrap);
    }

    /// Begins the file of a session: `shape` is its tag and the bytes of a position.
    pub(crate) fn create(&mut self, session: SessionId, (tag, position_bytes): (u8, usize)) -> io::Result<SpillFile> {
        self.serial = self.serial.wrapping_add(1);
        let path = self.path.join(format!("{:016x}-{:08x}-{:016x}.part", self.start, self.serial, session.0));
        let header = Header {
            tag,
            session,
            start: self.start,
            position_bytes: u32::try_from(position_bytes).map_err(io::Error::other)?,
            first: Default::default(),
            count: 0,
            settled: Default::default(),
            closed: 0,
            label: self.label.clone(),
        };
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let begun = (|| {
            let mut disk: Box<dyn Disk> = Box::new(file);
            if let Some(wrap) = &mut self.wrap {
                disk = wrap(disk)?;
            }
            Records::begin(disk, header)
        })();
        match begun {
            Ok(records) => Ok(SpillFile { records, path: Some(path) }),
            Err(why) => {
                // A file without a header says nothing.
                let _ = fs::remove_file(&path);
                Err(why)
            }
        }
    }

    /// Removes what processes that are gone left, or with a retention keeps what can be read of it.
    fn clear(&self, keep: Option<&Retention>) -> io::Result<()> {
        let files = list(&self.path)?;
        let mut starts: Vec<u64> = files.iter().filter(|file| file.1 != Kind::Kept).map(|file| file.2).collect();
        starts.dedup();
        starts.retain(|start| *start != self.start);
        for start in starts {
            let lock = lock_path(&self.path, start);
            // Whoever holds the lock lives, or is another process that clears away just now.
            let held = match OpenOptions::new().write(true).open(&lock) {
                Ok(file) => match file.try_lock() {
                    Ok(()) => Some(file),
                    Err(TryLockError::WouldBlock) => continue,
                    Err(TryLockError::Error(why)) => return Err(why),
                },
                // A process has its lock before its first file, and removes it after the last.
                Err(why) if why.kind() == io::ErrorKind::NotFound => None,
                // Another user's.
                Err(why) if why.kind() == io::ErrorKind::PermissionDenied => continue,
                Err(why) => return Err(why),
            };
            for (path, ..) in files.iter().filter(|file| file.1 == Kind::Part && file.2 == start) {
                if keep.is_none_or(|_| !keep_leftover(path)) {
                    remove_leftover(path);
                }
            }
            remove_leftover(&lock);
            drop(held);
        }
        if let Some(keep) = keep {
            retain(&self.path, keep)?;
        }
        Ok(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_file(lock_path(&self.path, self.start));
    }
}

fn lock_path(folder: &Path, start: u64) -> PathBuf {
    folder.join(format!("{start:016x}.lock"))
}

/// Draws this process's number and locks the file that says that it lives.
fn own_lock(folder: &Path) -> io::Result<(u64, File)> {
    let mut last = io::Error::from(io::ErrorKind::AlreadyExists);
    for _ in 0..DRAWS_MAX {
        let start = rand::random();
        let path = lock_path(folder, start);
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => match file.try_lock() {
                // One that clears away may have taken the file for a dead one's before it was locked.
                Ok(()) if file.metadata()?.nlink() > 0 => return Ok((start, file)),
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(why)) => {
                    let _ = fs::remove_file(&path);
                    return Err(why);
                }
            },
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists => last = why,
            Err(why) => return Err(why),
        }
    }
    Err(last)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
        _ => Ok(()),
    }
}

/// Removes what a dead process left; what can't be removed stands in nobody's way.
fn remove_leftover(path: &Path) {
    if let Err(error) = remove(path) {
        tracing::warn!(file = %path.display(), %error, "what is left of a journal stays");
    }
}

/// Keeps what a dead process left of a session; `false` if there is nothing to keep.
fn keep_leftover(path: &Path) -> bool {
    let kept = KeptJournal::leftover(path).map(|journal| journal.header().count > 0);
    match kept {
        Ok(true) => fs::rename(path, path.with_extension("journal")).is_ok(),
        Ok(false) => false,
        Err(error) => {
            tracing::warn!(%error, "what is left of a journal can't be read and is removed");
            false
        }
    }
}

/// Removes kept journals that are too old, then the oldest while all together are too large. Returns
/// the bytes of those that stay.
pub(crate) fn retain(folder: &Path, keep: &Retention) -> io::Result<u64> {
    let now = clock::unix_seconds();
    let mut kept = Vec::new();
    for (path, kind, _) in list(folder)? {
        if kind != Kind::Kept {
            continue;
        }
        match fs::metadata(&path) {
            Ok(facts) => kept.push(((facts.mtime(), facts.mtime_nsec()), path, facts.len())),
            // Another process that shares the folder was faster.
            Err(why) if why.kind() == io::ErrorKind::NotFound => {}
            Err(why) => return Err(why),
        }
    }
    kept.sort_unstable();
    let mut total: u64 = kept.iter().map(|(.., bytes)| bytes).sum();
    for ((written, _), path, bytes) in kept {
        let age = now.saturating_sub(u64::try_from(written).unwrap_or(0));
        if age <= keep.time.as_secs() && total <= keep.bytes {
            break;
        }
        remove(&path)?;
        total -= bytes;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_names_are_ours() {
        let start = "00000000000000ff";
        assert_eq!(parse(&format!("{start}.lock")), Some((Kind::Lock, 255)));
        assert_eq!(parse(&format!("{start}-00000001-0000000100000002.part")), Some((Kind::Part, 255)));
        assert_eq!(parse(&format!("{start}-00000001-0000000100000002.journal")), Some((Kind::Kept, 255)));
        for other in [
            "notes.part",
            "ff.lock",
            "00000000000000FF.lock",
            "+0000000000000ff.lock",
            "00000000000000ff-00000001.part",
            "00000000000000ff-00000001-0000000100000002.part.part",
            "00000000000000ff-00000001-0000000100000002-0.journal",
            "00000000000000ff-00000001-0000000100000002",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
