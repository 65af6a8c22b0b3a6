//! The part of the loop that brings sessions onto the next ring: what a stage lost is sent again, and
//! checked, before a session goes on.

use std::time::{Duration, Instant};

use crate::clock;
use crate::coordinator::drive::stage_lost;
use crate::coordinator::job::JobError;
use crate::coordinator::run::Shell;
use crate::coordinator::session::{Opening, Phase, Session};
use crate::heal::run::{Output, Run, RunConfig};
use crate::ids::{LayerRange, Node, Position, SessionId, TokenId, View};
use crate::proto::codec;
use crate::proto::control::{Control, Digests, Kept};

/// A rebuild may stand still for as long at least.
const REBUILD_DEADLINE_MIN: Duration = Duration::from_secs(5);

impl Shell {
    /// The ring is whole: sessions that waited go on.
    pub(super) fn resume_sessions(&mut self) {
        let now = clock::now();
        for id in self.sessions.keys().copied().collect::<Vec<_>>() {
            let Some(session) = self.sessions.get(&id) else { continue };
            if !matches!(session.phase, Phase::Parked { .. }) {
                continue;
            }
            match self.opening(id, &session.request, &session.committed, Some(&session.arithmetic), now) {
                Ok(opening) => self.rebuild(id, opening, now),
                Err(JobError::NotReady { .. }) => {}
                Err(error) => self.fail(id, error),
            }
        }
    }

    /// Asks every stage what it kept of a session.
    fn rebuild(&mut self, id: SessionId, opening: Opening, now: Instant) {
        let deadline = self.rebuild_deadline();
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let config = opening.round.config();
        let history = config.prompt_len() - 1;
        let run = Run::new(
            RunConfig {
                view: config.view,
                session: id,
                stages: opening.ring.len(),
                ids: config.prompt.clone(),
                prompt_len: u32::try_from(session.request.prompt.len()).unwrap_or(u32::MAX),
                asked_from: Position(history.min(session.asked_again_from())),
                committed: !session.committed.is_empty(),
                chunk: self.settings.prefill_chunk,
                deadline,
            },
            now,
        );
        session.resume(opening, run, now);
        self.heals.replayed((0, 0), (self.link.local(), self.ring.view()), now);
        let (open, ring) = (Control::Open(session.open.clone()), session.ring.clone());
        for (peer, _) in ring {
            self.send(peer, &open);
        }
        self.open_on_shadows(id);
    }

    /// How long a rebuild may stand still: whoever holds it up must lose its place while a session still
    /// has the patience to try another one.
    fn rebuild_deadline(&self) -> Duration {
        let deadline = self.settings.prefill_deadline;
        match self.settings.heal_wait {
            Duration::ZERO => deadline,
            patience => deadline.min((patience / 4).max(REBUILD_DEADLINE_MIN)),
        }
    }

    pub(super) fn handle_opened(&mut self, peer: Node, view: View, id: SessionId, kept: Option<Kept>) {
        let now = clock::now();
        let Some((stage, run)) = self.rebuilding(peer, view, id) else { return };
        if run.handle_opened(stage, kept, now) {
            let again: Vec<u32> = run.computed_again().collect();
            let bytes = self.replay_bytes(id, &again);
            let positions = again.iter().map(|positions| u64::from(*positions)).sum();
            tracing::info!(session = %id, ?again, "session goes on");
            self.heals.replayed((positions, bytes), (self.link.local(), self.ring.view()), now);
        }
        self.drain_rebuild(id);
    }

    pub(super) fn handle_rebuilt(&mut self, peer: Node, view: View, id: SessionId, next: Position, outputs: Digests) {
        let now = clock::now();
        let Some((stage, run)) = self.rebuilding(peer, view, id) else { return };
        run.handle_rebuilt(stage, next, outputs, now);
        self.drain_rebuild(id);
    }

    /// A journal is lost with a file: the next ring goes on without it.
    pub(super) fn handle_replay_failed(&mut self, peer: Node, view: View, id: SessionId, reason: &str) {
        let Some((stage, _)) = self.rebuilding(peer, view, id) else { return };
        let Some(member) = self.sessions.get(&id).and_then(|session| session.ring.get(stage).copied()) else { return };
        self.give_up_stage(id, member, &format!("its journal of session {id} is lost: {reason}"));
    }

    pub(super) fn rebuild_timeout(&mut self, id: SessionId, now: Instant) {
        if let Some(Phase::Rebuilding(run)) = self.sessions.get_mut(&id).map(|session| &mut session.phase) {
            run.handle_timeout(now);
        }
        self.drain_rebuild(id);
    }

