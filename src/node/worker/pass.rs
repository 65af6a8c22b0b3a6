//! One pass over the engine: payloads to hidden states, the layers, and bodies for the next hop.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use half::bf16;

use crate::engine::wire::Wire;
use crate::engine::{Chunk, Engine, EngineFacts, Output};
use crate::ids::SessionId;
use crate::node::session::{Session, Work};
use crate::node::worker::{Computed, Part};
use crate::proto::codec;
use crate::proto::control::Open;

/// The engine and the space that its passes need.
pub(super) struct Desk {
    pub(super) engine: Box<dyn Engine>,
    hidden: Vec<bf16>,
    output: Output,
}

impl Desk {
    pub(super) fn new(engine: Box<dyn Engine>) -> Self {
        Self { engine, hidden: Vec::new(), output: Output::default() }
    }

    /// Bytes of a position that comes to this stage in a session; 0 at the head, where ids come alone.
    pub(super) fn input_bytes(&self, open: &Open) -> usize {
        let facts = self.engine.facts();
        if facts.is_head() {
            return 0;
        }
        open.encoding_at(facts.range.lo()).position_bytes(facts.hc, facts.dim)
    }

    /// What comes of each part, all of them in one pass of the engine. What is wrong with one of them is its
    /// own: where the engine refuses them together, each is computed alone.
    pub(super) fn compute(&mut self, sessions: &mut BTreeMap<SessionId, Session>, parts: &[Part]) -> Vec<Computed> {
        let Self { engine, hidden, output } = self;
        let engine = engine.as_mut();
        hidden.clear();
        let taken: Vec<Result<Range<usize>, String>> =
            parts.iter().map(|part| take_in(engine.facts(), sessions.get(&part.session), &part.work, hidden)).collect();
        let is_head = engine.facts().is_head();
        let good = parts.iter().zip(&taken).filter_map(|(part, taken)| Some((part, taken.as_ref().ok()?)));
        let chunks: Vec<Chunk<'_>> =
            good.map(|(part, taken)| part.chunk((!is_head).then(|| &hidden[taken.clone()]))).collect();
        let together = chunks.len() > 1 && engine.forward(&chunks, output).is_ok();
        let mut chunks = chunks.into_iter();
        let mut rows = Rows::default();
        let finish = |(part, taken): (&Part, Result<Range<usize>, String>)| {
            taken?;
            let chunk = chunks.next().ok_or("nothing was taken in")?;
            let session = sessions.get_mut(&part.session).ok_or("the session was closed")?;
            if !together {
                engine.forward(&[chunk], output).map_err(|error| error.to_string())?;
                rows = Rows::default();
            }
            rows.finish(engine, session, &part.work, output)
        };
        parts.iter().zip(taken).map(finish).collect()
    }
}

impl Part {
    fn chunk<'a>(&'a self, hidden: Option<&'a [bf16]>) -> Chunk<'a> {
        let work = &self.work;
        Chunk { session: self.session, pos: work.pos(), ids: &work.ids, hidden, logits_from: work.logits_from() }
    }
}

/// Rows of the output that were made into bodies.
#[derive(Default)]
struct Rows {
    hidden: usize,
    logits: usize,
}

impl Rows {
    /// Bodies for the next hop of the frames behind.
    fn finish(&mut self, engine: &mut dyn Engine, session: &mut Session, work: &Work, output: &Output) -> Computed {
        let facts = engine.facts();
        let (row, vocab) = (facts.hc * facts.dim, facts.vocab);
        match &mut session.tail {
            Some(tail) => {
                let end = work.pos().0 as usize + work.ids.len();
                let from = self.logits;
                self.logits += end.saturating_sub(work.logits_from().max(work.pos()).0 as usize);
                let logits =
                    output.logits.get(from * vocab..self.logits * vocab).ok_or("the engine gave less logits")?;
                let replies = tail.answer(engine, &work.heads, &work.ids, logits).map_err(|error| error.to_string())?;
                replies.iter().map(|reply| codec::encode_reply(reply).map_err(|error| error.to_string())).collect()
            }
            None => {
                let wire = Wire::new(session.open.encoding_at(facts.range.hi()), facts.hc, facts.dim);
                let from = self.hidden;
                self.hidden += work.ids.len();
                let hidden = output.hidden.get(from * row..self.hidden * row).ok_or("the engine gave less results")?;
                encode_frames(work, &wire, row, hidden)
            }
        }
    }
}

/// Adds the hidden states of a part to `hidden`; says where they are. At the head there are none.
fn take_in(
    facts: &EngineFacts,
    session: Option<&Session>,
    work: &Work,
    hidden: &mut Vec<bf16>,
) -> Result<Range<usize>, String> {
    let session = session.ok_or("the session was closed")?;
    let from = hidden.len();
    if facts.is_head() {
        match work.payloads.iter().find(|payload| !payload.is_empty()) {
            None => return Ok(from..from),
            Some(payload) => {
                let got = payload.len();
                return Err(format!("{got} payload bytes came to the head, which takes token ids alone"));
            }
        }
    }
    let wire = Wire::new(session.open.encoding_at(facts.range.lo()), facts.hc, facts.dim);
    match decode_payloads(work, &wire, hidden) {
        Ok(()) => Ok(from..hidden.len()),
        Err(reason) => {
            hidden.truncate(from);
            Err(reason)
        }
    }
}

fn decode_payloads(work: &Work, wire: &Wire, hidden: &mut Vec<bf16>) -> Result<(), String> {
    for (head, payload) in work.heads.iter().zip(&work.payloads) {
        let expected = head.len as usize * wire.position_bytes();
        if payload.len() != expected {
            return Err(format!(
                "frame of {} positions with {} payload bytes, expected {expected}",
                head.len,
                payload.len()
            ));
        }
        wire.decode(head.pos, payload, hidden).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn encode_frames(work: &Work, wire: &Wire, row: usize, hidden: &[bf16]) -> Result<Vec<Bytes>, String> {
    let mut bodies = Vec::with_capacity(work.heads.len());
    let mut at = 0;
    for head in &work.heads {
        let len = head.len as usize;
        let ids = &work.ids[at..at + len];
        let mut buffer =
            codec::FrameBuffer::begin(head, ids, len * wire.position_bytes()).map_err(|error| error.to_string())?;
        let values = &hidden[at * row..(at + len) * row];
        wire.encode_into(head.pos, values, buffer.payload_mut()).map_err(|error| error.to_string())?;
        bodies.push(buffer.finish());
        at += len;
    }
    Ok(bodies)
}
