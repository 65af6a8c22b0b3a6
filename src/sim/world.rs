//! One run: everything that there is, and the loop that lets one event after another happen.

mod clients;
mod looks;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::clock::Simulated;
use crate::config::LogSettings;
use crate::coordinator::job::ModelFacts;
use crate::coordinator::log::Log;
use crate::coordinator::run::ModelShape;
use crate::ids::{SessionId, TokenId};
use crate::sim::agenda::{Event, HostId};
use crate::sim::check::{Broken, Invariant, Memory, Owner, broken};
use crate::sim::client::SimClient;
use crate::sim::disk::SimDisk;
use crate::sim::draw::Draw;
use crate::sim::lead::LeadProcess;
use crate::sim::net::{Net, SharedNet, SimLink, Slot, lock};
use crate::sim::plant::Plant;
use crate::sim::scenario::{LEAD, Scenario, When};
use crate::sim::stage::StageProcess;
use crate::sim::toy::{CONTEXT, DIM, EOS, HC, LAYERS, SharedToys, ToyEngine, VOCAB};
use crate::sim::trace::{Note, Trace};
use crate::transport::Link;

/// How long a run goes on when every session has ended, to see that nothing is left of them.
pub(super) const SETTLE: Duration = Duration::from_secs(3);

/// Events at one moment, at most: more is a loop that does not get on.
const AT_ONCE_MAX: u64 = 20_000;

/// Digest of the toy model.
const DIGEST: [u8; 32] = [7; 32];

/// A process that lives.
pub(super) enum Process {
    Stage(Box<StageProcess>),
    Lead(Box<LeadProcess>),
}

/// A run.
pub(super) struct World {
    pub(super) scenario: Scenario,
    plant: Option<Plant>,
    pub(super) now: Duration,
    clock: Simulated,
    pub(super) net: SharedNet,
    pub(super) draw: Draw,
    pub(super) processes: BTreeMap<HostId, Process>,
    slots: BTreeMap<HostId, Slot>,
    /// When each process is called next, and the number of that call; of workers too.
    timers: BTreeMap<HostId, (Duration, u64)>,
    workers: BTreeMap<HostId, (Duration, u64)>,
    writing: BTreeMap<HostId, bool>,
    pub(super) disk: Option<SimDisk>,
    toys: SharedToys,
    clients: Vec<SimClient>,
    heard: Vec<Duration>,
    owners: BTreeMap<Owner, usize>,
    memory: Memory,
    pub(super) trace: Trace,
    pub(super) by_step: Vec<(u64, usize)>,
    /// Faults that struck.
    pub(super) struck: BTreeSet<usize>,
    pub(super) calm: bool,
    pub(super) calm_at: Duration,
    over_at: Option<Duration>,
    serial: u64,
}

/// What a run that held every invariant did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// Events, heartbeats among them.
    pub events: u64,
    /// Faults that struck.
    pub faults: u32,
    /// Tokens that clients were told.
    pub tokens: u64,
    /// Times that a session went on on another ring.
    pub heals: u64,
    /// Draft blocks that were compared.
    pub blocks: u64,
    /// Simulated time.
    pub simulated: Duration,
    /// The same for the same run, event by event.
    pub sum: u64,
}

impl Summary {
    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.faults += other.faults;
        self.tokens += other.tokens;
        self.heals += other.heals;
        self.blocks += other.blocks;
        self.simulated += other.simulated;
        self.sum = self.sum.wrapping_add(other.sum);
    }
}

impl World {
    pub(super) fn new(seed: u64, plant: Option<Plant>, shown: usize) -> Self {
        let mut draw = Draw::new(seed);
        let scenario = Scenario::draw(&mut draw.fork());
        let clock = Simulated::begin();
        let mut net = Net::new(draw.fork());
        for (from, to, delay, jitter_us) in &scenario.paths {
            net.set_path(*from, *to, *delay, *jitter_us);
        }
        let disk = scenario.logged.then(|| SimDisk::new(draw.fork()));
        let clients = scenario.visits.iter().map(|visit| SimClient::new(visit.request.clone(), visit.leaves_at));
        let mut by_step: Vec<(u64, usize)> = Vec::new();
        for (at, fault) in scenario.faults.iter().enumerate() {
            if let When::Step(step) = fault.when {
                by_step.push((step, at));
            }
        }
        by_step.sort_unstable_by(|a, b| b.cmp(a));
        let toys = SharedToys::default();
        toys.lock().unwrap_or_else(PoisonError::into_inner).forgets_windows =
            plant == Some(Plant::DraftWindowNotRebuilt);
        Self {
            clients: clients.collect(),
            heard: vec![Duration::ZERO; scenario.visits.len()],
            plant,
            now: Duration::ZERO,
            clock,
            net: Arc::new(std::sync::Mutex::new(net)),
            draw,
            processes: BTreeMap::new(),
            slots: BTreeMap::new(),
            timers: BTreeMap::new(),
            workers: BTreeMap::new(),
            writing: BTreeMap::new(),
            disk,
            toys,
            owners: BTreeMap::new(),
            memory: Memory::default(),
            trace: Trace::new(shown),
            by_step,
            struck: BTreeSet::new(),
            calm: false,
            calm_at: Duration::ZERO,
            over_at: None,
            serial: 0,
            scenario,
        }
    }

