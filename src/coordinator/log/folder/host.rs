//! A log's folder on a disk of this host.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use super::{Facts, Folder};
use crate::coordinator::log::Disk;

/// A folder of the host's file system.
#[derive(Debug)]
pub(crate) struct HostFolder(pub(crate) PathBuf);

impl Folder for HostFolder {
    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.0)? {
            names.extend(entry?.file_name().to_str().map(str::to_owned));
        }
        Ok(names)
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        fs::read(self.0.join(name))
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn Disk>> {
        let path = self.0.join(name);
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Box::new(LogFile { file, path }))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }

    fn facts(&self, name: &str) -> io::Result<Facts> {
        let facts = fs::metadata(self.0.join(name))?;
        Ok(Facts { bytes: facts.len(), changed: u64::try_from(facts.mtime()).unwrap_or(0) })
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.0.join(name))
    }
}

/// A file that its coordinator appends to.
#[derive(Debug)]
struct LogFile {
    file: File,
    path: PathBuf,
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
