//! How a process that starts again ends the connections of its former self.
//!
//! A packet for a connection that an endpoint does not know is answered with a token that only the
//! two ends of that connection could know, and the peer ends it at once instead of waiting for its
//! idle time. For that the token, and the mark by which an endpoint knows its own connection ids,
//! must outlive the process: both are derived from the node's key and the address it listens on.
//! The address is part of it because a token that one socket gives away must not be worth anything
//! at another.

use std::net::SocketAddr;
use std::sync::Arc;

use libp2p::identity::Keypair;
use quinn::crypto::{CryptoError, HmacKey};
use quinn_proto::HashedConnectionIdGenerator;
use sha2::{Digest, Sha256};

/// Bytes of a block of SHA-256.
const BLOCK: usize = 64;

/// What only this node knows about a socket it listens on, the same after a restart.
pub(super) struct ResetKey {
    key: [u8; 32],
}

impl ResetKey {
    /// Derives the key of a listener; `None` where the node's key derives nothing.
    pub(super) fn derive(identity: &Keypair, local: SocketAddr) -> Option<Self> {
        let domain = format!("ringfence stateless reset {local}");
        Some(Self { key: identity.derive_secret(domain.as_bytes())? })
    }

    /// The configuration of the listener's endpoint.
    pub(super) fn endpoint_config(self) -> quinn::EndpointConfig {
        let mut mark = [0; 8];
        mark.copy_from_slice(&self.mac(b"connection ids")[..8]);
        let mark = u64::from_le_bytes(mark);
        let mut config = quinn::EndpointConfig::new(Arc::new(self));
        config.cid_generator(move || Box::new(HashedConnectionIdGenerator::from_key(mark)));
        config
    }

    /// HMAC with SHA-256.
    fn mac(&self, data: &[u8]) -> [u8; 32] {
        let pad = |byte: u8| {
            let mut block = [byte; BLOCK];
            for (padded, key) in block.iter_mut().zip(self.key) {
                *padded ^= key;
            }
            block
        };
        let inner = Sha256::new().chain_update(pad(0x36)).chain_update(data).finalize();
        Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize().into()
    }
}

impl HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        for (out, byte) in signature_out.iter_mut().zip(self.mac(data)) {
            *out = byte;
        }
    }

    fn signature_len(&self) -> usize {
        32
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), CryptoError> {
        let expected = self.mac(data);
        // Every byte is looked at, so that the time says nothing about the first wrong one.
        let differences = expected.iter().zip(signature).fold(0, |sum, (a, b)| sum | (a ^ b));
        if signature.len() == expected.len() && differences == 0 { Ok(()) } else { Err(CryptoError) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn it_is_hmac_sha256() {
        // Case 1 of RFC 4231, whose key is shorter: zeros at its end are the same key.
        let mut key = [0; 32];
        key[..20].fill(0x0b);
        let key = ResetKey { key };
        let mut signature = [0; 32];
        key.sign(b"Hi There", &mut signature);
        assert_eq!(hex(&signature), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
        assert!(key.verify(b"Hi There", &signature).is_ok());
        assert!(key.verify(b"Hi There", &signature[..31]).is_err());
        signature[31] ^= 1;
        assert!(key.verify(b"Hi There", &signature).is_err());
    }

    #[test]
    fn the_key_is_of_one_node_and_one_address() {
        let identity = Keypair::generate_ed25519();
        let at = |identity: &Keypair, address: &str| ResetKey::derive(identity, address.parse().unwrap()).unwrap().key;
        let key = at(&identity, "192.0.2.1:1");
        assert_eq!(key, at(&identity, "192.0.2.1:1"), "it is the same after a restart");
        assert_ne!(key, at(&identity, "192.0.2.1:2"));
        assert_ne!(key, at(&Keypair::generate_ed25519(), "192.0.2.1:1"));
    }
}
