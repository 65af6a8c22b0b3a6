//! libp2p over QUIC: one swarm per process, driven by one task.
//!
//! Owns the link that real nodes use. A peer's name is proven by its key in the TLS handshake. One
//! connection per peer carries a control lane and several data lanes per direction, each a QUIC
//! stream of its own, so none waits for another; see `registry.rs` for how both sides settle on
//! the same connection, `settle.rs` for how they open its lanes, and `spread.rs` for how frames and
//! replies go out on them.
//!
//! Bounds: a lane's send queue holds [`SEND_QUEUE_MAX`](super::SEND_QUEUE_MAX) bodies; frames that
//! were sent and not taken by the peer's owner are bounded by [`credit`](super::credit); a link's
//! event queue is bounded in events and in bytes, each connection has a share of it, and while it
//! is full no peer is read. How the connections below behave is [`PathSettings`]' to say.

mod behaviour;
mod connection;
mod control;
mod driver;
mod handler;
mod lane;
mod lines;
mod note;
mod readers;
mod registry;
mod settle;
mod spread;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use libp2p::core::Transport;
use libp2p::core::muxing::StreamMuxerBox;
use libp2p::identity::Keypair;
use libp2p::{Multiaddr, Swarm, swarm};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use self::behaviour::Behaviour;
use self::connection::{Handle, SendQueue, Stop};
use self::driver::{Command, Driver};
use self::note::Terms;
use self::registry::{Attempt, Registry};
use super::credit::{CreditConfig, HopStats};
use super::endpoint::{PathBook, PathSettingError, PathSettings, QuicTransport};
use super::events::event_queue;
use super::{Lane, Link, LinkError, LinkEvents, split_peer};
use crate::ids::Node;

/// Dials and shutdowns that wait for the driver.
const COMMANDS_MAX: usize = 64;

/// Data lanes per direction, at most.
pub const LANES_MAX: u64 = 64;

/// The smallest bound on frames under way, in bytes.
pub const WINDOW_MIN: u64 = 64 << 10;

/// Streams that a peer may hold open: all lanes, and what is too much.
const STREAMS_MIN: u32 = LANES_MAX as u32 + 8;

/// How a QUIC link behaves.
#[derive(Debug, Clone)]
pub struct QuicSettings {
    /// The node's key; its peer id is the node's name.
    pub identity: Keypair,
    /// Addresses to listen on, such as `/ip4/0.0.0.0/udp/0/quic-v1`; default
    /// `/ip4/127.0.0.1/udp/0/quic-v1`. Empty: only dials.
    pub listen: Vec<Multiaddr>,
    /// How long a send waits for room in its queue; default 5 s. Larger hides a peer that doesn't
    /// read for longer.
    pub stall_deadline: Duration,
    /// How its connections behave. `path.handshake_timeout` bounds a dial in whole, and the
    /// introduction of whoever dials in.
    pub path: PathSettings,
    /// Where its live connections are listed: keep a clone to ask what they are like. Default an
    /// empty one.
    pub book: PathBook,
    /// How long a closing connection may take to deliver what is queued; default 500 ms. Larger
    /// makes [`Link::shutdown`] wait for peers that are dead.
    pub close_grace: Duration,
    /// Data lanes that this side opens to each peer, 1 to 64; default 16. A lost packet holds up
    /// the frames of its own lane only; larger costs a stream and its buffer each.
    pub lanes: u64,
    /// Bytes of frames that may be under way to a peer before its hop is measured; default 1 MiB.
    /// Larger fills a long hop at once, smaller spares a narrow one a queue.
    pub window_initial: u64,
    /// Bytes of frames that may be under way to a peer, or from it, whatever is measured; default
    /// 16 MiB, the smaller of both sides' counts. Two frames may be, however large.
    pub window_max: u64,
    /// Connections that may come in, settled or not; default 256. Larger costs up to
    /// `path.connection_window` each while they flood.
    pub inbound_max: usize,
}

