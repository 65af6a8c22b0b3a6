//! Carries bodies to one side of a connection in memory.
//!
//! Owns the order of a side's events: connected, received, disconnected.

use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};

use super::super::events::EventSender;
use super::super::{Lane, LinkEvent};
use super::{Net, Seat, unseat};

/// A body under way.
#[derive(Debug)]
pub(super) struct Parcel {
    /// When it arrives; at once without.
    pub(super) due: Option<Pin<Box<tokio::time::Sleep>>>,
    pub(super) body: Bytes,
}

/// The task of one side.
pub(super) struct Pump {
    pub(super) net: Weak<Net>,
    pub(super) seat: Seat,
    pub(super) events: EventSender,
    pub(super) inward: [mpsc::Receiver<Parcel>; 2],
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
            let [control, data] = inward;
            let drained = async {
                tokio::join!(
                    deliver(&net, &seat, &events, Lane::Control, control),
                    deliver(&net, &seat, &events, Lane::Data, data)
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

/// Delivers one lane until the sender ends, or the owner does.
async fn deliver(net: &Weak<Net>, seat: &Seat, events: &EventSender, lane: Lane, mut inward: mpsc::Receiver<Parcel>) {
    while let Some(Parcel { due, body }) = inward.recv().await {
        if let Some(due) = due {
            due.await;
        }
        if net.upgrade().is_some_and(|net| net.is_cut(seat.owner, seat.other)) {
            continue;
        }
        if events.send(LinkEvent::Received { peer: seat.other, lane, body }).await.is_err() {
            return;
        }
    }
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
