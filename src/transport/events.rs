//! The event queue of a link: bounded in events and in bytes.
//!
//! Whoever fills it waits while it is full, so a peer that floods stops being read and its own
//! send queue fills: the pressure goes back to where it comes from.

use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::{Semaphore, mpsc};

use super::inflow::{Inflow, Ticket};
use super::{EVENT_BYTES_MAX, EVENT_QUEUE_MAX, LinkEvent};

/// An event, the bytes it holds of the queue's budget, and whom to tell when it is taken.
#[derive(Debug)]
struct Held {
    event: LinkEvent,
    cost: u32,
    receipt: Option<(Arc<Inflow>, Ticket)>,
}

/// The owner's end of a link: what happened, in the order it happened per peer.
///
/// While nobody takes events, at most [`EVENT_QUEUE_MAX`] of them and [`EVENT_BYTES_MAX`] bytes of
/// bodies wait here, and the link reads nothing further from any peer. A QUIC connection has an
/// eighth of the queue for each lane, and a frame's credit goes back to its sender when it is taken
/// from here.
#[derive(Debug)]
pub struct LinkEvents {
    queue: mpsc::Receiver<Held>,
    budget: Arc<Semaphore>,
}

/// The link's end of the queue.
#[derive(Debug, Clone)]
pub(crate) struct EventSender {
    queue: mpsc::Sender<Held>,
    budget: Arc<Semaphore>,
}

/// The owner of a link dropped its [`LinkEvents`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the owner of the link takes no events any more")]
pub(crate) struct NoOwner;

/// Makes the queue of one link.
pub(crate) fn event_queue() -> (EventSender, LinkEvents) {
    let (sender, receiver) = mpsc::channel(EVENT_QUEUE_MAX);
    let budget = Arc::new(Semaphore::new(EVENT_BYTES_MAX as usize));
    (EventSender { queue: sender, budget: Arc::clone(&budget) }, LinkEvents { queue: receiver, budget })
}

impl EventSender {
    /// Queues an event, waiting for room. Dropped while waiting, it queues nothing.
    pub(crate) async fn send(&self, event: LinkEvent) -> Result<(), NoOwner> {
        self.queue(event, None).await
    }

    /// Queues a body of a connection, waiting also for a place in the connection's share of the
    /// queue; the connection learns when it is taken. Dropped while waiting, it queues nothing.
    pub(crate) async fn send_body(
        &self,
        event: LinkEvent,
        inflow: &Arc<Inflow>,
        ticket: Ticket,
    ) -> Result<(), NoOwner> {
        let place = tokio::select! {
            biased;
            place = inflow.place(ticket.lane) => place.map_err(|_| NoOwner)?,
            () = self.queue.closed() => return Err(NoOwner),
        };
        self.queue(event, Some((Arc::clone(inflow), ticket))).await?;
        place.forget();
        Ok(())
    }

    async fn queue(&self, event: LinkEvent, receipt: Option<(Arc<Inflow>, Ticket)>) -> Result<(), NoOwner> {
        let cost = match &event {
            LinkEvent::Received { body, .. } => u32::try_from(body.len()).unwrap_or(u32::MAX).min(EVENT_BYTES_MAX),
            LinkEvent::Connected { .. } | LinkEvent::Disconnected { .. } => 0,
        };
        let permit = if cost == 0 {
            None
        } else {
            tokio::select! {
                biased;
                permit = self.budget.acquire_many(cost) => Some(permit.map_err(|_| NoOwner)?),
                () = self.queue.closed() => return Err(NoOwner),
            }
        };
        let slot = self.queue.reserve().await.map_err(|_| NoOwner)?;
        if let Some(permit) = permit {
            permit.forget();
        }
        slot.send(Held { event, cost, receipt });
        Ok(())
    }
}

impl LinkEvents {
    fn release(&self, held: Held) -> LinkEvent {
        self.budget.add_permits(held.cost as usize);
        if let Some((inflow, ticket)) = held.receipt {
            inflow.taken(ticket);
        }
        held.event
    }

