//! What a hop costs: a body there and one byte back on loopback, over every link and over a plain
//! TCP stream for scale, in one run.
//!
//! `cargo bench --bench hop`. The transports take turns, so that a busy machine slows all alike:
//! ratios are what to trust.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and stops at the first error")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use libp2p::identity::Keypair;
use ringfence::clock::now;
use ringfence::ids::Node;
use ringfence::transport::memory::MemoryNetwork;
use ringfence::transport::quic::{QuicLink, QuicSettings};
use ringfence::transport::{Lane, Link, LinkEvent, LinkEvents};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Bodies: a prompt's ids, and one position of the full-size model over the fp8 wire.
const BODIES: [usize; 2] = [2_000, 16_700];
const IN_FLIGHT: [usize; 2] = [1, 16];
const TURNS: usize = 10;
const ROUNDS: usize = 1_000;

/// A way to send a body and hear that it came.
enum Wire {
    Tcp(TcpStream),
    Link { link: Arc<dyn Link>, events: LinkEvents, to: Node },
}

impl Wire {
    async fn tcp() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let mut body = Vec::new();
            while let Ok(length) = stream.read_u32_le().await {
                body.resize(length as usize, 0);
                stream.read_exact(&mut body).await.unwrap();
                stream.write_all(&[1]).await.unwrap();
            }
        });
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self::Tcp(stream)
    }

    async fn memory() -> Self {
        let network = MemoryNetwork::new();
        Self::between(network.link(), network.link()).await
    }

    async fn quic() -> Self {
        let settings = || QuicSettings::new(Keypair::generate_ed25519());
        Self::between(QuicLink::start(settings()).await.unwrap(), QuicLink::start(settings()).await.unwrap()).await
    }

    async fn between(near: (Arc<dyn Link>, LinkEvents), far: (Arc<dyn Link>, LinkEvents)) -> Self {
        let (link, mut events) = near;
        let (echo, mut heard) = far;
        let to = link.dial(echo.addresses()[0].clone()).await.unwrap();
        assert!(matches!(events.recv().await, Some(LinkEvent::Connected { .. })));
        tokio::spawn(async move {
            while let Some(event) = heard.recv().await {
                if let LinkEvent::Received { peer, .. } = event {
                    echo.send(peer, Lane::Data, Bytes::from_static(&[1])).await.unwrap();
                }
            }
        });
        Self::Link { link, events, to }
    }

    async fn send(&mut self, body: &Bytes, scratch: &mut Vec<u8>) {
        match self {
            Self::Tcp(stream) => {
                scratch.clear();
                scratch.extend_from_slice(&(body.len() as u32).to_le_bytes());
                scratch.extend_from_slice(body);
                stream.write_all(scratch).await.unwrap();
            }
            Self::Link { link, to, .. } => link.send(*to, Lane::Data, body.clone()).await.unwrap(),
        }
    }

    async fn hear(&mut self) {
        match self {
            Self::Tcp(stream) => {
                stream.read_u8().await.unwrap();
            }
            Self::Link { events, .. } => {
                assert!(matches!(events.recv().await, Some(LinkEvent::Received { .. })));
            }
        }
    }

    async fn turn(&mut self, body: &Bytes, in_flight: usize, into: &mut Vec<Duration>) {
        let mut sent: VecDeque<Instant> = VecDeque::new();
        let mut scratch = Vec::new();
        for round in 0..ROUNDS + in_flight {
            if sent.len() == in_flight || round >= ROUNDS {
                self.hear().await;
                into.push(now() - sent.pop_front().unwrap());
            }
            if round < ROUNDS {
                sent.push_back(now());
                self.send(body, &mut scratch).await;
            }
        }
    }
}

fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    sorted[(sorted.len() - 1) * percent / 100].as_secs_f64() * 1e6
}

#[tokio::main(flavor = "multi_thread")]
async fn main() {
    let mut wires = [("tcp", Wire::tcp().await), ("memory", Wire::memory().await), ("quic", Wire::quic().await)];
    println!("round trips, body there and one byte back, in µs; {} rounds each", TURNS * ROUNDS);
    println!("{:>8} {:>9}  {:<8} {:>8} {:>8} {:>7}", "bytes", "in flight", "wire", "p50", "p95", "× tcp");
    for bytes in BODIES {
        for in_flight in IN_FLIGHT {
            let body = Bytes::from(vec![0x5a; bytes]);
            let mut taken = [const { Vec::new() }; 3];
            for turn in 0..=TURNS {
                for ((_, wire), taken) in wires.iter_mut().zip(&mut taken) {
                    wire.turn(&body, in_flight, taken).await;
                    if turn == 0 {
                        // Warming up.
                        taken.clear();
                    }
                }
            }
            let mut tcp = None;
            for ((name, _), taken) in wires.iter().zip(&mut taken) {
                taken.sort_unstable();
                let (p50, p95) = (percentile(taken, 50), percentile(taken, 95));
                let scale = p50 / *tcp.get_or_insert(p50);
                println!("{bytes:>8} {in_flight:>9}  {name:<8} {p50:>8.1} {p95:>8.1} {scale:>7.2}");
            }
        }
    }
}
