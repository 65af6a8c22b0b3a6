//! The journal of the boundary frames that a stage sent: what its successor's replacement is fed with.
//!
//! Per session and position the newest epoch. One thread owns it. `runs` holds positions in memory,
//! `file` and `header` in a file, `session` one session in both, `folder` the files of all, `keeper`
//! those of closed sessions; `kept` reads one of these later. `recent` is the other side: what a stage
//! took in last. `digest` is what both are compared by.

pub mod digest;
mod file;
mod folder;
mod header;
mod keeper;
mod kept;
mod recent;
mod runs;
mod session;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;

use crate::config::JOURNAL_MIB;
use crate::ids::{Position, SessionId, TokenId};
use crate::proto::codec::FRAME_BYTES_MAX;
use folder::Folder;
pub use header::{HEADER_BYTES, Header, HeaderError, JOURNAL_MAGIC, JOURNAL_VERSION, LABEL_BYTES_MAX};
use keeper::Keeper;
pub use kept::{KeptError, KeptJournal};
pub use recent::Recent;
use session::{Journal, Lost};

/// Largest piece that is read at once, in bytes, unless one position is larger.
pub(crate) const PIECE_BYTES_MAX: usize = FRAME_BYTES_MAX as usize;

/// A write to a file that took longer is the session's last: nothing is computed meanwhile.
const SLOW: Duration = Duration::from_secs(1);

/// How much a stage journals, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalConfig {
    /// Bytes held in memory over all sessions: payloads and 128 bytes a position. Default 256 MiB; 0
    /// journals nothing. Below what the open sessions have in flight, a dead successor costs a replay of
    /// the whole ring.
    pub memory: u64,
    /// Where settled positions go that memory has no room for. Default `None`: they are forgotten.
    pub spill: Option<SpillConfig>,
}

impl Default for JournalConfig {
    fn default() -> Self {
        Self { memory: u64::from(JOURNAL_MIB) << 20, spill: None }
    }
}

/// Files of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpillConfig {
    /// Their folder, made where it is missing. Stages may share one.
    pub folder: PathBuf,
    /// How long they are kept when their session is closed. Default `None`: they are removed then.
    pub keep: Option<Retention>,
}

/// How much of closed sessions is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention {
    /// Bytes of all files together; the oldest go first.
    pub bytes: u64,
    /// Age at which a file is removed.
    pub time: Duration,
}

/// Why a journal can't be had or does not have something.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The folder can't be used.
    #[error(
        "journal folder {}: {why}; give a folder that this user may read and write with --journal-dir",
        path.display()
    )]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// The thread that keeps closed sessions can't be started.
    #[error("the thread that keeps journals can't be started: {why}")]
    Thread {
        /// What the system said.
        why: io::Error,
    },
    /// The label does not fit into a header.
    #[error("journal label of {got} bytes: {LABEL_BYTES_MAX} at most")]
    Label {
        /// Its bytes.
        got: usize,
    },
    /// The session is not open here.
    #[error("session {session} has no journal here")]
    Unknown {
        /// The session.
        session: SessionId,
    },
    /// Some of the positions are not held.
    #[error("session {session}: positions {from} to {to} are not in the journal, which holds {first} to {end}")]
    NotCovered {
        /// The session.
        session: SessionId,
        /// First position asked for.
        from: Position,
        /// One past the last one asked for.
        to: Position,
        /// First position held.
        first: Position,
        /// One past the last one held.
        end: Position,
    },
    /// The session's file failed; the positions that it held are forgotten.
    #[error("session {session}: journal file {}: {why}; the positions in it are lost", path.display())]
    File {
        /// The session.
        session: SessionId,
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
}

/// Consecutive positions of a session as they were sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The first one.
    pub pos: Position,
    /// Token ids `[s]`.
    pub ids: Vec<TokenId>,
    /// `s` times the bytes of a position.
    pub payload: Bytes,
}

/// How much is journaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JournalStats {
    /// Bytes in memory, closed sessions that wait to be written among them.
    pub memory_bytes: u64,
    /// Bytes in files of open sessions.
    pub file_bytes: u64,
    /// Bytes in files of closed sessions in the folder.
    pub kept_bytes: u64,
    /// Open sessions.
    pub sessions: usize,
    /// Positions that were forgotten for want of room or because a file failed, since the start.
    pub evicted_positions: u64,
}

