//! Credits over a simulated hop, in virtual time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// What comes about on the hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A frame is there.
    Arrive { asked: bool },
    /// The owner takes what has come.
    Take,
    /// A note may be due.
    Due,
    /// A note is there.
    Note { taken: u64, held: Duration, idle: Duration },
    /// The application queues frames.
    Queue { frames: usize },
}

/// A hop of one direction: a queue before a bottleneck, then a delay.
struct Hop {
    start: Instant,
    now: Instant,
    /// Bytes per second.
    rate: f64,
    /// Both ways, without a queue and without a frame's own time.
    delay: Duration,
    frame: u64,
    /// What the owner waits before it takes a frame.
    hold: Duration,
    /// What the sender waits before it sees a note.
    busy: Duration,
    free: Instant,
    credit: Credit,
    receipts: Receipts,
    events: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    order: u64,
    waiting: VecDeque<(Instant, bool)>,
    /// Frames that wait; without, the sender is greedy.
    queued: Option<usize>,
    sent: u64,
    delivered: u64,
    /// Every how many notes one is lost or comes twice; 0: none.
    mischief: u64,
    notes: u64,
}

impl Hop {
    fn new(rate: f64, delay: Duration, frame: u64, initial: u64) -> Self {
        let now = crate::clock::now();
        let config = CreditConfig { initial, window_max: 1 << 40 };
        Self {
            start: now,
            now,
            rate,
            delay,
            frame,
            hold: Duration::ZERO,
            busy: Duration::ZERO,
            free: now,
            credit: Credit::new(config, now),
            receipts: Receipts::new(config.window_max),
            events: BinaryHeap::new(),
            order: 0,
            waiting: VecDeque::new(),
            queued: None,
            sent: 0,
            delivered: 0,
            mischief: 0,
            notes: 0,
        }
    }

    /// What fills the hop, a frame's own time included.
    fn bandwidth_delay(&self) -> f64 {
        self.rate * self.round_trip().as_secs_f64()
    }

    fn round_trip(&self) -> Duration {
        self.delay + Duration::from_secs_f64(self.frame as f64 / self.rate)
    }

    fn at(&mut self, at: Instant, event: Event) {
        self.order += 1;
        self.events.push(Reverse((at, self.order, event)));
    }

    fn send(&mut self) {
        while self.queued != Some(0) && self.credit.may_send(self.frame) {
            let asked = self.credit.handle_sent(self.frame, self.now);
            let in_flight = self.credit.in_flight();
            assert!(in_flight <= self.credit.window().max(self.frame), "{in_flight} under way");
            self.free = self.free.max(self.now) + Duration::from_secs_f64(self.frame as f64 / self.rate);
            self.at(self.free + self.delay / 2, Event::Arrive { asked });
            self.sent += 1;
            if let Some(queued) = &mut self.queued {
                *queued -= 1;
            }
        }
        if self.queued == Some(0) {
            self.credit.handle_starved();
        }
        assert!(self.credit.window() >= 2 * self.credit.largest());
    }

    fn note(&mut self) {
        if let Some(Return { taken, held, idle }) = self.receipts.poll_return(self.now) {
            self.notes += 1;
            let there = self.now + self.delay / 2 + self.busy;
            let turn = if self.mischief == 0 { 0 } else { self.notes % self.mischief };
            // A note that is lost is made up for by the next: there must be one.
            if self.mischief == 0 || turn != 1 || taken == self.credit.sent {
                self.at(there, Event::Note { taken, held, idle });
            }
            if self.mischief != 0 && turn == 0 {
                self.at(there, Event::Note { taken, held, idle });
                self.at(there + self.delay, Event::Note { taken, held, idle });
            }
        } else if let Some(due) = self.receipts.poll_timeout() {
            self.at(due, Event::Due);
        }
    }

