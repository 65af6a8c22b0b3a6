//! Bytes that a stream may take as they are, past what lies between.
//!
//! QUIC keeps what is written until it is acknowledged. A writer of libp2p hands over borrowed bytes
//! only, so they are copied; most writers hold a shared buffer of which these bytes are a part. What
//! is lent during a write is known by its place in memory, and kept instead of copied.

use std::cell::Cell;

use bytes::Bytes;

/// Fewer bytes are copied: to share them costs as much, and would keep all that they are a part of.
const SHARED_MIN: usize = 1 << 10;

thread_local! {
    /// What is lent to the write under way.
    static LENT: Cell<Bytes> = const { Cell::new(Bytes::new()) };
}

/// Puts back what was lent before.
struct Before(Bytes);

impl Drop for Before {
    fn drop(&mut self) {
        LENT.set(std::mem::take(&mut self.0));
    }
}

/// Runs a write; of the buffers that it hands over on this thread, those that lie in `bytes` are
/// shared with whoever keeps them rather than copied.
pub(crate) fn lend<T>(bytes: &Bytes, write: impl FnOnce() -> T) -> T {
    let _before = Before(LENT.replace(bytes.clone()));
    write()
}

/// These bytes without a copy, if they were lent.
pub(super) fn borrowed(bytes: &[u8]) -> Option<Bytes> {
    let lent = LENT.take();
    let part = part(&lent, bytes);
    LENT.set(lent);
    part
}

/// These bytes as a part of what holds them; `None` where it doesn't. As both are alive, equal
/// places are the same bytes.
fn part(whole: &Bytes, bytes: &[u8]) -> Option<Bytes> {
    let start = bytes.as_ptr().addr().checked_sub(whole.as_ptr().addr())?;
    let end = start.checked_add(bytes.len())?;
    (bytes.len() >= SHARED_MIN && end <= whole.len()).then(|| whole.slice(start..end))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In bytes of [`SHARED_MIN`].
    fn made_of(value: u8, units: usize) -> Bytes {
        vec![value; units * SHARED_MIN].into()
    }

    #[test]
    fn only_what_is_lent_is_borrowed() {
        let (body, other) = (made_of(7, 3), made_of(7, 3));
        assert_eq!(borrowed(&body), None);
        lend(&body, || {
            for range in [0..body.len(), 0..SHARED_MIN, 2 * SHARED_MIN..body.len(), 10..10 + SHARED_MIN] {
                let part = borrowed(&body[range.clone()]).unwrap();
                assert_eq!((part.as_ptr(), part.len()), (body[range.clone()].as_ptr(), range.len()));
            }
            assert_eq!(borrowed(&body[..SHARED_MIN - 1]), None, "it is short");
            assert_eq!(borrowed(&other), None);
        });
        assert_eq!(borrowed(&body), None, "it is given back");
    }

    #[test]
    fn a_part_that_is_lent_does_not_stand_for_the_rest() {
        let body = made_of(7, 4);
        let (start, end) = (SHARED_MIN, 3 * SHARED_MIN);
        lend(&body.slice(start..end), || {
            assert!(borrowed(&body[start..end]).is_some());
            for range in [start - 1..end, start..end + 1, 0..start, end..body.len(), 0..body.len()] {
                assert_eq!(borrowed(&body[range.clone()]), None, "{range:?}");
            }
        });
    }

    #[test]
    fn one_in_another_and_one_that_fails_are_given_back() {
        let (body, inner) = (made_of(1, 1), made_of(2, 1));
        lend(&body, || {
            lend(&inner, || assert!(borrowed(&inner).is_some() && borrowed(&body).is_none()));
            assert!(borrowed(&body).is_some());
        });
        let failed = std::panic::catch_unwind(|| lend(&body, || panic!("a write failed")));
        assert!(failed.is_err());
        assert_eq!(borrowed(&body), None);
    }
}
