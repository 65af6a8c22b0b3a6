//! The part of the loop that waits for the log: what is queued, what is on its way, what may go out.
//!
//! One batch is on its way at a time; what comes up meanwhile goes with the next one, so that one sync
//! serves all tokens of a turn. A view's joins, and a session's tokens, go out when their batch is synced.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::clock;
use crate::coordinator::attach::Kept;
use crate::coordinator::job::{Event, JobError};
use crate::coordinator::log::Log;
use crate::coordinator::log::book::{Logged, carried};
use crate::coordinator::log::record::{self, Ended, Entry, Opened};
use crate::coordinator::log::writer::{Batch, Batches, Scribe, Synced, Writer};
use crate::coordinator::run::Shell;
use crate::coordinator::session::{Durable, Phase, Readers, Session};
use crate::ids::{Node, SessionId, View};
use crate::proto::control::Control;

/// Positions by which the log may be behind before frames wait for it.
const LAG: u32 = 64;

/// How long a coordinator that stops waits for the log.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// How long the log's disk may take for a batch before an operator is told; whoever waits for it fails after
/// `heal_wait`, if that is longer.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// How long ends that could not be written wait, unless something else is to be written.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Bits of a session id that count within one coordinator's log.
const SESSION_BITS: u32 = 32;

/// What a batch on its way holds.
#[derive(Debug, Default)]
struct Manifest {
    /// Sessions with the number of their tokens that are durable with it.
    sessions: Vec<(SessionId, u32)>,
    /// Sessions that it opens.
    opened: Vec<SessionId>,
    /// Ends, to be written again where it is lost.
    ended: Vec<(SessionId, Ended)>,
    view: Option<View>,
    /// It begins a file: entries of the queue, from the first on, that it makes needless.
    replaces: Option<usize>,
    bytes: u64,
}

/// How the disk stands to the batch on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// There is no batch.
    None,
    /// It was handed over then.
    Due(Instant),
    /// That was long ago.
    Late(Instant),
    /// So long that whoever waits for it fails.
    GivenUp(Instant),
}

/// What the loop has to do with a log, if there is one.
#[derive(Debug)]
pub(crate) struct LogGate {
    writer: Option<Writer>,
    recovered: Vec<Logged>,
    /// The highest view logged by others, and that of the own files.
    above: View,
    own: View,
    /// The highest view whose record is synced.
    view: View,
    /// The highest view that was queued.
    view_queued: View,
    /// Joins that wait for the record of their view; of the newest one only.
    joins: Vec<(Node, Control)>,
    queue: Vec<Entry>,
    busy: Option<Manifest>,
    answer: Answer,
    /// When ends that could not be written are tried again.
    retry: Option<Instant>,
    /// Why nothing is written any more.
    dead: Option<String>,
    /// Bytes in the present file, and from how many on the next one is begun.
    written: u64,
    file_bytes: u64,
    file_bytes_max: u64,
}

impl LogGate {
    /// No log: nothing waits.
    pub(crate) fn closed() -> Self {
        Self {
            writer: None,
            recovered: Vec::new(),
            above: View(0),
            own: View(0),
            view: View(0),
            view_queued: View(0),
            joins: Vec::new(),
            queue: Vec::new(),
            busy: None,
            answer: Answer::None,
            retry: None,
            dead: None,
            written: 0,
            file_bytes: u64::MAX,
            file_bytes_max: u64::MAX,
        }
    }

    /// A gate in front of a log, and for its driver what writes and what is to be written.
    pub(crate) fn open(log: Log) -> (Self, Scribe, Batches) {
        let Log { view, own, sessions, settings, scribe } = log;
        let (writer, batches) = Writer::new();
        let gate = Self {
            writer: Some(writer),
            recovered: sessions.into_values().collect(),
            above: view,
            own,
            file_bytes: settings.file_bytes,
            file_bytes_max: settings.file_bytes,
            ..Self::closed()
        };
        (gate, scribe, batches)
    }

