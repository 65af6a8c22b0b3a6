//! The journal of one session: its oldest positions in a file, the others in memory.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;

use crate::clock;
use crate::ids::{Position, SessionId, TokenId};
use crate::node::journal::digest::position_digest;
use crate::node::journal::folder::{Folder, SpillFile};
use crate::node::journal::recent::fits;
use crate::node::journal::runs::{Runs, cost};
use crate::node::journal::{PIECE_BYTES_MAX, Piece, pieces};

/// One session's positions `[file][memory]`, without a gap.
pub(crate) struct Journal {
    pub(crate) session: SessionId,
    tag: u8,
    position_bytes: usize,
    /// From where the file ends on, if it holds anything.
    memory: Runs,
    file: Option<SpillFile>,
    settled: u32,
    /// Whether its file can still be written.
    spills: bool,
}

/// The file of a session failed: what it held is lost.
#[derive(Debug)]
pub(crate) struct Lost {
    /// The file; the folder, if none could be begun.
    pub(crate) path: PathBuf,
    pub(crate) positions: u32,
    pub(crate) why: io::Error,
}

impl Journal {
    pub(crate) fn new(session: SessionId, position_bytes: usize, tag: u8) -> Self {
        let memory = Runs::new(position_bytes);
        Self { session, tag, position_bytes, memory, file: None, settled: 0, spills: true }
    }

    /// First and one past the last position.
    pub(crate) fn span(&self) -> (u32, u32) {
        let file = self.file.as_ref().map(|file| (file.records.first(), file.records.end()));
        match file.filter(|(first, end)| first < end) {
            Some((first, end)) if self.memory.is_empty() => (first, end),
            Some((first, _)) => (first, self.memory.end()),
            None if self.memory.is_empty() => (0, 0),
            None => (self.memory.first(), self.memory.end()),
        }
    }

    /// One past the last position in the file; the first one, if there is none.
    fn file_end(&self) -> u32 {
        if self.memory.is_empty() { self.span().1 } else { self.memory.first() }
    }

    pub(crate) fn held(&self) -> u64 {
        self.memory.held()
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.file.as_ref().map_or(0, |file| file.records.bytes())
    }

    /// Adds positions from `pos` on, in the place of what was at or above it.
    pub(crate) fn record(&mut self, pos: Position, ids: &[TokenId], payload: Bytes) -> Result<(), Lost> {
        if payload.len() != ids.len() * self.position_bytes || !fits(pos, ids) {
            let (session, bytes, positions) = (self.session, payload.len(), ids.len());
            tracing::error!(%session, %pos, positions, bytes, "these are no positions: the journal begins anew");
            self.clear();
            return Ok(());
        }
        let pos = pos.0;
        let cut = self.reopen(pos);
        if !ids.is_empty() {
            self.memory.push(pos, ids, payload);
        }
        cut
    }

    fn reopen(&mut self, pos: u32) -> Result<(), Lost> {
        let (start, end) = self.span();
        if pos <= start || pos > end {
            self.clear();
        } else if pos >= self.file_end() {
            self.memory.truncate(pos);
        } else {
            self.memory.clear();
            if let Some(file) = &mut self.file
                && let Err(why) = file.records.truncate(pos)
            {
                return Err(self.lose_file(why));
            }
        }
        Ok(())
    }

    pub(crate) fn clear(&mut self) {
        self.memory.clear();
        self.file = None;
    }

    pub(crate) fn settle(&mut self, settled: u32) {
        self.settled = self.settled.max(settled);
    }

    /// Whether there is something in memory that may go to a file.
    pub(crate) fn can_spill(&self) -> bool {
        self.spills && !self.memory.is_empty() && self.memory.first() < self.settled
    }

    /// Writes the oldest settled run to the file. If that takes longer than `slow`, it was the last one:
    /// the engine waits meanwhile.
    pub(crate) fn spill(&mut self, folder: &mut Folder, slow: Duration) -> Result<(), Lost> {
        let begun = clock::now();
        let from = self.memory.first();
        let to = self.memory.front_end().unwrap_or(from).min(self.settled);
        if let Err(why) = self.write(folder, from, to) {
            let mut lost = self.lose_file(why);
            if lost.path.as_os_str().is_empty() {
                lost.path = folder.path().to_owned();
            }
            return Err(lost);
        }
        self.memory.drop_below(to);
        let took = clock::now().duration_since(begun);
        if took > slow {
            self.spills = false;
            tracing::warn!(session = %self.session, ?took, "the journal's disk is too slow: no more goes to it");
        }
        Ok(())
    }

