//! One session's ring: the real machines over in-memory lanes, driven one event at a time by a
//! schedule. The invariants of every machine are asserted after every event.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use ringfence::ids::{Epoch, Position, SessionId, TokenId, View};
use ringfence::proto::codec::{Data, FrameBuffer, decode_data, encode_frame, encode_reply};
use ringfence::proto::fence::{Arrival, Fence, FenceConfig, Forward, HELD_FRAMES_MAX};
use ringfence::proto::frame::{Answer, DraftBlock, Frame, Reply, Scores};
use ringfence::proto::frontier::Frontier;
use ringfence::proto::round::{Deadlines, Finish, Round, RoundConfig, RoundOutput};

use super::toy::{ToyStage, VOCAB, answer, embed, mix, plain_answers};

/// How good the scripted drafter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Script {
    /// Every draft is wrong.
    Zero,
    /// Every draft is the model's token.
    Full,
    /// A draft is right with this chance in percent, by position and depth.
    Partial(u64),
}

/// One case.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) stages: usize,
    pub(crate) lanes: usize,
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) max_new: u32,
    pub(crate) eos: BTreeSet<TokenId>,
    pub(crate) in_flight_max: u32,
    pub(crate) block: u32,
    pub(crate) draft_max: u32,
    pub(crate) chunk: u32,
    pub(crate) score: bool,
    pub(crate) script: Script,
    /// Stops the session once that many tokens are committed.
    pub(crate) stop_after: Option<u32>,
    /// Frames that a stage takes out before it computes the first; 0 takes one and computes it in
    /// one event.
    pub(crate) merge: usize,
}

impl Case {
    pub(crate) fn reach(&self) -> u32 {
        (self.block + 1).max(self.chunk * (self.stages as u32 + 1))
    }

    /// The stream without speculation, with the end that this case makes, and that end.
    pub(crate) fn expected(&self) -> (Vec<TokenId>, Finish) {
        let answers = plain_answers(self.stages, &self.prompt, self.max_new as usize);
        let mut tokens = Vec::new();
        for &token in answers.iter().skip(self.prompt.len() - 1).take(self.max_new as usize) {
            tokens.push(token);
            if self.eos.contains(&token) {
                return (tokens, Finish::Eos);
            }
            if self.stop_after == Some(tokens.len() as u32) && tokens.len() < self.max_new as usize {
                return (tokens, Finish::Stopped);
            }
        }
        (tokens, if self.max_new == 0 { Finish::Scored } else { Finish::Length })
    }
}

/// Something that can happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// The oldest body of a lane into stage `hop`, or into the coordinator.
    Deliver { hop: usize, lane: usize },
    /// The oldest cancel on its way to a stage.
    Cancel { stage: usize },
    /// A stage takes frames out of its fence.
    Take { stage: usize },
    /// A stage finishes the oldest frame it took.
    Compute { stage: usize },
}

struct Stage {
    fence: Fence<Frame>,
    model: ToyStage,
    taken: VecDeque<Frame>,
    cancels: VecDeque<Epoch>,
    /// Epoch, next and settled floor after the last event.
    seen: (Epoch, Position),
}

/// One session's ring in motion.
pub(crate) struct Ring {
    case: Case,
    now: Instant,
    pub(crate) round: Round,
    stages: Vec<Stage>,
    frontier: Frontier,
    /// `hops[i][lane]` carries bodies into stage `i`; the last one into the coordinator.
    hops: Vec<Vec<VecDeque<Bytes>>>,
    sent: usize,
    /// What an oracle knows: the model's answers far beyond the session's end.
    truth: Vec<TokenId>,
    /// What the tail was fed, by position, newest.
    fed: Vec<TokenId>,
    pub(crate) committed: Vec<TokenId>,
    pub(crate) scored: Vec<Answer>,
    pub(crate) finish: Option<Finish>,
    last: (Epoch, Position),
}

const VIEW: View = View(5);
const SESSION: SessionId = SessionId(77);