impl QuicSettings {
    /// The defaults, on loopback.
    #[must_use]
    pub fn new(identity: Keypair) -> Self {
        let listen = "/ip4/127.0.0.1/udp/0/quic-v1".parse().into_iter().collect();
        Self {
            identity,
            listen,
            stall_deadline: Duration::from_secs(5),
            path: PathSettings::default(),
            book: PathBook::new(),
            close_grace: Duration::from_millis(500),
            lanes: 16,
            window_initial: CreditConfig::default().initial,
            window_max: CreditConfig::default().window_max,
            inbound_max: 256,
        }
    }

    /// What this side tells a peer.
    fn terms(&self) -> Terms {
        Terms { lanes: self.lanes, window_max: self.window_max }
    }

    fn check(&self) -> Result<(), PathSettingError> {
        let refuse = |name, value: u64, why| Err(PathSettingError { name, value: value.to_string(), why });
        if !(1..=LANES_MAX).contains(&self.lanes) {
            return refuse("lanes", self.lanes, "must be 1 to 64");
        }
        if self.window_max < WINDOW_MIN {
            return refuse("window_max", self.window_max, "must be 65536 bytes or more");
        }
        if self.path.streams_max < STREAMS_MIN {
            return refuse("streams_max", self.path.streams_max.into(), "must be 72 or more, for 64 data lanes");
        }
        self.path.check()
    }
}

/// Why a QUIC link could not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// An address can't be listened on.
    #[error("cannot listen on {address}: {why} (expected something like /ip4/127.0.0.1/udp/0/quic-v1)")]
    Listen {
        /// The address.
        address: Multiaddr,
        /// What went wrong.
        why: String,
    },
    /// A setting can't be honoured.
    #[error(transparent)]
    Setting(#[from] PathSettingError),
    /// The node's key is of no use.
    #[error("{why}")]
    Identity {
        /// What is wrong with it, and what to do.
        why: String,
    },
}

/// What the link, its driver and its connections share.
#[derive(Debug)]
struct Shared {
    local: Node,
    settings: QuicSettings,
    closed: watch::Sender<bool>,
    registry: Mutex<Registry<Handle>>,
    addresses: Mutex<Vec<Multiaddr>>,
}

impl Shared {
    fn registry(&self) -> MutexGuard<'_, Registry<Handle>> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn addresses(&self) -> MutexGuard<'_, Vec<Multiaddr>> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.closed.send_replace(true);
    }

    fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    async fn until_closed(&self) {
        // The sender lives in `self`: this ends only when the link is closed.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    fn check_open(&self) -> Result<(), LinkError> {
        if self.is_closed() { Err(LinkError::Closed) } else { Ok(()) }
    }

    fn queue(&self, peer: Node, lane: Lane) -> Result<SendQueue, LinkError> {
        self.check_open()?;
        let registry = self.registry();
        let handle = registry.current(peer).ok_or(LinkError::NotConnected { peer })?;
        Ok(handle.queue(lane).clone())
    }
}

/// A link over libp2p and QUIC. Dropped without [`Link::shutdown`], it closes in the background.
#[derive(Debug)]
pub struct QuicLink {
    shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
}

impl QuicLink {
    /// Starts a link, listening, on the tokio runtime it is called in.
    ///
    /// # Errors
    /// [`StartError`] where a setting can't be honoured or an address not listened on.
    pub async fn start(settings: QuicSettings) -> Result<(Arc<dyn Link>, LinkEvents), StartError> {
        settings.check()?;
        let local = Node { peer: settings.identity.public().to_peer_id(), start: rand::random() };
        let streams_max = settings.path.streams_max as usize;
        let transport = QuicTransport::new(&settings.identity, settings.path.clone(), settings.book.clone())
            .map_err(|error| StartError::Identity { why: error.to_string() })?
            .map(|(peer, connection), _| (peer, StreamMuxerBox::new(connection)))
            .boxed();
        let (events, receiver) = event_queue();
        let listen = settings.listen.clone();
        let shared = Arc::new(Shared {
            local,
            settings,
            closed: watch::Sender::new(false),
            registry: Mutex::new(Registry::new(local)),
            addresses: Mutex::default(),
        });
        let behaviour = Behaviour::new(Arc::clone(&shared), events);
        let config = swarm::Config::with_tokio_executor().with_max_negotiating_inbound_streams(streams_max);
        let (commands, command_queue) = mpsc::channel(COMMANDS_MAX);
        let mut driver = Driver {
            swarm: Swarm::new(transport, behaviour, local.peer, config),
            shared: Arc::clone(&shared),
            commands: command_queue,
            dials: BTreeMap::new(),
        };
        driver.listen(&listen).await?;
        tokio::spawn(driver.run());
        Ok((Arc::new(Self { shared, commands }), receiver))
    }
}

