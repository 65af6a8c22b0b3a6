//! What is going to happen, in the order in which it will.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use crate::transport::Lane;

/// A process: the number of its start.
pub(super) type HostId = u64;

/// Something that happens at a moment.
#[derive(Debug, Clone)]
pub(super) enum Event {
    /// A body comes out of a connection; `way` 0 leads away from the side that dialled.
    Deliver { connection: u64, way: usize, lane: Lane, body: Bytes, serial: u64 },
    /// The end of a connection is heard of at the other side. `sure`: also through a cut, for the side
    /// finds it out by itself.
    End { connection: u64, way: usize, reason: String, sure: bool },
    /// A dial goes on.
    Dial { dial: u64 },
    /// Nothing came through a cut for so long that connections end.
    Quiet { from: u16, to: u16, number: u64 },
    /// Nothing came from a frozen process for so long that connections end.
    Still { host: HostId, number: u64 },
    /// A process has something to take.
    Turn { host: HostId },
    /// A process asked to be called.
    Timer { host: HostId, number: u64 },
    /// A worker goes on.
    Worker { host: HostId, number: u64 },
    /// The log's disk goes on.
    Disk { host: HostId },
    /// The so-many-th client does its next thing.
    Client { client: usize },
    /// The so-many-th fault strikes.
    Strike { fault: usize },
    /// What the so-many-th fault did ends.
    Ease { fault: usize },
    /// Every fault ends.
    Calm,
}

/// The agenda: events at the same moment happen in the order in which they were put in.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    events: BTreeMap<(Duration, u64), Event>,
    serial: u64,
}

impl Agenda {
    /// Puts in an event.
    pub(super) fn put(&mut self, at: Duration, event: Event) {
        self.serial += 1;
        self.events.insert((at, self.serial), event);
    }

    /// Takes out the next one.
    pub(super) fn pop(&mut self) -> Option<(Duration, Event)> {
        self.events.pop_first().map(|((at, _), event)| (at, event))
    }
}
