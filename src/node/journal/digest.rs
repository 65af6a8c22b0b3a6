//! The digest of one position of a boundary: `docs/protocol.md`, "Digests".

use sha2::{Digest as _, Sha256};

use crate::ids::{Position, TokenId, WireEncoding};

/// Encoding tag of positions without a hidden state: those that go into the head.
pub const TAG_IDS: u8 = 0;

/// Encoding tag of positions whose hidden state is written so.
#[must_use]
pub fn encoding_tag(encoding: WireEncoding) -> u8 {
    match encoding {
        WireEncoding::Bf16 => 1,
        WireEncoding::Fp8 => 2,
    }
}

/// sha256 over position (4 bytes, little-endian), token id (4, little-endian), encoding tag (1) and
/// the position's bytes as they are on the wire.
#[must_use]
pub fn position_digest(pos: Position, id: TokenId, tag: u8, wire: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(pos.0.to_le_bytes());
    hash.update(id.0.to_le_bytes());
    hash.update([tag]);
    hash.update(wire);
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn the_bytes_of_a_digest_are_those_of_the_document() {
        // From another sha256:
        // printf '\x04\x03\x02\x01\x08\x07\x06\x05\x02\xaa\xbb\xcc' | sha256sum
        let digest = position_digest(Position(0x0102_0304), TokenId(0x0506_0708), 2, &[0xaa, 0xbb, 0xcc]);
        assert_eq!(hex(&digest), "182e36a327b3c43d023e5ca656f9c8f5fc5fd1130b80fbb51d89a7f2618c23e8");
        // printf '\x00\x00\x00\x00\x01\x00\x00\x00\x00' | sha256sum
        assert_eq!(
            hex(&position_digest(Position(0), TokenId(1), TAG_IDS, &[])),
            "cdb032de4c6cb506da0606e0934e69ad1ae64773ffaa76f9d6e28192067c43cf"
        );
    }

    #[test]
    fn every_encoding_has_a_tag_of_its_own() {
        let tags = [TAG_IDS, encoding_tag(WireEncoding::Bf16), encoding_tag(WireEncoding::Fp8)];
        assert_eq!(tags, [0, 1, 2]);
    }
}