impl Link for QuicLink {
    fn local(&self) -> Node {
        self.shared.local
    }

    fn addresses(&self) -> Vec<Multiaddr> {
        self.shared.addresses().clone()
    }

    fn dial(&self, address: Multiaddr) -> BoxFuture<'_, Result<Node, LinkError>> {
        async move {
            self.shared.check_open()?;
            let (rest, peer) = split_peer(&address)?;
            let fail = |why: String| Err(LinkError::Dial { address: address.clone(), why });
            if peer == self.shared.local.peer {
                return fail("this is the link's own address".to_owned());
            }
            let deadline = self.shared.settings.path.handshake_timeout;
            let reached = timeout(deadline, async {
                // The place comes first: a dial that is registered must be made.
                let place = self.commands.reserve().await.map_err(|_| LinkError::Closed)?;
                let (waiter, outcome) = oneshot::channel();
                let attempt = self.shared.registry().attempt(peer, &address, waiter);
                match attempt {
                    Attempt::Start => place.send(Command::Dial { peer, address: rest }),
                    Attempt::Wait => drop(place),
                }
                outcome.await.map_err(|_| LinkError::Closed)
            });
            match reached.await {
                Ok(Ok(Ok(node))) => Ok(node),
                Ok(Ok(Err(why))) => {
                    self.shared.check_open()?;
                    fail(why)
                }
                Ok(Err(error)) => Err(error),
                Err(_) => fail(format!("no answer within {} ms", deadline.as_millis())),
            }
        }
        .boxed()
    }

    fn send(&self, peer: Node, lane: Lane, body: Bytes) -> BoxFuture<'_, Result<(), LinkError>> {
        async move {
            lane.check(&body)?;
            let queue = self.shared.queue(peer, lane)?;
            let body = match queue.try_send(body) {
                Ok(()) => return Ok(()),
                Err(mpsc::error::TrySendError::Closed(_)) => return Err(LinkError::NotConnected { peer }),
                Err(mpsc::error::TrySendError::Full(body)) => body,
            };
            let deadline = self.shared.settings.stall_deadline;
            match timeout(deadline, queue.send(body)).await {
                Ok(sent) => sent.map_err(|_| LinkError::NotConnected { peer }),
                Err(_) => {
                    Err(LinkError::Stalled { peer, waited_ms: u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX) })
                }
            }
        }
        .boxed()
    }

    fn try_send(&self, peer: Node, lane: Lane, body: Bytes) -> Result<(), LinkError> {
        lane.check(&body)?;
        self.shared.queue(peer, lane)?.try_send(body).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => LinkError::Stalled { peer, waited_ms: 0 },
            mpsc::error::TrySendError::Closed(_) => LinkError::NotConnected { peer },
        })
    }

    fn disconnect(&self, peer: Node, reason: &str) {
        let handle = self.shared.registry().take(peer);
        if let Some(handle) = handle {
            let stop = Stop { reason: reason.to_owned(), farewell: Some(reason.to_owned()) };
            // A connection that ends by itself needs no reason.
            let _ = handle.stop.send(stop);
        }
    }

    fn hop_stats(&self, peer: Node) -> Option<HopStats> {
        self.shared.registry().current(peer).map(Handle::stats)
    }

    fn shutdown(&self) -> BoxFuture<'_, ()> {
        async move {
            self.shared.close();
            let (done, closed) = oneshot::channel();
            if self.commands.send(Command::Shutdown { done }).await.is_ok() {
                // A driver that is gone has closed everything.
                let _ = closed.await;
            }
        }
        .boxed()
    }
}
