//! Requests that were taken while the ring was whole and meet it broken: they wait for the next one.

use std::time::Instant;

use crate::clock;
use crate::coordinator::job::{JobError, Request};
use crate::coordinator::run::Shell;
use crate::coordinator::session::Readers;
use crate::ids::SessionId;

/// A request that nothing was done for yet.
#[derive(Debug)]
pub(super) struct Unstarted {
    request: Request,
    readers: Readers,
    until: Instant,
    /// What was missing when it came.
    why: String,
}

impl Shell {
    /// Keeps a request until the ring is whole, or fails it where it is not to wait.
    pub(super) fn wait_to_start(&mut self, id: SessionId, request: Request, readers: Readers, why: String) {
        if readers.probe || self.settings.heal_wait.is_zero() {
            return self.end_unstarted(readers, JobError::NotReady { why });
        }
        let until = clock::now() + self.settings.heal_wait;
        self.unstarted.insert(id, Unstarted { request, readers, until, why });
    }

    /// The ring is whole: what waited for it starts, in the order in which it came.
    pub(super) fn start_waiting(&mut self) {
        for (id, unstarted) in std::mem::take(&mut self.unstarted) {
            self.start(id, unstarted.request, unstarted.readers);
        }
    }

    /// The reader of a request that waits has enough or is gone; says whether it was one.
    pub(super) fn forget_unstarted(&mut self, id: SessionId) -> bool {
        let Some(unstarted) = self.unstarted.remove(&id) else { return false };
        self.uncount(&unstarted.readers);
        true
    }

    /// When the next request has waited too long.
    pub(super) fn unstarted_timeout(&self) -> Option<Instant> {
        self.unstarted.values().map(|unstarted| unstarted.until).min()
    }

    /// Fails what has waited too long; at the end, everything.
    pub(super) fn handle_unstarted_timeout(&mut self, now: Option<Instant>) {
        let late = |unstarted: &mut Unstarted| now.is_none_or(|now| unstarted.until <= now);
        let late: Vec<_> = self.unstarted.extract_if(.., |_, unstarted| late(unstarted)).collect();
        for (_, Unstarted { readers, why, .. }) in late {
            let error = if now.is_some() { JobError::NotReady { why } } else { JobError::Shutdown };
            self.end_unstarted(readers, error);
        }
    }
}
