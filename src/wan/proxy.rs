//! A UDP proxy over the paths: what an owner holds of it.
//!
//! [`Proxy::bind`] takes an address, [`Proxy::start`] puts it in front of a target, and the
//! [`ProxyHandle`] changes and measures it. The packets are moved by a thread of the proxy's own
//! (see [`pump`](super::pump)), so no async runtime is needed, and a busy one delays nothing.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;

use super::Way;
use super::path::PathStats;
use super::pump::{self, Shared};
use super::settings::{SettingsError, WanSettings};
use crate::clock;

/// Bytes that the system is asked to keep for each socket, so that a burst meets the emulated
/// queue and not the socket's; it may give less (`net.core.rmem_max`).
const SOCKET_BUFFER: usize = 4 << 20;

/// How a proxy serves.
#[derive(Debug, Clone)]
pub struct ProxySettings {
    /// What the paths do. Default nothing.
    pub wan: WanSettings,
    /// Seed of everything that is random; every path gets its own from it. Default 0.
    pub seed: u64,
    /// Clients at once, each with a socket towards the target and two paths; packets of further
    /// ones are refused. Default 64. Larger may hold more memory, up to 64 MiB a client.
    pub clients_max: usize,
    /// Time without a packet after which a client is forgotten. Default 60 s. Larger keeps the
    /// sockets of clients that are gone for longer.
    pub idle: Duration,
}

impl Default for ProxySettings {
    fn default() -> Self {
        Self { wan: WanSettings::default(), seed: 0, clients_max: 64, idle: Duration::from_secs(60) }
    }
}

/// Why a proxy could not start.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The address can't be listened on.
    #[error("cannot listen on UDP {address}: {why}; give another port, or 0 for a free one")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        why: io::Error,
    },
    /// It would forward to itself.
    #[error("the target {target} is the proxy's own address: give the address of the process behind it")]
    Itself {
        /// The target.
        target: SocketAddr,
    },
    /// The target is no place.
    #[error("the target {target} is no address to send to: give the IP address and the port of the process behind it")]
    Nowhere {
        /// The target.
        target: SocketAddr,
    },
    /// The system gave no thread, or nothing to wake it with.
    #[error("cannot start the proxy's thread: {why}")]
    Thread {
        /// What the system said.
        why: io::Error,
    },
}

/// What became of a client's packets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClientStats {
    /// The client's address.
    pub client: SocketAddr,
    /// Its packets to the target.
    #[serde(rename = "in")]
    pub inward: PathStats,
    /// The target's packets to it.
    #[serde(rename = "out")]
    pub outward: PathStats,
}

/// What became of a proxy's packets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProxyStats {
    /// To the target, all clients that ever were.
    #[serde(rename = "in")]
    pub inward: PathStats,
    /// From the target, all clients that ever were.
    #[serde(rename = "out")]
    pub outward: PathStats,
    /// Each client that there is.
    pub clients: Vec<ClientStats>,
    /// Clients that were idle for too long.
    pub expired: u64,
    /// Packets of clients beyond the limit, or for which the system gave no socket.
    pub refused: u64,
    /// Packets that the system did not take from the proxy: they count as forwarded above.
    pub unsent: u64,
    /// Packets that the system dropped before the proxy could read them, of the sockets that it
    /// has; `None` where the system does not say. Not zero: the machine is too busy to emulate this.
    pub overrun: Option<u64>,
}

/// An address that is listened on; packets wait in its socket until [`Proxy::start`].
#[derive(Debug)]
pub struct Proxy {
    socket: UdpSocket,
    address: SocketAddr,
}

/// A proxy at work. The last clone that is dropped stops it.
#[derive(Clone)]
pub struct ProxyHandle(Arc<Running>);

