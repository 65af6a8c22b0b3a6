//! What the settings of a path are worth: frames over an emulated WAN with one setting changed at a time.
//!
//! `cargo bench --bench path [congestion|acks|order|handshake|loopback]…`, all by default. A sample
//! is a frame of 33,000 bytes there and four bytes back; samples of several runs, each with other
//! losses, are taken together.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and stops at the first error")]

#[path = "../tests/endpoint/rig.rs"]
#[allow(dead_code, reason = "a bench asks less of the rig than the tests do")]
mod rig;

use std::time::Duration;

use futures::{AsyncReadExt, AsyncWriteExt};
use ringfence::clock::now;
use ringfence::transport::endpoint::{AckFrequency, Congestion, Muxer, PathSettings, PathStats, Stream};
use ringfence::wan::{Proxy, ProxySettings};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use rig::{Host, accept, address_of, connect, open, socket_of};

/// One position of the full-size model over the bf16 wire, in bytes.
const FRAME: usize = 33_000;

/// What is measured: a setting's value, a network, and how it is used.
#[derive(Clone)]
struct Case {
    name: String,
    settings: PathSettings,
    /// As [`ringfence::wan::WanSettings`] has it; empty for no proxy at all.
    wan: &'static str,
    lanes: usize,
    in_flight: usize,
    frames: usize,
    runs: u64,
}

/// What one run gave.
struct Run {
    handshake: Duration,
    frames: Vec<Duration>,
    took: Duration,
    stats: PathStats,
}

impl Case {
    fn new(name: impl Into<String>, wan: &'static str, in_flight: usize) -> Self {
        let settings = PathSettings::default();
        let (frames, runs) = if in_flight == 1 { (150, 8) } else { (300, 3) };
        Self { name: name.into(), settings, wan, lanes: 16, in_flight, frames, runs }
    }

    fn with(mut self, change: impl FnOnce(&mut PathSettings)) -> Self {
        change(&mut self.settings);
        self
    }

    async fn run(self, seed: u64) -> Run {
        let (dialler, (mut host, address)) =
            (Host::new(self.settings.clone()), Host::listening(self.settings.clone()).await);
        let proxy = (!self.wan.is_empty()).then(|| {
            let settings = ProxySettings { wan: self.wan.parse().unwrap(), seed, ..ProxySettings::default() };
            Proxy::bind(([127, 0, 0, 1], 0).into()).unwrap().start(socket_of(&address), settings).unwrap()
        });
        let address = proxy.as_ref().map_or(address, |proxy| address_of(proxy.address()));
        let begun = now();
        let (mut near, mut far) = connect(&dialler, &mut host, &address).await;
        let handshake = begun.elapsed();
        let mut lanes = Lanes::open(&mut near, &mut far, self.lanes).await;
        // The path's packet size is found meanwhile.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let begun = now();
        let frames = lanes.play(self.in_flight, self.frames).await;
        Run { handshake, frames, took: begun.elapsed(), stats: dialler.book.stats(host.peer).unwrap() }
    }

    async fn report(self) {
        // Those with one frame in flight keep no core busy, and may go side by side.
        let abreast = if self.in_flight == 1 { self.runs } else { 1 };
        let mut runs = Vec::new();
        for first in (0..self.runs).step_by(abreast as usize) {
            let side_by_side: JoinSet<Run> = (first..first + abreast).map(|seed| self.clone().run(seed)).collect();
            runs.extend(side_by_side.join_all().await);
        }
        let mut frames: Vec<Duration> = runs.iter().flat_map(|run| run.frames.iter().copied()).collect();
        frames.sort_unstable();
        let seconds: f64 = runs.iter().map(|run| run.took.as_secs_f64()).sum();
        let rate = (frames.len() * FRAME) as f64 / seconds / 1e6;
        let sum = |count: fn(&PathStats) -> u64| runs.iter().map(|run| count(&run.stats)).sum::<u64>();
        let lost = 100.0 * sum(|stats| stats.packets_lost) as f64 / sum(|stats| stats.packets_sent) as f64;
        println!(
            "{:<22} {:<36} {:>5} {:>9} {:>8.1} {:>8.1} {:>8.1} {:>8.1} {rate:>8.2} {lost:>6.2} {:>6}",
            self.name,
            self.wan,
            self.lanes,
            self.in_flight,
            at(&frames, 500),
            at(&frames, 900),
            at(&frames, 990),
            at(&frames, 999),
            runs.iter().map(|run| run.stats.mtu).min().unwrap_or(0),
        );
    }
}

