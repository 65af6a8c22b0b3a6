//! One session on a stage: its fence, its place in the engine, and what a pass over it does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::engine::{EngineFacts, SessionShape};
use crate::ids::{Epoch, Position, TokenId};
use crate::node::counters::SessionCounters;
use crate::node::journal::Recent;
use crate::node::tail::Tail;
use crate::node::worker::Kind;
use crate::node::worker::shelf::Shelved;
use crate::proto::control::{Open, Rebuild};
use crate::proto::fence::{Arrival, Fence, FenceConfig, FenceError, Forward, HELD_FRAMES_MAX};
use crate::proto::frame::{Frame, FrameHead};

/// How long a frame may wait for the one before it.
const HOLD_FOR: Duration = Duration::from_secs(10);

/// Positions of neighbouring decode frames that one pass takes at most.
const MERGE_POSITIONS_MAX: usize = 16;

/// What travels behind a frame's head.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) ids: Vec<TokenId>,
    pub(crate) payload: Bytes,
}

/// Frames that one pass computes: consecutive positions of one epoch.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) heads: Vec<FrameHead>,
    pub(crate) ids: Vec<TokenId>,
    pub(crate) payloads: Vec<Bytes>,
}

/// One session on a stage.
pub(crate) struct Session {
    pub(crate) open: Open,
    pub(crate) counters: Arc<SessionCounters>,
    pub(crate) tail: Option<Tail>,
    fence: Fence<Body>,
    /// Taken from the fence, but not part of the last work.
    taken: Option<(FrameHead, Body)>,
    /// Token ids of the positions that were computed, from 0; those at or above the fence's next one are of
    /// a speculation that is over.
    ids: Vec<TokenId>,
    recent: Recent,
    digests_from: Position,
    /// As a shadow: the fence refused a frame.
    begins_anew: bool,
}

impl Session {
    /// A session before its first frame.
    pub(crate) fn new(open: Open, (is_tail, counters): (bool, Arc<SessionCounters>), state: Shelved) -> Self {
        let zero = Position(0);
        let rebuild = Rebuild { from: zero, history: zero, forward_from: zero, digests_from: zero };
        Self::resumed(open, (is_tail, counters), state, rebuild)
    }

    /// A session that goes on with the state it has, from `rebuild.from` on.
    pub(crate) fn resumed(
        open: Open,
        (is_tail, counters): (bool, Arc<SessionCounters>),
        state: Shelved,
        rebuild: Rebuild,
    ) -> Self {
        let Shelved { mut ids, recent, .. } = state;
        ids.truncate(rebuild.from.0 as usize);
        let fence = fence(&open, rebuild);
        let tail = is_tail.then(|| Tail::new(open.clone(), rebuild));
        let digests_from = rebuild.digests_from;
        Self { open, counters, tail, fence, taken: None, ids, recent, digests_from, begins_anew: false }
    }

    /// A session that computes history alone and forwards nothing, from `from` on.
    pub(crate) fn shadow(open: Open, is_tail: bool, state: Shelved, from: Position) -> Self {
        let rebuild = all_history(&open, from);
        Self::resumed(open, (is_tail, Arc::default()), state, rebuild)
    }

    /// A shadow forgets the frames that wait and goes on from what it has computed, once no pass is under way.
    pub(crate) fn begin_anew(&mut self) {
        self.begins_anew = true;
    }

    /// What outlives the ring.
    pub(crate) fn shelve(mut self, shape: SessionShape) -> Shelved {
        self.ids.truncate(self.fence.next().0 as usize);
        let final_to = self.final_to();
        Shelved { shape, final_to, ids: self.ids, recent: self.recent }
    }

    /// Of what was computed, the positions below are final: prompt, history or committed.
    pub(crate) fn final_to(&self) -> Position {
        let known = self.fence.history().max(Position(self.open.prompt_len)).max(self.fence.settled());
        known.min(self.fence.next())
    }

    /// Whether there is nothing that could be computed.
    pub(crate) fn is_starved(&self) -> bool {
        self.taken.is_none() && !self.fence.is_ready()
    }

    /// Next position to compute.
    pub(crate) fn next(&self) -> Position {
        self.fence.next()
    }

    /// Positions below are history.
    pub(crate) fn history(&self) -> Position {
        self.fence.history()
    }

    /// The first position whose result is digested in reports of the history.
    pub(crate) fn digests_from(&self) -> Position {
        self.digests_from
    }

    /// Frames of the history were sent to the next stage once more.
    pub(crate) fn handle_replayed(&mut self, frames: u64) {
        self.fence.handle_replayed(frames);
        self.counters.publish(&self.fence);
    }

