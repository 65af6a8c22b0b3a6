//! The part of the loop that tells what the ring is: what the API shows of it.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::coordinator::job::{HopStatus, MemberStatus};
use crate::coordinator::ring::Member;
use crate::coordinator::run::Shell;
use crate::ids::Node;
use crate::node::hop::hop_report;
use crate::proto::control::HopReport;

impl Shell {
    /// Publishes the ring as it stands.
    pub(super) fn publish(&self) {
        let whole = self.ring.whole();
        let context = whole.iter().map(|member| member.offer.max_context).min().unwrap_or(0);
        let sessions = whole.iter().map(|member| member.offer.max_sessions).min().unwrap_or(0);
        let draft_block = whole.last().map_or(0, |member| member.offer.draft_block);
        self.shared.context.store(context, Ordering::Relaxed);
        self.shared.session_limit.store(sessions.min(self.settings.max_sessions), Ordering::Relaxed);
        self.shared.draft_block.store(draft_block, Ordering::Relaxed);
        let in_ring: Vec<Node> = whole.iter().map(|member| member.peer).collect();
        let outside = self.ring.members().filter(|member| !in_ring.contains(&member.peer));
        let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.view = self.ring.view();
        status.missing = self.log.missing().or_else(|| self.ring.missing());
        status.members = whole.iter().map(|member| self.member_status(member, true)).collect();
        status.members.extend(outside.map(|member| self.member_status(member, false)));
        status.hops = self.hops(&whole);
        status.heals = self.heals.list();
    }

    /// The hops of the ring in the order of a frame's way, each as its sender measured it.
    fn hops(&self, whole: &[&Member]) -> Vec<HopStatus> {
        let Some(head) = whole.first() else { return Vec::new() };
        let ours = self.link.local();
        let first = hop_report(self.link.as_ref(), head.peer, self.heartbeats.rtt(head.peer));
        let reported = whole.iter().filter_map(|member| {
            let hop = member.report.as_ref()?.hop.as_ref()?;
            Some(hop_status(member.peer, hop))
        });
        std::iter::once(hop_status(ours, &first)).chain(reported).collect()
    }

    fn member_status(&self, member: &Member, in_ring: bool) -> MemberStatus {
        let report = member.report.as_ref();
        let local = member.offer.addresses.iter().any(|address| address.contains("/127.0.0.1/"));
        let rtt = self.heartbeats.rtt(member.peer);
        MemberStatus {
            peer: member.peer.to_string(),
            range: member.offer.range.to_string(),
            device: member.offer.device.clone(),
            pid: local.then_some(member.offer.pid),
            in_ring,
            alive: !member.suspect,
            spare: member.offer.spare,
            shadow_of: self.ring.shadow_of(member.peer).map(|of| of.to_string()),
            shadowed_by: self.ring.shadowed_by(member.peer).map(|by| by.to_string()),
            addresses: member.offer.addresses.clone(),
            rtt_us: rtt.map(|rtt| micros(rtt.mean)),
            service_us: report.map_or(0, |report| report.service_us),
            passes: report.map_or(0, |report| report.passes),
            draft_block: member.offer.draft_block,
            sessions: report.map_or(0, |report| u32::try_from(report.sessions.len()).unwrap_or(u32::MAX)),
            loaded_bytes: report.map_or(0, |report| report.loaded_bytes),
        }
    }
}

fn hop_status(from: Node, hop: &HopReport) -> HopStatus {
    HopStatus {
        from: from.to_string(),
        to: hop.to.to_string(),
        rtt_us: hop.rtt.map(|rtt| micros(rtt.mean)),
        jitter_us: hop.rtt.map(|rtt| micros(rtt.jitter)),
        in_flight: hop.in_flight,
        window: hop.window,
        rate: hop.rate,
        queued: hop.queued,
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
