//! One direction, by virtual time: no test here waits.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use ringfence::wan::{HEADER_BYTES, HELD_BYTES_MAX, Path, PathSettings, PathStats, WanSettings};

use crate::settings::path_settings;

const MS: Duration = Duration::from_millis(1);

/// A packet that takes 1,000 bytes on the wire, and is numbered.
fn packet(number: usize) -> Vec<u8> {
    let mut packet = vec![0; 1_000 - usize::try_from(HEADER_BYTES).unwrap()];
    packet[..8].copy_from_slice(&(number as u64).to_le_bytes());
    packet
}

fn number(packet: &[u8]) -> usize {
    usize::try_from(u64::from_le_bytes(packet[..8].try_into().unwrap())).unwrap()
}

fn settings(text: &str) -> PathSettings {
    text.parse::<WanSettings>().unwrap().inward
}

fn path(text: &str) -> Path {
    Path::new(settings(text), 1)
}

/// A path, the beginning of time, and what came out when, in milliseconds and numbers.
struct Line {
    path: Path,
    zero: Instant,
    out: Vec<(Duration, usize)>,
}

impl Line {
    fn new(text: &str) -> Self {
        Self::of(path(text))
    }

    fn of(path: Path) -> Self {
        Self { path, zero: ringfence::clock::now(), out: Vec::new() }
    }

    /// Lets time pass up to `until`, waking exactly when the path asks for it.
    fn run(&mut self, until: Duration) {
        let until = self.zero + until;
        while let Some(at) = self.path.poll_timeout().filter(|at| *at <= until) {
            while let Some(packet) = self.path.poll_transmit(at) {
                self.out.push((at - self.zero, number(&packet)));
            }
        }
    }

    fn send(&mut self, at: Duration, number: usize) {
        self.run(at);
        self.path.handle_packet(&packet(number), self.zero + at);
    }

    /// Sends so many packets, one every `every`, and lets all of them come out.
    fn train(text: &str, packets: usize, every: Duration) -> Self {
        let mut line = Self::new(text);
        for number in 0..packets {
            line.send(every * u32::try_from(number).unwrap(), number);
        }
        line.run(Duration::from_secs(100_000));
        line
    }

    fn numbers(&self) -> Vec<usize> {
        self.out.iter().map(|(_, number)| *number).collect()
    }

    fn stats(&self) -> PathStats {
        self.path.stats()
    }
}

#[test]
fn a_delay_is_exact() {
    let mut path = path("delay=20ms");
    let zero = ringfence::clock::now();
    assert_eq!(path.poll_timeout(), None);
    path.handle_packet(b"first", zero);
    path.handle_packet(b"second", zero + MS);
    assert_eq!(path.poll_timeout(), Some(zero + 20 * MS));
    assert_eq!(path.poll_transmit(zero + 20 * MS - Duration::from_nanos(1)), None);
    assert_eq!(path.poll_transmit(zero + 20 * MS).as_deref(), Some(&b"first"[..]));
    assert_eq!(path.poll_transmit(zero + 20 * MS), None);
    assert_eq!(path.poll_timeout(), Some(zero + 21 * MS));
    assert_eq!(path.poll_transmit(zero + 90 * MS).as_deref(), Some(&b"second"[..]));
    assert_eq!(path.poll_timeout(), None);
}

#[test]
fn nothing_set_does_nothing() {
    let line = Line::train("none", 1_000, Duration::from_micros(10));
    let expected: Vec<_> = (0..1_000).map(|at| (Duration::from_micros(10) * at, at as usize)).collect();
    assert_eq!(line.out, expected);
}

#[test]
fn jitter_keeps_the_order_unless_it_is_set_free() {
    for shape in ["uniform", "normal"] {
        let text = format!("delay=20ms,jitter=2ms,dist={shape}");
        let line = Line::train(&text, 2_000, MS / 10);
        assert_eq!(line.numbers(), (0..2_000).collect::<Vec<_>>());
        let free = Line::train(&format!("{text},order=free"), 2_000, MS / 10);
        assert_ne!(free.numbers(), line.numbers());
        let delays = free.out.iter().map(|(at, number)| *at - MS / 10 * u32::try_from(*number).unwrap());
        let mean = delays.clone().sum::<Duration>() / 2_000;
        assert!(mean.abs_diff(20 * MS) < MS / 4, "{mean:?}");
        if shape == "uniform" {
            assert!(delays.clone().all(|delay| delay.abs_diff(20 * MS) <= 2 * MS));
        }
        assert!(delays.clone().any(|delay| delay < 19 * MS) && delays.clone().any(|delay| delay > 21 * MS));
    }
}

/// Whether a count of independent events with chance `p` in `n` is within five deviations.
fn binomial(count: u64, n: u64, p: f64) -> bool {
    let (mean, deviation) = (n as f64 * p, (n as f64 * p * (1.0 - p)).sqrt());
    (count as f64 - mean).abs() < 5.0 * deviation
}

