//! Writes the data lanes: every body whole on one of them, in turn, and in one write with its
//! prefix.
//!
//! Replies go before frames and wait for nothing; frames wait for credit, here rather than in the
//! network. A lane that is blocked is passed over.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use futures::AsyncWrite;
use futures::task::AtomicWaker;
use tokio::sync::mpsc;

use super::super::credit::{Credit, CreditError, HopStats, Return, cost};
use super::super::endpoint::lend;
use super::control::Outgoing;
use super::lane::{ASKED, PREFIX, REPLY};
use super::note::Note;
use crate::clock;

/// Longest head of a body: a note and a prefix.
const HEAD_MAX: usize = 32;

/// The credit of a connection's frames, shared with whoever hears of returns.
#[derive(Debug)]
pub(super) struct Outflow {
    credit: Mutex<Credit>,
    returned: AtomicWaker,
}

impl Outflow {
    pub(super) fn new(credit: Credit) -> Self {
        Self { credit: Mutex::new(credit), returned: AtomicWaker::new() }
    }

    fn credit(&self) -> MutexGuard<'_, Credit> {
        self.credit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The peer returned credit.
    ///
    /// # Errors
    /// [`CreditError`] where it can't be.
    pub(super) fn returned(&self, returned: Return) -> Result<(), CreditError> {
        self.credit().handle_returned(returned, clock::now())?;
        self.returned.wake();
        Ok(())
    }

    /// What is known of the hop, while `queued` frames wait.
    pub(super) fn stats(&self, queued: usize) -> HopStats {
        self.credit().stats(queued)
    }

    /// Takes credit for a frame; `Ready` says whether it is to be asked back at once.
    fn poll_take(&self, cost: u64, cx: &mut Context<'_>) -> Poll<bool> {
        let mut credit = self.credit();
        if !credit.may_send(cost) {
            // Under the lock, so that no return comes in between.
            self.returned.register(cx.waker());
            return Poll::Pending;
        }
        Poll::Ready(credit.handle_sent(cost, clock::now()))
    }
}

/// What goes out next.
enum Next {
    /// A body, and the flags of its prefix.
    Body(u32, Bytes),
    /// The end of all lanes, with a farewell to say.
    Farewell(Option<String>),
}

/// Writes the data lanes of a connection.
#[derive(Debug)]
pub(super) struct Spread<S> {
    lanes: Vec<LaneOut<S>>,
    /// The lane whose turn it is.
    turn: usize,
    pub(super) replies: mpsc::Receiver<Outgoing>,
    pub(super) frames: mpsc::Receiver<Outgoing>,
    /// A frame that has no credit.
    waiting: Option<Bytes>,
    pub(super) outflow: Arc<Outflow>,
    /// Bodies that were queued on control.
    control: Arc<AtomicU64>,
    /// What every lane says last, once all is written.
    last: Option<Bytes>,
}

impl<S: AsyncWrite + Unpin> Spread<S> {
    /// Writes what comes through `replies` and `frames` on these lanes.
    pub(super) fn new(
        lanes: Vec<S>,
        replies: mpsc::Receiver<Outgoing>,
        frames: mpsc::Receiver<Outgoing>,
        outflow: Arc<Outflow>,
        control: Arc<AtomicU64>,
    ) -> Self {
        let lanes = lanes.into_iter().map(LaneOut::new).collect();
        Self { lanes, turn: 0, replies, frames, waiting: None, outflow, control, last: None }
    }

    /// Runs until a farewell among the frames, or until nobody can queue any more.
    pub(super) async fn run(mut self) -> io::Result<()> {
        std::future::poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        for lane in &mut self.lanes {
            if lane.busy {
                // One that stays blocked holds up no other.
                let _ = lane.poll_write(cx)?;
            }
        }
        while self.last.is_none()
            && let Some(at) = self.free()
        {
            match self.poll_next(cx) {
                Poll::Ready(Next::Body(flags, body)) => {
                    self.turn = (at + 1) % self.lanes.len();
                    let lane = &mut self.lanes[at];
                    lane.load(flags, body, &self.control);
                    let _ = lane.poll_write(cx)?;
                }
                Poll::Ready(Next::Farewell(reason)) => self.last = Some(farewell(reason)),
                Poll::Pending => return Poll::Pending,
            }
        }
        match self.last.clone() {
            Some(last) => self.poll_last(&last, cx),
            // Every lane is blocked, and wakes when it is not.
            None => Poll::Pending,
        }
    }

