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

use super::super::events::EventSender;
use super::super::{Lane, LinkEvent, SEND_QUEUE_MAX};
use super::Shared;
use super::handler::Part;
use super::lane::{Incoming, LaneError, LaneReader, LaneWriter, Note, Outgoing, chain};
use super::registry::{Turn, Verdict, Way};
use crate::ids::Node;

/// What others need to use or end a connection.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) control: SendQueue,
    pub(super) data: SendQueue,
    pub(super) stop: oneshot::Sender<Stop>,
}

/// The owner's end of a lane's send queue; counts the bodies that it took.
#[derive(Debug, Clone)]
pub(super) struct SendQueue {
    queue: mpsc::Sender<Outgoing>,
    taken: Arc<AtomicU64>,
}

impl SendQueue {
    fn new() -> (Self, mpsc::Receiver<Outgoing>) {
        let (queue, receiver) = mpsc::channel(SEND_QUEUE_MAX);
        (Self { queue, taken: Arc::default() }, receiver)
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

/// The lanes of a connection, as they come.
#[derive(Debug, Default)]
struct Lanes {
    control_out: Option<LaneWriter<Stream>>,
    data_out: Option<LaneWriter<Stream>>,
    control_in: Option<LaneReader<Stream>>,
    data_in: Option<LaneReader<Stream>>,
}

/// A connection that both sides settled on.
struct Settled {
    control_out: LaneWriter<Stream>,
    data_out: LaneWriter<Stream>,
    control_in: LaneReader<Stream>,
    data_in: LaneReader<Stream>,
    queues: Queues,
    stop: oneshot::Receiver<Stop>,
    /// Who is at the other end.
    node: Node,
    turn: Turn,
}

/// The send queues, both ends.
struct Queues {
    control: (SendQueue, mpsc::Receiver<Outgoing>),
    data: (SendQueue, mpsc::Receiver<Outgoing>),
}

/// How a lane ended.
enum End {
    Farewell(String),
    Error(String),
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

    /// Opens all lanes and agrees with the peer that this connection is the one.
    async fn settle(&mut self) -> Result<Settled, String> {
        let mut lanes = Lanes::default();
        let mut introduced = false;
        let (mut control_out, data_out, mut control_in, data_in) = loop {
            if let (false, Some(control)) = (introduced, &mut lanes.control_out) {
                let hello = self.shared.registry().hello(self.peer, self.number);
                control.note(&Note::Hello(hello)).await.map_err(|error| chain(&error))?;
                introduced = true;
            }
            match lanes {
                Lanes {
                    control_out: Some(control_out),
                    data_out: Some(data_out),
                    control_in: Some(control_in),
                    data_in: Some(data_in),
                } => break (control_out, data_out, control_in, data_in),
                partial => lanes = partial,
            }
            lanes.add(self.parts.recv().await.ok_or("the peer closed the connection at once")?)?;
        };
        let hello = match control_in.note("a hello").await.map_err(|error| error.to_string())? {
            Note::Hello(hello) => hello,
            other @ (Note::Accept { .. } | Note::After { .. } | Note::Farewell { .. }) => {
                return Err(control_in.unexpected_note(&other, "a hello").to_string());
            }
        };
        let decides = self.shared.registry().decides(self.peer);
        let heard = if decides { None } else { Some(accepted(&mut control_in).await?) };
        let queues = Queues { control: SendQueue::new(), data: SendQueue::new() };
        let (stop_sender, stop) = oneshot::channel();
        let handle = Handle { control: queues.control.0.clone(), data: queues.data.0.clone(), stop: stop_sender };
        let way = Way { number: self.number, address: self.address.clone() };
        let verdict = match heard {
            None => self.shared.registry().judge(self.peer, way, hello, handle),
            Some(serial) => self.shared.registry().follow(self.peer, way, (hello, serial), handle),
        };
        let (serial, turn, bury) = match verdict {
            Verdict::Accept { serial, turn, bury } => (serial, turn, bury),
            Verdict::Refuse { why } => return Err(why.to_owned()),
        };
        for old in bury {
            // A connection that ends by itself needs no reason.
            let _ = old.stop.send(Stop { reason: "the peer connected anew".to_owned(), farewell: None });
        }
        if decides {
            control_out.note(&Note::Accept { serial }).await.map_err(|error| chain(&error))?;
        }
        let node = Node { peer: self.peer, start: hello.start };
        Ok(Settled { control_out, data_out, control_in, data_in, queues, stop, node, turn })
    }

    /// Carries bodies until the connection ends.
    async fn live(mut self, settled: Settled) {
        let Settled { mut control_out, mut data_out, control_in, data_in, queues, stop, node, turn } = settled;
        let Queues { control: (control, mut control_queue), data: (data, mut data_queue) } = queues;
        let shared = Arc::clone(&self.shared);
        let turn = turn.lock_owned().await;
        let connected = LinkEvent::Connected { peer: node, address: self.address.clone(), dialled: self.dialled };
        if let Err(error) = self.events.send(connected).await {
            shared.registry().gone(node.peer, self.number, &error.to_string());
            return;
        }
        shared.registry().up(node, self.number);
        tracing::debug!(peer = %node, address = %self.address, dialled = self.dialled, "connected");

        let mut readers = JoinSet::new();
        let (control_heard, heard) = watch::channel(0);
        let line = |lane, heard| Line { lane, peer: node, events: self.events.clone(), heard };
        readers.spawn(line(Lane::Control, Heard::Count(control_heard)).read(control_in));
        readers.spawn(line(Lane::Data, Heard::Await(heard)).read(data_in));
        data_out.after(Arc::clone(&control.taken));
        let mut writers = JoinSet::new();
        writers.spawn(async move { control_out.run(&mut control_queue).await });
        writers.spawn(async move { data_out.run(&mut data_queue).await });

        let stop = self.watch(&mut readers, &mut writers, stop).await;
        // No body may follow the end.
        readers.shutdown().await;
        shared.registry().gone(node.peer, self.number, &stop.reason);
        tracing::debug!(peer = %node, reason = %stop.reason, "disconnected");
        // Without an owner nobody is left to tell.
        let _ = self.events.send(LinkEvent::Disconnected { peer: node, reason: stop.reason }).await;
        drop(turn);
        if let Some(farewell) = stop.farewell {
            let last = async {
                // A lane that broke is past a farewell.
                let (near, far) = (Outgoing::Farewell(farewell.clone()), Outgoing::Farewell(farewell));
                let _ = tokio::join!(control.queue.send(near), data.queue.send(far));
                // The peer closes when it has read both.
                while self.parts.recv().await.is_some() {}
            };
            // A peer that doesn't is closed upon.
            let _ = timeout(shared.settings.close_grace, last).await;
        }
        writers.shutdown().await;
    }

    /// Waits until something ends the connection.
    async fn watch(
        &mut self,
        readers: &mut JoinSet<End>,
        writers: &mut JoinSet<std::io::Result<()>>,
        mut stop: oneshot::Receiver<Stop>,
    ) -> Stop {
        let broken = |reason: String| Stop { reason, farewell: None };
        let ours = |reason: String| Stop { farewell: Some(reason.clone()), reason };
        tokio::select! {
            biased;
            // The registry drops a handle only when it hands on its successor or the stop itself.
            stop = &mut stop => stop.unwrap_or_else(|_| broken("the link is gone".to_owned())),
            Some(end) = readers.join_next() => match end {
                Ok(End::Farewell(reason)) => {
                    self.drain(readers).await;
                    broken(closed_by_peer(&reason))
                }
                Ok(End::Error(why)) => ours(why),
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
                Some(Part::Inbound(lane, _) | Part::Outbound(lane, _)) => ours(format!("a second {lane:?} lane")),
            },
        }
    }

    /// Lets the lanes bring what they still carry, for as long as a farewell may take, and gives
    /// what they know of the end: a farewell rather than an error.
    async fn drain(&self, readers: &mut JoinSet<End>) -> Option<String> {
        let (mut farewell, mut error) = (None, None);
        let drained = timeout(self.shared.settings.close_grace, async {
            while let Some(end) = readers.join_next().await {
                match end {
                    Ok(End::Farewell(reason)) => farewell = farewell.take().or(Some(closed_by_peer(&reason))),
                    Ok(End::Error(why)) => error = error.take().or(Some(why)),
                    Err(_) => {}
                }
            }
        });
        // A lane that carries too much is cut off.
        let _ = drained.await;
        farewell.or(error)
    }
}

fn closed_by_peer(reason: &str) -> String {
    format!("the peer closed the connection: {reason}")
}

impl Lanes {
    fn add(&mut self, part: Part) -> Result<(), String> {
        let taken = match part {
            Part::Broken(why) => return Err(why),
            Part::Outbound(Lane::Control, stream) => self.control_out.replace(LaneWriter::new(stream)).is_some(),
            Part::Outbound(Lane::Data, stream) => self.data_out.replace(LaneWriter::new(stream)).is_some(),
            Part::Inbound(Lane::Control, stream) => {
                self.control_in.replace(LaneReader::new(Lane::Control, stream)).is_some()
            }
            Part::Inbound(Lane::Data, stream) => self.data_in.replace(LaneReader::new(Lane::Data, stream)).is_some(),
        };
        if taken { Err("the peer opened a lane twice".to_owned()) } else { Ok(()) }
    }
}

/// Waits for the deciding side's word, and gives its serial.
async fn accepted(control: &mut LaneReader<Stream>) -> Result<u64, String> {
    match control.note("an accept").await.map_err(|error| error.to_string())? {
        Note::Accept { serial } => Ok(serial),
        Note::Farewell { reason } => Err(closed_by_peer(&reason)),
        other @ (Note::Hello(_) | Note::After { .. }) => Err(control.unexpected_note(&other, "an accept").to_string()),
    }
}

/// What the lanes of a connection know of each other: bodies that came on control.
enum Heard {
    Count(watch::Sender<u64>),
    Await(watch::Receiver<u64>),
    Nothing,
}

/// The way of one lane's bodies to the owner.
struct Line {
    lane: Lane,
    peer: Node,
    events: EventSender,
    heard: Heard,
}

impl Line {
    /// Reads a lane into the owner's queue until it ends. While the queue is full nothing is read,
    /// so the peer's window closes.
    async fn read(mut self, mut reader: LaneReader<Stream>) -> End {
        loop {
            let body = match (reader.next().await, &mut self.heard) {
                (Ok(Incoming::Body(body)), _) => body,
                (Ok(Incoming::Note(Note::Farewell { reason })), _) => return End::Farewell(reason),
                (Ok(Incoming::Note(Note::After { control })), Heard::Await(heard)) => {
                    if heard.wait_for(|heard| *heard >= control).await.is_err() {
                        return End::Error("the control lane ended before the data lane began".to_owned());
                    }
                    self.heard = Heard::Nothing;
                    continue;
                }
                (Ok(Incoming::Note(note)), _) => {
                    return failed(&reader.unexpected_note(&note, "a body or a farewell"));
                }
                (Err(error), _) => return failed(&error),
            };
            if let Err(error) = self.events.send(LinkEvent::Received { peer: self.peer, lane: self.lane, body }).await {
                return End::Error(error.to_string());
            }
            if let Heard::Count(count) = &self.heard {
                count.send_modify(|count| *count += 1);
            }
        }
    }
}

fn failed(error: &LaneError) -> End {
    End::Error(error.to_string())
}
