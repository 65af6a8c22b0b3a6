//! Faults strike, and end.

use std::time::Duration;

use crate::sim::agenda::{Event, HostId};
use crate::sim::check::Broken;
use crate::sim::net::{Slot, lock};
use crate::sim::scenario::{Blow, Fault, LEAD, TWIN, When};
use crate::sim::trace::Note;
use crate::sim::world::{Process, World};

impl World {
    /// Puts the faults with a time on the agenda.
    pub(super) fn plan_faults(&mut self) {
        let mut net = lock(&self.net);
        for (fault, planned) in self.scenario.faults.iter().enumerate() {
            if let When::At(at) = planned.when {
                net.agenda.put(at, Event::Strike { fault });
            }
        }
        net.agenda.put(self.scenario.calm, Event::Calm);
    }

    /// Strikes the faults whose step has come.
    pub(super) fn strike_by_step(&mut self) -> Result<(), Broken> {
        let steps = self.trace.steps;
        while let Some(fault) = self.by_step.last().filter(|(at, _)| *at <= steps).map(|(_, fault)| *fault) {
            self.by_step.pop();
            self.strike(fault)?;
        }
        Ok(())
    }

    /// The so-many-th fault strikes.
    pub(super) fn strike(&mut self, number: usize) -> Result<(), Broken> {
        if self.calm {
            return Ok(());
        }
        let Fault { blow, lasts, .. } = self.scenario.faults[number].clone();
        self.note(Note::Fault { what: format!("{blow:?} for {} ms", lasts.as_millis()) });
        self.struck.insert(number);
        match blow {
            Blow::Kill { seat, silent } => self.kill(self.stage_at(seat), silent),
            Blow::Freeze { seat } => self.freeze(self.stage_at(seat)),
            Blow::Drain { seat } => self.drain_stage(seat)?,
            Blow::Slow { seat } => self.set_slow(seat, 40),
            Blow::KillLead { silent } => self.kill(self.lead(), silent),
            Blow::FreezeLead { twin } => {
                self.freeze(self.lead());
                let free = self.host_at(TWIN).is_none();
                if twin && free {
                    self.start_lead(TWIN)?;
                }
            }
            Blow::Full => self.set_full(true),
            Blow::Reset { a, b } => {
                for (a, b) in self.pairs(a, b) {
                    lock(&self.net).reset(a, b);
                }
            }
            Blow::Anew { a, b } => {
                for (a, b) in self.pairs(a, b) {
                    lock(&self.net).connect_anew(a, b);
                }
            }
            Blow::Cut { from, to, both } => {
                lock(&self.net).cut(from, to);
                if both {
                    lock(&self.net).cut(to, from);
                }
            }
        }
        lock(&self.net).after(lasts, Event::Ease { fault: number });
        Ok(())
    }

    /// What the so-many-th fault did ends.
    pub(super) fn ease(&mut self, number: usize) -> Result<(), Broken> {
        let blow = self.scenario.faults[number].blow.clone();
        self.note(Note::Fault { what: format!("{blow:?} ends") });
        match blow {
            Blow::Kill { seat, .. } | Blow::Drain { seat } => self.start_seat(seat)?,
            Blow::Freeze { seat } => self.thaw(self.stage_at(seat)),
            Blow::Slow { seat } => self.set_slow(seat, 1),
            Blow::KillLead { .. } => self.start_lead_again()?,
            Blow::FreezeLead { .. } => {
                for host in self.leads() {
                    self.thaw(Some(host));
                }
            }
            Blow::Full => {
                self.set_full(false);
                self.restart_leads()?;
            }
            Blow::Reset { .. } | Blow::Anew { .. } => {}
            Blow::Cut { from, to, both } => {
                lock(&self.net).heal(from, to);
                if both {
                    lock(&self.net).heal(to, from);
                }
            }
        }
        Ok(())
    }