    pub(super) fn is_open(&self) -> bool {
        self.writer.is_some()
    }

    /// Why the log takes nothing, unless it does.
    pub(super) fn missing(&self) -> Option<String> {
        match (&self.dead, self.answer) {
            (Some(why), _) => Some(format!("the log can't be written: {why}")),
            (None, Answer::Late(_) | Answer::GivenUp(_)) => {
                Some(format!("the log's disk has not answered for {} s", ANSWER_WAIT.as_secs()))
            }
            (None, Answer::None | Answer::Due(_)) => None,
        }
    }

    /// When to call [`Shell::handle_log_timeout`], where sessions wait so long for the disk.
    pub(super) fn poll_timeout(&self, patience: Duration) -> Option<Instant> {
        let answer = match self.answer {
            Answer::Due(since) => Some(since + ANSWER_WAIT),
            Answer::Late(since) => Some(since + patience.max(ANSWER_WAIT)),
            Answer::None | Answer::GivenUp(_) => None,
        };
        let retry = self.retry.filter(|_| self.busy.is_none() && self.dead.is_none());
        answer.into_iter().chain(retry).min()
    }

    /// Whether all that is queued may wait for the next attempt.
    fn pauses(&self, now: Instant) -> bool {
        let pause = self.dead.is_some() || self.retry.is_some_and(|at| now < at);
        pause && self.queue.iter().all(|entry| matches!(entry, Entry::Ended { .. }))
    }

    /// The first session id: with a log, no coordinator of the folder ever gives it again.
    pub(super) fn first_session(&self) -> u64 {
        (self.own.0 << SESSION_BITS) | 1
    }

    /// Whether a coordinator that was started later gave this id.
    pub(super) fn is_later(&self, session: SessionId) -> bool {
        session.0 >> SESSION_BITS > self.own.0
    }

    /// Positions by which what is durable may be behind what is committed.
    pub(super) fn lag(&self) -> u32 {
        if self.is_open() { LAG } else { 0 }
    }
}

impl Shell {
    /// Takes up what the log has; the first thing that is asked of a coordinator.
    pub(crate) fn recover(&mut self) {
        self.ring.start_above(self.log.above);
        let now = clock::now();
        for logged in std::mem::take(&mut self.log.recovered) {
            let id = logged.opened.session;
            match logged.ended {
                None if !logged.opened.client.resumable => {
                    tracing::info!(session = %id, "nobody can read a logged session on: cancelled");
                    self.log.queue.push(Entry::Ended { session: id, how: Ended::Cancelled });
                }
                Some(Ended::Finished(_)) if logged.opened.client.resumable => {
                    self.kept.extend(Kept::of(logged, now + self.settings.reattach).map(|kept| (id, kept)));
                }
                Some(Ended::Finished(_) | Ended::Failed | Ended::Cancelled) => {}
                None => self.recreate(logged),
            }
        }
    }

    /// A session that was not at its end waits for the ring, and for its reader.
    fn recreate(&mut self, logged: Logged) {
        let now = clock::now();
        let Logged { opened, tokens, scores, .. } = logged;
        let Opened { session: id, request, arithmetic, client } = opened;
        let opening = self.opening_on((Vec::new(), 0), (id, &request), &tokens, Some(&arithmetic), now);
        let opening = match opening {
            Ok(opening) => opening,
            Err(error) => {
                tracing::error!(session = %id, %error, "a logged session can't go on");
                return self.log.queue.push(Entry::Ended { session: id, how: Ended::Failed });
            }
        };
        let reattach = self.settings.reattach;
        let readers = Readers { probe: false, client, reader: None, number: 0, until: Some(now + reattach) };
        let mut session = Session::new(request, opening, readers, now);
        session.wire_bytes_per_position = self.wire_bytes(arithmetic.encoding);
        session.durable = Durable::Tokens(u32::try_from(tokens.len()).unwrap_or(u32::MAX));
        session.committed = tokens;
        session.scores = scores;
        let error = JobError::NotReady { why: "the coordinator was started again".to_owned() };
        session.park(error, now + self.settings.heal_wait.max(reattach));
        tracing::info!(session = %id, tokens = session.committed.len(), "a logged session waits for the ring");
        self.shared.open.fetch_add(1, std::sync::atomic::Ordering::AcqRel);
        self.sessions.insert(id, session);
    }