    /// The next lane that is not blocked.
    fn free(&self) -> Option<usize> {
        let count = self.lanes.len();
        (0..count).map(|step| (self.turn + step) % count).find(|at| !self.lanes[*at].busy)
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Next> {
        // Nobody says farewell among replies.
        if let Poll::Ready(Some(Outgoing::Body(body))) = self.replies.poll_recv(cx) {
            return Poll::Ready(Next::Body(REPLY, body));
        }
        let frame = match self.waiting.take() {
            Some(frame) => frame,
            None => match self.frames.poll_recv(cx) {
                Poll::Ready(Some(Outgoing::Body(frame))) => frame,
                Poll::Ready(Some(Outgoing::Farewell(reason))) => return Poll::Ready(Next::Farewell(Some(reason))),
                Poll::Ready(None) => return Poll::Ready(Next::Farewell(None)),
                Poll::Pending => {
                    // The runtime may have asked for a pause.
                    if self.frames.is_empty() {
                        self.outflow.credit().handle_starved();
                    }
                    return Poll::Pending;
                }
            },
        };
        match self.outflow.poll_take(cost(frame.len()), cx) {
            Poll::Ready(asked) => Poll::Ready(Next::Body(if asked { ASKED } else { 0 }, frame)),
            Poll::Pending => {
                self.waiting = Some(frame);
                Poll::Pending
            }
        }
    }

    /// Ends every lane.
    fn poll_last(&mut self, last: &Bytes, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut open = false;
        for lane in &mut self.lanes {
            open |= lane.poll_last(last, cx)?.is_pending();
        }
        if open { Poll::Pending } else { Poll::Ready(Ok(())) }
    }
}

fn farewell(reason: Option<String>) -> Bytes {
    let mut bytes = Vec::new();
    if let Some(reason) = reason {
        Note::Farewell { reason }.encode(&mut bytes);
    }
    bytes.into()
}

/// One lane, and what is being written on it.
#[derive(Debug)]
struct LaneOut<S> {
    stream: S,
    /// `[at..end]` is to be written, then the body.
    head: [u8; HEAD_MAX],
    at: usize,
    end: usize,
    body: Bytes,
    busy: bool,
    /// Whether a body was ever written.
    began: bool,
    /// Whether the last is said.
    ended: bool,
}

impl<S: AsyncWrite + Unpin> LaneOut<S> {
    fn new(stream: S) -> Self {
        let (at, end) = (0, 0);
        Self { stream, head: [0; HEAD_MAX], at, end, body: Bytes::new(), busy: false, began: false, ended: false }
    }

    /// Takes a body to write. The first says how many bodies were queued on control before it.
    fn load(&mut self, flags: u32, body: Bytes, control: &AtomicU64) {
        let mut head = Vec::new();
        if !self.began {
            self.began = true;
            Note::After { control: control.load(Ordering::Acquire) }.encode(&mut head);
        }
        // The sender checked the lane's limit, far below the flags.
        let prefix = (flags | body.len() as u32).to_le_bytes();
        let end = head.len() + PREFIX;
        self.head[..head.len()].copy_from_slice(&head);
        self.head[head.len()..end].copy_from_slice(&prefix);
        (self.at, self.end, self.body, self.busy) = (0, end, body, true);
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.at < self.end || !self.body.is_empty() {
            let head = &self.head[self.at..self.end];
            let both = [IoSlice::new(head), IoSlice::new(&self.body)];
            let slices = if head.is_empty() { &both[1..] } else { &both };
            let write = || Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
            let written = ready!(lend(&self.body, write))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_head = written.min(head.len());
            self.at += of_head;
            self.body.advance(written - of_head);
        }
        // The connection alone keeps it from here on.
        self.body = Bytes::new();
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.busy = false;
        Poll::Ready(Ok(()))
    }

    /// Writes what is left, the last, and closes.
    fn poll_last(&mut self, last: &Bytes, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.busy {
            ready!(self.poll_write(cx))?;
        }
        if !self.ended {
            self.ended = true;
            (self.at, self.end, self.body, self.busy) = (0, 0, last.clone(), true);
            ready!(self.poll_write(cx))?;
        }
        Pin::new(&mut self.stream).poll_close(cx)
    }
}

#[cfg(test)]
mod tests;
