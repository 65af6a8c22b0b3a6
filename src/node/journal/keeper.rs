//! The thread that writes the journals of closed sessions out and removes those that were kept long
//! enough: the engine does not wait for it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::node::journal::Retention;
use crate::node::journal::folder::retain;
use crate::node::journal::session::Closing;

/// Closed sessions that wait to be written.
const CLOSINGS_MAX: usize = 1024;

/// Longest pause between looks at what is kept.
const LOOK: Duration = Duration::from_secs(60);

/// Why a closed session's journal is not kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotKept {
    #[error("{waiting} bytes of closed sessions wait to be written, {max} may: the disk is too slow")]
    Waiting { waiting: u64, max: u64 },
    #[error("too many closed sessions wait to be written: the disk is too slow")]
    Queue,
}

/// The way to the thread. When it is dropped, all that was handed over is written first.
pub(crate) struct Keeper {
    /// `None` once it is to end.
    closings: Option<SyncSender<Closing>>,
    thread: Option<JoinHandle<()>>,
    numbers: Arc<Numbers>,
    waiting_max: u64,
}

/// What owner and thread both know.
#[derive(Debug, Default)]
struct Numbers {
    /// Bytes of closed sessions in memory.
    waiting: AtomicU64,
    /// Bytes of kept files.
    kept: AtomicU64,
}

impl Keeper {
    /// Starts the thread; sessions of at most `waiting_max` bytes in all may wait for it.
    pub(crate) fn start(folder: &Path, keep: Retention, waiting_max: u64) -> io::Result<Self> {
        let (closings, receiver) = sync_channel(CLOSINGS_MAX);
        let numbers = Arc::new(Numbers::default());
        let work = Work { folder: folder.to_owned(), keep, numbers: Arc::clone(&numbers), told: false };
        let thread = std::thread::Builder::new().name("journal".to_owned()).spawn(move || work.run(&receiver))?;
        Ok(Self { closings: Some(closings), thread: Some(thread), numbers, waiting_max })
    }

    /// Hands a closed session over.
    pub(crate) fn keep(&self, closing: Closing) -> Result<(), NotKept> {
        let held = closing.memory.held();
        let waiting = self.waiting();
        if waiting > 0 && waiting + held > self.waiting_max {
            return Err(NotKept::Waiting { waiting: waiting + held, max: self.waiting_max });
        }
        self.numbers.waiting.fetch_add(held, Ordering::AcqRel);
        let sent = self.closings.as_ref().is_some_and(|closings| closings.try_send(closing).is_ok());
        if !sent {
            self.numbers.waiting.fetch_sub(held, Ordering::AcqRel);
            return Err(NotKept::Queue);
        }
        Ok(())
    }

    pub(crate) fn waiting(&self) -> u64 {
        self.numbers.waiting.load(Ordering::Acquire)
    }

    pub(crate) fn kept(&self) -> u64 {
        self.numbers.kept.load(Ordering::Acquire)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.closings = None;
        if let Some(thread) = self.thread.take() {
            // Its panic was reported by itself.
            let _ = thread.join();
        }
    }
}

struct Work {
    folder: PathBuf,
    keep: Retention,
    numbers: Arc<Numbers>,
    told: bool,
}

impl Work {
    fn run(mut self, closings: &Receiver<Closing>) {
        let look = self.keep.time.clamp(Duration::from_secs(1), LOOK);
        loop {
            self.retain();
            match closings.recv_timeout(look) {
                Ok(closing) => self.write(closing),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn write(&mut self, closing: Closing) {
        let (session, held) = (closing.session, closing.memory.held());
        if let Err(error) = closing.write() {
            self.tell(&format!("the journal of session {session} could not be written and is not kept: {error}"));
        }
        self.numbers.waiting.fetch_sub(held, Ordering::AcqRel);
    }

    fn retain(&mut self) {
        match retain(&self.folder, &self.keep) {
            Ok(kept) => self.numbers.kept.store(kept, Ordering::Release),
            Err(error) => self.tell(&format!("kept journals can't be looked through: {error}")),
        }
    }

    /// Warns once; what comes after is for those who look closer.
    fn tell(&mut self, what: &str) {
        let folder = self.folder.display();
        if std::mem::replace(&mut self.told, true) {
            tracing::debug!(%folder, "{what}");
        } else {
            tracing::warn!(%folder, "{what}");
        }
    }
}
