//! What the paths of live connections are like, for whoever asks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use libp2p::{Multiaddr, PeerId};

use super::addr::to_multiaddr;

/// What one connection's path is like, as this end sees it. Counts are since the connection began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathStats {
    /// The peer, proven by its key.
    pub peer: PeerId,
    /// Where the peer's packets come from, without its id.
    pub remote: Multiaddr,
    /// Whether this side dialled.
    pub dialled: bool,
    /// The round trip, smoothed; the assumed one until a packet came back.
    pub rtt: Duration,
    /// The shortest round trip there was.
    pub rtt_min: Duration,
    /// Bytes that may be in flight.
    pub window: u64,
    /// Largest UDP payload that the path is known to carry, in bytes.
    pub mtu: u16,
    /// Packets sent.
    pub packets_sent: u64,
    /// Bytes sent, in UDP payloads.
    pub bytes_sent: u64,
    /// UDP payloads received.
    pub packets_received: u64,
    /// Bytes received, in UDP payloads.
    pub bytes_received: u64,
    /// Packets lost on the way to the peer.
    pub packets_lost: u64,
    /// Bytes lost on the way to the peer; they were sent again.
    pub bytes_lost: u64,
    /// How often the congestion window was cut for loss or a mark of congestion.
    pub congestion_events: u64,
}

/// A list of the live connections of one or more transports. Clones are one list.
///
/// The book holds no connection: an entry goes with its connection.
#[derive(Debug, Clone, Default)]
pub struct PathBook {
    pages: Arc<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    next: AtomicU64,
    entries: Mutex<BTreeMap<(PeerId, u64), Entry>>,
}

#[derive(Debug)]
struct Entry {
    dialled: bool,
    path: Weak<quinn::Connection>,
}

impl PathBook {
    /// Makes an empty book.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What every live connection to a peer is like, the oldest first; more than one while both
    /// sides dialled each other or one dialled anew.
    #[must_use]
    pub fn paths(&self, peer: PeerId) -> Vec<PathStats> {
        // A connection that is dropped here would come back for the entries.
        let paths: Vec<_> = {
            let entries = self.pages.entries();
            let of_peer = entries.range((peer, 0)..=(peer, u64::MAX));
            of_peer.filter_map(|(_, entry)| Some((entry.dialled, entry.path.upgrade()?))).collect()
        };
        let open = paths.iter().filter(|(_, path)| path.close_reason().is_none());
        open.map(|(dialled, path)| measure(peer, *dialled, path)).collect()
    }

    /// What the latest connection to a peer is like; `None` without one.
    #[must_use]
    pub fn stats(&self, peer: PeerId) -> Option<PathStats> {
        self.paths(peer).pop()
    }

    /// How many connections are listed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.entries().len()
    }

    /// Whether no connection is listed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lists a connection for as long as the entry is held.
    pub(super) fn list(&self, peer: PeerId, dialled: bool, path: &Arc<quinn::Connection>) -> Listed {
        let number = self.pages.next.fetch_add(1, Ordering::Relaxed);
        let entry = Entry { dialled, path: Arc::downgrade(path) };
        self.pages.entries().insert((peer, number), entry);
        Listed { pages: Arc::clone(&self.pages), key: (peer, number) }
    }
}

impl Pages {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<(PeerId, u64), Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place in a book.
#[derive(Debug)]
pub(super) struct Listed {
    pages: Arc<Pages>,
    key: (PeerId, u64),
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.pages.entries().remove(&self.key);
    }
}

fn measure(peer: PeerId, dialled: bool, connection: &quinn::Connection) -> PathStats {
    let stats = connection.stats();
    PathStats {
        peer,
        remote: to_multiaddr(connection.remote_address()),
        dialled,
        rtt: stats.path.rtt,
        rtt_min: stats.path.min_rtt,
        window: stats.path.cwnd,
        mtu: stats.path.current_mtu,
        packets_sent: stats.path.sent_packets,
        bytes_sent: stats.udp_tx.bytes,
        packets_received: stats.udp_rx.datagrams,
        bytes_received: stats.udp_rx.bytes,
        packets_lost: stats.path.lost_packets,
        bytes_lost: stats.path.lost_bytes,
        congestion_events: stats.path.congestion_events,
    }
}
