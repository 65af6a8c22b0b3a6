//! What a seed stands for: the machines, their paths, what clients ask, and which faults strike when.

use std::time::Duration;

use libp2p::PeerId;

use crate::config::{Admit, CoordinatorSettings, MAX_SESSIONS, StageSettings};
use crate::coordinator::job::{Mode, Request};
use crate::ids::{LayerRange, TokenId, WireEncoding};
use crate::node::journal::JournalConfig;
use crate::node::membership::Obey;
use crate::proto::control::Sampling;
use crate::sim::draw::Draw;
use crate::sim::net::{Slot, address};
use crate::sim::stage::Pace;
use crate::sim::toy::{LAYERS, VOCAB};
use crate::sim::world::SETTLE;
use crate::transport::scope::Scope;

/// The machine of the coordinator, and that of one that is started beside it.
pub(super) const LEAD: Slot = 0;
pub(super) const TWIN: Slot = 100;

/// Longer than stages keep state of sessions that no ring went on with.
const SETTLE_LONG: Duration = Duration::from_secs(200);

/// Where the first stage is.
pub(super) const FIRST_STAGE: Slot = 1;

/// A machine with a stage on it.
#[derive(Debug, Clone)]
pub(super) struct Seat {
    pub(super) slot: Slot,
    pub(super) peer: PeerId,
    pub(super) range: LayerRange,
    pub(super) spare: bool,
    pub(super) shadow: bool,
    pub(super) pace: Pace,
}

/// What a fault does; stages are named by their place in [`Scenario::seats`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Blow {
    /// A stage dies and is started again later.
    Kill { seat: usize, silent: bool },
    /// A stage stands still.
    Freeze { seat: usize },
    /// A stage is asked to finish and leave, and is started again later.
    Drain { seat: usize },
    /// A stage computes slowly.
    Slow { seat: usize },
    /// The coordinator dies and is started again later.
    KillLead { silent: bool },
    /// The coordinator stands still; `twin`: another one is started meanwhile.
    FreezeLead { twin: bool },
    /// Nothing more fits on the log's disk.
    Full,
    /// A connection between two machines is reset.
    Reset { a: Slot, b: Slot },
    /// One is made anew, as by a dial from the other side.
    Anew { a: Slot, b: Slot },
    /// Nothing gets through from one machine to another; `both`: nor back.
    Cut { from: Slot, to: Slot, both: bool },
}

/// When a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    At(Duration),
    /// Behind so many events that are no heartbeats.
    Step(u64),
}

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) when: When,
    pub(super) blow: Blow,
    pub(super) lasts: Duration,
}

/// What a client does.
#[derive(Debug, Clone)]
pub(super) struct Visit {
    pub(super) at: Duration,
    pub(super) request: Request,
    pub(super) leaves_at: Option<usize>,
}

/// Everything that is drawn before a run.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) lead: PeerId,
    pub(super) seats: Vec<Seat>,
    pub(super) logged: bool,
    pub(super) stages_dial: bool,
    pub(super) heartbeat: Duration,
    pub(super) dead_after: Duration,
    pub(super) visits: Vec<Visit>,
    pub(super) faults: Vec<Fault>,
    /// When every fault ends.
    pub(super) calm: Duration,
    /// How long it goes on when every session has ended.
    pub(super) settle: Duration,
    /// Delay in microseconds of each direction, by machine.
    pub(super) paths: Vec<(Slot, Slot, Duration, u64)>,
    in_flight_max: u32,
    prefill_chunk: u32,
    encoding: WireEncoding,
    cancel_out_of_band: bool,
    log_file_bytes: u64,
    journal_bytes: u64,
}