    /// Takes the next event, waiting for it; `None` when the link is shut down and all is taken.
    /// Dropped while waiting, it loses nothing.
    pub async fn recv(&mut self) -> Option<LinkEvent> {
        let held = self.queue.recv().await?;
        Some(self.release(held))
    }

    /// Takes the next event if one waits.
    pub fn try_recv(&mut self) -> Option<LinkEvent> {
        let held = self.queue.try_recv().ok()?;
        Some(self.release(held))
    }

    /// Polls for the next event; `Ready(None)` when the link is shut down and all is taken.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<LinkEvent>> {
        self.queue.poll_recv(cx).map(|held| held.map(|held| self.release(held)))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures::FutureExt;

    use super::super::Lane;
    use super::super::inflow::SHARE;
    use super::*;
    use crate::ids::Node;

    fn body(bytes: usize) -> LinkEvent {
        LinkEvent::Received { peer: Node::random(), lane: Lane::Data, body: Bytes::from(vec![0; bytes]) }
    }

    /// Sends if there is room, whatever tokio thinks of tasks that never wait.
    fn send_now(sender: &EventSender, event: LinkEvent) -> Option<Result<(), NoOwner>> {
        tokio::task::unconstrained(sender.send(event)).now_or_never()
    }

    #[tokio::test]
    async fn events_are_bounded_in_number() {
        let (sender, mut events) = event_queue();
        for _ in 0..EVENT_QUEUE_MAX {
            assert_eq!(send_now(&sender, body(1)), Some(Ok(())));
        }
        assert_eq!(send_now(&sender, body(1)), None);
        assert!(events.recv().await.is_some());
        assert_eq!(send_now(&sender, body(1)), Some(Ok(())));
    }

    #[tokio::test]
    async fn events_are_bounded_in_bytes() {
        let (sender, mut events) = event_queue();
        let half = EVENT_BYTES_MAX as usize / 2;
        assert_eq!(send_now(&sender, body(half)), Some(Ok(())));
        assert_eq!(send_now(&sender, body(half)), Some(Ok(())));
        assert_eq!(send_now(&sender, body(1)), None, "the budget is used up");
        assert!(events.try_recv().is_some());
        assert_eq!(send_now(&sender, body(1)), Some(Ok(())), "taking an event frees its bytes");
    }

    #[tokio::test]
    async fn a_connection_has_a_share_of_each_lane_and_learns_what_is_taken() {
        let (sender, mut events) = event_queue();
        let inflow = Arc::new(Inflow::new(1 << 20));
        let send = |lane| {
            let event = LinkEvent::Received { peer: Node::random(), lane, body: Bytes::from(vec![0; 10]) };
            let ticket = Ticket { lane, cost: 14, arrived: crate::clock::now(), asked: true };
            tokio::task::unconstrained(sender.send_body(event, &inflow, ticket)).now_or_never()
        };
        for lane in [Lane::Control, Lane::Data, Lane::Reply] {
            for _ in 0..SHARE {
                assert_eq!(send(lane), Some(Ok(())));
            }
            assert_eq!(send(lane), None, "{lane:?} is full");
        }
        assert_eq!(send_now(&sender, body(1)), Some(Ok(())), "others have room");
        for _ in 0..SHARE {
            assert!(events.try_recv().is_some());
        }
        assert_eq!((send(Lane::Control), send(Lane::Data)), (Some(Ok(())), None));
        assert!(inflow.due().now_or_never().is_none(), "control costs no credit");
        assert!(events.try_recv().is_some());
        assert_eq!(inflow.due().await.taken, 14);
        assert_eq!(send(Lane::Data), Some(Ok(())));
    }

    #[tokio::test]
    async fn a_sender_that_waits_learns_that_the_owner_left() {
        let (sender, events) = event_queue();
        let whole = EVENT_BYTES_MAX as usize;
        assert_eq!(send_now(&sender, body(whole)), Some(Ok(())));
        let waiting = tokio::spawn({
            let sender = sender.clone();
            async move { sender.send(body(1)).await }
        });
        tokio::task::yield_now().await;
        drop(events);
        assert_eq!(waiting.await.unwrap(), Err(NoOwner));
    }
}
