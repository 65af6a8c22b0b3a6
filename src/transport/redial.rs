//! When to dial an address again: pure.

use std::time::{Duration, Instant};

use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};

/// First pause before an address is dialled again; it doubles up to [`REDIAL_MAX`].
pub const REDIAL_MIN: Duration = Duration::from_millis(250);

/// Longest pause before an address is dialled again.
pub const REDIAL_MAX: Duration = Duration::from_secs(10);

/// The peer that an address names at its end.
#[must_use]
pub fn peer_of(address: &Multiaddr) -> Option<PeerId> {
    match address.iter().last() {
        Some(Protocol::P2p(peer)) => Some(peer),
        _ => None,
    }
}

/// An address that is to stay connected.
#[derive(Debug, Clone)]
pub struct Redial {
    address: Multiaddr,
    peer: PeerId,
    pause: Duration,
    at: Option<Instant>,
}

impl Redial {
    /// Dials at once; `None` where the address names no peer.
    #[must_use]
    pub fn new(address: Multiaddr, now: Instant) -> Option<Self> {
        let peer = peer_of(&address)?;
        Some(Self { address, peer, pause: REDIAL_MIN, at: Some(now) })
    }

    /// The peer at the address.
    #[must_use]
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// When to call [`Redial::poll_dial`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.at
    }

    /// The address, where it is time to dial it.
    pub fn poll_dial(&mut self, now: Instant) -> Option<Multiaddr> {
        self.at.take_if(|at| *at <= now).map(|_| self.address.clone())
    }

    /// The dial failed, or the connection is gone.
    pub fn handle_lost(&mut self, now: Instant) {
        self.at = Some(now + self.pause);
        self.pause = (self.pause * 2).min(REDIAL_MAX);
    }

    /// The peer has taken us: the next loss is dialled soon again.
    pub fn handle_accepted(&mut self) {
        self.pause = REDIAL_MIN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_over_after_success() {
        let mut now = crate::clock::now();
        let peer = PeerId::random();
        let address: Multiaddr = format!("/memory/1/p2p/{peer}").parse().unwrap();
        let mut redial = Redial::new(address.clone(), now).unwrap();
        assert_eq!(redial.poll_dial(now), Some(address.clone()));
        assert_eq!(redial.poll_dial(now), None, "one dial at a time");
        let mut pauses = Vec::new();
        for _ in 0..8 {
            redial.handle_lost(now);
            let at = redial.poll_timeout().unwrap();
            pauses.push((at - now).as_millis());
            now = at;
            assert!(redial.poll_dial(now).is_some());
        }
        assert_eq!(pauses, [250, 500, 1_000, 2_000, 4_000, 8_000, 10_000, 10_000]);
        redial.handle_accepted();
        redial.handle_lost(now);
        assert_eq!(redial.poll_timeout(), Some(now + REDIAL_MIN));
    }

    #[test]
    fn an_address_without_a_peer_is_no_redial() {
        assert!(Redial::new("/memory/1".parse().unwrap(), crate::clock::now()).is_none());
    }
}