    /// The rebuild that a stage's message of this view is about, and which stage of the ring it is.
    fn rebuilding(&mut self, peer: Node, view: View, id: SessionId) -> Option<(usize, &mut Run)> {
        let session = self.sessions.get_mut(&id).filter(|session| session.open.view == view)?;
        let stage = session.ring.iter().position(|(member, _)| *member == peer)?;
        match &mut session.phase {
            Phase::Rebuilding(run) => Some((stage, run)),
            Phase::Running | Phase::Closing { .. } | Phase::Localizing { .. } | Phase::Parked { .. } => None,
        }
    }

    fn drain_rebuild(&mut self, id: SessionId) {
        while let Some(session) = self.sessions.get_mut(&id) {
            let Phase::Rebuilding(run) = &mut session.phase else { return };
            let Some(output) = run.poll_output() else { return };
            let member = |stage: usize| session.ring.get(stage).copied();
            match output {
                Output::Tell { stage, message } => {
                    if let Some((peer, _)) = member(stage) {
                        self.send(peer, &message);
                    }
                }
                Output::Send { head, ids } => match codec::encode_frame(&head, &ids, &[]) {
                    Ok(body) => {
                        session.frames_sent += 1;
                        let to = session.ring.first().map(|(peer, _)| *peer);
                        self.send_frame(to, body);
                    }
                    Err(error) => self.fail(id, JobError::Diverged { why: error.to_string() }),
                },
                Output::Done { from } => {
                    session.round.skip_to(from);
                    session.phase = Phase::Running;
                    self.drain_round(id);
                }
                Output::Distrusted { stage, at } => {
                    let who = name(member(stage));
                    tracing::warn!(session = %id, %who, %at, "what a stage kept is not what was sent on: it begins anew");
                }
                Output::Differs { stage, at } => {
                    let why = format!(
                        "stage {} was rebuilt and puts out at position {at} what its predecessor in its place did \
                         not: one of the two computes differently, and nothing more is sent",
                        name(member(stage))
                    );
                    self.fail(id, JobError::Diverged { why });
                }
                Output::Stuck { stage, why } => {
                    if let Some((peer, range)) = member(stage) {
                        self.give_up_stage(id, (peer, range), &why);
                    }
                }
            }
        }
    }

    /// A stage holds up a session: the ring goes on without it.
    fn give_up_stage(&mut self, id: SessionId, (peer, range): (Node, LayerRange), why: &str) {
        self.ring.handle_fault(peer, why, clock::now());
        // The ring counts as broken before its readers hear of it, and parks the session.
        self.drain_ring();
        if self.sessions.get(&id).is_some_and(|session| matches!(session.phase, Phase::Rebuilding(_))) {
            self.fail(id, stage_lost(peer, range, why));
        }
    }

    /// What so many positions cost on the way into each stage, head first.
    fn replay_bytes(&self, id: SessionId, positions: &[u32]) -> u64 {
        let Some(session) = self.sessions.get(&id) else { return 0 };
        let bytes = session.ring.iter().zip(positions).map(|((_, range), positions)| {
            let position = match range.lo() {
                0 => size_of::<TokenId>(),
                layer => session.open.encoding_at(layer).position_bytes(self.shape.hc, self.shape.dim),
            };
            u64::from(*positions).saturating_mul(u64::try_from(position).unwrap_or(u64::MAX))
        });
        bytes.sum()
    }

    /// Notes when every session that was computed again has its state.
    pub(super) fn settle_heals(&mut self) {
        if self.heals.rebuilding() && !self.sessions.values().any(Session::rebuilding) {
            self.heals.rebuilt(clock::now());
            self.publish();
        }
    }

    /// Fails a session that has waited too long, with what it waited for.
    pub(super) fn expire_parked(&mut self, id: SessionId, now: Instant) {
        let missing = self.ring.missing();
        let Some(session) = self.sessions.get(&id) else { return };
        let Phase::Parked { until, error } = &session.phase else { return };
        if *until > now {
            return;
        }
        let mut error = error.clone();
        let waits = self.settings.heal_wait;
        if let (JobError::StageLost { why, .. } | JobError::NotReady { why }, false) = (&mut error, waits.is_zero()) {
            let waited = waits.as_secs_f64();
            let missing = missing.unwrap_or_else(|| "the ring lost it again and again".to_owned());
            *why = format!("{why}; nothing took its place in {waited} s: {missing}");
        }
        self.fail(id, error);
    }
}

/// A stage's layers and its name, for an operator.
fn name(member: Option<(Node, LayerRange)>) -> String {
    member.map_or_else(String::new, |(peer, range)| format!("{range} ({peer})"))
}
