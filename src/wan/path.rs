//! The network in one direction, pure: loss, then a queue before a rate, then a delay.
//!
//! Packets go in with the time, and come out of [`Path::poll_transmit`] when they are due; all
//! that is random comes from a seed. What happens inside happens at its own time, however late the
//! path is asked: a rate does not drift, and the same packets at the same times fare the same.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::ops::AddAssign;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::draw::Draws;
use super::quantity::Chance;
use super::settings::{DELAY_MAX, JitterShape, PathSettings};

/// Bytes of IPv4 and UDP headers, which a packet adds to its payload under a rate and in its queue.
pub const HEADER_BYTES: u64 = 28;

/// Bytes that a path holds at most, queued and under way, with `PACKET_COST` a packet.
pub const HELD_BYTES_MAX: u64 = 32 << 20;

/// What a packet costs to hold beside its payload, in bytes.
const PACKET_COST: u64 = 96;

/// What became of the packets of a path. Bytes are of payload.
///
/// `entered` is the sum of `forwarded`, `lost`, `cut`, `queue_dropped`, `overflowed`,
/// `queue_packets` and `flying`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PathStats {
    /// Packets that came.
    pub entered: u64,
    /// Their bytes.
    pub entered_bytes: u64,
    /// Packets that came out.
    pub forwarded: u64,
    /// Their bytes.
    pub forwarded_bytes: u64,
    /// Packets lost by chance.
    pub lost: u64,
    /// Packets that a cut swallowed.
    pub cut: u64,
    /// Packets that found the queue full.
    pub queue_dropped: u64,
    /// Packets that found [`HELD_BYTES_MAX`] held: no part of what is emulated.
    pub overflowed: u64,
    /// Packets held back so that others overtake.
    pub reordered: u64,
    /// Packets that wait for the rate, the one being sent included.
    pub queue_packets: u64,
    /// Their bytes.
    pub queue_bytes: u64,
    /// Most bytes that ever were.
    pub queue_bytes_peak: u64,
    /// Packets under way.
    pub flying: u64,
}

impl AddAssign for PathStats {
    fn add_assign(&mut self, other: Self) {
        self.entered += other.entered;
        self.entered_bytes += other.entered_bytes;
        self.forwarded += other.forwarded;
        self.forwarded_bytes += other.forwarded_bytes;
        self.lost += other.lost;
        self.cut += other.cut;
        self.queue_dropped += other.queue_dropped;
        self.overflowed += other.overflowed;
        self.reordered += other.reordered;
        self.queue_packets += other.queue_packets;
        self.queue_bytes += other.queue_bytes;
        self.queue_bytes_peak = self.queue_bytes_peak.max(other.queue_bytes_peak);
        self.flying += other.flying;
    }
}

/// A packet on its way through the bottleneck.
#[derive(Debug)]
struct Sending {
    packet: Vec<u8>,
    done: Instant,
}

/// One direction of an emulated network.
#[derive(Debug)]
pub struct Path {
    settings: PathSettings,
    cut: bool,
    draws: Draws,
    /// Whether a run of losses is on.
    losing: bool,
    sending: Option<Sending>,
    waiting: VecDeque<Vec<u8>>,
    /// Of those that wait, with headers.
    waiting_bytes: u64,
    /// Under way, by the time they are due and the order they came in.
    flying: BTreeMap<(Instant, u64), Vec<u8>>,
    /// Packets that ever were under way.
    flown: u64,
    /// When the last packet that keeps its place is due.
    last_due: Option<Instant>,
    held: u64,
    stats: PathStats,
}

impl Path {
    /// A path that nothing has entered.
    #[must_use]
    pub fn new(settings: PathSettings, seed: u64) -> Self {
        Self {
            settings,
            cut: false,
            draws: Draws::new(seed),
            losing: false,
            sending: None,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            flying: BTreeMap::new(),
            flown: 0,
            last_due: None,
            held: 0,
            stats: PathStats::default(),
        }
    }

    /// Takes in a packet.
    pub fn handle_packet(&mut self, packet: &[u8], now: Instant) {
        self.advance(now);
        self.stats.entered += 1;
        self.stats.entered_bytes += size(packet);
        if self.cut {
            self.stats.cut += 1;
        } else if self.loses() {
            self.stats.lost += 1;
        } else if self.held + cost(packet) > HELD_BYTES_MAX {
            self.stats.overflowed += 1;
        } else {
            self.admit(packet, now);
        }
    }

