//! Hops behind an emulated WAN: full, and yet quick to control.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use libp2p::Multiaddr;
use libp2p::multiaddr::Protocol;
use ringfence::clock::now;
use ringfence::transport::{HopStats, Lane, LinkEvent};
use ringfence::wan::{Proxy, ProxyHandle, ProxySettings, WanSettings};

use super::nodes::{End, quic_node, quic_settings, shows};

/// A frame of the full-size model in bf16.
const FRAME: usize = 33_000;

/// A proxy in front of a node, and the node's address behind it.
fn before(end: &End, wan: &str) -> (ProxyHandle, Multiaddr) {
    let address = end.address();
    let mut address = address.iter();
    let (Some(Protocol::Ip4(ip)), Some(Protocol::Udp(port))) = (address.next(), address.next()) else {
        panic!("{}", end.address());
    };
    let settings = ProxySettings { wan: wan.parse::<WanSettings>().unwrap(), ..ProxySettings::default() };
    let proxy = Proxy::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let proxy = proxy.start(SocketAddr::from((ip, port)), settings).unwrap();
    let way = [Protocol::Ip4(ip), Protocol::Udp(proxy.address().port())].into_iter().chain(address).collect();
    (proxy, way)
}

/// What a hop did while it was kept full for a while.
#[derive(Debug)]
struct Full {
    stats: HopStats,
    /// Bytes of frames per second, once it had settled.
    rate: f64,
    /// How long control messages took, one way, sorted.
    control: Vec<Duration>,
    largest_in_flight: u64,
}

/// Keeps a hop full of frames for `time`, the first half of it to settle.
async fn fill(wan: &str, time: Duration) -> Full {
    let (a, mut b) = (quic_node(quic_settings()).await, quic_node(quic_settings()).await);
    let (_proxy, way) = before(&b, wan);
    let to = a.link.dial(way).await.unwrap();
    let start = now();
    let frames = tokio::spawn({
        let link = Arc::clone(&a.link);
        async move {
            let body = Bytes::from(vec![1; FRAME]);
            while start.elapsed() < time {
                link.send(to, Lane::Data, body.clone()).await.unwrap();
            }
        }
    });
    let control = tokio::spawn({
        let link = Arc::clone(&a.link);
        async move {
            let mut largest = 0;
            while start.elapsed() < time {
                let at = u64::try_from(start.elapsed().as_nanos()).unwrap();
                link.send(to, Lane::Control, Bytes::copy_from_slice(&at.to_le_bytes())).await.unwrap();
                let stats = link.hop_stats(to).unwrap();
                if start.elapsed() > time / 2 {
                    largest = largest.max(stats.in_flight);
                }
                tokio::time::sleep(Duration::from_millis(7)).await;
            }
            (link.hop_stats(to).unwrap(), largest)
        }
    });
    let (mut bytes, mut control_took) = (0, Vec::new());
    while start.elapsed() < time {
        if let LinkEvent::Received { lane, body, .. } = b.next().await
            && start.elapsed() > time / 2
        {
            match lane {
                Lane::Data | Lane::Reply => bytes += body.len(),
                Lane::Control => {
                    let sent = Duration::from_nanos(u64::from_le_bytes(body[..].try_into().unwrap()));
                    control_took.push(start.elapsed() - sent);
                }
            }
        }
    }
    let (stats, largest_in_flight) = control.await.unwrap();
    frames.abort();
    control_took.sort_unstable();
    let rate = bytes as f64 / (time / 2).as_secs_f64();
    Full { stats, rate, control: control_took, largest_in_flight }
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() - 1) * percent / 100]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_hop_carries_its_rate_and_control_is_not_behind_it() {
    for wan in ["rtt=40ms,rate=50mbit,queue=4mb", "rtt=40ms,rate=50mbit,queue=4mb,loss=0.1%"] {
        shows(async || fits(&fill(wan, Duration::from_secs(4)).await).map_err(|why| format!("{wan}: {why}"))).await;
    }
}

/// 50 Mbit/s, less what headers take; a frame takes over 5 ms of it.
const RATE: f64 = 5.95e6;
const ROUND_TRIP: Duration = Duration::from_millis(40);

/// Whether a hop was as full as it is to be, and no fuller.
fn fits(full: &Full) -> Result<(), String> {
    assert!(full.stats.queued > 0, "it was full: {full:?}");
    let fits = RATE * (ROUND_TRIP.as_secs_f64() + FRAME as f64 / RATE);
    let control = percentile(&full.control, 50);
    // What the machine adds to a round trip counts as the hop's.
    if full.rate > 0.85 * RATE && (full.largest_in_flight as f64) < 1.75 * fits && control < ROUND_TRIP * 13 / 10 {
        return Ok(());
    }
    let (rate, in_flight, stats) = (full.rate, full.largest_in_flight, full.stats);
    Err(format!("{rate:.0} B/s; {in_flight} bytes in flight, {fits:.0} fit; control {control:?}; {stats:?}"))
}

/// A frame there and a byte back, once, `frame` bytes long.
async fn echo(a: &mut End, b: &mut End, frame: usize) -> Duration {
    let sent = now();
    a.link.send(b.peer(), Lane::Data, Bytes::from(vec![1; frame])).await.unwrap();
    assert_eq!(b.expect_body(a.peer()).await.1.len(), frame);
    b.link.send(a.peer(), Lane::Reply, Bytes::from_static(b"1")).await.unwrap();
    a.expect_body(b.peer()).await;
    sent.elapsed()
}

/// Idle for six idle times of the connection, which its keep-alives carry it over. A busy machine
/// is silent for a while too: the idle time is far longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hop_that_was_idle_for_long_carries_its_first_frame_at_full_speed() {
    let settings = || {
        let mut settings = quic_settings();
        settings.path.idle_timeout = Duration::from_secs(2);
        settings.path.keep_alive = Duration::from_millis(100);
        settings
    };
    shows(async || {
        let mut hops = Vec::new();
        for _ in 0..3 {
            let (mut a, mut b) = (quic_node(settings()).await, quic_node(settings()).await);
            let (proxy, way) = before(&b, "rtt=60ms");
            a.link.dial(way).await.unwrap();
            a.expect_connected(b.peer()).await;
            b.expect_connected(a.peer()).await;
            hops.push((a, b, proxy));
        }
        tokio::time::sleep(Duration::from_secs(12)).await;
        let mut took = Vec::new();
        for (a, b, _proxy) in &mut hops {
            took.push(echo(a, b, FRAME).await);
        }
        took.sort_unstable();
        // A window that had collapsed would make it two round trips or more.
        (took[0] < Duration::from_millis(110)).then_some(()).ok_or(format!("{took:?}"))
    })
    .await;
}