    /// Every fault ends: what is down is started, what stands still goes on, what is cut is whole.
    pub(super) fn calm_down(&mut self) -> Result<(), Broken> {
        if self.calm {
            return Ok(());
        }
        self.note(Note::Fault { what: "every fault ends".to_owned() });
        for number in self.struck.clone() {
            self.ease(number)?;
        }
        for host in self.processes.keys().copied().collect::<Vec<_>>() {
            self.thaw(Some(host));
        }
        for seat in 0..self.scenario.seats.len() {
            self.start_seat(seat)?;
        }
        self.start_lead_again()?;
        self.calm = true;
        self.calm_at = self.now;
        Ok(())
    }

    /// Coordinators that could not write start again, as their operator is told to do.
    fn restart_leads(&mut self) -> Result<(), Broken> {
        for host in self.leads() {
            self.kill(Some(host), false);
        }
        self.start_lead_again()
    }

    /// Whether a coordinator lives that does not know of another one which leads.
    fn is_led(&self) -> bool {
        let leads = |process: &Process| matches!(process, Process::Lead(lead) if !lead.shell.ring.is_superseded());
        self.processes.values().any(leads)
    }

    /// Behind the last fault no coordinator may be left but some that stopped serving for another one, which
    /// died before it led: the operator starts one of them again, as it says itself.
    pub(super) fn replace_superseded(&mut self) -> Result<(), Broken> {
        if !self.calm || self.is_led() { Ok(()) } else { self.restart_leads() }
    }

    fn start_lead_again(&mut self) -> Result<(), Broken> {
        if self.is_led() {
            return Ok(());
        }
        // One that knows that it does not lead may still be there.
        let slot = [LEAD, TWIN].into_iter().find(|slot| self.host_at(*slot).is_none());
        slot.map_or(Ok(()), |slot| self.start_lead(slot))
    }

    fn start_seat(&mut self, seat: usize) -> Result<(), Broken> {
        if self.stage_at(seat).is_none() { self.start_stage(seat) } else { Ok(()) }
    }

    fn drain_stage(&mut self, seat: usize) -> Result<(), Broken> {
        let Some(host) = self.stage_at(seat) else { return Ok(()) };
        if let Some(Process::Stage(stage)) = self.processes.get_mut(&host)
            && !lock(&self.net).is_frozen(host)
        {
            stage.shell.leave();
            self.settle_stage(host)?;
        }
        Ok(())
    }

    fn set_slow(&mut self, seat: usize, factor: u32) {
        let Some(host) = self.stage_at(seat) else { return };
        if let Some(Process::Stage(stage)) = self.processes.get_mut(&host) {
            stage.pace.slow = factor;
        }
    }

    fn set_full(&mut self, full: bool) {
        if let Some(disk) = &self.disk {
            disk.lock().full = full;
        }
    }

    fn kill(&mut self, host: Option<HostId>, silent: bool) {
        let Some(host) = host else { return };
        self.note(Note::Process { host, what: "dies".to_owned() });
        lock(&self.net).kill(host, silent);
        if let Some(Process::Lead(mut lead)) = self.processes.remove(&host) {
            lead.die();
        }
    }

    fn freeze(&mut self, host: Option<HostId>) {
        let Some(host) = host else { return };
        if !lock(&self.net).is_frozen(host) {
            lock(&self.net).freeze(host);
        }
    }

    fn thaw(&mut self, host: Option<HostId>) {
        let Some(host) = host.filter(|host| lock(&self.net).is_frozen(*host)) else { return };
        self.note(Note::Process { host, what: "goes on".to_owned() });
        lock(&self.net).thaw(host);
        // What comes first, time or what waits on the link, is anybody's guess.
        let wait = Duration::from_micros(self.draw.below(2));
        self.wake_all(host, wait);
    }

    fn pairs(&self, a: Slot, b: Slot) -> Vec<(HostId, HostId)> {
        let (Some(a), Some(b)) = (self.host_at(a), self.host_at(b)) else { return Vec::new() };
        vec![(a, b)]
    }
}
