//! The handshake: who the peer is, and whether it is the expected one.
//!
//! Both sides show a libp2p certificate, which ties a fresh TLS key to the node's own. A dial that
//! knows whom it wants checks that before it shows anything of itself, and remembers who answered
//! instead. Nothing is resumed from an earlier session: every connection proves its keys anew.
//!
//! Whoever dials says which cipher it likes best, and the other side follows: AES where the machine
//! has instructions for it. A hop on loopback takes a quarter less CPU then than with ChaCha20.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use libp2p::PeerId;
use libp2p::identity::Keypair;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::rustls::client::Resumption;
use quinn::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use quinn::rustls::crypto::CryptoProvider;
use quinn::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use quinn::rustls::version::TLS13;
use quinn::rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, Error, NoKeyLog, OtherError, SignatureScheme,
};

use super::{EndpointError, WrongPeer};

/// The name that a dial asks for: no name is known, and TLS wants one.
pub(super) const SERVER_NAME: &str = "l";

/// Signatures of TLS 1.3 that a libp2p certificate's key may make.
const SCHEMES: [SignatureScheme; 6] = [
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::ED25519,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
];

/// Ciphers by what they cost on a machine with instructions for AES.
const WITH_AES: [CipherSuite; 3] = [
    CipherSuite::TLS13_AES_128_GCM_SHA256,
    CipherSuite::TLS13_AES_256_GCM_SHA384,
    CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
];

/// The same without.
const WITHOUT_AES: [CipherSuite; 3] = [
    CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
    CipherSuite::TLS13_AES_128_GCM_SHA256,
    CipherSuite::TLS13_AES_256_GCM_SHA384,
];

/// Both halves of the node's TLS.
pub(super) struct Tls {
    client: ClientConfig,
    server: Arc<QuicServerConfig>,
}

impl Tls {
    pub(super) fn new(identity: &Keypair) -> Result<Self, EndpointError> {
        let refuse = |why: String| EndpointError::Certificate { why };
        let client = libp2p_tls::make_client_config(identity, None).map_err(|error| refuse(error.to_string()))?;
        let mut client = fastest_first(&client).map_err(|error| refuse(error.to_string()))?;
        let mut server = libp2p_tls::make_server_config(identity).map_err(|error| refuse(error.to_string()))?;
        client.resumption = Resumption::disabled();
        server.send_tls13_tickets = 0;
        // The library would write the keys to a file that the environment names.
        client.key_log = Arc::new(NoKeyLog);
        server.key_log = Arc::new(NoKeyLog);
        let server = QuicServerConfig::try_from(server).map_err(|error| refuse(error.to_string()))?;
        Ok(Self { client, server: Arc::new(server) })
    }

    pub(super) fn server(&self) -> Arc<QuicServerConfig> {
        Arc::clone(&self.server)
    }

    /// The configuration of one dial, and what will be known of who answered.
    pub(super) fn client(&self, expected: Option<PeerId>) -> Result<(QuicClientConfig, Arc<Witness>), EndpointError> {
        let witness = Arc::new(Witness { expected, obtained: OnceLock::new() });
        let mut client = self.client.clone();
        client.dangerous().set_certificate_verifier(Arc::<Witness>::clone(&witness));
        let client = QuicClientConfig::try_from(client)
            .map_err(|error| EndpointError::Certificate { why: error.to_string() })?;
        Ok((client, witness))
    }
}

/// The same configuration with the ciphers in another order.
fn fastest_first(config: &ClientConfig) -> Result<ClientConfig, Error> {
    let mut provider = CryptoProvider::clone(config.crypto_provider());
    let aes = has_aes();
    provider.cipher_suites.sort_by_key(|suite| rank(suite.suite(), aes));
    // Every dial puts its own witness in this one's place.
    let nobody = Arc::new(Witness { expected: None, obtained: OnceLock::new() });
    let mut reordered = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(nobody)
        .with_client_cert_resolver(Arc::clone(&config.client_auth_cert_resolver));
    reordered.alpn_protocols.clone_from(&config.alpn_protocols);
    Ok(reordered)
}

/// Where a cipher stands: the smallest is liked best.
fn rank(suite: CipherSuite, aes: bool) -> usize {
    let order = if aes { WITH_AES } else { WITHOUT_AES };
    order.into_iter().position(|one| one == suite).unwrap_or(order.len())
}

/// Whether this machine has instructions for AES.
fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    let has = std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let has = false;
    has
}

/// Checks the certificate of who answers a dial.
#[derive(Debug)]
pub(super) struct Witness {
    expected: Option<PeerId>,
    obtained: OnceLock<PeerId>,
}

impl Witness {
    /// Who answered in place of the expected peer, if anybody did.
    pub(super) fn mismatch(&self) -> Option<EndpointError> {
        WrongPeer::check(self.expected?, *self.obtained.get()?).err()
    }
}

impl ServerCertVerifier for Witness {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if !intermediates.is_empty() {
            return Err(Error::General(format!("{} certificates, expected one", intermediates.len() + 1)));
        }
        let obtained = libp2p_tls::certificate::parse(end_entity).map_err(refused)?.peer_id();
        let obtained = *self.obtained.get_or_init(|| obtained);
        if self.expected.is_some_and(|expected| expected != obtained) {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let certificate = libp2p_tls::certificate::parse(cert).map_err(refused)?;
        certificate.verify_signature(dss.scheme, message, dss.signature()).map_err(refused)?;
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        SCHEMES.to_vec()
    }
}

fn refused(why: impl std::error::Error + Send + Sync + 'static) -> Error {
    CertificateError::Other(OtherError(Arc::new(why))).into()
}

/// Who is at the other end of a connection, by what it showed in the handshake.
pub(super) fn peer_of(shown: Option<Box<dyn Any>>) -> Result<PeerId, EndpointError> {
    let nameless = |why: &str| EndpointError::Nameless { why: why.to_owned() };
    let shown = shown.ok_or_else(|| nameless("none was shown"))?;
    let certificates = shown.downcast::<Vec<CertificateDer<'static>>>().map_err(|_| nameless("not of TLS"))?;
    let first = certificates.first().ok_or_else(|| nameless("none was shown"))?;
    let certificate = libp2p_tls::certificate::parse(first).map_err(|error| nameless(&error.to_string()))?;
    Ok(certificate.peer_id())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_fastest_cipher_comes_first_and_none_is_lost() {
        let suites = |config: &ClientConfig| -> Vec<CipherSuite> {
            config.crypto_provider().cipher_suites.iter().map(|suite| suite.suite()).collect()
        };
        let identity = Keypair::generate_ed25519();
        let stock = libp2p_tls::make_client_config(&identity, None).unwrap();
        let ours = Tls::new(&identity).unwrap().client;
        let order = if has_aes() { WITH_AES } else { WITHOUT_AES };
        assert_eq!(suites(&ours), order);
        let names = |config: &ClientConfig| suites(config).into_iter().map(u16::from).collect::<BTreeSet<u16>>();
        assert_eq!(names(&ours), names(&stock));
        assert_eq!(ours.alpn_protocols, stock.alpn_protocols);
    }
}
