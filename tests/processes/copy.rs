//! Copies of the tiny model that are damaged in one place.

use std::fs;
use std::path::PathBuf;

use ringfence::model::shard::ShardHeader;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny-v4-flash");

/// A folder whose files are links to the model's until they are changed.
pub(crate) struct Copy(TempDir);

impl Copy {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(MODEL).unwrap() {
            let entry = entry.unwrap();
            std::os::unix::fs::symlink(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        Self(folder)
    }

    pub(crate) fn folder(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    pub(crate) fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.path(file)).unwrap()
    }

    pub(crate) fn remove(&self, file: &str) {
        fs::remove_file(self.path(file)).unwrap();
    }

    /// Puts a file in the place of a link.
    pub(crate) fn write(&self, file: &str, bytes: &[u8]) {
        self.remove(file);
        fs::write(self.path(file), bytes).unwrap();
    }

    pub(crate) fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let mut value: Value = serde_json::from_slice(&self.read(file)).unwrap();
        edit(&mut value);
        self.write(file, &serde_json::to_vec(&value).unwrap());
    }

    /// Changes a shard's header; its data stays.
    pub(crate) fn edit_header(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let bytes = self.read(file);
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
        let mut header: Value = serde_json::from_slice(header).unwrap();
        edit(&mut header);
        let header = serde_json::to_vec(&header).unwrap();
        let length = u64::try_from(header.len()).unwrap().to_le_bytes();
        self.write(file, &[&length[..], &header, data].concat());
    }

    /// Overwrites one byte of a tensor.
    pub(crate) fn poke(&self, file: &str, tensor: &str, at: usize, byte: u8) {
        let mut bytes = self.read(file);
        let begin = ShardHeader::parse(file, &bytes).unwrap().tensors[tensor].bytes.start;
        bytes[begin + at] = byte;
        self.write(file, &bytes);
    }
}
