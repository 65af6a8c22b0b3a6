//! Carries what comes in on the lanes to the owner.

use std::sync::Arc;
use std::time::Duration;

use libp2p::swarm::Stream;
use tokio::sync::watch;

use super::super::LinkEvent;
use super::super::credit::{Return, cost};
use super::super::events::EventSender;
use super::super::inflow::{Inflow, Ticket};
use super::lane::{Incoming, LaneError, LaneReader, Place};
use super::note::Note;
use super::spread::Outflow;
use crate::clock;
use crate::ids::Node;

/// How a lane ended.
#[derive(Debug)]
pub(super) enum End {
    Farewell(String),
    Error(String),
    /// This side reads no further.
    Stopped(Box<LaneReader<Stream>>),
}

/// What the lanes of a connection know of each other: bodies that came on control.
pub(super) enum Heard {
    /// This is control.
    Count(watch::Sender<u64>),
    /// A data lane that brought no body yet.
    Await(watch::Receiver<u64>),
    /// A data lane that did.
    Enough,
}

/// The way of one lane's bodies to the owner.
pub(super) struct Line {
    pub(super) peer: Node,
    pub(super) events: EventSender,
    pub(super) inflow: Arc<Inflow>,
    pub(super) outflow: Arc<Outflow>,
    pub(super) heard: Heard,
}

impl Line {
    /// Reads a lane into the owner's queue until it ends, or until `stop` closes. While the queue
    /// is full nothing is read, so the peer's window closes.
    pub(super) async fn read(self, mut reader: LaneReader<Stream>, mut stop: watch::Receiver<()>) -> End {
        tokio::select! {
            biased;
            // Nothing is ever sent: it closes.
            _ = stop.changed() => {}
            end = self.run(&mut reader) => return end,
        }
        End::Stopped(Box::new(reader))
    }

    async fn run(mut self, reader: &mut LaneReader<Stream>) -> End {
        loop {
            let (lane, asked, body) = match reader.next().await {
                Ok(Incoming::Body { lane, asked, body }) => (lane, asked, body),
                Ok(Incoming::Note(Note::Farewell { reason })) => return End::Farewell(reason),
                Ok(Incoming::Note(note)) => match self.note(&note, reader.place()).await {
                    Ok(()) => continue,
                    Err(why) => return End::Error(why),
                },
                Err(error) => return failed(&error),
            };
            let ticket = Ticket { lane, cost: cost(body.len()), arrived: clock::now(), asked };
            let event = LinkEvent::Received { peer: self.peer, lane, body };
            if let Err(error) = self.events.send_body(event, &self.inflow, ticket).await {
                return End::Error(error.to_string());
            }
            match &self.heard {
                Heard::Count(count) => count.send_modify(|count| *count += 1),
                Heard::Await(_) => self.heard = Heard::Enough,
                Heard::Enough => {}
            }
        }
    }

    async fn note(&mut self, note: &Note, place: Place) -> Result<(), String> {
        match (note, &mut self.heard) {
            (Note::After { control }, Heard::Await(heard)) => {
                if heard.wait_for(|heard| heard >= control).await.is_err() {
                    return Err("the control lane ended before the data lane began".to_owned());
                }
                self.heard = Heard::Enough;
                Ok(())
            }
            (Note::Returned { taken, held_us, idle_us }, Heard::Count(_)) => {
                self.outflow.returned(back(*taken, *held_us, *idle_us)).map_err(|error| error.to_string())
            }
            _ => Err(place.unexpected(note.name(), "a body or a farewell").to_string()),
        }
    }
}

/// Hears only of credit on the control lane, for frames that are still to go out; until it ends.
pub(super) async fn hear_returns(mut control: Box<LaneReader<Stream>>, outflow: &Outflow) {
    loop {
        match control.next().await {
            Ok(Incoming::Note(Note::Returned { taken, held_us, idle_us })) => {
                if outflow.returned(back(taken, held_us, idle_us)).is_err() {
                    return;
                }
            }
            Ok(Incoming::Note(Note::Farewell { .. })) | Err(_) => return,
            Ok(_) => {}
        }
    }
}

fn back(taken: u64, held_us: u64, idle_us: u64) -> Return {
    Return { taken, held: Duration::from_micros(held_us), idle: Duration::from_micros(idle_us) }
}

fn failed(error: &LaneError) -> End {
    End::Error(error.to_string())
}
