//! Carries out the rebuild of one session on a ring that is whole again, and checks it.
//!
//! Asks every stage what it kept, has the missing positions sent from the journals or from the head
//! (the part nearest to the tail first, so that nothing arrives before what it builds on), counts
//! what is computed, and compares what a rebuilt stage puts out with what the stage behind it had
//! received. Only then the session goes on. A death during it is the next ring's: what was computed
//! by then is kept.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::heal::rebuild::{Has, Step, plan};
use crate::ids::{Epoch, Position, SessionId, TokenId, View};
use crate::proto::control::{Control, Digests, Kept, Rebuild, ids_digest};
use crate::proto::frame::FrameHead;

/// Positions before the end of the history whose results are compared.
pub const CHECKED_POSITIONS: u32 = 64;

/// Chunks of the history that are under way at once.
const CHUNKS_UNDER_WAY: u32 = 16;

/// What is fixed about a rebuild.
#[derive(Debug, Clone)]
pub struct RunConfig {
    /// The ring's view.
    pub view: View,
    /// The session.
    pub session: SessionId,
    /// Stages of the ring.
    pub stages: usize,
    /// The history: prompt, and committed tokens but the last. At least one token.
    pub ids: Vec<TokenId>,
    /// Tokens of it that the client gave; the tail compares its answers with the others.
    pub prompt_len: u32,
    /// The first position that goes round the whole ring again, at the latest. With no token committed, it
    /// comes sooner where no stage had come so far.
    pub asked_from: Position,
    /// Whether tokens were committed: then every position below `asked_from` was computed once.
    pub committed: bool,
    /// Positions of a chunk at most.
    pub chunk: u32,
    /// How long no stage may tell of progress.
    pub deadline: Duration,
}

/// What the shell is to do, in this order.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Send a control message to a stage of the ring, 0 being the head.
    Tell {
        /// Which.
        stage: usize,
        /// What.
        message: Control,
    },
    /// Send a frame of the history into the head.
    Send {
        /// Its fencing numbers.
        head: FrameHead,
        /// Its tokens.
        ids: Vec<TokenId>,
    },
    /// Every stage has its state, and it is right: the session goes on.
    Done {
        /// The first position that goes round the whole ring again.
        from: Position,
    },
    /// What a stage kept gave other results than the stage behind it had received: it computes all of it
    /// again.
    Distrusted {
        /// Which stage.
        stage: usize,
        /// The first position that differs.
        at: Position,
    },
    /// A rebuilt stage computes something else than the one before it: the session must not go on.
    Differs {
        /// Which stage.
        stage: usize,
        /// The first position that differs.
        at: Position,
    },
    /// A stage said nothing for too long.
    Stuck {
        /// Which.
        stage: usize,
        /// What was waited for.
        why: String,
    },
}

#[derive(Debug, Clone)]
struct Stage {
    /// What it said; the outer `None`: nothing yet.
    kept: Option<Option<Kept>>,
    /// What it computed or holds, of the history.
    next: Position,
    /// Digests of its results.
    outputs: Digests,
}

/// Positions that one stage, or the coordinator, sends to the stages behind it.
#[derive(Debug, Clone)]
struct Feed {
    /// Which stage's journal; `None`: the coordinator's ids.
    source: Option<usize>,
    /// The next position to be sent.
    sent: Position,
    to: Position,
}

#[derive(Debug, Clone)]
enum Phase {
    Asking,
    /// Stages that have yet to say that they are ready for what comes, and what will be fed then.
    Preparing(BTreeSet<usize>, Vec<Feed>),
    /// Feeds to come, the present one last.
    Feeding(Vec<Feed>),
    Over,
}

/// The rebuild of one session.
#[derive(Debug, Clone)]
pub struct Run {
    config: RunConfig,
    stages: Vec<Stage>,
    steps: Vec<Step>,
    history: Position,
    /// Where a frame of the history must end: stages begin or forward there.
    cuts: BTreeSet<Position>,
    phase: Phase,
    progressed: Instant,
    outputs: VecDeque<Output>,
}

impl Run {
    /// A rebuild whose stages are being asked.
    #[must_use]
    pub fn new(config: RunConfig, now: Instant) -> Self {
        let unknown = Stage { kept: None, next: Position(0), outputs: Digests::default() };
        Self {
            stages: vec![unknown; config.stages],
            config,
            steps: Vec::new(),
            history: Position(0),
            cuts: BTreeSet::new(),
            phase: Phase::Asking,
            progressed: now,
            outputs: VecDeque::new(),
        }
    }

    /// When a stage told of progress last.
    #[must_use]
    pub fn progressed(&self) -> Instant {
        self.progressed
    }