    /// Lets everything happen.
    pub(super) fn run(&mut self) -> Result<Summary, Broken> {
        self.start_lead(LEAD)?;
        for seat in 0..self.scenario.seats.len() {
            self.start_stage(seat)?;
        }
        self.plan_faults();
        for (client, visit) in self.scenario.visits.iter().enumerate() {
            lock(&self.net).agenda.put(visit.at, Event::Client { client });
        }
        let mut at_once = 0;
        while self.over_at.is_none_or(|over| self.now < over) {
            let Some((at, event)) = lock(&self.net).agenda.pop() else {
                return broken(Invariant::Liveness, "nothing is going to happen any more");
            };
            at_once = if at == self.now { at_once + 1 } else { 0 };
            if at_once > AT_ONCE_MAX {
                return broken(Invariant::Process, format!("{at_once} events at one moment, the last one {event:?}"));
            }
            self.now = at;
            self.clock.set(at);
            lock(&self.net).now = at;
            self.happen(event)?;
            self.strike_by_step()?;
            self.look_at_sent()?;
            self.look_at_end()?;
            self.wait_for_leaks();
        }
        self.look_at_leaks()?;
        let told: usize = self.clients.iter().map(|client| client.told.len()).sum();
        Ok(Summary {
            events: self.trace.events,
            faults: u32::try_from(self.struck.len()).unwrap_or(u32::MAX),
            tokens: told as u64,
            heals: self.clients.iter().map(|client| u64::from(client.heals())).sum(),
            blocks: self.memory.blocks,
            simulated: self.now,
            sum: self.trace.sum(),
        })
    }

    fn happen(&mut self, event: Event) -> Result<(), Broken> {
        match event {
            Event::Deliver { connection, way, lane, body, serial } => {
                lock(&self.net).deliver((connection, way), lane, body, serial);
            }
            Event::End { connection, way, reason, sure } => lock(&self.net).end((connection, way), reason, sure),
            Event::Dial { dial } => lock(&self.net).step_dial(dial),
            Event::Quiet { from, to, number } => lock(&self.net).quiet(from, to, number),
            Event::Still { host, number } => lock(&self.net).still(host, number),
            Event::Turn { host } => self.turn(host)?,
            Event::Timer { host, number } => {
                if self.timers.get(&host).is_some_and(|(_, current)| *current == number) && !self.stands_still(host) {
                    self.timers.remove(&host);
                    self.on_timer(host)?;
                }
            }
            Event::Worker { host, number } => {
                if self.workers.get(&host).is_some_and(|(_, current)| *current == number) && !self.stands_still(host) {
                    self.workers.remove(&host);
                    self.work(host)?;
                }
            }
            Event::Disk { host } => self.on_disk(host)?,
            Event::Client { client } => self.on_client(client)?,
            Event::Strike { fault } => self.strike(fault)?,
            Event::Ease { fault } => {
                if !self.calm {
                    self.ease(fault)?;
                }
            }
            Event::Calm => self.calm_down()?,
        }
        Ok(())
    }

    pub(super) fn note(&mut self, note: Note) {
        self.trace.note(self.now, note);
    }

    /// The last events and how clients stand, for a failure.
    pub(super) fn story(&self) -> Vec<String> {
        let mut lines = self.trace.lines();
        lines.extend(self.clients.iter().map(SimClient::describe));
        lines
    }

    fn stands_still(&self, host: HostId) -> bool {
        lock(&self.net).is_frozen(host)
    }

    // Processes.

    pub(super) fn host_at(&self, slot: Slot) -> Option<HostId> {
        self.processes.keys().rev().find(|host| self.slots.get(host) == Some(&slot)).copied()
    }

    pub(super) fn stage_at(&self, seat: usize) -> Option<HostId> {
        self.host_at(self.scenario.seats[seat].slot)
    }

    /// Coordinators that live, the newest first.
    pub(super) fn leads(&self) -> Vec<HostId> {
        let leads = self.processes.iter().filter(|(_, process)| matches!(process, Process::Lead(_)));
        leads.map(|(host, _)| *host).rev().collect()
    }

