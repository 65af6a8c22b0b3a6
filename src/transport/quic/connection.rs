//! The task of one connection: from its first stream to its last event.
//!
//! Owns the order of events: the owner hears of a connection when both sides have settled on it,
//! then of its bodies, then of its end. Readers and writers of the lanes are tasks of their own,
//! straight from the stream to the owner's event queue and from the send queue to the stream: a
//! body passes through neither this task nor the swarm's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use libp2p::swarm::Stream;
use libp2p::{Multiaddr, PeerId};
use tokio::sync::mpsc::error::{SendError, TrySendError};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::super::credit::HopStats;
use super::super::events::EventSender;
use super::super::{Lane, LinkEvent};
use super::Shared;
use super::control::Outgoing;
use super::handler::Part;
use super::lane::{LaneReader, Place, chain};
use super::lines::{End, Heard, Line, hear_returns};
use super::readers::Readers;
use super::settle::{Settled, too_many};
use super::spread::Outflow;

/// What others need to use or end a connection.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) control: SendQueue,
    pub(super) frames: SendQueue,
    pub(super) replies: SendQueue,
    pub(super) outflow: Arc<Outflow>,
    pub(super) stop: oneshot::Sender<Stop>,
}

impl Handle {
    /// The queue of a lane.
    pub(super) fn queue(&self, lane: Lane) -> &SendQueue {
        match lane {
            Lane::Control => &self.control,
            Lane::Data => &self.frames,
            Lane::Reply => &self.replies,
        }
    }

    /// What is known of the hop.
    pub(super) fn stats(&self) -> HopStats {
        let queue = &self.frames.queue;
        self.outflow.stats(queue.max_capacity() - queue.capacity())
    }
}

/// The owner's end of a lane's send queue; counts the bodies that it took.
#[derive(Debug, Clone)]
pub(super) struct SendQueue {
    queue: mpsc::Sender<Outgoing>,
    taken: Arc<AtomicU64>,
}

impl SendQueue {
    /// Counts what goes through a queue.
    pub(super) fn new(
        (queue, receiver): (mpsc::Sender<Outgoing>, mpsc::Receiver<Outgoing>),
    ) -> (Self, mpsc::Receiver<Outgoing>) {
        (Self { queue, taken: Arc::default() }, receiver)
    }

