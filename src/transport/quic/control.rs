//! Writes the control lane: bodies in their order, and notes between them.

use std::io;

use bytes::Bytes;
use futures::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::super::inflow::Inflow;
use super::note::Note;

/// Bodies that are queued are put together up to this many bytes a write.
const COALESCE: usize = 64 << 10;

/// What is put on a lane.
#[derive(Debug)]
pub(super) enum Outgoing {
    Body(Bytes),
    /// Ends the lane.
    Farewell(String),
}

/// Writes the control lane.
#[derive(Debug)]
pub(super) struct ControlWriter<S> {
    stream: S,
    scratch: Vec<u8>,
}

impl<S: AsyncWrite + Unpin> ControlWriter<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, scratch: Vec::new() }
    }

    /// Writes a note at once.
    pub(super) async fn note(&mut self, note: &Note) -> io::Result<()> {
        note.encode(&mut self.scratch);
        self.flush().await
    }

    /// Says farewell, where nothing else was said.
    pub(super) async fn farewell(&mut self, reason: String) -> io::Result<()> {
        self.note(&Note::Farewell { reason }).await?;
        self.stream.close().await
    }

    /// Writes what is queued and returns credit, as either comes, until a farewell or until nobody
    /// can queue any more. What waits goes out in one write.
    pub(super) async fn run(&mut self, queue: &mut mpsc::Receiver<Outgoing>, inflow: &Inflow) -> io::Result<()> {
        loop {
            tokio::select! {
                biased;
                due = inflow.due() => Note::from(due).encode(&mut self.scratch),
                first = queue.recv() => {
                    if !self.take(first, queue).await? {
                        return self.stream.close().await;
                    }
                }
            }
            self.flush().await?;
        }
    }

    /// Takes what is queued, from `first` on; `false` where it was the last.
    async fn take(&mut self, first: Option<Outgoing>, queue: &mut mpsc::Receiver<Outgoing>) -> io::Result<bool> {
        let mut next = first;
        loop {
            match next {
                Some(Outgoing::Body(body)) => self.body(&body).await?,
                Some(Outgoing::Farewell(reason)) => {
                    Note::Farewell { reason }.encode(&mut self.scratch);
                    self.flush().await?;
                    return Ok(false);
                }
                None => return Ok(false),
            }
            if self.scratch.len() >= COALESCE {
                return Ok(true);
            }
            match queue.try_recv() {
                Ok(outgoing) => next = Some(outgoing),
                Err(mpsc::error::TryRecvError::Empty | mpsc::error::TryRecvError::Disconnected) => return Ok(true),
            }
        }
    }

    /// Puts a body into the scratch buffer, writing out what doesn't fit.
    async fn body(&mut self, body: &Bytes) -> io::Result<()> {
        // The sender checked the lane's limit, far below the note's bit.
        let length = body.len() as u32;
        self.scratch.extend_from_slice(&length.to_le_bytes());
        let (near, far) = body.split_at(body.len().min(COALESCE.saturating_sub(self.scratch.len())));
        self.scratch.extend_from_slice(near);
        if !far.is_empty() {
            self.write().await?;
            self.stream.write_all(far).await?;
        }
        Ok(())
    }

    async fn write(&mut self) -> io::Result<()> {
        let written = self.stream.write_all(&self.scratch).await;
        self.scratch.clear();
        written
    }

    async fn flush(&mut self) -> io::Result<()> {
        self.write().await?;
        self.stream.flush().await
    }

    #[cfg(test)]
    pub(super) fn into_inner(self) -> S {
        self.stream
    }
}
