//! Links to test with: a network of either kind, and waiting with a deadline.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use libp2p::Multiaddr;
use libp2p::identity::Keypair;
use ringfence::ids::Node;
use ringfence::transport::endpoint::PathSettings;
use ringfence::transport::memory::{MemoryNetwork, MemorySettings};
use ringfence::transport::quic::{QuicLink, QuicSettings};
use ringfence::transport::{Lane, Link, LinkEvent, LinkEvents};

/// Longest wait of a test for anything.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// How long a send or a body may stall where that is what is tested. Elsewhere it is [`PATIENCE`]:
/// on a busy machine everything stalls for longer than this now and then.
pub(crate) const STALL: Duration = Duration::from_millis(250);

/// How long a dial may take in these tests.
pub(crate) const DIAL: Duration = Duration::from_secs(2);

/// A kind of network to make links in.
pub(crate) enum Network {
    Memory(MemoryNetwork),
    Quic,
}

/// Settings of the links in memory in these tests.
fn memory_settings() -> MemorySettings {
    MemorySettings { stall_deadline: PATIENCE, dial_deadline: DIAL, ..MemorySettings::default() }
}

/// A link and what happens on it.
pub(crate) struct End {
    pub(crate) link: Arc<dyn Link>,
    pub(crate) events: LinkEvents,
}

impl Network {
    pub(crate) fn memory() -> Self {
        Self::Memory(MemoryNetwork::with_settings(memory_settings()))
    }

    /// Two nodes, connected, both told so. The first waits no longer than [`STALL`].
    pub(crate) async fn impatient_pair(self) -> (Self, End, End) {
        let (network, mut a) = match self {
            Self::Memory(_) => {
                let settings = MemorySettings { stall_deadline: STALL, ..memory_settings() };
                let network = Self::Memory(MemoryNetwork::with_settings(settings));
                let a = network.node().await;
                (network, a)
            }
            Self::Quic => (Self::Quic, quic_node(impatient(quic_settings())).await),
        };
        let mut b = network.node().await;
        join(&mut a, &mut b).await;
        (network, a, b)
    }

    pub(crate) async fn node(&self) -> End {
        match self {
            Self::Memory(network) => {
                let (link, events) = network.link();
                End { link, events }
            }
            Self::Quic => quic_node(quic_settings()).await,
        }
    }

    /// Two nodes, connected, both told so.
    pub(crate) async fn pair(&self) -> (End, End) {
        let (mut a, mut b) = (self.node().await, self.node().await);
        join(&mut a, &mut b).await;
        (a, b)
    }
}

/// Settings of the QUIC links in these tests.
pub(crate) fn quic_settings() -> QuicSettings {
    let path = PathSettings { handshake_timeout: DIAL, ..PathSettings::default() };
    QuicSettings { stall_deadline: PATIENCE, path, ..QuicSettings::new(Keypair::generate_ed25519()) }
}

/// Of a link that waits no longer than [`STALL`].
pub(crate) fn impatient(settings: QuicSettings) -> QuicSettings {
    QuicSettings { stall_deadline: STALL, ..settings }
}

/// A QUIC link on loopback.
pub(crate) async fn quic_node(settings: QuicSettings) -> End {
    let (link, events) = QuicLink::start(settings).await.unwrap();
    End { link, events }
}

/// Connects two nodes and takes both events.
pub(crate) async fn join(a: &mut End, b: &mut End) {
    let dialled = a.link.dial(b.address()).await.unwrap();
    assert_eq!(dialled, b.peer());
    a.expect_connected(b.peer()).await;
    b.expect_connected(a.peer()).await;
}

impl End {
    pub(crate) fn peer(&self) -> Node {
        self.link.local()
    }

    pub(crate) fn address(&self) -> Multiaddr {
        self.link.addresses().first().cloned().expect("an address")
    }

    pub(crate) async fn next(&mut self) -> LinkEvent {
        tokio::time::timeout(PATIENCE, self.events.recv()).await.expect("an event in time").expect("an open link")
    }

    pub(crate) async fn expect_connected(&mut self, expected: Node) -> bool {
        match self.next().await {
            LinkEvent::Connected { peer, address, dialled } => {
                assert_eq!(peer, expected);
                assert!(address.to_string().ends_with(&format!("/p2p/{peer}")), "{address}");
                dialled
            }
            other => panic!("expected Connected, got {other:?}"),
        }
    }

    pub(crate) async fn expect_disconnected(&mut self, expected: Node) -> String {
        match self.next().await {
            LinkEvent::Disconnected { peer, reason } => {
                assert_eq!(peer, expected);
                reason
            }
            other => panic!("expected Disconnected, got {other:?}"),
        }
    }

    pub(crate) async fn expect_body(&mut self, expected: Node) -> (Lane, Bytes) {
        match self.next().await {
            LinkEvent::Received { peer, lane, body } => {
                assert_eq!(peer, expected);
                (lane, body)
            }
            other => panic!("expected a body, got {other:?}"),
        }
    }

    /// Says that nothing has happened.
    pub(crate) fn expect_quiet(&mut self) {
        let event = self.events.try_recv();
        assert_eq!(event, None);
    }
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    });
    assert!(waited.await.is_ok(), "waited in vain until {what}");
}

/// Tries that [`shows`] has.
const TRIES: usize = 5;

/// Says that a hop can do what it is to do. A machine that is busy for a while makes it slow for so
/// long, whatever the code under test does, so it is tried again then.
pub(crate) async fn shows(mut attempt: impl AsyncFnMut() -> Result<(), String>) {
    let mut failures = Vec::new();
    for _ in 0..TRIES {
        match attempt().await {
            Ok(()) => return,
            Err(why) => failures.push(why),
        }
    }
    panic!("not in {TRIES} tries: {}", failures.join("; "));
}