    /// Sends a message, a join only when its view is logged.
    pub(super) fn send_logged(&mut self, to: Node, message: Control) {
        let view = if let Control::Join(join) = &message { join.view } else { View(0) };
        if !self.log.is_open() || view <= self.log.view {
            return self.send(to, &message);
        }
        if view > self.log.view_queued {
            self.log.view_queued = view;
            // Those of a view before are of no use, however long the disk takes.
            self.log.joins.clear();
            self.log.queue.push(Entry::View(view));
        }
        self.log.joins.push((to, message));
    }

    /// A session of a client begins: it is logged, unless its answer is scores, which no log has.
    pub(super) fn log_opened(&mut self, id: SessionId, session: &mut Session) {
        if !self.log.is_open() || session.readers.probe || session.request.score.is_some() {
            return;
        }
        session.durable = Durable::Nothing;
        session.bound_floor();
        self.log.queue.push(Entry::Opened(Box::new(opened(id, session))));
    }

    pub(super) fn log_ended(&mut self, id: SessionId, session: &Session, how: Ended) {
        if session.durable != Durable::Unlogged {
            self.log.queue.push(Entry::Ended { session: id, how });
        }
    }

    /// Hands what came up to the log's thread, unless it is at work.
    pub(super) fn flush_log(&mut self) {
        if self.log.writer.is_none() || self.log.busy.is_some() {
            return;
        }
        let now = clock::now();
        let news = self.sessions.values().any(Session::has_news);
        if !news && self.log.pauses(now) {
            return;
        }
        // An end is written where its session was opened before the next file begins without it.
        let ends = self.log.queue.iter().any(|entry| matches!(entry, Entry::Ended { .. }));
        let fresh = self.log.written >= self.log.file_bytes && !ends;
        let (entries, mut manifest) = if fresh { self.whole_state() } else { self.news() };
        if entries.is_empty() {
            return;
        }
        let sent = match (record::encode(&entries), &self.log.writer) {
            (Ok(payload), Some(writer)) => {
                manifest.bytes = u64::try_from(payload.len() + record::HEAD_BYTES).unwrap_or(u64::MAX);
                let leads = manifest.view.is_some_and(|view| view > self.log.view);
                writer.send(Batch { payload, fresh, leads }).map_err(str::to_owned)
            }
            (Err(error), _) => Err(error.to_string()),
            (_, None) => return,
        };
        self.log.busy = Some(manifest);
        self.log.retry = None;
        self.log.answer = Answer::Due(now);
        if let Err(why) = sent {
            self.handle_synced(Synced::Failed { why });
        }
    }

    /// What is not in the log yet.
    fn news(&mut self) -> (Vec<Entry>, Manifest) {
        let mut manifest = Manifest::default();
        let mut entries = std::mem::take(&mut self.log.queue);
        for entry in &entries {
            match entry {
                Entry::View(view) => manifest.view = manifest.view.max(Some(*view)),
                Entry::Opened(opened) => {
                    manifest.sessions.push((opened.session, 0));
                    manifest.opened.push(opened.session);
                }
                Entry::Ended { session, how } => manifest.ended.push((*session, *how)),
                Entry::Tokens { .. } => {}
            }
        }
        for (id, session) in &self.sessions {
            if session.has_news() {
                let told = session.told();
                let first = u32::try_from(told).unwrap_or(u32::MAX);
                let scores = session.scores.get(told..).unwrap_or_default().to_vec();
                entries.push(Entry::Tokens { session: *id, first, ids: session.committed[told..].to_vec(), scores });
                let count = u32::try_from(session.committed.len()).unwrap_or(u32::MAX);
                manifest.sessions.push((*id, count));
            }
        }
        (entries, manifest)
    }