    fn write(&mut self, folder: &mut Folder, from: u32, to: u32) -> io::Result<()> {
        let settled = Position(self.settled);
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(folder.create(self.session, (self.tag, self.position_bytes))?),
        };
        file.records.settle(settled);
        file.records.append(&self.memory, from, to)
    }

    /// The file can't be used: the journal goes on with what is in memory.
    fn lose_file(&mut self, why: io::Error) -> Lost {
        self.spills = false;
        let file = self.file.take();
        let positions = file.as_ref().map_or(0, |file| file.records.end() - file.records.first());
        Lost { path: file.map_or_else(PathBuf::new, |file| file.path().to_owned()), positions, why }
    }

    /// Forgets the oldest positions in memory and all before them, which are of no use behind a gap.
    /// Returns how many.
    fn forget(&mut self, positions: u32) -> u32 {
        let (start, _) = self.span();
        self.file = None;
        let to = self.memory.first().saturating_add(positions).min(self.memory.end());
        self.memory.drop_below(to);
        to - start
    }

    /// As [`Journal::forget`], as many as have so many bytes.
    pub(crate) fn forget_bytes(&mut self, bytes: u64) -> u32 {
        self.forget(u32::try_from(bytes.div_ceil(cost(self.position_bytes))).unwrap_or(u32::MAX))
    }

    /// Positions `from..to`, which are held.
    pub(crate) fn read(&mut self, from: u32, to: u32, chunk: u32) -> Result<Vec<Piece>, Lost> {
        let (border, most) = (self.file_end(), PIECE_BYTES_MAX / self.position_bytes.max(1));
        let mut all = Vec::new();
        for (pos, end) in pieces(from, to, chunk, most) {
            let old = if pos < border { Some(self.read_file(pos, end.min(border))?) } else { None };
            let (new_ids, new_payload) = if end > border {
                let pos = pos.max(border);
                (self.memory.ids(pos, end), self.memory.payload(pos, end))
            } else {
                (Vec::new(), Bytes::new())
            };
            let (ids, payload) = match old {
                None => (new_ids, new_payload),
                Some((ids, payload)) if end <= border => (ids, payload),
                Some((mut ids, payload)) => {
                    ids.extend(new_ids);
                    (ids, Bytes::from([payload, new_payload].concat()))
                }
            };
            all.push(Piece { pos: Position(pos), ids, payload });
        }
        Ok(all)
    }

    fn read_file(&mut self, from: u32, to: u32) -> Result<(Vec<TokenId>, Bytes), Lost> {
        let Some(file) = &mut self.file else { return Ok((Vec::new(), Bytes::new())) };
        file.records.read(from, to).map_err(|why| self.lose_file(why))
    }

    /// Digests of the positions `from..to`, which are held.
    pub(crate) fn digests(&mut self, from: u32, to: u32) -> Result<Vec<[u8; 32]>, Lost> {
        let (border, tag) = (self.file_end(), self.tag);
        let mut all = Vec::with_capacity((to - from) as usize);
        let mut each = |pos, id, wire: &[u8]| all.push(position_digest(Position(pos), id, tag, wire));
        if from < border
            && let Some(file) = &mut self.file
            && let Err(why) = file.records.for_each(from, to.min(border), &mut each)
        {
            return Err(self.lose_file(why));
        }
        if to > border {
            for (pos, id, wire) in self.memory.positions(from.max(border), to) {
                each(pos, id, wire);
            }
        }
        Ok(all)
    }

    /// What is to be written of a session that is closed and kept: its file, begun if need be.
    pub(crate) fn into_closing(mut self, folder: &mut Folder) -> io::Result<Closing> {
        let file = match self.file.take() {
            Some(file) => file,
            None => folder.create(self.session, (self.tag, self.position_bytes))?,
        };
        Ok(Closing { session: self.session, file, memory: self.memory, settled: Position(self.settled) })
    }
}

/// A closed session on its way to its file.
pub(crate) struct Closing {
    pub(crate) session: SessionId,
    pub(crate) file: SpillFile,
    pub(crate) memory: Runs,
    pub(crate) settled: Position,
}

impl Closing {
    /// Writes what is not in the file yet and keeps it.
    pub(crate) fn write(mut self) -> io::Result<()> {
        if !self.memory.is_empty() {
            self.file.records.append(&self.memory, self.memory.first(), self.memory.end())?;
        }
        self.file.records.finish(self.settled, clock::unix_seconds())?;
        self.file.keep()
    }
}
