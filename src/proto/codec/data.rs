//! The data lane: frames towards the tail and replies back, in a fixed layout of our own.
//!
//! A frame is one buffer: header, ids, payload. A sender fills the payload in place
//! ([`FrameBuffer`]), a receiver gets it as a slice of the bytes that came.

use bytes::Bytes;

use super::read::Reader;
use super::{
    DRAFT_TOKENS_MAX, DecodeError, EncodeError, FRAME_BYTES_MAX, FRAME_IDS_MAX, TOP_TOKENS_MAX, view_in_range,
};
use crate::ids::{Epoch, Position, SessionId, TokenId, VIEW_MAX, View};
use crate::proto::control::PROTOCOL_VERSION;
use crate::proto::frame::{Answer, DraftBlock, Frame, FrameHead, Reply, Scores};

/// First bytes of every message on the data lane.
pub const DATA_MAGIC: [u8; 4] = *b"RFDT";

/// Bytes of a frame in front of its ids.
pub const FRAME_HEADER_BYTES: usize = 52;

/// Bytes of a reply in front of its answers.
pub const REPLY_HEADER_BYTES: usize = 44;

const KIND_FRAME: u8 = 1;
const KIND_REPLY: u8 = 2;

/// Draft count that says: no block.
const NO_DRAFT: u32 = u32::MAX;

/// Bits of an answer's flags.
const FLAG_SCORES: u8 = 1;
const FLAG_FED: u8 = 2;
const FLAG_PICKED: u8 = 4;

/// Fewest bytes of an answer: token, flags, zero, number of top tokens.
const ANSWER_BYTES_MIN: usize = 8;
const TOP_BYTES: usize = 8;

/// A message of the data lane.
#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    /// Towards the tail.
    Frame(Frame),
    /// Back to the coordinator.
    Reply(Reply),
}

/// Bytes of a frame of `ids` positions without its payload.
#[must_use]
pub fn frame_header_bytes(ids: usize) -> usize {
    FRAME_HEADER_BYTES + 4 * ids
}

/// A frame under construction: header and ids are written, the payload is filled in place.
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    payload_at: usize,
}

impl FrameBuffer {
    /// Allocates the whole frame once and writes header and ids; the payload is zero.
    ///
    /// # Errors
    /// [`EncodeError`] where head and ids disagree or the frame is above its caps.
    pub fn begin(head: &FrameHead, ids: &[TokenId], payload_len: usize) -> Result<Self, EncodeError> {
        let total = frame_bytes(head, ids, payload_len)?;
        let mut bytes = vec![0; total];
        let payload_at = frame_header_bytes(ids.len());
        let (front, _) = bytes.split_at_mut(payload_at);
        let mut at = Writer { out: front };
        write_frame_front(&mut at, head, ids, payload_len as u32);
        Ok(Self { bytes, payload_at })
    }

    /// The payload, to be filled.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.payload_at..]
    }

    /// The finished frame, not copied.
    #[must_use]
    pub fn finish(self) -> Bytes {
        Bytes::from(self.bytes)
    }
}

/// Writes a frame whose payload exists already.
///
/// # Errors
/// [`EncodeError`] where head and ids disagree or the frame is above its caps.
pub fn encode_frame(head: &FrameHead, ids: &[TokenId], payload: &[u8]) -> Result<Bytes, EncodeError> {
    let total = frame_bytes(head, ids, payload.len())?;
    let mut bytes = Vec::with_capacity(total);
    bytes.resize(frame_header_bytes(ids.len()), 0);
    write_frame_front(&mut Writer { out: &mut bytes }, head, ids, payload.len() as u32);
    bytes.extend_from_slice(payload);
    Ok(Bytes::from(bytes))
}

/// Checks a frame against its caps and returns its size.
fn frame_bytes(head: &FrameHead, ids: &[TokenId], payload_len: usize) -> Result<usize, EncodeError> {
    if ids.is_empty() || head.len as usize != ids.len() {
        return Err(EncodeError::Ids { len: head.len, ids: ids.len() });
    }
    if ids.len() > FRAME_IDS_MAX as usize {
        return Err(EncodeError::TooMany {
            what: "positions in a frame",
            got: ids.len(),
            limit: FRAME_IDS_MAX as usize,
        });
    }
    writable(head.view)?;
    let total = frame_header_bytes(ids.len()).saturating_add(payload_len);
    if total > FRAME_BYTES_MAX as usize {
        return Err(EncodeError::TooLong { got: total, limit: FRAME_BYTES_MAX });
    }
    Ok(total)
}

fn writable(view: View) -> Result<(), EncodeError> {
    if view <= VIEW_MAX { Ok(()) } else { Err(EncodeError::View { got: view }) }
}

/// Fills a buffer of known size from the front.
struct Writer<'a> {
    out: &'a mut [u8],
}

impl Writer<'_> {
    fn put<const N: usize>(&mut self, value: [u8; N]) {
        let out = std::mem::take(&mut self.out);
        let (head, rest) = out.split_at_mut(N);
        head.copy_from_slice(&value);
        self.out = rest;
    }

    fn u32(&mut self, value: u32) {
        self.put(value.to_le_bytes());
    }
}

