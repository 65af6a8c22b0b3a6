//! Peers that move, peers that start again, and many that come and go.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::{AsyncReadExt, AsyncWriteExt};
use libp2p::core::muxing::{StreamMuxerEvent, StreamMuxerExt};
use libp2p::core::transport::ListenerId;
use libp2p::identity::Keypair;
use ringfence::clock;
use ringfence::transport::endpoint::PathSettings;
use ringfence::wan::{Proxy, ProxySettings};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::rig::{ANY, Host, PATIENCE, accept, address_of, connect, converse, open, read, socket_of, until};

/// A NAT before one client, that can give it another port.
struct Nat {
    address: SocketAddr,
    ports: watch::Sender<Arc<UdpSocket>>,
    _task: JoinSet<()>,
}

impl Nat {
    async fn before(target: SocketAddr) -> Self {
        let front = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = front.local_addr().unwrap();
        let (ports, mut port) = watch::channel(Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap()));
        let mut task = JoinSet::new();
        task.spawn(async move {
            let (mut near, mut far) = ([0; 2048], [0; 2048]);
            let mut client = None;
            loop {
                let back = Arc::clone(&port.borrow_and_update());
                tokio::select! {
                    Ok((bytes, from)) = front.recv_from(&mut near) => {
                        client = Some(from);
                        let _ = back.send_to(&near[..bytes], target).await;
                    }
                    Ok((bytes, _)) = back.recv_from(&mut far) => if let Some(client) = client {
                        let _ = front.send_to(&far[..bytes], client).await;
                    },
                    _ = port.changed() => {}
                }
            }
        });
        Self { address, ports, _task: task }
    }

    async fn rebind(&self) -> SocketAddr {
        let other = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let address = other.local_addr().unwrap();
        self.ports.send_replace(other);
        address
    }
}

#[tokio::test]
async fn a_peer_that_moves_is_followed_and_told_of() {
    let (dialler, (mut host, address)) =
        (Host::new(PathSettings::default()), Host::listening(PathSettings::default()).await);
    let nat = Nat::before(socket_of(&address)).await;
    let (mut near, mut far) = connect(&dialler, &mut host, &address_of(nat.address)).await;
    let (mut asking, mut asked) = tokio::join!(open(&mut near, b"before"), accept(&mut far));
    assert_eq!(read(&mut asked, 6).await, b"before");
    let moved = nat.rebind().await;
    asking.write_all(b"after").await.unwrap();
    assert_eq!(read(&mut asked, 5).await, b"after");
    let event = std::future::poll_fn(|cx| far.poll_unpin(cx));
    let StreamMuxerEvent::AddressChange(to) = tokio::time::timeout(PATIENCE, event).await.unwrap().unwrap();
    assert_eq!(socket_of(&to), moved);
    assert_eq!(socket_of(&host.book.stats(dialler.peer).unwrap().remote), moved);
    asked.write_all(b"back").await.unwrap();
    assert_eq!(read(&mut asking, 4).await, b"back");
}

/// How long a peer takes to notice that a host was killed and another started in its place.
async fn noticed(first: &Keypair, second: &Keypair) -> Option<Duration> {
    let settings = || PathSettings {
        idle_timeout: Duration::from_secs(60),
        keep_alive: Duration::from_millis(100),
        ..PathSettings::default()
    };
    // The first life has a runtime of its own: what it holds is gone with that.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let identity = first.clone();
    let (hand, taken) = tokio::sync::oneshot::channel();
    runtime.spawn(async move {
        let mut host = Host::of(&identity, settings());
        hand.send(host.listen(ANY).await.1).unwrap();
        let _far = host.inbound().await;
        std::future::pending::<()>().await;
    });
    let address = taken.await.unwrap();
    let proxy = Proxy::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let proxy = proxy.start(socket_of(&address), ProxySettings::default()).unwrap();
    let dialler = Host::new(settings());
    let (reached, mut near) = dialler.dial(&address_of(proxy.address())).await.unwrap();
    assert_eq!(reached, first.public().to_peer_id());
    let mut stream = open(&mut near, b"x").await;
    // What the dying may say is not heard.
    proxy.cut_both();
    runtime.shutdown_background();
    let mut again = Host::of(second, settings());
    until("the port is free", || again.try_listen(ListenerId::next(), &address.to_string()).is_ok()).await;
    again.news().await;
    proxy.heal();
    let begun = clock::now();
    let ended = tokio::time::timeout(Duration::from_secs(2), stream.read(&mut [0])).await.ok()?;
    assert!(ended.is_err());
    Some(begun.elapsed())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_starts_again_ends_the_connections_of_its_former_self() {
    let identity = Keypair::generate_ed25519();
    let after = noticed(&identity, &identity).await.expect("the reset is heard");
    assert!(after < Duration::from_secs(2), "{after:?}");
    assert_eq!(noticed(&identity, &Keypair::generate_ed25519()).await, None, "a stranger can't");
}

#[tokio::test]
async fn two_hundred_connections_leave_no_task_behind() {
    let (dialler, (mut host, address)) =
        (Host::new(PathSettings::default()), Host::listening(PathSettings::default()).await);
    let (mut near, mut far) = connect(&dialler, &mut host, &address).await;
    converse(&mut near, &mut far).await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let tasks_before = tasks();
    for _ in 0..200 {
        let (mut near, mut far) = connect(&dialler, &mut host, &address).await;
        converse(&mut near, &mut far).await;
    }
    until("all tasks are over", || tasks() <= tasks_before).await;
    assert_eq!((dialler.book.len(), host.book.len()), (1, 1));
    converse(&mut near, &mut far).await;
}
