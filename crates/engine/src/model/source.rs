//! Where a checkpoint's files are: a directory, or the model embedded in the program.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use super::error::ModelError;

/// Name of the embedded model.
pub const TINY: &str = "tiny";

macro_rules! embed {
    ($($file:literal),* $(,)?) => {
        &[$(($file, include_bytes!(concat!("../../../../models/tiny-v4-flash/", $file)) as &[u8])),*]
    };
}

static TINY_FILES: &[(&str, &[u8])] = embed![
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model-00001-of-00005.safetensors",
    "model-00002-of-00005.safetensors",
    "model-00003-of-00005.safetensors",
    "model-00004-of-00005.safetensors",
    "model-00005-of-00005.safetensors",
];

/// The files of one checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Files of a directory.
    Dir(PathBuf),
    /// The model in the program itself. Only [`Source::tiny`] names it: a program that never asks for it
    /// does not have it.
    Embedded(Embedded),
}

/// Files in the program, by name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Embedded(&'static [(&'static str, &'static [u8])]);

impl std::fmt::Debug for Embedded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl Embedded {
    fn get(self, file: &str) -> Option<&'static [u8]> {
        self.0.iter().find(|(name, _)| *name == file).map(|(_, bytes)| *bytes)
    }
}

/// The bytes of one shard, mapped or embedded; pages are read when they are touched.
#[derive(Debug, Clone)]
pub enum ShardBytes {
    /// A file mapped read-only.
    Mapped(Arc<Mmap>),
    /// Part of the program.
    Static(&'static [u8]),
}

impl ShardBytes {
    /// All bytes of the shard.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
        }
    }
}

impl Source {
    /// The model in the program itself.
    #[must_use]
    pub fn tiny() -> Self {
        Self::Embedded(Embedded(TINY_FILES))
    }

    /// How a file of this source is called in messages.
    #[must_use]
    pub fn label(&self, file: &str) -> String {
        match self {
            Self::Dir(dir) => dir.join(file).display().to_string(),
            Self::Embedded(_) => format!("{TINY}/{file}"),
        }
    }

    /// Reads a small file whole; `None` where it does not exist.
    ///
    /// # Errors
    /// [`ModelError::TooLarge`] before anything is read, [`ModelError::Io`].
    pub fn read(&self, file: &str, limit: u64) -> Result<Option<Vec<u8>>, ModelError> {
        match self {
            Self::Dir(dir) => read_file(&dir.join(file), limit),
            Self::Embedded(files) => Ok(files.get(file).map(<[u8]>::to_vec)),
        }
    }

    /// Bytes of a file; `None` where it does not exist.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn size(&self, file: &str) -> Result<Option<u64>, ModelError> {
        match self {
            Self::Dir(dir) => match std::fs::metadata(dir.join(file)) {
                Ok(meta) => Ok(Some(meta.len())),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(io(&dir.join(file), &error)),
            },
            Self::Embedded(files) => Ok(files.get(file).map(|bytes| bytes.len() as u64)),
        }
    }

    /// Maps a shard; `None` where it does not exist.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub fn map(&self, file: &str) -> Result<Option<ShardBytes>, ModelError> {
        let dir = match self {
            Self::Dir(dir) => dir,
            Self::Embedded(files) => return Ok(files.get(file).map(ShardBytes::Static)),
        };
        let path = dir.join(file);
        let handle = match File::open(&path) {
            Ok(handle) => handle,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io(&path, &error)),
        };
        if handle.metadata().map_err(|error| io(&path, &error))?.len() == 0 {
            // An empty file can't be mapped; the header's check names it as truncated.
            return Ok(Some(ShardBytes::Static(&[])));
        }
        // SAFETY: the map is read-only and private, every read is within the mapped length, and a
        // shard is a download that nobody writes while it is read, as `crate::model` asks for.
        let map = unsafe { Mmap::map(&handle) }.map_err(|error| io(&path, &error))?;
        Ok(Some(ShardBytes::Mapped(Arc::new(map))))
    }
}

fn io(path: &Path, error: &std::io::Error) -> ModelError {
    ModelError::Io { file: path.display().to_string(), why: error.to_string() }
}

fn read_file(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, ModelError> {
    let handle = match File::open(path) {
        Ok(handle) => handle,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(path, &error)),
    };
    let meta = handle.metadata().map_err(|error| io(path, &error))?;
    let too_large = |got| ModelError::TooLarge { file: path.display().to_string(), got, limit };
    if meta.len() > limit {
        return Err(too_large(meta.len()));
    }
    let mut bytes = Vec::new();
    handle.take(limit + 1).read_to_end(&mut bytes).map_err(|error| io(path, &error))?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(Some(bytes))
}
