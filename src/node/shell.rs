//! The shell of a stage: greets peers, obeys one coordinator, hands frames to the worker.
//!
//! One `select!` over the link, timers and the order to drain; then the machines are drained. It
//! never computes, so heartbeats and probes are answered while the engine is busy. What the `select!`
//! calls is synchronous: the simulator calls the same.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use libp2p::Multiaddr;
use tokio::sync::{mpsc, oneshot, watch};

use crate::clock;
use crate::config::StageSettings;
use crate::engine::EngineFacts;
use crate::ids::Node;
use crate::node::counters::Counters;
use crate::node::dial::{self, DIALS_MAX, Dial, Dialled};
use crate::node::hop::hop_report;
use crate::node::leave::{LEAVE_SEQ, Leaving};
use crate::node::membership::{Membership, Output};
use crate::node::serve::{ServeError, StageEvent};
use crate::node::worker::{self, Input};
use crate::proto::codec::{self, ADDRESSES_MAX, Data};
use crate::proto::control::{Control, Hello, HopReport, Offer, Role, StageReport};
use crate::proto::greeter::{Early, Greeter, Greeting};
use crate::proto::heartbeats::{ASIDE, Heartbeats};
use crate::proto::liveness::{LivenessConfig, LivenessOutput};
use crate::transport::redial::Redial;
use crate::transport::{Lane, Link, LinkEvent, LinkEvents};

/// The shell of a stage.
pub(crate) struct Shell {
    link: Arc<dyn Link>,
    greeter: Greeter,
    membership: Membership,
    heartbeats: Heartbeats,
    roles: BTreeMap<Node, Role>,
    facts: EngineFacts,
    counters: Arc<Counters>,
    inputs: SyncSender<Input>,
    /// Dials that are to begin.
    dials: VecDeque<Dial>,
    redial: Option<Redial>,
    leaving: Option<Leaving>,
    settings: StageSettings,
    observer: Option<mpsc::Sender<StageEvent>>,
}

/// What a shell is made of.
pub(crate) struct ShellParts {
    pub(crate) link: Arc<dyn Link>,
    pub(crate) facts: EngineFacts,
    pub(crate) counters: Arc<Counters>,
    /// To the worker.
    pub(crate) inputs: SyncSender<Input>,
    pub(crate) model_digest: [u8; 32],
    pub(crate) observer: Option<mpsc::Sender<StageEvent>>,
}

impl Shell {
    pub(crate) fn new(parts: ShellParts, settings: &StageSettings) -> Self {
        let ShellParts { link, facts, counters, inputs, model_digest, observer } = parts;
        let liveness = LivenessConfig {
            interval: settings.heartbeat,
            dead_after: settings.dead_after,
            ..LivenessConfig::default()
        };
        Self {
            greeter: Greeter::new(Hello::ours(Role::Stage, model_digest)),
            membership: Membership::new(settings.obey.clone(), settings.dead_after),
            heartbeats: Heartbeats::new(liveness),
            roles: BTreeMap::new(),
            facts,
            counters,
            inputs,
            dials: VecDeque::new(),
            redial: settings.coordinator.clone().and_then(|address| Redial::new(address, clock::now())),
            leaving: None,
            settings: settings.clone(),
            observer,
            link,
        }
    }

