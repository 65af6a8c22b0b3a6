//! The heartbeats of every peer that has greeted: the same machine in stages and coordinator.
//!
//! Owns a [`Liveness`] per node. The shell sends what it says, and hears what it says of the dead.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::ids::Node;
use crate::proto::liveness::{Liveness, LivenessConfig, LivenessOutput, RoundTrip};

/// Heartbeat numbers from here on are not this machine's: a shell asks single questions with them.
pub const ASIDE: u64 = 1 << 63;

/// The peers that are asked whether they live.
#[derive(Debug)]
pub struct Heartbeats {
    config: LivenessConfig,
    peers: BTreeMap<Node, Liveness>,
    outputs: VecDeque<(Node, LivenessOutput)>,
}

impl Heartbeats {
    /// Nobody is asked yet.
    #[must_use]
    pub fn new(config: LivenessConfig) -> Self {
        Self { config, peers: BTreeMap::new(), outputs: VecDeque::new() }
    }

    /// A peer has greeted: its first heartbeat is due at once.
    pub fn add(&mut self, peer: Node, now: Instant) {
        self.peers.insert(peer, Liveness::new(self.config, now));
    }

    /// A peer is gone; says whether it was asked.
    pub fn remove(&mut self, peer: Node) -> bool {
        self.outputs.retain(|(of, _)| *of != peer);
        self.peers.remove(&peer).is_some()
    }

    /// Whether the peer is asked.
    #[must_use]
    pub fn contains(&self, peer: Node) -> bool {
        self.peers.contains_key(&peer)
    }

    /// Anything came from a peer.
    pub fn handle_heard(&mut self, peer: Node, now: Instant) {
        self.with(peer, |liveness| liveness.handle_heard(now));
    }

    /// A peer answered heartbeat `seq`.
    pub fn handle_ack(&mut self, peer: Node, seq: u64, now: Instant) {
        self.with(peer, |liveness| liveness.handle_ack(seq, now));
    }

    /// Time has come. Where it came too late, this process stood still (frozen, or starved): what its
    /// peers sent meanwhile is still to be read, and the time is none of their silence.
    pub fn handle_timeout(&mut self, now: Instant) {
        let late = self.poll_timeout().map_or(Duration::ZERO, |due| now.saturating_duration_since(due));
        if late >= self.config.interval / 3 {
            self.peers.values_mut().for_each(|liveness| liveness.handle_pause(late));
        }
        for (peer, liveness) in &mut self.peers {
            liveness.handle_timeout(now);
            self.outputs.extend(std::iter::from_fn(|| liveness.poll_output()).map(|output| (*peer, output)));
        }
    }

    /// What to do next, until `None`.
    pub fn poll_output(&mut self) -> Option<(Node, LivenessOutput)> {
        self.outputs.pop_front()
    }

    /// When to call [`Heartbeats::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.peers.values().filter_map(|liveness| liveness.poll_timeout().map(|(at, _)| at)).min()
    }

    /// What the answers of a peer measured.
    #[must_use]
    pub fn rtt(&self, peer: Node) -> Option<RoundTrip> {
        self.peers.get(&peer)?.rtt()
    }

    fn with(&mut self, peer: Node, tell: impl FnOnce(&mut Liveness)) {
        if let Some(liveness) = self.peers.get_mut(&peer) {
            tell(liveness);
            self.outputs.extend(std::iter::from_fn(|| liveness.poll_output()).map(|output| (peer, output)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_peer_has_its_own_deadline() {
        let t0 = crate::clock::now();
        let config = LivenessConfig::default();
        let mut beats = Heartbeats::new(config);
        let (early, late) = (Node::random(), Node::random());
        beats.add(early, t0);
        beats.add(late, t0 + Duration::from_secs(1));
        let mut dead = Vec::new();
        while let Some(now) = beats.poll_timeout() {
            beats.handle_timeout(now);
            while let Some((peer, output)) = beats.poll_output() {
                match output {
                    LivenessOutput::Dead { silent_for } => dead.push((peer, now - t0, silent_for)),
                    LivenessOutput::SendHeartbeat { seq } => assert!(seq < ASIDE),
                    LivenessOutput::Suspect { .. } | LivenessOutput::Alive => {}
                }
            }
        }
        let after = config.dead_after;
        assert_eq!(dead, [(early, after, after), (late, after + Duration::from_secs(1), after)]);
    }

    #[test]
    fn a_process_that_stood_still_blames_nobody_for_it() {
        let t0 = crate::clock::now();
        let config = LivenessConfig::default();
        let mut beats = Heartbeats::new(config);
        let peer = Node::random();
        beats.add(peer, t0);
        beats.handle_timeout(t0);
        let thawed = t0 + config.dead_after * 10;
        beats.handle_timeout(thawed);
        let outputs: Vec<_> = std::iter::from_fn(|| beats.poll_output()).map(|(_, output)| output).collect();
        assert!(outputs.iter().all(|output| matches!(output, LivenessOutput::SendHeartbeat { .. })), "{outputs:?}");
        // From here on it is the peer's silence again.
        let mut dead_at = None;
        while let (None, Some(now)) = (dead_at, beats.poll_timeout()) {
            beats.handle_timeout(now);
            let dead = |(_, output)| matches!(output, LivenessOutput::Dead { .. });
            dead_at = std::iter::from_fn(|| beats.poll_output()).any(dead).then_some(now);
        }
        let waited = dead_at.unwrap() - thawed;
        assert!(waited <= config.dead_after && waited + config.interval >= config.dead_after, "{waited:?}");
    }

    #[test]
    fn a_starved_process_takes_what_it_slept_off_what_it_waits() {
        let t0 = crate::clock::now();
        let config = LivenessConfig::default();
        let mut beats = Heartbeats::new(config);
        beats.add(Node::random(), t0);
        // Every turn comes 200 ms late, and what the peer sent is never read before it.
        let late = Duration::from_millis(200);
        let (mut now, mut turns) = (t0, 0_u32);
        while let Some(due) = beats.poll_timeout() {
            now = due + late;
            beats.handle_timeout(now);
            turns += 1;
            while beats.poll_output().is_some() {}
        }
        // The first of them was due at once.
        assert!(now - t0 >= config.dead_after + late * (turns - 1), "{:?} in {turns} turns", now - t0);
    }

    #[test]
    fn a_peer_that_is_gone_is_not_spoken_of() {
        let t0 = crate::clock::now();
        let mut beats = Heartbeats::new(LivenessConfig::default());
        let peer = Node::random();
        beats.add(peer, t0);
        beats.handle_timeout(t0);
        assert!(beats.contains(peer) && beats.remove(peer));
        assert_eq!(beats.poll_output(), None);
        beats.handle_ack(peer, 0, t0);
        assert_eq!((beats.rtt(peer), beats.poll_timeout(), beats.remove(peer)), (None, None, false));
    }
}
