//! The control lane: a header that never moves, then a postcard body.
//!
//! Owns the bounds of every field of a [`Control`]: what is refused when it comes is refused when it
//! is sent, too. The first six bytes (magic, version) stand still in every version of the protocol,
//! so a peer of another version gets a readable refusal whatever its hello looks like.

use std::fmt::Display;

use bytes::Bytes;

use super::{CONTROL_BYTES_MAX, DRAFT_TOKENS_MAX, DecodeError, EncodeError, TOP_TOKENS_MAX, view_in_range};
use crate::ids::View;
use crate::proto::codec::read::Reader;
use crate::proto::control::{Control, Join, Offer, Open, PROTOCOL_VERSION, Rebuild, Sampling, StageReport};

/// First bytes of every control message.
pub const CONTROL_MAGIC: [u8; 4] = *b"RFCT";

/// Bytes in front of the postcard body: magic and version.
pub const CONTROL_HEADER_BYTES: usize = 6;

/// Longest text in a control message, in bytes.
const TEXT_BYTES_MAX: usize = 4096;
/// Most addresses of one peer.
pub const ADDRESSES_MAX: usize = 16;
/// Most encodings in an offer.
const ENCODINGS_MAX: usize = 8;
/// Most boundaries of a session.
const BOUNDARIES_MAX: usize = 1024;
/// Most digests in a message.
pub const DIGESTS_MAX: usize = 16_384;
/// Most sessions in a report.
pub const SESSIONS_MAX: usize = 4096;
/// Highest temperature.
const TEMPERATURE_MAX: f32 = 100.0;

/// The text of `reason`, cut so that it fits into a control message.
#[must_use]
pub fn bounded_reason(reason: &dyn Display) -> String {
    const MARK: &str = "…";
    let mut text = reason.to_string();
    if text.len() > TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX - MARK.len()));
        text.push_str(MARK);
    }
    text
}

/// Writes a control message.
///
/// # Errors
/// [`EncodeError`] where a field is out of the bounds that the peer checks.
pub fn encode_control(message: &Control) -> Result<Bytes, EncodeError> {
    check(message).map_err(|why| EncodeError::Body { why: why.to_string() })?;
    let mut out = Vec::with_capacity(64);
    out.extend_from_slice(&CONTROL_MAGIC);
    out.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    let out = postcard::to_extend(message, out).map_err(|why| EncodeError::Body { why: why.to_string() })?;
    if out.len() > CONTROL_BYTES_MAX as usize {
        return Err(EncodeError::TooLong { got: out.len(), limit: CONTROL_BYTES_MAX });
    }
    Ok(Bytes::from(out))
}

/// Reads a control message.
///
/// # Errors
/// [`DecodeError`]; [`DecodeError::Version`] comes before anything of the body is looked at.
pub fn decode_control(bytes: &[u8]) -> Result<Control, DecodeError> {
    if bytes.len() > CONTROL_BYTES_MAX as usize {
        return Err(DecodeError::TooLong { got: bytes.len(), limit: CONTROL_BYTES_MAX });
    }
    let mut from = Reader::new(bytes);
    let magic = from.bytes4("magic")?;
    if magic != CONTROL_MAGIC {
        return Err(DecodeError::Magic { expected: CONTROL_MAGIC, got: magic });
    }
    let version = from.u16("version")?;
    if version != PROTOCOL_VERSION {
        return Err(DecodeError::Version { ours: PROTOCOL_VERSION, theirs: version });
    }
    let body = from.take(from.left(), "body")?;
    let (message, rest) =
        postcard::take_from_bytes(body).map_err(|why| DecodeError::Body { why: bounded_reason(&why) })?;
    Reader::new(rest).end()?;
    check(&message)?;
    Ok(message)
}

/// Checks every bound of a message; one place for both directions.
fn check(message: &Control) -> Result<(), DecodeError> {
    views(message).into_iter().flatten().try_for_each(|(field, view)| view_in_range(field, view))?;
    match message {
        Control::Hello(hello) => {
            text("hello.numerics", &hello.numerics)?;
            text("hello.software", &hello.software)
        }
        Control::Refused { reason }
        | Control::JoinRefused { reason, .. }
        | Control::Failed { reason, .. }
        | Control::ReplayFailed { reason, .. }
        | Control::NeighbourLost { reason, .. } => text("reason", reason),
        Control::Offer(offer) => check_offer(offer),
        Control::Join(join) => check_join(join),
        Control::Open(open) => check_open(open),
        Control::Report { report, .. } => check_report(report),
        Control::Opened { kept: Some(kept), .. } => {
            count("kept.inputs", kept.inputs.list.len(), DIGESTS_MAX)?;
            count("kept.outputs", kept.outputs.list.len(), DIGESTS_MAX)
        }
        Control::Rebuilt { outputs, .. } => count("rebuilt.outputs", outputs.list.len(), DIGESTS_MAX),
        Control::Rebuild { rebuild, .. } => check_rebuild(rebuild),
        Control::Replay { from, to, .. } => in_range("replay.to", to, from < to, "above replay.from"),
        Control::Copy { to: Some(to), .. } => addresses("copy.addresses", &to.addresses),
        Control::Joined { .. }
        | Control::Shadow { .. }
        | Control::Copy { to: None, .. }
        | Control::Shadowed { .. }
        | Control::Opened { kept: None, .. }
        | Control::Close { .. }
        | Control::Closed { .. }
        | Control::Cancel { .. }
        | Control::Probe { .. }
        | Control::Heartbeat { .. }
        | Control::HeartbeatAck { .. }
        | Control::Draining => Ok(()),
    }
}