    /// How many bodies were queued.
    pub(super) fn taken(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.taken)
    }

    /// Queues a body if there is room, else gives it back.
    pub(super) fn try_send(&self, body: Bytes) -> Result<(), TrySendError<Outgoing>> {
        self.queue.try_send(Outgoing::Body(body))?;
        self.taken.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Queues what [`SendQueue::try_send`] gave back, waiting for room.
    pub(super) async fn send(&self, body: Outgoing) -> Result<(), SendError<Outgoing>> {
        self.queue.send(body).await?;
        self.taken.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

/// Why a connection is to end.
#[derive(Debug)]
pub(super) struct Stop {
    /// For this side's owner.
    pub(super) reason: String,
    /// For the peer, after everything that is queued; nothing where it is dead.
    pub(super) farewell: Option<String>,
}

/// A connection that libp2p made.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) shared: Arc<Shared>,
    pub(super) events: EventSender,
    pub(super) peer: PeerId,
    pub(super) number: u64,
    pub(super) dialled: bool,
    /// The peer's address, ending in its id.
    pub(super) address: Multiaddr,
    pub(super) parts: mpsc::Receiver<Part>,
}

impl Connection {
    /// Runs the connection until it has ended and its owner knows.
    pub(super) async fn run(mut self) {
        // As long as a dial: whoever says nothing in that time is no peer.
        let deadline = self.shared.settings.path.handshake_timeout;
        let (peer, shared) = (self.peer, Arc::clone(&self.shared));
        let settled = tokio::select! {
            settled = timeout(deadline, self.settle()) => settled.unwrap_or_else(|_| {
                Err(format!("the peer did not introduce itself within {} ms", deadline.as_millis()))
            }),
            () = shared.until_closed() => Err("the link was shut down".to_owned()),
        };
        match settled {
            Ok(settled) => self.live(settled).await,
            Err(why) => {
                tracing::debug!(%peer, number = self.number, %why, "connection not settled");
                shared.registry().gone(peer, self.number, &why);
            }
        }
        shared.registry().forget(peer);
    }

    /// Carries bodies until the connection ends.
    async fn live(mut self, settled: Settled) {
        let Settled { node, turn, stop, control_in, data_in, mut control_out, spread, .. } = settled;
        let (control, mut control_queue) = settled.control;
        let (frames, inflow, outflow) = (settled.frames, settled.inflow, settled.outflow);
        let shared = Arc::clone(&self.shared);
        let turn = turn.lock_owned().await;
        let connected = LinkEvent::Connected { peer: node, address: self.address.clone(), dialled: self.dialled };
        if let Err(error) = self.events.send(connected).await {
            shared.registry().gone(node.peer, self.number, &error.to_string());
            return;
        }
        shared.registry().up(node, self.number);
        tracing::debug!(peer = %node, address = %self.address, dialled = self.dialled, "connected");

        let (reading, stop_reading) = watch::channel(());
        let (count, heard) = watch::channel(0);
        let line = |heard| Line {
            peer: node,
            events: self.events.clone(),
            inflow: Arc::clone(&inflow),
            outflow: Arc::clone(&outflow),
            heard,
        };
        let lanes = data_in.len() as u64;
        let control_in = line(Heard::Count(count)).read(control_in, stop_reading.clone());
        let data_in =
            data_in.into_iter().map(|lane| line(Heard::Await(heard.clone())).read(lane, stop_reading.clone()));
        let mut readers = Readers::start(control_in, data_in.collect());
        let mut writers = JoinSet::new();
        let returns = Arc::clone(&inflow);
        writers.spawn(async move { control_out.run(&mut control_queue, &returns).await });
        writers.spawn(spread.run());

        let stop = self.watch(&mut readers, &mut writers, stop, lanes).await;
        // No body may follow the end.
        drop(reading);
        let control_in = stopped(&mut readers).await;
        shared.registry().gone(node.peer, self.number, &stop.reason);
        tracing::debug!(peer = %node, reason = %stop.reason, "disconnected");
        // Without an owner nobody is left to tell.
        let _ = self.events.send(LinkEvent::Disconnected { peer: node, reason: stop.reason }).await;
        drop(turn);
        if let Some(farewell) = stop.farewell {
            let last = async {
                // A lane that broke is past a farewell.
                let (near, far) = (Outgoing::Farewell(farewell.clone()), Outgoing::Farewell(farewell));
                let _ = tokio::join!(control.queue.send(near), frames.queue.send(far));
                // The peer closes when it has read all.
                while self.parts.recv().await.is_some() {}
            };
            let returns = async {
                if let Some(control) = control_in {
                    hear_returns(control, &outflow).await;
                }
                std::future::pending().await
            };
            let said = async {
                tokio::select! {
                    () = last => {}
                    () = returns => {}
                }
            };
            // A peer that doesn't is closed upon.
            let _ = timeout(shared.settings.close_grace, said).await;
        }
        writers.shutdown().await;
    }

    /// Waits until something ends the connection.
    async fn watch(
        &mut self,
        readers: &mut Readers,
        writers: &mut JoinSet<std::io::Result<()>>,
        mut stop: oneshot::Receiver<Stop>,
        lanes: u64,
    ) -> Stop {
        let broken = |reason: String| Stop { reason, farewell: None };
        let ours = |reason: String| Stop { farewell: Some(reason.clone()), reason };
        tokio::select! {
            biased;
            // The registry drops a handle only when it hands on its successor or the stop itself.
            stop = &mut stop => stop.unwrap_or_else(|_| broken("the link is gone".to_owned())),
            Some(end) = readers.next() => match end {
                Ok(End::Farewell(reason)) => {
                    self.drain(readers).await;
                    broken(closed_by_peer(&reason))
                }
                Ok(End::Error(why)) => ours(why),
                Ok(End::Stopped(_)) => broken("reading stopped".to_owned()),
                Err(error) => ours(format!("a reader failed: {error}")),
            },
            Some(end) = writers.join_next() => {
                let why = match end {
                    Ok(Ok(())) => "the send queue was closed".to_owned(),
                    Ok(Err(error)) => chain(&error),
                    Err(error) => format!("a writer failed: {error}"),
                };
                broken(self.drain(readers).await.unwrap_or(why))
            },
            part = self.parts.recv() => match part {
                None => broken(self.drain(readers).await.unwrap_or_else(|| "the connection closed".to_owned())),
                Some(Part::Broken(why)) => ours(why),
                Some(Part::DataIn(_) | Part::DataOut(..)) => ours(too_many(lanes)),
                Some(Part::ControlIn(_) | Part::ControlOut(_) | Part::Older(..)) => {
                    ours("the peer opened a second control lane".to_owned())
                }
            },
        }
    }

    /// Lets the lanes bring what they still carry, for as long as a farewell may take, and gives
    /// what they know of the end: a farewell rather than an error.
    async fn drain(&self, readers: &mut Readers) -> Option<String> {
        let (mut farewell, mut error) = (None, None);
        let drained = timeout(self.shared.settings.close_grace, async {
            while let Some(end) = readers.next().await {
                match end {
                    Ok(End::Farewell(reason)) => farewell = farewell.take().or(Some(closed_by_peer(&reason))),
                    Ok(End::Error(why)) => error = error.take().or(Some(why)),
                    Ok(End::Stopped(_)) | Err(_) => {}
                }
            }
        });
        // A lane that carries too much is cut off.
        let _ = drained.await;
        farewell.or(error)
    }
}

/// The reason where the peer gave one.
pub(super) fn closed_by_peer(reason: &str) -> String {
    format!("the peer closed the connection: {reason}")
}

/// Waits until nothing is read any more, and gives the control lane back if it can be read on.
async fn stopped(readers: &mut Readers) -> Option<Box<LaneReader<Stream>>> {
    let mut control = None;
    while let Some(end) = readers.next().await {
        if let Ok(End::Stopped(lane)) = end
            && lane.place() == Place::Control
        {
            control = Some(lane);
        }
    }
    control
}
