//! A cursor over bytes of a peer: every read is checked, none allocates.

use super::DecodeError;

/// Where a message is read up to.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Bytes that are left.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    /// The next `n` bytes.
    pub(super) fn take(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], DecodeError> {
        let Some((head, rest)) = self.rest.split_at_checked(n) else {
            return Err(DecodeError::Short { what, needed: n, got: self.rest.len() });
        };
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], DecodeError> {
        let Some((head, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(DecodeError::Short { what, needed: N, got: self.rest.len() });
        };
        self.rest = rest;
        Ok(*head)
    }

    pub(super) fn bytes4(&mut self, what: &'static str) -> Result<[u8; 4], DecodeError> {
        self.array(what)
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u16(&mut self, what: &'static str) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A finite number.
    pub(super) fn f32(&mut self, what: &'static str) -> Result<f32, DecodeError> {
        let value = f32::from_le_bytes(self.array(what)?);
        if value.is_finite() { Ok(value) } else { Err(DecodeError::NotFinite { what, got: value.to_string() }) }
    }

    /// Checks that `count` elements of at least `each` bytes are within `limit` and can still come,
    /// so that a list of `count` elements may be allocated.
    pub(super) fn room(&self, what: &'static str, count: u32, each: usize, limit: u32) -> Result<usize, DecodeError> {
        if count > limit {
            return Err(DecodeError::TooMany { what, got: u64::from(count), limit: u64::from(limit) });
        }
        let count = count as usize;
        let needed = count.saturating_mul(each);
        if needed > self.left() {
            return Err(DecodeError::Short { what, needed, got: self.left() });
        }
        Ok(count)
    }

    /// Checks that nothing is left.
    pub(super) fn end(&self) -> Result<(), DecodeError> {
        match self.left() {
            0 => Ok(()),
            extra => Err(DecodeError::Trailing { extra }),
        }
    }
}
