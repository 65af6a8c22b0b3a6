//! Tells a slow peer from a dead one.
//!
//! Owns one peer's heartbeats, the time it was last heard of, and a round-trip estimate. Anything
//! that comes from a peer shows that it lives; silence makes it suspected first and dead only at
//! its deadline, which is later where answers were measured to take longer than the pause between
//! heartbeats. A dead peer stays dead: what comes from it later is fenced by view.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Heartbeats whose answer is still awaited, at most; older ones no longer measure a round trip.
const UNANSWERED_MAX: usize = 16;

/// When a peer is suspected and when it is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LivenessConfig {
    /// Time between heartbeats. Longer costs detection time, shorter costs messages.
    pub interval: Duration,
    /// Intervals of silence after which a peer is suspected.
    pub suspect_misses: u32,
    /// Silence after which a peer is dead, where its answers take no longer than `interval`; on a
    /// slower path or at a slower peer that much more, at most twice this.
    pub dead_after: Duration,
}

impl Default for LivenessConfig {
    /// Every 300 ms, suspected after 3 of them, dead after 1.8 s.
    fn default() -> Self {
        Self { interval: Duration::from_millis(300), suspect_misses: 3, dead_after: Duration::from_millis(1_800) }
    }
}

/// What is to be done or known about a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LivenessOutput {
    /// Send a heartbeat with this number.
    SendHeartbeat {
        /// Comes back in the answer.
        seq: u64,
    },
    /// The peer is late; nothing is taken from it.
    Suspect {
        /// Since when nothing came.
        silent_for: Duration,
    },
    /// A suspected peer was heard of again.
    Alive,
    /// The peer is given up, once and for good.
    Dead {
        /// Since when nothing came.
        silent_for: Duration,
    },
}

/// Why [`Liveness::poll_timeout`] wants to be called again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LivenessTimeout {
    /// The next heartbeat is due.
    Heartbeat,
    /// The peer becomes suspected.
    Suspect,
    /// The peer becomes dead.
    Dead,
}

/// How a peer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Heard of lately.
    Alive,
    /// Late.
    Suspected,
    /// Given up.
    Dead,
}

/// What heartbeats measured of the way to a peer and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundTrip {
    /// Smoothed time of a round trip.
    pub mean: Duration,
    /// Smoothed distance of single round trips from the mean.
    pub jitter: Duration,
}

impl RoundTrip {
    /// The estimate after one more sample, with the weights of RFC 6298.
    fn with(before: Option<Self>, sample: Duration) -> Self {
        let Some(Self { mean, jitter }) = before else { return Self { mean: sample, jitter: sample / 2 } };
        Self { mean: (mean * 7 + sample) / 8, jitter: (jitter * 3 + mean.abs_diff(sample)) / 4 }
    }

    /// How long an answer may take before it is out of the ordinary: the timer of RFC 6298.
    fn patience(self) -> Duration {
        self.mean + self.jitter * 4
    }
}

/// One peer's heartbeat machine.
#[derive(Debug, Clone)]
pub struct Liveness {
    config: LivenessConfig,
    standing: Standing,
    heard: Instant,
    next_beat: Instant,
    next_seq: u64,
    unanswered: VecDeque<(u64, Instant)>,
    rtt: Option<RoundTrip>,
    outputs: VecDeque<LivenessOutput>,
}

impl Liveness {
    /// A peer that was heard of at `now`; its first heartbeat is due at once.
    #[must_use]
    pub fn new(config: LivenessConfig, now: Instant) -> Self {
        Self {
            config,
            standing: Standing::Alive,
            heard: now,
            next_beat: now,
            next_seq: 0,
            unanswered: VecDeque::new(),
            rtt: None,
            outputs: VecDeque::new(),
        }
    }

    /// Takes in that this side itself stood still for so long: a peer is not silent while nobody
    /// listens.
    pub fn handle_pause(&mut self, pause: Duration) {
        self.heard += pause;
    }

    /// Takes in that anything at all came from the peer.
    pub fn handle_heard(&mut self, now: Instant) {
        match self.standing {
            Standing::Dead => return,
            Standing::Suspected => {
                self.standing = Standing::Alive;
                self.outputs.push_back(LivenessOutput::Alive);
            }
            Standing::Alive => {}
        }
        self.heard = self.heard.max(now);
    }