    /// Everything that the next file must say.
    fn whole_state(&self) -> (Vec<Entry>, Manifest) {
        let view = self.log.view_queued;
        let mut manifest = Manifest { view: Some(view), replaces: Some(self.log.queue.len()), ..Manifest::default() };
        let mut entries = vec![Entry::View(view)];
        for (id, session) in self.sessions.iter().filter(|(_, session)| session.durable != Durable::Unlogged) {
            let (tokens, scores) = (session.committed.clone(), session.scores.clone());
            manifest.sessions.push((*id, u32::try_from(tokens.len()).unwrap_or(u32::MAX)));
            entries.extend(carried(&Logged { opened: opened(*id, session), tokens, scores, ended: None }));
        }
        entries.extend(self.kept.values().flat_map(|kept| kept.logged().as_ref().map(carried).unwrap_or_default()));
        (entries, manifest)
    }

    /// The log's thread has answered.
    pub(crate) fn handle_synced(&mut self, synced: Synced) {
        let Some(manifest) = self.log.busy.take() else { return };
        let missed = self.log.missing();
        self.log.answer = Answer::None;
        if let Synced::Dead { why } = &synced {
            self.log.dead = Some(why.clone());
        }
        if self.log.missing() != missed {
            self.publish();
        }
        match synced {
            Synced::Durable => self.release(manifest),
            Synced::Same { why } => {
                tracing::warn!(why, "the next log file can't be begun; the present one grows");
                self.log.file_bytes = self.log.written.saturating_add(self.log.file_bytes_max);
            }
            Synced::Failed { why } | Synced::Dead { why } => self.not_logged(&manifest, &why),
            Synced::Superseded { why } => {
                tracing::error!(why, "another coordinator was started on this log");
                self.log.joins.clear();
                self.ring.handle_superseded(&why);
                self.release(Manifest { view: None, ..manifest });
                self.drain_ring();
            }
        }
    }

    fn release(&mut self, manifest: Manifest) {
        match manifest.replaces {
            Some(needless) => {
                self.log.queue.drain(..needless.min(self.log.queue.len()));
                self.log.written = manifest.bytes;
                self.log.file_bytes = self.log.file_bytes_max;
            }
            None => self.log.written = self.log.written.saturating_add(manifest.bytes),
        }
        if let Some(view) = manifest.view {
            self.log.view = self.log.view.max(view);
            for (to, message) in std::mem::take(&mut self.log.joins) {
                self.send_logged(to, message);
            }
        }
        for (id, count) in manifest.sessions {
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            match session.synced(count) {
                Ok(()) if session.ending => self.finish(id),
                Ok(()) if matches!(session.phase, Phase::Running) => self.drain_round(id),
                Ok(()) => {}
                Err(error) => self.fail(id, error),
            }
        }
    }

    /// A batch is lost: whoever is in it fails, the others go on.
    fn not_logged(&mut self, manifest: &Manifest, why: &str) {
        tracing::error!(why, "the log can't be written");
        if manifest.view.is_some() {
            self.log.joins.clear();
            self.log.view_queued = self.log.view;
            self.ring.handle_not_logged(why, clock::now());
        }
        // Of a session that is not in the log, no end may be there; every other one is to come.
        let unopened = |id: &SessionId| manifest.opened.contains(id);
        self.log.queue.retain(|entry| !matches!(entry, Entry::Ended { session, .. } if unopened(session)));
        let ended = manifest.ended.iter().filter(|(id, _)| !unopened(id));
        self.log.queue.splice(..0, ended.map(|(session, how)| Entry::Ended { session: *session, how: *how }));
        self.log.retry = (!self.log.queue.is_empty()).then(|| clock::now() + RETRY_AFTER);
        for (id, _) in &manifest.sessions {
            self.fail(*id, JobError::NotLogged { why: why.to_owned() });
        }
        self.drain_ring();
    }

