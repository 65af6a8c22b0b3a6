//! What a session sends next: prompt chunks, then the truth and its drafts, without waiting.

use std::time::Instant;

use super::{Flight, Phase, Round, RoundOutput};
use crate::ids::{Position, TokenId};
use crate::proto::accept::extension;
use crate::proto::frame::{DraftBlock, FrameHead};

impl Round {
    /// The next frame to send, if W, reach and need allow one.
    pub(super) fn next_frame(&mut self, now: Instant) -> Option<RoundOutput> {
        if self.overdue || self.flights.len() >= self.config.in_flight_max as usize {
            return None;
        }
        match self.phase {
            Phase::Prefill => self.next_chunk(now),
            Phase::Decode => self.next_single(now),
            Phase::Done => None,
        }
    }

    fn next_chunk(&mut self, now: Instant) -> Option<RoundOutput> {
        let (pos, prompt_len) = (self.prompt_sent, self.config.prompt_len());
        let len = self.config.prefill_chunk.min(prompt_len - pos);
        if len == 0 || !self.within_reach(pos + len) {
            return None;
        }
        self.prompt_sent += len;
        self.stats.chunks_sent += 1;
        let ids = self.config.prompt[pos as usize..(pos + len) as usize].to_vec();
        let answer_from = if self.config.score { 0 } else { prompt_len - 1 };
        Some(self.send(Position(pos), ids, Position(answer_from), now))
    }

    fn next_single(&mut self, now: Instant) -> Option<RoundOutput> {
        let depth = self.flights.len() as u32;
        let pos = self.settled.plus(depth);
        if pos >= self.config.end() || !self.within_reach(pos.0 + 1) {
            return None;
        }
        let slot = self.line.get_mut(depth as usize)?;
        slot.depth = depth;
        let token = slot.token;
        self.stats.singles_sent += 1;
        Some(self.send(pos, vec![token], pos, now))
    }

    fn send(&mut self, pos: Position, ids: Vec<TokenId>, answer_from: Position, now: Instant) -> RoundOutput {
        let len = ids.len() as u32;
        self.flights.push_back(Flight { pos, len, answer_from, sent_at: now });
        self.stats.max_in_flight = self.stats.max_in_flight.max(self.flights.len() as u32);
        let head = FrameHead {
            view: self.config.view,
            session: self.config.session,
            epoch: self.epoch,
            start: self.start,
            pos,
            len,
            settled: self.floor(),
            answer_from,
        };
        RoundOutput::Send { head, ids }
    }

    fn within_reach(&self, end: u32) -> bool {
        end - self.floor().0 <= self.config.reach
    }

    /// Appends what a fresh block adds behind the drafts in flight. What waits to be sent gives way
    /// to it: the fresh block was drafted from a longer true history.
    pub(super) fn extend(&mut self, block: Option<&DraftBlock>) {
        let Some(block) = block else { return };
        // A token that ends the sequence is never fed, nor is anything behind it.
        let useful = block.tokens.iter().take(self.config.draft_max as usize);
        let useful: Vec<TokenId> = useful.copied().take_while(|&token| !self.config.is_end(token)).collect();
        let sent = self.flights.len().max(1);
        let in_flight: Vec<TokenId> = self.line.iter().take(sent).skip(1).map(|slot| slot.token).collect();
        let rest = extension(&useful, &in_flight);
        if !rest.is_empty() {
            self.line.truncate(sent);
            self.line.extend(rest.iter().map(|&token| super::Slot { token, depth: 0 }));
        }
    }
}
