//! One run: everything that there is, and the loop that lets one event after another happen.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::clock::Simulated;
use crate::config::{LogSettings, MAX_SESSIONS};
use crate::coordinator::job::ModelFacts;
use crate::coordinator::log::Log;
use crate::coordinator::run::ModelShape;
use crate::ids::{SessionId, TokenId};
use crate::proto::codec::{self, Data};
use crate::proto::control::Control;
use crate::sim::agenda::{Event, HostId};
use crate::sim::check::{Broken, Invariant, Memory, Owner, broken};
use crate::sim::client::{SimClient, Step};
use crate::sim::disk::SimDisk;
use crate::sim::draw::Draw;
use crate::sim::lead::LeadProcess;
use crate::sim::net::{Net, SharedNet, SimLink, Slot, lock};
use crate::sim::plant::Plant;
use crate::sim::scenario::{LEAD, Scenario, When};
use crate::sim::stage::StageProcess;
use crate::sim::toy::{CONTEXT, DIM, EOS, HC, LAYERS, SharedToys, ToyEngine, VOCAB};
use crate::sim::trace::{Note, Trace};
use crate::transport::{Lane, Link, SEND_QUEUE_MAX};

/// How long sessions may take to end once every fault has.
const FINISH: Duration = Duration::from_secs(120);

/// How long a run goes on when every session has ended, to see that nothing is left of them.
pub(super) const SETTLE: Duration = Duration::from_secs(3);

/// Events at one moment, at most: more is a loop that does not get on.
const AT_ONCE_MAX: u64 = 20_000;

/// How long a client waits for a word before it asks again elsewhere.
const PATIENCE: Duration = Duration::from_secs(15);

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
            if seat.spare { ", a spare" } else { "" },
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
        self.read_clients(host)
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

    // Clients.

    fn on_client(&mut self, client: usize) -> Result<(), Broken> {
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
    fn read_clients(&mut self, host: HostId) -> Result<(), Broken> {
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

    // What is checked of everything.

    /// Looks at what was sent since the last event.
    fn look_at_sent(&mut self) -> Result<(), Broken> {
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
    fn look_at_end(&mut self) -> Result<(), Broken> {
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

    /// When every session has ended and a while went by, nothing is left of them.
    fn look_at_leaks(&mut self) -> Result<(), Broken> {
        let ours: Vec<SessionId> = self.owners.keys().map(|(_, session)| *session).collect();
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
                    if let Some((id, _)) = lead.sessions().find(|(id, _)| ours.contains(id))
                        && self.lead() == Some(*host)
                    {
                        return broken(Invariant::Leak, format!("process {host} holds session {id} at the end"));
                    }
                    if self.struck.is_empty() && !lead.breaks().is_empty() {
                        return broken(
                            Invariant::Slow,
                            format!("nothing failed, and rings broke: {:?}", lead.breaks()),
                        );
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whose a session is: with a log, ids are never used again.
fn owner(logged: bool, host: HostId, session: SessionId) -> Owner {
    (if logged { 0 } else { host }, session)
}