    /// Takes in what a stage kept; `None`: nothing. Says whether it was the last one that was asked.
    pub fn handle_opened(&mut self, stage: usize, kept: Option<Kept>, now: Instant) -> bool {
        let Phase::Asking = self.phase else { return false };
        let mut kept = kept.filter(|kept| self.is_ours(kept));
        if let Some(kept) = &mut kept {
            // What lies beyond is of a speculation that is over.
            kept.inputs.truncate(kept.next);
            kept.outputs.truncate(kept.next);
        }
        let Some(asked) = self.stages.get_mut(stage) else { return false };
        asked.next = kept.as_ref().map_or(Position(0), |kept| kept.next);
        asked.outputs = kept.as_ref().map(|kept| kept.outputs.clone()).unwrap_or_default();
        asked.kept = Some(kept);
        self.progressed = now;
        let last = self.stages.iter().all(|stage| stage.kept.is_some());
        if last {
            self.begin();
        }
        last
    }

    /// Takes in that a stage computed the history below `next`.
    pub fn handle_rebuilt(&mut self, stage: usize, next: Position, outputs: Digests, now: Instant) {
        if let Phase::Preparing(pending, feeds) = &mut self.phase {
            pending.remove(&stage);
            self.progressed = now;
            if pending.is_empty() {
                self.phase = Phase::Feeding(std::mem::take(feeds));
                self.feed();
            }
            return;
        }
        let Phase::Feeding(_) = self.phase else { return };
        let history = self.history;
        let Some(stage) = self.stages.get_mut(stage) else { return };
        if next <= stage.next || next > history {
            return;
        }
        stage.next = next;
        stage.outputs.append(outputs);
        stage.outputs.keep_last(CHECKED_POSITIONS as usize);
        self.progressed = now;
        self.feed();
    }

    /// When [`Run::handle_timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::Asking | Phase::Preparing(..) | Phase::Feeding(_) => Some(self.progressed + self.config.deadline),
            Phase::Over => None,
        }
    }

    /// Takes in that time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_none_or(|at| at > now) {
            return;
        }
        let waited = now.saturating_duration_since(self.progressed).as_millis();
        let (stage, why) = match &self.phase {
            Phase::Asking => {
                let silent = self.stages.iter().position(|stage| stage.kept.is_none());
                (silent, format!("it did not say in {waited} ms what it kept of session {}", self.config.session))
            }
            Phase::Preparing(pending, _) => {
                let why = format!("it did not begin to rebuild session {} in {waited} ms", self.config.session);
                (pending.first().copied(), why)
            }
            Phase::Feeding(feeds) => {
                let to = feeds.last().map_or(self.history, |feed| feed.to);
                // Stages in front of a journal that feeds are fed later.
                let first = feeds.last().and_then(|feed| feed.source).map_or(0, |source| source + 1);
                let behind = (first..self.stages.len()).find(|stage| self.stages[*stage].next < to);
                let next = behind.map_or(to, |stage| self.stages[stage].next);
                (behind, format!("its rebuild stood still at position {next} of {to} for {waited} ms"))
            }
            Phase::Over => return,
        };
        self.phase = Phase::Over;
        self.outputs.push_back(Output::Stuck { stage: stage.unwrap_or(0), why });
    }

    /// What to do next, until `None`.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Positions that each stage computes again, head first; empty before the stages said what they kept.
    pub fn computed_again(&self) -> impl Iterator<Item = u32> {
        self.steps.iter().map(|step| self.history.0 - step.from.0)
    }

    /// Whether what a stage kept is this session's: made by the same tokens.
    fn is_ours(&self, kept: &Kept) -> bool {
        self.config.ids.get(..kept.next.0 as usize).is_some_and(|ids| ids_digest(ids) == kept.ids)
    }

    /// A state whose results are not what the stage behind it had received is no state.
    fn distrust(&mut self) {
        let mut differing = Vec::new();
        for (stage, pair) in self.stages.windows(2).enumerate() {
            differing.extend(differs(&pair[0], &pair[1]).map(|at| (stage, at)));
        }
        for (stage, at) in differing {
            self.outputs.push_back(Output::Distrusted { stage, at });
            let stage = &mut self.stages[stage];
            (stage.next, stage.outputs) = (Position(0), Digests::default());
            // What it took in was not its own doing, and stays to compare with.
            if let Some(kept) = stage.kept.iter_mut().flatten().next() {
                (kept.next, kept.journal) = (Position(0), (Position(0), Position(0)));
            }
        }
    }

    /// Every stage has said what it has.
    fn begin(&mut self) {
        self.distrust();
        let furthest = self.stages.iter().map(|stage| stage.next).max().unwrap_or_default();
        let asked_from = self.config.asked_from;
        self.history = if self.config.committed { asked_from } else { asked_from.min(furthest) };
        let has = |stage: &Stage| {
            let journal = stage.kept.iter().flatten().next().map_or((Position(0), Position(0)), |kept| kept.journal);
            Has { next: stage.next, journal: journal.0..journal.1 }
        };
        let has: Vec<Has> = self.stages.iter().map(has).collect();
        self.steps = plan(&has, self.history);
        for (stage, step) in self.steps.iter().enumerate() {
            self.stages[stage].next = step.from;
            self.stages[stage].outputs.truncate(step.from);
            self.cuts.extend([step.from, step.forward_from]);
            let rebuild = Rebuild {
                from: step.from,
                history: self.history,
                forward_from: step.forward_from,
                digests_from: Position(self.history.0.saturating_sub(CHECKED_POSITIONS)),
            };
            let message = Control::Rebuild { session: self.config.session, rebuild };
            self.outputs.push_back(Output::Tell { stage, message });
        }
        let from = self.steps.first().map_or(self.history, |step| step.from);
        let mut feeds = vec![Feed { source: None, sent: from, to: self.history }];
        feeds.extend(
            self.steps.iter().enumerate().filter(|(_, step)| !step.replay.is_empty()).map(|(stage, step)| Feed {
                source: Some(stage),
                sent: step.replay.start,
                to: step.replay.end,
            }),
        );
        self.phase = Phase::Preparing((0..self.stages.len()).collect(), feeds);
    }

    /// Sends as much of the history as may be under way, and ends when all of it is computed.
    fn feed(&mut self) {
        loop {
            let Phase::Feeding(feeds) = &mut self.phase else { return };
            let Some(feed) = feeds.last_mut() else { break };
            let behind = self.stages.iter().skip(feed.source.map_or(0, |source| source + 1));
            let computed = behind.map(|stage| stage.next).min().unwrap_or(feed.to);
            if feed.sent >= feed.to {
                if computed < feed.to {
                    return;
                }
                feeds.pop();
                continue;
            }
            if feed.sent.0.saturating_sub(computed.0) >= CHUNKS_UNDER_WAY * self.config.chunk {
                return;
            }
            let cut = self.cuts.range(feed.sent.plus(1)..).next().copied().unwrap_or(feed.to);
            let (from, end) = (feed.sent, cut.min(feed.to));
            // A journal cuts its chunks itself; half of what may be under way is asked for at once.
            let most = if feed.source.is_some() { CHUNKS_UNDER_WAY / 2 } else { 1 };
            let to = end.min(from.plus(most * self.config.chunk));
            feed.sent = to;
            let source = feed.source;
            self.send(source, from, to);
        }
        self.phase = Phase::Over;
        let end =
            self.differs().map_or(Output::Done { from: self.history }, |(stage, at)| Output::Differs { stage, at });
        self.outputs.push_back(end);
    }

    fn send(&mut self, source: Option<usize>, from: Position, to: Position) {
        let RunConfig { view, session, .. } = self.config;
        // The answer at the prompt's last position is the first new token.
        let answer_from = Position(self.config.prompt_len.saturating_sub(1));
        self.outputs.push_back(match source {
            Some(stage) => Output::Tell { stage, message: Control::Replay { session, from, to, answer_from } },
            None => Output::Send {
                head: FrameHead {
                    view,
                    session,
                    epoch: Epoch(0),
                    start: Position(0),
                    pos: from,
                    len: to.0 - from.0,
                    settled: Position(0),
                    answer_from,
                },
                ids: self.config.ids[from.0 as usize..to.0 as usize].to_vec(),
            },
        });
    }

    /// The first stage whose results are not what the stage behind it had received, and where.
    fn differs(&self) -> Option<(usize, Position)> {
        self.stages.windows(2).enumerate().find_map(|(stage, pair)| Some((stage, differs(&pair[0], &pair[1])?)))
    }
}

