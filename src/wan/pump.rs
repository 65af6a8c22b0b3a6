//! The thread of a proxy: moves packets between sockets and paths, on time.
//!
//! One thread owns all sockets of a proxy and sleeps in `ppoll`, whose deadlines are in nanoseconds
//! (an async runtime's timers are a millisecond coarse). It shares the paths with the proxy's
//! handles behind one lock, held for as long as a batch takes.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::Way;
use super::draw::Draws;
use super::path::{Path, PathStats};
use super::proxy::{ClientStats, ProxySettings, ProxyStats, towards};
use super::settings::WanSettings;
use crate::clock;

/// Packets that are taken from one socket before due ones are sent.
const BATCH: usize = 32;

/// Longest datagram, in bytes.
const DATAGRAM_MAX: usize = 65_536;

/// How late the system may wake the thread, in nanoseconds; its default is 50 µs.
const TIMER_SLACK: NonZeroU64 = NonZeroU64::MIN;

/// What the thread and the handles share.
pub(super) struct Shared {
    state: Mutex<State>,
    wake: OwnedFd,
}

/// A proxy's paths.
pub(super) struct State {
    settings: ProxySettings,
    cut: [bool; 2],
    clients: BTreeMap<SocketAddr, Client>,
    /// Clients that ever were; rises with every change of `clients`, with `expired`.
    arrived: u64,
    expired: u64,
    /// What became of the packets of clients that are gone.
    past: [PathStats; 2],
    refused: u64,
    unsent: u64,
    /// The system's number of the socket that clients send to.
    front: Option<u64>,
    stopped: bool,
}

struct Client {
    socket: Arc<UdpSocket>,
    paths: [Path; 2],
    heard: Instant,
}

impl Shared {
    pub(super) fn new(settings: ProxySettings) -> io::Result<Arc<Self>> {
        let state = State {
            settings,
            cut: [false; 2],
            clients: BTreeMap::new(),
            arrived: 0,
            expired: 0,
            past: [PathStats::default(); 2],
            refused: 0,
            unsent: 0,
            front: None,
            stopped: false,
        };
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Arc::new(Self { state: Mutex::new(state), wake }))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and lets the thread see it.
    pub(super) fn change(&self, change: impl FnOnce(&mut State, Instant)) {
        change(&mut self.lock(), clock::now());
        self.wake();
    }

    pub(super) fn wake(&self) {
        // It can only fail where so many wakes wait that one more changes nothing.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    pub(super) fn stop(&self) {
        self.change(|state, _| state.stopped = true);
    }

    pub(super) fn stats(&self) -> ProxyStats {
        let state = self.lock();
        let clients: Vec<ClientStats> = state.clients.iter().map(|(client, paths)| paths.stats(*client)).collect();
        let sockets = state.clients.values().filter_map(|client| inode(&*client.socket));
        let sockets: Vec<u64> = sockets.chain(state.front).collect();
        let [mut inward, mut outward] = state.past;
        let (expired, refused, unsent) = (state.expired, state.refused, state.unsent);
        drop(state);
        for client in &clients {
            inward += client.inward;
            outward += client.outward;
        }
        ProxyStats { inward, outward, clients, expired, refused, unsent, overrun: overrun(&sockets) }
    }
}

impl State {
    pub(super) fn wan(&self) -> &WanSettings {
        &self.settings.wan
    }

    pub(super) fn is_cut(&self, way: Way) -> bool {
        self.cut[way as usize]
    }

    pub(super) fn set(&mut self, wan: WanSettings, now: Instant) {
        for client in self.clients.values_mut() {
            for way in Way::BOTH {
                client.paths[way as usize].set(wan.of(way).clone(), now);
            }
        }
        self.settings.wan = wan;
    }

    pub(super) fn set_cut(&mut self, way: Way, cut: bool, now: Instant) {
        self.cut[way as usize] = cut;
        for client in self.clients.values_mut() {
            client.paths[way as usize].set_cut(cut, now);
        }
    }