    /// A packet that is due; call until there is none.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.advance(now);
        let first = self.flying.first_entry().filter(|first| first.key().0 <= now)?;
        let packet = first.remove();
        self.held -= cost(&packet);
        self.stats.forwarded += 1;
        self.stats.forwarded_bytes += size(&packet);
        Some(packet)
    }

    /// When to ask for a packet again; `None` while the path is empty.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let sent = self.sending.as_ref().map(|sending| sending.done);
        let due = self.flying.first_key_value().map(|(key, _)| key.0);
        sent.into_iter().chain(due).min()
    }

    /// Changes what the path does, from now on.
    ///
    /// Packets under way keep their time, and where order is kept, later ones wait for them. A new
    /// rate holds for what waits, and for the rest of the packet being sent; a new queue for what
    /// comes.
    pub fn set(&mut self, settings: PathSettings, now: Instant) {
        self.advance(now);
        let (old, new) = (self.settings.rate, settings.rate);
        self.settings = settings;
        match (&mut self.sending, old, new) {
            (Some(sending), Some(old), Some(new)) => {
                let left = sending.done.saturating_duration_since(now);
                sending.done = now + slowed(left, old, new);
            }
            (sending @ Some(_), _, None) => {
                let first = sending.take().map(|sending| sending.packet);
                self.waiting_bytes = 0;
                for packet in first.into_iter().chain(std::mem::take(&mut self.waiting)) {
                    self.launch(packet, now);
                }
            }
            // Without a rate nothing is being sent.
            (Some(_), None, Some(_)) | (None, _, _) => {}
        }
    }

    /// Cuts the path, or heals it. What is inside is lost when it is cut.
    pub fn set_cut(&mut self, cut: bool, now: Instant) {
        self.advance(now);
        self.cut = cut;
        if cut {
            let stats = self.stats();
            self.stats.cut += stats.queue_packets + stats.flying;
            self.sending = None;
            self.waiting.clear();
            self.waiting_bytes = 0;
            self.flying.clear();
            self.last_due = None;
            self.held = 0;
        }
    }

    /// Whether it is cut.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// What it does.
    #[must_use]
    pub fn settings(&self) -> &PathSettings {
        &self.settings
    }

    /// What became of its packets, as of the last call with a time.
    #[must_use]
    pub fn stats(&self) -> PathStats {
        let waiting = self.waiting.len() as u64;
        let sending = self.sending.as_ref().map(|sending| size(&sending.packet));
        PathStats {
            queue_packets: waiting + u64::from(sending.is_some()),
            queue_bytes: sending.unwrap_or(0) + self.waiting_bytes - waiting * HEADER_BYTES,
            flying: self.flying.len() as u64,
            ..self.stats
        }
    }

    fn loses(&mut self) -> bool {
        let PathSettings { loss, burst, .. } = self.settings;
        if burst <= 1 {
            self.losing = false;
            return self.draws.happens(loss);
        }
        // Two states: a run ends with one chance in `burst`, and begins so often that `loss` of all
        // packets are in runs.
        let turns = if self.losing { Chance::one_in(burst) } else { loss.odds().over(burst) };
        self.losing ^= self.draws.happens(turns);
        self.losing &= loss > Chance::NEVER;
        self.losing
    }

    fn admit(&mut self, packet: &[u8], now: Instant) {
        let bytes = size(packet) + HEADER_BYTES;
        let Some(rate) = self.settings.rate else {
            self.held += cost(packet);
            return self.launch(packet.to_vec(), now);
        };
        if self.sending.is_none() {
            self.held += cost(packet);
            self.sending = Some(Sending { packet: packet.to_vec(), done: now + sending_time(packet, rate) });
            self.queue_grew();
        } else if self.waiting_bytes + bytes > self.settings.queue {
            self.stats.queue_dropped += 1;
        } else {
            self.held += cost(packet);
            self.waiting_bytes += bytes;
            self.waiting.push_back(packet.to_vec());
            self.queue_grew();
        }
    }

    fn queue_grew(&mut self) {
        self.stats.queue_bytes_peak = self.stats.queue_bytes_peak.max(self.stats().queue_bytes);
    }

    /// Lets packets pass the bottleneck that have passed it by `now`.
    fn advance(&mut self, now: Instant) {
        let Some(rate) = self.settings.rate else { return };
        while let Some(sending) = self.sending.take_if(|sending| sending.done <= now) {
            if let Some(packet) = self.waiting.pop_front() {
                self.waiting_bytes -= size(&packet) + HEADER_BYTES;
                let done = sending.done + sending_time(&packet, rate);
                self.sending = Some(Sending { packet, done });
            }
            self.launch(sending.packet, sending.done);
        }
    }

    /// Puts a packet under way at a time.
    fn launch(&mut self, packet: Vec<u8>, at: Instant) {
        let PathSettings { delay, jitter, shape, keep_order, reorder, late, .. } = self.settings;
        let (delay, jitter) = (delay.min(DELAY_MAX), jitter.min(DELAY_MAX));
        let delay = match shape {
            _ if jitter.is_zero() => delay,
            JitterShape::Uniform => self.draws.uniform(delay, jitter),
            JitterShape::Normal => self.draws.normal(delay, jitter),
        };
        let mut due = at + delay;
        if keep_order {
            due = self.last_due.map_or(due, |last| due.max(last));
        }
        if self.draws.happens(reorder) {
            self.stats.reordered += 1;
            due += late.min(DELAY_MAX);
        } else {
            self.last_due = self.last_due.max(Some(due));
        }
        self.flying.insert((due, self.flown), packet);
        self.flown += 1;
    }
}

/// Bytes of payload.
fn size(packet: &[u8]) -> u64 {
    packet.len() as u64
}

fn cost(packet: &[u8]) -> u64 {
    size(packet) + PACKET_COST
}

/// How long a packet takes at a rate, rounded up to a nanosecond.
fn sending_time(packet: &[u8], rate: NonZeroU64) -> Duration {
    let bits = u128::from(size(packet) + HEADER_BYTES) * 8;
    nanos((bits * 1_000_000_000).div_ceil(u128::from(rate.get())))
}

/// What is left of a sending time when the rate changes.
fn slowed(left: Duration, old: NonZeroU64, new: NonZeroU64) -> Duration {
    nanos((left.as_nanos() * u128::from(old.get())).div_ceil(u128::from(new.get())))
}

fn nanos(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
