//! A UDP proxy for one client that can swallow everything, as a network that fails does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libp2p::Multiaddr;
use libp2p::multiaddr::Protocol;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

pub(crate) struct Proxy {
    cut: Arc<AtomicBool>,
    address: Multiaddr,
    _task: JoinSet<()>,
}

impl Proxy {
    /// Stands before an address.
    pub(crate) async fn before(target: &Multiaddr) -> Self {
        let mut parts = target.iter();
        let (Some(Protocol::Ip4(ip)), Some(Protocol::Udp(port))) = (parts.next(), parts.next()) else {
            panic!("{target}");
        };
        let target_socket = SocketAddr::new(ip.into(), port);
        let front = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let back = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let port = front.local_addr().unwrap().port();
        let address = [Protocol::Ip4(ip), Protocol::Udp(port)].into_iter().chain(parts).collect();
        let cut = Arc::new(AtomicBool::new(false));
        let mut task = JoinSet::new();
        let swallow = Arc::clone(&cut);
        task.spawn(async move {
            let (mut near, mut far) = ([0; 2048], [0; 2048]);
            let mut client = None;
            loop {
                let (socket, bytes, to) = tokio::select! {
                    Ok((bytes, from)) = front.recv_from(&mut near) => {
                        client = Some(from);
                        (&back, &near[..bytes], Some(target_socket))
                    }
                    Ok((bytes, _)) = back.recv_from(&mut far) => (&front, &far[..bytes], client),
                };
                if let (false, Some(to)) = (swallow.load(Ordering::Relaxed), to) {
                    // A datagram that can't be sent is lost, as datagrams are.
                    let _ = socket.send_to(bytes, to).await;
                }
            }
        });
        Self { cut, address, _task: task }
    }

    pub(crate) fn address(&self) -> Multiaddr {
        self.address.clone()
    }

    pub(crate) fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    pub(crate) fn heal(&self) {
        self.cut.store(false, Ordering::Relaxed);
    }
}
