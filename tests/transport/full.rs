//! Control while every data lane is full, on a hop whose queue control shares with data.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use libp2p::Multiaddr;
use libp2p::multiaddr::Protocol;
use ringfence::clock::now;
use ringfence::transport::{Lane, LinkEvent};
use ringfence::wan::{Proxy, ProxyHandle, ProxySettings, WanSettings};
use tokio::time::{sleep, timeout};

use super::nodes::{End, PATIENCE, quic_node, quic_settings, shows};

const RTT: Duration = Duration::from_millis(40);

/// Most that a cancel may take to reach a stage, in round trips.
const ROUND_TRIPS_MAX: f64 = 1.3;

/// A frame of the full-size model over the bf16 wire.
const FRAME: usize = 33_000;

/// Lanes are full after so long, and the windows as large as they get.
const FILLING: Duration = Duration::from_secs(2);

/// Control bodies of a try, and the pause between them.
const BODIES: u64 = 21;
const PAUSE: Duration = Duration::from_millis(37);

/// Stands before a link; gives the address to dial instead.
fn behind(target: &End, wan: &WanSettings) -> (Multiaddr, ProxyHandle) {
    let address = target.address();
    let mut parts = address.iter();
    let (Some(Protocol::Ip4(ip)), Some(Protocol::Udp(port))) = (parts.next(), parts.next()) else {
        panic!("{address}");
    };
    let settings = ProxySettings { wan: wan.clone(), ..ProxySettings::default() };
    let proxy = Proxy::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let proxy = proxy.start(SocketAddr::new(ip.into(), port), settings).unwrap();
    let change = |part| if let Protocol::Udp(_) = part { Protocol::Udp(proxy.address().port()) } else { part };
    (address.iter().map(change).collect(), proxy)
}

/// The median time of a control body from its sender's queue to its receiver's owner while data
/// lanes are full, and the share of the rate that is used meanwhile.
async fn control_behind_full_lanes(wan: &WanSettings) -> (Duration, f64) {
    let (mut near, mut far) = (quic_node(quic_settings()).await, quic_node(quic_settings()).await);
    let (address, proxy) = behind(&far, wan);
    let to = near.link.dial(address).await.unwrap();
    near.expect_connected(to).await;
    let filling = Arc::clone(&near.link);
    let flood = tokio::spawn(async move {
        let frame = Bytes::from(vec![7; FRAME]);
        // A queue that stays full for long is what this is about.
        while filling.send(to, Lane::Data, frame.clone()).await != Err(ringfence::transport::LinkError::Closed) {}
    });
    let heard = tokio::spawn(async move {
        let mut heard = Vec::new();
        while heard.len() < BODIES as usize {
            let event = timeout(PATIENCE, far.events.recv()).await.expect("an event in time");
            if let Some(LinkEvent::Received { lane: Lane::Control, body, .. }) = event {
                assert_eq!(body[..], (heard.len() as u64).to_le_bytes());
                heard.push(now());
            }
        }
        (heard, far)
    });
    sleep(FILLING).await;
    let (begun, before) = (now(), proxy.stats().inward.forwarded_bytes);
    let mut sent = Vec::new();
    for number in 0..BODIES {
        sent.push(now());
        near.link.send(to, Lane::Control, Bytes::copy_from_slice(&number.to_le_bytes())).await.unwrap();
        sleep(PAUSE).await;
    }
    let bits = (proxy.stats().inward.forwarded_bytes - before) as f64 * 8.0;
    let used = bits / (now() - begun).as_secs_f64() / wan.inward.rate.unwrap().get() as f64;
    let (heard, far) = heard.await.unwrap();
    near.link.shutdown().await;
    far.link.shutdown().await;
    flood.await.unwrap();
    let mut times: Vec<Duration> = sent.iter().zip(heard).map(|(sent, heard)| heard - *sent).collect();
    times.sort_unstable();
    (times[times.len() / 2], used)
}

/// Data in flight is bounded by what the path holds, so what control waits behind is.
async fn a_cancel_overtakes_full_lanes(queue: &str) {
    let wan = format!("rtt={}ms,rate=50mbit,queue={queue}", RTT.as_millis()).parse().unwrap();
    let most = RTT.mul_f64(ROUND_TRIPS_MAX);
    shows(async || {
        let (median, used) = control_behind_full_lanes(&wan).await;
        let held = median <= most && used > 0.5;
        held.then_some(()).ok_or(format!("{median:.1?}, {most:?} at most, at {:.0} % of the rate", used * 100.0))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_overtakes_full_lanes_before_a_short_queue() {
    a_cancel_overtakes_full_lanes("256kb").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_overtakes_full_lanes_before_a_long_queue() {
    a_cancel_overtakes_full_lanes("2mb").await;
}
