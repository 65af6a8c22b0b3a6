//! Keys of the clients that may use the service, from a file.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::Response;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::api::error::ApiError;

/// Bytes of a key, at least: what is shorter can be guessed.
pub const KEY_BYTES_LEAST: usize = 16;

/// Why a file of keys can't be used. None of them shows a key.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// It can't be read.
    #[error("can't be read: {0}")]
    Read(#[from] io::Error),
    /// A line is none that names a key.
    #[error("line {line}: expected NAME KEY, the key of at least {KEY_BYTES_LEAST} visible ASCII characters")]
    Line {
        /// From 1.
        line: usize,
    },
    /// A name or a key came before.
    #[error("line {line}: its {what} is on an earlier line too")]
    Twice {
        /// From 1.
        line: usize,
        /// `name` or `key`.
        what: &'static str,
    },
    /// It has no key, so nobody could use the service.
    #[error("no key in it: expected a line NAME KEY for each client")]
    Empty,
}

/// The keys that are taken; kept as SHA-256 only.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys(Arc<[(String, [u8; 32])]>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl Keys {
    /// Reads the keys of `file`.
    ///
    /// # Errors
    /// [`KeysError`].
    pub fn open(file: &Path) -> Result<Self, KeysError> {
        Self::parse(&std::fs::read_to_string(file)?)
    }

    /// Reads keys, one `NAME KEY` a line; empty lines and those that begin with `#` are skipped.
    ///
    /// # Errors
    /// [`KeysError`], but [`KeysError::Read`].
    pub fn parse(text: &str) -> Result<Self, KeysError> {
        let (mut names, mut digests) = (HashSet::new(), HashSet::new());
        let mut keys = Vec::new();
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.trim();
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            let mut words = content.split_whitespace();
            let (Some(name), Some(key), None) = (words.next(), words.next(), words.next()) else {
                return Err(KeysError::Line { line });
            };
            if key.len() < KEY_BYTES_LEAST || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(KeysError::Line { line });
            }
            let digest: [u8; 32] = Sha256::digest(key.as_bytes()).into();
            if !names.insert(name) {
                return Err(KeysError::Twice { line, what: "name" });
            }
            if !digests.insert(digest) {
                return Err(KeysError::Twice { line, what: "key" });
            }
            keys.push((name.to_owned(), digest));
        }
        if keys.is_empty() { Err(KeysError::Empty) } else { Ok(Self(keys.into())) }
    }

    /// The name of the client whose key `headers` have. How long it takes tells nothing of a key: digests are
    /// compared, each in constant time, and always all of them.
    #[must_use]
    pub fn client(&self, headers: &HeaderMap) -> Option<&str> {
        // Of two headers it is not known which one the rest of the service looks at.
        let mut values = headers.get_all(header::AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return None };
        let (scheme, key) = value.as_bytes().split_at_checked(b"Bearer ".len())?;
        if !scheme.eq_ignore_ascii_case(b"Bearer ") {
            return None;
        }
        let digest: [u8; 32] = Sha256::digest(key.trim_ascii()).into();
        let mut found = None;
        for (name, known) in self.0.iter() {
            let same: Choice = known.ct_eq(&digest);
            if bool::from(same) {
                found = Some(name.as_str());
            }
        }
        found
    }
}

/// Lets a request through whose key is known, or any where there are no keys.
pub(crate) async fn guard(
    State(keys): State<Option<Keys>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if let Some(keys) = keys {
        let headers = request.headers();
        let client = keys.client(headers);
        let Some(client) = client else {
            return Err(ApiError::Key { given: headers.contains_key(header::AUTHORIZATION) });
        };
        tracing::debug!(client, path = request.uri().path(), "a request with a known key");
    }
    Ok(next.run(request).await)
}