impl Scenario {
    /// What a seed stands for.
    pub(super) fn draw(draw: &mut Draw) -> Self {
        let seats = seats(draw);
        let slots: Vec<Slot> = [LEAD, TWIN].into_iter().chain(seats.iter().map(|seat| seat.slot)).collect();
        let paths = paths(draw, &slots);
        let calm = draw.millis(6_000, 20_000);
        let logged = draw.chance(75);
        let (heartbeat, dead_after) = if draw.chance(50) { (300, 3_000) } else { (100, 1_000) };
        let visits = (0..draw.between(1, 4)).map(|_| visit(draw, calm)).collect();
        let mut faults = Vec::new();
        // One of six runs has none: what is slow then must not be taken for dead.
        if !draw.chance(16) {
            let count = draw.between(1, 6);
            faults.extend((0..count).map(|_| fault(draw, &seats, (logged, calm))));
        }
        // One of thirty has slow stages and nothing else, which are no reason for anything either.
        if draw.chance(3) {
            for fault in &mut faults {
                fault.blow = Blow::Slow { seat: draw.index(seats.len()) };
            }
        }
        let mut scenario = Self {
            lead: peer(draw),
            logged,
            stages_dial: draw.chance(50),
            heartbeat: Duration::from_millis(heartbeat),
            dead_after: Duration::from_millis(dead_after),
            visits,
            faults,
            calm,
            // Now and then for longer than stages keep sessions that no ring went on with.
            settle: if draw.chance(4) { SETTLE_LONG } else { SETTLE },
            paths,
            in_flight_max: draw.count(1, 12),
            prefill_chunk: draw.count(2, 16),
            encoding: if draw.chance(50) { WireEncoding::Fp8 } else { WireEncoding::Bf16 },
            cancel_out_of_band: draw.chance(85),
            log_file_bytes: draw.between(2_000, 40_000),
            journal_bytes: if draw.chance(70) { 1 << 20 } else { draw.between(0, 20_000) },
            seats,
        };
        for seat in scenario.seats.iter_mut().filter(|seat| seat.spare) {
            seat.shadow = draw.chance(60);
        }
        scenario
    }

    /// How a stage serves.
    pub(super) fn stage_settings(&self, seat: &Seat) -> StageSettings {
        StageSettings {
            coordinator: self.stages_dial.then(|| address(LEAD, self.lead)),
            obey: Obey::Peers([self.lead].into()),
            max_sessions: MAX_SESSIONS,
            encodings: vec![WireEncoding::Fp8, WireEncoding::Bf16],
            announce: Vec::new(),
            dial_scope: Scope::Public,
            spare: seat.spare,
            shadow: seat.shadow,
            heartbeat: self.heartbeat,
            dead_after: self.dead_after,
            journal: JournalConfig { memory: self.journal_bytes, spill: None },
        }
    }

    /// How a coordinator drives; a twin dials every stage, as they know its address only by that.
    pub(super) fn lead_settings(&self, slot: Slot) -> CoordinatorSettings {
        let all = self.seats.iter().map(|seat| address(seat.slot, seat.peer));
        CoordinatorSettings {
            stages: if self.stages_dial && slot == LEAD { Vec::new() } else { all.collect() },
            admit: Admit::Anyone,
            encoding: self.encoding,
            in_flight_max: self.in_flight_max,
            prefill_chunk: self.prefill_chunk,
            cancel_out_of_band: self.cancel_out_of_band,
            heal_wait: Duration::from_secs(600),
            reattach: Duration::from_secs(600),
            prefill_deadline: Duration::from_secs(30),
            heartbeat: self.heartbeat,
            dead_after: self.dead_after,
            ..CoordinatorSettings::default()
        }
    }

    /// Bytes from which on the log begins its next file.
    pub(super) fn log_file_bytes(&self) -> u64 {
        self.log_file_bytes
    }
}

/// A peer's name, the same for the same draws.
fn peer(draw: &mut Draw) -> PeerId {
    // A SHA-256 multihash: its code, its length, its digest.
    let mut bytes = vec![0x12, 0x20];
    bytes.extend((0..4).flat_map(|_| draw.next().to_le_bytes()));
    PeerId::from_bytes(&bytes).unwrap_or_else(|_| PeerId::random())
}

