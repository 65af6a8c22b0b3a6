//! Dials: they take a few trips, wait for a path that is cut and a process that stands still, and fail.

use std::time::Duration;

use super::{Net, Slot};
use crate::ids::Node;
use crate::sim::agenda::{Event, HostId};
use crate::transport::LinkError;
use libp2p::{Multiaddr, PeerId};

/// How long a dial may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// Pause between looks at a path that is cut or a process that does not answer.
const LOOK: Duration = Duration::from_millis(100);

/// A dial under way.
#[derive(Debug)]
pub(super) struct DialState {
    pub(super) by: HostId,
    slot: Slot,
    peer: PeerId,
    address: Multiaddr,
    until: Duration,
    result: Option<Result<Node, LinkError>>,
    forgotten: bool,
}

impl DialState {
    /// Nobody waits for it any more.
    pub(super) fn forget(&mut self) {
        self.forgotten = true;
    }
}

impl Net {
    /// Begins a dial, and gives its number.
    pub(super) fn begin_dial(&mut self, by: HostId, (slot, peer): (Slot, PeerId), address: Multiaddr) -> u64 {
        let dial = self.number();
        let until = self.now + DEADLINE;
        self.dials.insert(dial, DialState { by, slot, peer, address, until, result: None, forgotten: false });
        let from = self.hosts.get(&by).map_or(slot, |host| host.slot);
        // Connected to that process already: the answer is there.
        let known = self.hosts.get(&by).is_some_and(|host| {
            let node = self.listener(slot).and_then(|id| self.hosts.get(&id)).map(|host| host.node);
            node.is_some_and(|node| host.sides.contains_key(&node))
        });
        let wait = if known { Duration::ZERO } else { self.trip(from, slot) * 2 + self.trip(slot, from) };
        self.after(wait, Event::Dial { dial });
        dial
    }

    /// The process that listens on a machine: the first one, as a twin finds the port taken.
    fn listener(&self, slot: Slot) -> Option<HostId> {
        self.hosts.iter().find(|(_, host)| host.slot == slot).map(|(id, _)| *id)
    }

    /// A dial goes on.
    pub(in crate::sim) fn step_dial(&mut self, dial: u64) {
        let Some(state) = self.dials.get(&dial).filter(|state| state.result.is_none()) else { return };
        let (by, slot, late) = (state.by, state.slot, self.now >= state.until);
        if state.forgotten || !self.hosts.contains_key(&by) {
            self.dials.remove(&dial);
            return;
        }
        let from = self.hosts.get(&by).map_or(slot, |host| host.slot);
        let there = self.listener(slot);
        let blocked =
            self.path(from, slot).cut || self.path(slot, from).cut || there.is_some_and(|id| self.is_frozen(id));
        let silent = there.is_none() && self.draw.chance(70);
        match there {
            Some(id) if !blocked => self.meet(dial, id),
            _ if late => self.fail(dial, "timed out"),
            None if !blocked && !silent => self.fail(dial, "refused"),
            _ => self.after(LOOK, Event::Dial { dial }),
        }
    }

    fn fail(&mut self, dial: u64, why: &str) {
        let Some(state) = self.dials.get_mut(&dial) else { return };
        state.result = Some(Err(LinkError::Dial { address: state.address.clone(), why: why.to_owned() }));
        let host = state.by;
        self.after(Duration::ZERO, Event::Turn { host });
    }

    /// The dialled process answers.
    fn meet(&mut self, dial: u64, there: HostId) {
        let Some(state) = self.dials.get(&dial) else { return };
        let (by, wanted) = (state.by, state.peer);
        let Some(node) = self.hosts.get(&there).map(|host| host.node) else { return };
        if node.peer != wanted {
            return self.fail(dial, "another peer answers there");
        }
        let known = self.hosts.get(&by).is_some_and(|host| host.sides.contains_key(&node));
        // Of two dials that cross, one connection counts: the first, or now and then the second.
        if !known || (self.connected(by, there) && self.draw.chance(5)) {
            self.connect(by, there);
        }
        if let Some(state) = self.dials.get_mut(&dial) {
            state.result = Some(Ok(node));
        }
        self.after(Duration::ZERO, Event::Turn { host: by });
    }

    /// How a dial ended, once.
    pub(super) fn dialled(&mut self, dial: u64) -> Option<Result<Node, LinkError>> {
        self.dials.get(&dial)?.result.as_ref()?;
        self.dials.remove(&dial)?.result
    }
}
