//! A simulated stage: the real shell and the real worker, called instead of woken.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;

use crate::clock;
use crate::config::StageSettings;
use crate::engine::Engine;
use crate::ids::{Node, Position};
use crate::node::counters::Counters;
use crate::node::dial::{self, Dialled};
use crate::node::journal::Journals;
use crate::node::membership::Route;
use crate::node::shell::{Shell, ShellParts};
use crate::node::worker::{INPUTS_MAX, Input, Tell, Worker};
use crate::proto::codec::{self, Data};
use crate::proto::fence::HELD_FRAMES_MAX;
use crate::sim::check::{Broken, Invariant, Memory, broken};
use crate::sim::draw::Draw;
use crate::sim::plant::Plant;
use crate::transport::{Lane, Link, LinkError, LinkEvent};

/// Pause between tries to send into a full queue, and how long they go on.
const STALL_LOOK: Duration = Duration::from_millis(20);
const STALL_DEADLINE: Duration = Duration::from_secs(5);

/// How long a pass takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    pub(super) pass: Duration,
    pub(super) position: Duration,
    /// Now and then a pass takes longer by so much.
    pub(super) hiccup: Duration,
    /// By what all of it is multiplied.
    pub(super) slow: u32,
}

struct Busy {
    positions: usize,
    begun: Instant,
    until: Instant,
}

/// A stage's process.
pub(super) struct StageProcess {
    pub(super) node: Node,
    pub(super) shell: Shell,
    pub(super) pace: Pace,
    link: Arc<dyn Link>,
    settings: StageSettings,
    inputs: Receiver<Input>,
    pending: VecDeque<Input>,
    dials: Vec<BoxFuture<'static, Dialled>>,
    worker: Worker,
    busy: Option<Busy>,
    /// A message that its queue has no room for, and since when a queue has none.
    untold: Option<Tell>,
    stalled: Option<Instant>,
    draw: Draw,
}

/// The planted bug: what a journal sends again lacks its last frame.
fn one_short(input: &mut Input) {
    if let Input::Replay { to, .. } = input {
        *to = Position(to.0.saturating_sub(1));
    }
}

