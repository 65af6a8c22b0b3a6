//! The part of the loop that moves sessions: starts them, drains their rounds, ends them.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::clock;
use crate::coordinator::handle::Command;
use crate::coordinator::job::{Client, Event, Finish, JobError, Mode, Request};
use crate::coordinator::log::record::Ended;
use crate::coordinator::run::Shell;
use crate::coordinator::session::{Arithmetic, CLOSE_DEADLINE, LOCALIZE_DEADLINE, Opening, Phase, Readers, Session};
use crate::heal::decide::{Evidence, Lost, Next};
use crate::ids::{LayerRange, Node, Position, SessionId, TokenId, View, WireEncoding};
use crate::proto::codec;
use crate::proto::control::{Control, Open, Sampling, SessionReport, StageReport, Want};
use crate::proto::frame::Reply;
use crate::proto::round::{Deadlines, Finish as RoundFinish, Round, RoundConfig, RoundOutput};
use crate::transport::Lane;

impl Shell {
    /// A reader wants something.
    pub(crate) fn handle_command(&mut self, command: Command) {
        match command {
            Command::Submit { session, request, client, reader } => {
                self.start(session, request, Readers::new(client, Some(reader)));
            }
            Command::Attach { session, authorization, reader, found } => {
                self.attach(session, authorization, reader, found);
            }
            Command::Find { name, authorization, found } => {
                // One who asks no more needs no answer.
                let _ = found.send(self.find(&name, authorization));
            }
            Command::Enough { session, .. } | Command::Gone { session, .. } if self.forget_unstarted(session) => {}
            Command::Enough { session, reader } => {
                if self.sessions.get(&session).is_some_and(|session| session.readers.number == reader) {
                    self.stop(session);
                }
            }
            Command::Gone { session, reader } => self.detach(session, reader),
        }
    }

