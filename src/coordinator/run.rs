//! The coordinator's loop: greets stages, keeps the ring whole, drives every session.
//!
//! One `select!` over the link, requests and timers; then the machines are drained. It owns all
//! state; the API reads what it publishes. What the `select!` calls is synchronous: the simulator calls
//! the same.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use libp2p::{Multiaddr, PeerId};
use tokio::sync::{mpsc, watch};

use crate::clock;
use crate::config::{Admit, CoordinatorSettings};
use crate::coordinator::attach::Kept;
use crate::coordinator::durable::LogGate;
use crate::coordinator::handle::{COMMANDS_MAX, Command, Coordinator, Shared};
use crate::coordinator::heals::Heals;
use crate::coordinator::job::{ModelFacts, RingStatus};
use crate::coordinator::log::Log;
use crate::coordinator::log::writer::{self, Synced};
use crate::coordinator::outbox::Outbox;
use crate::coordinator::ring::{Output, Ring};
use crate::coordinator::session::Session;
use crate::coordinator::unstarted::Unstarted;
use crate::heal::copies::Copies;
use crate::ids::{Node, SessionId, View};
use crate::proto::codec::{self, Data};
use crate::proto::control::{Control, Hello, Role};
use crate::proto::greeter::{Greeter, Greeting};
use crate::proto::heartbeats::Heartbeats;
use crate::proto::liveness::{LivenessConfig, LivenessOutput};
use crate::transport::redial::{Redial, peer_of};
use crate::transport::{Lane, Link, LinkError, LinkEvent, LinkEvents};

/// Pause between reports that the loop asks of every stage.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Failed dials that wait for the loop.
const DIALS_MAX: usize = 64;

/// What a coordinator runs on.
pub struct CoordinatorParts {
    /// The way to stages.
    pub link: Arc<dyn Link>,
    /// What happens there.
    pub events: LinkEvents,
    /// The model served.
    pub model: ModelFacts,
    /// What the loop itself must know of the checkpoint.
    pub shape: ModelShape,
    /// Becomes `true` when the coordinator should end.
    pub stop: watch::Receiver<bool>,
}

/// What the loop must know of a checkpoint.
#[derive(Debug, Clone)]
pub struct ModelShape {
    /// Layers of the target model.
    pub layers: u16,
    /// Residual streams per position.
    pub hc: usize,
    /// Values per residual stream.
    pub dim: usize,
    /// A token that a probe round starts from.
    pub probe_token: crate::ids::TokenId,
    /// Digest, for the hello.
    pub digest: [u8; 32],
}

/// Starts the loop as a task; the ring is whole some time later.
pub fn start(parts: CoordinatorParts, settings: CoordinatorSettings) -> (Coordinator, tokio::task::JoinHandle<()>) {
    run(parts, settings, LogGate::closed(), mpsc::channel(1).1)
}

/// Starts the loop with a log: what is unfinished there waits for the ring and goes on.
///
/// # Errors
/// That of the system where the log's thread can't be started.
pub fn start_logged(
    parts: CoordinatorParts,
    settings: CoordinatorSettings,
    log: Log,
) -> io::Result<(Coordinator, tokio::task::JoinHandle<()>)> {
    let (gate, scribe, batches) = LogGate::open(log);
    let synced = writer::start(scribe, batches)?;
    Ok(run(parts, settings, gate, synced))
}

fn run(
    parts: CoordinatorParts,
    settings: CoordinatorSettings,
    log: LogGate,
    synced: mpsc::Receiver<Synced>,
) -> (Coordinator, tokio::task::JoinHandle<()>) {
    let CoordinatorParts { link, events, model, shape, stop } = parts;
    let (handle, inbox, mut shell) = Shell::new((link, model, shape), settings, log);
    let task = tokio::spawn(async move { shell.run(events, inbox, synced, stop).await });
    (handle, task)
}

/// A dial that the loop wants.
#[derive(Debug)]
pub(crate) struct Dial {
    /// Who is to be at the address.
    pub(crate) peer: PeerId,
    pub(crate) address: Multiaddr,
}

