//! What the matrix doesn't show: CPU on loopback, control behind full lanes, a frame after silence.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ringfence::clock::now;
use tokio::time::{sleep, timeout};

use super::Args;
use super::stack::{Hop, Kind, Load, Wan};
use super::table::{Bars, Times, cpu, head, median, ms, ratio, row};

/// Round trip of a case, where none is given, in ms.
const RTT: u64 = 40;

/// Most that loopback may take, in time and in CPU of raw quinn.
const LOOPBACK_BAR: f64 = 1.3;

/// Turns of each stack on loopback.
const LOOPBACK_TURNS: u32 = 9;

/// Most that control may take while lanes are full, in round trips.
const CANCEL_BAR: f64 = 1.3;

/// Lanes are full after so long.
const FILLING: Duration = Duration::from_secs(2);

/// Pause between control bodies: no multiple of what it takes to send a frame.
const CANCEL_EVERY: Duration = Duration::from_millis(53);

/// How long the last control body may take.
const CANCEL_PATIENCE: Duration = Duration::from_secs(20);

/// Frames under way on a hop that is full before it falls silent.
const FULL: usize = 4;

/// Most that a frame may take after silence, in round trips.
const IDLE_BAR: f64 = 1.1;

/// One turn on loopback, in µs a frame.
#[derive(Debug, Clone, Copy)]
struct Cost {
    time: f64,
    cpu: f64,
}

fn rtt(args: &Args) -> u64 {
    args.rtt.iter().copied().find(|rtt| *rtt > 0).unwrap_or(RTT)
}

/// Time and CPU of a frame on bare loopback.
pub(crate) async fn loopback(args: &Args, bars: &mut Bars) {
    let title = format!(
        "loopback: a frame there and a one-byte echo back, {LOOPBACK_TURNS} turns each; CPU is that of both ends; \
         ratios are medians over turns, to the better of both raw quinns in the same turn"
    );
    let columns = ["in flight", "bytes", "stack", "frames", "µs a frame", "CPU µs a frame", "p50 ms", "p99 ms"];
    head(&title, &[&columns[..], &["× quinn, time", "× quinn, CPU"]].concat());
    for in_flight in args.in_flight.iter().copied() {
        for frame in args.frame.iter().copied() {
            loopback_cell(args, in_flight, frame, bars).await;
        }
    }
}

async fn loopback_cell(args: &Args, in_flight: u8, frame: usize, bars: &mut Bars) {
    let lasts = Duration::from_secs_f64(2.0 * args.seconds) / LOOPBACK_TURNS;
    let load = Load::new(frame, in_flight.into(), lasts);
    let mut hops = Vec::new();
    for kind in args.stack.iter().copied() {
        hops.push((kind, Hop::connect(kind, &Wan::new(0, 0.0)).await));
    }
    let mut costs: BTreeMap<Kind, Vec<Cost>> = BTreeMap::new();
    let mut times: BTreeMap<Kind, Vec<Duration>> = BTreeMap::new();
    for turn in 0..=LOOPBACK_TURNS {
        for (kind, hop) in &mut hops {
            let (begun, cpu_begun) = (now(), cpu());
            let taken = hop.turn(&load).await;
            let (lasted, worked) = (now() - begun, cpu() - cpu_begun);
            // The first turn warms up.
            if turn > 0 {
                let each = |time: Duration| time.as_secs_f64() * 1e6 / taken.len() as f64;
                costs.entry(*kind).or_default().push(Cost { time: each(lasted), cpu: each(worked) });
                times.entry(*kind).or_default().extend(taken);
            }
        }
    }
    for (kind, times) in times {
        let times = Times::new(times);
        let against = |read: fn(&Cost) -> f64| against_quinn(&costs, kind, read);
        let (time, cpu) = (against(|cost| cost.time), against(|cost| cost.cpu));
        let of = |read: fn(&Cost) -> f64| format!("{:.1}", median(costs[&kind].iter().map(read).collect()));
        row(&[
            in_flight.to_string(),
            frame.to_string(),
            kind.name().to_owned(),
            times.count().to_string(),
            of(|cost| cost.time),
            of(|cost| cost.cpu),
            ms(times.p50()),
            ms(times.p99()),
            ratio(time),
            ratio(cpu),
        ]);
        if kind == Kind::Ours {
            let what = format!("loopback, {in_flight} in flight, {frame} bytes, of raw quinn's");
            time.into_iter().for_each(|time| bars.hold(&format!("{what} time"), time, LOOPBACK_BAR));
            cpu.into_iter().for_each(|cpu| bars.hold(&format!("{what} CPU"), cpu, LOOPBACK_BAR));
        }
    }
}