/// The first position of which a stage has another result than the stage behind it had received.
fn differs(stage: &Stage, behind: &Stage) -> Option<Position> {
    let received = &behind.kept.as_ref()?.as_ref()?.inputs;
    let other = |(at, digest): &(Position, &[u8; 32])| received.get(*at).is_some_and(|had| had != *digest);
    stage.outputs.iter().find(other).map(|(at, _)| at)
}

impl Digests {
    /// The digest of a position, where it is known.
    #[must_use]
    pub fn get(&self, at: Position) -> Option<&[u8; 32]> {
        self.list.get(at.0.checked_sub(self.from.0)? as usize)
    }

    /// Forgets all but the last so many.
    pub fn keep_last(&mut self, most: usize) {
        let beyond = self.list.len().saturating_sub(most);
        self.list.drain(..beyond);
        self.from = self.from.plus(u32::try_from(beyond).unwrap_or(u32::MAX));
    }

    /// The positions with their digests.
    pub fn iter(&self) -> impl Iterator<Item = (Position, &[u8; 32])> {
        (self.from.0..).map(Position).zip(&self.list)
    }

    /// Forgets the positions from `end` on.
    pub fn truncate(&mut self, end: Position) {
        self.list.truncate(end.0.saturating_sub(self.from.0) as usize);
    }

    /// Takes in what follows; where something is missing between, what was known is forgotten.
    pub fn append(&mut self, more: Self) {
        let end = self.from.0 as usize + self.list.len();
        if more.list.is_empty() {
            return;
        }
        if self.list.is_empty() || end != more.from.0 as usize {
            *self = more;
        } else {
            self.list.extend(more.list);
        }
    }
}

#[cfg(test)]
mod tests;