pub(crate) struct Shell {
    pub(super) link: Arc<dyn Link>,
    pub(super) greeter: Greeter,
    pub(crate) ring: Ring,
    /// Copies for the shadow of the head.
    pub(super) copies: Copies,
    pub(crate) heals: Heals,
    pub(super) heartbeats: Heartbeats,
    redials: Vec<Redial>,
    pub(crate) sessions: BTreeMap<SessionId, Session>,
    /// Sessions that ended and whose readers may not have read all.
    pub(super) kept: BTreeMap<SessionId, Kept>,
    /// Requests that wait for a whole ring.
    pub(super) unstarted: BTreeMap<SessionId, Unstarted>,
    pub(super) log: LogGate,
    outbox: Outbox,
    /// Dials that are to begin.
    dials: VecDeque<Dial>,
    pub(super) eos: std::collections::BTreeSet<crate::ids::TokenId>,
    /// Ids at or above it are no token.
    pub(super) vocab: u32,
    pub(super) shape: ModelShape,
    report_at: Instant,
    pub(super) probe_at: Instant,
    pub(super) nonce: u64,
    pub(crate) shared: Arc<Shared>,
    pub(super) settings: CoordinatorSettings,
}

impl Shell {
    /// A coordinator before its first event: what the API sees of it, the commands from there, the loop's
    /// state.
    pub(crate) fn new(
        (link, model, shape): (Arc<dyn Link>, ModelFacts, ModelShape),
        settings: CoordinatorSettings,
        log: LogGate,
    ) -> (Coordinator, mpsc::Receiver<Command>, Self) {
        let now = clock::now();
        let (commands, inbox) = mpsc::channel(COMMANDS_MAX);
        let shared = Arc::new(Shared {
            status: Mutex::new(RingStatus {
                coordinator: link.local().to_string(),
                view: View(0),
                ready: false,
                hops: Vec::new(),
                missing: Some("starting".to_owned()),
                last_round_ms: None,
                members: Vec::new(),
                heals: Vec::new(),
                uptime_ms: 0,
                rejections: 0,
                settled: 0,
                sessions: 0,
                in_flight: 0,
                encoding: settings.encoding,
            }),
            last_round: Mutex::new(None),
            begun: now,
            rejections: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            in_flight: AtomicU32::new(0),
            open: AtomicU32::new(0),
            next_session: AtomicU64::new(log.first_session()),
            context: AtomicU32::new(0),
            session_limit: AtomicU32::new(0),
            draft_block: AtomicU32::new(0),
        });
        let handle = Coordinator {
            shared: Arc::clone(&shared),
            commands,
            model: Arc::new(model.clone()),
            ready_for: settings.ready_for,
        };
        let shell = Shell {
            greeter: Greeter::new(Hello::ours(Role::Coordinator, shape.digest)),
            ring: Ring::new(link.local(), shape.layers),
            copies: Copies::default(),
            heals: Heals::new(now),
            heartbeats: Heartbeats::new(LivenessConfig {
                interval: settings.heartbeat,
                dead_after: settings.dead_after,
                ..LivenessConfig::default()
            }),
            redials: settings.stages.iter().filter_map(|address| Redial::new(address.clone(), now)).collect(),
            sessions: BTreeMap::new(),
            kept: BTreeMap::new(),
            unstarted: BTreeMap::new(),
            log,
            outbox: Outbox::default(),
            dials: VecDeque::new(),
            eos: model.eos.iter().copied().collect(),
            vocab: model.vocab,
            shape,
            link,
            report_at: now,
            probe_at: now,
            nonce: 0,
            shared,
            settings,
        };
        (handle, inbox, shell)
    }

