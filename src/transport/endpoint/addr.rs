//! Multiaddresses and socket addresses: `/ip4/…/udp/…/quic-v1` and back.

use std::net::{IpAddr, SocketAddr};

use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};

/// Takes an address apart: the socket's address, and the peer if it ends in one.
///
/// `None` for anything but `/ip4|ip6/…/udp/…/quic-v1`, with or without `/p2p/…` at the end.
pub(super) fn to_socket(address: &Multiaddr) -> Option<(SocketAddr, Option<PeerId>)> {
    let mut parts = address.iter();
    let (host, Protocol::Udp(port), Protocol::QuicV1) = (parts.next()?, parts.next()?, parts.next()?) else {
        return None;
    };
    let ip = if let Protocol::Ip4(ip) = host {
        IpAddr::V4(ip)
    } else if let Protocol::Ip6(ip) = host {
        IpAddr::V6(ip)
    } else {
        return None;
    };
    let (end, beyond) = (parts.next(), parts.next());
    let peer = if let Some(Protocol::P2p(peer)) = &end { Some(*peer) } else { None };
    (end.is_none() || peer.is_some() && beyond.is_none()).then_some((SocketAddr::new(ip, port), peer))
}

/// The address of a socket as libp2p writes it.
pub(super) fn to_multiaddr(socket: SocketAddr) -> Multiaddr {
    Multiaddr::from(socket.ip()).with(Protocol::Udp(socket.port())).with(Protocol::QuicV1)
}

/// Whether a packet can be sent to a socket: it names a host and a port.
pub(super) fn is_somewhere(socket: SocketAddr) -> bool {
    socket.port() != 0 && !socket.ip().is_unspecified()
}

/// Whether a socket that is bound to `local` can send to `remote`: a loopback address reaches
/// loopback only, any other address of a host reaches everything but that, and an unspecified one
/// reaches both.
pub(super) fn reaches(local: SocketAddr, remote: SocketAddr) -> bool {
    local.is_ipv4() == remote.is_ipv4()
        && (local.ip().is_unspecified() || local.ip().is_loopback() == remote.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_a_socket_comes_back_as_it_was() {
        for text in ["127.0.0.1:4001", "203.0.113.7:65535", "0.0.0.0:0", "[::1]:4001", "[2001:db8::7]:1"] {
            let socket: SocketAddr = text.parse().unwrap();
            assert_eq!(to_socket(&to_multiaddr(socket)), Some((socket, None)));
        }
        assert_eq!(to_multiaddr("[::1]:9".parse().unwrap()).to_string(), "/ip6/::1/udp/9/quic-v1");
    }

    #[test]
    fn the_peer_at_the_end_is_found() {
        let peer = PeerId::random();
        let address = format!("/ip4/192.0.2.1/udp/9/quic-v1/p2p/{peer}").parse().unwrap();
        assert_eq!(to_socket(&address), Some(("192.0.2.1:9".parse().unwrap(), Some(peer))));
    }

    #[test]
    fn anything_else_is_refused() {
        let peer = PeerId::random();
        for text in [
            String::new(),
            "/ip4/127.0.0.1".to_owned(),
            "/ip4/127.0.0.1/udp/9".to_owned(),
            "/ip4/127.0.0.1/tcp/9".to_owned(),
            "/ip4/127.0.0.1/tcp/9/quic-v1".to_owned(),
            "/ip4/127.0.0.1/udp/9/quic".to_owned(),
            "/ip4/127.0.0.1/udp/9/quic-v1/webtransport".to_owned(),
            "/dns4/example.org/udp/9/quic-v1".to_owned(),
            "/udp/9/quic-v1".to_owned(),
            format!("/p2p/{peer}"),
            format!("/ip4/127.0.0.1/udp/9/quic-v1/p2p/{peer}/p2p-circuit"),
        ] {
            assert_eq!(to_socket(&text.parse().unwrap()), None, "{text}");
        }
    }

    #[test]
    fn loopback_reaches_loopback_only() {
        let reach = |local: &str, remote: &str| reaches(local.parse().unwrap(), remote.parse().unwrap());
        assert!(reach("127.0.0.1:1", "127.0.0.1:2"));
        assert!(!reach("127.0.0.1:1", "192.0.2.1:2"));
        assert!(reach("0.0.0.0:1", "192.0.2.1:2") && reach("0.0.0.0:1", "127.0.0.1:2"));
        assert!(reach("192.0.2.9:1", "192.0.2.1:2") && !reach("192.0.2.9:1", "127.0.0.1:2"));
        assert!(!reach("0.0.0.0:1", "[::1]:2") && reach("[::]:1", "[::1]:2"));
    }

    #[test]
    fn an_unspecified_address_is_nowhere() {
        for nowhere in ["0.0.0.0:9", "192.0.2.1:0", "[::]:9"] {
            assert!(!is_somewhere(nowhere.parse().unwrap()), "{nowhere}");
        }
        assert!(is_somewhere("192.0.2.1:9".parse().unwrap()));
    }
}