fn write_frame_front(at: &mut Writer<'_>, head: &FrameHead, ids: &[TokenId], payload_len: u32) {
    at.put(DATA_MAGIC);
    at.put(PROTOCOL_VERSION.to_le_bytes());
    at.put([KIND_FRAME, 0]);
    at.put(head.view.0.to_le_bytes());
    at.put(head.session.0.to_le_bytes());
    at.u32(head.epoch.0);
    at.u32(head.start.0);
    at.u32(head.pos.0);
    at.u32(head.settled.0);
    at.u32(head.answer_from.0);
    at.u32(head.len);
    at.u32(payload_len);
    for id in ids {
        at.u32(id.0);
    }
}

/// Writes a reply.
///
/// # Errors
/// [`EncodeError`] where a list is above its cap, a number is not finite or a draft block has not
/// one confidence per token.
pub fn encode_reply(reply: &Reply) -> Result<Bytes, EncodeError> {
    writable(reply.view)?;
    let count = list_len("answers", reply.answers.len(), FRAME_IDS_MAX)?;
    let drafts = match &reply.draft {
        None => NO_DRAFT,
        Some(block) if block.tokens.len() != block.confidence.len() => {
            return Err(EncodeError::Draft { tokens: block.tokens.len(), confidence: block.confidence.len() });
        }
        Some(block) => list_len("draft tokens", block.tokens.len(), DRAFT_TOKENS_MAX)?,
    };
    let mut out = Vec::with_capacity(reply_bytes(reply));
    out.extend_from_slice(&DATA_MAGIC);
    out.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    out.extend_from_slice(&[KIND_REPLY, 0]);
    out.extend_from_slice(&reply.view.0.to_le_bytes());
    out.extend_from_slice(&reply.session.0.to_le_bytes());
    for value in [reply.epoch.0, reply.pos.0, reply.len, count, drafts] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    for answer in &reply.answers {
        write_answer(&mut out, answer)?;
    }
    if let Some(block) = &reply.draft {
        for token in &block.tokens {
            out.extend_from_slice(&token.0.to_le_bytes());
        }
        for &confidence in &block.confidence {
            write_f32(&mut out, "draft confidence", confidence)?;
        }
    }
    if out.len() > FRAME_BYTES_MAX as usize {
        return Err(EncodeError::TooLong { got: out.len(), limit: FRAME_BYTES_MAX });
    }
    Ok(Bytes::from(out))
}

fn reply_bytes(reply: &Reply) -> usize {
    let answers: usize = reply
        .answers
        .iter()
        .map(|answer| match &answer.scores {
            None => ANSWER_BYTES_MIN,
            Some(scores) => ANSWER_BYTES_MIN + 8 + TOP_BYTES * scores.top.len(),
        })
        .sum();
    REPLY_HEADER_BYTES + answers + reply.draft.as_ref().map_or(0, |block| 8 * block.tokens.len())
}

fn list_len(what: &'static str, got: usize, limit: u32) -> Result<u32, EncodeError> {
    if got > limit as usize {
        return Err(EncodeError::TooMany { what, got, limit: limit as usize });
    }
    Ok(got as u32)
}

fn write_f32(out: &mut Vec<u8>, what: &'static str, value: f32) -> Result<(), EncodeError> {
    if !value.is_finite() {
        return Err(EncodeError::NotFinite { what, got: value.to_string() });
    }
    out.extend_from_slice(&value.to_le_bytes());
    Ok(())
}

fn write_answer(out: &mut Vec<u8>, answer: &Answer) -> Result<(), EncodeError> {
    out.extend_from_slice(&answer.token.0.to_le_bytes());
    let Some(scores) = &answer.scores else {
        out.extend_from_slice(&[0; 4]);
        return Ok(());
    };
    let flag = |value: Option<f32>, flag: u8| if value.is_some() { flag } else { 0 };
    let flags = FLAG_SCORES | flag(scores.fed, FLAG_FED) | flag(scores.picked, FLAG_PICKED);
    let top = list_len("top tokens", scores.top.len(), u32::from(TOP_TOKENS_MAX))? as u16;
    out.extend_from_slice(&[flags, 0]);
    out.extend_from_slice(&top.to_le_bytes());
    if let Some(fed) = scores.fed {
        write_f32(out, "log-probability of the fed token", fed)?;
    }
    if let Some(picked) = scores.picked {
        write_f32(out, "log-probability of the answered token", picked)?;
    }
    for &(token, logprob) in &scores.top {
        out.extend_from_slice(&token.0.to_le_bytes());
        write_f32(out, "log-probability of a top token", logprob)?;
    }
    Ok(())
}

