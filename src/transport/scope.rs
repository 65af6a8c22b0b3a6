//! How far an address reaches: pure.
//!
//! Owns the rule that an address learned from a peer is dialled only where the operator's own
//! addresses show that such addresses mean something here: `127.0.0.1` in a stranger's list is this
//! host, and `192.168.1.7` somebody else's printer.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use libp2p::Multiaddr;
use libp2p::multiaddr::Protocol;

/// How far addresses reach, nearest first; as a limit: which of a peer's addresses are dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// This host; as a limit, everything.
    Loopback,
    /// A local network; as a limit, all but loopback.
    Private,
    /// The internet; as a limit, nothing else.
    Public,
}

/// An address reaches less far than what is dialled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "address {address} is a {scope} one, and only {limit} ones are dialled: let its owner announce another, or start \
     this one with --dial-scope {scope}"
)]
pub struct OutOfScope {
    /// The address.
    pub address: Multiaddr,
    /// What it is.
    pub scope: Scope,
    /// What is dialled.
    pub limit: Scope,
}

/// The text names no scope.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected public, private or loopback, got {got:?}")]
pub struct ScopeError {
    /// The text.
    pub got: String,
}

impl Scope {
    /// How far an address reaches. What is no IP address counts as public.
    #[must_use]
    pub fn of(address: &Multiaddr) -> Self {
        match address.iter().next() {
            Some(Protocol::Ip4(ip)) => Self::of_ip(IpAddr::V4(ip)),
            Some(Protocol::Ip6(ip)) => Self::of_ip(IpAddr::V6(ip)),
            _ => Self::Public,
        }
    }

    fn of_ip(ip: IpAddr) -> Self {
        // 100.64.0.0/10 (RFC 6598) is behind a carrier's translator.
        let shared = |octets: [u8; 4]| octets[0] == 100 && octets[1] & 0xc0 == 64;
        match ip {
            IpAddr::V4(ip) if ip.is_loopback() || ip.is_unspecified() => Self::Loopback,
            IpAddr::V4(ip) if ip.is_private() || ip.is_link_local() || shared(ip.octets()) => Self::Private,
            IpAddr::V4(_) => Self::Public,
            IpAddr::V6(ip) => Self::of_ip6(ip),
        }
    }

    fn of_ip6(ip: Ipv6Addr) -> Self {
        if let Some(ip) = ip.to_ipv4_mapped() {
            return Self::of_ip(IpAddr::V4(ip));
        }
        if ip.is_loopback() || ip.is_unspecified() {
            Self::Loopback
        } else if ip.is_unique_local() || ip.is_unicast_link_local() {
            Self::Private
        } else {
            Self::Public
        }
    }

    /// The limit that an operator's own addresses show: as near as the nearest of them. An
    /// unspecified address (`0.0.0.0`) says nothing.
    #[must_use]
    pub fn shown_by<'a>(named: impl IntoIterator<Item = &'a Multiaddr>) -> Self {
        let says = named.into_iter().filter(|address| match address.iter().next() {
            Some(Protocol::Ip4(ip)) => !ip.is_unspecified(),
            Some(Protocol::Ip6(ip)) => !ip.is_unspecified(),
            _ => true,
        });
        says.map(Self::of).min().unwrap_or(Self::Public)
    }

    /// Checks an address that a peer named against this limit.
    ///
    /// # Errors
    /// [`OutOfScope`] with the way to allow it.
    pub fn check(self, address: &Multiaddr) -> Result<(), OutOfScope> {
        let scope = Self::of(address);
        if scope < self { Err(OutOfScope { address: address.clone(), scope, limit: self }) } else { Ok(()) }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loopback => "loopback",
            Self::Private => "private",
            Self::Public => "public",
        })
    }
}

impl FromStr for Scope {
    type Err = ScopeError;

    fn from_str(text: &str) -> Result<Self, ScopeError> {
        match text {
            "loopback" => Ok(Self::Loopback),
            "private" => Ok(Self::Private),
            "public" => Ok(Self::Public),
            _ => Err(ScopeError { got: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ip: &str) -> Multiaddr {
        let kind = if ip.contains(':') { "ip6" } else { "ip4" };
        format!("/{kind}/{ip}/udp/4001/quic-v1").parse().unwrap()
    }

    #[test]
    fn addresses_are_told_apart() {
        for (scope, ips) in [
            (Scope::Loopback, &["127.0.0.1", "127.9.9.9", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"][..]),
            (Scope::Private, &["10.1.2.3", "172.31.0.1", "192.168.1.7", "169.254.1.1", "100.64.0.1", "100.127.9.9"]),
            (Scope::Private, &["fd00::1", "fe80::1", "::ffff:10.0.0.1"]),
            (Scope::Public, &["172.32.0.1", "100.128.0.1", "8.8.8.8", "2001:db8::1"]),
        ] {
            for ip in ips {
                assert_eq!(Scope::of(&at(ip)), scope, "{ip}");
            }
        }
        assert_eq!(Scope::of(&"/dns4/example.org/udp/1/quic-v1".parse().unwrap()), Scope::Public);
    }

    #[test]
    fn a_limit_lets_only_what_reaches_as_far() {
        let (loopback, private, public) = (at("127.0.0.1"), at("10.0.0.1"), at("8.8.8.8"));
        let lets = |limit: Scope| [&loopback, &private, &public].map(|address| limit.check(address).is_ok());
        assert_eq!(lets(Scope::Loopback), [true, true, true]);
        assert_eq!(lets(Scope::Private), [false, true, true]);
        assert_eq!(lets(Scope::Public), [false, false, true]);
        let error = Scope::Public.check(&private).unwrap_err().to_string();
        assert!(error.contains("10.0.0.1") && error.contains("--dial-scope private"), "{error}");
    }

    #[test]
    fn an_operators_addresses_show_the_limit() {
        assert_eq!(Scope::shown_by(&[at("0.0.0.0"), at("8.8.8.8")]), Scope::Public);
        assert_eq!(Scope::shown_by(&[at("8.8.8.8"), at("10.0.0.1")]), Scope::Private);
        assert_eq!(Scope::shown_by(&[at("127.0.0.1"), at("8.8.8.8")]), Scope::Loopback);
        assert_eq!(Scope::shown_by(&[]), Scope::Public);
        assert!("somewhere".parse::<Scope>().is_err());
        assert_eq!(Scope::Private.to_string().parse(), Ok(Scope::Private));
    }
}
