//! The proxy over loopback: deadlines wait for what must come, and nothing is asserted to be quick.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use ringfence::clock;
use ringfence::wan::{Proxy, ProxyError, ProxyHandle, ProxySettings, ProxyStats, Way};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);

fn local() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind(local()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Reads a datagram.
fn hear(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; 65_536];
    let (bytes, from) = socket.recv_from(&mut buffer).unwrap();
    buffer.truncate(bytes);
    (buffer, from)
}

fn proxy(target: &UdpSocket, wan: &str) -> ProxyHandle {
    let settings = ProxySettings { wan: wan.parse().unwrap(), ..ProxySettings::default() };
    proxy_with(target, settings)
}

fn proxy_with(target: &UdpSocket, settings: ProxySettings) -> ProxyHandle {
    Proxy::bind(local()).unwrap().start(target.local_addr().unwrap(), settings).unwrap()
}

/// Waits until the statistics are so.
fn until(proxy: &ProxyHandle, what: &str, holds: impl Fn(&ProxyStats) -> bool) -> ProxyStats {
    let begun = clock::now();
    loop {
        let stats = proxy.stats();
        if holds(&stats) {
            return stats;
        }
        assert!(begun.elapsed() < PATIENCE, "never came: {what}; {stats:?}");
        std::thread::yield_now();
    }
}

/// A packet there and back, and when it was where.
fn round(client: &UdpSocket, proxy: &ProxyHandle, target: &UdpSocket) -> [Instant; 3] {
    let begun = clock::now();
    client.send_to(b"there", proxy.address()).unwrap();
    let (there, from) = hear(target);
    let arrived = clock::now();
    target.send_to(b"back", from).unwrap();
    let (back, _) = hear(client);
    assert_eq!((&there[..], &back[..]), (&b"there"[..], &b"back"[..]));
    [begun, arrived, clock::now()]
}

#[test]
fn packets_take_at_least_as_long_as_set() {
    let (client, target) = (socket(), socket());
    let proxy = proxy(&target, "in.delay=30ms,out.delay=10ms");
    for _ in 0..5 {
        let [begun, arrived, back] = round(&client, &proxy, &target);
        assert!(arrived - begun >= Duration::from_millis(30), "{:?}", arrived - begun);
        assert!(back - arrived >= Duration::from_millis(10), "{:?}", back - arrived);
    }
    let changed = proxy.set_text("in.delay=90ms").unwrap();
    assert_eq!(changed.to_string(), "in.delay=90ms,out.delay=10ms");
    let [begun, arrived, _] = round(&client, &proxy, &target);
    assert!(arrived - begun >= Duration::from_millis(90), "{:?}", arrived - begun);
    assert!(proxy.set_text("in.delay=90").is_err());
    assert_eq!(proxy.settings(), changed);
}

#[test]
fn a_rate_holds_packets_up() {
    let (client, target) = (socket(), socket());
    let proxy = proxy(&target, "rate=800kbit");
    let begun = clock::now();
    // 1,000 bytes with headers take 10 ms.
    (0..10).for_each(|_| assert_eq!(client.send_to(&[7; 972], proxy.address()).unwrap(), 972));
    (0..10).for_each(|_| assert_eq!(hear(&target).0, [7; 972]));
    assert!(begun.elapsed() >= Duration::from_millis(100), "{:?}", begun.elapsed());
}

#[test]
fn packets_of_every_length_pass_whole() {
    let (client, target) = (socket(), socket());
    let proxy = proxy(&target, "none");
    for length in [0, 1, 1_200, 1_452, 65_507] {
        let packet: Vec<u8> = (0..length).map(|at| u8::try_from(at % 251).unwrap()).collect();
        client.send_to(&packet, proxy.address()).unwrap();
        assert_eq!(hear(&target).0, packet);
    }
    let stats = proxy.stats();
    assert_eq!((stats.inward.forwarded, stats.inward.forwarded_bytes), (5, 1 + 1_200 + 1_452 + 65_507));
    assert_eq!((stats.unsent, stats.overrun), (0, Some(0)));
}

#[test]
fn a_cut_is_of_one_direction_or_both() {
    let (client, target) = (socket(), socket());
    let proxy = proxy(&target, "none");
    round(&client, &proxy, &target);

    proxy.cut(Way::In);
    client.send_to(b"swallowed", proxy.address()).unwrap();
    until(&proxy, "a packet is cut", |stats| stats.inward.cut == 1);
    proxy.heal();
    let (_, from) = {
        client.send_to(b"first", proxy.address()).unwrap();
        let heard = hear(&target);
        assert_eq!(heard.0, b"first", "what was cut stays lost");
        heard
    };

    proxy.cut(Way::Out);
    client.send_to(b"still in", proxy.address()).unwrap();
    assert_eq!(hear(&target).0, b"still in");
    target.send_to(b"swallowed", from).unwrap();
    until(&proxy, "an answer is cut", |stats| stats.outward.cut == 1);
    assert_eq!(proxy.cuts(), [Way::Out]);
    proxy.heal();
    target.send_to(b"second", from).unwrap();
    assert_eq!(hear(&client).0, b"second");

    proxy.cut_both();
    assert_eq!(proxy.cuts(), Way::BOTH);
    let newcomer = socket();
    newcomer.send_to(b"swallowed", proxy.address()).unwrap();
    until(&proxy, "a newcomer is cut off too", |stats| stats.inward.cut == 2);
    proxy.heal();
    round(&newcomer, &proxy, &target);
    round(&client, &proxy, &target);
}

