//! What is checked of everything: after every event, and at the end.

use std::sync::PoisonError;
use std::time::Duration;

use crate::config::MAX_SESSIONS;
use crate::proto::codec::{self, Data};
use crate::proto::control::Control;
use crate::sim::check::{Broken, Invariant, broken};
use crate::sim::client::SimClient;
use crate::sim::net::lock;
use crate::sim::scenario::Blow;
use crate::sim::world::{Process, SETTLE, World, owner};
use crate::transport::{Lane, SEND_QUEUE_MAX};

/// How long sessions may take to end once every fault has.
const FINISH: Duration = Duration::from_secs(120);

/// How long before the end it is seen whether something is left.
const LOOK: Duration = Duration::from_millis(500);

impl World {
    /// Looks at what was sent since the last event.
    pub(super) fn look_at_sent(&mut self) -> Result<(), Broken> {
        let (sent, queued) = {
            let mut net = lock(&self.net);
            (std::mem::take(&mut net.sent), net.queued_max)
        };
        if queued > SEND_QUEUE_MAX {
            return broken(Invariant::Bounds, format!("{queued} bodies of one lane are on their way"));
        }
        let logged = self.disk.is_some();
        for message in sent {
            match message.lane {
                Lane::Reply => {
                    let Ok(Data::Reply(reply)) = codec::decode_data(message.body) else { continue };
                    let Some(block) = reply.draft else { continue };
                    let at = reply.pos.plus(reply.len.saturating_sub(1));
                    self.memory.drafted(owner(logged, message.to.start, reply.session), at, &block.tokens)?;
                }
                Lane::Control => {
                    let Some(disk) = self.disk.as_ref() else { continue };
                    let Ok(Control::Join(join)) = codec::decode_control(&message.body) else { continue };
                    let durable = disk.lock().durable_view();
                    if join.view > durable {
                        let why = format!(
                            "process {} sends a join of view {}, view {durable} is synced",
                            message.from, join.view
                        );
                        return broken(Invariant::Join, why);
                    }
                }
                Lane::Data => {}
            }
        }
        Ok(())
    }

    /// Whether the run is over, or too late.
    pub(super) fn look_at_end(&mut self) -> Result<(), Broken> {
        if self.over_at.is_some() || !self.clients.iter().all(SimClient::is_done) {
            let late = self.calm && self.now > self.calm_at + FINISH;
            if late && self.over_at.is_none() {
                let why = format!("{} s without a fault, and not every session has ended", FINISH.as_secs());
                return broken(Invariant::Liveness, why);
            }
            return Ok(());
        }
        self.calm_down()?;
        self.over_at = Some(self.now + self.scenario.settle);
        Ok(())
    }

    /// A coordinator that was started at the end may not know that a session had ended, for the record of it
    /// was torn, and bring it to its end again: as long as any session may take.
    pub(super) fn wait_for_leaks(&mut self) {
        let due = self.over_at.is_some_and(|over| self.now + LOOK >= over);
        if due && self.now < self.calm_at + FINISH && self.look_at_leaks().is_err() {
            self.over_at = Some(self.now + 2 * LOOK);
        }
    }

    /// When every session has ended and a while went by, nothing is left of them.
    pub(super) fn look_at_leaks(&self) -> Result<(), Broken> {
        let logged = self.disk.is_some();
        for (host, process) in &self.processes {
            match process {
                Process::Stage(stage) => {
                    let toys = self.toys.lock().unwrap_or_else(PoisonError::into_inner);
                    let (open, held) = (stage.open_sessions(), toys.open.get(host).copied().unwrap_or(0));
                    // A probe round may be on its way. State of sessions that ended while a stage was in no ring
                    // is freed later.
                    if open > 1 || (held > 1 && self.scenario.settle > SETTLE) || held > MAX_SESSIONS as usize {
                        let why = format!("process {host} has {open} sessions open and state of {held} at the end");
                        return broken(Invariant::Leak, why);
                    }
                }
                Process::Lead(lead) => {
                    if let Some((id, _)) =
                        lead.sessions().find(|(id, _)| self.owners.contains_key(&owner(logged, *host, **id)))
                        && self.lead() == Some(*host)
                    {
                        return broken(Invariant::Leak, format!("process {host} holds session {id} at the end"));
                    }
                    if self.only_slow() && !lead.breaks().is_empty() {
                        let why = format!("nothing failed, and rings broke: {:?}", lead.breaks());
                        return broken(Invariant::Slow, why);
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether nothing struck but slowness.
    fn only_slow(&self) -> bool {
        let faults = self.struck.iter().filter_map(|fault| self.scenario.faults.get(*fault));
        faults.into_iter().all(|fault| matches!(fault.blow, Blow::Slow { .. }))
    }
}
