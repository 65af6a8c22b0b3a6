//! The shell of a stage: greets peers, obeys one coordinator, hands frames to the worker.
//!
//! One `select!` over the link, timers and the order to drain; then the machines are drained. It
//! never computes, so heartbeats and probes are answered while the engine is busy.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use libp2p::Multiaddr;
use tokio::sync::{mpsc, oneshot, watch};

use crate::clock;
use crate::config::StageSettings;
use crate::engine::{Engine, EngineFacts};
use crate::ids::{Node, WireEncoding};
use crate::node::counters::Counters;
use crate::node::membership::{Membership, Output};
use crate::node::worker::{self, Input, Started, WorkerParts};
use crate::proto::codec::{self, ADDRESSES_MAX, Data};
use crate::proto::control::{Control, Hello, Offer, Role};
use crate::proto::greeter::{Greeter, Greeting};
use crate::transport::redial::{Redial, peer_of};
use crate::transport::{Lane, Link, LinkEvent, LinkEvents};

/// Pause between looks at whether a draining stage's sessions have ended.
const DRAIN_LOOK: Duration = Duration::from_millis(50);

/// Heartbeat whose answer says that the coordinator has heard of the draining: it answers in order.
const DRAIN_SEQ: u64 = u64::MAX;

/// How long a draining stage waits for its sessions to end.
const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// Results of dials that wait for the shell.
const DIALS_MAX: usize = 64;

/// Why a stage stopped serving.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The coordinator it was told to dial does not take it.
    #[error("the coordinator {peer} refuses this stage: {reason}")]
    Refused {
        /// Who.
        peer: Node,
        /// Its words.
        reason: String,
    },
    /// What answers where it was told to dial is not its coordinator.
    #[error("the coordinator {peer} does not fit: {reason}")]
    Unfit {
        /// Who.
        peer: Node,
        /// What was expected, what came.
        reason: String,
    },
    /// The engine's thread can't be started, or has ended by itself.
    #[error("the engine's thread ended: {why}")]
    Worker {
        /// What happened.
        why: String,
    },
    /// The link is gone.
    #[error("the link to the network ended")]
    LinkEnded,
}

/// A change that an operator may want to see, for `--json-events`.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum StageEvent {
    /// A view was joined.
    Joined {
        /// The view.
        view: u64,
        /// The coordinator.
        coordinator: String,
    },
    /// The stage is in no ring.
    Left,
    /// A coordinator was reached or lost.
    Coordinator {
        /// Who.
        peer: String,
        /// Whether it is connected.
        connected: bool,
    },
    /// It finishes what is open.
    Draining,
}

/// What a stage runs on.
pub struct StageParts {
    /// The layers.
    pub engine: Box<dyn Engine>,
    /// The way to peers.
    pub link: Arc<dyn Link>,
    /// What happens there.
    pub events: LinkEvents,
    /// Digest of the model, for the hello.
    pub model_digest: [u8; 32],
    /// Becomes `true` when the stage should drain and end.
    pub stop: watch::Receiver<bool>,
    /// Gets changes, where somebody listens.
    pub observer: Option<mpsc::Sender<StageEvent>>,
}

/// Serves until told to stop.
///
/// # Errors
/// [`ServeError`] when it can't go on.
pub async fn serve(parts: StageParts, settings: &StageSettings) -> Result<(), ServeError> {
    let StageParts { engine, link, events, model_digest, stop, observer } = parts;
    let facts = engine.facts().clone();
    let counters = Arc::new(Counters::default());
    worker::count_loaded(&counters, facts.weight_bytes);
    let Started { inputs, ended, thread } = worker::start(WorkerParts {
        engine,
        link: Arc::clone(&link),
        runtime: tokio::runtime::Handle::current(),
        counters: Arc::clone(&counters),
        max_sessions: settings.max_sessions,
    })
    .map_err(|error| ServeError::Worker { why: error.to_string() })?;
    let (dialled, dials) = mpsc::channel(DIALS_MAX);
    let mut shell = Shell {
        greeter: Greeter::new(Hello::ours(Role::Stage, model_digest)),
        membership: Membership::new(settings.obey.clone()),
        roles: BTreeMap::new(),
        facts,
        counters,
        inputs,
        dialled,
        redial: settings.coordinator.clone().and_then(|address| Redial::new(address, clock::now())),
        draining: None,
        max_sessions: settings.max_sessions,
        encodings: settings.encodings.clone(),
        announce: settings.announce.clone(),
        observer,
        link,
    };
    let result = shell.run(events, (dials, ended), stop).await;
    // The worker may wait for room in a send queue; the link ends that wait.
    let _ = shell.inputs.send(Input::Stop);
    shell.link.shutdown().await;
    let joined = tokio::task::spawn_blocking(move || thread.join()).await;
    match (result, joined) {
        (Ok(()), Ok(Err(_))) => Err(ServeError::Worker { why: "it panicked; the log says where".to_owned() }),
        (result, _) => result,
    }
}

