//! One connection: its streams, its end, and the address that the peer has.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use libp2p::core::muxing::{StreamMuxer, StreamMuxerEvent};
use quinn::{ConnectionError, RecvStream, SendStream, VarInt};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::EndpointError;
use super::addr::to_multiaddr;
use super::book::Listed;
use super::stream::{Priorities, Stream};

/// How often a connection looks whether its peer has moved. QUIC follows at once; this is how late
/// those above hear of it.
const MOVE_CHECK: Duration = Duration::from_secs(1);

/// A stream on its way, of either direction.
type Opening = BoxFuture<'static, Result<(SendStream, RecvStream), ConnectionError>>;

/// A connection, as libp2p's swarm drives it.
pub struct Muxer {
    /// The only strong handle outside this connection's own futures and streams.
    connection: Arc<quinn::Connection>,
    priorities: Priorities,
    inbound: Option<Opening>,
    outbound: Option<Opening>,
    closing: Option<BoxFuture<'static, ConnectionError>>,
    remote: SocketAddr,
    check: Interval,
    _listed: Listed,
}

impl Muxer {
    pub(super) fn new(connection: Arc<quinn::Connection>, listed: Listed, priorities: Priorities) -> Self {
        let remote = connection.remote_address();
        let mut check = interval(MOVE_CHECK);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { connection, priorities, inbound: None, outbound: None, closing: None, remote, check, _listed: listed }
    }
}

impl std::fmt::Debug for Muxer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Muxer").field("remote", &self.remote).field("listed", &self._listed).finish_non_exhaustive()
    }
}

impl StreamMuxer for Muxer {
    type Substream = Stream;
    type Error = EndpointError;

    fn poll_inbound(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Stream, EndpointError>> {
        let this = &mut *self;
        let opening = this.inbound.get_or_insert_with(|| {
            let connection = quinn::Connection::clone(&this.connection);
            async move { connection.accept_bi().await }.boxed()
        });
        let opened = ready!(opening.poll_unpin(cx));
        this.inbound = None;
        Poll::Ready(Ok(Stream::new(opened?, Arc::clone(&this.priorities))))
    }

    fn poll_outbound(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Stream, EndpointError>> {
        let this = &mut *self;
        let opening = this.outbound.get_or_insert_with(|| {
            let connection = quinn::Connection::clone(&this.connection);
            async move { connection.open_bi().await }.boxed()
        });
        let opened = ready!(opening.poll_unpin(cx));
        this.outbound = None;
        Poll::Ready(Ok(Stream::new(opened?, Arc::clone(&this.priorities))))
    }

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<StreamMuxerEvent, EndpointError>> {
        while self.check.poll_tick(cx).is_ready() {
            let remote = self.connection.remote_address();
            if remote != self.remote {
                tracing::debug!(from = %self.remote, to = %remote, "the peer moved");
                self.remote = remote;
                return Poll::Ready(Ok(StreamMuxerEvent::AddressChange(to_multiaddr(remote))));
            }
        }
        Poll::Pending
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), EndpointError>> {
        let this = &mut *self;
        let closing = this.closing.get_or_insert_with(|| {
            let connection = quinn::Connection::clone(&this.connection);
            connection.close(VarInt::from_u32(0), b"");
            async move { connection.closed().await }.boxed()
        });
        let ended = ready!(closing.poll_unpin(cx));
        // Polled again, it must not run into a future that is over.
        this.closing = None;
        let asked_for = ended == ConnectionError::LocallyClosed;
        Poll::Ready(if asked_for { Ok(()) } else { Err(ended.into()) })
    }
}
