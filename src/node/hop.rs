//! How a hop stands, as its sender sees it.

use crate::ids::Node;
use crate::proto::control::HopReport;
use crate::proto::liveness::RoundTrip;
use crate::transport::Link;

/// Puts together what heartbeats and link know of the way to `to`.
#[must_use]
pub fn hop_report(link: &dyn Link, to: Node, rtt: Option<RoundTrip>) -> HopReport {
    let stats = link.hop_stats(to);
    HopReport {
        to,
        rtt,
        in_flight: stats.map_or(0, |stats| stats.in_flight),
        window: stats.map_or(0, |stats| stats.window),
        rate: stats.map_or(0, |stats| stats.rate),
        queued: stats.map_or(0, |stats| u32::try_from(stats.queued).unwrap_or(u32::MAX)),
    }
}