    /// A number that differs whenever the set of clients does.
    fn generation(&self) -> u64 {
        self.arrived + self.expired
    }

    /// The paths of a client; makes them at its first packet.
    fn client(&mut self, address: SocketAddr, target: SocketAddr, now: Instant) -> Option<&mut Client> {
        if !self.clients.contains_key(&address) {
            if self.clients.len() >= self.settings.clients_max {
                return None;
            }
            let socket = towards(target)
                .inspect_err(|error| tracing::warn!(%address, %target, %error, "no socket for a client"))
                .ok()?;
            let paths = Way::BOTH.map(|way| {
                let seed = Draws::derive(self.settings.seed, 2 * self.arrived + way as u64);
                let mut path = Path::new(self.settings.wan.of(way).clone(), seed);
                path.set_cut(self.cut[way as usize], now);
                path
            });
            self.arrived += 1;
            self.clients.insert(address, Client { socket: Arc::new(socket), paths, heard: now });
        }
        self.clients.get_mut(&address)
    }

    /// Sends what is due.
    fn transmit(&mut self, front: &UdpSocket, now: Instant) {
        for (address, client) in &mut self.clients {
            let [inward, outward] = &mut client.paths;
            while let Some(packet) = inward.poll_transmit(now) {
                self.unsent += u64::from(client.socket.send(&packet).is_err());
            }
            while let Some(packet) = outward.poll_transmit(now) {
                self.unsent += u64::from(front.send_to(&packet, *address).is_err());
            }
        }
    }

    /// Forgets clients that are idle.
    fn expire(&mut self, now: Instant) {
        let idle = self.settings.idle;
        let (past, expired) = (&mut self.past, &mut self.expired);
        self.clients.retain(|_, client| {
            let stays = client.idle_at(idle).is_none_or(|at| now < at);
            if !stays {
                *expired += 1;
                for (past, path) in past.iter_mut().zip(&client.paths) {
                    *past += path.stats();
                }
            }
            stays
        });
    }

    /// When something is to be done again.
    fn timeout(&self) -> Option<Instant> {
        let due = self.clients.values().flat_map(|client| &client.paths).filter_map(Path::poll_timeout).min();
        let idle = self.clients.values().filter_map(|client| client.idle_at(self.settings.idle)).min();
        due.into_iter().chain(idle).min()
    }
}

impl Client {
    fn stats(&self, client: SocketAddr) -> ClientStats {
        let [inward, outward] = &self.paths;
        ClientStats { client, inward: inward.stats(), outward: outward.stats() }
    }

    /// When to forget it; never while a packet is under way.
    fn idle_at(&self, idle: Duration) -> Option<Instant> {
        let empty = self.paths.iter().all(|path| path.poll_timeout().is_none());
        if empty { self.heard.checked_add(idle) } else { None }
    }
}

/// Starts the thread.
pub(super) fn start(front: UdpSocket, target: SocketAddr, shared: Arc<Shared>) -> io::Result<JoinHandle<()>> {
    shared.lock().front = inode(&front);
    let pump = Pump { front, target, shared, buffer: vec![0; DATAGRAM_MAX].into(), upstream: Vec::new(), seen: 0 };
    std::thread::Builder::new().name("wan".to_owned()).spawn(|| pump.run())
}

struct Pump {
    front: UdpSocket,
    target: SocketAddr,
    shared: Arc<Shared>,
    buffer: Box<[u8]>,
    /// The clients' sockets, as of generation `seen`.
    upstream: Vec<(SocketAddr, Arc<UdpSocket>)>,
    seen: u64,
}

/// Which sockets have something to read.
struct Ready {
    front: bool,
    upstream: Vec<usize>,
}

