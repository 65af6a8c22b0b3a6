//! The congestion controller: Cubic that never asks for less than a floor.
//!
//! A hop sends frames that are small beside the network's delay times rate, at moments that the
//! ring's round trip decides. Plain Cubic gives up a third of its window for every lost packet and
//! wins it back over seconds of full use, which such a hop never has: after a few losses a frame no
//! longer fits the window and pays whole round trips. The bytes in flight are bounded elsewhere, by
//! the receiver's credits; the floor is the share of that bound that loss may not take.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use quinn::congestion::{Controller, ControllerFactory, ControllerMetrics, Cubic, CubicConfig};
use quinn_proto::RttEstimator;

/// The bytes of two packets of the smallest allowed size: what every controller may send.
pub(super) const FLOOR_MIN: u64 = 2 * 1200;

/// Makes a controller for each connection.
#[derive(Debug, Clone)]
pub(super) struct FlooredCubicConfig {
    cubic: Arc<CubicConfig>,
    floor: u64,
}

impl FlooredCubicConfig {
    /// Begins with `initial` bytes, and never goes below `floor`.
    pub(super) fn new(initial: u64, floor: u64) -> Self {
        let mut cubic = CubicConfig::default();
        cubic.initial_window(initial);
        Self { cubic: Arc::new(cubic), floor: floor.max(FLOOR_MIN) }
    }
}

impl ControllerFactory for FlooredCubicConfig {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let cubic = Cubic::new(Arc::clone(&self.cubic), now, current_mtu);
        Box::new(FlooredCubic { cubic, floor: self.floor })
    }
}

/// Cubic, and the floor below its window.
#[derive(Debug, Clone)]
struct FlooredCubic {
    cubic: Cubic,
    floor: u64,
}

impl Controller for FlooredCubic {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.cubic.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &RttEstimator) {
        self.cubic.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest_packet_num_acked: Option<u64>) {
        self.cubic.on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent_congestion: bool, lost_bytes: u64) {
        self.cubic.on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.cubic.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.cubic.window().max(self.floor)
    }

    fn metrics(&self) -> ControllerMetrics {
        let mut metrics = self.cubic.metrics();
        metrics.congestion_window = self.window();
        metrics
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        self.cubic.initial_window().max(self.floor)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MTU: u16 = 1452;

    fn pair(initial: u64, floor: u64) -> (Box<dyn Controller>, Box<dyn Controller>) {
        let now = crate::clock::now();
        let mut plain = CubicConfig::default();
        plain.initial_window(initial);
        (Arc::new(FlooredCubicConfig::new(initial, floor)).build(now, MTU), Arc::new(plain).build(now, MTU))
    }

    /// Loses a packet `after` the start of both controllers' lives.
    fn lose(controllers: [&mut Box<dyn Controller>; 2], after: Duration, persistent: bool) {
        let now = crate::clock::now() + after;
        for controller in controllers {
            controller.on_congestion_event(now, now, persistent, u64::from(MTU));
        }
    }

    #[test]
    fn the_window_never_falls_below_the_floor() {
        let (mut floored, mut plain) = pair(1 << 20, 256 << 10);
        for second in 1..60 {
            lose([&mut floored, &mut plain], Duration::from_secs(second), second % 7 == 0);
            assert!(floored.window() >= 256 << 10);
            assert_eq!(floored.window(), plain.window().max(256 << 10), "after {second} losses");
            assert_eq!(floored.metrics().congestion_window, floored.window());
        }
        assert!(plain.window() < 8 << 10, "plain Cubic is at its minimum: {}", plain.window());
        assert_eq!(floored.clone_box().window(), 256 << 10, "a copy has the floor too");
    }

    #[test]
    fn above_the_floor_it_is_cubic() {
        let (mut floored, mut plain) = pair(4 << 20, 64 << 10);
        assert_eq!(floored.initial_window(), plain.initial_window());
        for second in 1..8 {
            lose([&mut floored, &mut plain], Duration::from_secs(second), false);
            assert_eq!(floored.window(), plain.window());
            assert!(floored.window() > 64 << 10);
        }
        let ssthresh = |controller: &dyn Controller| controller.metrics().ssthresh;
        assert_eq!(ssthresh(&*floored), ssthresh(&*plain));
        for controller in [&mut floored, &mut plain] {
            controller.on_mtu_update(9_000);
        }
        assert_eq!(floored.window(), plain.window());
    }

    #[test]
    fn a_floor_below_two_packets_is_two_packets() {
        let (mut floored, mut plain) = pair(1, 1);
        assert_eq!(floored.window(), FLOOR_MIN);
        lose([&mut floored, &mut plain], Duration::from_secs(1), true);
        assert_eq!(floored.window(), plain.window().max(FLOOR_MIN));
    }
}
