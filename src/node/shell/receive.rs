//! What comes over the link: who is heard, and to whom each message goes.
//!
//! Nothing is computed here. A peer that says what it may not say, or more than it may, is cut off with
//! the reason.

use std::sync::atomic::Ordering;
use std::sync::mpsc::TrySendError;

use bytes::Bytes;

use crate::clock;
use crate::ids::Node;
use crate::node::leave::LEAVE_SEQ;
use crate::node::serve::{ServeError, StageEvent};
use crate::node::shell::Shell;
use crate::node::worker::{self, Input};
use crate::proto::codec::{self, Data};
use crate::proto::control::{Control, Role, StageReport};
use crate::proto::greeter::{Early, Greeting};
use crate::proto::heartbeats::ASIDE;
use crate::transport::{Lane, LinkEvent};

impl Shell {
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

    pub(super) fn handle_gone(&mut self, peer: Node, reason: &str) {
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
    pub(super) fn hand_over(&mut self, peer: Node, input: Input) -> bool {
        match self.inputs.try_send(input) {
            Ok(()) => return true,
            Err(TrySendError::Full(_)) => {
                self.refuse(peer, format!("more than {} messages wait for the engine", worker::INPUTS_MAX));
            }
            Err(TrySendError::Disconnected(_)) => tracing::error!("the engine's thread has ended"),
        }
        false
    }

    pub(super) fn refuse(&mut self, peer: Node, reason: String) {
        tracing::warn!(%peer, %reason, "peer refused");
        self.greeter.refuse(peer);
        self.send(peer, &Control::Refused { reason: reason.clone() });
        self.link.disconnect(peer, &reason);
    }

    pub(super) fn send(&self, peer: Node, message: &Control) {
        match codec::encode_control(message) {
            Ok(body) => {
                if let Err(error) = self.link.try_send(peer, Lane::Control, body) {
                    tracing::warn!(%peer, %error, "a control message can't be sent");
                }
            }
            Err(error) => tracing::error!(%peer, %error, "a control message can't be written"),
        }
    }
}
