//! A hop over quinn alone: one connection, a bidirectional stream a place, certificates and cipher as ours.
//!
//! This is the least that an application can do: the sender hands its body over without a copy, the
//! receiver reads it whole into a buffer that it keeps.

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use libp2p::identity::Keypair;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::rustls;
use quinn::rustls::crypto::CryptoProvider;
use quinn::{
    ClientConfig, Connection, Endpoint, EndpointConfig, RecvStream, SendStream, ServerConfig, TokioRuntime,
    TransportConfig,
};
use ringfence::clock::now;
use ringfence::transport::endpoint::PathSettings;
use ringfence::wan::ProxyHandle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::stack::{ECHO, HEARD_MAX, Heard, Load, PLACES_MAX, Wan};

/// Keeps connections alive where an endpoint's defaults would not.
const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// Marks a control body.
const CONTROL: u8 = 2;

/// Bytes that the system is asked to keep for a socket.
const SOCKET_BUFFER: usize = 4 << 20;

/// Control before data, where both have something to send.
const CONTROL_PRIORITY: i32 = 1;

/// Transport settings.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Tune {
    /// quinn's own, and a keep-alive.
    Defaults,
    /// Those of our link.
    Ours,
}

/// Both ends.
pub(crate) struct Raw {
    streams: Vec<(SendStream, RecvStream)>,
    control: SendStream,
    pub(crate) heard: mpsc::Receiver<Heard>,
    pub(crate) proxy: Option<ProxyHandle>,
    _ends: [Endpoint; 2],
    _echo: JoinSet<()>,
}

impl Raw {
    pub(crate) async fn connect(wan: &Wan, tune: Tune) -> Self {
        let (client, server) = configs(tune);
        let (near, far) = (endpoint(None), endpoint(Some(server)));
        let target = far.local_addr().unwrap();
        let proxy = wan.proxy(target);
        let target = proxy.as_ref().map_or(target, ProxyHandle::address);
        let (sender, heard) = mpsc::channel(HEARD_MAX);
        let mut echo = JoinSet::new();
        let listening = far.clone();
        echo.spawn(async move {
            let connection = listening.accept().await.unwrap().await.unwrap();
            answer(connection, sender).await;
        });
        let connection = near.connect_with(client, target, "l").unwrap().await.unwrap();
        let (control, _) = connection.open_bi().await.unwrap();
        control.set_priority(CONTROL_PRIORITY).unwrap();
        let mut streams = Vec::new();
        for _ in 0..PLACES_MAX {
            streams.push(connection.open_bi().await.unwrap());
        }
        Self { streams, control, heard, proxy, _ends: [near, far], _echo: echo }
    }

    /// Each place waits for its echo on its own stream.
    pub(crate) async fn turn(&mut self, load: &Load) -> Vec<Duration> {
        let until = now() + load.lasts;
        let places = self.streams.iter_mut().zip(&load.bodies);
        let mut places: FuturesUnordered<_> = places
            .map(|((sender, receiver), body)| async move {
                let mut taken = Vec::new();
                loop {
                    let begun = now();
                    send(sender, body.clone()).await;
                    receiver.read_exact(&mut [0]).await.unwrap();
                    let heard = now();
                    taken.push(heard - begun);
                    if heard >= until {
                        return taken;
                    }
                }
            })
            .collect();
        let mut all = Vec::new();
        while let Some(taken) = places.next().await {
            all.extend(taken);
        }
        all
    }

    /// No turn can follow.
    pub(crate) fn flood(&mut self, load: &Load) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        for ((mut sender, receiver), body) in self.streams.drain(..).zip(load.bodies.clone()) {
            tasks.spawn(async move {
                let _receiver = receiver;
                loop {
                    send(&mut sender, body.clone()).await;
                }
            });
        }
        tasks
    }

    pub(crate) async fn control(&mut self, number: u64) {
        let mut body = vec![0, CONTROL];
        body.extend_from_slice(&number.to_le_bytes());
        send(&mut self.control, Bytes::from(body)).await;
    }
}

fn configs(tune: Tune) -> (ClientConfig, ServerConfig) {
    let (near, far) = (Keypair::generate_ed25519(), Keypair::generate_ed25519());
    let to = far.public().to_peer_id();
    let server = QuicServerConfig::try_from(with_aes(&libp2p_tls::make_server_config(&far).unwrap())).unwrap();
    let client = QuicClientConfig::try_from(libp2p_tls::make_client_config(&near, Some(to)).unwrap()).unwrap();
    let mut server = ServerConfig::with_crypto(Arc::new(server));
    let mut client = ClientConfig::new(Arc::new(client));
    server.transport_config(transport(tune));
    client.transport_config(transport(tune));
    (client, server)
}

/// Takes the cipher that our link takes where a machine has instructions for it.
fn with_aes(config: &rustls::ServerConfig) -> rustls::ServerConfig {
    let mut provider = CryptoProvider::clone(config.crypto_provider());
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    let mut reordered = rustls::ServerConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::clone(&config.cert_resolver));
    reordered.alpn_protocols.clone_from(&config.alpn_protocols);
    reordered.ignore_client_order = true;
    reordered
}

/// An end whose socket has the buffers that our link's have.
fn endpoint(server: Option<ServerConfig>) -> Endpoint {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER).unwrap();
    Endpoint::new(EndpointConfig::default(), server, socket, Arc::new(TokioRuntime)).unwrap()
}

fn transport(tune: Tune) -> Arc<TransportConfig> {
    match tune {
        Tune::Ours => PathSettings::default().transport_config(),
        Tune::Defaults => {
            let mut config = TransportConfig::default();
            config.keep_alive_interval(Some(KEEP_ALIVE));
            Arc::new(config)
        }
    }
}

async fn send(stream: &mut SendStream, body: Bytes) {
    let prefix = u32::try_from(body.len()).unwrap().to_le_bytes();
    stream.write_all_chunks(&mut [Bytes::copy_from_slice(&prefix), body]).await.unwrap();
}

/// The far side: echoes on every stream, and listens to control.
async fn answer(connection: Connection, heard: mpsc::Sender<Heard>) {
    let mut tasks = JoinSet::new();
    while let Ok((sender, receiver)) = connection.accept_bi().await {
        tasks.spawn(echo(sender, receiver, heard.clone()));
    }
}

async fn echo(mut sender: SendStream, mut receiver: RecvStream, heard: mpsc::Sender<Heard>) {
    let (mut prefix, mut body) = ([0; 4], Vec::new());
    while receiver.read_exact(&mut prefix).await.is_ok() {
        body.resize(u32::from_le_bytes(prefix) as usize, 0);
        if receiver.read_exact(&mut body).await.is_err() {
            return;
        }
        if body[1] == CONTROL {
            heard.try_send((u64::from_le_bytes(body[2..].try_into().unwrap()), now())).unwrap();
        } else if body[1] == ECHO && sender.write_all(&body[..1]).await.is_err() {
            return;
        }
    }
}
