//! One pass over the engine: payloads to hidden states, the layers, and bodies for the next hop.

use bytes::Bytes;
use half::bf16;

use crate::engine::wire::Wire;
use crate::engine::{Chunk, Engine, Output};
use crate::ids::SessionId;
use crate::node::session::{Session, Work};
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

    /// Bodies for the next hop, one per frame.
    pub(super) fn compute(&mut self, id: SessionId, session: &mut Session, work: &Work) -> Result<Vec<Bytes>, String> {
        let engine = self.engine.as_mut();
        let (hc, dim) = (engine.facts().hc, engine.facts().dim);
        let range = engine.facts().range;
        let wire = |layer| Wire::new(session.open.encoding_at(layer), hc, dim);
        let (wire_in, wire_out) = (wire(range.lo()), wire(range.hi()));
        let hidden = if engine.facts().is_head() {
            for payload in &work.payloads {
                if !payload.is_empty() {
                    return Err(format!(
                        "{} payload bytes came to the head, which takes token ids alone",
                        payload.len()
                    ));
                }
            }
            None
        } else {
            decode_payloads(work, &wire_in, &mut self.hidden)?;
            Some(&self.hidden[..])
        };
        let chunk = Chunk { session: id, pos: work.pos(), ids: &work.ids, hidden, logits_from: work.logits_from() };
        engine.forward(&[chunk], &mut self.output).map_err(|error| error.to_string())?;
        match &mut session.tail {
            Some(tail) => {
                let replies = tail.answer(engine, &work.heads, &work.ids, &self.output.logits);
                let replies = replies.map_err(|error| error.to_string())?;
                replies.iter().map(|reply| codec::encode_reply(reply).map_err(|error| error.to_string())).collect()
            }
            None => encode_frames(work, &wire_out, hc * dim, &self.output.hidden),
        }
    }
}

fn decode_payloads(work: &Work, wire: &Wire, hidden: &mut Vec<bf16>) -> Result<(), String> {
    hidden.clear();
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
