//! UDP sockets and their buffers.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, socket_with, sockopt};

use super::settings::PathSettings;

/// Binds a socket with the buffers that the settings ask for, as far as the system gives them.
///
/// A socket of IPv6 is of IPv6 only, so that one of IPv4 may have the same port.
pub(super) fn bound(local: SocketAddr, settings: &PathSettings) -> io::Result<UdpSocket> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP))?;
    if local.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    sockopt::set_socket_recv_buffer_size(&socket, settings.socket_receive_bytes)?;
    sockopt::set_socket_send_buffer_size(&socket, settings.socket_send_bytes)?;
    // The system counts its own overhead too, and says twice what it was asked for.
    let receive = sockopt::socket_recv_buffer_size(&socket)? / 2;
    let send = sockopt::socket_send_buffer_size(&socket)? / 2;
    bind(&socket, &local)?;
    let socket = UdpSocket::from(socket);
    if receive < settings.socket_receive_bytes || send < settings.socket_send_bytes {
        tracing::debug!(
            asked_receive = settings.socket_receive_bytes,
            receive,
            asked_send = settings.socket_send_bytes,
            send,
            "the system gives smaller socket buffers than asked for: raise net.core.rmem_max and net.core.wmem_max if packets are lost in bursts"
        );
    }
    Ok(socket)
}

/// Binds a socket to any port, to dial a remote address from.
pub(super) fn unbound(remote: SocketAddr, settings: &PathSettings) -> io::Result<UdpSocket> {
    let local = if remote.is_ipv4() {
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
    } else {
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))
    };
    bound(local, settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_may_have_the_same_port() {
        let settings = PathSettings::default();
        let four = bound(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), &settings).unwrap();
        let port = four.local_addr().unwrap().port();
        // A host without IPv6 has nothing to bind to.
        if let Ok(six) = bound(SocketAddr::from((Ipv6Addr::LOCALHOST, port)), &settings) {
            assert_eq!(six.local_addr().unwrap().port(), port);
        }
        assert!(bound(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), &settings).is_err(), "a port is taken once");
    }

    #[test]
    fn buffers_are_as_asked_as_far_as_the_system_allows() {
        let asked = 64 << 10;
        let settings =
            PathSettings { socket_receive_bytes: asked, socket_send_bytes: asked, ..PathSettings::default() };
        let socket = unbound(SocketAddr::from(([192, 0, 2, 1], 9)), &settings).unwrap();
        assert_eq!(sockopt::socket_recv_buffer_size(&socket).unwrap() / 2, asked);
        assert_eq!(sockopt::socket_send_buffer_size(&socket).unwrap() / 2, asked);
    }
}
