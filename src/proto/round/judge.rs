//! Replies: which are believed, and what an answer does to the stream.

use std::time::Instant;

use super::{Divergence, Finish, Flight, Phase, Round, RoundOutput, Slot};
use crate::ids::Position;
use crate::proto::accept::{Verdict, judge};
use crate::proto::frame::{Answer, Reply};

impl Round {
    /// Takes in a reply. One that is early is held and judged in its turn; one of an older view or
    /// epoch changes nothing; one that cannot be fails the session.
    pub fn handle_reply(&mut self, reply: Reply, now: Instant) {
        if self.phase == Phase::Done {
            return;
        }
        // The load-bearing fence: what a dead speculation answered is never believed.
        if (reply.view, reply.epoch) < (self.config.view, self.epoch) {
            self.stats.stale_replies += 1;
            return;
        }
        match self.hold(reply) {
            Ok(()) => self.judge_in_order(now),
            Err(divergence) => self.end(RoundOutput::Failed(divergence.into())),
        }
    }

    /// Checks a reply against the frame that it answers and holds it for its turn.
    fn hold(&mut self, reply: Reply) -> Result<(), Divergence> {
        if reply.session != self.config.session {
            return Err(Divergence::Session { expected: self.config.session, got: reply.session });
        }
        if (reply.view, reply.epoch) > (self.config.view, self.epoch) {
            return Err(Divergence::Future {
                view: self.config.view,
                epoch: self.epoch,
                got_view: reply.view,
                got_epoch: reply.epoch,
            });
        }
        if (self.start..self.settled).contains(&reply.pos) {
            self.stats.stale_replies += 1;
            return Ok(());
        }
        let Ok(at) = self.flights.binary_search_by_key(&reply.pos, |flight| flight.pos) else {
            let end = self.flights.back().map_or(self.settled, |last| last.pos.plus(last.len));
            return Err(Divergence::NeverSent { epoch: self.epoch, got: reply.pos, first: self.settled, end });
        };
        fits(&self.flights[at], &reply)?;
        if let Some(first) = self.early.get(&reply.pos) {
            if *first == reply {
                self.stats.stale_replies += 1;
                return Ok(());
            }
            return Err(Divergence::Twice {
                pos: reply.pos,
                epoch: reply.epoch,
                first: brief(first),
                second: brief(&reply),
            });
        }
        self.early.insert(reply.pos, reply);
        Ok(())
    }

    /// Judges every reply whose turn has come.
    fn judge_in_order(&mut self, now: Instant) {
        while let Some(oldest) = self.flights.front() {
            let Some(reply) = self.early.remove(&oldest.pos) else { break };
            self.flights.pop_front();
            self.handle_patience(now);
            match self.phase {
                Phase::Prefill => self.judge_chunk(reply),
                Phase::Decode => self.judge_single(&reply),
                Phase::Done => {}
            }
        }
        self.stats.max_early = self.stats.max_early.max(self.early.len() as u32);
    }

    fn judge_chunk(&mut self, mut reply: Reply) {
        self.settled = reply.pos.plus(reply.len);
        let last = reply.answers.last().cloned();
        if self.config.score {
            for (position, answer) in (reply.pos.0..).map(Position).zip(reply.answers.drain(..)) {
                self.outputs.push_back(RoundOutput::Scored { position, answer });
            }
        }
        if self.settled.0 < self.config.prompt_len() {
            return;
        }
        if self.config.max_new == 0 {
            self.end(RoundOutput::Finished(Finish::Scored));
            return;
        }
        // The prompt's last position is always asked for, so `fits` has seen its answer.
        let Some(answer) = last else { return };
        let token = answer.token;
        self.phase = Phase::Decode;
        if self.commit(answer) {
            self.line.push_back(Slot { token, depth: 0 });
            self.extend(reply.draft.as_ref());
        }
    }

    fn judge_single(&mut self, reply: &Reply) {
        // `fits` has seen that the frame's one position is answered.
        let Some(answer) = reply.answers.last() else { return };
        let token = answer.token;
        self.line.pop_front();
        let behind = self.line.front().copied();
        let streamed = behind.filter(|_| !self.flights.is_empty());
        let verdict = judge(token, streamed.map(|slot| slot.token));
        if let Some(slot) = streamed {
            self.stats.judge(slot.depth, verdict == Verdict::Confirmed);
        }
        self.stats.decoded += 1;
        self.stats.rejections += u32::from(verdict == Verdict::Rejected);
        if !self.commit(answer.clone()) {
            return;
        }
        match verdict {
            Verdict::Confirmed => {}
            Verdict::Rejected => {
                self.cancel();
                self.line.push_back(Slot { token, depth: 0 });
            }
            Verdict::Open => {
                // Drafts that wait to be sent stand if the model went their way.
                if behind.is_none_or(|slot| slot.token != token) {
                    self.line.clear();
                    self.line.push_back(Slot { token, depth: 0 });
                }
            }
        }
        self.extend(reply.draft.as_ref());
    }

    /// Makes the model's token final and moves the frontier to where it is fed; `false` if the
    /// session ended with it.
    fn commit(&mut self, answer: Answer) -> bool {
        let Answer { token, scores } = answer;
        let index = self.committed;
        let position = Position(self.config.prompt_len() + index);
        self.committed += 1;
        self.stats.committed = self.committed;
        self.settled = position;
        self.outputs.push_back(RoundOutput::Commit { index, position, token, scores });
        let finish = if self.config.is_end(token) {
            Finish::Eos
        } else if self.committed == self.config.max_new {
            Finish::Length
        } else {
            return true;
        };
        self.end(RoundOutput::Finished(finish));
        false
    }
}

/// Checks that a reply has the shape that its frame asked for.
fn fits(flight: &Flight, reply: &Reply) -> Result<(), Divergence> {
    let pos = reply.pos;
    if reply.len != flight.len {
        return Err(Divergence::Len { pos, expected: flight.len, got: reply.len });
    }
    let end = flight.pos.0 + flight.len;
    let expected = end - flight.answer_from.0.clamp(flight.pos.0, end);
    if reply.answers.len() != expected as usize {
        return Err(Divergence::Answers { pos, expected, got: reply.answers.len() });
    }
    match &reply.draft {
        Some(block) if block.tokens.len() != block.confidence.len() => {
            Err(Divergence::Draft { pos, tokens: block.tokens.len(), confidence: block.confidence.len() })
        }
        Some(_) | None => Ok(()),
    }
}

/// The answers of a reply, for a message.
fn brief(reply: &Reply) -> String {
    const SHOWN: usize = 4;
    let mut tokens: Vec<String> = reply.answers.iter().take(SHOWN).map(|answer| answer.token.to_string()).collect();
    if reply.answers.len() > SHOWN {
        tokens.push("…".to_owned());
    }
    format!("[{}]", tokens.join(", "))
}
