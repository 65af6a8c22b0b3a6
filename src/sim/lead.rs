//! A simulated coordinator: the real loop's state, called instead of woken, and its log's disk.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use futures::future::BoxFuture;
use libp2p::PeerId;
use tokio::sync::mpsc;

use crate::config::CoordinatorSettings;
use crate::coordinator::durable::LogGate;
use crate::coordinator::handle::{Command, Coordinator};
use crate::coordinator::job::ModelFacts;
use crate::coordinator::log::Log;
use crate::coordinator::log::record::{self, Entry};
use crate::coordinator::log::writer::{Batch, Batches, Scribe, Synced};
use crate::coordinator::run::{ModelShape, Shell};
use crate::coordinator::session::{Phase, Session};
use crate::ids::{Node, SessionId, View};
use crate::proto::codec::{self, Data};
use crate::sim::check::{Broken, Invariant, Memory, Owner, broken};
use crate::sim::disk::SimDisk;
use crate::sim::plant::Plant;
use crate::sim::stage::look;
use crate::sim::toy::LAYERS;
use crate::transport::{Lane, Link, LinkError, LinkEvent};

/// The log's end that a thread would have.
struct Desk {
    scribe: Scribe,
    batches: Batches,
    waiting: VecDeque<Batch>,
    answer: Option<Synced>,
    disk: SimDisk,
    /// The loop was told already that the batch is durable.
    answered: bool,
    /// A batch could not be written.
    lost: bool,
}

/// Whether a batch has tokens and no view in it.
fn has_tokens(batch: &Batch) -> bool {
    let entries: Vec<Entry> = record::decode(&batch.payload).unwrap_or_default();
    let some = |wanted: fn(&Entry) -> bool| entries.iter().any(wanted);
    some(|entry| matches!(entry, Entry::Tokens { .. })) && !some(|entry| matches!(entry, Entry::View(_)))
}

/// A coordinator's process.
pub(super) struct LeadProcess {
    pub(super) node: Node,
    pub(super) shell: Shell,
    pub(super) handle: Coordinator,
    link: Arc<dyn Link>,
    commands: mpsc::Receiver<Command>,
    dials: Vec<BoxFuture<'static, (PeerId, Option<LinkError>)>>,
    desk: Option<Desk>,
    checked: (View, usize),
    round: Option<Instant>,
    in_flight_max: usize,
    /// Sessions that are being rebuilt, for the planted bug.
    rebuilding: BTreeSet<SessionId>,
}

impl LeadProcess {
    /// Starts with what its log says, if it has one.
    pub(super) fn new(
        link: Arc<dyn Link>,
        (model, shape): (ModelFacts, ModelShape),
        settings: CoordinatorSettings,
        log: Option<(Log, SimDisk)>,
    ) -> Self {
        let in_flight_max = settings.in_flight_max as usize;
        let (gate, desk) = match log {
            None => (LogGate::closed(), None),
            Some((log, disk)) => {
                let (gate, scribe, batches) = LogGate::open(log);
                let waiting = VecDeque::new();
                (gate, Some(Desk { scribe, batches, waiting, answer: None, disk, answered: false, lost: false }))
            }
        };
        let node = link.local();
        let (handle, commands, mut shell) = Shell::new((Arc::clone(&link), model, shape), settings, gate);
        shell.recover();
        let checked = (View(0), 0);
        Self {
            node,
            shell,
            handle,
            link,
            commands,
            dials: Vec::new(),
            desk,
            checked,
            round: None,
            in_flight_max,
            rebuilding: BTreeSet::new(),
        }
    }

    /// Something happened on its link.
    pub(super) fn on_link(&mut self, event: LinkEvent, plant: Option<Plant>) -> Result<(), Broken> {
        let event = if plant == Some(Plant::FenceDropped) { self.as_of_today(event) } else { event };
        let answer = match &event {
            LinkEvent::Received { peer, lane: Lane::Reply, body } => match codec::decode_data(body.clone()) {
                Ok(Data::Reply(reply)) => Some((*peer, reply.view)),
                Ok(Data::Frame(_)) | Err(_) => None,
            },
            LinkEvent::Received { .. } | LinkEvent::Connected { .. } | LinkEvent::Disconnected { .. } => None,
        };
        let tail = self.shell.ring.whole().last().map(|member| member.peer);
        let current = self.shell.ring.view();
        self.shell.handle_link(event);
        if plant == Some(Plant::ResumeOffByOne) {
            self.slip();
        }
        let rebuilds = |session: &Session| matches!(session.phase, Phase::Rebuilding(_));
        if plant == Some(Plant::PanicAtRebuild) && self.shell.sessions.values().any(rebuilds) {
            std::panic::resume_unwind(Box::new("the planted panic"));
        }
        let round = *self.shell.shared.last_round.lock().unwrap_or_else(PoisonError::into_inner);
        if round != self.round {
            self.round = round;
            if round.is_some() && answer.is_none_or(|(peer, view)| Some(peer) != tail || view != current) {
                return broken(Invariant::Ready, "a token counts as gone round that did not come from the tail");
            }
        }
        Ok(())
    }