/// Every view of a message.
fn views(message: &Control) -> [Option<(&'static str, View)>; 2] {
    let one = |field, view: View| [Some((field, view)), None];
    match message {
        Control::Offer(offer) => one("offer.view", offer.view),
        Control::Join(join) => one("join.view", join.view),
        Control::Open(open) => one("open.view", open.view),
        Control::Report { report, .. } => one("report.view", report.view),
        Control::JoinRefused { view, current, .. } => [Some(("view", *view)), Some(("current view", *current))],
        Control::Joined { view }
        | Control::Opened { view, .. }
        | Control::ReplayFailed { view, .. }
        | Control::Rebuilt { view, .. }
        | Control::Failed { view, .. }
        | Control::Shadow { view, .. }
        | Control::Copy { view, .. }
        | Control::Shadowed { view, .. }
        | Control::NeighbourLost { view, .. } => one("view", *view),
        Control::Hello(_)
        | Control::Refused { .. }
        | Control::Rebuild { .. }
        | Control::Replay { .. }
        | Control::Close { .. }
        | Control::Closed { .. }
        | Control::Cancel { .. }
        | Control::Probe { .. }
        | Control::Heartbeat { .. }
        | Control::HeartbeatAck { .. }
        | Control::Draining => [None, None],
    }
}

fn check_offer(offer: &Offer) -> Result<(), DecodeError> {
    text("offer.device", &offer.device)?;
    at_most("offer.draft_block", u64::from(offer.draft_block), u64::from(DRAFT_TOKENS_MAX))?;
    count("offer.encodings", offer.encodings.len(), ENCODINGS_MAX)?;
    addresses("offer.addresses", &offer.addresses)
}

fn check_join(join: &Join) -> Result<(), DecodeError> {
    for neighbour in [&join.predecessor, &join.successor].into_iter().flatten() {
        addresses("join.addresses", &neighbour.addresses)?;
    }
    Ok(())
}

fn check_open(open: &Open) -> Result<(), DecodeError> {
    in_range("open.prompt_len", open.prompt_len, open.prompt_len >= 1, "at least 1")?;
    let enough = open.positions >= open.prompt_len;
    in_range("open.positions", open.positions, enough, "at least the prompt's length")?;
    in_range("open.reach", open.reach, open.reach >= 1, "at least 1")?;
    count("open.boundaries", open.boundaries.len(), BOUNDARIES_MAX)?;
    let ascending = open.boundaries.is_sorted_by(|a, b| a < b);
    in_range("open.boundaries", format_args!("{:?}", open.boundaries), ascending, "ascending layers")?;
    at_most("open.draft_block", u64::from(open.draft_block), u64::from(DRAFT_TOKENS_MAX))?;
    at_most("open.want.scores", u64::from(open.want.scores.unwrap_or(0)), u64::from(TOP_TOKENS_MAX))?;
    at_most("open.want.logprobs", u64::from(open.want.logprobs.unwrap_or(0)), u64::from(TOP_TOKENS_MAX))?;
    let one = open.want.scores.is_none() || open.want.logprobs.is_none();
    in_range("open.want", format_args!("{:?}", open.want), one, "scores or logprobs")?;
    check_sampling(&open.sampling)
}

fn check_rebuild(rebuild: &Rebuild) -> Result<(), DecodeError> {
    let Rebuild { from, history, forward_from, .. } = *rebuild;
    in_range("rebuild.from", from, from <= history, "at most rebuild.history")?;
    in_range("rebuild.forward_from", forward_from, forward_from <= history, "at most rebuild.history")
}

fn check_sampling(sampling: &Sampling) -> Result<(), DecodeError> {
    // A range holds no NaN.
    let heat = sampling.temperature;
    in_range("sampling.temperature", heat, (0.0..=TEMPERATURE_MAX).contains(&heat), "0 to 100")?;
    let mass = sampling.top_p;
    in_range("sampling.top_p", mass, mass > 0.0 && mass <= 1.0, "above 0, at most 1")?;
    let least = sampling.min_p;
    in_range("sampling.min_p", least, (0.0..=1.0).contains(&least), "0 to 1")
}

fn check_report(report: &StageReport) -> Result<(), DecodeError> {
    count("report.sessions", report.sessions.len(), SESSIONS_MAX)
}

fn addresses(field: &'static str, list: &[String]) -> Result<(), DecodeError> {
    count(field, list.len(), ADDRESSES_MAX)?;
    list.iter().try_for_each(|address| text(field, address))
}

fn text(field: &'static str, value: &str) -> Result<(), DecodeError> {
    count(field, value.len(), TEXT_BYTES_MAX)
}

fn count(what: &'static str, got: usize, limit: usize) -> Result<(), DecodeError> {
    at_most(what, got as u64, limit as u64)
}

fn at_most(what: &'static str, got: u64, limit: u64) -> Result<(), DecodeError> {
    if got <= limit { Ok(()) } else { Err(DecodeError::TooMany { what, got, limit }) }
}

fn in_range(field: &'static str, got: impl Display, ok: bool, expected: &'static str) -> Result<(), DecodeError> {
    if ok { Ok(()) } else { Err(DecodeError::Field { field, got: bounded_reason(&got), expected }) }
}