impl Ring {
    pub(crate) fn new(case: Case) -> Self {
        // The machines ask no clock; any moment will do.
        let now = ringfence::clock::now();
        let far = Duration::from_secs(3600);
        let config = RoundConfig {
            view: VIEW,
            session: SESSION,
            prompt: case.prompt.clone(),
            max_new: case.max_new,
            eos: case.eos.clone(),
            ignore_eos: false,
            in_flight_max: case.in_flight_max,
            draft_max: case.draft_max,
            prefill_chunk: case.chunk,
            reach: case.reach(),
            score: case.score,
            deadlines: Deadlines { reply: far, prefill: far },
        };
        let fence = FenceConfig {
            session: SESSION,
            view: VIEW,
            prompt_len: case.prompt.len() as u32,
            reach: case.reach(),
            end: config.end(),
            from: Position(0),
            history: Position(0),
            forward_from: Position(0),
            hold_for: far,
            held_max: HELD_FRAMES_MAX,
        };
        let stage = |layer| Stage {
            fence: Fence::new(fence),
            model: ToyStage::new(layer),
            taken: VecDeque::new(),
            cancels: VecDeque::new(),
            seen: (Epoch(0), Position(0)),
        };
        let ahead = case.max_new as usize + case.block as usize + 4;
        let mut ring = Self {
            now,
            round: Round::new(config, now).unwrap(),
            stages: (0..case.stages as u64).map(stage).collect(),
            frontier: Frontier::new(case.prompt.len() as u32, case.reach()),
            hops: vec![vec![VecDeque::new(); case.lanes]; case.stages + 1],
            sent: 0,
            truth: plain_answers(case.stages, &case.prompt, ahead),
            fed: Vec::new(),
            committed: Vec::new(),
            scored: Vec::new(),
            finish: None,
            last: (Epoch(0), Position(0)),
            case,
        };
        ring.drain_round();
        ring
    }

    /// Everything that can happen next.
    pub(crate) fn enabled(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (hop, lanes) in self.hops.iter().enumerate() {
            for (lane, queue) in lanes.iter().enumerate() {
                if !queue.is_empty() {
                    events.push(Event::Deliver { hop, lane });
                }
            }
        }
        for (stage, at) in self.stages.iter().enumerate() {
            if !at.cancels.is_empty() {
                events.push(Event::Cancel { stage });
            }
            if !at.taken.is_empty() || (self.case.merge == 0 && at.fence.is_ready()) {
                events.push(Event::Compute { stage });
            } else if at.fence.is_ready() {
                events.push(Event::Take { stage });
            }
        }
        events
    }

    /// Makes one event happen and asserts what must hold after it.
    pub(crate) fn step(&mut self, event: Event) {
        self.now += Duration::from_millis(1);
        match event {
            Event::Deliver { hop, lane } => {
                let body = self.hops[hop][lane].pop_front().unwrap();
                match decode_data(body).unwrap() {
                    Data::Frame(frame) => self.arrive(hop, frame),
                    Data::Reply(reply) => {
                        self.round.handle_reply(reply, self.now);
                        self.drain_round();
                    }
                }
            }
            Event::Cancel { stage } => {
                let below = self.stages[stage].cancels.pop_front().unwrap();
                self.stages[stage].fence.handle_cancel(below);
            }
            Event::Take { stage } => self.take(stage),
            Event::Compute { stage } => {
                if self.case.merge == 0 {
                    self.take(stage);
                }
                self.compute(stage);
            }
        }
        self.check();
    }

    /// Asserts that the session ended as the stream without speculation does.
    pub(crate) fn check_end(&self) {
        let (tokens, finish) = self.case.expected();
        if finish == Finish::Stopped {
            // What was judged before the stop came still goes out.
            assert!(self.committed.starts_with(&tokens));
            let surplus = self.committed.len() - tokens.len();
            assert!(surplus < self.case.in_flight_max as usize);
            assert!(surplus > 0 || self.finish == Some(finish));
        } else {
            assert_eq!((&self.committed, self.finish), (&tokens, Some(finish)));
        }
        assert!(self.round.is_done() && self.round.in_flight() == 0);
        if self.case.score && self.finish != Some(Finish::Stopped) {
            let answers = self.scored.iter().map(|answer| answer.token).collect::<Vec<_>>();
            assert_eq!(answers, self.truth[..self.case.prompt.len()]);
        }
    }