    fn step(&mut self) {
        let Reverse((at, _, event)) = self.events.pop().expect("something is under way: else it is stuck");
        self.now = at;
        match event {
            Event::Arrive { asked } => {
                self.receipts.handle_arrived(self.frame).expect("sent with credit");
                self.waiting.push_back((at, asked));
                self.at(at + self.hold, Event::Take);
            }
            Event::Take => {
                let (arrived, asked) = self.waiting.pop_front().unwrap();
                self.receipts.handle_taken(self.frame, arrived, asked, at);
                self.delivered += 1;
                self.note();
            }
            Event::Due => self.note(),
            Event::Note { taken, held, idle } => {
                self.credit.handle_returned(Return { taken, held, idle }, at).unwrap();
            }
            Event::Queue { frames } => {
                let queued = self.queued.unwrap_or_default();
                self.queued = Some(queued + frames);
            }
        }
        self.send();
    }

    /// Runs for so many round trips, with whatever queue there is.
    fn run(&mut self, round_trips: u32) {
        self.send();
        for _ in 0..round_trips {
            let under_way = self.credit.sent;
            while self.credit.returned < under_way {
                self.step();
            }
        }
    }

    /// Runs for so long, and gives the bytes per second that came through.
    fn throughput(&mut self, time: Duration) -> f64 {
        let (before, since) = (self.delivered, self.now);
        while self.now < since + time {
            self.step();
        }
        ((self.delivered - before) * self.frame) as f64 / (self.now - since).as_secs_f64()
    }

    fn window_per_bandwidth_delay(&self) -> f64 {
        self.credit.window() as f64 / self.bandwidth_delay()
    }

    #[track_caller]
    fn assert_fits(&mut self) {
        while self.credit.is_probing() {
            self.run(1);
        }
        let ratio = self.window_per_bandwidth_delay();
        assert!((1.2..=1.5).contains(&ratio), "a window of {ratio:.2} bandwidth-delays; {self}");
    }
}

impl std::fmt::Display for Hop {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rate, delay, frame) = (self.rate, self.delay, self.frame);
        let (since, stats) = (self.now - self.start, self.credit.stats(0));
        write!(out, "{rate:.0} B/s, {delay:?}, frames of {frame} B; after {since:?}: {stats:?}")
    }
}

