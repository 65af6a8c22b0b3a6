//! The first words on a connection: opens and counts the lanes, and agrees that it is the one.

use std::sync::Arc;

use futures::AsyncWriteExt;
use libp2p::swarm::Stream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::super::SEND_QUEUE_MAX;
use super::super::credit::{Credit, CreditConfig};
use super::super::inflow::Inflow;
use super::connection::{Connection, Handle, SendQueue, Stop, closed_by_peer};
use super::control::{ControlWriter, Outgoing};
use super::handler::Part;
use super::lane::{LaneReader, Place, chain};
use super::note::{Hello, Note, Terms};
use super::registry::{Turn, Verdict, Way};
use super::spread::{Outflow, Spread};
use super::{LANES_MAX, WINDOW_MIN};
use crate::clock;
use crate::ids::Node;

/// A connection that both sides settled on.
pub(super) struct Settled {
    /// Who is at the other end.
    pub(super) node: Node,
    pub(super) turn: Turn,
    pub(super) stop: oneshot::Receiver<Stop>,
    pub(super) control_in: LaneReader<Stream>,
    pub(super) data_in: Vec<LaneReader<Stream>>,
    pub(super) control_out: ControlWriter<Stream>,
    pub(super) spread: Spread<Stream>,
    pub(super) control: (SendQueue, mpsc::Receiver<Outgoing>),
    pub(super) frames: SendQueue,
    pub(super) inflow: Arc<Inflow>,
    pub(super) outflow: Arc<Outflow>,
}

/// The streams of a connection, as they come.
#[derive(Debug, Default)]
struct Streams {
    control_out: Option<ControlWriter<Stream>>,
    control_in: Option<LaneReader<Stream>>,
    /// Whether the peer opened control, whoever reads it by then.
    controlled: bool,
    data_out: Vec<(u64, Stream)>,
    data_in: Vec<LaneReader<Stream>>,
}

/// All streams, and how the peer introduced itself.
struct Introduced {
    hello: Hello,
    terms: Terms,
    control_out: ControlWriter<Stream>,
    control_in: LaneReader<Stream>,
    data_out: Vec<Stream>,
    data_in: Vec<LaneReader<Stream>>,
    inflow: Arc<Inflow>,
}

impl Connection {
    /// Opens all lanes and agrees with the peer that this connection is the one.
    pub(super) async fn settle(&mut self) -> Result<Settled, String> {
        let mut peer = self.introduce().await?;
        self.count(&mut peer).await?;
        let Introduced { hello, terms, mut control_out, mut control_in, data_out, data_in, inflow } = peer;
        let decides = self.shared.registry().decides(self.peer);
        let heard = if decides { None } else { Some(accepted(&mut control_in).await?) };

        let config = self.credit(terms);
        let outflow = Arc::new(Outflow::new(Credit::new(config, clock::now())));
        let queue = || mpsc::channel(SEND_QUEUE_MAX);
        let (control, control_queue) = SendQueue::new(queue());
        let (frames, frame_queue) = SendQueue::new(queue());
        let (replies, reply_queue) = SendQueue::new(queue());
        let (stop_sender, stop) = oneshot::channel();
        let handle = Handle {
            control: control.clone(),
            frames: frames.clone(),
            replies,
            outflow: Arc::clone(&outflow),
            stop: stop_sender,
        };
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
        let spread = Spread::new(data_out, reply_queue, frame_queue, Arc::clone(&outflow), control.taken());
        let control = (control, control_queue);
        Ok(Settled { node, turn, stop, control_in, data_in, control_out, spread, control, frames, inflow, outflow })
    }

    /// What may be under way to a peer with these terms.
    fn credit(&self, terms: Terms) -> CreditConfig {
        let own = &self.shared.settings;
        let window_max = own.window_max.min(terms.window_max);
        CreditConfig { initial: own.window_initial.min(window_max), window_max }
    }

    /// Opens control, says hello, hears the peer's, and waits for all lanes.
    async fn introduce(&mut self) -> Result<Introduced, String> {
        let own = self.shared.settings.terms();
        let inflow = Arc::new(Inflow::new(own.window_max));
        let mut streams = Streams::default();
        let (control_out, mut control_in) = loop {
            match (streams.control_out.take(), streams.control_in.take()) {
                (Some(control_out), Some(control_in)) => break (control_out, control_in),
                (control_out, control_in) => (streams.control_out, streams.control_in) = (control_out, control_in),
            }
            self.add(&mut streams).await?;
        };
        let (hello, terms) = match control_in.note("a hello").await.map_err(|error| error.to_string())? {
            Note::Hello(hello, terms) => (hello, terms),
            Note::Farewell { reason } => return Err(closed_by_peer(&reason)),
            other @ (Note::Lane { .. }
            | Note::Ready { .. }
            | Note::Accept { .. }
            | Note::After { .. }
            | Note::Returned { .. }) => return Err(control_in.place().unexpected(other.name(), "a hello").to_string()),
        };
        check(terms)?;
        loop {
            let (opened, came) = (streams.data_out.len() as u64, streams.data_in.len() as u64);
            if came > terms.lanes {
                return Err(too_many(terms.lanes));
            }
            if opened == own.lanes && came == terms.lanes {
                break;
            }
            self.add(&mut streams).await?;
        }
        streams.data_out.sort_unstable_by_key(|(number, _)| *number);
        let data_out = streams.data_out.into_iter().map(|(_, stream)| stream).collect();
        Ok(Introduced { hello, terms, control_out, control_in, data_out, data_in: streams.data_in, inflow })
    }

