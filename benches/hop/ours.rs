//! A hop over our link: two links of this process, the far one echoes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use libp2p::Multiaddr;
use libp2p::identity::Keypair;
use libp2p::multiaddr::Protocol;
use ringfence::clock::now;
use ringfence::ids::Node;
use ringfence::transport::quic::{QuicLink, QuicSettings};
use ringfence::transport::{Lane, Link, LinkEvent, LinkEvents};
use ringfence::wan::ProxyHandle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::stack::{ECHO, HEARD_MAX, Heard, Load, Places, Wan};

/// Both ends.
pub(crate) struct Ours {
    link: Arc<dyn Link>,
    events: LinkEvents,
    to: Node,
    pub(crate) heard: mpsc::Receiver<Heard>,
    pub(crate) proxy: Option<ProxyHandle>,
    _echo: JoinSet<()>,
}

impl Ours {
    pub(crate) async fn connect(wan: &Wan) -> Self {
        let (link, mut events) = start().await;
        let (echo, events_there) = start().await;
        let address = echo.addresses()[0].clone();
        let proxy = wan.proxy(socket_address(&address));
        let address = proxy.as_ref().map_or(address.clone(), |proxy| with_port(&address, proxy.address().port()));
        let (sender, heard) = mpsc::channel(HEARD_MAX);
        let mut task = JoinSet::new();
        task.spawn(answer(echo, events_there, sender));
        let to = link.dial(address).await.unwrap();
        assert!(matches!(events.recv().await, Some(LinkEvent::Connected { .. })));
        Self { link, events, to, heard, proxy, _echo: task }
    }

    async fn send(&self, body: Bytes) {
        self.link.send(self.to, Lane::Data, body).await.unwrap();
    }

    pub(crate) async fn turn(&mut self, load: &Load) -> Vec<Duration> {
        let mut places = Places::new(load);
        for body in &load.bodies {
            self.send(body.clone()).await;
        }
        while !places.is_over() {
            let place = match self.events.recv().await {
                Some(LinkEvent::Received { body, .. }) => body[0],
                other => panic!("expected an echo, got {other:?}"),
            };
            if places.heard(place) {
                self.send(load.bodies[usize::from(place)].clone()).await;
            }
        }
        places.taken()
    }

    pub(crate) fn flood(&self, load: &Load) -> JoinSet<()> {
        let (link, to, bodies) = (Arc::clone(&self.link), self.to, load.bodies.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            for body in bodies.iter().cycle() {
                link.send(to, Lane::Data, body.clone()).await.unwrap();
            }
        });
        tasks
    }

    pub(crate) async fn control(&self, number: u64) {
        let body = Bytes::copy_from_slice(&number.to_le_bytes());
        self.link.send(self.to, Lane::Control, body).await.unwrap();
    }
}

async fn start() -> (Arc<dyn Link>, LinkEvents) {
    QuicLink::start(QuicSettings::new(Keypair::generate_ed25519())).await.unwrap()
}

/// The far side's owner.
async fn answer(link: Arc<dyn Link>, mut events: LinkEvents, heard: mpsc::Sender<Heard>) {
    while let Some(event) = events.recv().await {
        let LinkEvent::Received { peer, lane, body } = event else { continue };
        match lane {
            Lane::Control => {
                let number = u64::from_le_bytes(body[..8].try_into().unwrap());
                heard.try_send((number, now())).unwrap();
            }
            Lane::Data if body[1] == ECHO => {
                let echo = Bytes::copy_from_slice(&body[..1]);
                link.send(peer, Lane::Reply, echo).await.unwrap();
            }
            Lane::Data | Lane::Reply => {}
        }
    }
}

fn socket_address(address: &Multiaddr) -> SocketAddr {
    let mut parts = address.iter();
    match (parts.next(), parts.next()) {
        (Some(Protocol::Ip4(ip)), Some(Protocol::Udp(port))) => SocketAddr::new(ip.into(), port),
        _ => panic!("{address}: expected /ip4/…/udp/…"),
    }
}

fn with_port(address: &Multiaddr, port: u16) -> Multiaddr {
    let change = |part| if let Protocol::Udp(_) = part { Protocol::Udp(port) } else { part };
    address.iter().map(change).collect()
}
