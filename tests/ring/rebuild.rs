//! What a healed ring computes again: what was lost, and no more; and whether it is the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;
use ringfence::config::CoordinatorSettings;
use ringfence::coordinator::heals::HealStatus;
use ringfence::coordinator::job::{Event, JobError, Mode, Serve};
use ringfence::engine::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use ringfence::ids::{Position, SessionId, TokenId};
use ringfence::node::journal::{JournalConfig, SpillConfig};

use crate::heal::{NEW, patient, read, rest};
use crate::rig::{Rig, engine, prompt, ranges, request, tiny};

const PROMPT: usize = 60;
const READ_FIRST: usize = 9;

/// Counts positions, and falsifies what it puts out at one of them, so many times.
pub(crate) struct Watched {
    pub(crate) inner: Box<dyn Engine>,
    pub(crate) positions: Arc<AtomicU64>,
    pub(crate) false_at: Option<Position>,
    pub(crate) lies: u32,
}

impl Engine for Watched {
    fn facts(&self) -> &EngineFacts {
        self.inner.facts()
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        self.inner.state_bytes(shape)
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        self.inner.open(session, shape)
    }

    fn forward(&mut self, chunks: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        self.inner.forward(chunks, out)?;
        let facts = self.inner.facts();
        let row = facts.hc * facts.dim;
        for chunk in chunks {
            self.positions.fetch_add(chunk.ids.len() as u64, Ordering::Relaxed);
            let lies = self.false_at.filter(|_| self.lies > 0);
            let Some(at) = lies.and_then(|at| at.0.checked_sub(chunk.pos.0)) else { continue };
            if facts.is_tail() {
                let first = chunk.logits_from.0.saturating_sub(chunk.pos.0);
                let row = at.checked_sub(first).map(|at| at as usize * facts.vocab);
                if let Some(logit) = row.and_then(|row| out.logits.get_mut(row..row + facts.vocab)) {
                    logit.fill(0.0);
                    logit[7] = 1.0;
                    self.lies -= 1;
                }
            } else if let Some(value) = out.hidden.get_mut(at as usize * row) {
                *value = bf16::from_f32(value.to_f32() * 2.0 + 1.0);
                self.lies -= 1;
            }
        }
        Ok(())
    }

    fn draft(&mut self, session: SessionId, pos: Position, token: TokenId) -> Result<Drafts, EngineError> {
        self.inner.draft(session, pos, token)
    }

    fn close(&mut self, session: SessionId) {
        self.inner.close(session);
    }
}

pub(crate) fn healed(rig: &Rig) -> HealStatus {
    let heals = rig.coordinator.status().heals;
    assert_eq!(heals.len(), 1, "{heals:?}");
    heals.into_iter().next().unwrap()
}