enum Dialled {
    Coordinator(Result<Node, String>),
    Neighbour { peer: Node, result: Result<(), String> },
}

/// A stage on its way out.
struct Draining {
    /// When it ends, whatever is open then.
    until: Instant,
    /// The coordinator has heard of it: every session that it opens here is known by now.
    heard: bool,
}

struct Shell {
    link: Arc<dyn Link>,
    greeter: Greeter,
    membership: Membership,
    roles: BTreeMap<Node, Role>,
    facts: EngineFacts,
    counters: Arc<Counters>,
    inputs: SyncSender<Input>,
    dialled: mpsc::Sender<Dialled>,
    redial: Option<Redial>,
    draining: Option<Draining>,
    max_sessions: u32,
    encodings: Vec<WireEncoding>,
    announce: Vec<Multiaddr>,
    observer: Option<mpsc::Sender<StageEvent>>,
}

impl Shell {
    async fn run(
        &mut self,
        mut events: LinkEvents,
        (mut dials, mut ended): (mpsc::Receiver<Dialled>, oneshot::Receiver<()>),
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), ServeError> {
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
                Some(dialled) = dials.recv() => self.handle_dialled(dialled),
                () = sleep_until(timer) => self.handle_timeout(),
                changed = stop.changed(), if self.draining.is_none() => {
                    if changed.is_err() || *stop.borrow() {
                        self.drain();
                    }
                }
            }
            self.drain_membership()?;
            if self.drained() {
                return Ok(());
            }
        }
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let redial = self.redial.as_ref().and_then(Redial::poll_timeout);
        // A draining stage looks often, since sessions end without an event for the shell.
        let draining = self.draining.as_ref().map(|drain| drain.until.min(clock::now() + DRAIN_LOOK));
        [self.greeter.poll_timeout(), self.membership.poll_timeout(), redial, draining].into_iter().flatten().min()
    }

    fn handle_timeout(&mut self) {
        let now = clock::now();
        for peer in self.greeter.handle_timeout(now) {
            self.link.disconnect(peer, "it connected and said no hello");
        }
        self.membership.handle_timeout(now);
        if let Some(address) = self.redial.as_mut().and_then(|redial| redial.poll_dial(now)) {
            let (link, dialled) = (Arc::clone(&self.link), self.dialled.clone());
            tokio::spawn(async move {
                let result = link.dial(address).await.map_err(|error| error.to_string());
                let _ = dialled.send(Dialled::Coordinator(result)).await;
            });
        }
    }

    fn handle_dialled(&mut self, dialled: Dialled) {
        match dialled {
            Dialled::Coordinator(Ok(_)) => {}
            Dialled::Coordinator(Err(reason)) => {
                tracing::warn!(%reason, "the coordinator can't be reached; dialling again");
                self.redial_later();
            }
            Dialled::Neighbour { peer, result: Err(reason) } => self.membership.handle_dial_failed(peer, &reason),
            Dialled::Neighbour { result: Ok(()), .. } => {}
        }
    }

    fn redial_later(&mut self) {
        if let Some(redial) = &mut self.redial {
            redial.handle_lost(clock::now());
        }
    }

    fn is_dialled_coordinator(&self, peer: Node) -> bool {
        self.redial.as_ref().is_some_and(|redial| redial.peer() == peer.peer)
    }

    fn handle_link(&mut self, event: LinkEvent) -> Result<(), ServeError> {
        match event {
            LinkEvent::Connected { peer, .. } => {
                let hello = self.greeter.handle_connected(peer, clock::now());
                self.send(peer, &hello);
            }
            LinkEvent::Disconnected { peer, reason } => self.handle_gone(peer, &reason),
            LinkEvent::Received { peer, lane: Lane::Control, body } => return self.handle_control(peer, &body),
            LinkEvent::Received { peer, lane: Lane::Data, body } => self.handle_data(peer, body),
        }
        Ok(())
    }

    fn handle_gone(&mut self, peer: Node, reason: &str) {
        let greeted = self.greeter.handle_disconnected(peer);
        self.roles.remove(&peer);
        if greeted {
            self.membership.handle_gone(peer, reason);
        }
        if self.is_dialled_coordinator(peer) && self.draining.is_none() {
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
            Greeting::Up(hello) => {
                self.roles.insert(peer, hello.role);
                if self.is_dialled_coordinator(peer) {
                    if hello.role == Role::Stage {
                        let reason = "expected a coordinator at --coordinator, a stage answered".to_owned();
                        return Err(ServeError::Unfit { peer, reason });
                    }
                    self.observe(StageEvent::Coordinator { peer: peer.to_string(), connected: true });
                }
                self.membership.handle_greeted(peer, hello.role, clock::now());
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
            Control::HeartbeatAck { seq: DRAIN_SEQ } => {
                if let (Some(drain), true) = (&mut self.draining, self.membership.obeys(peer)) {
                    drain.heard = true;
                }
            }
            Control::HeartbeatAck { seq } => self.membership.handle_ack(peer, seq),
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
            Control::Probe { nonce } => {
                if self.membership.allows(peer) {
                    let report = self.counters.report(self.membership.view());
                    self.send(peer, &Control::Report { nonce, report });
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
            return tracing::warn!(%peer, "data of a peer that has not greeted is dropped");
        }
        match codec::decode_data(body) {
            Ok(Data::Frame(frame)) => {
                if self.membership.accepts(peer, frame.head.view) {
                    self.hand_over(peer, Input::Frame(frame));
                } else {
                    tracing::debug!(%peer, view = %frame.head.view, "a frame of another view or peer is dropped");
                }
            }
            Ok(Data::Reply(_)) => self.refuse(peer, "expected a frame on the data lane, a reply came".to_owned()),
            Err(error) => self.refuse(peer, error.to_string()),
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

    /// Whether a draining stage can end: nothing is open and nothing can come, or it waited too long.
    fn drained(&self) -> bool {
        self.draining.as_ref().is_some_and(|drain| {
            // A coordinator that is gone opens nothing.
            let heard = drain.heard || self.membership.coordinator().is_none();
            drain.until <= clock::now() || (heard && self.counters.open_sessions() == 0)
        })
    }

    fn drain(&mut self) {
        self.draining = Some(Draining { until: clock::now() + DRAIN_DEADLINE, heard: false });
        self.observe(StageEvent::Draining);
        if let Some(coordinator) = self.membership.coordinator() {
            self.send(coordinator, &Control::Draining);
            self.send(coordinator, &Control::Heartbeat { seq: DRAIN_SEQ });
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
                Output::Dial { peer, addresses } => self.dial(peer, addresses),
                Output::Disconnect { peer, reason } => self.link.disconnect(peer, &reason),
                Output::Route(route) => {
                    self.inputs
                        .try_send(Input::Route(route))
                        .map_err(|error| ServeError::Worker { why: error.to_string() })?;
                    self.observe(match route {
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

    fn offer(&self) -> Offer {
        let listened = if self.announce.is_empty() { self.link.addresses() } else { Vec::new() };
        Offer {
            range: self.facts.range,
            device: self.facts.device.clone(),
            draft_block: self.facts.draft_block,
            max_context: self.facts.max_context,
            max_sessions: self.max_sessions,
            encodings: self.encodings.clone(),
            addresses: self.announce.iter().chain(&listened).take(ADDRESSES_MAX).map(Multiaddr::to_string).collect(),
            pid: std::process::id(),
            view: self.membership.view(),
        }
    }

    fn dial(&self, peer: Node, addresses: Vec<String>) {
        let (link, dialled) = (Arc::clone(&self.link), self.dialled.clone());
        tokio::spawn(async move {
            let mut result = Err("it offered no address".to_owned());
            for address in addresses {
                result = match address.parse::<Multiaddr>() {
                    Ok(address) if peer_of(&address) == Some(peer.peer) => match link.dial(address).await {
                        Ok(node) if node == peer => Ok(()),
                        Ok(_) => Err("another process answers there: it was restarted".to_owned()),
                        Err(error) => Err(error.to_string()),
                    },
                    Ok(address) => Err(format!("address {address} does not end in /p2p/{peer}")),
                    Err(error) => Err(format!("address {address:?}: {error}")),
                };
                if result.is_ok() {
                    break;
                }
            }
            let _ = dialled.send(Dialled::Neighbour { peer, result }).await;
        });
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