fn seats(draw: &mut Draw) -> Vec<Seat> {
    let count = draw.between(2, 4);
    let mut cuts: Vec<u16> = Vec::new();
    while cuts.len() as u64 + 1 < count {
        let cut = u16::try_from(draw.between(1, u64::from(LAYERS) - 1)).unwrap_or(1);
        if !cuts.contains(&cut) {
            cuts.push(cut);
        }
    }
    cuts.extend([0, LAYERS]);
    cuts.sort_unstable();
    let mut ranges: Vec<(LayerRange, bool)> =
        cuts.windows(2).filter_map(|edge| Some((LayerRange::new(edge[0], edge[1]).ok()?, false))).collect();
    for _ in 0..draw.below(3) {
        let (range, _) = ranges[draw.index(ranges.len())];
        ranges.push((range, draw.chance(70)));
    }
    let seat = |(at, (range, spare)): (u16, (LayerRange, bool))| Seat {
        slot: FIRST_STAGE + at,
        peer: peer(draw),
        range,
        spare,
        shadow: false,
        pace: Pace {
            pass: draw.micros(200, 4_000),
            position: draw.micros(20, 300),
            hiccup: draw.millis(1, 60),
            slow: 1,
        },
    };
    (0..).zip(ranges).map(seat).collect()
}

fn paths(draw: &mut Draw, slots: &[Slot]) -> Vec<(Slot, Slot, Duration, u64)> {
    let far = draw.chance(50);
    let mut paths = Vec::new();
    for from in slots {
        for to in slots.iter().filter(|to| *to != from) {
            let (delay, jitter) = if far { (draw.millis(2, 40), 20_000) } else { (draw.micros(50, 1_000), 1_000) };
            paths.push((*from, *to, delay, draw.between(1, jitter)));
        }
    }
    paths
}

fn visit(draw: &mut Draw, calm: Duration) -> Visit {
    let length = if draw.chance(30) { draw.between(20, 90) } else { draw.between(1, 12) };
    let prompt = (0..length).map(|_| TokenId(draw.count(0, VOCAB - 1))).collect();
    let max_new = draw.count(1, 70);
    let mode = match draw.below(4) {
        0 => Some(Mode::Plain),
        1 => None,
        _ => Some(Mode::Pipelined),
    };
    let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };
    let ignore_eos = draw.chance(60);
    let request = Request { prompt, max_new, sampling, mode, encoding: None, score: None, logprobs: None, ignore_eos };
    let before = u64::try_from(calm.as_micros()).unwrap_or(u64::MAX) / 2;
    let leaves_at = draw.chance(20).then(|| draw.index(max_new as usize));
    Visit { at: draw.micros(0, before), request, leaves_at }
}

fn fault(draw: &mut Draw, seats: &[Seat], (logged, calm): (bool, Duration)) -> Fault {
    let seat = draw.index(seats.len());
    let some_slot = |draw: &mut Draw| if draw.chance(25) { LEAD } else { seats[draw.index(seats.len())].slot };
    let (a, b) = (some_slot(draw), seats[seat].slot);
    let both = draw.chance(50);
    let silent = draw.chance(40);
    let blow = match draw.below(100) {
        0..20 => Blow::Kill { seat, silent },
        20..35 => Blow::Freeze { seat },
        35..40 => Blow::Drain { seat },
        40..45 => Blow::Slow { seat },
        45..55 => Blow::KillLead { silent },
        55..63 => Blow::FreezeLead { twin: logged && draw.chance(60) },
        63..68 if logged => Blow::Full,
        63..78 if a != b => Blow::Reset { a, b },
        78..84 if a != b => Blow::Anew { a, b },
        84..100 if a != b => Blow::Cut { from: a, to: b, both },
        _ => Blow::Kill { seat, silent: !silent },
    };
    let most = u64::try_from(calm.as_micros()).unwrap_or(u64::MAX);
    let when = if draw.chance(50) { When::At(draw.micros(100_000, most)) } else { When::Step(draw.between(20, 1_500)) };
    let lasts = if draw.chance(50) { draw.millis(50, 1_500) } else { draw.millis(1_500, 9_000) };
    Fault { when, blow, lasts }
}