/// Journals of all sessions of one stage. Nothing here panics or waits for more than one write to a disk.
///
/// Memory: the configured bytes, the frame that is being recorded, and with a retention as much again
/// for closed sessions that are being written. When it is closed or dropped, files go unless they are kept.
pub struct Journals {
    memory_max: u64,
    /// Bytes in memory.
    memory: u64,
    evicted: u64,
    /// Whether a failing file was told of.
    told: bool,
    slow: Duration,
    sessions: BTreeMap<SessionId, Journal>,
    // Dropped in this order: the keeper writes files of the folder.
    keeper: Option<Keeper>,
    folder: Option<Folder>,
}

impl Journals {
    /// Journals without a session. `label` says in kept files which stage wrote them: its range. What dead
    /// processes left in the folder is cleared away, or kept under the retention.
    ///
    /// # Errors
    /// [`JournalError::Folder`], [`JournalError::Thread`] or [`JournalError::Label`].
    pub fn new(config: JournalConfig, label: &str) -> Result<Self, JournalError> {
        if label.len() > LABEL_BYTES_MAX {
            return Err(JournalError::Label { got: label.len() });
        }
        let folder = config.spill.as_ref().map(|spill| Folder::open(spill, label)).transpose()?;
        let keep = config.spill.and_then(|spill| spill.keep);
        let keeper = match (&folder, keep) {
            (Some(folder), Some(keep)) => {
                let keeper = Keeper::start(folder.path(), keep, config.memory);
                Some(keeper.map_err(|why| JournalError::Thread { why })?)
            }
            _ => None,
        };
        let (sessions, slow) = (BTreeMap::new(), SLOW);
        Ok(Self { memory_max: config.memory, memory: 0, evicted: 0, told: false, slow, sessions, keeper, folder })
    }

    /// Puts a layer over every file that is begun from here on.
    #[cfg(test)]
    fn wrapped(mut self, wrap: folder::Wrap) -> Self {
        if let Some(folder) = &mut self.folder {
            folder.wrap(wrap);
        }
        self
    }

    /// Whether the folder can be used.
    ///
    /// # Errors
    /// [`JournalError::Folder`].
    pub fn check(config: &JournalConfig) -> Result<(), JournalError> {
        config.spill.as_ref().map_or(Ok(()), |spill| Folder::open(spill, "").map(drop))
    }

    /// Begins the journal of a session, without positions, in the place of an older one. A position has
    /// `position_bytes` on the wire, in the encoding that `tag` ([`digest::encoding_tag`]) stands for.
    pub fn open(&mut self, session: SessionId, position_bytes: usize, tag: u8) {
        if let Some(older) = self.sessions.insert(session, Journal::new(session, position_bytes, tag)) {
            self.memory -= older.held();
        }
    }

    /// Records the output of the positions `pos..pos + ids.len()` as it was sent. Positions at or above
    /// `pos` are dropped first; if `pos` is above the end, all are.
    ///
    /// Nothing is copied: `payload` is a part of the frame's buffer, which stays alive. It should be most
    /// of that buffer, as a frame's payload is; and the whole payload of a frame in one call, so that the
    /// buffer can go when only a few of its positions are left. Settle first, then record: what is not
    /// settled can't spill.
    pub fn record(&mut self, session: SessionId, pos: Position, ids: &[TokenId], payload: Bytes) {
        let Some(journal) = self.sessions.get_mut(&session) else { return };
        let before = journal.held();
        let recorded = journal.record(pos, ids, payload);
        self.memory = self.memory - before + journal.held();
        if let Err(lost) = recorded {
            self.lost(session, &lost);
        }
        self.make_room();
    }

    /// Positions below `settled` are never re-opened: they may spill.
    pub fn settle(&mut self, session: SessionId, settled: Position) {
        if let Some(journal) = self.sessions.get_mut(&session) {
            journal.settle(settled.0);
        }
    }

    /// The positions held, without a gap; an empty range if there are none.
    #[must_use]
    pub fn span(&self, session: SessionId) -> Range<Position> {
        let (first, end) = self.sessions.get(&session).map_or((0, 0), Journal::span);
        Position(first)..Position(end)
    }

    /// Positions `from..to` in pieces of at most `chunk` positions and 64 MiB. All of them are in memory
    /// when this returns: ask for a long span part by part.
    ///
    /// # Errors
    /// [`JournalError::Unknown`], [`JournalError::NotCovered`] or [`JournalError::File`]; after the last
    /// one the span begins behind what was in the file.
    pub fn read(
        &mut self,
        session: SessionId,
        from: Position,
        to: Position,
        chunk: u32,
    ) -> Result<Vec<Piece>, JournalError> {
        let read = self.covering(session, from, to)?.read(from.0, to.0, chunk);
        read.map_err(|lost| self.failed(session, lost))
    }