/// The median over turns of a stack's cost in the better raw quinn's; `None` where there is none.
fn against_quinn(costs: &BTreeMap<Kind, Vec<Cost>>, kind: Kind, read: fn(&Cost) -> f64) -> Option<f64> {
    let turn = |at: usize| {
        let raw = [Kind::Raw, Kind::Tuned].into_iter().filter_map(|raw| Some(read(&costs.get(&raw)?[at])));
        raw.min_by(f64::total_cmp).map(|raw| read(&costs[&kind][at]) / raw)
    };
    (0..costs[&kind].len()).map(turn).collect::<Option<Vec<f64>>>().map(median)
}

/// A control body while all data lanes are full.
pub(crate) async fn cancel(args: &Args, bars: &mut Bars) {
    let rtt = rtt(args);
    let frame = args.frame.iter().copied().max().unwrap_or(33_000);
    let title = format!(
        "cancel: from queueing a control body to the far owner having it, while all lanes are full of frames of {frame} \
         bytes; {rtt} ms RTT, {} both ways, a queue that all share",
        args.rate
    );
    let columns = ["queue", "stack", "bodies", "p50 ms", "p99 ms", "most ms", "p50 × RTT", "p99 × RTT", "most × RTT"];
    head(&title, &[&columns[..], &["rate used %", "queue's peak kB", "dropped"]].concat());
    for queue in &args.queue {
        let wan = Wan { rate: Some((args.rate.clone(), queue.clone())), ..Wan::new(rtt, 0.0) };
        for kind in args.stack.iter().copied().filter(|kind| *kind != Kind::Tcp) {
            cancel_row(args, kind, &wan, frame, bars).await;
        }
    }
}

async fn cancel_row(args: &Args, kind: Kind, wan: &Wan, frame: usize, bars: &mut Bars) {
    let rtt = wan.rtt.as_secs_f64() * 1e3;
    let mut hop = Hop::connect(kind, wan).await;
    let Some(flood) = hop.flood(&Load::sink(frame)) else { return };
    sleep(FILLING).await;
    let lasts = Duration::from_secs_f64(3.0 * args.seconds);
    let (begun, before) = (now(), hop.proxy().unwrap().stats());
    let times = Times::new(control_times(&mut hop, begun + lasts).await);
    let (lasted, after) = (now() - begun, hop.proxy().unwrap().stats());
    drop(flood);
    let bits = (after.inward.forwarded_bytes - before.inward.forwarded_bytes) as f64 * 8.0;
    let rate = hop.proxy().unwrap().settings().inward.rate.map_or(f64::NAN, |rate| rate.get() as f64);
    let queue = wan.rate.as_ref().map_or("", |(_, queue)| queue);
    row(&[
        queue.to_owned(),
        kind.name().to_owned(),
        times.count().to_string(),
        ms(times.p50()),
        ms(times.p99()),
        ms(times.max()),
        ratio(Some(times.p50() / rtt)),
        ratio(Some(times.p99() / rtt)),
        ratio(Some(times.max() / rtt)),
        format!("{:.0}", 100.0 * bits / lasted.as_secs_f64() / rate),
        format!("{:.0}", after.inward.queue_bytes_peak as f64 / 1e3),
        (after.inward.queue_dropped - before.inward.queue_dropped).to_string(),
    ]);
    if kind == Kind::Ours {
        let what = format!("control while all lanes are full, queue of {queue}: p99 in RTT");
        bars.hold(&what, times.p99() / rtt, CANCEL_BAR);
    }
}

