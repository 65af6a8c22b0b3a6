//! The part of the loop that opens sessions on shadows, and sends final positions to the head's.

use crate::coordinator::run::Shell;
use crate::coordinator::session::{Phase, Session};
use crate::heal::copies::Copies;
use crate::ids::{Epoch, Node, Position, SessionId, TokenId, View};
use crate::proto::codec;
use crate::proto::control::Control;
use crate::proto::frame::FrameHead;
use crate::transport::Lane;

impl Shell {
    /// A stage became a shadow: it is told of every session that is open.
    pub(super) fn open_on_shadow(&mut self, peer: Node, of: Node) {
        if self.heads() == Some(of) {
            self.copies = Copies::default();
        }
        tracing::info!(%peer, %of, "a stage is shadowed");
        let view = self.ring.view();
        let goes_on = |session: &&Session| {
            let open = matches!(session.phase, Phase::Running | Phase::Rebuilding(_) | Phase::Localizing { .. });
            open && session.open.view == view && !session.readers.probe
        };
        let opens: Vec<Control> =
            self.sessions.values().filter(goes_on).map(|session| Control::Open(session.open.clone())).collect();
        for open in opens {
            self.send(peer, &open);
        }
        self.publish();
    }

    /// A session is opened on every shadow.
    pub(super) fn open_on_shadows(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id).filter(|session| !session.readers.probe) else { return };
        let open = Control::Open(session.open.clone());
        let shadows: Vec<Node> = self.ring.pairs().map(|(shadow, _)| shadow).collect();
        for peer in shadows {
            self.send(peer, &open);
        }
    }

    /// The head's shadow says how far it came.
    pub(super) fn handle_shadowed(&mut self, peer: Node, view: View, id: SessionId, next: Position, again: bool) {
        if view == self.ring.view() && self.heads_shadow() == Some(peer) {
            self.copies.handle_shadowed(id, next, again);
            self.send_copies();
        }
    }

    /// More of a session may be final.
    pub(super) fn copy(&mut self, id: SessionId) {
        self.copies.handle_grown(id);
        self.send_copies();
    }

    fn heads(&self) -> Option<Node> {
        self.ring.whole().first().map(|member| member.peer)
    }

    fn heads_shadow(&self) -> Option<Node> {
        self.heads().and_then(|head| self.ring.shadowed_by(head))
    }

    /// Sends what the head's shadow lacks, and what there is room for.
    fn send_copies(&mut self) {
        if self.copies.is_idle() {
            return;
        }
        let Some(to) = self.heads_shadow() else { return };
        let view = self.ring.view();
        let sessions = &self.sessions;
        let finals = |id| sessions.get(&id).filter(|session| session.open.view == view).map(Session::final_to);
        while let Some((id, range)) = self.copies.poll(finals) {
            let Some(session) = sessions.get(&id) else { return };
            let ids = session.ids(range.start, range.end);
            let head = FrameHead {
                view,
                session: id,
                epoch: Epoch(0),
                start: Position(0),
                pos: range.start,
                len: range.end.0 - range.start.0,
                settled: Position(0),
                answer_from: Position(session.open.prompt_len.saturating_sub(1)),
            };
            let body = codec::encode_frame(&head, &ids, &[]);
            let sent = body.is_ok_and(|body| self.link.try_send(to, Lane::Data, body).is_ok());
            self.copies.handle_sent(id, range.end, sent);
        }
    }
}

impl Session {
    /// Positions below are final, and what is fed there is known.
    fn final_to(&self) -> Position {
        let known = self.request.prompt.len() + self.committed.len();
        let known = Position(u32::try_from(known).unwrap_or(u32::MAX));
        Position(self.open.prompt_len).max(self.round.floor()).min(known)
    }

    /// What is fed at the positions `from..to`, which are final.
    fn ids(&self, from: Position, to: Position) -> Vec<TokenId> {
        let all = self.request.prompt.iter().chain(&self.committed);
        all.skip(from.0 as usize).take((to.0 - from.0) as usize).copied().collect()
    }
}