    /// The newest one that does not know of another that leads; else the newest.
    pub(super) fn lead(&self) -> Option<HostId> {
        let leads = self.leads();
        let serves = |host: &&HostId| match self.processes.get(host) {
            Some(Process::Lead(lead)) => !lead.shell.ring.is_superseded(),
            Some(Process::Stage(_)) | None => false,
        };
        leads.iter().find(serves).or(leads.first()).copied()
    }

    pub(super) fn start_stage(&mut self, seat: usize) -> Result<(), Broken> {
        let seat = self.scenario.seats[seat].clone();
        let node = lock(&self.net).add_host(seat.peer, seat.slot);
        let link = SimLink::new(&self.net, node, seat.slot);
        let engine = Box::new(ToyEngine::new(seat.range, node.start, Arc::clone(&self.toys)));
        let settings = self.scenario.stage_settings(&seat);
        let stage = StageProcess::new((link, DIGEST), engine, settings, seat.pace, self.draw.fork())?;
        let what = format!(
            "starts as stage {}{} on machine {}",
            seat.range,
            match (seat.spare, seat.shadow) {
                (_, true) => ", a shadow",
                (true, false) => ", a spare",
                (false, false) => "",
            },
            seat.slot
        );
        self.note(Note::Process { host: node.start, what });
        self.slots.insert(node.start, seat.slot);
        self.processes.insert(node.start, Process::Stage(Box::new(stage)));
        self.wake_all(node.start, Duration::ZERO);
        Ok(())
    }

    pub(super) fn start_lead(&mut self, slot: Slot) -> Result<(), Broken> {
        let node = lock(&self.net).add_host(self.scenario.lead, slot);
        let link: Arc<dyn Link> = SimLink::new(&self.net, node, slot);
        let log = match &self.disk {
            None => None,
            Some(disk) => {
                let settings =
                    LogSettings { file_bytes: self.scenario.log_file_bytes(), ..LogSettings::new("/log".into()) };
                match Log::open_in(Arc::new(disk.clone()), &settings, DIGEST, self.draw.next()) {
                    Ok(log) => Some((log, disk.clone())),
                    Err(crate::coordinator::log::LogError::Create { .. }) => {
                        // The disk is full: the operator tries again.
                        lock(&self.net).kill(node.start, false);
                        return Ok(());
                    }
                    Err(error) => return broken(Invariant::Log, error.to_string()),
                }
            }
        };
        let model = ModelFacts { name: "toy".to_owned(), vocab: VOCAB, eos: vec![EOS], context: CONTEXT };
        let shape = ModelShape { layers: LAYERS, hc: HC, dim: DIM, probe_token: TokenId(0), digest: DIGEST };
        let lead = LeadProcess::new(link, (model, shape), self.scenario.lead_settings(slot), log);
        let what = format!("starts as a coordinator on machine {slot}");
        self.note(Note::Process { host: node.start, what });
        self.slots.insert(node.start, slot);
        self.processes.insert(node.start, Process::Lead(Box::new(lead)));
        self.settle_lead(node.start)
    }

    /// Calls everything of a process soon.
    pub(super) fn wake_all(&mut self, host: HostId, wait: Duration) {
        self.timers.remove(&host);
        self.workers.remove(&host);
        self.call_timer(host, self.now + wait);
        self.call_worker(host, self.now + wait);
        lock(&self.net).after(Duration::ZERO, Event::Disk { host });
        lock(&self.net).after(Duration::ZERO, Event::Turn { host });
    }

    fn call_timer(&mut self, host: HostId, at: Duration) {
        if self.timers.get(&host).is_some_and(|(due, _)| *due <= at) {
            return;
        }
        self.serial += 1;
        self.timers.insert(host, (at, self.serial));
        lock(&self.net).agenda.put(at, Event::Timer { host, number: self.serial });
    }

    fn call_worker(&mut self, host: HostId, at: Duration) {
        if self.workers.get(&host).is_some_and(|(due, _)| *due <= at) {
            return;
        }
        self.serial += 1;
        self.workers.insert(host, (at, self.serial));
        lock(&self.net).agenda.put(at, Event::Worker { host, number: self.serial });
    }

    fn due(&self, at: Instant) -> Duration {
        self.clock.elapsed(at).max(self.now)
    }

