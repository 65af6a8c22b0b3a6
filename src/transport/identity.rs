//! The identity of a node: an ed25519 key in a file that only its owner may read.
//!
//! The file is one line of text: `ringfence-ed25519-1`, a space, the 32 bytes of the secret key in
//! hexadecimal. Whoever reads it is the node.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use libp2p::identity::Keypair;

/// First word of the file.
const MAGIC: &str = "ringfence-ed25519-1";

/// Bytes of a secret key.
const SECRET: usize = 32;

/// Longest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 256;

/// Why an identity could not be had.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file can't be read.
    #[error("identity file {}: cannot be read: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// The file can't be made.
    #[error("identity file {}: cannot be made: {why}; its folder must exist and be writable", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// Others may read the file.
    #[error(
        "identity file {}: mode {mode:04o} lets others read the key, expected 0600: run `chmod 600 {}`, or remove it for a new identity if others may have read it",
        path.display(), path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The file holds no key.
    #[error(
        "identity file {}: {why}, expected `{MAGIC}` and {} hexadecimal digits: restore it, or remove it for a new identity",
        path.display(), 2 * SECRET
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What came.
        why: String,
    },
}

/// Makes an identity that lasts as long as the process.
#[must_use]
pub fn fresh() -> Keypair {
    Keypair::generate_ed25519()
}

/// Reads the identity in a file; makes both on first use, with mode 0600. Processes that do so at
/// the same time get the same one.
///
/// # Errors
/// [`IdentityError`], naming the file and what to do.
pub fn load_or_create(path: &Path) -> Result<Keypair, IdentityError> {
    match load(path) {
        Err(IdentityError::Read { why, .. }) if why.kind() == io::ErrorKind::NotFound => {
            create(path)?;
            // Another process may have been first: its file counts.
            load(path)
        }
        loaded => loaded,
    }
}

/// Reads the identity in a file that is there.
///
/// # Errors
/// [`IdentityError`], naming the file and what to do.
pub fn load(path: &Path) -> Result<Keypair, IdentityError> {
    let read = |why| IdentityError::Read { path: path.to_owned(), why };
    let malformed = |why: String| IdentityError::Malformed { path: path.to_owned(), why };
    let file = File::open(path).map_err(read)?;
    let metadata = file.metadata().map_err(read)?;
    if !metadata.is_file() {
        return Err(malformed("not a regular file".to_owned()));
    }
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(IdentityError::Exposed { path: path.to_owned(), mode });
    }
    if metadata.len() > FILE_BYTES_MAX {
        return Err(malformed(format!("{} bytes, {FILE_BYTES_MAX} at most", metadata.len())));
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(|error| {
        if error.kind() == io::ErrorKind::InvalidData { malformed("not text".to_owned()) } else { read(error) }
    })?;
    let Some((magic, digits)) = text.trim_end().split_once(' ') else {
        return Err(malformed("one word or none".to_owned()));
    };
    if magic != MAGIC {
        return Err(malformed("another first word".to_owned()));
    }
    let mut secret = decode(digits).ok_or_else(|| malformed("no key after the first word".to_owned()))?;
    Keypair::ed25519_from_bytes(&mut secret).map_err(|error| malformed(format!("no ed25519 key ({error})")))
}

fn decode(digits: &str) -> Option<[u8; SECRET]> {
    let pairs = digits.as_bytes().as_chunks::<2>();
    let (pairs, []) = pairs else { return None };
    let pairs = <&[[u8; 2]; SECRET]>::try_from(pairs).ok()?;
    let mut secret = [0; SECRET];
    for (byte, pair) in secret.iter_mut().zip(pairs) {
        let digit = |c: u8| char::from(c).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(secret)
}

/// Makes the file whole or not at all, and never over another.
fn create(path: &Path) -> Result<(), IdentityError> {
    let fail = |why| IdentityError::Create { path: path.to_owned(), why };
    let key = Keypair::generate_ed25519().try_into_ed25519().map_err(|error| fail(io::Error::other(error)))?;
    let mut text = format!("{MAGIC} ");
    for byte in key.secret().as_ref() {
        text.push_str(&format!("{byte:02x}"));
    }
    text.push('\n');
    let name = path.file_name().ok_or_else(|| fail(io::ErrorKind::InvalidInput.into()))?;
    let draft = path.with_file_name(format!(".{}.{:016x}", name.display(), rand::random::<u64>()));
    let written = write_private(&draft, text.as_bytes()).and_then(|()| match std::fs::hard_link(&draft, path) {
        // Another process was first.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    });
    let removed = std::fs::remove_file(&draft);
    written.and(removed).map_err(fail)
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    // The mask of the process may take from the mode, and must not.
    file.set_permissions(PermissionsExt::from_mode(0o600))?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn an_identity_is_made_once_and_lasts() {
        let folder = folder();
        let path = folder.path().join("node.key");
        let made = load_or_create(&path).unwrap();
        let read = load_or_create(&path).unwrap();
        assert_eq!(made.public().to_peer_id(), read.public().to_peer_id());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let entries = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(entries, 1, "nothing is left over");
        assert_ne!(fresh().public(), fresh().public());
    }

    #[test]
    fn an_identity_is_one_under_a_race() {
        let folder = folder();
        let path = folder.path().join("node.key");
        let racers: Vec<_> = (0..8)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || load_or_create(&path).unwrap().public().to_peer_id())
            })
            .collect();
        let mut peers: Vec<_> = racers.into_iter().map(|racer| racer.join().unwrap()).collect();
        peers.dedup();
        assert_eq!(peers.len(), 1);
    }

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        let folder = folder();
        let path = folder.path().join("node.key");
        load_or_create(&path).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o666] {
            fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let error = load_or_create(&path).unwrap_err();
            assert!(matches!(error, IdentityError::Exposed { .. }), "{error:?}");
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn a_malformed_file_is_refused_and_kept() {
        let folder = folder();
        let path = folder.path().join("node.key");
        let short = format!("{MAGIC} {}\n", "ab".repeat(SECRET - 1));
        let long = format!("{MAGIC} {}\n", "ab".repeat(SECRET + 1));
        let odd = format!("{MAGIC} {}g\n", "a".repeat(2 * SECRET - 1));
        let other = format!("ringfence-ed25519-2 {}\n", "ab".repeat(SECRET));
        let huge = "x".repeat(10_000);
        for text in ["", "\n", "hello", short.as_str(), long.as_str(), odd.as_str(), other.as_str(), huge.as_str()] {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            let error = load_or_create(&path).unwrap_err();
            assert!(matches!(error, IdentityError::Malformed { .. }), "{text:?}: {error:?}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text, "the file is left as it was");
        }
        fs::write(&path, [0xff, 0xfe, 0x20]).unwrap();
        assert!(matches!(load_or_create(&path), Err(IdentityError::Malformed { .. })));
        assert!(matches!(load_or_create(folder.path()), Err(IdentityError::Malformed { .. })));
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let folder = folder();
        let path = folder.path().join("missing").join("node.key");
        let error = load_or_create(&path).unwrap_err();
        assert!(matches!(error, IdentityError::Create { .. }), "{error:?}");
        assert!(error.to_string().contains("missing/node.key"), "{error}");
    }
}
