//! Opens and takes the streams of one connection.
//!
//! Owns the protocol names. Each side opens a stream for control first, then all its data lanes at
//! once, and only writes on what it opened; what comes of it goes to the connection's task.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::iter::Cloned;
use std::slice::Iter;
use std::task::{Context, Poll};

use libp2p::StreamProtocol;
use libp2p::core::upgrade::{InboundUpgrade, OutboundUpgrade, UpgradeInfo};
use libp2p::swarm::handler::{ConnectionEvent, DialUpgradeError, FullyNegotiatedInbound, FullyNegotiatedOutbound};
use libp2p::swarm::{ConnectionHandler, ConnectionHandlerEvent, Stream, SubstreamProtocol};
use tokio::sync::mpsc;

use super::lane::chain;

/// The control stream: as it is spoken here, then as older versions spoke it.
static CONTROL: [StreamProtocol; 2] =
    [StreamProtocol::new("/ringfence/control/2"), StreamProtocol::new("/ringfence/control/1")];

/// A data lane.
static DATA: [StreamProtocol; 1] = [StreamProtocol::new("/ringfence/data/2")];

/// What is taken: also what older versions open first, so that they can be told in words.
static TAKEN: [StreamProtocol; 4] = [
    StreamProtocol::new("/ringfence/control/2"),
    StreamProtocol::new("/ringfence/data/2"),
    StreamProtocol::new("/ringfence/control/1"),
    StreamProtocol::new("/ringfence/data/1"),
];

/// Streams of an older version that are kept open until it is told.
const OLDER_MAX: usize = 2;

/// What a connection needs, or what broke it.
#[derive(Debug)]
pub(super) enum Part {
    /// A stream to write control on.
    ControlOut(Stream),
    /// A stream to write this data lane on.
    DataOut(u64, Stream),
    /// A stream to read control from.
    ControlIn(Stream),
    /// A stream to read some data lane from.
    DataIn(Stream),
    /// The peer speaks an older version: a stream to tell it so, and how.
    Older(Stream, String),
    /// The peer can't be talked to.
    Broken(String),
}

/// What is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opening {
    Control,
    Data(u64),
}

impl Opening {
    fn names(self) -> &'static [StreamProtocol] {
        match self {
            Self::Control => &CONTROL,
            Self::Data(_) => &DATA,
        }
    }
}

/// Agrees on one of these names.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names(&'static [StreamProtocol]);

impl UpgradeInfo for Names {
    type Info = StreamProtocol;
    type InfoIter = Cloned<Iter<'static, StreamProtocol>>;

    fn protocol_info(&self) -> Self::InfoIter {
        self.0.iter().cloned()
    }
}

impl InboundUpgrade<Stream> for Names {
    type Output = (StreamProtocol, Stream);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Self::Error>>;

    fn upgrade_inbound(self, stream: Stream, name: Self::Info) -> Self::Future {
        ready(Ok((name, stream)))
    }
}

impl OutboundUpgrade<Stream> for Names {
    type Output = (StreamProtocol, Stream);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Self::Error>>;

    fn upgrade_outbound(self, stream: Stream, name: Self::Info) -> Self::Future {
        ready(Ok((name, stream)))
    }
}

/// The handler of one connection.
#[derive(Debug)]
pub(super) struct LaneHandler {
    parts: mpsc::Sender<Part>,
    /// Data lanes to open.
    lanes: u64,
    /// What to open next.
    open: Option<Opening>,
    /// Streams that an older version opened.
    older: Vec<Stream>,
}

impl LaneHandler {
    /// Opens control and so many data lanes.
    pub(super) fn new(parts: mpsc::Sender<Part>, lanes: u64) -> Self {
        Self { parts, lanes, open: Some(Opening::Control), older: Vec::new() }
    }

    fn give(&self, part: Part) {
        // The queue takes all that may be opened. A full one is a peer that opens more: the surplus
        // is dropped, and the connection's task ends the connection at the first one too many.
        let _ = self.parts.try_send(part);
    }

    fn opened(&mut self, opening: Opening, name: &StreamProtocol, stream: Stream) {
        match opening {
            Opening::Control if *name == CONTROL[0] => {
                self.give(Part::ControlOut(stream));
                self.open = Some(Opening::Data(0));
            }
            Opening::Control => {
                let why = format!("the peer speaks {name} and this side {}: upgrade the peer", CONTROL[0]);
                self.give(Part::Older(stream, why));
            }
            Opening::Data(number) => self.give(Part::DataOut(number, stream)),
        }
    }

    fn taken(&mut self, name: &StreamProtocol, stream: Stream) {
        if *name == CONTROL[0] {
            self.give(Part::ControlIn(stream));
        } else if *name == DATA[0] {
            self.give(Part::DataIn(stream));
        } else if self.older.len() < OLDER_MAX {
            self.older.push(stream);
        }
    }
}

impl ConnectionHandler for LaneHandler {
    type FromBehaviour = Infallible;
    type ToBehaviour = Infallible;
    type InboundProtocol = Names;
    type OutboundProtocol = Names;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = Opening;

    fn listen_protocol(&self) -> SubstreamProtocol<Names> {
        SubstreamProtocol::new(Names(&TAKEN), ())
    }

    fn connection_keep_alive(&self) -> bool {
        true
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ConnectionHandlerEvent<Names, Opening, Infallible>> {
        // libp2p polls again after every event: no waker is needed.
        let Some(opening) = self.open.take() else { return Poll::Pending };
        if let Opening::Data(number) = opening
            && number + 1 < self.lanes
        {
            self.open = Some(Opening::Data(number + 1));
        }
        Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest {
            protocol: SubstreamProtocol::new(Names(opening.names()), opening),
        })
    }

    fn on_behaviour_event(&mut self, event: Infallible) {
        match event {}
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "the enum is libp2p's, and open-ended")]
    fn on_connection_event(&mut self, event: ConnectionEvent<'_, Names, Names, (), Opening>) {
        match event {
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound { protocol: (name, stream), .. }) => {
                self.taken(&name, stream);
            }
            ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound { protocol: (name, stream), info }) => {
                self.opened(info, &name, stream);
            }
            ConnectionEvent::DialUpgradeError(DialUpgradeError { info, error }) => {
                let why = format!("the peer does not speak {}: {}", info.names()[0], chain(&error));
                self.give(Part::Broken(why));
            }
            _ => {}
        }
    }
}
