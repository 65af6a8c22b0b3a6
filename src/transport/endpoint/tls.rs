//! The handshake: who the peer is, and whether it is the expected one.
//!
//! Both sides show a libp2p certificate, which ties a fresh TLS key to the node's own. A dial that
//! knows whom it wants checks that before it shows anything of itself, and remembers who answered
//! instead. Nothing is resumed from an earlier session: every connection proves its keys anew.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use libp2p::PeerId;
use libp2p::identity::Keypair;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::rustls::client::Resumption;
use quinn::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use quinn::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use quinn::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, NoKeyLog, OtherError, SignatureScheme,
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

/// Both halves of the node's TLS.
pub(super) struct Tls {
    client: ClientConfig,
    server: Arc<QuicServerConfig>,
}

impl Tls {
    pub(super) fn new(identity: &Keypair) -> Result<Self, EndpointError> {
        let refuse = |why: String| EndpointError::Certificate { why };
        let mut client = libp2p_tls::make_client_config(identity, None).map_err(|error| refuse(error.to_string()))?;
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