/// Sends control bodies until a time, and gives how long each took.
async fn control_times(hop: &mut Hop, until: Instant) -> Vec<Duration> {
    let mut sent = Vec::new();
    let mut taken = Vec::new();
    while now() < until {
        let number = u64::try_from(sent.len()).unwrap();
        sent.push(now());
        hop.control(number).await;
        sleep(CANCEL_EVERY).await;
        let heard = hop.heard().unwrap();
        while let Ok((number, at)) = heard.try_recv() {
            taken.push(at - sent[usize::try_from(number).unwrap()]);
        }
    }
    while taken.len() < sent.len() {
        let heard = timeout(CANCEL_PATIENCE, hop.heard().unwrap().recv()).await;
        let (number, at) = heard.expect("the control body comes").unwrap();
        taken.push(at - sent[usize::try_from(number).unwrap()]);
    }
    taken
}

/// A hop that is left alone, and what its frames took then.
struct Lonely {
    frame: usize,
    kind: Kind,
    /// None: every silence has a hop of its own, which has carried no frame yet.
    used: Option<Hop>,
    times: Vec<Duration>,
}

/// One frame after silence.
pub(crate) async fn idle(args: &Args, bars: &mut Bars) {
    let rtt = rtt(args);
    let wan = Wan::new(rtt, 0.0);
    let title = format!(
        "idle: one frame and its echo after {} s of silence, {} times, on a hop that was full before and on fresh ones; \
         {rtt} ms RTT",
        args.idle, args.idles
    );
    head(&title, &["bytes", "hop", "stack", "frames", "p50 ms", "most ms", "p50 × RTT"]);
    let mut all = Vec::new();
    for frame in args.frame.iter().copied() {
        for is_used in [true, false] {
            for kind in args.stack.iter().copied() {
                let used = if is_used { Some(full_once(kind, &wan, frame).await) } else { None };
                all.push(Lonely { frame, kind, used, times: Vec::new() });
            }
        }
    }
    for _ in 0..args.idles.max(1) {
        silence(args, &wan, &mut all).await;
    }
    all.iter().for_each(|lonely| idle_row(args, rtt, lonely, bars));
}

async fn full_once(kind: Kind, wan: &Wan, frame: usize) -> Hop {
    let mut hop = Hop::connect(kind, wan).await;
    hop.turn(&Load::new(frame, FULL, Duration::from_secs(1))).await;
    hop
}

/// All hops are silent at once, then send one after the other.
async fn silence(args: &Args, wan: &Wan, all: &mut [Lonely]) {
    let mut fresh = Vec::new();
    for lonely in all.iter().filter(|lonely| lonely.used.is_none()) {
        fresh.push(Hop::connect(lonely.kind, wan).await);
    }
    sleep(Duration::from_secs_f64(args.idle)).await;
    let mut fresh = fresh.into_iter();
    for lonely in all {
        let load = Load::new(lonely.frame, 1, Duration::ZERO);
        let taken = match &mut lonely.used {
            Some(hop) => hop.turn(&load).await,
            None => fresh.next().unwrap().turn(&load).await,
        };
        lonely.times.extend(taken);
    }
}

fn idle_row(args: &Args, rtt: u64, lonely: &Lonely, bars: &mut Bars) {
    let Lonely { frame, kind, used, times } = lonely;
    let times = Times::new(times.clone());
    let round_trips = times.p50() / rtt as f64;
    let hop = if used.is_some() { "used" } else { "fresh" };
    row(&[
        frame.to_string(),
        hop.to_owned(),
        kind.name().to_owned(),
        times.count().to_string(),
        ms(times.p50()),
        ms(times.max()),
        ratio(Some(round_trips)),
    ]);
    if *kind == Kind::Ours {
        let what =
            format!("{rtt} ms RTT, one frame of {frame} bytes after {} s idle, {hop} hop: p50 in RTT", args.idle);
        bars.hold(&what, round_trips, IDLE_BAR);
    }
}