#[test]
fn losses_are_as_many_as_set() {
    for (text, p) in [("loss=0.1%", 0.001), ("loss=1%", 0.01), ("loss=50%", 0.5)] {
        let line = Line::train(text, 100_000, MS);
        assert!(binomial(line.stats().lost, 100_000, p), "{text}: {}", line.stats().lost);
        assert_eq!(line.stats().forwarded + line.stats().lost, 100_000);
        assert!(line.numbers().is_sorted());
    }
    assert_eq!(Line::train("loss=0%", 1_000, MS).stats().lost, 0);
    assert_eq!(Line::train("loss=100%", 1_000, MS).stats().lost, 1_000);
}

#[test]
fn losses_come_in_runs_where_set() {
    for (text, share, burst) in [("loss=2%,burst=5", 0.02, 5.0), ("loss=30%,burst=3", 0.3, 3.0)] {
        let line = Line::train(text, 200_000, MS);
        let lost = line.stats().lost as f64;
        // At least 800 runs: the share's and the mean's deviations are below 6 %.
        assert!((0.85..1.15).contains(&(lost / 200_000.0 / share)), "{text}: {lost}");
        let runs = line.numbers().windows(2).filter(|pair| pair[1] > pair[0] + 1).count();
        let mean = lost / runs as f64;
        assert!((0.88..1.12).contains(&(mean / burst)), "{text}: {mean}");
    }
    let single = Line::train("loss=2%", 200_000, MS);
    let runs = single.numbers().windows(2).filter(|pair| pair[1] > pair[0] + 1).count();
    assert!((single.stats().lost as f64 / runs as f64) < 1.1);
}

#[test]
fn reordered_packets_are_overtaken() {
    let line = Line::train("delay=20ms,reorder=1%,late=5ms", 100_000, MS);
    assert!(binomial(line.stats().reordered, 100_000, 0.01), "{}", line.stats().reordered);
    let mut late = 0;
    for (at, number) in &line.out {
        let delay = *at - MS * u32::try_from(*number).unwrap();
        assert!(delay == 20 * MS || delay == 25 * MS, "{number}: {delay:?}");
        late += u64::from(delay == 25 * MS);
    }
    assert_eq!(late, line.stats().reordered);
    let mut sorted = line.numbers();
    assert!(!sorted.is_sorted());
    sorted.sort_unstable();
    assert_eq!(sorted, (0..100_000).collect::<Vec<_>>(), "none is lost");
}

#[test]
fn a_rate_is_exact() {
    // 1,000 bytes at 8 Mbit/s take a millisecond.
    let mut line = Line::new("delay=20ms,rate=8mbit,queue=1mb");
    for number in 0..500 {
        line.send(Duration::ZERO, number);
    }
    assert_eq!((line.stats().queue_packets, line.stats().queue_bytes), (500, 500 * (1_000 - HEADER_BYTES)));
    line.run(Duration::from_secs(10));
    let expected: Vec<_> = (0..500).map(|n| (20 * MS + MS * (n + 1), n as usize)).collect();
    assert_eq!(line.out, expected);
    // After a pause it starts anew.
    line.send(Duration::from_secs(11), 500);
    line.run(Duration::from_secs(20));
    assert_eq!(line.out.last(), Some(&(Duration::from_secs(11) + 21 * MS, 500)));
}

#[test]
fn a_rate_does_not_drift_when_asked_late() {
    let mut path = path("rate=8mbit,queue=1mb");
    let zero = ringfence::clock::now();
    (0..100).for_each(|number| path.handle_packet(&packet(number), zero));
    // Nobody asks until the 90th packet is half sent: the 91st is on its way at its own time.
    let late = zero + 89 * MS + MS / 2;
    let passed = std::iter::from_fn(|| path.poll_transmit(late)).count();
    assert_eq!(passed, 89);
    assert_eq!(path.poll_timeout(), Some(zero + 90 * MS));
}

#[test]
fn a_queue_is_bounded_and_drops_at_its_tail() {
    let mut line = Line::new("rate=8mbit,queue=10kb");
    for number in 0..20 {
        line.send(Duration::ZERO, number);
    }
    assert_eq!(line.stats().queue_dropped, 9, "one is sent, ten wait");
    assert_eq!(line.stats().queue_bytes_peak, 11 * (1_000 - HEADER_BYTES));
    // As the first leaves, there is room for one.
    line.send(MS, 20);
    line.send(MS, 21);
    assert_eq!(line.stats().queue_dropped, 10);
    line.run(Duration::from_secs(1));
    assert_eq!(line.numbers(), (0..11).chain([20]).collect::<Vec<_>>());
    assert_eq!((line.stats().queue_packets, line.stats().queue_bytes), (0, 0));
}

