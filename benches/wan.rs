//! How true an emulated delay is, and how much a proxy carries, in one run: `cargo bench --bench wan`.
//!
//! Lateness is what a packet takes from one socket to another beyond the delay that is set, the
//! sockets' own time included: the first row has no proxy. The last rows drive the same paths from an
//! async runtime's timers. All take turns, so that a busy machine slows all alike.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and stops at the first error")]

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ringfence::clock::now;
use ringfence::wan::{Path, PathSettings, Proxy, ProxyHandle, ProxySettings, WanSettings};
use tokio::runtime::{Builder, Runtime};

const DELAYS_MS: [u64; 4] = [0, 1, 5, 20];
const TURNS: usize = 8;
const PACKETS: usize = 250;
/// Between two packets of a turn.
const GAP: Duration = Duration::from_micros(730);
/// Packets of the throughput run, and how many of them may be under way.
const FLOOD: u64 = 200_000;
const WINDOW: u64 = 128;
const PATIENCE: Duration = Duration::from_secs(10);

fn local() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind(local()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 4 << 20).unwrap();
    socket
}

/// What packets go through.
#[derive(Debug)]
enum Way {
    Direct,
    Thread(ProxyHandle),
    /// The runtime must live as long.
    Async(SocketAddr, #[allow(dead_code, reason = "it runs the shell")] Runtime),
}

impl Way {
    fn thread(target: SocketAddr, delay: Duration) -> Self {
        let inward = PathSettings { delay, ..PathSettings::default() };
        let wan = WanSettings { inward, ..WanSettings::default() };
        let settings = ProxySettings { wan, ..ProxySettings::default() };
        Self::Thread(Proxy::bind(local()).unwrap().start(target, settings).unwrap())
    }

    fn asynchronous(target: SocketAddr, delay: Duration) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut path = Path::new(PathSettings { delay, ..PathSettings::default() }, 0);
        let socket = runtime.block_on(tokio::net::UdpSocket::bind(local())).unwrap();
        let address = socket.local_addr().unwrap();
        runtime.spawn(async move {
            let mut buffer = [0; 2_048];
            loop {
                let timeout = path.poll_timeout();
                let due = async {
                    match timeout {
                        Some(at) => tokio::time::sleep_until(at.into()).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    bytes = socket.recv(&mut buffer) => path.handle_packet(&buffer[..bytes.unwrap()], now()),
                    () = due => {}
                }
                while let Some(packet) = path.poll_transmit(now()) {
                    socket.send_to(&packet, target).await.unwrap();
                }
            }
        });
        Self::Async(address, runtime)
    }

    fn address(&self, target: SocketAddr) -> SocketAddr {
        match self {
            Self::Direct => target,
            Self::Thread(proxy) => proxy.address(),
            Self::Async(address, _) => *address,
        }
    }
}

/// Lateness of each packet of a turn.
fn turn(way: &Way, target: &UdpSocket, delay: Duration) -> Vec<Duration> {
    let (client, to) = (socket(), way.address(target.local_addr().unwrap()));
    std::thread::scope(|scope| {
        let heard = scope.spawn(|| {
            let mut buffer = [0; 2_048];
            let mut heard = vec![None; PACKETS];
            for at in 0..PACKETS {
                target.recv(&mut buffer).unwrap_or_else(|error| {
                    let stats = if let Way::Thread(proxy) = way { Some(proxy.stats()) } else { None };
                    panic!("{error}: packet {at} of {way:?} {stats:?}")
                });
                heard[usize::from(u16::from_le_bytes([buffer[0], buffer[1]]))] = Some(now());
            }
            heard
        });
        let sent: Vec<Instant> = (0..PACKETS)
            .map(|number| {
                std::thread::sleep(GAP);
                let mut packet = [0; 1_200];
                packet[..2].copy_from_slice(&u16::try_from(number).unwrap().to_le_bytes());
                let at = now();
                client.send_to(&packet, to).unwrap();
                at
            })
            .collect();
        let heard = heard.join().unwrap();
        sent.iter().zip(heard).map(|(sent, heard)| heard.unwrap() - *sent - delay).collect()
    })
}

fn print_row(name: &str, mut late: Vec<Duration>) {
    late.sort_unstable();
    let at = |share: f64| late[((late.len() - 1) as f64 * share) as usize].as_micros();
    println!("{name:<28} {:>8} {:>8} {:>8} {:>8}", at(0.0), at(0.5), at(0.99), at(1.0));
}

/// Packets per second through a proxy that does nothing.
fn flood(target: &UdpSocket) {
    let way = Way::thread(target.local_addr().unwrap(), Duration::ZERO);
    let (client, to) = (socket(), way.address(target.local_addr().unwrap()));
    let heard = AtomicU64::new(0);
    let begun = now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 2_048];
            while heard.load(Ordering::Relaxed) < FLOOD {
                target.recv(&mut buffer).unwrap();
                heard.fetch_add(1, Ordering::Relaxed);
            }
        });
        for sent in 0..FLOOD {
            while sent - heard.load(Ordering::Relaxed) >= WINDOW {
                std::thread::yield_now();
            }
            client.send_to(&[0; 1_200], to).unwrap();
        }
    });
    let rate = FLOOD as f64 / begun.elapsed().as_secs_f64();
    println!(
        "\nthrough a proxy that does nothing: {rate:.0} packets of 1,200 bytes a second, {:.2} Gbit/s",
        rate * 9.6e-6
    );
}

fn main() {
    let target = socket();
    let address = target.local_addr().unwrap();
    let mut ways = vec![("no proxy".to_owned(), Duration::ZERO, Way::Direct)];
    for delay in DELAYS_MS.map(Duration::from_millis) {
        ways.push((format!("proxy, {} ms", delay.as_millis()), delay, Way::thread(address, delay)));
    }
    for delay in DELAYS_MS.map(Duration::from_millis) {
        ways.push((format!("async timers, {} ms", delay.as_millis()), delay, Way::asynchronous(address, delay)));
    }
    let mut late: BTreeMap<usize, Vec<Duration>> = BTreeMap::new();
    for _ in 0..TURNS {
        for (at, (_, delay, way)) in ways.iter().enumerate() {
            late.entry(at).or_default().extend(turn(way, &target, *delay));
        }
    }
    println!("{:<28} {:>8} {:>8} {:>8} {:>8}", "lateness in µs", "least", "p50", "p99", "most");
    for ((name, ..), late) in ways.iter().zip(late.into_values()) {
        print_row(name, late);
    }
    flood(&target);
}
