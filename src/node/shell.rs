//! The shell of a stage: greets peers, obeys one coordinator, hands frames to the worker.
//!
//! One `select!` over the link, timers and the order to drain; then the machines are drained. It
//! never computes, so heartbeats and probes are answered while the engine is busy. What the `select!`
//! calls is synchronous: the simulator calls the same.

mod receive;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

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
use crate::node::worker::Input;
use crate::proto::codec::ADDRESSES_MAX;
use crate::proto::control::{Control, Hello, HopReport, Offer, Role};
use crate::proto::greeter::Greeter;
use crate::proto::heartbeats::Heartbeats;
use crate::proto::liveness::{LivenessConfig, LivenessOutput};
use crate::transport::redial::Redial;
use crate::transport::{Link, LinkEvents};

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
