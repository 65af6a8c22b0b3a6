//! Reads the journal of a closed session from its file, years later and on another machine.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::ids::Position;
use crate::node::journal::digest::position_digest;
use crate::node::journal::file::Records;
use crate::node::journal::header::{HEADER_BYTES, Header, HeaderError};
use crate::node::journal::{PIECE_BYTES_MAX, Piece, pieces};

/// Why a kept journal can't be read.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    /// The system refuses it.
    #[error("journal {}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// It is no journal that this program reads.
    #[error("journal {}: {why}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: HeaderError,
    },
    /// It is not as long as its header says.
    #[error(
        "journal {}: {got} bytes, but its header says {expected}, for {count} positions of {position_bytes} bytes: it was cut off or added to",
        path.display()
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes by its header.
        expected: u64,
        /// Bytes that it has.
        got: u64,
        /// Positions by its header.
        count: u32,
        /// Bytes of a position by its header.
        position_bytes: u32,
    },
    /// It does not hold these positions.
    #[error("journal {}: positions {from} to {to} are not in it: it holds {first} to {end}", path.display())]
    NotCovered {
        /// The file.
        path: PathBuf,
        /// First position asked for.
        from: Position,
        /// One past the last one asked for.
        to: Position,
        /// First position that it holds.
        first: Position,
        /// One past the last one that it holds.
        end: Position,
    },
}

/// The journal of a closed session, in its file. What is in it is whatever somebody wrote there: digests
/// say whether it is what a stage sent.
pub struct KeptJournal {
    path: PathBuf,
    records: Records,
}

impl KeptJournal {
    /// Opens a file and checks its header and length. No record is read.
    ///
    /// # Errors
    /// [`KeptError`] names the file and what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, KeptError> {
        let (file, header, length) = open(path, OpenOptions::new().read(true))?;
        if length != header.file_bytes() {
            return Err(KeptError::Length {
                path: path.to_owned(),
                expected: header.file_bytes(),
                got: length,
                count: header.count,
                position_bytes: header.position_bytes,
            });
        }
        Ok(Self { path: path.to_owned(), records: Records::existing(Box::new(file), header) })
    }

    /// Opens what a killed process left: behind the positions of its header there may be a part of those
    /// that it wrote last, which is cut off.
    pub(crate) fn leftover(path: &Path) -> Result<Self, KeptError> {
        let failed = |why| KeptError::File { path: path.to_owned(), why };
        let (file, header, length) = open(path, OpenOptions::new().read(true).write(true))?;
        if length > header.file_bytes() {
            file.set_len(header.file_bytes()).map_err(failed)?;
        }
        Self::open(path)
    }

    /// What the file says of itself.
    #[must_use]
    pub fn header(&self) -> &Header {
        self.records.header()
    }

    fn covered(&self, from: Position, to: Position) -> Result<(), KeptError> {
        let (first, end) = (self.header().first, self.header().end());
        if first <= from && from <= to && to <= end {
            return Ok(());
        }
        Err(KeptError::NotCovered { path: self.path.clone(), from, to, first, end })
    }

    /// Positions `from..to` in pieces of at most `chunk` positions and 64 MiB.
    ///
    /// # Errors
    /// [`KeptError::NotCovered`] or [`KeptError::File`].
    pub fn read(&mut self, from: Position, to: Position, chunk: u32) -> Result<Vec<Piece>, KeptError> {
        self.covered(from, to)?;
        let most = PIECE_BYTES_MAX / self.header().record_bytes();
        let mut all = Vec::new();
        for (pos, end) in pieces(from.0, to.0, chunk, most) {
            let read = self.records.read(pos, end);
            let (ids, payload) = read.map_err(|why| KeptError::File { path: self.path.clone(), why })?;
            all.push(Piece { pos: Position(pos), ids, payload });
        }
        Ok(all)
    }

    /// Digests of the positions `from..to`.
    ///
    /// # Errors
    /// [`KeptError::NotCovered`] or [`KeptError::File`].
    pub fn digests(&mut self, from: Position, to: Position) -> Result<Vec<[u8; 32]>, KeptError> {
        self.covered(from, to)?;
        let (tag, mut all) = (self.header().tag, Vec::new());
        let each = |pos, id, wire: &[u8]| all.push(position_digest(Position(pos), id, tag, wire));
        let read = self.records.for_each(from.0, to.0, each);
        read.map_err(|why| KeptError::File { path: self.path.clone(), why })?;
        Ok(all)
    }
}

/// Opens a regular file and reads its header and its length.
fn open(path: &Path, how: &OpenOptions) -> Result<(File, Header, u64), KeptError> {
    let failed = |why| KeptError::File { path: path.to_owned(), why };
    // Before it is opened: a pipe would be waited for.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
    }
    let file = how.open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    let mut bytes = [0; HEADER_BYTES];
    let there = usize::try_from(length).unwrap_or(usize::MAX).min(HEADER_BYTES);
    file.read_exact_at(&mut bytes[..there], 0).map_err(failed)?;
    let header = Header::decode(&bytes[..there]).map_err(|why| KeptError::Header { path: path.to_owned(), why })?;
    Ok((file, header, length))
}
