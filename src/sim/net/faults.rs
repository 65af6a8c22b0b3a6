//! What is done to the network: cuts, resets, connections made anew, processes that die or stand still.

use std::time::Duration;

use super::{IDLE, Net, Slot};
use crate::sim::agenda::{Event, HostId};

impl Net {
    /// Nothing gets through in one direction any more.
    pub(in crate::sim) fn cut(&mut self, from: Slot, to: Slot) {
        let path = self.path(from, to);
        path.cut = true;
        path.number += 1;
        let number = path.number;
        let wait = IDLE + self.draw.millis(0, 1_000);
        self.after(wait, Event::Quiet { from, to, number });
    }

    /// Everything gets through again, also what was held back.
    pub(in crate::sim) fn heal(&mut self, from: Slot, to: Slot) {
        let path = self.path(from, to);
        if !path.cut {
            return;
        }
        path.cut = false;
        path.number += 1;
        for (number, way) in self.ways(from, to) {
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            let passage = &mut connection.ways[way];
            let (held, end) = (std::mem::take(&mut passage.held), passage.held_end.take());
            for (serial, (lane, body)) in held {
                self.post((number, way), lane, body, serial);
            }
            if let Some(reason) = end {
                let wait = self.trip(from, to);
                self.after(wait, Event::End { connection: number, way, reason, sure: false });
            }
        }
    }

    /// The directions of connections that lead from one machine to another.
    fn ways(&self, from: Slot, to: Slot) -> Vec<(u64, usize)> {
        let all = self.connections.keys().flat_map(|number| [(*number, 0), (*number, 1)]);
        all.filter(|(number, way)| self.slots(*number, *way) == Some((from, to))).collect()
    }

    /// A cut has lasted so long that what leads through it ends.
    pub(in crate::sim) fn quiet(&mut self, from: Slot, to: Slot, number: u64) {
        let path = *self.path(from, to);
        if path.cut && path.number == number {
            for (connection, way) in self.ways(from, to) {
                self.end((connection, way), "timed out".to_owned(), true);
            }
        }
    }

    /// A connection is reset: both sides hear of it, each in its time.
    pub(in crate::sim) fn reset(&mut self, a: HostId, b: HostId) {
        let Some(connection) = self.connection_of(a, b) else { return };
        for way in [0, 1] {
            let wait = self.draw.millis(0, 40);
            self.after(wait, Event::End { connection, way, reason: "reset".to_owned(), sure: true });
        }
    }

    /// A second dial wins over the connection that is there.
    pub(in crate::sim) fn connect_anew(&mut self, a: HostId, b: HostId) {
        if self.connected(a, b) {
            self.connect(a, b);
        }
    }

    /// A process dies; its peers hear of it soon, or only by its silence.
    pub(in crate::sim) fn kill(&mut self, host: HostId, silent: bool) {
        let Some(dead) = self.hosts.remove(&host) else { return };
        for number in dead.sides.into_values() {
            let Some(connection) = self.connections.get(&number) else { continue };
            let way = usize::from(connection.ends[0] != host);
            let (wait, reason) = match silent {
                true => (IDLE + self.draw.millis(0, 500), "timed out"),
                false => (self.draw.millis(0, 60), "reset by the peer's host"),
            };
            self.after(wait, Event::End { connection: number, way, reason: reason.to_owned(), sure: silent });
        }
        for dial in self.dials.values_mut().filter(|dial| dial.by == host) {
            dial.forget();
        }
    }

    /// A process stands still: what comes waits for it.
    pub(in crate::sim) fn freeze(&mut self, host: HostId) {
        let Some(found) = self.hosts.get_mut(&host) else { return };
        found.frozen = true;
        found.number += 1;
        let number = found.number;
        let wait = IDLE + self.draw.millis(0, 500);
        self.after(wait, Event::Still { host, number });
    }

    /// It goes on.
    pub(in crate::sim) fn thaw(&mut self, host: HostId) {
        if let Some(found) = self.hosts.get_mut(&host) {
            found.frozen = false;
            found.number += 1;
            self.after(Duration::ZERO, Event::Turn { host });
        }
    }

    /// Whether a process stands still.
    pub(in crate::sim) fn is_frozen(&self, host: HostId) -> bool {
        self.hosts.get(&host).is_some_and(|host| host.frozen)
    }

    /// A process stood still for so long that its peers end their connections to it.
    pub(in crate::sim) fn still(&mut self, host: HostId, number: u64) {
        let Some(found) = self.hosts.get(&host).filter(|host| host.frozen && host.number == number) else { return };
        for connection in found.sides.values().copied().collect::<Vec<_>>() {
            let Some(ends) = self.connections.get(&connection).map(|connection| connection.ends) else { continue };
            self.end((connection, usize::from(ends[0] != host)), "timed out".to_owned(), true);
        }
    }
}