/// Reads a message of the data lane; a frame's payload is a slice of `bytes`.
///
/// # Errors
/// [`DecodeError`]; nothing was allocated beyond what `bytes` can fill.
pub fn decode_data(bytes: Bytes) -> Result<Data, DecodeError> {
    if bytes.len() > FRAME_BYTES_MAX as usize {
        return Err(DecodeError::TooLong { got: bytes.len(), limit: FRAME_BYTES_MAX });
    }
    let mut from = Reader::new(&bytes);
    let magic = from.bytes4("magic")?;
    if magic != DATA_MAGIC {
        return Err(DecodeError::Magic { expected: DATA_MAGIC, got: magic });
    }
    let version = from.u16("version")?;
    if version != PROTOCOL_VERSION {
        return Err(DecodeError::Version { ours: PROTOCOL_VERSION, theirs: version });
    }
    let kind = from.u8("kind")?;
    zero("byte after the kind", from.u8("byte after the kind")?)?;
    match kind {
        KIND_FRAME => decode_frame(&bytes, from).map(Data::Frame),
        KIND_REPLY => decode_reply(from).map(Data::Reply),
        got => Err(DecodeError::Kind { got }),
    }
}

fn zero(what: &'static str, got: u8) -> Result<(), DecodeError> {
    if got == 0 { Ok(()) } else { Err(DecodeError::Reserved { what, got: u32::from(got) }) }
}

fn span(pos: Position, len: u32) -> Result<(), DecodeError> {
    if len == 0 || pos.0.checked_add(len).is_none() { Err(DecodeError::Span { pos, len }) } else { Ok(()) }
}

fn decode_frame(bytes: &Bytes, mut from: Reader<'_>) -> Result<Frame, DecodeError> {
    let head = FrameHead {
        view: View(from.u64("view")?),
        session: SessionId(from.u64("session")?),
        epoch: Epoch(from.u32("epoch")?),
        start: Position(from.u32("start")?),
        pos: Position(from.u32("pos")?),
        settled: Position(from.u32("settled")?),
        answer_from: Position(from.u32("answer_from")?),
        len: from.u32("len")?,
    };
    let payload_len = from.u32("payload length")? as usize;
    view_in_range("view", head.view)?;
    span(head.pos, head.len)?;
    let count = from.room("positions in a frame", head.len, 4, FRAME_IDS_MAX)?;
    let ids = from.take(4 * count, "token ids")?;
    from.take(payload_len, "payload")?;
    from.end()?;
    let ids = ids.as_chunks::<4>().0.iter().map(|id| TokenId(u32::from_le_bytes(*id))).collect();
    Ok(Frame { head, ids, payload: bytes.slice(bytes.len() - payload_len..) })
}

fn decode_reply(mut from: Reader<'_>) -> Result<Reply, DecodeError> {
    let view = View(from.u64("view")?);
    let session = SessionId(from.u64("session")?);
    let epoch = Epoch(from.u32("epoch")?);
    let pos = Position(from.u32("pos")?);
    let len = from.u32("len")?;
    let answers = from.u32("number of answers")?;
    let drafts = from.u32("number of drafts")?;
    view_in_range("view", view)?;
    span(pos, len)?;
    let count = from.room("answers", answers, ANSWER_BYTES_MIN, FRAME_IDS_MAX)?;
    let mut list = Vec::with_capacity(count);
    for _ in 0..count {
        list.push(decode_answer(&mut from)?);
    }
    let draft = if drafts == NO_DRAFT { None } else { Some(decode_draft(&mut from, drafts)?) };
    from.end()?;
    Ok(Reply { view, session, epoch, pos, len, answers: list, draft })
}

fn decode_answer(from: &mut Reader<'_>) -> Result<Answer, DecodeError> {
    let token = TokenId(from.u32("answer")?);
    let flags = from.u8("answer flags")?;
    zero("byte after the answer flags", from.u8("answer flags")?)?;
    let top = u32::from(from.u16("number of top tokens")?);
    match flags {
        0 if top == 0 => return Ok(Answer { token, scores: None }),
        _ if flags & FLAG_SCORES != 0 && flags & !(FLAG_SCORES | FLAG_FED | FLAG_PICKED) == 0 => {}
        _ => return Err(DecodeError::Reserved { what: "answer flags", got: u32::from(flags) }),
    }
    let mut number = |flag: u8, what: &'static str| (flags & flag != 0).then(|| from.f32(what)).transpose();
    let fed = number(FLAG_FED, "log-probability of the fed token")?;
    let picked = number(FLAG_PICKED, "log-probability of the answered token")?;
    let count = from.room("top tokens", top, TOP_BYTES, u32::from(TOP_TOKENS_MAX))?;
    let mut list = Vec::with_capacity(count);
    for _ in 0..count {
        list.push((TokenId(from.u32("top token")?), from.f32("log-probability of a top token")?));
    }
    Ok(Answer { token, scores: Some(Scores { fed, picked, top: list }) })
}

fn decode_draft(from: &mut Reader<'_>, drafts: u32) -> Result<DraftBlock, DecodeError> {
    let count = from.room("draft tokens", drafts, 8, DRAFT_TOKENS_MAX)?;
    let mut tokens = Vec::with_capacity(count);
    for _ in 0..count {
        tokens.push(TokenId(from.u32("draft token")?));
    }
    let mut confidence = Vec::with_capacity(count);
    for _ in 0..count {
        confidence.push(from.f32("draft confidence")?);
    }
    Ok(DraftBlock { tokens, confidence })
}