    /// The shape that the engine is asked for.
    pub(crate) fn shape(open: &Open, facts: &EngineFacts) -> SessionShape {
        SessionShape {
            positions: open.positions,
            reach: open.reach,
            boundaries: open.boundaries.clone(),
            encoding: open.encoding,
            drafting: open.draft_block > 0 && facts.is_tail(),
        }
    }

    /// What it lets through.
    pub(crate) fn fence(&self) -> &Fence<Body> {
        &self.fence
    }

    pub(crate) fn handle_frame(&mut self, frame: Frame, now: Instant) -> Result<Arrival, FenceError> {
        let body = Body { ids: frame.ids, payload: frame.payload };
        let arrival = self.fence.handle_frame(frame.head, body, now);
        self.counters.publish(&self.fence);
        arrival
    }

    pub(crate) fn handle_cancel(&mut self, below: Epoch) {
        self.fence.handle_cancel(below);
        self.taken.take_if(|(head, _)| head.epoch < below);
        self.counters.publish(&self.fence);
    }

    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.fence.poll_timeout().map(|(at, _)| at)
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) -> Result<(), FenceError> {
        self.fence.handle_timeout(now)
    }

    /// What its next frame is, if there is one to compute.
    pub(crate) fn waits(&mut self) -> Option<Kind> {
        if std::mem::take(&mut self.begins_anew) {
            self.fence = fence(&self.open, all_history(&self.open, self.fence.next()));
            self.taken = None;
        }
        let (head, body) = self.take()?;
        let kind = if head.pos.0 >= self.open.prompt_len { Kind::Text } else { Kind::Prompt };
        self.taken = Some((head, body));
        Some(kind)
    }

    /// The next frames to compute together, or nothing: one prompt chunk, or neighbouring frames of the text
    /// that have queued up, of `room` positions where more than one.
    pub(crate) fn poll_work(&mut self, room: usize) -> Option<Work> {
        let merges = self.waits()? == Kind::Text;
        let (head, body) = self.take()?;
        let mut work = Work::default();
        let (mut next, epoch) = (head.pos.plus(head.len), head.epoch);
        work.push(head, body);
        while merges && work.ids.len() < MERGE_POSITIONS_MAX.min(room) {
            let Some((head, body)) = self.take() else { break };
            if head.epoch != epoch || head.pos != next {
                self.taken = Some((head, body));
                break;
            }
            next = head.pos.plus(head.len);
            work.push(head, body);
        }
        Some(work)
    }

    fn take(&mut self) -> Option<(FrameHead, Body)> {
        let epoch = self.fence.epoch();
        self.taken.take().filter(|(head, _)| head.epoch == epoch).or_else(|| self.fence.poll_compute())
    }

    /// Frames were computed together: what becomes of the result of each.
    pub(crate) fn handle_computed(&mut self, work: &Work, input_bytes: usize) -> Vec<Forward> {
        let mut ids = &work.ids[..];
        let mut fates = Vec::with_capacity(work.heads.len());
        for (head, payload) in work.heads.iter().zip(&work.payloads) {
            let (of_frame, rest) = ids.split_at(head.len as usize);
            ids = rest;
            if head.epoch == self.fence.epoch() {
                self.ids.truncate(head.pos.0 as usize);
                self.ids.extend_from_slice(of_frame);
                if input_bytes > 0 {
                    self.recent.record(head.pos, of_frame, payload.clone(), input_bytes);
                }
            }
            fates.push(self.fence.handle_computed(head));
        }
        self.counters.publish(&self.fence);
        fates
    }
}

fn all_history(open: &Open, from: Position) -> Rebuild {
    let end = Position(open.positions);
    Rebuild { from, history: end, forward_from: end, digests_from: end }
}

fn fence(open: &Open, rebuild: Rebuild) -> Fence<Body> {
    Fence::new(FenceConfig {
        session: open.session,
        view: open.view,
        prompt_len: open.prompt_len,
        reach: open.reach,
        end: Position(open.positions),
        from: rebuild.from,
        history: rebuild.history,
        forward_from: rebuild.forward_from,
        hold_for: HOLD_FOR,
        held_max: HELD_FRAMES_MAX,
    })
}

impl Work {
    fn push(&mut self, head: FrameHead, body: Body) {
        self.heads.push(head);
        self.ids.extend_from_slice(&body.ids);
        self.payloads.push(body.payload);
    }

    /// First position.
    pub(crate) fn pos(&self) -> Position {
        self.heads.first().map_or(Position(0), |head| head.pos)
    }

    /// First position that wants logits at the tail.
    pub(crate) fn logits_from(&self) -> Position {
        self.heads.iter().map(|head| head.answer_from.max(head.pos)).min().unwrap_or(Position(u32::MAX))
    }
}