    /// Takes the next stream, and says on one to write what it is.
    async fn add(&mut self, streams: &mut Streams) -> Result<(), String> {
        let patience = self.shared.settings.stall_deadline;
        match self.parts.recv().await.ok_or("the peer closed the connection at once")? {
            Part::Broken(why) => return Err(why),
            Part::Older(stream, why) => return Err(self.tell(stream, why).await),
            Part::ControlOut(stream) => {
                let mut control = ControlWriter::new(stream);
                let hello = self.shared.registry().hello(self.peer, self.number);
                let hello = Note::Hello(hello, self.shared.settings.terms());
                control.note(&hello).await.map_err(|error| chain(&error))?;
                streams.control_out = Some(control);
            }
            Part::DataOut(number, mut stream) => {
                let mut bytes = Vec::new();
                Note::Lane { number }.encode(&mut bytes);
                stream.write_all(&bytes).await.map_err(|error| chain(&error))?;
                stream.flush().await.map_err(|error| chain(&error))?;
                streams.data_out.push((number, stream));
            }
            Part::ControlIn(_) if streams.controlled => {
                return Err("the peer opened a second control lane".to_owned());
            }
            Part::ControlIn(stream) => {
                streams.controlled = true;
                streams.control_in = Some(LaneReader::new(Place::Control, stream, patience));
            }
            Part::DataIn(stream) => {
                if streams.data_in.len() as u64 >= LANES_MAX {
                    return Err(too_many(LANES_MAX));
                }
                streams.data_in.push(LaneReader::new(Place::Nameless, stream, patience));
            }
        }
        Ok(())
    }

    /// Tells a peer of another version why it is not taken, and gives the reason.
    async fn tell(&mut self, stream: Stream, why: String) -> String {
        let told = async {
            // A peer that is gone needs no reason.
            if ControlWriter::new(stream).farewell(why.clone()).await.is_ok() {
                while self.parts.recv().await.is_some() {}
            }
        };
        // One that stays is closed upon.
        let _ = timeout(self.shared.settings.close_grace, told).await;
        why
    }

    /// Hears the number of every lane, says that all are here, and hears it from the peer.
    async fn count(&self, peer: &mut Introduced) -> Result<(), String> {
        let lanes = peer.terms.lanes;
        let mut seen = [false; LANES_MAX as usize];
        for lane in &mut peer.data_in {
            let number = match lane.note("a lane's number").await.map_err(|error| error.to_string())? {
                Note::Lane { number } => number,
                Note::Farewell { reason } => return Err(closed_by_peer(&reason)),
                other @ (Note::Hello(..)
                | Note::Ready { .. }
                | Note::Accept { .. }
                | Note::After { .. }
                | Note::Returned { .. }) => {
                    return Err(lane.place().unexpected(other.name(), "a lane's number").to_string());
                }
            };
            let place = usize::try_from(number).ok().filter(|_| number < lanes).and_then(|at| seen.get_mut(at));
            let Some(seen) = place else {
                return Err(format!("the peer opened data lane {number}, but announced {lanes}, numbered from 0"));
            };
            if std::mem::replace(seen, true) {
                return Err(format!("the peer opened data lane {number} twice"));
            }
            lane.name(number, Arc::clone(&peer.inflow));
        }
        peer.control_out.note(&Note::Ready { lanes }).await.map_err(|error| chain(&error))?;
        let own = self.shared.settings.terms().lanes;
        match peer.control_in.note("a ready").await.map_err(|error| error.to_string())? {
            Note::Ready { lanes } if lanes == own => Ok(()),
            Note::Ready { lanes } => Err(format!("the peer took {lanes} data lanes, but {own} were announced")),
            Note::Farewell { reason } => Err(closed_by_peer(&reason)),
            other @ (Note::Hello(..)
            | Note::Lane { .. }
            | Note::Accept { .. }
            | Note::After { .. }
            | Note::Returned { .. }) => Err(peer.control_in.place().unexpected(other.name(), "a ready").to_string()),
        }
    }
}

/// The reason where more data lanes come than were announced.
pub(super) fn too_many(lanes: u64) -> String {
    format!("the peer opened more than the {lanes} data lanes that it may")
}

fn check(terms: Terms) -> Result<(), String> {
    if !(1..=LANES_MAX).contains(&terms.lanes) {
        return Err(format!("the peer announced {} data lanes: must be 1 to {LANES_MAX}", terms.lanes));
    }
    if terms.window_max < WINDOW_MIN {
        let got = terms.window_max;
        return Err(format!("the peer lets {got} bytes of frames be under way: must be {WINDOW_MIN} or more"));
    }
    Ok(())
}

/// Waits for the deciding side's word, and gives its serial.
async fn accepted(control: &mut LaneReader<Stream>) -> Result<u64, String> {
    match control.note("an accept").await.map_err(|error| error.to_string())? {
        Note::Accept { serial } => Ok(serial),
        Note::Farewell { reason } => Err(closed_by_peer(&reason)),
        other @ (Note::Hello(..)
        | Note::Lane { .. }
        | Note::Ready { .. }
        | Note::After { .. }
        | Note::Returned { .. }) => Err(control.place().unexpected(other.name(), "an accept").to_string()),
    }
}