    /// Digests of the positions `from..to` ([`digest::position_digest`]).
    ///
    /// # Errors
    /// As [`Journals::read`].
    pub fn digests(&mut self, session: SessionId, from: Position, to: Position) -> Result<Vec<[u8; 32]>, JournalError> {
        let digests = self.covering(session, from, to)?.digests(from.0, to.0);
        digests.map_err(|lost| self.failed(session, lost))
    }

    /// Ends the journal of a session: with a retention its positions are written to a file that is kept.
    pub fn close(&mut self, session: SessionId) {
        let Some(journal) = self.sessions.remove(&session) else { return };
        self.memory -= journal.held();
        let (first, end) = journal.span();
        let (Some(keeper), Some(folder)) = (&self.keeper, &mut self.folder) else { return };
        if first == end {
            return;
        }
        let kept = journal.into_closing(folder).map_err(|why| why.to_string());
        if let Err(why) = kept.and_then(|closing| keeper.keep(closing).map_err(|why| why.to_string())) {
            self.tell(session, "the journal of a closed session is not kept", &why);
        }
    }

    /// How much is journaled.
    #[must_use]
    pub fn stats(&self) -> JournalStats {
        let keeper = self.keeper.as_ref();
        JournalStats {
            memory_bytes: self.memory + keeper.map_or(0, Keeper::waiting),
            file_bytes: self.sessions.values().map(Journal::file_bytes).sum(),
            kept_bytes: keeper.map_or(0, Keeper::kept),
            sessions: self.sessions.len(),
            evicted_positions: self.evicted,
        }
    }

    /// The journal of a session that holds these positions.
    fn covering(&mut self, session: SessionId, from: Position, to: Position) -> Result<&mut Journal, JournalError> {
        let journal = self.sessions.get_mut(&session).ok_or(JournalError::Unknown { session })?;
        let (first, end) = journal.span();
        if first <= from.0 && from <= to && to.0 <= end {
            return Ok(journal);
        }
        Err(JournalError::NotCovered { session, from, to, first: Position(first), end: Position(end) })
    }

    /// Gets memory below its limit: settled positions go to files, of the session that holds most first;
    /// if there are none that can, the oldest of the session that holds most are forgotten.
    fn make_room(&mut self) {
        while self.memory > self.memory_max {
            let spills = self.folder.is_some();
            let most = |a: &&mut Journal, b: &&mut Journal| a.held().cmp(&b.held());
            let spilling = self.sessions.values_mut().filter(|journal| spills && journal.can_spill()).max_by(most);
            if let (Some(journal), Some(folder)) = (spilling, &mut self.folder) {
                let (session, before) = (journal.session, journal.held());
                let spilled = journal.spill(folder, self.slow);
                self.memory = self.memory - before + journal.held();
                if let Err(lost) = spilled {
                    self.lost(session, &lost);
                }
                continue;
            }
            let Some(journal) = self.sessions.values_mut().max_by(most) else { return };
            let before = journal.held();
            self.evicted += u64::from(journal.forget_bytes(self.memory - self.memory_max));
            self.memory = self.memory - before + journal.held();
        }
    }

    fn failed(&mut self, session: SessionId, lost: Lost) -> JournalError {
        self.lost(session, &lost);
        JournalError::File { session, path: lost.path, why: lost.why }
    }

    fn lost(&mut self, session: SessionId, lost: &Lost) {
        self.evicted += u64::from(lost.positions);
        let why = format!("{}: {}", lost.path.display(), lost.why);
        self.tell(session, "a journal's file failed: its oldest positions are forgotten", &why);
    }

    /// Warns once; what comes after is for those who look closer.
    fn tell(&mut self, session: SessionId, what: &str, why: &dyn std::fmt::Display) {
        if std::mem::replace(&mut self.told, true) {
            tracing::debug!(%session, %why, "{what}");
        } else {
            tracing::warn!(%session, %why, "{what}");
        }
    }
}

impl Drop for Journals {
    fn drop(&mut self) {
        while let Some(session) = self.sessions.keys().next().copied() {
            self.close(session);
        }
    }
}

/// `from..to` cut into pieces of at most `chunk` and at most `most` positions, but one at least.
fn pieces(from: u32, to: u32, chunk: u32, most: usize) -> impl Iterator<Item = (u32, u32)> {
    let step = chunk.min(u32::try_from(most).unwrap_or(u32::MAX)).max(1);
    let mut pos = from;
    std::iter::from_fn(move || {
        let begin = pos;
        pos = begin.saturating_add(step).min(to);
        (begin < to).then_some((begin, pos))
    })
}
