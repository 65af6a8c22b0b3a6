//! Opens and takes the lanes of one connection.
//!
//! Owns the protocol names. Each side opens a stream for control first, then one for data, and
//! only writes on what it opened; what comes of it goes to the connection's task.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use libp2p::StreamProtocol;
use libp2p::core::upgrade::{InboundUpgrade, ReadyUpgrade, UpgradeInfo};
use libp2p::swarm::handler::{ConnectionEvent, DialUpgradeError, FullyNegotiatedInbound, FullyNegotiatedOutbound};
use libp2p::swarm::{ConnectionHandler, ConnectionHandlerEvent, Stream, SubstreamProtocol};
use tokio::sync::mpsc;

use super::super::Lane;
use super::lane::chain;

/// What a connection needs, or what broke it.
#[derive(Debug)]
pub(super) enum Part {
    /// A stream to write a lane on.
    Outbound(Lane, Stream),
    /// A stream to read a lane from.
    Inbound(Lane, Stream),
    /// The peer can't be talked to.
    Broken(String),
}

fn protocol(lane: Lane) -> StreamProtocol {
    StreamProtocol::new(match lane {
        Lane::Control => "/ringfence/control/1",
        Lane::Data => "/ringfence/data/1",
    })
}

/// Takes a stream for either lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct TakeLane;

impl UpgradeInfo for TakeLane {
    type Info = StreamProtocol;
    type InfoIter = [StreamProtocol; 2];

    fn protocol_info(&self) -> Self::InfoIter {
        [protocol(Lane::Control), protocol(Lane::Data)]
    }
}

impl InboundUpgrade<Stream> for TakeLane {
    type Output = (Lane, Stream);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Self::Error>>;

    fn upgrade_inbound(self, stream: Stream, info: Self::Info) -> Self::Future {
        let lane = if info == protocol(Lane::Control) { Lane::Control } else { Lane::Data };
        ready(Ok((lane, stream)))
    }
}

/// The handler of one connection.
#[derive(Debug)]
pub(super) struct LaneHandler {
    parts: mpsc::Sender<Part>,
    /// The lane to open next.
    open: Option<Lane>,
}

impl LaneHandler {
    pub(super) fn new(parts: mpsc::Sender<Part>) -> Self {
        Self { parts, open: Some(Lane::Control) }
    }

    fn give(&self, part: Part) {
        // A full queue is a peer that opens stream after stream: the surplus is dropped, and the
        // connection's task ends the connection at the first one too many.
        let _ = self.parts.try_send(part);
    }
}

impl ConnectionHandler for LaneHandler {
    type FromBehaviour = Infallible;
    type ToBehaviour = Infallible;
    type InboundProtocol = TakeLane;
    type OutboundProtocol = ReadyUpgrade<StreamProtocol>;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = Lane;

    fn listen_protocol(&self) -> SubstreamProtocol<TakeLane> {
        SubstreamProtocol::new(TakeLane, ())
    }

    fn connection_keep_alive(&self) -> bool {
        true
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ConnectionHandlerEvent<Self::OutboundProtocol, Lane, Infallible>> {
        // libp2p polls again after every event: no waker is needed.
        match self.open.take() {
            Some(lane) => Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest {
                protocol: SubstreamProtocol::new(ReadyUpgrade::new(protocol(lane)), lane),
            }),
            None => Poll::Pending,
        }
    }

    fn on_behaviour_event(&mut self, event: Infallible) {
        match event {}
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "the enum is libp2p's, and open-ended")]
    fn on_connection_event(&mut self, event: ConnectionEvent<'_, TakeLane, Self::OutboundProtocol, (), Lane>) {
        match event {
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound { protocol: (lane, stream), .. }) => {
                self.give(Part::Inbound(lane, stream));
            }
            ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound { protocol: stream, info: lane }) => {
                self.give(Part::Outbound(lane, stream));
                if lane == Lane::Control {
                    self.open = Some(Lane::Data);
                }
            }
            ConnectionEvent::DialUpgradeError(DialUpgradeError { info: lane, error }) => {
                let why = format!("the peer does not speak {}: {}", protocol(lane), chain(&error));
                self.give(Part::Broken(why));
            }
            _ => {}
        }
    }
}