#[test]
fn clients_keep_an_address_each() {
    let (first, second, target) = (socket(), socket(), socket());
    let proxy = proxy(&target, "none");
    let mut seen = Vec::new();
    for client in [&first, &second, &first, &second] {
        client.send_to(b"x", proxy.address()).unwrap();
        seen.push(hear(&target).1);
    }
    assert_eq!((seen[0], seen[1]), (seen[2], seen[3]));
    assert_ne!(seen[0], seen[1]);
    target.send_to(b"for the second", seen[1]).unwrap();
    target.send_to(b"for the first", seen[0]).unwrap();
    assert_eq!(hear(&first).0, b"for the first");
    assert_eq!(hear(&second).0, b"for the second");
    // A stranger can't speak for the target.
    socket().send_to(b"forged", seen[0]).unwrap();
    target.send_to(b"genuine", seen[0]).unwrap();
    assert_eq!(hear(&first), (b"genuine".to_vec(), proxy.address()));
    let stats = proxy.stats();
    let clients: Vec<SocketAddr> = stats.clients.iter().map(|client| client.client).collect();
    let mut expected = vec![first.local_addr().unwrap(), second.local_addr().unwrap()];
    expected.sort_unstable();
    assert_eq!(clients, expected);
}

#[test]
fn clients_are_bounded() {
    let target = socket();
    let proxy = proxy_with(&target, ProxySettings { clients_max: 2, ..ProxySettings::default() });
    let clients = [socket(), socket(), socket()];
    for client in &clients {
        client.send_to(b"x", proxy.address()).unwrap();
    }
    let stats = until(&proxy, "all are seen", |stats| stats.inward.entered + stats.refused == 3);
    assert_eq!((stats.inward.entered, stats.clients.len()), (2, 2));
}

#[test]
fn idle_clients_are_forgotten() {
    let target = socket();
    let settings = ProxySettings { clients_max: 1, idle: Duration::from_millis(50), ..ProxySettings::default() };
    let proxy = proxy_with(&target, settings);
    for client in [socket(), socket()] {
        client.send_to(b"x", proxy.address()).unwrap();
        assert_eq!(hear(&target).0, b"x");
        until(&proxy, "it is forgotten", |stats| stats.clients.is_empty());
    }
    let stats = proxy.stats();
    assert_eq!((stats.expired, stats.inward.forwarded), (2, 2), "what they did is remembered");
}

#[test]
fn a_target_that_comes_late_is_reached() {
    let gone = socket();
    let target = gone.local_addr().unwrap();
    let proxy = Proxy::bind(local()).unwrap().start(target, ProxySettings::default()).unwrap();
    drop(gone);
    let client = socket();
    client.send_to(b"into the void", proxy.address()).unwrap();
    until(&proxy, "it is forwarded", |stats| stats.inward.forwarded == 1);
    let target = UdpSocket::bind(target).unwrap();
    target.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let begun = clock::now();
    // The system reports the first packet's fate on the next one, which it then does not send.
    let mut buffer = [0; 16];
    loop {
        client.send_to(b"again", proxy.address()).unwrap();
        match target.recv_from(&mut buffer) {
            Ok(_) => break,
            Err(error) => assert!(matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)),
        }
        assert!(begun.elapsed() < PATIENCE);
    }
}

#[test]
fn packets_wait_until_a_proxy_is_started() {
    let (client, target) = (socket(), socket());
    let proxy = Proxy::bind(local()).unwrap();
    client.send_to(b"early", proxy.address()).unwrap();
    let _proxy = proxy.start(target.local_addr().unwrap(), ProxySettings::default()).unwrap();
    assert_eq!(hear(&target).0, b"early");
}

#[test]
fn a_dropped_proxy_gives_its_port_back() {
    let target = socket();
    let proxy = proxy(&target, "none");
    let (address, clone) = (proxy.address(), proxy.clone());
    drop(proxy);
    round(&socket(), &clone, &target);
    drop(clone);
    UdpSocket::bind(address).unwrap();
}

#[test]
fn what_can_not_work_is_refused() {
    let taken = socket();
    let error = Proxy::bind(taken.local_addr().unwrap()).unwrap_err();
    assert!(matches!(error, ProxyError::Bind { .. }), "{error}");
    let proxy = Proxy::bind(local()).unwrap();
    let itself = proxy.address();
    let error = proxy.start(itself, ProxySettings::default()).unwrap_err();
    assert!(matches!(error, ProxyError::Itself { .. }), "{error}");
    let error = Proxy::bind(local()).unwrap().start(local(), ProxySettings::default()).unwrap_err();
    assert!(matches!(error, ProxyError::Nowhere { .. }), "{error}");
}