impl Pump {
    fn run(mut self) {
        if let Err(error) = rustix::thread::set_current_timer_slack(Some(TIMER_SLACK)) {
            tracing::debug!(%error, "packets may be some 50 µs late");
        }
        let mut ready = Ready { front: false, upstream: Vec::new() };
        while let Some(timeout) = self.step(&ready) {
            match self.sleep(timeout) {
                Ok(woken) => ready = woken,
                Err(error) => {
                    tracing::error!(%error, target = %self.target, "an emulated network stops");
                    return;
                }
            }
        }
    }

    /// Moves packets; gives the time of the next thing to do, and `None` at the end.
    fn step(&mut self, ready: &Ready) -> Option<Option<Instant>> {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        if state.stopped {
            return None;
        }
        if ready.front {
            self.receive(&mut state);
        }
        for at in &ready.upstream {
            let (address, socket) = &self.upstream[*at];
            if let Some(client) = state.clients.get_mut(address) {
                answer(client, socket, &mut self.buffer);
            }
        }
        let now = clock::now();
        state.transmit(&self.front, now);
        state.expire(now);
        if state.generation() != self.seen {
            self.seen = state.generation();
            self.upstream =
                state.clients.iter().map(|(address, client)| (*address, Arc::clone(&client.socket))).collect();
        }
        Some(state.timeout())
    }

    /// Takes packets of clients.
    fn receive(&mut self, state: &mut State) {
        for _ in 0..BATCH {
            match self.front.recv_from(&mut self.buffer) {
                Ok((bytes, address)) => {
                    let now = clock::now();
                    match state.client(address, self.target, now) {
                        Some(client) => {
                            client.heard = now;
                            client.paths[Way::In as usize].handle_packet(&self.buffer[..bytes], now);
                        }
                        None => state.refused += 1,
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Somebody whom a packet was sent to is gone: the next one may be there.
                Err(_) => {}
            }
        }
    }

    /// Waits until a socket has something, somebody wakes the thread, or the time comes.
    fn sleep(&self, until: Option<Instant>) -> io::Result<Ready> {
        let wake = PollFd::new(&self.shared.wake, PollFlags::IN);
        let front = PollFd::new(&self.front, PollFlags::IN);
        let upstream = self.upstream.iter().map(|(_, socket)| PollFd::new(&**socket, PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = [wake, front].into_iter().chain(upstream).collect();
        let timeout = until.map(|until| until.saturating_duration_since(clock::now()));
        match poll(&mut fds, timeout.map(timespec).as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let woken = |fd: &PollFd<'_>| !fd.revents().is_empty();
        if woken(&fds[0]) {
            // Several wakes are one.
            let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        }
        let upstream = fds[2..].iter().enumerate().filter(|(_, fd)| woken(fd)).map(|(at, _)| at).collect();
        Ok(Ready { front: woken(&fds[1]), upstream })
    }
}

/// Takes packets of the target for a client.
fn answer(client: &mut Client, socket: &UdpSocket, buffer: &mut [u8]) {
    for _ in 0..BATCH {
        match socket.recv(buffer) {
            Ok(bytes) => {
                client.heard = clock::now();
                client.paths[Way::Out as usize].handle_packet(&buffer[..bytes], client.heard);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            // Nobody listens at the target: somebody may when the next packet comes.
            Err(_) => {}
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

/// The number under which the system knows a socket.
fn inode(socket: impl AsFd) -> Option<u64> {
    rustix::fs::fstat(socket).ok().map(|stat| stat.st_ino)
}

/// Packets that the system dropped because these sockets' buffers were full.
fn overrun(inodes: &[u64]) -> Option<u64> {
    let tables = ["/proc/net/udp", "/proc/net/udp6"].map(|table| std::fs::read_to_string(table).ok());
    let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
    let drops = lines.filter_map(|line| {
        // sl local rem st tx:rx tr:when retrnsmt uid timeout inode ref pointer drops
        let mut fields = line.split_whitespace().skip(9);
        let inode: u64 = fields.next()?.parse().ok()?;
        let drops: u64 = fields.nth(2)?.parse().ok()?;
        inodes.contains(&inode).then_some(drops)
    });
    tables.iter().any(Option::is_some).then(|| drops.sum())
}