fn heading(what: &str) {
    println!(
        "\n{what}\n{:<22} {:<36} {:>5} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>6}",
        "setting", "network", "lanes", "in flight", "p50 ms", "p90", "p99", "p99.9", "MB/s", "lost %", "mtu"
    );
}

/// The value below which so many thousandths lie, in milliseconds.
fn at(sorted: &[Duration], thousandths: usize) -> f64 {
    sorted[(sorted.len() - 1) * thousandths / 1000].as_secs_f64() * 1e3
}

/// Streams that carry frames one way and echoes the other.
struct Lanes {
    senders: Vec<mpsc::Sender<Vec<u8>>>,
    echoes: mpsc::Receiver<usize>,
    _tasks: JoinSet<()>,
}

impl Lanes {
    async fn open(near: &mut Muxer, far: &mut Muxer, lanes: usize) -> Self {
        let (echo, echoes) = mpsc::channel(1024);
        let (mut senders, mut tasks) = (Vec::new(), JoinSet::new());
        for _ in 0..lanes {
            let (sending, receiving) = tokio::join!(open(near, b"x"), accept(far));
            tasks.spawn(answer(receiving));
            let (mut reader, mut writer) = sending.split();
            let (sender, mut queue) = mpsc::channel::<Vec<u8>>(64);
            senders.push(sender);
            tasks.spawn(async move {
                while let Some(frame) = queue.recv().await {
                    writer.write_all(&frame).await.unwrap();
                }
            });
            let echo = echo.clone();
            tasks.spawn(async move {
                let mut number = [0; 4];
                while reader.read_exact(&mut number).await.is_ok() {
                    echo.send(u32::from_le_bytes(number) as usize).await.unwrap();
                }
            });
        }
        Self { senders, echoes, _tasks: tasks }
    }

    /// Sends frames over the lanes in turn, so many at once, and says how long each took.
    async fn play(&mut self, in_flight: usize, frames: usize) -> Vec<Duration> {
        let (mut sent, mut taken) = (Vec::new(), Vec::new());
        while taken.len() < frames {
            while sent.len() < frames && sent.len() < taken.len() + in_flight {
                let mut frame = vec![0x5a; FRAME];
                frame[..4].copy_from_slice(&(sent.len() as u32).to_le_bytes());
                let lane = sent.len() % self.senders.len();
                sent.push(now());
                self.senders[lane].send(frame).await.unwrap();
            }
            let number = self.echoes.recv().await.unwrap();
            taken.push(sent[number].elapsed());
        }
        taken
    }
}

/// Reads frames and sends the first four bytes of each back.
async fn answer(mut stream: Stream) {
    let mut frame = vec![0; FRAME];
    stream.read_exact(&mut frame[..1]).await.unwrap();
    while stream.read_exact(&mut frame).await.is_ok() {
        stream.write_all(&frame[..4]).await.unwrap();
    }
}

async fn congestion() {
    heading("congestion: initial window and floor, in KiB");
    let cubic = |initial: u64, floor: u64| PathSettings {
        initial_window: initial << 10,
        congestion: Congestion::CubicWithFloor { floor_bytes: (floor << 10).max(2_400) },
        ..PathSettings::default()
    };
    let bbr = PathSettings { congestion: Congestion::Bbr, ..PathSettings::default() };
    let networks = ["rtt=40ms", "rtt=40ms,loss=0.1%", "rtt=40ms,loss=1%", "rtt=40ms,rate=20mbit,queue=128kb"];
    for (wan, in_flight) in networks.into_iter().flat_map(|wan| [(wan, 1), (wan, 16)]) {
        for (initial, floor) in
            [(12, 0), (1024, 0), (256, 64), (256, 256), (1024, 256), (1024, 512), (1024, 768), (1024, 1024)]
        {
            let settings = cubic(initial, floor);
            Case { settings, ..Case::new(format!("cubic {initial}, floor {floor}"), wan, in_flight) }.report().await;
        }
        Case { settings: bbr.clone(), ..Case::new("bbr 1024", wan, in_flight) }.report().await;
    }
}