/// Hops on which the bandwidth-delay product is many frames.
fn hops() -> impl Strategy<Value = (f64, Duration, u64)> {
    (8_u64..40, 2_000_u64..200_000, 1_000_u64..70_000).prop_map(|(frames, delay_us, frame)| {
        let delay = Duration::from_micros(delay_us);
        ((frames * frame) as f64 / delay.as_secs_f64(), delay, frame)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_window_far_too_small_or_large_comes_to_fit((rate, delay, frame) in hops(), start in -4..5_i32) {
        let bandwidth_delay = rate * delay.as_secs_f64();
        let initial = (bandwidth_delay * 2_f64.powi(start)) as u64;
        let mut hop = Hop::new(rate, delay, frame, initial);
        hop.run(60);
        hop.assert_fits();
        // And it is full.
        let rate = hop.throughput(hop.round_trip() * 40);
        prop_assert!(rate > 0.95 * hop.rate, "{rate:.0} B/s on {hop}");
        hop.assert_fits();
    }

    #[test]
    fn a_change_of_rate_is_followed((rate, delay, frame) in hops(), change in prop::sample::select(&[0.25, 0.5, 2.0, 4.0][..])) {
        let mut hop = Hop::new(4.0 * rate, delay, frame, 1 << 20);
        hop.run(60);
        hop.assert_fits();
        hop.rate *= change;
        hop.run(20);
        hop.assert_fits();
        hop.rate /= change;
        hop.run(20);
        hop.assert_fits();
    }

    #[test]
    fn a_change_of_delay_is_followed((rate, delay, frame) in hops(), change in prop::sample::select(&[0.5, 2.0, 4.0][..])) {
        let mut hop = Hop::new(rate, delay, frame, 1 << 20);
        hop.run(60);
        hop.delay = hop.delay.mul_f64(change);
        if change < 1.0 {
            // It is seen when the shortest round trip is measured anew.
            hop.throughput(shortest::LIFE);
        }
        hop.run(60);
        hop.assert_fits();
    }

    #[test]
    fn few_frames_fit_and_two_may_be_under_way(frames in 0.01..8.0_f64, delay_us in 2_000_u64..100_000, frame in 1_000_u64..70_000) {
        let delay = Duration::from_micros(delay_us);
        let rate = frames * frame as f64 / delay.as_secs_f64();
        let mut hop = Hop::new(rate, delay, frame, 1 << 20);
        hop.run(150);
        let (window, fit) = (hop.credit.window(), (1.5 * hop.bandwidth_delay()) as u64);
        prop_assert!(window >= 2 * frame);
        prop_assert!(window <= fit.max(3 * frame), "{hop}");
        let rate = hop.throughput(hop.round_trip() * 50);
        prop_assert!(rate > 0.9 * hop.rate, "{rate:.0} B/s on {hop}");
    }

    #[test]
    fn notes_that_are_lost_or_late_or_come_twice_stop_nothing((rate, delay, frame) in hops(), mischief in 2_u64..6) {
        let mut hop = Hop::new(rate, delay, frame, 1 << 20);
        hop.mischief = mischief;
        hop.run(100);
        prop_assert!(hop.delivered > 100);
    }

    #[test]
    fn a_sender_with_little_to_send_keeps_its_window((rate, delay, frame) in hops(), seconds in 1_u64..40) {
        let mut hop = Hop::new(rate, delay, frame, 1 << 20);
        hop.run(60);
        hop.assert_fits();
        // A frame now and then.
        hop.queued = Some(0);
        let until = hop.now + SECOND * seconds as u32;
        let mut at = hop.now;
        while at < until {
            at += hop.round_trip() * 3 / 2;
            hop.at(at, Event::Queue { frames: 1 });
        }
        while !hop.events.is_empty() {
            hop.step();
        }
        hop.assert_fits();
    }

    #[test]
    fn nothing_that_a_peer_returns_panics_or_gives_more_than_was_sent(
        notes in prop::collection::vec((any::<u64>(), any::<u64>(), 0_u64..100_000), 1..50),
        frames in prop::collection::vec(0_u64..1 << 26, 1..50),
    ) {
        let micros = Duration::from_micros;
        let mut now = crate::clock::now();
        let mut credit = Credit::new(CreditConfig::default(), now);
        for (&(returned, held, later), frame) in notes.iter().zip(frames.iter().cycle()) {
            now += Duration::from_micros(later);
            if credit.may_send(*frame) {
                credit.handle_sent(*frame, now);
            }
            let returned = if returned % 3 == 0 { returned } else { returned % (credit.sent + 2) };
            let before = credit.returned;
            let said = Return { taken: returned, held: micros(held), idle: micros(held.wrapping_mul(returned)) };
            let told = credit.handle_returned(said, now);
            prop_assert_eq!(told.is_err(), returned > credit.sent);
            prop_assert!(credit.returned >= before && credit.returned <= credit.sent);
            prop_assert!(credit.window() <= credit.config.window_max.max(2 << 26));
        }
    }
}

/// Inputs that failed: each of another cause.
#[test]
fn what_measured_a_queue_once_measures_none() {
    let fit = |rate, delay_us, frame, initial, change: Option<f64>| {
        let mut hop = Hop::new(rate, Duration::from_micros(delay_us), frame, initial);
        hop.run(60);
        if let Some(change) = change {
            hop.delay = hop.delay.mul_f64(change);
            hop.throughput(shortest::LIFE);
            hop.run(60);
        }
        hop.assert_fits();
        let (measured, real) = (hop.credit.shortest.unwrap().value(), hop.round_trip());
        assert!(measured.abs_diff(real) < Duration::from_micros(10), "{measured:?} instead of {real:?}");
    };
    // Half of what fills the old hop fills one half as long.
    fit(23_301_534.241_878_804, 35_001, 38_837, 1 << 20, Some(0.5));
    // So do frames that were sent before that showed.
    fit(7_974_073.493_283_153, 114_786, 57_207, 1 << 20, Some(0.5));
    // Of frames that come back in heaps only the first says how long it took.
    fit(171_898.837_534_111_2, 139_617, 1_000, 1 << 20, Some(2.0));
    // A window that nothing was measured for can't be made small.
    fit(121_056.215_480_063_55, 66_085, 1_000, 128_000, None);
    // A frame behind a few others of a burst does not find the hop quiet.
    fit(92_581_736.750_435_43, 12_057, 33_826, 1 << 20, Some(0.5));
}

/// Making a connection keeps both ends busy: it isn't the hop that takes so long.
#[test]
fn a_first_round_trip_that_took_long_is_believed_for_a_second() {
    let mut hop = Hop::new(6e6, Duration::from_millis(40), 33_000, 1 << 20);
    hop.busy = Duration::from_millis(30);
    hop.send();
    hop.throughput(Duration::from_millis(300));
    hop.busy = Duration::ZERO;
    hop.throughput(2 * SECOND);
    hop.assert_fits();
}

#[test]
fn an_owner_that_takes_late_changes_no_round_trip() {
    let mut hop = Hop::new(10e6, Duration::from_millis(40), 16_704, 1 << 20);
    hop.hold = Duration::from_millis(15);
    hop.run(100);
    let (measured, real) = (hop.credit.shortest.unwrap().value(), hop.round_trip());
    assert!(measured.abs_diff(real) < Duration::from_micros(10), "{measured:?} instead of {real:?}");
}

#[test]
fn the_shortest_round_trip_is_measured_anew_and_the_hop_stays_full() {
    let mut hop = Hop::new(6.25e6, Duration::from_millis(40), 33_000, 1 << 20);
    hop.run(60);
    let (mut probes, mut probing, before, since) = (0, false, hop.delivered, hop.now);
    while hop.now < since + 60 * SECOND {
        hop.step();
        let now = hop.credit.is_probing();
        probes += u32::from(now && !probing);
        // What a small window carries makes it no smaller.
        assert!(hop.credit.window() as f64 > 0.4 * hop.bandwidth_delay(), "{hop}");
        probing = now;
    }
    assert!((4..=6).contains(&probes), "{probes} in a minute");
    let rate = (hop.delivered - before) as f64 * 33_000.0 / 60.0;
    assert!(rate > 0.98 * hop.rate, "{rate:.0} B/s");
    hop.assert_fits();
}

#[test]
fn a_hop_that_was_never_full_keeps_its_first_window() {
    let mut hop = Hop::new(10e6, Duration::from_millis(40), 16_704, 1 << 20);
    hop.queued = Some(0);
    for n in 0..200 {
        hop.at(hop.now + Duration::from_millis(10) * n, Event::Queue { frames: 1 });
    }
    while !hop.events.is_empty() {
        hop.step();
    }
    assert_eq!(hop.credit.window(), 1 << 20);
}

#[test]
fn a_lone_frame_is_returned_late_and_many_at_once() {
    let t0 = crate::clock::now();
    let mut receipts = Receipts::new(1 << 20);
    assert_eq!(receipts.poll_timeout(), None);
    receipts.handle_arrived(1_000).unwrap();
    receipts.handle_taken(1_000, t0, false, t0 + Duration::from_millis(3));
    let due = t0 + Duration::from_millis(3) + receipts::RETURN_DELAY;
    assert_eq!((receipts.poll_timeout(), receipts.poll_return(due - Duration::from_micros(1))), (Some(due), None));
    assert_eq!(receipts.poll_return(due), Some(Return { taken: 1_000, held: due - t0, idle: receipts::RETURN_DELAY }));
    assert_eq!(receipts.poll_return(due), None);
    for _ in 0..2 {
        receipts.handle_arrived(400_000).unwrap();
        receipts.handle_taken(400_000, due, false, due);
    }
    assert_eq!(receipts.poll_return(due), Some(Return { taken: 801_000, held: Duration::ZERO, idle: Duration::ZERO }));
    // What its sender waits for goes back at once.
    receipts.handle_arrived(10).unwrap();
    receipts.handle_taken(10, due, true, due);
    assert_eq!(receipts.poll_return(due), Some(Return { taken: 801_010, held: Duration::ZERO, idle: Duration::ZERO }));
}

#[test]
fn a_flood_is_noticed_at_the_first_byte_too_much_and_two_large_frames_are_none() {
    let mut receipts = Receipts::new(1_000);
    receipts.handle_arrived(600).unwrap();
    receipts.handle_arrived(400).unwrap();
    receipts.handle_arrived(200).unwrap();
    assert_eq!(receipts.handle_arrived(1), Err(Flood { outstanding: 1_201, limit: 1_200 }));
    let mut receipts = Receipts::new(1_000);
    receipts.handle_arrived(5_000).unwrap();
    receipts.handle_arrived(5_000).unwrap();
    assert!(receipts.handle_arrived(1).is_err());
}
