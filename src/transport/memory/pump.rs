//! Carries bodies to one side of a connection in memory.
//!
//! Owns the order of a side's events: connected, received, disconnected.

use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tokio::sync::{mpsc, oneshot, watch};

use super::super::events::{EventSender, NoOwner};
use super::super::{Lane, LinkEvent};
use super::{Net, Seat, unseat};

/// How long frames wait for others to be shuffled with.
const TOGETHER: Duration = Duration::from_millis(1);

/// A body under way.
#[derive(Debug)]
pub(super) struct Parcel {
    /// When it arrives; at once without.
    pub(super) due: Option<Pin<Box<tokio::time::Sleep>>>,
    /// Bodies that were queued on control before.
    pub(super) after: u64,
    pub(super) body: Bytes,
}

/// The task of one side.
pub(super) struct Pump {
    pub(super) net: Weak<Net>,
    pub(super) seat: Seat,
    pub(super) events: EventSender,
    pub(super) inward: [mpsc::Receiver<Parcel>; 3],
    pub(super) stopped: oneshot::Receiver<String>,
    pub(super) up: watch::Sender<bool>,
    pub(super) before: Option<watch::Receiver<()>>,
    pub(super) heard: Arc<OnceLock<String>>,
}

impl Pump {
    /// Runs until the connection ends, and tells the owner so.
    pub(super) async fn run(self) {
        let Self { net, seat, events, inward, stopped, up, before, heard } = self;
        if let Some(mut before) = before {
            // The channel carries nothing: it closes.
            while before.changed().await.is_ok() {}
        }
        let Seat { other: peer, dialled, .. } = seat;
        let connected = LinkEvent::Connected { peer, address: seat.address.clone(), dialled };
        if events.send(connected).await.is_ok() {
            up.send_replace(true);
            let [control, data, reply] = inward;
            let order = net.upgrade().and_then(|net| net.settings.shuffle).map(|seed| order_of(seed, &seat));
            let drained = async {
                let passed = watch::Sender::new(0);
                let line = |lane| Line { net: &net, seat: &seat, events: &events, lane, passed: &passed };
                tokio::join!(
                    line(Lane::Control).deliver(control),
                    async {
                        match order {
                            Some(order) => line(Lane::Data).deliver_shuffled(data, order).await,
                            None => line(Lane::Data).deliver(data).await,
                        }
                    },
                    line(Lane::Reply).deliver(reply)
                );
                farewell(&net, &seat, &heard).await
            };
            let reason = tokio::select! {
                biased;
                stopped = stopped => stopped.unwrap_or_else(|_| "the link is gone".to_owned()),
                reason = drained => reason,
            };
            unseat(&net, &seat);
            // Without an owner nobody is left to tell.
            let _ = events.send(LinkEvent::Disconnected { peer, reason }).await;
        } else {
            unseat(&net, &seat);
        }
    }
}

/// The way of one lane's bodies to the owner.
struct Line<'a> {
    net: &'a Weak<Net>,
    seat: &'a Seat,
    events: &'a EventSender,
    lane: Lane,
    /// Bodies that came on control, or were lost.
    passed: &'a watch::Sender<u64>,
}

impl Line<'_> {
    /// Delivers until the sender ends, or the owner does.
    async fn deliver(self, mut inward: mpsc::Receiver<Parcel>) {
        let mut began = false;
        while let Some(parcel) = inward.recv().await {
            if self.arrive(parcel, &mut began).await.is_err() {
                break;
            }
        }
        if self.lane == Lane::Control {
            // Nothing is left to wait for.
            self.passed.send_replace(u64::MAX);
        }
    }

    /// Delivers what is under way together in a random order.
    async fn deliver_shuffled(self, mut inward: mpsc::Receiver<Parcel>, mut order: StdRng) {
        let mut began = false;
        while let Some(first) = inward.recv().await {
            tokio::time::sleep(TOGETHER).await;
            let mut parcels = vec![first];
            while let Ok(parcel) = inward.try_recv() {
                parcels.push(parcel);
            }
            parcels.shuffle(&mut order);
            for parcel in parcels {
                if self.arrive(parcel, &mut began).await.is_err() {
                    return;
                }
            }
        }
    }

    /// Hands a parcel over when it is due; the first of a lane after what was queued on control.
    async fn arrive(&self, parcel: Parcel, began: &mut bool) -> Result<(), NoOwner> {
        let Parcel { due, after, body } = parcel;
        if let Some(due) = due {
            due.await;
        }
        if !*began && self.lane != Lane::Control {
            // The sender lives in the caller.
            let _ = self.passed.subscribe().wait_for(|passed| *passed >= after).await;
        }
        *began = true;
        self.hand_over(body).await?;
        if self.lane == Lane::Control {
            self.passed.send_modify(|passed| *passed += 1);
        }
        Ok(())
    }

    async fn hand_over(&self, body: Bytes) -> Result<(), NoOwner> {
        let Seat { owner, other: peer, .. } = *self.seat;
        if self.net.upgrade().is_some_and(|net| net.is_cut(owner, peer)) {
            return Ok(());
        }
        self.events.send(LinkEvent::Received { peer, lane: self.lane, body }).await
    }
}

/// The order of the frames that come to this side: the same for the same seed.
fn order_of(seed: u64, seat: &Seat) -> StdRng {
    StdRng::seed_from_u64(seed ^ seat.connection << 1 ^ u64::from(seat.dialled))
}

/// The end of a connection travels as a body does: it takes the delay, and a cut holds it back.
async fn farewell(net: &Weak<Net>, seat: &Seat, heard: &OnceLock<String>) -> String {
    if let Some(net) = net.upgrade() {
        let delay = net.delay(seat.owner, seat.other);
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        net.until_whole(seat.owner, seat.other).await;
    }
    heard.get().cloned().unwrap_or_else(|| "the connection broke".to_owned())
}