    fn arrive(&mut self, stage: usize, frame: Frame) {
        let head = frame.head;
        let at = &mut self.stages[stage];
        match at.fence.handle_frame(head, frame, self.now).unwrap() {
            Arrival::Queued => assert!(head.epoch == at.fence.epoch()),
            Arrival::Held | Arrival::Dropped(_) => {}
        }
    }

    fn take(&mut self, stage: usize) {
        let at = &mut self.stages[stage];
        for _ in 0..self.case.merge.max(1) {
            let Some((head, frame)) = at.fence.poll_compute() else { break };
            assert!(head.pos >= at.fence.settled(), "nothing below the floor is recomputed");
            at.taken.push_back(frame);
        }
    }

    /// One frame through one stage, and what it forwards.
    fn compute(&mut self, stage: usize) {
        let Frame { head, ids, payload } = self.stages[stage].taken.pop_front().unwrap();
        let hidden: Vec<u64> = if stage == 0 {
            assert!(payload.is_empty());
            ids.iter().map(|&id| embed(id)).collect()
        } else {
            payload.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
        };
        let at = &mut self.stages[stage];
        let out = at.model.forward(head.pos, &ids, &hidden);
        let forward = at.fence.handle_computed(&head);
        let is_tail = stage + 1 == self.case.stages;
        let reply = is_tail.then(|| self.reply(&Frame { head, ids: ids.clone(), payload }, &out));
        if forward == Forward::No {
            return;
        }
        let body = match reply {
            Some(reply) => encode_reply(&reply).unwrap(),
            None => {
                let mut buffer = FrameBuffer::begin(&head, &ids, 8 * out.len()).unwrap();
                for (to, word) in buffer.payload_mut().as_chunks_mut::<8>().0.iter_mut().zip(&out) {
                    *to = word.to_le_bytes();
                }
                buffer.finish()
            }
        };
        self.send(stage + 1, body);
    }

    /// What the tail says about a frame; asserts that exactly true histories may draft.
    fn reply(&mut self, frame: &Frame, out: &[u64]) -> Reply {
        let head = frame.head;
        let asked = head.answer_from.0.clamp(head.pos.0, head.pos.0 + head.len);
        let answers: Vec<TokenId> = out[(asked - head.pos.0) as usize..].iter().map(|&h| answer(h)).collect();
        let fed = self.frontier.handle_fed(head.pos, &frame.ids, &answers).unwrap();
        self.fed.truncate(head.pos.0 as usize);
        self.fed.extend(&frame.ids);
        let prompt = self.case.prompt.len();
        let is_true =
            self.fed.iter().enumerate().all(|(p, &id)| {
                if p < prompt { id == self.case.prompt[p] } else { self.truth.get(p - 1) == Some(&id) }
            });
        assert_eq!(fed.may_draft(), is_true, "a position is true iff its history is, at {}", head.pos);
        let last = Position(head.pos.0 + head.len - 1);
        let draft = (is_true && !answers.is_empty() && self.case.block > 0).then(|| self.draft(last));
        let scores = self.case.score.then(|| Scores { fed: None, picked: None, top: vec![(TokenId(1), -0.5)] });
        let answers = answers.into_iter().map(|token| Answer { token, scores: scores.clone() }).collect();
        Reply {
            view: head.view,
            session: head.session,
            epoch: head.epoch,
            pos: head.pos,
            len: head.len,
            answers,
            draft,
        }
    }