    /// Takes in the answer to heartbeat `seq`; an unknown number still shows that the peer lives.
    pub fn handle_ack(&mut self, seq: u64, now: Instant) {
        self.handle_heard(now);
        let Some(at) = self.unanswered.iter().position(|&(sent, _)| sent == seq) else { return };
        let (_, sent_at) = self.unanswered[at];
        self.unanswered.drain(..=at);
        let sample = now.saturating_duration_since(sent_at);
        self.rtt = Some(RoundTrip::with(self.rtt, sample));
    }

    /// Takes in that time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.standing == Standing::Dead {
            return;
        }
        let silent_for = now.saturating_duration_since(self.heard);
        if silent_for >= self.dead_after() {
            self.standing = Standing::Dead;
            self.unanswered.clear();
            self.outputs.push_back(LivenessOutput::Dead { silent_for });
            return;
        }
        if self.standing == Standing::Alive && silent_for >= self.suspect_after() {
            self.standing = Standing::Suspected;
            self.outputs.push_back(LivenessOutput::Suspect { silent_for });
        }
        if now >= self.next_beat {
            let seq = self.next_seq;
            self.next_seq += 1;
            if self.unanswered.len() == UNANSWERED_MAX {
                self.unanswered.pop_front();
            }
            self.unanswered.push_back((seq, now));
            // One beat after a long sleep, not one for every interval slept through.
            self.next_beat = now + self.config.interval;
            self.outputs.push_back(LivenessOutput::SendHeartbeat { seq });
        }
    }

    /// What to do next, until `None`.
    pub fn poll_output(&mut self) -> Option<LivenessOutput> {
        self.outputs.pop_front()
    }

    /// When [`Self::handle_timeout`] is due and why; `None` once the peer is dead.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<(Instant, LivenessTimeout)> {
        let dead = (self.heard + self.dead_after(), LivenessTimeout::Dead);
        let beat = (self.next_beat, LivenessTimeout::Heartbeat);
        let suspect = (self.heard + self.suspect_after(), LivenessTimeout::Suspect);
        match self.standing {
            Standing::Dead => None,
            Standing::Suspected => [dead, beat].into_iter().min_by_key(|due| due.0),
            Standing::Alive => [dead, suspect, beat].into_iter().min_by_key(|due| due.0),
        }
    }

    /// How the peer stands.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// What the answers measured; `None` before the first.
    #[must_use]
    pub fn rtt(&self) -> Option<RoundTrip> {
        self.rtt
    }

    /// When the peer was last heard of.
    #[must_use]
    pub fn heard(&self) -> Instant {
        self.heard
    }

    /// The silence that a peer dies of. A late answer is news of the path, not of the peer's end: what
    /// answers took beyond a heartbeat's pause is added.
    fn dead_after(&self) -> Duration {
        let beyond = self.rtt.map_or(Duration::ZERO, |rtt| rtt.patience().saturating_sub(self.config.interval));
        self.config.dead_after + beyond.min(self.config.dead_after)
    }

    fn suspect_after(&self) -> Duration {
        self.config.interval * self.config.suspect_misses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn drain(peer: &mut Liveness) -> Vec<LivenessOutput> {
        std::iter::from_fn(|| peer.poll_output()).collect()
    }

    fn config() -> LivenessConfig {
        LivenessConfig { interval: ms(100), suspect_misses: 3, dead_after: ms(1000) }
    }

    #[test]
    fn a_silent_peer_is_suspected_then_dead_exactly_at_its_deadline() {
        let t0 = crate::clock::now();
        let mut peer = Liveness::new(config(), t0);
        let mut seen = Vec::new();
        while let Some((at, _)) = peer.poll_timeout() {
            peer.handle_timeout(at);
            for output in drain(&mut peer) {
                seen.push((at - t0, output));
            }
        }
        let beats = seen.iter().filter(|(_, o)| matches!(o, LivenessOutput::SendHeartbeat { .. })).count();
        assert_eq!(beats, 10);
        seen.retain(|(_, o)| !matches!(o, LivenessOutput::SendHeartbeat { .. }));
        assert_eq!(
            seen,
            vec![
                (ms(300), LivenessOutput::Suspect { silent_for: ms(300) }),
                (ms(1000), LivenessOutput::Dead { silent_for: ms(1000) }),
            ]
        );
        peer.handle_heard(t0 + ms(1001));
        peer.handle_timeout(t0 + ms(1001));
        assert_eq!((peer.standing(), drain(&mut peer)), (Standing::Dead, vec![]));
    }

    #[test]
    fn a_slow_peer_is_suspected_and_never_dead() {
        let t0 = crate::clock::now();
        let mut peer = Liveness::new(config(), t0);
        let (mut suspected, mut alive) = (0, 0);
        for step in 1..=200_u64 {
            let now = t0 + ms(50 * step);
            peer.handle_timeout(now);
            if step.is_multiple_of(19) {
                peer.handle_heard(now);
            }
            for output in drain(&mut peer) {
                match output {
                    LivenessOutput::Suspect { .. } => suspected += 1,
                    LivenessOutput::Alive => alive += 1,
                    LivenessOutput::Dead { .. } => panic!("dead at step {step}"),
                    LivenessOutput::SendHeartbeat { .. } => {}
                }
            }
        }
        assert_eq!((suspected, alive), (11, 10));
    }

    #[test]
    fn round_trips_are_smoothed_and_an_unknown_answer_measures_nothing() {
        let t0 = crate::clock::now();
        let mut peer = Liveness::new(config(), t0);
        peer.handle_timeout(t0);
        assert_eq!(drain(&mut peer), vec![LivenessOutput::SendHeartbeat { seq: 0 }]);
        peer.handle_ack(99, t0 + ms(10));
        assert_eq!(peer.rtt(), None);
        peer.handle_ack(0, t0 + ms(80));
        let first = Some(RoundTrip { mean: ms(80), jitter: ms(40) });
        assert_eq!(peer.rtt(), first);
        peer.handle_ack(0, t0 + ms(90));
        assert_eq!(peer.rtt(), first);
        peer.handle_timeout(t0 + ms(100));
        peer.handle_ack(1, t0 + ms(100));
        assert_eq!(peer.rtt(), Some(RoundTrip { mean: ms(70), jitter: ms(50) }));
    }

    /// The silence that a peer dies of, whose answers took so long in turn.
    fn dies_after(answers: &[u64]) -> Duration {
        let mut now = crate::clock::now();
        let mut peer = Liveness::new(LivenessConfig::default(), now);
        for took in answers.iter().cycle().take(64) {
            now = peer.poll_timeout().unwrap().0;
            peer.handle_timeout(now);
            let [LivenessOutput::SendHeartbeat { seq }] = drain(&mut peer)[..] else { panic!("it is not dead yet") };
            now += ms(*took);
            peer.handle_ack(seq, now);
        }
        loop {
            peer.handle_timeout(peer.poll_timeout().unwrap().0);
            let dead = |output| if let LivenessOutput::Dead { silent_for } = output { Some(silent_for) } else { None };
            if let Some(silent_for) = drain(&mut peer).into_iter().find_map(dead) {
                return silent_for;
            }
        }
    }

    #[test]
    fn a_path_whose_answers_are_slow_has_a_later_deadline_and_no_peer_has_more_than_twice() {
        let usual = LivenessConfig::default().dead_after;
        assert_eq!(dies_after(&[1]), usual);
        assert_eq!(dies_after(&[20, 60]), usual, "short of a heartbeat's pause");
        let jittery = dies_after(&[60, 280, 100, 240]);
        assert!(jittery > usual + ms(150) && jittery < usual + ms(450), "{jittery:?}");
        assert_eq!(dies_after(&[10, 800]), usual * 2);
        assert!(usual <= ms(1_800) && usual * 2 <= ms(3_700), "a kill is seen within 2 s, anything within 4 s");
    }

    #[test]
    fn a_long_sleep_sends_one_heartbeat() {
        let t0 = crate::clock::now();
        let mut peer = Liveness::new(LivenessConfig { dead_after: ms(10_000), ..config() }, t0);
        peer.handle_timeout(t0 + ms(5000));
        assert_eq!(
            drain(&mut peer),
            vec![LivenessOutput::Suspect { silent_for: ms(5000) }, LivenessOutput::SendHeartbeat { seq: 0 }]
        );
    }
}