/// Looks whether a future has its result; whoever drives the process asks again at its next turn.
pub(super) fn look<T>(future: &mut BoxFuture<'static, T>) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match Pin::new(future).poll(&mut context) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

impl StageProcess {
    pub(super) fn new(
        (link, digest): (Arc<dyn Link>, [u8; 32]),
        engine: Box<dyn Engine>,
        settings: StageSettings,
        pace: Pace,
        draw: Draw,
    ) -> Result<Self, Broken> {
        let journals = match Journals::new(settings.journal.clone(), &engine.facts().range.to_string()) {
            Ok(journals) => journals,
            Err(error) => return broken(Invariant::Process, format!("a stage has no journal: {error}")),
        };
        let counters = Arc::new(Counters::default());
        let (sender, inputs) = std::sync::mpsc::sync_channel(INPUTS_MAX);
        let parts = ShellParts {
            link: Arc::clone(&link),
            facts: engine.facts().clone(),
            counters: Arc::clone(&counters),
            inputs: sender,
            model_digest: digest,
            observer: None,
        };
        Ok(Self {
            node: link.local(),
            shell: Shell::new(parts, &settings),
            pace,
            worker: Worker::new(engine, journals, counters, settings.max_sessions),
            link,
            settings,
            inputs,
            pending: VecDeque::new(),
            dials: Vec::new(),
            busy: None,
            untold: None,
            stalled: None,
            draw,
        })
    }

    /// Where it is in the ring.
    pub(super) fn route(&self) -> Option<Route> {
        self.shell.membership().route()
    }

    /// Something happened on its link.
    pub(super) fn on_link(&mut self, event: LinkEvent, plant: Option<Plant>) -> Result<(), Broken> {
        let sent = match &event {
            LinkEvent::Received { peer, lane: Lane::Data, body } => match codec::decode_data(body.clone()) {
                Ok(Data::Frame(frame)) => Some((*peer, frame.head.view)),
                Ok(Data::Reply(_)) | Err(_) => None,
            },
            LinkEvent::Received { .. } | LinkEvent::Connected { .. } | LinkEvent::Disconnected { .. } => None,
        };
        let event = if plant == Some(Plant::ZombieAccepted) { self.as_of_today(event) } else { event };
        let before = self.pending.len();
        if let Err(error) = self.shell.handle_link(event) {
            return broken(Invariant::Process, format!("a stage gives up: {error}"));
        }
        self.collect();
        if plant == Some(Plant::JournalOneFrameShort) {
            self.pending.iter_mut().skip(before).for_each(one_short);
        }
        for input in self.pending.iter().skip(before) {
            let (Input::Frame(frame), Some((peer, view))) = (input, sent) else { continue };
            let route = self.route();
            if route.is_none_or(|route| route.view != view || route.predecessor != peer) {
                let (session, pos) = (frame.head.session, frame.head.pos);
                let why = format!(
                    "process {} takes the frame at {pos} of session {session}, which process {} sent in view {view}; \
                     its place is {route:?}",
                    self.node.start, peer.start
                );
                return broken(Invariant::View, why);
            }
        }
        Ok(())
    }

    /// The planted bug: a frame counts as the predecessor's, of the present view.
    fn as_of_today(&self, event: LinkEvent) -> LinkEvent {
        let LinkEvent::Received { lane: Lane::Data, body, .. } = &event else { return event };
        let (Some(route), Ok(Data::Frame(mut frame))) = (self.route(), codec::decode_data(body.clone())) else {
            return event;
        };
        frame.head.view = route.view;
        match codec::encode_frame(&frame.head, &frame.ids, &frame.payload) {
            Ok(body) => LinkEvent::Received { peer: route.predecessor, lane: Lane::Data, body },
            Err(_) => event,
        }
    }

    /// Time has come for the shell.
    pub(super) fn on_timer(&mut self) {
        self.shell.handle_timeout();
    }

    /// What follows anything that happened to the shell; says whether the process ends.
    pub(super) fn drain(&mut self) -> Result<bool, Broken> {
        let left = match self.shell.drain() {
            Ok(left) => left,
            Err(error) => return broken(Invariant::Process, format!("a stage gives up: {error}")),
        };
        while let Some(wanted) = self.shell.poll_dial() {
            let link = Arc::clone(&self.link);
            self.dials.push(Box::pin(dial::run(link, wanted, self.settings.dial_scope)));
        }
        // A dial begins when it is first looked at.
        self.dialled();
        self.collect();
        Ok(left)
    }

    /// Dials that ended, one of which the shell is told of.
    pub(super) fn dialled(&mut self) -> bool {
        for at in 0..self.dials.len() {
            if let Some(result) = look(&mut self.dials[at]) {
                drop(self.dials.swap_remove(at));
                self.shell.handle_dialled(result);
                return true;
            }
        }
        false
    }

    fn collect(&mut self) {
        self.pending.extend(self.inputs.try_iter());
    }

    /// Whether its worker has something to take in.
    pub(super) fn has_inputs(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The worker goes on as far as it can; when it wants to go on, and the positions of a pass it finished.
    pub(super) fn work(&mut self) -> (Option<Instant>, usize) {
        let now = clock::now();
        let mut computed = 0;
        if let Some(until) = self.busy.as_ref().map(|busy| busy.until).filter(|until| *until > now) {
            return (Some(until), computed);
        }
        if !self.send_on(now) {
            return (Some(now + STALL_LOOK), computed);
        }
        self.take_in(now);
        if let Some(Busy { positions, begun, .. }) = self.busy.take() {
            computed = positions;
            let us = u64::try_from(now.duration_since(begun).as_micros()).unwrap_or(u64::MAX);
            self.worker.handle_computed(us, now);
        }
        self.worker.handle_timeout(now);
        if !self.send_on(now) {
            return (Some(now + STALL_LOOK), computed);
        }
        let copied = self.copy();
        let next = match self.worker.poll_work() {
            Some(pass) => {
                let positions = pass.positions();
                self.worker.compute(pass);
                let until = now + self.takes(positions);
                self.busy = Some(Busy { positions, begun: now, until });
                Some(until)
            }
            None if copied => Some(now),
            None => self.worker.poll_timeout(),
        };
        (next, computed)
    }

    /// Sends one copy to a shadow, if there is room for it at once.
    fn copy(&mut self) -> bool {
        let Some(copy) = self.worker.poll_copy() else { return false };
        let sent = self.link.try_send(copy.to, copy.lane, copy.body);
        self.worker.handle_copied(sent.is_ok());
        true
    }

    fn takes(&mut self, positions: usize) -> Duration {
        let Pace { pass, position, hiccup, slow } = self.pace;
        let hiccup = if self.draw.chance(3) { hiccup } else { Duration::ZERO };
        let even = pass + position * u32::try_from(positions).unwrap_or(u32::MAX) + hiccup;
        (even + self.draw.micros(0, 200)) * slow
    }

    fn take_in(&mut self, now: Instant) {
        while let Some(input) = self.pending.pop_front() {
            self.worker.handle_input(input, now);
            self.tell(now);
        }
    }

    /// `false` where a queue is full: the thread waits there.
    fn tell(&mut self, now: Instant) -> bool {
        while let Some(tell) = self.untold.take().or_else(|| self.worker.poll_tell()) {
            let sent = self.link.try_send(tell.to, Lane::Control, tell.body.clone());
            if self.waits(&sent, now) {
                self.untold = Some(tell);
                return false;
            }
        }
        true
    }

    fn send_on(&mut self, now: Instant) -> bool {
        if !self.tell(now) {
            return false;
        }
        while let Some(send) = self.worker.poll_send(now) {
            let sent = self.link.try_send(send.to, send.lane, send.body);
            if self.waits(&sent, now) {
                return false;
            }
            self.worker.handle_sent(sent, now);
            if !self.tell(now) {
                return false;
            }
        }
        true
    }

    /// Whether a send is to be tried again.
    fn waits(&mut self, sent: &Result<(), LinkError>, now: Instant) -> bool {
        if let Err(LinkError::Stalled { .. }) = sent {
            let since = *self.stalled.get_or_insert(now);
            return now.duration_since(since) < STALL_DEADLINE;
        }
        self.stalled = None;
        false
    }

    /// Checks what can be seen of it from outside.
    pub(super) fn check(&self, memory: &mut Memory) -> Result<(), Broken> {
        let (membership, host) = (self.shell.membership(), self.node.start);
        memory.at_view(self.node, membership.view(), membership.route())?;
        if self.pending.len() > INPUTS_MAX {
            return broken(
                Invariant::Bounds,
                format!("{} inputs wait for the worker of process {host}", self.pending.len()),
            );
        }
        for (id, view, session) in self.worker.sessions() {
            let fence = session.fence();
            memory.at_floor((host, view, id), (fence.epoch(), fence.settled()))?;
            if fence.waiting() > HELD_FRAMES_MAX {
                let why = format!("{} frames of session {id} wait on process {host}", fence.waiting());
                return broken(Invariant::Bounds, why);
            }
        }
        Ok(())
    }

    /// Sessions that are open on it, or about to be.
    pub(super) fn open_sessions(&self) -> usize {
        self.worker.sessions().count() + self.pending.len()
    }
}
