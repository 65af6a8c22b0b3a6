//! What the links say to each other between bodies, and their owners never see.
//!
//! Owns the bytes of notes: a kind, then numbers of eight bytes, little-endian, or text.

use std::time::Duration;

use super::super::credit::Return;
use super::lane::NOTE;

/// Longest note, in bytes.
pub(super) const NOTE_BYTES_MAX: u32 = 1024;

/// Longest reason in a farewell, in bytes of UTF-8.
const REASON_BYTES_MAX: usize = 512;

/// What the links say to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Note {
    /// First on a connection, from both sides, on control.
    Hello(Hello, Terms),
    /// First on a data lane: which one it is.
    Lane {
        /// From 0.
        number: u64,
    },
    /// On control, from both sides: all lanes that the peer announced are here.
    Ready {
        /// How many those are.
        lanes: u64,
    },
    /// On control, from the smaller peer: this connection is the one to use.
    Accept {
        /// Rises with every connection that the sender accepted.
        serial: u64,
    },
    /// Before the first body of a data lane: what follows may be heard only after so many bodies
    /// on control.
    After {
        /// Bodies that were queued on control before.
        control: u64,
    },
    /// On control: credit for frames that the owner has taken.
    Returned {
        /// What all of them cost, since the beginning.
        taken: u64,
        /// How long the first of those not returned before was held, in µs.
        held_us: u64,
        /// How long ago the last of them was taken, in µs.
        idle_us: u64,
    },
    /// Last on a lane, from the side that closes.
    Farewell {
        /// Why.
        reason: String,
    },
}

/// How a side introduces a connection, so that the other can tell a copy of a living connection
/// from the successor of a dead one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// Drawn at the start of the sending process.
    pub(super) start: u64,
    /// The sender's number of this connection; rises within a process.
    pub(super) number: u64,
    /// The smallest number among the sender's living connections with the receiver.
    pub(super) oldest: u64,
}

/// What the sender of a hello will do and bear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Terms {
    /// Data lanes that it opens.
    pub(super) lanes: u64,
    /// What frames that its owner has not taken may cost at most, unless they are two.
    pub(super) window_max: u64,
}

impl From<Return> for Note {
    fn from(Return { taken, held, idle }: Return) -> Self {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Self::Returned { taken, held_us: us(held), idle_us: us(idle) }
    }
}

impl Note {
    /// Appends the note, its length in front.
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        let at = into.len();
        into.extend_from_slice(&[0; 4]);
        let mut put = |kind, numbers: &[u64]| {
            into.push(kind);
            numbers.iter().for_each(|number| into.extend_from_slice(&number.to_le_bytes()));
        };
        match self {
            Self::Hello(Hello { start, number, oldest }, Terms { lanes, window_max }) => {
                put(1, &[*start, *number, *oldest, *lanes, *window_max]);
            }
            Self::Accept { serial } => put(2, &[*serial]),
            Self::Farewell { reason } => {
                put(3, &[]);
                into.extend_from_slice(shortened(reason).as_bytes());
            }
            Self::After { control } => put(4, &[*control]),
            Self::Lane { number } => put(5, &[*number]),
            Self::Ready { lanes } => put(6, &[*lanes]),
            Self::Returned { taken, held_us, idle_us } => put(7, &[*taken, *held_us, *idle_us]),
        }
        // A farewell is the longest, at REASON_BYTES_MAX + 1 bytes.
        let length = (into.len() - at - 4) as u32;
        into[at..at + 4].copy_from_slice(&(NOTE | length).to_le_bytes());
    }

    /// Reads a note from the bytes behind its length; `None` where it is none that is known.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        match kind {
            1 => {
                let [start, number, oldest, lanes, window_max] = numbers(rest)?;
                Some(Self::Hello(Hello { start, number, oldest }, Terms { lanes, window_max }))
            }
            2 => numbers(rest).map(|[serial]| Self::Accept { serial }),
            3 => {
                let text = std::str::from_utf8(rest).ok()?;
                // It goes into logs and onto terminals.
                Some(Self::Farewell { reason: text.chars().filter(|c| !c.is_control()).collect() })
            }
            4 => numbers(rest).map(|[control]| Self::After { control }),
            5 => numbers(rest).map(|[number]| Self::Lane { number }),
            6 => numbers(rest).map(|[lanes]| Self::Ready { lanes }),
            7 => numbers(rest).map(|[taken, held_us, idle_us]| Self::Returned { taken, held_us, idle_us }),
            _ => None,
        }
    }

    /// The note's name in an error message.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Hello(..) => "a hello",
            Self::Lane { .. } => "a lane's number",
            Self::Ready { .. } => "a ready",
            Self::Accept { .. } => "an accept",
            Self::After { .. } => "an after",
            Self::Returned { .. } => "a return of credit",
            Self::Farewell { .. } => "a farewell",
        }
    }
}

fn numbers<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let (words, []) = bytes.as_chunks::<8>() else { return None };
    <[[u8; 8]; N]>::try_from(words).ok().map(|words| words.map(u64::from_le_bytes))
}

/// As much of a reason as fits, cut between characters.
fn shortened(reason: &str) -> &str {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn through(note: &Note) -> Option<Note> {
        let mut bytes = Vec::new();
        note.encode(&mut bytes);
        assert_eq!(bytes[..4], (NOTE | (bytes.len() as u32 - 4)).to_le_bytes());
        Note::decode(&bytes[4..])
    }

    #[test]
    fn notes_come_back() {
        let hello = Hello { start: u64::MAX, number: 3, oldest: 2 };
        for note in [
            Note::Hello(hello, Terms { lanes: 16, window_max: 1 << 24 }),
            Note::Lane { number: 7 },
            Note::Ready { lanes: 16 },
            Note::Accept { serial: 7 },
            Note::After { control: 2 },
            Note::Returned { taken: 1 << 40, held_us: 12, idle_us: 3 },
            Note::Farewell { reason: "wrong numerics id".to_owned() },
        ] {
            assert_eq!(through(&note), Some(note));
        }
    }

    #[test]
    fn a_reason_is_shortened_between_characters_and_cleaned() {
        let farewell = |reason: &str| Note::Farewell { reason: reason.to_owned() };
        let long = "é".repeat(REASON_BYTES_MAX) + "\n";
        assert_eq!(through(&farewell(&long)), Some(farewell(&"é".repeat(REASON_BYTES_MAX / 2))));
        assert_eq!(through(&farewell("a\x1b[31m\nb")), Some(farewell("a[31mb")));
    }

    proptest! {
        #[test]
        fn a_note_is_what_it_was_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Some(note) = Note::decode(&bytes) {
                prop_assert_eq!(through(&note), Some(note));
            }
        }

        #[test]
        fn numbers_of_any_size_are_what_they_were(kind in 0_u8..8, numbers in prop::collection::vec(any::<u64>(), 0..7)) {
            let mut bytes = vec![kind];
            numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
            if let Some(note) = Note::decode(&bytes) {
                prop_assert_eq!(through(&note), Some(note));
            }
        }
    }
}