    /// Draft `k` proposes the token at `at + 2 + k`, which the model answers at `at + 1 + k`.
    fn draft(&self, at: Position) -> DraftBlock {
        let tokens: Vec<TokenId> = (0..self.case.block as usize)
            .map_while(|k| {
                let right = *self.truth.get(at.0 as usize + 1 + k)?;
                let lucky = match self.case.script {
                    Script::Zero => false,
                    Script::Full => true,
                    Script::Partial(percent) => mix(u64::from(at.0), k as u64) % 100 < percent,
                };
                Some(if lucky { right } else { TokenId((right.0 + 1) % VOCAB) })
            })
            .collect();
        DraftBlock { confidence: vec![0.5; tokens.len()], tokens }
    }

    fn send(&mut self, hop: usize, body: Bytes) {
        self.hops[hop][self.sent % self.case.lanes].push_back(body);
        self.sent += 1;
    }

    /// Carries out everything that the coordinator's machine wants.
    fn drain_round(&mut self) {
        while let Some(output) = self.round.poll_output(self.now) {
            assert_eq!(self.finish, None, "nothing follows the end, got {output:?}");
            match output {
                RoundOutput::Send { head, ids } => {
                    assert_eq!(head.len as usize, ids.len());
                    assert!(head.settled <= head.pos && head.start <= head.pos);
                    assert!(head.pos.0 + head.len - head.settled.0 <= self.case.reach());
                    assert!(head.pos.0 + head.len <= self.round.config().end().0, "sends beyond need");
                    self.send(0, encode_frame(&head, &ids, &[]).unwrap());
                }
                RoundOutput::Cancel { below } => {
                    for stage in &mut self.stages {
                        stage.cancels.push_back(below);
                    }
                }
                RoundOutput::Commit { index, position, token, .. } => {
                    assert_eq!(index as usize, self.committed.len(), "commits are contiguous");
                    assert_eq!(position.0 as usize, self.case.prompt.len() + self.committed.len());
                    assert_eq!(token, self.truth[position.0 as usize - 1], "commit {index} is the model's token");
                    self.committed.push(token);
                    if self.case.stop_after == Some(self.committed.len() as u32) {
                        self.round.handle_stop();
                    }
                }
                RoundOutput::Scored { position, answer } => {
                    assert_eq!(position.0 as usize, self.scored.len());
                    self.scored.push(answer);
                }
                RoundOutput::Finished(finish) => self.finish = Some(finish),
                RoundOutput::Overdue { pos, .. } => panic!("no reply for the frame at {pos}"),
                RoundOutput::Failed(error) => panic!("the session failed: {error}"),
            }
        }
    }

    fn check(&mut self) {
        let round = &self.round;
        assert!(round.in_flight() <= self.case.in_flight_max as usize, "in flight ≤ W");
        assert!(round.early() < self.case.in_flight_max as usize, "held replies < W");
        let last = (round.epoch(), round.frontier());
        assert!(last.0 >= self.last.0 && last.1 >= self.last.1, "epoch and frontier never fall");
        self.last = last;
        for stage in &mut self.stages {
            let counters = stage.fence.counters();
            let known = counters.computed + counters.dropped() + (stage.fence.waiting() + stage.taken.len()) as u64;
            assert_eq!(counters.received, known, "every frame is accounted for: {counters:?}");
            let seen = (stage.fence.epoch(), stage.fence.settled());
            assert!(seen.0 >= stage.seen.0 && seen.1 >= stage.seen.1, "epoch and floor never fall");
            assert!(seen.0 <= round.epoch() && seen.1 <= round.frontier(), "no stage is ahead of the coordinator");
            stage.seen = seen;
        }
        assert!(self.frontier.kept() <= self.case.reach() as usize + 1);
    }

    /// Frames that stages computed and frames that they dropped.
    pub(crate) fn work(&self) -> (u64, u64) {
        let sum = |f: fn(&Stage) -> u64| self.stages.iter().map(f).sum();
        (sum(|stage| stage.fence.counters().computed), sum(|stage| stage.fence.counters().dropped()))
    }
}
