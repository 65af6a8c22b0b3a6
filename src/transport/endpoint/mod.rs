//! QUIC as a libp2p transport of our own: sockets, handshakes, connections and their streams.
//!
//! Owns everything between a UDP socket and libp2p's swarm. A [`QuicTransport`] listens and dials;
//! every connection that it makes is a [`Muxer`], whose streams are [`Stream`]s. What a path may do
//! is said once, in [`PathSettings`]; what it does can be read at any time from a [`PathBook`].
//!
//! | file            | owns                                                                  |
//! |-----------------|-----------------------------------------------------------------------|
//! | `settings.rs`   | how connections behave, and the bounds of that                        |
//! | `congestion.rs` | the congestion window that never falls below a floor                  |
//! | `tls.rs`        | the handshake: who the peer is, and whether it is the expected one    |
//! | `reset.rs`      | how a process that starts again ends the connections of its former self |
//! | `addr.rs`       | multiaddresses and socket addresses                                   |
//! | `socket.rs`     | UDP sockets and their buffers                                         |
//! | `listener.rs`   | one socket that listens: its addresses and what comes in              |
//! | `upgrade.rs`    | from a first packet to a connection with a named peer                 |
//! | `punch.rs`      | dialling as the listener, through a NAT                               |
//! | `transport.rs`  | all listeners and dials, as libp2p wants them                         |
//! | `muxer.rs`      | one connection                                                        |
//! | `stream.rs`     | one stream, and the priority that its protocol has                    |
//! | `lend.rs`       | bytes that a stream may take without a copy                           |
//! | `book.rs`       | what the paths of live connections are like                           |
//!
//! It speaks what libp2p's QUIC transport speaks (QUIC version 1, the `libp2p` ALPN, the libp2p TLS
//! certificate), so either may dial the other.

mod addr;
mod book;
mod congestion;
mod lend;
mod listener;
mod muxer;
mod punch;
mod reset;
mod settings;
mod socket;
mod stream;
mod tls;
mod transport;
mod upgrade;

use std::io;
use std::net::SocketAddr;

use libp2p::PeerId;

pub use book::{PathBook, PathStats};
pub(crate) use lend::lend;
pub use muxer::Muxer;
pub use settings::{AckFrequency, Congestion, PathSettingError, PathSettings};
pub use stream::Stream;
pub use transport::QuicTransport;

/// Why a transport could not start, listen, dial, or go on with a connection.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// The system refused a socket, or something on it.
    #[error("the UDP socket: {0}")]
    Socket(#[from] io::Error),
    /// The node's key makes no certificate.
    #[error("the node's key makes no TLS certificate: {why}; use an ed25519 key")]
    Certificate {
        /// What went wrong.
        why: String,
    },
    /// A dial did not get as far as the network.
    #[error("cannot dial: {0}")]
    Dial(#[from] quinn::ConnectError),
    /// The connection ended, or never came to be.
    #[error(transparent)]
    Connection(#[from] quinn::ConnectionError),
    /// No handshake in time.
    #[error("no QUIC handshake within {after_ms} ms: nobody answers there, or packets are lost")]
    HandshakeTimedOut {
        /// How long it was waited for, in milliseconds.
        after_ms: u64,
    },
    /// Another peer than the one that was dialled.
    #[error(transparent)]
    WrongPeer(Box<WrongPeer>),
    /// The peer's certificate names nobody.
    #[error("the peer's certificate is no libp2p certificate: {why}")]
    Nameless {
        /// What came instead.
        why: String,
    },
    /// Dialling as the listener needs a socket that listens.
    #[error(
        "cannot wait for {remote} to dial in: no listener of this node can reach it; listen on such an address first"
    )]
    NoListener {
        /// Where the peer is.
        remote: SocketAddr,
    },
    /// Dialling as the listener, twice at once.
    #[error("{remote} is waited for already: wait for the outcome of the other dial")]
    PunchInProgress {
        /// Where the peer is.
        remote: SocketAddr,
    },
    /// A listener's socket is gone.
    #[error("the listener's socket failed: listen again")]
    ListenerLost,
}

/// Another peer answered than the one that was dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected peer {expected}, but {obtained} answered: check the address")]
pub struct WrongPeer {
    /// Who was dialled.
    pub expected: PeerId,
    /// Who answered.
    pub obtained: PeerId,
}

impl WrongPeer {
    fn check(expected: PeerId, obtained: PeerId) -> Result<(), EndpointError> {
        if expected == obtained { Ok(()) } else { Err(EndpointError::WrongPeer(Box::new(Self { expected, obtained }))) }
    }
}
