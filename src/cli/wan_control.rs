//! The Unix socket on which an emulated network takes commands from other processes of its user.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use crate::cli::wan::LINE_BYTES_MAX;

/// How long a client may take for a command, and to read its answer.
const CLIENT_WAIT: Duration = Duration::from_secs(2);

/// Why the socket is not there.
#[derive(Debug, thiserror::Error)]
pub(super) enum ControlError {
    /// It can't be made.
    #[error("--control {}: {why}; give a file that does not exist, in a folder that is yours", path.display())]
    Bind {
        /// Its file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// It takes no more clients.
    #[error("--control {}: no client can be taken: {why}", path.display())]
    Accept {
        /// Its file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
}

/// A socket; its file is removed with it.
#[derive(Debug)]
pub(super) struct Control {
    path: PathBuf,
    /// Becomes the runtime's once that is there.
    listener: std::os::unix::net::UnixListener,
}

impl Control {
    /// Makes the socket.
    ///
    /// # Errors
    /// [`ControlError::Bind`], also where the file exists.
    pub(super) fn bind(path: &Path) -> Result<Self, ControlError> {
        let failed = |why| ControlError::Bind { path: path.to_owned(), why };
        let listener = std::os::unix::net::UnixListener::bind(path).map_err(failed)?;
        let control = Self { path: path.to_owned(), listener };
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        control.listener.set_nonblocking(true).map_err(failed)?;
        Ok(control)
    }

    /// Answers clients, one after the other, for ever.
    ///
    /// # Errors
    /// [`ControlError::Accept`].
    pub(super) async fn serve(&self, obey: impl Fn(String) -> Vec<String>) -> Result<(), ControlError> {
        let failed = |why| ControlError::Accept { path: self.path.clone(), why };
        let listener = self.listener.try_clone().and_then(UnixListener::from_std).map_err(failed)?;
        loop {
            let (stream, _) = listener.accept().await.map_err(failed)?;
            // A client that does not speak, or does not listen, gets nothing.
            if let Ok(Err(error)) = timeout(CLIENT_WAIT, answer(stream, &obey)).await {
                tracing::debug!(%error, "a client of the control socket is gone");
            }
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // One that was removed meanwhile is as good.
        let _ = fs::remove_file(&self.path);
    }
}

/// Reads one command and writes its answer.
async fn answer(stream: UnixStream, obey: impl Fn(String) -> Vec<String>) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = Vec::new();
    BufReader::new(read.take(LINE_BYTES_MAX as u64)).read_until(b'\n', &mut line).await?;
    let said = obey(String::from_utf8_lossy(&line).trim().to_owned());
    write.write_all((said.join("\n") + "\n").as_bytes()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_command_is_answered_and_the_file_goes_with_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wan");
        let control = Control::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(Control::bind(&path), Err(ControlError::Bind { .. })));
        let client = async {
            let mut stream = UnixStream::connect(&path).await.unwrap();
            stream.write_all(b"cut in\n").await.unwrap();
            let mut said = String::new();
            stream.read_to_string(&mut said).await.unwrap();
            said
        };
        let said = tokio::select! {
            said = client => said,
            served = control.serve(|line| vec![format!("OK {line}"), "more".to_owned()]) => panic!("{served:?}"),
        };
        assert_eq!(said, "OK cut in\nmore\n");
        drop(control);
        assert!(!path.exists());
    }
}