    async fn run(
        &mut self,
        mut events: LinkEvents,
        mut inbox: mpsc::Receiver<Command>,
        mut synced: mpsc::Receiver<Synced>,
        mut stop: watch::Receiver<bool>,
    ) {
        let (failed, mut dials) = mpsc::channel(DIALS_MAX);
        self.recover();
        loop {
            let timer = self.poll_timeout();
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.handle_link(event),
                    None => break,
                },
                Some(command) = inbox.recv() => self.handle_command(command),
                Some(synced) = synced.recv() => self.handle_synced(synced),
                Some((peer, error)) = dials.recv() => self.handle_dial_failed(peer, &error),
                () = tokio::time::sleep_until(timer.into()) => self.handle_timeout(),
                _ = stop.wait_for(|stop| *stop) => break,
            }
            self.drain();
            while let Some(dial) = self.poll_dial() {
                spawn(&self.link, &failed, dial);
            }
        }
        self.stop_sessions(&mut synced).await;
        self.link.shutdown().await;
    }

    /// Does what the machines say after something happened.
    pub(crate) fn drain(&mut self) {
        self.drain_heartbeats();
        self.flush_outbox();
        self.drain_ring();
        self.settle_heals();
        self.flush_log();
    }

    /// The next dial to begin; [`Shell::handle_dial_failed`] says that one failed.
    pub(crate) fn poll_dial(&mut self) -> Option<Dial> {
        self.dials.pop_front()
    }

    /// When to call [`Shell::handle_timeout`].
    pub(crate) fn poll_timeout(&self) -> Instant {
        let machines = [
            self.greeter.poll_timeout(),
            self.ring.poll_timeout(),
            self.heartbeats.poll_timeout(),
            self.outbox.poll_timeout(),
            self.sessions_timeout(),
            self.readers_timeout(),
            self.unstarted_timeout(),
            self.log.poll_timeout(self.settings.heal_wait),
        ];
        let redials = self.redials.iter().filter_map(Redial::poll_timeout);
        let timers = machines.into_iter().flatten().chain(redials);
        timers.chain([self.report_at, self.probe_at]).min().unwrap_or(self.report_at)
    }

    /// Time has come.
    pub(crate) fn handle_timeout(&mut self) {
        let now = clock::now();
        for peer in self.greeter.handle_timeout(now) {
            self.link.disconnect(peer, "it connected and said no hello");
        }
        self.ring.handle_timeout(now);
        self.dial(now);
        self.heartbeats.handle_timeout(now);
        self.handle_sessions_timeout(now);
        self.handle_readers_timeout(now);
        self.handle_unstarted_timeout(Some(now));
        self.handle_log_timeout(now);
        if self.report_at <= now {
            self.report_at = now + REPORT_EVERY;
            let peers: Vec<Node> = self.ring.members().map(|member| member.peer).collect();
            for peer in peers {
                self.send(peer, &Control::Probe { nonce: 0 });
            }
            self.publish();
        }
        if self.probe_at <= now {
            self.probe_at = now + self.settings.probe_every;
            self.probe_ring(now);
        }
    }

    fn dial(&mut self, now: Instant) {
        for redial in &mut self.redials {
            let dial = redial.poll_dial(now).map(|address| Dial { peer: redial.peer(), address });
            self.dials.extend(dial);
        }
    }

    /// A dial failed.
    pub(crate) fn handle_dial_failed(&mut self, peer: PeerId, error: &LinkError) {
        tracing::warn!(%peer, %error, "a stage can't be reached; dialling again");
        self.redial_later(peer);
    }

    fn redial_later(&mut self, peer: PeerId) {
        for redial in self.redials.iter_mut().filter(|redial| redial.peer() == peer) {
            redial.handle_lost(clock::now());
        }
    }

    /// Sends what is due, and gives up who is dead.
    fn drain_heartbeats(&mut self) {
        while let Some((peer, output)) = self.heartbeats.poll_output() {
            match output {
                LivenessOutput::SendHeartbeat { seq } => self.send(peer, &Control::Heartbeat { seq }),
                LivenessOutput::Suspect { .. } => self.handle_suspect(peer, true),
                LivenessOutput::Alive => self.handle_suspect(peer, false),
                LivenessOutput::Dead { silent_for } => {
                    let why = format!("no sign of life for {} ms", silent_for.as_millis());
                    self.link.disconnect(peer, &why);
                    self.handle_gone(peer, &why);
                }
            }
        }
    }

    fn handle_suspect(&mut self, peer: Node, suspect: bool) {
        self.ring.handle_suspect(peer, suspect);
        self.publish();
    }

    /// Something happened on the link.
    pub(crate) fn handle_link(&mut self, event: LinkEvent) {
        match event {
            LinkEvent::Connected { peer, .. } => {
                let hello = self.greeter.handle_connected(peer, clock::now());
                self.send(peer, &hello);
            }
            LinkEvent::Disconnected { peer, reason } => self.handle_gone(peer, &reason),
            LinkEvent::Received { peer, lane, body } => {
                self.heartbeats.handle_heard(peer, clock::now());
                match lane {
                    Lane::Control => self.handle_control(peer, &body),
                    Lane::Reply => self.handle_tail(peer, body),
                    Lane::Data => self.refuse(peer, "a coordinator takes replies, a frame came".to_owned()),
                }
            }
        }
    }

    fn handle_gone(&mut self, peer: Node, reason: &str) {
        self.outbox.handle_gone(peer);
        self.greeter.handle_disconnected(peer);
        if self.heartbeats.remove(peer) {
            tracing::warn!(%peer, reason, "a stage is gone");
        }
        self.ring.handle_gone(peer, reason, clock::now());
        self.redial_later(peer.peer);
        self.publish();
    }

    fn handle_control(&mut self, peer: Node, body: &Bytes) {
        let message = match codec::decode_control(body) {
            Ok(message) => message,
            Err(error) => return self.refuse(peer, error.to_string()),
        };
        match self.greeter.handle_control(peer, message) {
            Greeting::Up(hello, _) => self.handle_greeted(peer, &hello),
            Greeting::Pass(message) => self.handle_message(peer, message),
            Greeting::Refuse { reason } => self.refuse(peer, reason),
            Greeting::RefusedBy { reason } => {
                tracing::error!(%peer, %reason, "a stage refuses this coordinator");
                self.link.disconnect(peer, &reason);
            }
            Greeting::Ignore => {}
        }
    }

    fn handle_greeted(&mut self, peer: Node, hello: &Hello) {
        let dialled = self.settings.stages.iter().any(|address| peer_of(address) == Some(peer.peer));
        let admitted = match &self.settings.admit {
            Admit::Anyone => true,
            Admit::Peers(peers) => dialled || peers.contains(&peer.peer),
        };
        match hello.role {
            Role::Stage if admitted => {
                self.heartbeats.add(peer, clock::now());
            }
            Role::Stage => {
                let ours = self.link.local();
                let reason = format!(
                    "coordinator {ours} does not admit {peer}: its operator must start it with --allow {peer} (or --open)"
                );
                self.refuse(peer, reason);
            }
            Role::Coordinator => self.refuse(peer, "expected a stage, a coordinator came".to_owned()),
        }
    }

    fn handle_message(&mut self, peer: Node, message: Control) {
        let now = clock::now();
        match message {
            Control::Heartbeat { seq } => self.send(peer, &Control::HeartbeatAck { seq }),
            Control::HeartbeatAck { seq } => self.heartbeats.handle_ack(peer, seq, now),
            Control::Offer(offer) => {
                if !self.heartbeats.contains(peer) {
                    return;
                }
                tracing::info!(%peer, range = %offer.range, device = %offer.device, "a stage offers itself");
                for redial in self.redials.iter_mut().filter(|redial| redial.peer() == peer.peer) {
                    redial.handle_accepted();
                }
                self.ring.handle_offer(peer, offer, now);
            }
            Control::Joined { view } => self.ring.handle_joined(peer, view),
            Control::JoinRefused { view, current, reason } => {
                self.ring.handle_join_refused(peer, view, current, &reason, now);
            }
            Control::NeighbourLost { view, peer: lost, reason } => {
                if lost != self.link.local() {
                    self.ring.handle_neighbour_lost((peer, lost), view, &reason, now);
                }
            }
            Control::Draining => {
                tracing::info!(%peer, "a stage is draining");
                self.ring.handle_draining(peer);
                self.publish();
            }
            Control::Report { nonce, report } => {
                self.handle_report(peer, nonce, &report);
                self.free_forgotten(peer, &report);
                self.ring.handle_report(peer, *report);
            }
            Control::Opened { view, session, kept } => {
                self.handle_opened(peer, view, session, kept.map(|kept| *kept));
            }
            Control::ReplayFailed { view, session, reason } => {
                self.handle_replay_failed(peer, view, session, &reason);
            }
            Control::Rebuilt { view, session, next, outputs } => {
                self.handle_rebuilt(peer, view, session, next, outputs);
            }
            Control::Failed { view, session, reason } => self.handle_failed(peer, view, session, reason),
            Control::Closed { report } => self.handle_closed(peer, report),
            Control::Shadowed { view, session, next, again } => {
                self.handle_shadowed(peer, view, session, next, again);
            }
            Control::Hello(_)
            | Control::Refused { .. }
            | Control::Join(_)
            | Control::Shadow { .. }
            | Control::Copy { .. }
            | Control::Open(_)
            | Control::Rebuild { .. }
            | Control::Replay { .. }
            | Control::Close { .. }
            | Control::Cancel { .. }
            | Control::Probe { .. } => {
                self.refuse(peer, "expected a stage's message, a coordinator's came".to_owned());
            }
        }
    }

    fn handle_tail(&mut self, peer: Node, body: Bytes) {
        let tail = self.ring.whole().last().map(|member| member.peer);
        if tail != Some(peer) {
            return tracing::debug!(%peer, "a reply of a peer that is not the tail is dropped");
        }
        match codec::decode_data(body) {
            Ok(Data::Reply(reply)) => self.handle_reply(reply),
            Ok(Data::Frame(_)) => {
                self.refuse(peer, "expected a reply on the reply lane, its bytes are a frame".to_owned())
            }
            Err(error) => self.refuse(peer, error.to_string()),
        }
    }

    fn refuse(&mut self, peer: Node, reason: String) {
        tracing::warn!(%peer, %reason, "peer refused");
        self.greeter.refuse(peer);
        self.send(peer, &Control::Refused { reason: reason.clone() });
        self.link.disconnect(peer, &reason);
    }

    pub(super) fn send(&mut self, peer: Node, message: &Control) {
        match codec::encode_control(message) {
            Ok(body) => {
                if let Err(error) = self.queue(peer, Lane::Control, body) {
                    tracing::warn!(%peer, %error, "a control message can't be sent");
                }
            }
            Err(error) => tracing::error!(%peer, %error, "a control message can't be written"),
        }
    }

    /// Queues a body at a peer; where its queue is full, it waits here for a while.
    pub(super) fn queue(&mut self, to: Node, lane: Lane, body: Bytes) -> Result<(), LinkError> {
        if !self.outbox.holds(to, lane) {
            match self.link.try_send(to, lane, body.clone()) {
                Err(LinkError::Stalled { .. }) => {}
                sent => return sent,
            }
        }
        self.outbox.put(to, lane, body, clock::now());
        Ok(())
    }

    /// Tries again what waits for full queues.
    fn flush_outbox(&mut self) {
        let now = clock::now();
        while let Some((to, lane, body)) = self.outbox.poll_send(now) {
            let why = match self.link.try_send(to, lane, body) {
                Ok(()) => {
                    self.outbox.handle_sent(to, lane, now);
                    continue;
                }
                Err(LinkError::Stalled { .. }) => match self.outbox.handle_full(to, lane, now) {
                    None => continue,
                    Some(waited) => format!("it took nothing for {} ms", waited.as_millis()),
                },
                Err(error) => {
                    self.outbox.handle_gone(to);
                    error.to_string()
                }
            };
            self.ring.handle_fault(to, &why, now);
        }
    }

    pub(super) fn drain_ring(&mut self) {
        while let Some(output) = self.ring.poll_output() {
            match output {
                Output::Send { to, message } => self.send_logged(to, message),
                Output::Broken { peer, range, why } => {
                    tracing::warn!(%peer, %range, why, "the ring is broken");
                    self.heals.detected((peer, range), self.ring.view(), &why, clock::now());
                    // Published first: whoever hears of the loss finds the ring not ready.
                    self.publish();
                    self.handle_broken(peer, range, &why);
                }
                Output::Shadow { peer, of } => self.open_on_shadow(peer, of),
                Output::Whole { view } => {
                    tracing::info!(%view, "the ring is whole");
                    self.heals.whole(view, clock::now());
                    self.publish();
                    self.resume_sessions();
                    self.start_waiting();
                    self.probe_at = clock::now() + self.settings.probe_every;
                    self.probe_ring(clock::now());
                }
                Output::Waiting { why } => {
                    tracing::info!(why, "waiting");
                    self.leave_superseded();
                    self.publish();
                }
            }
        }
    }

    /// A token went round.
    pub(super) fn went_round(&self, now: Instant) {
        *self.shared.last_round.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// The ring has to prove itself anew.
    pub(super) fn forget_round(&self) {
        *self.shared.last_round.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Dials as a task that says where it failed.
fn spawn(link: &Arc<dyn Link>, failed: &mpsc::Sender<(PeerId, LinkError)>, Dial { peer, address }: Dial) {
    let (link, failed) = (Arc::clone(link), failed.clone());
    tokio::spawn(async move {
        if let Err(error) = link.dial(address).await {
            // A loop that ended needs no result.
            let _ = failed.send((peer, error)).await;
        }
    });
}
