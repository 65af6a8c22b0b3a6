//! The part of the loop that changes readers: one leaves, another one reads on, from the log's tokens.

use std::time::Instant;

use crate::clock;
use crate::coordinator::handle::Answer;
use crate::coordinator::job::{AttachError, Client, Event, JobError, JobSide, JobStats, Request, TokenScores};
use crate::coordinator::log::book::Logged;
use crate::coordinator::log::folder::ENDED_MAX;
use crate::coordinator::log::record::{Ended, Opened};
use crate::coordinator::run::Shell;
use crate::coordinator::session::Session;
use crate::ids::{SessionId, TokenId};

/// A session that is read on.
#[derive(Debug)]
pub(crate) struct Found {
    /// Number of the reader.
    pub(crate) number: u64,
    pub(crate) request: Request,
    pub(crate) form: Vec<u8>,
    /// Said before, from the first on.
    pub(crate) tokens: Vec<TokenId>,
    /// Their log-probabilities, where the request asks for them.
    pub(crate) scores: Vec<TokenScores>,
    /// Only the end is still to come.
    pub(crate) ended: bool,
}

/// A session that ended, for a reader that may not have read all of it.
#[derive(Debug)]
pub(super) struct Kept {
    opened: Opened,
    tokens: Vec<TokenId>,
    scores: Vec<TokenScores>,
    last: Event,
    /// Number of the last reader.
    number: u64,
    /// Until when, once no reader is there.
    until: Option<Instant>,
}

impl Kept {
    /// One that ended well before this coordinator was started: what was measured is not known.
    pub(super) fn of(logged: Logged, until: Instant) -> Option<Self> {
        let Some(Ended::Finished(reason)) = logged.ended else { return None };
        let count = |ids: &[TokenId]| u32::try_from(ids.len()).unwrap_or(u32::MAX);
        let stats = JobStats {
            prompt_tokens: count(&logged.opened.request.prompt),
            committed: count(&logged.tokens),
            ..JobStats::default()
        };
        let last = Event::Finished { reason, stats };
        let Logged { opened, tokens, scores, .. } = logged;
        Some(Self { opened, tokens, scores, last, number: 0, until: Some(until) })
    }

    /// One that ends here; `attached`: a reader has still to read what it was told.
    pub(super) fn ended(opened: Opened, mut session: Session, last: Event, attached: bool) -> Self {
        let told = session.told();
        session.committed.truncate(told);
        session.scores.truncate(told);
        let until = if attached { None } else { session.readers.until };
        Self { opened, tokens: session.committed, scores: session.scores, last, number: session.readers.number, until }
    }

    /// What the log says of it; nothing of one that failed, which a later coordinator does not know.
    pub(super) fn logged(&self) -> Option<Logged> {
        let Event::Finished { reason, .. } = &self.last else { return None };
        let ended = Some(Ended::Finished(*reason));
        let (opened, tokens, scores) = (self.opened.clone(), self.tokens.clone(), self.scores.clone());
        Some(Logged { opened, tokens, scores, ended })
    }
}

impl Shell {
    /// The newest session of a client that calls it so.
    pub(super) fn find(&self, name: &str, authorization: Option<[u8; 32]>) -> Result<SessionId, AttachError> {
        let named = |client: &Client| client.name.as_deref() == Some(name) && client.authorization == authorization;
        let open = self.sessions.iter().filter(|(_, session)| session.can_be_read_on());
        let open = open.filter(|(_, session)| named(&session.readers.client)).map(|(id, _)| *id);
        let ended = self.kept.iter().filter(|(_, kept)| named(&kept.opened.client)).map(|(id, _)| *id);
        let elsewhere = self.log.is_open() && self.ring.is_superseded();
        let unknown = if elsewhere { AttachError::Elsewhere } else { AttachError::Unknown };
        open.chain(ended).max().ok_or(unknown)
    }

    /// Gives a session to another reader. One that is not there answers with nothing, unless a coordinator that was
    /// started later may have it: that one's log is on the same disk, and nothing of it is lost.
    pub(super) fn attach(&mut self, id: SessionId, authorization: Option<[u8; 32]>, reader: JobSide, found: Answer) {
        if let Some(session) = self.sessions.get_mut(&id) {
            if !session.can_be_read_on() || session.readers.client.authorization != authorization {
                return;
            }
            let readers = &mut session.readers;
            readers.number += 1;
            readers.until = None;
            let told = session.committed[..session.told()].to_vec();
            let scores = session.scores.iter().take(told.len()).cloned().collect();
            let readers = &mut session.readers;
            let answer = Found {
                number: readers.number,
                request: session.request.clone(),
                form: readers.client.form.clone(),
                tokens: told,
                scores,
                ended: false,
            };
            if let Some(before) = readers.reader.replace(reader) {
                let why = "another connection reads it on".to_owned();
                before.end(Event::Failed(JobError::Detached { why }));
            }
            // A reader that is gone already is heard of as any other.
            let _ = found.send(Ok(answer));
        } else if let Some(kept) =
            self.kept.get_mut(&id).filter(|kept| kept.opened.client.authorization == authorization)
        {
            kept.number += 1;
            kept.until = None;
            reader.end(kept.last.clone());
            let _ = found.send(Ok(Found {
                number: kept.number,
                request: kept.opened.request.clone(),
                form: kept.opened.client.form.clone(),
                tokens: kept.tokens.clone(),
                scores: kept.scores.clone(),
                ended: true,
            }));
        } else if self.log.is_open() && (self.log.is_later(id) || self.ring.is_superseded()) {
            let _ = found.send(Err(AttachError::Elsewhere));
        }
    }

    /// The so-many-th reader of a session is gone: it goes on for a while if another one could come.
    pub(super) fn detach(&mut self, id: SessionId, number: u64) {
        let until = clock::now() + self.settings.reattach;
        if let Some(session) = self.sessions.get_mut(&id).filter(|session| session.readers.number == number) {
            if !session.can_be_read_on() || self.settings.reattach.is_zero() {
                return self.abandon(id);
            }
            session.readers.reader = None;
            session.readers.until = Some(until);
            tracing::info!(session = %id, "its reader is gone; another one may read on");
        } else if let Some(kept) = self.kept.get_mut(&id).filter(|kept| kept.number == number) {
            kept.until = Some(until);
        }
    }

    /// Keeps a session that ended, and of those the newest.
    pub(super) fn keep(&mut self, id: SessionId, kept: Kept) {
        self.kept.insert(id, kept);
        while self.kept.len() > ENDED_MAX {
            self.kept.pop_first();
        }
    }

    /// When the next session is given up for want of a reader.
    pub(super) fn readers_timeout(&self) -> Option<Instant> {
        let open = self.sessions.values().filter_map(|session| session.readers.until);
        open.chain(self.kept.values().filter_map(|kept| kept.until)).min()
    }

    /// Gives up sessions whose reader did not come back.
    pub(super) fn handle_readers_timeout(&mut self, now: Instant) {
        self.kept.retain(|_, kept| kept.until.is_none_or(|until| until > now));
        let late = |session: &Session| session.readers.until.is_some_and(|until| until <= now);
        let ids = self.sessions.iter().filter(|(_, session)| late(session)).map(|(id, _)| *id);
        for id in ids.collect::<Vec<_>>() {
            tracing::info!(session = %id, "nobody read it on: cancelled");
            self.abandon(id);
        }
    }
}