/// Kills a stage under a session, and gives how many positions were computed again: in all, and by each of
/// the stages that survived.
async fn again(lost: usize, spares: &str) -> (u64, Vec<u64>) {
    let cut = ranges("0:2 2:4 4:6 6:7");
    let counts: Vec<Arc<AtomicU64>> = cut.iter().map(|_| Arc::default()).collect();
    let at = AtomicU64::new(0);
    let mut rig = Rig::wrapped(&cut, patient(), &|inner| {
        let positions = Arc::clone(&counts[at.fetch_add(1, Ordering::Relaxed) as usize]);
        Box::new(Watched { inner: Box::new(inner), positions, false_at: None, lies: u32::MAX })
    })
    .await;
    let asked = request(&prompt(PROMPT), NEW, Mode::Plain);
    let expected = rig.run(asked.clone()).await.tokens;
    for spare in ranges(spares) {
        rig.add(spare);
    }
    rig.members(rig.stages.len()).await;
    let mut job = rig.coordinator.submit(asked).unwrap();
    let first = read(&mut job, READ_FIRST).await;
    let before: Vec<u64> = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    rig.network.kill(rig.stages[lost].peer);
    let (tokens, heals) = rest(job, first).await;
    assert_eq!((tokens, heals), (expected, 1));
    let survivors = (0..cut.len()).filter(|at| *at != lost);
    let extra = survivors.map(|at| counts[at].load(Ordering::Relaxed) - before[at]).collect();
    let heal = healed(&rig);
    rig.end().await;
    (heal.replayed_positions, extra)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survivors_keep_their_state_and_the_spare_alone_computes_the_history() {
    for lost in 0..4 {
        let (positions, extra) = again(lost, "0:2 2:4 4:6 6:7").await;
        let history = (PROMPT + READ_FIRST) as u64 - 2..(PROMPT as u64 + u64::from(NEW));
        assert!(history.contains(&positions), "{positions} positions were computed again for stage {lost}");
        // What was to come, one position again, what was in flight, and a probe or two.
        for extra in extra {
            assert!(extra <= u64::from(NEW) + 8, "a survivor computed {extra} positions after stage {lost} was killed");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_journals_the_history_is_computed_from_the_head_on() {
    for (lost, stages) in [(0_u64, 1), (1, 2), (2, 3)] {
        let cut = ranges("0:2 2:4 4:7");
        let mut rig = Rig::journaling(&cut, patient(), JournalConfig { memory: 0, spill: None }).await;
        let asked = request(&prompt(PROMPT), NEW, Mode::Pipelined);
        let expected = rig.run(asked.clone()).await.tokens;
        rig.add(cut[lost as usize]);
        rig.members(4).await;
        let mut job = rig.coordinator.submit(asked).unwrap();
        let first = read(&mut job, READ_FIRST).await;
        rig.network.kill(rig.stages[lost as usize].peer);
        let (tokens, _) = rest(job, first).await;
        assert_eq!(tokens, expected);
        let positions = healed(&rig).replayed_positions;
        let least = (PROMPT + READ_FIRST) as u64 - 2;
        assert!(positions >= stages * least, "{positions} positions, {stages} stages had to begin anew");
        rig.end().await;
    }
}

/// Kills `lost` of a ring whose stages journal like this, with a spare for each, once tokens came; gives how many
/// positions were computed again.
async fn replayed(lost: &[usize], journal: &JournalConfig, under_way: impl Fn()) -> u64 {
    let cut = ranges("0:2 2:4 4:7");
    let settings = CoordinatorSettings { prefill_chunk: 4, in_flight_max: 4, ..patient() };
    let mut rig = Rig::journaling(&cut, settings, journal.clone()).await;
    let asked = request(&prompt(PROMPT), NEW, Mode::Pipelined);
    let expected = rig.run(asked.clone()).await.tokens;
    for lost in lost {
        rig.add(cut[*lost]);
    }
    rig.members(cut.len() + lost.len()).await;
    let mut job = rig.coordinator.submit(asked).unwrap();
    let first = read(&mut job, READ_FIRST).await;
    under_way();
    for lost in lost {
        rig.network.kill(rig.stages[*lost].peer);
    }
    let (tokens, heals) = rest(job, first).await;
    assert_eq!(tokens, expected);
    assert!(heals >= 1);
    let positions = rig.coordinator.status().heals.iter().map(|heal| heal.replayed_positions).sum();
    rig.end().await;
    positions
}

/// Positions of a history, at least, when the first stage was killed.
const HISTORY: u64 = (PROMPT + READ_FIRST) as u64 - 2;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_that_went_to_a_file_feeds_a_spare() {
    let folder = tempfile::tempdir().unwrap();
    let spill = Some(SpillConfig { folder: folder.path().to_owned(), keep: None });
    // Room for some thirty positions, and what is in flight.
    let journal = JournalConfig { memory: 40 << 10, spill };
    for lost in [1, 2] {
        let spilled = || {
            let files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap());
            let parts = files.filter(|file| file.path().extension().is_some_and(|ending| ending == "part"));
            let bytes: Vec<u64> = parts.map(|file| file.metadata().unwrap().len()).collect();
            assert!(bytes.iter().any(|bytes| *bytes > 10_000), "nothing went to a file: {bytes:?}");
        };
        let positions = replayed(&[lost], &journal, spilled).await;
        let once = HISTORY..2 * HISTORY;
        assert!(once.contains(&positions), "{positions} positions: the spare alone computes again");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_whose_first_positions_were_evicted_costs_the_whole_history() {
    let journal = JournalConfig { memory: 40 << 10, spill: None };
    for (lost, stages) in [(1, 2), (2, 3)] {
        let positions = replayed(&[lost], &journal, || {}).await;
        assert!(positions >= stages * HISTORY, "{positions} positions, {stages} stages had to begin anew");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_journal_and_without_the_stage_in_front_the_history_comes_from_the_head() {
    let none = JournalConfig { memory: 0, spill: None };
    let positions = replayed(&[1, 2], &none, || {}).await;
    assert!(positions >= 3 * HISTORY, "{positions} positions, every stage had to begin anew");
}

/// A spare that computes something else at a position of the history: the session fails, and says so.
async fn refused(lost: usize, said: &str, journal: JournalConfig) {
    let cut = ranges("0:2 2:4 4:7");
    let mut rig = Rig::journaling(&cut, patient(), journal).await;
    let false_at = Some(Position(PROMPT as u32 + 4));
    let inner = Box::new(engine(&tiny(), cut[lost]));
    rig.add_with(Box::new(Watched { inner, positions: Arc::default(), false_at, lies: u32::MAX }));
    rig.members(4).await;
    let mut job = rig.coordinator.submit(request(&prompt(PROMPT), 900, Mode::Pipelined)).unwrap();
    read(&mut job, READ_FIRST + 4).await;
    rig.network.kill(rig.stages[lost].peer);
    let mut last = None;
    while let Some(event) = job.events.recv().await {
        last = Some(event);
    }
    match last {
        Some(Event::Failed(JobError::Diverged { why } | JobError::Refused { why, .. })) => {
            assert!(why.contains(said), "{why}");
        }
        other => panic!("{other:?}"),
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spare_that_computes_something_else_is_found_before_the_session_goes_on() {
    for journal in [JournalConfig::default(), JournalConfig { memory: 0, spill: None }] {
        refused(0, "puts out at position 64", journal.clone()).await;
        refused(1, "puts out at position 64", journal.clone()).await;
        refused(2, "answers position 64", journal).await;
    }
}