    /// The disk takes long: says so, and in the end fails whoever waits for it.
    pub(super) fn handle_log_timeout(&mut self, now: Instant) {
        let patience = self.settings.heal_wait.max(ANSWER_WAIT);
        let (Answer::Due(since) | Answer::Late(since) | Answer::GivenUp(since)) = self.log.answer else { return };
        if matches!(self.log.answer, Answer::Due(_)) && since + ANSWER_WAIT <= now {
            tracing::error!(waited_s = ANSWER_WAIT.as_secs(), "the log's disk does not answer");
            self.log.answer = Answer::Late(since);
            self.publish();
        }
        if since + patience > now {
            return;
        }
        self.log.answer = Answer::GivenUp(since);
        let why = format!("its disk has not answered for {} s", patience.as_secs());
        for id in self.sessions.keys().copied().collect::<Vec<_>>() {
            if self.sessions.get(&id).is_some_and(|session| session.durable != Durable::Unlogged) {
                self.fail(id, JobError::NotLogged { why: why.clone() });
            }
        }
    }

    /// Ends every session: one that is in the log only for its reader.
    pub(super) async fn stop_sessions(&mut self, synced: &mut mpsc::Receiver<Synced>) {
        let until_idle = async {
            self.flush_log();
            while self.log.busy.is_some() {
                let Some(answer) = synced.recv().await else { return };
                self.handle_synced(answer);
                self.flush_log();
            }
        };
        if timeout(CLOSE_WAIT, until_idle).await.is_err() {
            tracing::warn!("the log is not written to its end: sessions may be behind what was told");
        }
        self.handle_unstarted_timeout(None);
        for id in self.sessions.keys().copied().collect::<Vec<_>>() {
            let logged = self.sessions.get(&id).is_some_and(Session::can_be_read_on);
            let why = "the coordinator is shutting down, and goes on when it is started again".to_owned();
            self.fail(id, if logged { JobError::Detached { why } } else { JobError::Shutdown });
        }
    }

    /// Another coordinator leads the ring, and goes on with what was logged: nobody reads that here.
    pub(super) fn leave_superseded(&mut self) {
        if !self.ring.is_superseded() || !self.log.is_open() {
            return;
        }
        for id in self.sessions.keys().copied().collect::<Vec<_>>() {
            if self.sessions.get(&id).is_some_and(Session::can_be_read_on) {
                let why = "another coordinator leads the ring and goes on with the request".to_owned();
                self.fail(id, JobError::Detached { why });
            }
        }
    }

    /// Says the last event of a session that is no more, and keeps it for a reader who comes back.
    pub(super) fn end(&mut self, id: SessionId, mut session: Session, last: Event) {
        self.uncount(&session.readers);
        let how = match &last {
            Event::Failed(error) if error.leaves_open() => None,
            Event::Failed(_) => Some(Ended::Failed),
            Event::Finished { reason, .. } => Some(Ended::Finished(*reason)),
            Event::Token { .. } | Event::Scored { .. } => None,
        };
        if let Some(how) = how {
            self.log_ended(id, &session, how);
        }
        let reader = session.readers.reader.take();
        let attached = reader.is_some();
        if let Some(reader) = reader {
            reader.end(last.clone());
        }
        if how.is_some() && session.can_be_read_on() && !self.settings.reattach.is_zero() {
            self.keep(id, Kept::ended(opened(id, &session), session, last, attached));
        }
    }
}

fn opened(id: SessionId, session: &Session) -> Opened {
    Opened {
        session: id,
        request: session.request.clone(),
        arithmetic: session.arithmetic.clone(),
        client: session.readers.client.clone(),
    }
}

#[cfg(test)]
mod tests;
