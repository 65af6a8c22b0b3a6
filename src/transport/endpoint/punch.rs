//! Dialling as the listener: opening a NAT for a peer that dials at the same time.
//!
//! Both peers dial each other at once, one of them as the listener. That one sends datagrams that
//! mean nothing, only so that its own NAT lets the other's packets in, and takes the connection
//! that comes from there as the outcome of its dial.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::channel::oneshot;
use tokio::time::{sleep, timeout};

use super::EndpointError;

/// Bytes of a datagram that means nothing.
const NOISE: usize = 64;

/// Shortest and longest pause between two of them, in milliseconds: they must not come in step with
/// anything.
const PAUSE_MS: std::ops::RangeInclusive<u64> = 10..=200;

/// Who is waited for, by address; the number tells those apart that come one after another.
type Waiting = BTreeMap<SocketAddr, (u64, oneshot::Sender<quinn::Incoming>)>;

/// All dials in the listener's role that are under way.
#[derive(Clone, Default)]
pub(super) struct Punches {
    waiting: Arc<Mutex<Waiting>>,
}

impl Punches {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a peer from now on.
    pub(super) fn wait_for(&self, remote: SocketAddr) -> Result<Punch, EndpointError> {
        let (sender, arrival) = oneshot::channel();
        let number = rand::random();
        let mut waiting = self.waiting();
        if waiting.contains_key(&remote) {
            return Err(EndpointError::PunchInProgress { remote });
        }
        waiting.insert(remote, (number, sender));
        Ok(Punch { place: Place { punches: self.clone(), remote, number }, arrival })
    }

    /// Hands what came in to whoever waits for it; gives it back if nobody does.
    pub(super) fn claim(&self, incoming: quinn::Incoming) -> Option<quinn::Incoming> {
        let Some((_, sender)) = self.waiting().remove(&incoming.remote_address()) else { return Some(incoming) };
        sender.send(incoming).err()
    }
}

/// A peer that is waited for.
pub(super) struct Punch {
    place: Place,
    arrival: oneshot::Receiver<quinn::Incoming>,
}

impl Punch {
    /// Sends noise until the peer's connection comes in; `None` when it does not in time.
    pub(super) async fn run(self, socket: &UdpSocket, patience: Duration) -> Option<quinn::Incoming> {
        let remote = self.place.remote;
        let noise = async {
            loop {
                // A datagram that can't be sent is as good as lost, and another follows.
                let _ = socket.send_to(&noise(), remote);
                sleep(Duration::from_millis(rand::random_range(PAUSE_MS))).await;
            }
        };
        let arrival = async {
            tokio::select! {
                arrived = self.arrival => arrived.ok(),
                () = noise => None,
            }
        };
        timeout(patience, arrival).await.ok().flatten()
    }
}

fn noise() -> [u8; NOISE] {
    let mut bytes: [u8; NOISE] = rand::random();
    // Both bits of a QUIC packet's start are left out, so that nobody takes it for one.
    bytes[0] &= 0x3f;
    bytes
}

/// The entry of one that is waited for, gone when it is dropped.
struct Place {
    punches: Punches,
    remote: SocketAddr,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.punches.waiting();
        // Once claimed, another may wait for the same address.
        if waiting.get(&self.remote).is_some_and(|(number, _)| *number == self.number) {
            waiting.remove(&self.remote);
        }
    }
}
