//! What the worker counts and the shell reports, without stopping the worker.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::ids::{Epoch, Position, SessionId, View};
use crate::proto::control::{SessionReport, StageReport};
use crate::proto::fence::Fence;

/// Passes over single positions that the service time is the median of.
const SERVICE_SAMPLES: usize = 31;

/// Counters of one session on one stage.
#[derive(Debug, Default)]
pub struct SessionCounters {
    /// Epoch adopted.
    pub epoch: AtomicU32,
    /// Next position to compute.
    pub next: AtomicU32,
    /// Frames received.
    pub received: AtomicU64,
    /// Frames computed.
    pub computed: AtomicU64,
    /// Those of `computed` that hold a single position past the prompt.
    pub decoded: AtomicU64,
    /// Frames or replies sent on.
    pub forwarded: AtomicU64,
    /// Frames dropped by the fence.
    pub dropped: AtomicU64,
}

impl SessionCounters {
    /// Takes over what a fence counted.
    pub fn publish<T>(&self, fence: &Fence<T>) {
        let counted = fence.counters();
        let write = |counter: &AtomicU64, value: u64| counter.store(value, Ordering::Relaxed);
        self.epoch.store(fence.epoch().0, Ordering::Relaxed);
        self.next.store(fence.next().0, Ordering::Relaxed);
        write(&self.received, counted.received);
        write(&self.computed, counted.computed);
        write(&self.decoded, counted.decoded);
        write(&self.forwarded, counted.forwarded);
        write(&self.dropped, counted.dropped());
    }

    /// The counters as they stand.
    #[must_use]
    pub fn report(&self, session: SessionId) -> SessionReport {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SessionReport {
            session,
            epoch: Epoch(self.epoch.load(Ordering::Relaxed)),
            next: Position(self.next.load(Ordering::Relaxed)),
            received: read(&self.received),
            computed: read(&self.computed),
            decoded: read(&self.decoded),
            forwarded: read(&self.forwarded),
            dropped: read(&self.dropped),
        }
    }
}

/// Counters of a stage.
#[derive(Debug, Default)]
pub struct Counters {
    /// Engine passes since start.
    pub passes: AtomicU64,
    /// Microseconds in engine passes since start.
    pub busy_us: AtomicU64,
    /// Frames that wait for the engine.
    pub queued: AtomicU32,
    /// Sessions that the worker has yet to open.
    pub opening: AtomicU32,
    /// Bytes of weight tensors loaded since start.
    pub loaded_bytes: AtomicU64,
    service: Mutex<Service>,
    sessions: Mutex<BTreeMap<SessionId, Arc<SessionCounters>>>,
}

#[derive(Debug, Default)]
struct Service {
    samples: [u32; SERVICE_SAMPLES],
    count: usize,
}

impl Counters {
    /// Adds a session; its counters are the worker's to raise.
    pub fn open(&self, session: SessionId) -> Arc<SessionCounters> {
        let counters = Arc::new(SessionCounters::default());
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.insert(session, Arc::clone(&counters));
        counters
    }

    /// Forgets a session.
    pub fn close(&self, session: SessionId) {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).remove(&session);
    }

    /// How many sessions are open, or about to be.
    #[must_use]
    pub fn open_sessions(&self) -> usize {
        // In this order: a session that is being opened is counted twice rather than not at all.
        let opening = self.opening.load(Ordering::Acquire) as usize;
        opening + self.sessions.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Counts a pass of `single` or several positions that took `us` microseconds.
    pub fn pass(&self, single: bool, us: u64) {
        self.passes.fetch_add(1, Ordering::Relaxed);
        self.busy_us.fetch_add(us, Ordering::Relaxed);
        if single {
            let mut service = self.service.lock().unwrap_or_else(PoisonError::into_inner);
            let at = service.count % SERVICE_SAMPLES;
            service.samples[at] = u32::try_from(us).unwrap_or(u32::MAX);
            service.count += 1;
        }
    }

    /// Everything that is counted, for a probe.
    #[must_use]
    pub fn report(&self, view: View) -> StageReport {
        let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        StageReport {
            view,
            sessions: sessions.iter().map(|(session, counters)| counters.report(*session)).collect(),
            passes: self.passes.load(Ordering::Relaxed),
            busy_us: self.busy_us.load(Ordering::Relaxed),
            service_us: self.service_us(),
            queued: self.queued.load(Ordering::Relaxed),
            loaded_bytes: self.loaded_bytes.load(Ordering::Relaxed),
            hop: None,
        }
    }

    fn service_us(&self) -> u64 {
        let service = self.service.lock().unwrap_or_else(PoisonError::into_inner);
        let mut samples = service.samples;
        let count = service.count.min(SERVICE_SAMPLES);
        drop(service);
        let samples = &mut samples[..count];
        samples.sort_unstable();
        samples.get(count / 2).copied().map_or(0, u64::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_time_is_the_median_of_single_position_passes() {
        let counters = Counters::default();
        assert_eq!(counters.report(View(1)).service_us, 0);
        for us in [10, 1_000, 20] {
            counters.pass(true, us);
        }
        counters.pass(false, 1_000_000);
        let report = counters.report(View(1));
        assert_eq!((report.service_us, report.passes, report.busy_us), (20, 4, 1_001_030));
    }

    #[test]
    fn a_closed_session_is_not_reported() {
        let counters = Counters::default();
        counters.open(SessionId(4)).received.store(3, Ordering::Relaxed);
        assert_eq!(counters.report(View(1)).sessions[0].received, 3);
        counters.close(SessionId(4));
        assert_eq!((counters.report(View(1)).sessions.len(), counters.open_sessions()), (0, 0));
    }
}
