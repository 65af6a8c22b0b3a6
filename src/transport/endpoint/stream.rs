//! One stream, and the priority that its protocol has.
//!
//! libp2p opens a stream first and agrees on its protocol inside it, so nobody can say which stream
//! is which when it is opened. The first bytes that either side writes are the agreement itself
//! (multistream-select: messages of a length, a name and a newline), so a stream reads along until
//! it has seen the name of its protocol and then has the priority that the settings give to it.
//! From then on a write costs one look at an empty option.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use futures::{AsyncRead, AsyncWrite};

use super::lend::borrowed;

/// Bytes that are looked at for a name, from the first on.
const LOOK_MAX: usize = 256;

/// Bytes that are copied out of several buffers in one write.
const GATHER_MAX: usize = 64 << 10;

/// What multistream-select says before any name.
const GREETING: &[u8] = b"/multistream/1.0.0\n";

/// The answer that a name is not known: another may follow.
const NOT_KNOWN: &[u8] = b"na\n";

/// Prefixes of protocol names, and the priority that their streams have.
pub(super) type Priorities = Arc<[(String, i32)]>;

/// A two-way stream.
#[derive(Debug)]
pub struct Stream {
    send: quinn::SendStream,
    receive: quinn::RecvStream,
    /// There while the name of the protocol is not known.
    lookout: Option<Lookout>,
    closed: bool,
}

impl Stream {
    pub(super) fn new((send, receive): (quinn::SendStream, quinn::RecvStream), priorities: Priorities) -> Self {
        let lookout = (!priorities.is_empty()).then(|| Lookout { seen: Vec::new(), priorities });
        Self { send, receive, lookout, closed: false }
    }

    /// Sets the priority if these bytes, which are about to be written, say the protocol's name.
    /// Before they are: bytes that wait keep the priority they came with.
    fn look(&mut self, bytes: &[u8]) {
        let Some(lookout) = &self.lookout else { return };
        match lookout.look(bytes) {
            Sight::Nothing => {}
            Sight::Other => self.lookout = None,
            Sight::Priority(priority) => {
                self.lookout = None;
                // A stream that is closed already needs none.
                let _ = self.send.set_priority(priority);
            }
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        self.receive.poll_read(cx, buf).map_err(io::Error::from)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.lookout.is_none() && borrowed(buf).is_some() {
            return self.poll_write_vectored(cx, &[IoSlice::new(buf)]);
        }
        self.look(buf);
        let written = Pin::new(&mut self.send).poll_write(cx, buf).map_err(io::Error::from);
        if let (Some(lookout), Poll::Ready(Ok(bytes))) = (&mut self.lookout, &written) {
            lookout.keep(buf.get(..*bytes).unwrap_or(buf));
        }
        written
    }

    /// Takes several buffers as one write, so that a prefix and what it announces leave together.
    /// What is lent (`lend.rs`) is taken as it is; the rest is copied once, into what QUIC keeps
    /// until it is acknowledged.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut filled = buffers.iter().filter(|buffer| !buffer.is_empty());
        let (first, several) = (filled.next(), filled.next().is_some());
        let first = first.map_or(&[][..], |first| first);
        if self.lookout.is_some() || (!several && borrowed(first).is_none()) {
            return self.poll_write(cx, first);
        }
        // It waits for room or writes, and keeps nothing in between.
        let written = ready!(pin!(self.send.write_chunks(&mut gathered(buffers))).poll(cx));
        Poll::Ready(written.map(|written| written.bytes).map_err(io::Error::from))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // QUIC sends what it was given as soon as it may.
        Poll::Ready(Ok(()))
    }

    fn poll_close(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.closed {
            self.closed = true;
            self.send.finish().map_err(io::Error::from)?;
        }
        Poll::Ready(Ok(()))
    }
}

/// Buffers as QUIC keeps them: neighbours in one piece, up to [`GATHER_MAX`], and what is lent by itself.
fn gathered(buffers: &[IoSlice<'_>]) -> Vec<Bytes> {
    let mut chunks = Vec::with_capacity(2);
    let mut copied = BytesMut::new();
    let mut room = GATHER_MAX;
    for buffer in buffers {
        if let Some(whole) = borrowed(buffer) {
            if !copied.is_empty() {
                chunks.push(copied.split().freeze());
            }
            chunks.push(whole);
            continue;
        }
        let near = buffer.get(..room).unwrap_or(buffer);
        room -= near.len();
        copied.extend_from_slice(near);
        if near.len() < buffer.len() {
            break;
        }
    }
    if !copied.is_empty() {
        chunks.push(copied.freeze());
    }
    chunks
}

/// Looks for the name of the protocol in the first bytes that are written.
#[derive(Debug)]
struct Lookout {
    seen: Vec<u8>,
    priorities: Priorities,
}

/// What the first bytes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    /// No name so far.
    Nothing,
    /// A name that has no priority of its own, or no name at all.
    Other,
    /// A name that has this priority.
    Priority(i32),
}

impl Lookout {
    /// What all bytes so far and these would say.
    fn look(&self, bytes: &[u8]) -> Sight {
        let more = bytes.get(..LOOK_MAX - self.seen.len()).unwrap_or(bytes);
        let all = [&self.seen[..], more].concat();
        let mut rest = &all[..];
        loop {
            let message = match message(rest) {
                Ok(Some((message, after))) => {
                    rest = after;
                    message
                }
                Ok(None) if all.len() < LOOK_MAX => return Sight::Nothing,
                Ok(None) | Err(NoMessage) => return Sight::Other,
            };
            if message != GREETING && message != NOT_KNOWN {
                let of_name = |(prefix, _): &&(String, i32)| message.starts_with(prefix.as_bytes());
                return self.priorities.iter().find(of_name).map_or(Sight::Other, |(_, value)| Sight::Priority(*value));
            }
        }
    }

