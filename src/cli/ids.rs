//! Token ids from a file: a JSON array.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::ids::TokenId;

/// Largest file of ids that is read, in bytes.
pub const IDS_BYTES_MAX: u64 = 64 << 20;

/// Why a file of ids was refused.
#[derive(Debug, thiserror::Error)]
pub enum IdsError {
    /// It can't be read.
    #[error("{}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// It is too large.
    #[error("{}: more than {IDS_BYTES_MAX} bytes, expected a JSON array of token ids", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is no array of ids.
    #[error("{}: expected a JSON array of token ids like [0, 17, 4]: {why}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        why: String,
    },
}

/// Reads a JSON array of token ids.
///
/// # Errors
/// [`IdsError`] names the file.
pub fn read_ids(path: &Path) -> Result<Vec<TokenId>, IdsError> {
    let failed = |error| IdsError::Read { path: path.to_owned(), error };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(IDS_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > IDS_BYTES_MAX {
        return Err(IdsError::TooLarge { path: path.to_owned() });
    }
    serde_json::from_slice(&bytes).map_err(|why| IdsError::Syntax { path: path.to_owned(), why: why.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_of_ids_is_read_and_anything_else_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ids.json");
        std::fs::write(&path, "[0, 17,\n 4]").unwrap();
        assert_eq!(read_ids(&path).unwrap(), [TokenId(0), TokenId(17), TokenId(4)]);
        for bad in ["", "{}", "[1,", "[-1]", "[1.5]", "[\"a\"]", "[4294967296]"] {
            std::fs::write(&path, bad).unwrap();
            let error = read_ids(&path).unwrap_err().to_string();
            assert!(error.contains("ids.json") && error.contains("expected a JSON array"), "{error}");
        }
        assert!(read_ids(folder.path()).unwrap_err().to_string().contains(folder.path().to_str().unwrap()));
    }
}