    /// Its place in the ring.
    pub(crate) fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Serves until the stage is to end.
    pub(super) async fn run(
        &mut self,
        mut events: LinkEvents,
        mut ended: oneshot::Receiver<()>,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), ServeError> {
        let (dialled, mut results) = mpsc::channel(DIALS_MAX);
        loop {
            let timer = self.poll_timeout();
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.handle_link(event)?,
                    None => return Err(ServeError::LinkEnded),
                },
                _ = &mut ended => {
                    return Err(ServeError::Worker { why: "it ended by itself; the log says where".to_owned() });
                }
                Some(result) = results.recv() => self.handle_dialled(result),
                () = sleep_until(timer) => self.handle_timeout(),
                changed = stop.changed(), if self.leaving.is_none() => {
                    if changed.is_err() || *stop.borrow() {
                        self.leave();
                    }
                }
            }
            if self.drain()? {
                return Ok(());
            }
            while let Some(dial) = self.poll_dial() {
                dial::spawn(&self.link, &dialled, dial, self.settings.dial_scope);
            }
        }
    }

    /// Does what the machines say after something happened; says whether the stage has left.
    ///
    /// # Errors
    /// [`ServeError`] where it can't go on.
    pub(crate) fn drain(&mut self) -> Result<bool, ServeError> {
        self.drain_heartbeats();
        self.drain_membership()?;
        Ok(self.has_left())
    }

    /// The next dial to begin; [`Shell::handle_dialled`] says how it ended.
    pub(crate) fn poll_dial(&mut self) -> Option<Dial> {
        self.dials.pop_front()
    }

    /// Ends the worker's thread and the link.
    pub(super) async fn end(&self) {
        // A worker that has ended needs no order; one that waits for room in a send queue is let go
        // by the link.
        let _ = self.inputs.send(Input::Stop);
        self.link.shutdown().await;
    }

    /// When to call [`Shell::handle_timeout`].
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let redial = self.redial.as_ref().and_then(Redial::poll_timeout);
        let leaving = self.leaving.as_ref().map(|leaving| leaving.poll_timeout(clock::now()));
        let machines = [self.greeter.poll_timeout(), self.membership.poll_timeout(), self.heartbeats.poll_timeout()];
        machines.into_iter().chain([redial, leaving]).flatten().min()
    }

    /// Time has come.
    pub(crate) fn handle_timeout(&mut self) {
        let now = clock::now();
        for peer in self.greeter.handle_timeout(now) {
            self.link.disconnect(peer, "it connected and said no hello");
        }
        self.membership.handle_timeout(now);
        self.heartbeats.handle_timeout(now);
        if let Some(address) = self.redial.as_mut().and_then(|redial| redial.poll_dial(now)) {
            self.dials.push_back(Dial::Coordinator(address));
        }
    }

    /// A dial ended.
    pub(crate) fn handle_dialled(&mut self, dialled: Dialled) {
        match dialled {
            Dialled::Coordinator(Ok(_)) => {}
            Dialled::Coordinator(Err(reason)) => {
                tracing::warn!(%reason, "the coordinator can't be reached; dialling again");
                self.redial_later();
            }
            Dialled::Neighbour { peer, result: Err(reason) } => {
                self.membership.handle_dial_failed(peer, &reason, clock::now());
            }
            Dialled::Neighbour { result: Ok(()), .. } => {}
        }
    }

    /// Whether no session is open or about to be.
    fn is_idle(&self) -> bool {
        self.counters.open_sessions() == 0
    }

    fn redial_later(&mut self) {
        if let Some(redial) = &mut self.redial {
            redial.handle_lost(clock::now());
        }
    }

    fn is_dialled_coordinator(&self, peer: Node) -> bool {
        self.redial.as_ref().is_some_and(|redial| redial.peer() == peer.peer)
    }

    /// Something happened on the link.
    ///
    /// # Errors
    /// [`ServeError`] where the stage can't go on.
    pub(crate) fn handle_link(&mut self, event: LinkEvent) -> Result<(), ServeError> {
        match event {
            LinkEvent::Connected { peer, .. } => {
                let hello = self.greeter.handle_connected(peer, clock::now());
                self.send(peer, &hello);
            }
            LinkEvent::Disconnected { peer, reason } => self.handle_gone(peer, &reason),
            LinkEvent::Received { peer, lane, body } => {
                self.heartbeats.handle_heard(peer, clock::now());
                match lane {
                    Lane::Control => return self.handle_control(peer, &body),
                    Lane::Data => self.handle_data(peer, body),
                    Lane::Reply => self.refuse(peer, "a stage takes frames, a reply came".to_owned()),
                }
            }
        }
        Ok(())
    }

    fn handle_gone(&mut self, peer: Node, reason: &str) {
        let greeted = self.greeter.handle_disconnected(peer);
        self.roles.remove(&peer);
        self.heartbeats.remove(peer);
        if greeted {
            self.membership.handle_gone(peer, reason, self.is_idle(), clock::now());
        }
        if self.is_dialled_coordinator(peer) && self.leaving.is_none() {
            tracing::warn!(%peer, reason, "the coordinator is gone; dialling again");
            self.observe(StageEvent::Coordinator { peer: peer.to_string(), connected: false });
            self.redial_later();
        }
    }

    fn handle_control(&mut self, peer: Node, body: &Bytes) -> Result<(), ServeError> {
        let message = match codec::decode_control(body) {
            Ok(message) => message,
            Err(error) => {
                self.refuse(peer, error.to_string());
                return Ok(());
            }
        };
        let greeted = self.greeter.is_greeted(peer);
        match self.greeter.handle_control(peer, message) {
            Greeting::Up(hello, early) => {
                self.roles.insert(peer, hello.role);
                self.heartbeats.add(peer, clock::now());
                if self.is_dialled_coordinator(peer) {
                    if hello.role == Role::Stage {
                        let reason = "expected a coordinator at --coordinator, a stage answered".to_owned();
                        return Err(ServeError::Unfit { peer, reason });
                    }
                    self.observe(StageEvent::Coordinator { peer: peer.to_string(), connected: true });
                }
                self.membership.handle_greeted(peer, hello.role, clock::now());
                for body in early {
                    self.handle_data(peer, body);
                }
            }
            Greeting::Pass(message) => self.handle_message(peer, message),
            Greeting::Refuse { reason } => {
                self.refuse(peer, reason.clone());
                // A hello that does not fit is the same at the next dial.
                if !greeted && self.is_dialled_coordinator(peer) {
                    return Err(ServeError::Unfit { peer, reason });
                }
            }
            Greeting::RefusedBy { reason } => {
                tracing::warn!(%peer, %reason, "refused");
                self.link.disconnect(peer, &reason);
                if self.is_dialled_coordinator(peer) {
                    return Err(ServeError::Refused { peer, reason });
                }
            }
            Greeting::Ignore => {}
        }
        Ok(())
    }

    fn handle_message(&mut self, peer: Node, message: Control) {
        match message {
            Control::Heartbeat { seq } => self.send(peer, &Control::HeartbeatAck { seq }),
            Control::HeartbeatAck { seq: LEAVE_SEQ } => {
                if let (Some(leaving), true) = (&mut self.leaving, self.membership.obeys(peer)) {
                    leaving.handle_ack();
                }
            }
            Control::HeartbeatAck { seq } if seq >= ASIDE => self.membership.handle_ack(peer, seq),
            Control::HeartbeatAck { seq } => self.heartbeats.handle_ack(peer, seq, clock::now()),
            Control::Join(join) => self.membership.handle_join(peer, &join, clock::now()),
            Control::Open(open) => {
                self.counters.opening.fetch_add(1, Ordering::AcqRel);
                if !self.obey(peer, Input::Open(open)) {
                    self.counters.opening.fetch_sub(1, Ordering::AcqRel);
                }
            }
            Control::Close { session, .. } => {
                self.obey(peer, Input::Close(session));
            }
            Control::Cancel { session, below } => {
                self.obey(peer, Input::Cancel { session, below });
            }
            Control::Rebuild { session, rebuild } => {
                self.obey(peer, Input::Rebuild { session, rebuild });
            }
            Control::Replay { session, from, to, answer_from } => {
                self.obey(peer, Input::Replay { session, from, to, answer_from });
            }
            Control::Shadow { view, source } => self.membership.handle_shadow(peer, view, source),
            Control::Copy { view, to } => self.membership.handle_copy(peer, view, to, clock::now()),
            Control::Shadowed { view, session, next, again } => {
                // Of an older view, it is late.
                if self.membership.copies_to(peer, view) {
                    self.hand_over(peer, Input::Shadowed { session, next, again });
                }
            }
            Control::Probe { nonce } => {
                if self.membership.allows(peer) {
                    let report = StageReport { hop: self.hop(), ..self.counters.report(self.membership.view()) };
                    self.send(peer, &Control::Report { nonce, report: Box::new(report) });
                }
            }
            Control::Hello(_)
            | Control::Refused { .. }
            | Control::Offer(_)
            | Control::Joined { .. }
            | Control::JoinRefused { .. }
            | Control::Opened { .. }
            | Control::Closed { .. }
            | Control::Failed { .. }
            | Control::Rebuilt { .. }
            | Control::ReplayFailed { .. }
            | Control::Report { .. }
            | Control::Draining
            | Control::NeighbourLost { .. } => {
                self.refuse(peer, "expected a coordinator's message, a stage's came".to_owned());
            }
        }
    }

    /// Hands on what only the coordinator in force may say; says whether it was handed on.
    fn obey(&mut self, peer: Node, input: Input) -> bool {
        if self.membership.obeys(peer) {
            return self.hand_over(peer, input);
        }
        tracing::warn!(%peer, "a message of a peer that this stage does not obey is dropped");
        false
    }

    fn handle_data(&mut self, peer: Node, body: Bytes) {
        if !self.greeter.is_greeted(peer) {
            return self.handle_early(peer, body);
        }
        match codec::decode_data(body) {
            Ok(Data::Frame(frame)) => {
                if self.membership.accepts(peer, frame.head.view) {
                    self.hand_over(peer, Input::Frame(frame));
                } else {
                    tracing::debug!(%peer, view = %frame.head.view, "a frame of another view or peer is dropped");
                }
            }
            Ok(Data::Reply(_)) => {
                self.refuse(peer, "expected a frame on the data lane, its bytes are a reply".to_owned())
            }
            Err(error) => self.refuse(peer, error.to_string()),
        }
    }

    /// A frame that overtook its sender's hello waits for it if it comes from the stage in front, which sends
    /// as soon as it has our hello.
    fn handle_early(&mut self, peer: Node, body: Bytes) {
        let in_front = self.membership.route().is_some_and(|route| route.predecessor == peer);
        let kept = if in_front { self.greeter.keep(peer, body) } else { Early::Dropped };
        match kept {
            Early::Kept => {}
            Early::Dropped => tracing::warn!(%peer, "data of a peer that has not greeted is dropped"),
            Early::TooMuch => self.refuse(peer, "expected a hello first, too much data came".to_owned()),
        }
    }

    /// Hands an input to the worker; a peer that sends more than the worker can hold is cut off.
    fn hand_over(&mut self, peer: Node, input: Input) -> bool {
        match self.inputs.try_send(input) {
            Ok(()) => return true,
            Err(TrySendError::Full(_)) => {
                self.refuse(peer, format!("more than {} messages wait for the engine", worker::INPUTS_MAX));
            }
            Err(TrySendError::Disconnected(_)) => tracing::error!("the engine's thread has ended"),
        }
        false
    }

    fn refuse(&mut self, peer: Node, reason: String) {
        tracing::warn!(%peer, %reason, "peer refused");
        self.greeter.refuse(peer);
        self.send(peer, &Control::Refused { reason: reason.clone() });
        self.link.disconnect(peer, &reason);
    }

    fn send(&self, peer: Node, message: &Control) {
        match codec::encode_control(message) {
            Ok(body) => {
                if let Err(error) = self.link.try_send(peer, Lane::Control, body) {
                    tracing::warn!(%peer, %error, "a control message can't be sent");
                }
            }
            Err(error) => tracing::error!(%peer, %error, "a control message can't be written"),
        }
    }

    /// The hop to the next stage, or at the tail back to the coordinator.
    fn hop(&self) -> Option<HopReport> {
        let route = self.membership.route()?;
        let to = route.successor.unwrap_or(route.coordinator);
        Some(hop_report(self.link.as_ref(), to, self.heartbeats.rtt(to)))
    }

    /// Sends what is due, and cuts off who is dead.
    fn drain_heartbeats(&mut self) {
        while let Some((peer, output)) = self.heartbeats.poll_output() {
            match output {
                LivenessOutput::SendHeartbeat { seq } => self.send(peer, &Control::Heartbeat { seq }),
                LivenessOutput::Suspect { silent_for } => self.handle_suspect(peer, silent_for),
                LivenessOutput::Alive => {}
                LivenessOutput::Dead { silent_for } => {
                    let why = format!("no sign of life for {} ms", silent_for.as_millis());
                    self.membership.handle_silent(peer, &why);
                    self.cut_off(peer, &why);
                }
            }
        }
    }

    /// A hop to a silent successor is made anew while nothing is on it: a connection that died with
    /// its path costs no frame then.
    fn handle_suspect(&mut self, peer: Node, silent_for: Duration) {
        let successor = self.membership.route().and_then(|route| route.successor);
        if successor == Some(peer) && self.is_idle() {
            self.cut_off(peer, &format!("no sign of life for {} ms on an idle hop", silent_for.as_millis()));
        }
    }

    fn cut_off(&mut self, peer: Node, why: &str) {
        tracing::warn!(%peer, why, "a peer is cut off");
        self.link.disconnect(peer, why);
        self.handle_gone(peer, why);
    }

    /// Whether a stage on its way out can end.
    fn has_left(&self) -> bool {
        self.leaving.as_ref().is_some_and(|leaving| {
            leaving.is_over(self.membership.coordinator().is_some(), self.counters.open_sessions(), clock::now())
        })
    }

    /// The stage is to finish what is open and end.
    pub(crate) fn leave(&mut self) {
        self.leaving = Some(Leaving::new(clock::now()));
        self.observe(StageEvent::Draining);
        if let Some(coordinator) = self.membership.coordinator() {
            self.send(coordinator, &Control::Draining);
            self.send(coordinator, &Control::Heartbeat { seq: LEAVE_SEQ });
        }
    }

    fn drain_membership(&mut self) -> Result<(), ServeError> {
        while let Some(output) = self.membership.poll_output() {
            match output {
                Output::Send { to, message } => self.send(to, &message),
                Output::Offer { to } => {
                    let offer = self.offer();
                    self.send(to, &Control::Offer(offer));
                    if let Some(redial) = &mut self.redial {
                        redial.handle_accepted();
                    }
                }
                Output::Refuse { peer, reason } => self.refuse(peer, reason),
                Output::Dial { peer, addresses } => {
                    self.dials.push_back(Dial::Neighbour { peer, addresses });
                }
                Output::Mended { peer } => self.observe(StageEvent::Mended { peer: peer.to_string() }),
                Output::Disconnect { peer, reason } => self.link.disconnect(peer, &reason),
                Output::Ask => self.order(Input::Ask)?,
                Output::Copy(to) => self.order(Input::Copy(to))?,
                Output::Route(route) => {
                    self.order(Input::Route(route))?;
                    self.observe(match route {
                        Some(route) if route.shadows => {
                            StageEvent::Shadowing { view: route.view.0, coordinator: route.coordinator.to_string() }
                        }
                        Some(route) => {
                            StageEvent::Joined { view: route.view.0, coordinator: route.coordinator.to_string() }
                        }
                        None => StageEvent::Left,
                    });
                }
            }
        }
        Ok(())
    }

    /// Hands the worker what it can't do without.
    fn order(&self, input: Input) -> Result<(), ServeError> {
        self.inputs.try_send(input).map_err(|error| ServeError::Worker { why: error.to_string() })
    }

    fn offer(&self) -> Offer {
        let listened = if self.settings.announce.is_empty() { self.link.addresses() } else { Vec::new() };
        Offer {
            range: self.facts.range,
            device: self.facts.device.clone(),
            draft_block: self.facts.draft_block,
            max_context: self.facts.max_context,
            max_sessions: self.settings.max_sessions,
            encodings: self.settings.encodings.clone(),
            addresses: self
                .settings
                .announce
                .iter()
                .chain(&listened)
                .take(ADDRESSES_MAX)
                .map(Multiaddr::to_string)
                .collect(),
            pid: std::process::id(),
            view: self.membership.view(),
            spare: self.settings.spare,
            shadow: self.settings.spare && self.settings.shadow,
        }
    }

    fn observe(&self, event: StageEvent) {
        tracing::info!(?event, "stage");
        if let Some(observer) = &self.observer {
            let _ = observer.try_send(event);
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