#[test]
fn a_changed_rate_holds_for_what_waits() {
    let mut line = Line::new("rate=8mbit");
    (0..3).for_each(|number| line.send(Duration::ZERO, number));
    // Half of the first is through; the other half takes ten times as long.
    line.path.set(settings("rate=800kbit"), line.zero + MS / 2);
    line.run(MS * 6);
    assert_eq!(line.out, [(MS / 2 + 5 * MS, 0)]);
    line.path.set(settings("rate=8mbit"), line.zero + MS * 6);
    line.run(MS * 7);
    // Half a millisecond of ten had passed: 95 % remain.
    assert_eq!(line.out[1..], [(6 * MS + MS * 95 / 100, 1)]);
    line.path.set(settings("none"), line.zero + MS * 7);
    line.run(MS * 7);
    assert_eq!(line.out[2..], [(MS * 7, 2)]);
    line.send(MS * 8, 3);
    line.run(MS * 8);
    assert_eq!(line.out[3..], [(MS * 8, 3)]);
}

#[test]
fn a_shorter_delay_keeps_the_order() {
    let mut line = Line::new("delay=20ms");
    line.send(Duration::ZERO, 0);
    line.path.set(settings("delay=1ms"), line.zero + MS);
    line.send(2 * MS, 1);
    line.send(30 * MS, 2);
    line.run(Duration::from_secs(1));
    assert_eq!(line.out, [(20 * MS, 0), (20 * MS, 1), (31 * MS, 2)]);
}

#[test]
fn a_cut_swallows_everything_until_it_is_healed() {
    let mut line = Line::new("delay=20ms,rate=8mbit");
    (0..25).for_each(|number| line.send(MS * u32::try_from(number).unwrap(), number));
    line.run(25 * MS);
    assert_eq!(line.numbers(), (0..5).collect::<Vec<_>>());
    line.path.set_cut(true, line.zero + 25 * MS);
    assert_eq!(line.stats().cut, 20);
    assert_eq!(line.path.poll_timeout(), None);
    line.send(30 * MS, 25);
    assert_eq!(line.stats().cut, 21);
    line.path.set_cut(false, line.zero + 31 * MS);
    line.send(32 * MS, 26);
    line.run(Duration::from_secs(1));
    assert_eq!(line.out[5..], [(53 * MS, 26)]);
    assert_eq!(line.stats().forwarded + line.stats().cut, line.stats().entered);
}

#[test]
fn memory_is_bounded_without_a_rate() {
    let mut path = path("delay=60s");
    let zero = ringfence::clock::now();
    let datagram = vec![0; 65_000];
    (0..2_000).for_each(|_| path.handle_packet(&datagram, zero));
    let held = path.stats().flying * 65_000;
    assert!(held <= HELD_BYTES_MAX && held > HELD_BYTES_MAX * 9 / 10, "{held}");
    assert_eq!(path.stats().overflowed, 2_000 - path.stats().flying);
    let mut empty = Path::new(settings("delay=60s"), 1);
    (0..1_000_000).for_each(|_| empty.handle_packet(&[], zero));
    assert!(empty.stats().flying < 400_000, "empty packets cost memory too");
}

#[test]
fn a_seed_decides_everything() {
    let text = "delay=20ms,jitter=5ms,order=free,loss=5%,burst=3,reorder=3%,rate=20mbit,queue=20kb";
    let run = |seed| {
        let mut line = Line::of(Path::new(settings(text), seed));
        (0..5_000).for_each(|number| line.send(MS * u32::try_from(number).unwrap() / 3, number));
        line.run(Duration::from_secs(100));
        (line.out, line.path.stats())
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

proptest! {
    /// Every packet has one fate; none comes early, twice, or out of order where order is kept.
    #[test]
    fn every_packet_has_one_fate(
        first in path_settings(),
        second in path_settings(),
        seed: u64,
        gaps in prop::collection::vec(0_u32..20_000, 1..200),
    ) {
        let ordered = [&first, &second].iter().all(|s| s.keep_order && s.reorder == ringfence::wan::Chance::NEVER);
        let least = [&first, &second].iter().map(|s| s.delay.saturating_sub(s.jitter * 6)).min().unwrap();
        let mut line = Line::of(Path::new(first, seed));
        let (mut at, mut entered) = (Duration::ZERO, Vec::new());
        for (number, gap) in gaps.iter().enumerate() {
            at += Duration::from_micros((*gap).into());
            if number == gaps.len() / 2 {
                line.run(at);
                line.path.set(second.clone(), line.zero + at);
            }
            line.send(at, number);
            entered.push(at);
            let stats = line.stats();
            let fates = stats.forwarded + stats.lost + stats.cut + stats.queue_dropped + stats.overflowed;
            prop_assert_eq!(fates + stats.queue_packets + stats.flying, stats.entered);
            prop_assert!(stats.queue_bytes <= stats.queue_bytes_peak);
        }
        line.run(Duration::from_secs(1 << 40));
        prop_assert_eq!(line.path.poll_timeout(), None);
        let stats = line.stats();
        prop_assert_eq!(stats.forwarded + stats.lost + stats.queue_dropped, gaps.len() as u64);
        let mut numbers = line.numbers();
        prop_assert!(!ordered || numbers.is_sorted());
        numbers.sort_unstable();
        prop_assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
        for (at, number) in &line.out {
            prop_assert!(*at >= entered[*number] + least);
        }
    }
}