    /// The planted bug: a reply counts as one of the present view and epoch.
    fn as_of_today(&self, event: LinkEvent) -> LinkEvent {
        let LinkEvent::Received { peer, lane: Lane::Reply, body } = &event else { return event };
        let Ok(Data::Reply(mut reply)) = codec::decode_data(body.clone()) else { return event };
        let Some(session) = self.shell.sessions.get(&reply.session) else { return event };
        (reply.view, reply.epoch) = (session.open.view, session.round.epoch());
        match codec::encode_reply(&reply) {
            Ok(body) => LinkEvent::Received { peer: *peer, lane: Lane::Reply, body },
            Err(_) => event,
        }
    }

    /// The planted bug: a session that has just been rebuilt counts one token too few as replayed.
    fn slip(&mut self) {
        for (id, session) in &mut self.shell.sessions {
            match &session.phase {
                Phase::Rebuilding(_) => {
                    self.rebuilding.insert(*id);
                }
                Phase::Running if self.rebuilding.remove(id) => {
                    session.replayed = session.replayed.saturating_sub(1);
                }
                Phase::Running | Phase::Closing { .. } | Phase::Localizing { .. } | Phase::Parked { .. } => {}
            }
        }
    }

    /// What its clients asked for.
    pub(super) fn on_commands(&mut self) -> bool {
        let Ok(command) = self.commands.try_recv() else { return false };
        self.shell.handle_command(command);
        true
    }

    /// A message of a client's connection.
    pub(super) fn command(&self, command: Command) -> bool {
        self.handle.commands.try_send(command).is_ok()
    }

    /// What follows anything that happened.
    pub(super) fn drain(&mut self, plant: Option<Plant>) {
        self.shell.drain();
        while let Some(dial) = self.shell.poll_dial() {
            let link = Arc::clone(&self.link);
            self.dials.push(Box::pin(async move { (dial.peer, link.dial(dial.address).await.err()) }));
        }
        self.dialled();
        let Some(desk) = &mut self.desk else { return };
        while let Ok(batch) = desk.batches.try_recv() {
            let early = plant == Some(Plant::TokenReleasedBeforeLogged) && has_tokens(&batch);
            desk.waiting.push_back(batch);
            if early {
                desk.answered = true;
                self.shell.handle_synced(Synced::Durable);
                self.shell.drain();
            }
        }
    }

    /// Dials that ended, one of which the loop is told of where it failed.
    pub(super) fn dialled(&mut self) -> bool {
        for at in 0..self.dials.len() {
            if let Some((peer, error)) = look(&mut self.dials[at]) {
                drop(self.dials.swap_remove(at));
                if let Some(error) = error {
                    self.shell.handle_dial_failed(peer, &error);
                }
                return true;
            }
        }
        false
    }

    /// Whether the log's disk has something to do.
    pub(super) fn writes(&self) -> bool {
        self.desk.as_ref().is_some_and(|desk| desk.answer.is_some() || !desk.waiting.is_empty())
    }

    /// The disk goes on: a batch is written, or the loop is told of the one that was. Says what it did.
    pub(super) fn on_disk(&mut self) -> Option<String> {
        let desk = self.desk.as_mut()?;
        if let Some(answer) = desk.answer.take() {
            let what = format!("{answer:?}");
            desk.lost |= matches!(answer, Synced::Failed { .. } | Synced::Dead { .. });
            if !desk.answered {
                self.shell.handle_synced(answer);
            }
            return Some(what);
        }
        let batch = desk.waiting.pop_front()?;
        desk.answer = Some(desk.scribe.write(&batch));
        Some(format!("{} bytes are written", batch.payload.len()))
    }

    /// Whether its clients were told that it has to be started again.
    pub(super) fn lost_batch(&self) -> bool {
        self.desk.as_ref().is_some_and(|desk| desk.lost)
    }

    /// It dies: a batch on its way may be in the file by half.
    pub(super) fn die(&mut self) {
        if let Some(desk) = &mut self.desk
            && let Some(batch) = desk.waiting.pop_front()
        {
            desk.disk.tear(&batch.payload);
        }
    }

    /// The sessions that it holds.
    pub(super) fn sessions(&self) -> impl Iterator<Item = (&SessionId, &Session)> {
        self.shell.sessions.iter()
    }

    /// Checks what can be seen of it from outside.
    pub(super) fn check(&mut self, memory: &mut Memory, owner: impl Fn(SessionId) -> Owner) -> Result<(), Broken> {
        let (host, most) = (self.node.start, self.in_flight_max);
        for (id, session) in &self.shell.sessions {
            memory.committed(host, owner(*id), &session.committed)?;
            let (in_flight, early) = (session.round.in_flight(), session.round.early());
            if in_flight > most || early > most {
                let why =
                    format!("session {id}: {in_flight} frames in flight, {early} early replies, {most} are allowed");
                return broken(Invariant::Bounds, why);
            }
        }
        if self.desk.as_ref().is_some_and(|desk| desk.waiting.len() > 1) {
            return broken(Invariant::Bounds, "two batches are on their way to the log");
        }
        let whole = self.shell.ring.whole();
        let seen = (self.shell.ring.view(), whole.len());
        if seen != self.checked && !whole.is_empty() {
            let range = |member: &&crate::coordinator::ring::Member| {
                (member.peer, member.offer.range.lo(), member.offer.range.hi())
            };
            let ring: Vec<_> = whole.iter().map(range).collect();
            memory.whole(self.node, seen.0, &ring, LAYERS)?;
        }
        self.checked = seen;
        Ok(())
    }

    /// Rings that broke.
    pub(super) fn breaks(&self) -> Vec<String> {
        self.shell.heals.list().into_iter().map(|heal| heal.reason).collect()
    }
}