    /// A process takes what came.
    fn turn(&mut self, host: HostId) -> Result<(), Broken> {
        while !self.stands_still(host) {
            // Which of what waits comes first is anybody's guess.
            let dial_first = self.draw.chance(50);
            let took = match self.processes.get_mut(&host) {
                None => return Ok(()),
                Some(Process::Stage(stage)) => dial_first && stage.dialled(),
                Some(Process::Lead(lead)) => lead.on_commands() || (dial_first && lead.dialled()),
            };
            let event = if took { None } else { lock(&self.net).take(host) };
            let took = took || event.is_some();
            if let Some(event) = event {
                self.note(Note::Link { host, event: event.clone() });
                match self.processes.get_mut(&host) {
                    Some(Process::Stage(stage)) => stage.on_link(event, self.plant)?,
                    Some(Process::Lead(lead)) => lead.on_link(event, self.plant)?,
                    None => {}
                }
            }
            let took = took
                || match self.processes.get_mut(&host) {
                    Some(Process::Stage(stage)) => stage.dialled(),
                    Some(Process::Lead(lead)) => lead.dialled(),
                    None => false,
                };
            if !took {
                return Ok(());
            }
            self.settle(host)?;
        }
        Ok(())
    }

    fn on_timer(&mut self, host: HostId) -> Result<(), Broken> {
        match self.processes.get_mut(&host) {
            Some(Process::Stage(stage)) => stage.on_timer(),
            Some(Process::Lead(lead)) => lead.shell.handle_timeout(),
            None => return Ok(()),
        }
        self.settle(host)
    }

    fn settle(&mut self, host: HostId) -> Result<(), Broken> {
        match self.processes.get(&host) {
            Some(Process::Stage(_)) => self.settle_stage(host),
            Some(Process::Lead(_)) => self.settle_lead(host),
            None => Ok(()),
        }
    }

    /// What follows anything that happened to a stage's shell.
    pub(super) fn settle_stage(&mut self, host: HostId) -> Result<(), Broken> {
        let Some(Process::Stage(stage)) = self.processes.get_mut(&host) else { return Ok(()) };
        let left = stage.drain()?;
        stage.check(&mut self.memory)?;
        let (timer, inputs) = (stage.shell.poll_timeout(), stage.has_inputs());
        if left {
            self.note(Note::Process { host, what: "has left".to_owned() });
            self.processes.remove(&host);
            lock(&self.net).kill(host, false);
            // One that left after the last fault is started again by its operator.
            let seat = self.scenario.seats.iter().position(|seat| self.slots.get(&host) == Some(&seat.slot));
            return match seat.filter(|_| self.calm) {
                Some(seat) => self.start_stage(seat),
                None => Ok(()),
            };
        }
        if let Some(at) = timer {
            let at = self.due(at);
            self.call_timer(host, at);
        }
        if inputs {
            let wait = self.draw.micros(1, 60);
            self.call_worker(host, self.now + wait);
        }
        Ok(())
    }

    fn work(&mut self, host: HostId) -> Result<(), Broken> {
        let Some(Process::Stage(stage)) = self.processes.get_mut(&host) else { return Ok(()) };
        let (next, positions) = stage.work();
        stage.check(&mut self.memory)?;
        if positions > 0 {
            self.note(Note::Pass { host, positions });
        }
        if let Some(at) = next {
            let at = self.due(at);
            self.call_worker(host, at);
        }
        Ok(())
    }

    fn settle_lead(&mut self, host: HostId) -> Result<(), Broken> {
        let (plant, logged) = (self.plant, self.disk.is_some());
        let Some(Process::Lead(lead)) = self.processes.get_mut(&host) else { return Ok(()) };
        lead.drain(plant);
        lead.check(&mut self.memory, |id| owner(logged, host, id))?;
        let (timer, writes) = (lead.shell.poll_timeout(), lead.writes());
        let at = self.due(timer);
        self.call_timer(host, at);
        if writes && !self.writing.get(&host).copied().unwrap_or(false) {
            self.writing.insert(host, true);
            let wait = self.draw.micros(20, 3_000);
            lock(&self.net).after(wait, Event::Disk { host });
        }
        self.read_clients(host)?;
        self.replace_superseded()
    }

    fn on_disk(&mut self, host: HostId) -> Result<(), Broken> {
        if self.stands_still(host) {
            return Ok(());
        }
        self.writing.insert(host, false);
        let Some(Process::Lead(lead)) = self.processes.get_mut(&host) else { return Ok(()) };
        let Some(what) = lead.on_disk() else { return Ok(()) };
        self.note(Note::Logged { host, what });
        if let Some(why) = self.disk.as_ref().and_then(|disk| disk.lock().contradiction.clone()) {
            return broken(Invariant::Log, why);
        }
        self.settle_lead(host)
    }
}

/// Whose a session is: with a log, ids are never used again.
fn owner(logged: bool, host: HostId, session: SessionId) -> Owner {
    (if logged { 0 } else { host }, session)
}
