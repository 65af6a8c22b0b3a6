//! A hop over any of the stacks: how it is made, loaded and filled, and the network it goes through.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::ValueEnum;
use ringfence::clock::now;
use ringfence::wan::{Proxy, ProxyHandle, ProxySettings, WanSettings};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::ours::Ours;
use super::raw::{Raw, Tune};
use super::tcp::Tcp;

/// Longest wait for an echo: a stack that takes longer is broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// Frames under way at most: streams of a raw hop.
pub(crate) const PLACES_MAX: usize = 16;

/// Control bodies that were heard and wait to be looked at.
pub(crate) const HEARD_MAX: usize = 1_024;

/// A stack to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Kind {
    /// Our link
    Ours,
    /// quinn as it comes, 16 streams
    Raw,
    /// quinn with our transport settings, 16 streams
    Tuned,
    /// One TCP connection through a relay without loss
    Tcp,
}

/// The network between both ends.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Wan {
    /// None: bare loopback.
    pub(crate) rtt: Duration,
    /// Percent of the packets.
    pub(crate) loss: f64,
    /// Rate and queue, as text.
    pub(crate) rate: Option<(String, String)>,
}

/// What is sent: one body a place under way.
#[derive(Debug, Clone)]
pub(crate) struct Load {
    /// The first byte is the place, which the echo repeats; the second is [`ECHO`] or [`SINK`].
    pub(crate) bodies: Vec<Bytes>,
    pub(crate) lasts: Duration,
}

/// Marks a body that is answered.
pub(crate) const ECHO: u8 = 1;

/// Marks a body that isn't.
pub(crate) const SINK: u8 = 0;

/// A control body that came: what it says, and when.
pub(crate) type Heard = (u64, Instant);

/// A hop to measure.
pub(crate) enum Hop {
    Ours(Ours),
    Raw(Raw),
    Tcp(Tcp),
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Raw => "quinn",
            Self::Tuned => "quinn, tuned",
            Self::Tcp => "TCP",
        }
    }
}

impl Wan {
    pub(crate) fn new(rtt_ms: u64, loss: f64) -> Self {
        Self { rtt: Duration::from_millis(rtt_ms), loss, rate: None }
    }

    /// Whether packets go straight from socket to socket.
    pub(crate) fn is_bare(&self) -> bool {
        self.rtt.is_zero() && self.rate.is_none()
    }

    fn settings(&self) -> WanSettings {
        let mut text = format!("rtt={}ms,loss={}%", self.rtt.as_millis(), self.loss);
        if let Some((rate, queue)) = &self.rate {
            text.push_str(&format!(",rate={rate},queue={queue}"));
        }
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// A proxy before a UDP address, unless this is bare loopback.
    pub(crate) fn proxy(&self, target: SocketAddr) -> Option<ProxyHandle> {
        if self.is_bare() {
            return None;
        }
        let settings = ProxySettings { wan: self.settings(), ..ProxySettings::default() };
        Some(Proxy::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap().start(target, settings).unwrap())
    }
}

impl Load {
    pub(crate) fn new(frame: usize, in_flight: usize, lasts: Duration) -> Self {
        Self::marked(frame, in_flight, lasts, ECHO)
    }

    /// Bodies that nobody answers.
    pub(crate) fn sink(frame: usize) -> Self {
        Self::marked(frame, PLACES_MAX, Duration::ZERO, SINK)
    }

    fn marked(frame: usize, places: usize, lasts: Duration, mark: u8) -> Self {
        let body = |place: usize| {
            let mut body = vec![0x5a; frame.max(2)];
            body[0] = u8::try_from(place).unwrap();
            body[1] = mark;
            Bytes::from(body)
        };
        Self { bodies: (0..places).map(body).collect(), lasts }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.bodies.len()
    }
}

impl Hop {
    /// Connects both ends through a network of their own.
    pub(crate) async fn connect(kind: Kind, wan: &Wan) -> Self {
        match kind {
            Kind::Ours => Self::Ours(Ours::connect(wan).await),
            Kind::Raw => Self::Raw(Raw::connect(wan, Tune::Defaults).await),
            Kind::Tuned => Self::Raw(Raw::connect(wan, Tune::Ours).await),
            Kind::Tcp => Self::Tcp(Tcp::connect(wan).await),
        }
    }

    /// Keeps all places of the load under way until its time is over; gives the time of each from
    /// being queued to being answered.
    pub(crate) async fn turn(&mut self, load: &Load) -> Vec<Duration> {
        let taken = async {
            match self {
                Self::Ours(hop) => hop.turn(load).await,
                Self::Raw(hop) => hop.turn(load).await,
                Self::Tcp(hop) => hop.turn(load).await,
            }
        };
        let patience = load.lasts + PATIENCE;
        timeout(patience, taken).await.unwrap_or_else(|_| panic!("no echo within {patience:?}"))
    }

    /// Fills every data lane until the tasks are dropped. `None` where a stack has no lanes.
    pub(crate) fn flood(&mut self, load: &Load) -> Option<JoinSet<()>> {
        match self {
            Self::Ours(hop) => Some(hop.flood(load)),
            Self::Raw(hop) => Some(hop.flood(load)),
            Self::Tcp(_) => None,
        }
    }

    /// Sends a number in a control body.
    pub(crate) async fn control(&mut self, number: u64) {
        match self {
            Self::Ours(hop) => hop.control(number).await,
            Self::Raw(hop) => hop.control(number).await,
            Self::Tcp(_) => {}
        }
    }

    /// The emulated network that it goes through.
    pub(crate) fn proxy(&self) -> Option<&ProxyHandle> {
        match self {
            Self::Ours(hop) => hop.proxy.as_ref(),
            Self::Raw(hop) => hop.proxy.as_ref(),
            Self::Tcp(_) => None,
        }
    }

    /// The control bodies that came to the far side's owner.
    pub(crate) fn heard(&mut self) -> Option<&mut mpsc::Receiver<Heard>> {
        match self {
            Self::Ours(hop) => Some(&mut hop.heard),
            Self::Raw(hop) => Some(&mut hop.heard),
            Self::Tcp(_) => None,
        }
    }
}

/// Places under way: when each was sent, until when to go on.
#[derive(Debug)]
pub(crate) struct Places {
    sent: Vec<Instant>,
    until: Instant,
    open: usize,
    taken: Vec<Duration>,
}

impl Places {
    /// All are sent at once.
    pub(crate) fn new(load: &Load) -> Self {
        let begun = now();
        let open = load.in_flight();
        Self { sent: vec![begun; open], until: begun + load.lasts, open, taken: Vec::new() }
    }

    /// An echo came: whether the place is to be sent again.
    pub(crate) fn heard(&mut self, place: u8) -> bool {
        let at = now();
        let sent = &mut self.sent[usize::from(place)];
        self.taken.push(at - *sent);
        *sent = at;
        let again = at < self.until;
        self.open -= usize::from(!again);
        again
    }

    pub(crate) fn is_over(&self) -> bool {
        self.open == 0
    }

    pub(crate) fn taken(self) -> Vec<Duration> {
        self.taken
    }
}
