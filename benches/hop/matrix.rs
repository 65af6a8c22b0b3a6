//! Frames and echoes by size, round trip, loss and number under way.

use std::time::Duration;

use ringfence::clock::now;

use super::Args;
use super::stack::{Hop, Kind, Load, Wan};
use super::table::{Bars, Times, head, ms, ratio, row};

/// Round trips by default, in ms.
const RTTS: [u64; 4] = [0, 20, 40, 100];

/// The cell that a bar is for.
const BAR: (u64, f64, u8) = (40, 0.1, 16);

/// Most that its p50 may be, in round trips.
const BAR_ROUND_TRIPS: f64 = 1.3;

/// How much longer it is measured.
const BAR_TIMES: f64 = 4.0;

/// One cell.
#[derive(Debug, Clone, Copy)]
struct Cell {
    rtt: u64,
    loss: f64,
    in_flight: u8,
    frame: usize,
}

impl Cell {
    fn is_barred(self) -> bool {
        (self.rtt, self.loss, self.in_flight) == BAR
    }
}

/// What a stack did in a cell.
struct Taken {
    kind: Kind,
    times: Vec<Duration>,
    lasted: Duration,
}

/// Measures every cell.
pub(crate) async fn run(args: &Args, bars: &mut Bars) {
    let rtts = if args.rtt.is_empty() { RTTS.to_vec() } else { args.rtt.clone() };
    let title = format!(
        "matrix: a frame there and a one-byte echo back; {} s a stack and cell in {} turns; `quinn, tuned` has our \
         transport settings; TCP is one connection, through a relay that loses nothing and has no slow start, so it has \
         rows without loss only; × RTT and × quinn (tuned) are of the p50",
        args.seconds, args.turns
    );
    let columns = ["RTT ms", "loss %", "in flight", "bytes", "stack", "frames", "p50 ms", "p99 ms", "MB/s"];
    head(&title, &[&columns[..], &["× RTT", "× quinn"]].concat());
    for rtt in rtts {
        for loss in args.loss.iter().copied().filter(|loss| rtt > 0 || *loss == 0.0) {
            for in_flight in args.in_flight.iter().copied() {
                for frame in args.frame.iter().copied() {
                    let cell = Cell { rtt, loss, in_flight, frame };
                    print(cell, &measure(args, cell).await, bars);
                }
            }
        }
    }
}

async fn measure(args: &Args, cell: Cell) -> Vec<Taken> {
    let wan = Wan::new(cell.rtt, cell.loss);
    let mut hops = Vec::new();
    for kind in args.stack.iter().copied().filter(|kind| *kind != Kind::Tcp || cell.loss == 0.0) {
        let hop = Hop::connect(kind, &wan).await;
        hops.push((hop, Taken { kind, times: Vec::new(), lasted: Duration::ZERO }));
    }
    // A window that collapses takes its time.
    let times = if cell.is_barred() { BAR_TIMES } else { 1.0 };
    let lasts = Duration::from_secs_f64(times * args.seconds) / args.turns.max(1);
    let load = Load::new(cell.frame, cell.in_flight.into(), lasts);
    for _ in 0..args.turns.max(1) {
        for (hop, taken) in &mut hops {
            let begun = now();
            taken.times.extend(hop.turn(&load).await);
            taken.lasted += now() - begun;
        }
    }
    hops.into_iter().map(|(_, taken)| taken).collect()
}

fn print(cell: Cell, all: &[Taken], bars: &mut Bars) {
    let p50 = |kind: Kind| {
        let taken = all.iter().find(|taken| taken.kind == kind)?;
        Some(Times::new(taken.times.clone()).p50())
    };
    let quinn = p50(Kind::Tuned).or_else(|| p50(Kind::Raw));
    let Cell { rtt, loss, in_flight, frame } = cell;
    for Taken { kind, times, lasted } in all {
        let times = Times::new(times.clone());
        let round_trips = (rtt > 0).then(|| times.p50() / rtt as f64);
        let bytes = (times.count() * frame) as f64;
        row(&[
            rtt.to_string(),
            loss.to_string(),
            in_flight.to_string(),
            frame.to_string(),
            kind.name().to_owned(),
            times.count().to_string(),
            ms(times.p50()),
            ms(times.p99()),
            format!("{:.2}", bytes / lasted.as_secs_f64() / 1e6),
            ratio(round_trips),
            ratio(quinn.map(|quinn| times.p50() / quinn)),
        ]);
    }
    if cell.is_barred()
        && let Some(p50) = p50(Kind::Ours)
    {
        let what = format!("{rtt} ms RTT, {loss} % loss, {in_flight} in flight, {frame} bytes: p50 in RTT");
        bars.hold(&what, p50 / rtt as f64, BAR_ROUND_TRIPS);
    }
}
