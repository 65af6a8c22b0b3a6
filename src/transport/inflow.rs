//! What came in on one connection and waits for the owner, lane by lane.
//!
//! Shared by the connection, which counts what comes in and returns credit for it, and by the
//! owner's event queue, which says what was taken.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{AcquireError, Notify, Semaphore, SemaphorePermit};

use super::credit::{Flood, Receipts, Return};
use super::{EVENT_QUEUE_MAX, Lane};
use crate::clock;

/// Bodies of one connection and lane that wait to be taken: a share of the queue, so that one peer
/// holds up no other.
pub(super) const SHARE: usize = EVENT_QUEUE_MAX / 8;

/// A body that came in, for whoever says that it was taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) lane: Lane,
    /// What a frame costs of its sender's credit.
    pub(crate) cost: u64,
    /// When it had come.
    pub(crate) arrived: Instant,
    /// Whether its sender waits for its credit.
    pub(crate) asked: bool,
}

/// The receiving side of one connection.
#[derive(Debug)]
pub(crate) struct Inflow {
    receipts: Mutex<Receipts>,
    /// A return became due sooner.
    sooner: Notify,
    /// Room for bodies that wait to be taken: of each lane.
    places: [Semaphore; 3],
}

impl Inflow {
    /// Of a connection on which nothing came yet.
    pub(crate) fn new(window_max: u64) -> Self {
        Self {
            receipts: Mutex::new(Receipts::new(window_max)),
            sooner: Notify::new(),
            places: [const { Semaphore::const_new(SHARE) }; 3],
        }
    }

    fn receipts(&self) -> MutexGuard<'_, Receipts> {
        self.receipts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn places(&self, lane: Lane) -> &Semaphore {
        let [control, data, reply] = &self.places;
        match lane {
            Lane::Control => control,
            Lane::Data => data,
            Lane::Reply => reply,
        }
    }

    /// Waits until a body may wait to be taken.
    pub(super) async fn place(&self, lane: Lane) -> Result<SemaphorePermit<'_>, AcquireError> {
        self.places(lane).acquire().await
    }

    /// Counts a frame that is announced.
    ///
    /// # Errors
    /// [`Flood`] where its sender had no credit.
    pub(crate) fn arrived(&self, cost: u64) -> Result<(), Flood> {
        self.receipts().handle_arrived(cost)
    }

    /// The owner took a body.
    pub(super) fn taken(&self, ticket: Ticket) {
        let Ticket { lane, cost, arrived, asked } = ticket;
        if lane == Lane::Data && self.receipts().handle_taken(cost, arrived, asked, clock::now()) {
            self.sooner.notify_one();
        }
        self.places(lane).add_permits(1);
    }

    /// Waits until credit is to be returned. Dropped while waiting, it loses nothing.
    pub(crate) async fn due(&self) -> Return {
        loop {
            let next = {
                let mut receipts = self.receipts();
                if let Some(due) = receipts.poll_return(clock::now()) {
                    return due;
                }
                receipts.poll_timeout()
            };
            match next {
                None => self.sooner.notified().await,
                Some(at) => tokio::select! {
                    () = tokio::time::sleep_until(at.into()) => {}
                    () = self.sooner.notified() => {}
                },
            }
        }
    }
}
