//! The turns of clients.

use std::time::Duration;

use crate::sim::agenda::{Event, HostId};
use crate::sim::check::Broken;
use crate::sim::client::Step;
use crate::sim::net::lock;
use crate::sim::trace::Note;
use crate::sim::world::{Process, World, owner};

/// How long a client waits for a word before it asks again elsewhere.
const PATIENCE: Duration = Duration::from_secs(15);

impl World {
    pub(super) fn on_client(&mut self, client: usize) -> Result<(), Broken> {
        if self.clients[client].is_done() {
            return Ok(());
        }
        let reads_from = self.clients[client].host();
        let gone = reads_from.is_some_and(|host| !self.processes.contains_key(&host));
        let impatient = reads_from.is_some() && self.now.saturating_sub(self.heard[client]) >= PATIENCE;
        // A coordinator that stands still answers nobody: whoever can asks another one.
        let other = reads_from.is_some_and(|host| self.stands_still(host)) && self.leads().len() > 1;
        if gone || (impatient && other) || self.clients[client].leaves() {
            let lead = reads_from.and_then(|host| match self.processes.get(&host) {
                Some(Process::Lead(lead)) => Some(lead),
                Some(Process::Stage(_)) | None => None,
            });
            self.clients[client].hang_up(lead.map(AsRef::as_ref));
            self.heard[client] = self.now;
            if let Some(host) = reads_from {
                lock(&self.net).after(Duration::ZERO, Event::Turn { host });
            }
        }
        let host = reads_from.filter(|host| self.processes.contains_key(host)).or_else(|| self.lead());
        if let Some(host) = host.filter(|host| !self.stands_still(*host)) {
            self.step_client(client, host)?;
        }
        let wait = self.clients[client].pause();
        lock(&self.net).after(wait, Event::Client { client });
        Ok(())
    }

    fn step_client(&mut self, client: usize, host: HostId) -> Result<(), Broken> {
        let logged = self.disk.is_some();
        let Some(Process::Lead(lead)) = self.processes.get(&host) else { return Ok(()) };
        let what = match self.clients[client].step(host, lead, logged)? {
            Step::Waits => return Ok(()),
            Step::Said(what) => what,
            Step::ReadsOn(told) => format!("reads on from token {told}"),
            Step::Asked(session) => {
                let reference = self.clients[client].reference.clone();
                let owner = owner(logged, host, session);
                self.owners.insert(owner, client);
                self.memory.expect(owner, reference);
                format!("asks for session {session}")
            }
        };
        self.heard[client] = self.now;
        self.note(Note::Client { client, what });
        lock(&self.net).after(Duration::ZERO, Event::Turn { host });
        Ok(())
    }

    /// Clients of a coordinator read what it says.
    pub(super) fn read_clients(&mut self, host: HostId) -> Result<(), Broken> {
        for client in 0..self.clients.len() {
            if self.clients[client].host() != Some(host) {
                continue;
            }
            if let Some(what) = self.clients[client].read(self.disk.as_ref())? {
                self.heard[client] = self.now;
                self.note(Note::Client { client, what });
            }
        }
        Ok(())
    }
}