    /// Remembers bytes that were written.
    fn keep(&mut self, bytes: &[u8]) {
        let room = LOOK_MAX - self.seen.len();
        self.seen.extend_from_slice(bytes.get(..room).unwrap_or(bytes));
    }
}

/// Not what multistream-select writes.
#[derive(Debug, PartialEq, Eq)]
struct NoMessage;

/// A message, and what follows it.
type Parted<'a> = (&'a [u8], &'a [u8]);

/// The first message of these bytes and what follows it; `None` while it is not whole.
fn message(bytes: &[u8]) -> Result<Option<Parted<'_>>, NoMessage> {
    match *bytes {
        [] | [0x80..=0xff] => Ok(None),
        [length @ ..0x80, ref rest @ ..] => whole(usize::from(length), rest),
        [low, high @ ..0x80, ref rest @ ..] => whole(usize::from(low & 0x7f) | usize::from(high) << 7, rest),
        // Its length takes three bytes: longer than what is looked at.
        [_, 0x80..=0xff, ..] => Err(NoMessage),
    }
}

fn whole(length: usize, rest: &[u8]) -> Result<Option<Parted<'_>>, NoMessage> {
    match rest.split_at_checked(length) {
        Some((message, after)) if message.ends_with(b"\n") => Ok(Some((message, after))),
        Some(_) => Err(NoMessage),
        None if length < LOOK_MAX => Ok(None),
        None => Err(NoMessage),
    }
}

#[cfg(test)]
mod tests {
    use super::super::lend;
    use super::*;

    #[test]
    fn what_is_lent_is_kept_and_the_rest_is_put_together() {
        let body = Bytes::from(vec![7; 100_000]);
        let (head, tail) = (Bytes::from(vec![1; 4]), Bytes::from(vec![2; GATHER_MAX]));
        let slices = |parts: &[&Bytes]| gathered(&parts.iter().map(|part| IoSlice::new(part)).collect::<Vec<_>>());
        let chunks = lend(&body, || slices(&[&head, &head, &body, &tail, &head]));
        assert_eq!(
            chunks.iter().map(Bytes::len).collect::<Vec<_>>(),
            [8, 100_000, GATHER_MAX - 8],
            "whole up to a bound"
        );
        assert_eq!(chunks[1].as_ptr(), body.as_ptr());
        assert_eq!((&chunks[0][..], chunks[2][0]), (&[1; 8][..], 2));
        let copied = slices(&[&head, &body]);
        assert_eq!(copied.iter().map(Bytes::len).collect::<Vec<_>>(), [GATHER_MAX]);
        assert_eq!((&copied[0][..4], copied[0][4]), (&[1; 4][..], 7));
    }

    fn lookout() -> Lookout {
        let priorities = [("/ringfence/control/".to_owned(), 7), ("/b".to_owned(), -3)];
        Lookout { seen: Vec::new(), priorities: priorities.into() }
    }

    fn said(messages: &[&str]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for message in messages {
            let length = message.len() + 1;
            if length >= 0x80 {
                bytes.extend([length as u8 | 0x80, (length >> 7) as u8]);
            } else {
                bytes.push(length as u8);
            }
            bytes.extend(message.as_bytes());
            bytes.push(b'\n');
        }
        bytes
    }

    #[test]
    fn the_protocols_name_gives_the_priority() {
        let greeting = "/multistream/1.0.0";
        for (messages, expected) in [
            (&[greeting][..], Sight::Nothing),
            (&[greeting, "/ringfence/control/1"], Sight::Priority(7)),
            (&[greeting, "/ringfence/control"], Sight::Other),
            (&[greeting, "/ringfence/data/1"], Sight::Other),
            (&[greeting, "na", "/b/1"], Sight::Priority(-3)),
            (&["/b"], Sight::Priority(-3)),
            (&[greeting, "/ringfence/data/1", "/b"], Sight::Other),
        ] {
            assert_eq!(lookout().look(&said(messages)), expected, "{messages:?}");
        }
    }

    #[test]
    fn the_name_may_come_in_pieces() {
        let bytes = said(&["/multistream/1.0.0", "/ringfence/control/1"]);
        for cut in 0..bytes.len() {
            let mut lookout = lookout();
            assert_eq!(lookout.look(&bytes[..cut]), Sight::Nothing, "{cut}");
            lookout.keep(&bytes[..cut]);
            assert_eq!(lookout.look(&bytes[cut..]), Sight::Priority(7), "{cut}");
        }
    }

    #[test]
    fn what_is_no_name_is_not_looked_at_for_long() {
        for other in [&b"GET / HTTP/1.1\r\n".repeat(5)[..], &[0; 300], &[0xff; 300], &[0xfe, 0x7f, 0], &[0x80, 0x80]] {
            let mut lookout = lookout();
            let mut sight = Sight::Nothing;
            for byte in other {
                sight = lookout.look(&[*byte]);
                if sight != Sight::Nothing {
                    break;
                }
                lookout.keep(&[*byte]);
            }
            assert_eq!(lookout.look(other), Sight::Other, "{other:?}");
            assert!(lookout.seen.len() <= LOOK_MAX);
            assert!(sight == Sight::Other || other.len() < LOOK_MAX, "{other:?}");
        }
        let long = format!("/multistream/1.0.0{}", "x".repeat(180));
        assert_eq!(lookout().look(&said(&[&long])), Sight::Other, "a long name is one too");
        let greetings = said(&["/multistream/1.0.0"; 40]);
        let mut lookout = lookout();
        for byte in &greetings {
            lookout.keep(&[*byte]);
        }
        assert_eq!(lookout.look(b"/b"), Sight::Other, "the look ends after 256 bytes");
    }
}