    /// Sends one token round an idle ring, to know that it is ready.
    pub(super) fn probe_ring(&mut self, now: Instant) {
        if self.ring.missing().is_some() || !self.sessions.is_empty() {
            return;
        }
        self.nonce += 1;
        let session = SessionId(self.shared.next_session.fetch_add(1, Ordering::Relaxed));
        let request = Request {
            prompt: vec![self.shape.probe_token],
            max_new: 1,
            sampling: Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 },
            mode: Some(Mode::Plain),
            encoding: None,
            score: None,
            logprobs: None,
            ignore_eos: true,
        };
        tracing::debug!(%session, age = ?now, "probe round");
        self.start(session, request, Readers::new(Client::default(), None));
    }

    pub(super) fn start(&mut self, id: SessionId, request: Request, readers: Readers) {
        let now = clock::now();
        match self.opening(id, &request, &[], None, now) {
            Ok(opening) => {
                let mut session = Session::new(request, opening, readers, now);
                session.wire_bytes_per_position = self.wire_bytes(session.arithmetic.encoding);
                self.log_opened(id, &mut session);
                self.sessions.insert(id, session);
                self.open(id);
            }
            Err(JobError::NotReady { why }) => self.wait_to_start(id, request, readers, why),
            Err(error) => self.end_unstarted(readers, error),
        }
    }

    /// Opens a session on every stage, and sends its first frames.
    fn open(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else { return };
        let (open, ring) = (Control::Open(session.open.clone()), session.ring.clone());
        for (peer, _) in ring {
            self.send(peer, &open);
        }
        self.open_on_shadows(id);
        self.drain_round(id);
    }

    /// How a session is opened on the ring as it stands: with the committed tokens but the last one as
    /// a part of the prompt, so that the first answer is the last committed token again.
    pub(super) fn opening(
        &self,
        id: SessionId,
        request: &Request,
        committed: &[TokenId],
        arithmetic: Option<&Arithmetic>,
        now: Instant,
    ) -> Result<Opening, JobError> {
        let whole = self.ring.whole();
        let ring: Vec<(Node, LayerRange)> = whole.iter().map(|member| (member.peer, member.offer.range)).collect();
        let draft_block = whole.last().map_or(0, |member| member.offer.draft_block);
        // A stage that drains is still there, and takes no session.
        match self.ring.missing() {
            Some(why) => Err(JobError::NotReady { why }),
            None => self.opening_on((ring, draft_block), (id, request), committed, arithmetic, now),
        }
    }

    /// The same on these stages; on none, what a session waits with.
    pub(super) fn opening_on(
        &self,
        (ring, draft_block): (Vec<(Node, LayerRange)>, u32),
        (id, request): (SessionId, &Request),
        committed: &[TokenId],
        arithmetic: Option<&Arithmetic>,
        now: Instant,
    ) -> Result<Opening, JobError> {
        let drafts = match request.mode.unwrap_or_default() {
            Mode::Pipelined => self.settings.draft_max.min(draft_block),
            Mode::Plain => 0,
        };
        let resumes = arithmetic.is_some();
        let arithmetic = arithmetic.cloned().unwrap_or_else(|| Arithmetic {
            boundaries: ring.iter().skip(1).map(|(_, range)| range.lo()).collect(),
            encoding: request.encoding.unwrap_or(self.settings.encoding),
        });
        let replayed = committed.len().saturating_sub(1);
        let mut prompt = request.prompt.clone();
        prompt.extend_from_slice(&committed[..replayed]);
        let prompt_len = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let max_new = request.max_new - u32::try_from(replayed).unwrap_or(u32::MAX).min(request.max_new);
        let stages = u32::try_from(ring.len()).unwrap_or(u32::MAX);
        // As long as it was at first: a state that a stage kept has room for no more.
        let chunk = self.settings.prefill_chunk.min(u32::try_from(request.prompt.len()).unwrap_or(u32::MAX));
        let positions = prompt_len.saturating_add(max_new);
        let reach = (draft_block + 1)
            .max(self.settings.in_flight_max)
            .max(chunk.saturating_mul(stages + 1))
            .saturating_add(self.log.lag())
            // A healed ring asks for the last committed token once more.
            .saturating_add(1)
            .min(positions.max(1));
        let open = Open {
            view: self.ring.view(),
            session: id,
            prompt_len,
            positions,
            reach,
            boundaries: arithmetic.boundaries.clone(),
            encoding: arithmetic.encoding,
            sampling: request.sampling,
            draft_block: drafts,
            want: Want { scores: request.score, logprobs: request.logprobs },
            resumes,
        };
        let config = self.round_config(&open, request, (prompt, max_new, chunk));
        let round = Round::new(config, now).map_err(|error| JobError::Diverged { why: error.to_string() })?;
        Ok(Opening { open, round, ring, arithmetic, replayed })
    }

    pub(super) fn end_unstarted(&self, readers: Readers, error: JobError) {
        self.uncount(&readers);
        if let Some(reader) = readers.reader {
            reader.end(Event::Failed(error));
        }
    }

    fn round_config(
        &self,
        open: &Open,
        request: &Request,
        (prompt, max_new, prefill_chunk): (Vec<TokenId>, u32, u32),
    ) -> RoundConfig {
        RoundConfig {
            view: open.view,
            session: open.session,
            prompt,
            max_new,
            eos: self.eos.clone(),
            ignore_eos: request.ignore_eos,
            in_flight_max: self.settings.in_flight_max,
            draft_max: open.draft_block,
            prefill_chunk,
            reach: open.reach,
            score: request.score.is_some(),
            // A prompt of one token, like a probe's, takes no longer than any other position.
            deadlines: Deadlines {
                reply: self.settings.reply_deadline,
                prefill: if open.prompt_len == 1 {
                    self.settings.reply_deadline
                } else {
                    self.settings.prefill_deadline
                },
            },
        }
    }

    pub(super) fn wire_bytes(&self, encoding: WireEncoding) -> u64 {
        let bytes = codec::frame_header_bytes(1) + encoding.position_bytes(self.shape.hc, self.shape.dim);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    pub(super) fn handle_reply(&mut self, reply: Reply) {
        let now = clock::now();
        let id = reply.session;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let current = reply.view == self.ring.view();
        if let Phase::Running | Phase::Localizing { .. } = session.phase {
            if let Some(token) = beyond(&reply, self.vocab) {
                let why = format!("the tail answers with token id {token}, the vocabulary ends at {}", self.vocab);
                return self.fail(id, JobError::Diverged { why });
            }
            session.round.handle_reply(reply, now);
            if !session.round.is_overdue() {
                // A reply that was late came.
                session.phase = Phase::Running;
                session.excused = 0;
            }
            if current {
                self.went_round(now);
            }
            self.drain_round(id);
        }
    }

    /// Does what a session's round says until it has nothing more to say.
    pub(super) fn drain_round(&mut self, id: SessionId) {
        let now = clock::now();
        loop {
            let Some(session) = self.sessions.get_mut(&id) else { return };
            let Some(output) = session.round.poll_output(now) else { break };
            let told = match output {
                RoundOutput::Send { head, ids } => match codec::encode_frame(&head, &ids, &[]) {
                    Ok(body) => {
                        session.frames_sent += 1;
                        let to = session.ring.first().map(|(peer, _)| *peer);
                        self.send_frame(to, body);
                        Ok(())
                    }
                    Err(error) => Err(JobError::Diverged { why: error.to_string() }),
                },
                RoundOutput::Cancel { .. } if !self.settings.cancel_out_of_band => Ok(()),
                RoundOutput::Cancel { below } => {
                    let peers: Vec<Node> = session.ring.iter().map(|(peer, _)| *peer).collect();
                    for peer in peers {
                        self.send(peer, &Control::Cancel { session: id, below });
                    }
                    Ok(())
                }
                RoundOutput::Commit { index, token, scores, .. } => session.commit(index, token, scores, now),
                RoundOutput::Scored { position, answer } => session.score(position.0, answer),
                RoundOutput::Finished(finish) => {
                    self.close(id, finish, now);
                    Ok(())
                }
                RoundOutput::Overdue { waited, .. } => {
                    session.probed = None;
                    self.localize(id, waited, now);
                    Ok(())
                }
                RoundOutput::Failed(error) => Err(JobError::Diverged { why: error.to_string() }),
            };
            if let Err(error) = told {
                self.fail(id, error);
            }
        }
        self.copy(id);
        self.count_in_flight();
    }

    pub(super) fn send_frame(&mut self, to: Option<Node>, body: bytes::Bytes) {
        let Some(to) = to else { return };
        if let Err(error) = self.queue(to, Lane::Data, body) {
            self.ring.handle_fault(to, &error.to_string(), clock::now());
        }
    }

    pub(super) fn count_in_flight(&self) {
        let frames: usize = self.sessions.values().map(|session| session.round.in_flight()).sum();
        self.shared.in_flight.store(u32::try_from(frames).unwrap_or(u32::MAX), Ordering::Relaxed);
        let rejections = self.sessions.values().map(|session| u64::from(session.round.stats().rejections)).sum();
        self.shared.rejections.store(rejections, Ordering::Relaxed);
        let asked = self.sessions.values().filter(|session| !session.readers.probe);
        let settled = asked.map(|session| u64::from(session.round.frontier().0)).sum();
        self.shared.settled.store(settled, Ordering::Relaxed);
    }

    /// Ends a session well: frees it on every stage, and asks what they computed.
    fn close(&mut self, id: SessionId, finish: RoundFinish, now: Instant) {
        let finish = match finish {
            RoundFinish::Eos | RoundFinish::Stopped => Finish::Stop,
            RoundFinish::Length | RoundFinish::Scored => Finish::Length,
        };
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let pending: BTreeSet<Node> = session.ring.iter().map(|(peer, _)| *peer).collect();
        let settled = session.round.floor();
        session.phase = Phase::Closing { finish, pending: pending.clone(), until: now + CLOSE_DEADLINE };
        self.free(id, pending, settled);
    }

    fn free(&mut self, id: SessionId, peers: impl IntoIterator<Item = Node>, settled: Position) {
        self.copies.remove(id);
        let shadows: Vec<Node> = self.ring.pairs().map(|(shadow, _)| shadow).collect();
        for peer in peers.into_iter().chain(shadows) {
            // A stage that is gone has freed it with itself.
            if self.ring.member(peer).is_some() {
                self.send(peer, &Control::Close { session: id, settled });
            }
        }
    }

    /// Frees what a stage that lost its place holds of sessions that ended since.
    pub(super) fn free_forgotten(&mut self, peer: Node, report: &StageReport) {
        if report.view >= self.ring.view() {
            return;
        }
        for held in &report.sessions {
            if !self.sessions.contains_key(&held.session) {
                self.send(peer, &Control::Close { session: held.session, settled: held.next });
            }
        }
    }

    pub(super) fn handle_closed(&mut self, peer: Node, report: SessionReport) {
        let id = report.session;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Phase::Closing { pending, .. } = &mut session.phase else { return };
        if pending.remove(&peer) {
            session.reports.insert(peer, report);
        }
        if pending.is_empty() {
            self.finish(id);
        }
    }

    /// Says the end, once the reader was told every token.
    pub(super) fn finish(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Phase::Closing { finish, .. } = session.phase else { return };
        session.ending = session.told() < session.committed.len();
        if session.ending {
            return;
        }
        let last = Event::Finished { reason: finish, stats: session.stats() };
        if let Some(session) = self.sessions.remove(&id) {
            self.end(id, session, last);
        }
        self.count_in_flight();
    }

    /// Ends a session badly: frees it everywhere and says why.
    pub(super) fn fail(&mut self, id: SessionId, error: JobError) {
        let Some(session) = self.sessions.remove(&id) else { return };
        tracing::warn!(session = %id, %error, "session failed");
        self.free(id, session.ring.iter().map(|(peer, _)| *peer), session.round.floor());
        self.end(id, session, Event::Failed(error));
        self.count_in_flight();
    }

    /// The reader has enough: the session ends well.
    fn stop(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id)
            && let Phase::Running | Phase::Rebuilding(_) | Phase::Localizing { .. } = session.phase
        {
            session.phase = Phase::Running;
            session.round.handle_stop();
            self.drain_round(id);
        } else if self.sessions.get(&id).is_some_and(|session| matches!(session.phase, Phase::Parked { .. })) {
            // Nothing is open on any stage.
            self.close(id, RoundFinish::Stopped, clock::now());
            self.finish(id);
        }
    }

    /// The reader is gone: frees the session everywhere, and tells nobody.
    pub(super) fn abandon(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
        self.free(id, session.ring.iter().map(|(peer, _)| *peer), session.round.floor());
        self.uncount(&session.readers);
        self.log_ended(id, &session, Ended::Cancelled);
        self.count_in_flight();
    }

    /// A session of a client is no more.
    pub(super) fn uncount(&self, readers: &Readers) {
        if !readers.probe {
            self.shared.open.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Asks every stage how far the session's frames came.
    fn localize(&mut self, id: SessionId, waited: Duration, now: Instant) {
        self.nonce += 1;
        let nonce = self.nonce;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let pending: BTreeSet<Node> = session.ring.iter().map(|(peer, _)| *peer).collect();
        session.probes.clear();
        session.phase = Phase::Localizing { waited, nonce, pending: pending.clone(), until: now + LOCALIZE_DEADLINE };
        for peer in pending {
            self.send(peer, &Control::Probe { nonce });
        }
    }

    pub(super) fn handle_report(&mut self, peer: Node, nonce: u64, report: &StageReport) {
        let mut complete = Vec::new();
        for (id, session) in &mut self.sessions {
            let Phase::Localizing { nonce: asked, pending, .. } = &mut session.phase else { continue };
            if *asked == nonce && pending.remove(&peer) {
                session.probes.insert(peer, report.clone());
                if pending.is_empty() {
                    complete.push(*id);
                }
            }
        }
        for id in complete {
            self.judge(id, clock::now());
        }
    }

    fn judge(&mut self, id: SessionId, now: Instant) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let Phase::Localizing { waited, nonce, .. } = session.phase else { return };
        let evidence = Evidence::Overdue {
            session: id,
            sent: session.frames_sent,
            waited,
            reports: &session.probes,
            before: session.probed.as_ref(),
            excused: session.excused,
        };
        let Lost { peer, range, why } = match self.ring.handle_overdue(&evidence, now) {
            Ok(lost) => lost,
            Err(Next::AskAgain(until)) => {
                session.probed = Some(std::mem::take(&mut session.probes));
                session.phase = Phase::Localizing { waited, nonce, pending: BTreeSet::new(), until };
                return;
            }
            Err(_) if !self.ring.whole().is_empty() => {
                tracing::warn!(session = %id, waited_ms = waited.as_millis(), "no reply; the ring is slow and moves");
                session.excused += 1;
                session.phase = Phase::Running;
                session.round.handle_patience(now);
                return self.drain_round(id);
            }
            Err(_) => {
                let why = format!("no reply for {} ms, and its ring is no more", waited.as_millis());
                return self.fail(id, JobError::NotReady { why });
            }
        };
        // The ring counts as broken before its readers hear of it, and parks the session.
        self.drain_ring();
        if self.sessions.get(&id).is_some_and(|session| matches!(session.phase, Phase::Localizing { .. })) {
            self.fail(id, stage_lost(peer, range, &why));
        }
    }

    pub(super) fn handle_failed(&mut self, peer: Node, view: View, id: SessionId, reason: String) {
        if view != self.ring.view() {
            return;
        }
        let Some(session) = self.sessions.get(&id) else { return };
        let range = session.ring.iter().find(|(member, _)| *member == peer);
        let Some(range) = range.map(|(_, range)| range.to_string()) else { return };
        if matches!(session.phase, Phase::Running | Phase::Rebuilding(_)) {
            self.fail(id, JobError::Refused { range, peer: peer.to_string(), why: reason });
        }
    }

    /// The ring of the sessions is no more: they wait for the next one.
    pub(super) fn handle_broken(&mut self, peer: Node, range: LayerRange, why: &str) {
        self.forget_round();
        self.leave_superseded();
        let now = clock::now();
        for id in self.sessions.keys().copied().collect::<Vec<_>>() {
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            match session.phase {
                // Its tokens are all committed: only the numbers may miss a stage.
                Phase::Closing { .. } => self.finish(id),
                Phase::Running | Phase::Rebuilding(_) | Phase::Localizing { .. } | Phase::Parked { .. }
                    if session.readers.probe =>
                {
                    self.abandon(id);
                }
                Phase::Running | Phase::Rebuilding(_) | Phase::Localizing { .. } => {
                    session.park(stage_lost(peer, range, why), now + self.settings.heal_wait);
                    tracing::warn!(session = %id, %range, why, "session waits for the ring");
                    self.expire_parked(id, now);
                }
                Phase::Parked { .. } => {}
            }
        }
        self.count_in_flight();
    }

    pub(super) fn sessions_timeout(&self) -> Option<Instant> {
        let of = |session: &Session| match &session.phase {
            Phase::Running => session.round.poll_timeout().map(|(at, _)| at),
            Phase::Rebuilding(run) => run.poll_timeout(),
            Phase::Closing { .. } if session.ending => None,
            Phase::Closing { until, .. } | Phase::Localizing { until, .. } | Phase::Parked { until, .. } => {
                Some(*until)
            }
        };
        self.sessions.values().filter_map(of).min()
    }

    pub(super) fn handle_sessions_timeout(&mut self, now: Instant) {
        for id in self.sessions.keys().copied().collect::<Vec<_>>() {
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            match &session.phase {
                Phase::Running => {
                    session.round.handle_timeout(now);
                    self.drain_round(id);
                }
                Phase::Rebuilding(_) => self.rebuild_timeout(id, now),
                Phase::Closing { until, .. } if *until <= now && !session.ending => self.finish(id),
                // Everybody was asked, and is to be asked again.
                Phase::Localizing { until, pending, waited, .. } if *until <= now && pending.is_empty() => {
                    let waited = *waited;
                    self.localize(id, waited, now);
                }
                Phase::Localizing { until, .. } if *until <= now => self.judge(id, now),
                Phase::Parked { .. } => self.expire_parked(id, now),
                Phase::Closing { .. } | Phase::Localizing { .. } => {}
            }
        }
    }
}

/// A token of a reply that the vocabulary does not have.
fn beyond(reply: &Reply, vocab: u32) -> Option<TokenId> {
    let answers = reply.answers.iter().map(|answer| answer.token);
    let drafts = reply.draft.iter().flat_map(|block| block.tokens.iter().copied());
    answers.chain(drafts).find(|token| token.0 >= vocab)
}

pub(super) fn stage_lost(peer: Node, range: LayerRange, why: &str) -> JobError {
    JobError::StageLost { range: range.to_string(), peer: peer.to_string(), why: why.to_owned() }
}