struct Running {
    address: SocketAddr,
    target: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on an address; port 0 takes a free one.
    ///
    /// # Errors
    /// [`ProxyError::Bind`].
    pub fn bind(address: SocketAddr) -> Result<Self, ProxyError> {
        let socket = open(address).map_err(|why| ProxyError::Bind { address, why })?;
        let bound = socket.local_addr().map_err(|why| ProxyError::Bind { address, why })?;
        Ok(Self { socket, address: bound })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Forwards to `target` what comes, on a thread of its own.
    ///
    /// # Errors
    /// [`ProxyError`] where the target can't be one, or the system gives no thread.
    pub fn start(self, target: SocketAddr, settings: ProxySettings) -> Result<ProxyHandle, ProxyError> {
        if target.port() == 0 || target.ip().is_unspecified() {
            return Err(ProxyError::Nowhere { target });
        }
        let everywhere = self.address.ip().is_unspecified() && target.ip().is_loopback();
        if target == self.address || (everywhere && target.port() == self.address.port()) {
            return Err(ProxyError::Itself { target });
        }
        let shared = Shared::new(settings).map_err(|why| ProxyError::Thread { why })?;
        let thread = pump::start(self.socket, target, Arc::clone(&shared)).map_err(|why| ProxyError::Thread { why })?;
        Ok(ProxyHandle(Arc::new(Running { address: self.address, target, shared, thread: Some(thread) })))
    }
}

impl ProxyHandle {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// Where it forwards to.
    #[must_use]
    pub fn target(&self) -> SocketAddr {
        self.0.target
    }

    /// What its paths do.
    #[must_use]
    pub fn settings(&self) -> WanSettings {
        self.0.shared.lock().wan().clone()
    }

    /// Changes what all paths do, those of clients to come too.
    pub fn set(&self, wan: WanSettings) {
        self.0.shared.change(|state, now| state.set(wan, now));
    }

    /// Changes the fields in `text`, and keeps the others; gives the settings that result.
    ///
    /// # Errors
    /// [`SettingsError`]; nothing is changed then.
    pub fn set_text(&self, text: &str) -> Result<WanSettings, SettingsError> {
        let mut state = self.0.shared.lock();
        let wan = state.wan().with(text)?;
        state.set(wan.clone(), clock::now());
        drop(state);
        self.0.shared.wake();
        Ok(wan)
    }

    /// Lets nothing through in a direction; what is inside is lost.
    pub fn cut(&self, way: Way) {
        self.0.shared.change(|state, now| state.set_cut(way, true, now));
    }

    /// Lets nothing through in either direction.
    pub fn cut_both(&self) {
        Way::BOTH.into_iter().for_each(|way| self.cut(way));
    }

    /// Takes back every cut.
    pub fn heal(&self) {
        self.0.shared.change(|state, now| Way::BOTH.into_iter().for_each(|way| state.set_cut(way, false, now)));
    }

    /// The directions that are cut.
    #[must_use]
    pub fn cuts(&self) -> Vec<Way> {
        let state = self.0.shared.lock();
        Way::BOTH.into_iter().filter(|way| state.is_cut(*way)).collect()
    }

    /// What became of its packets.
    #[must_use]
    pub fn stats(&self) -> ProxyStats {
        self.0.shared.stats()
    }
}

impl fmt::Debug for ProxyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxyHandle").field("address", &self.0.address).field("target", &self.0.target).finish()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on stderr.
            let _ = thread.join();
        }
    }
}

/// A socket that doesn't block, with room for bursts.
fn open(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(address)?;
    socket.set_nonblocking(true)?;
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER)?;
    rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER)?;
    Ok(socket)
}

/// A socket that sends to, and hears from, a target only.
pub(super) fn towards(target: SocketAddr) -> io::Result<UdpSocket> {
    let ip: IpAddr = match target.ip() {
        IpAddr::V4(ip) if ip.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(ip) if ip.is_loopback() => Ipv6Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = open(SocketAddr::new(ip, 0))?;
    socket.connect(target)?;
    Ok(socket)
}