async fn acks() {
    heading("acks: packets without an acknowledgement, and its longest delay");
    for wan in ["rtt=40ms,loss=0.1%", "rtt=40ms,loss=1%", "rtt=40ms,jitter=5ms,loss=1%"] {
        for acks in [None, Some((1, 25)), Some((1, 10)), Some((1, 5)), Some((1, 1)), Some((4, 10)), Some((8, 10))] {
            let name = acks.map_or("QUIC's own".to_owned(), |(packets, ms)| format!("{packets} packets, {ms} ms"));
            let acks = acks.map(|(packets, ms)| AckFrequency { packets, delay: Duration::from_millis(ms) });
            Case { frames: 300, ..Case::new(name, wan, 1) }.with(|settings| settings.acks = acks).report().await;
        }
    }
}

async fn order() {
    heading("order: streams of one priority by turns, or in the order of their data");
    let networks = ["rtt=40ms,loss=0.1%", "rtt=40ms,rate=50mbit,queue=1mb", "rtt=40ms,rate=50mbit,queue=1mb,loss=0.1%"];
    for wan in networks {
        for (lanes, in_flight) in [(1, 8), (4, 8), (16, 8), (1, 16), (4, 16), (16, 16)] {
            for (name, fair) in [("by turns", true), ("in order", false)] {
                let case = Case { lanes, ..Case::new(name, wan, in_flight) };
                case.with(|settings| settings.share_fairly = fair).report().await;
            }
        }
    }
}

async fn handshake() {
    println!(
        "\nhandshake: the assumed round trip\n{:<22} {:<36} {:>8} {:>8} {:>8}",
        "setting", "network", "p50 ms", "p90", "max"
    );
    for wan in ["rtt=40ms", "rtt=40ms,loss=5%", "rtt=150ms,loss=5%"] {
        for ms in [30, 60, 100, 150, 333] {
            let mut taken = Vec::new();
            for seeds in 0..8 {
                let mut runs = JoinSet::new();
                for seed in 0..20 {
                    let case = Case { frames: 1, lanes: 1, ..Case::new("", wan, 1) };
                    let case = case.with(|settings| settings.initial_rtt = Duration::from_millis(ms));
                    runs.spawn(case.run(seeds * 20 + seed));
                }
                taken.extend(runs.join_all().await.into_iter().map(|run| run.handshake));
            }
            taken.sort_unstable();
            let [median, high, longest] = [500, 900, 1000].map(|thousandths| at(&taken, thousandths));
            println!("{:<22} {wan:<36} {median:>8.0} {high:>8.0} {longest:>8.0}", format!("{ms} ms"));
        }
    }
}

async fn loopback() {
    heading("loopback: the largest packet, and the sockets' buffers");
    for in_flight in [1, 16] {
        let case = |name: String| Case { frames: 4_000, runs: 1, ..Case::new(name, "", in_flight) };
        for bytes in [1452, 9000, 65_527] {
            case(format!("payload {bytes}")).with(|settings| settings.udp_payload_max = bytes).report().await;
        }
        for kib in [208, 1024, 4096] {
            let sockets = |settings: &mut PathSettings| {
                (settings.socket_receive_bytes, settings.socket_send_bytes) = (kib << 10, kib << 10);
            };
            case(format!("sockets {kib} KiB")).with(sockets).report().await;
        }
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let wanted = |section: &str| asked.is_empty() || asked.iter().any(|asked| asked == section);
    if wanted("congestion") {
        congestion().await;
    }
    if wanted("acks") {
        acks().await;
    }
    if wanted("order") {
        order().await;
    }
    if wanted("handshake") {
        handshake().await;
    }
    if wanted("loopback") {
        loopback().await;
    }
}
