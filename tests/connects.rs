//! Connections that come and go leave memory, sockets and tasks as they were; alone in its process, so that nothing
//! else counts.

#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, dead_code, reason = "a test that fails, fails loudly")]

#[path = "endpoint/rig.rs"]
mod rig;

use std::fs;
use std::time::Duration;

use bytes::Bytes;
use libp2p::core::Endpoint as Role;
use libp2p::core::transport::PortUse;
use libp2p::identity::Keypair;
use ringfence::transport::endpoint::PathSettings;
use ringfence::transport::quic::{QuicLink, QuicSettings};
use ringfence::transport::{Lane, LinkEvent};

use rig::{Host, connect, converse, until};

/// Bytes by which memory may grow for reasons of the allocator's own.
const SLACK: usize = 6 << 20;

/// Bytes of this process that are in memory.
fn resident() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn sockets() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// What this process holds.
#[derive(Debug, Clone, Copy)]
struct Held {
    resident: usize,
    sockets: usize,
    tasks: usize,
}

impl Held {
    fn now() -> Self {
        Self { resident: resident(), sockets: sockets(), tasks: tasks() }
    }

    /// Waits until no more is held, but for the allocator's slack.
    async fn is_all(self, after: &str) {
        until("all tasks are over", || tasks() <= self.tasks).await;
        until("all sockets are closed", || sockets() <= self.sockets).await;
        let grown = resident().saturating_sub(self.resident);
        assert!(grown < SLACK, "{} bytes, and {grown} more after {after}", self.resident);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_end_leave_nothing_behind() {
    transports_alone().await;
    whole_links().await;
}

/// Links connect, say something on every lane and disconnect.
async fn whole_links() {
    let start = || QuicLink::start(QuicSettings::new(Keypair::generate_ed25519()));
    let ((near, mut near_events), (far, mut far_events)) = (start().await.unwrap(), start().await.unwrap());
    let mut round = async |times| {
        for _ in 0..times {
            let address = far.addresses()[0].clone();
            assert_eq!(near.dial(address).await, Ok(far.local()));
            for lane in [Lane::Control, Lane::Data, Lane::Reply] {
                near.send(far.local(), lane, Bytes::from(vec![7; 2048])).await.unwrap();
            }
            let mut bodies = 0;
            while bodies < 3 {
                if let LinkEvent::Received { .. } = far_events.recv().await.unwrap() {
                    bodies += 1;
                }
            }
            near.disconnect(far.local(), "done");
            for events in [&mut near_events, &mut far_events] {
                while !matches!(events.recv().await.unwrap(), LinkEvent::Disconnected { .. }) {}
            }
        }
    };
    round(100).await;
    let held = Held::now();
    round(1_000).await;
    held.is_all("1,000 connections of links").await;
}

/// Transports without links, dialling from the listener's socket and from others.
async fn transports_alone() {
    let settings = || PathSettings { handshake_timeout: Duration::from_secs(20), ..PathSettings::default() };
    let (dialler, (mut host, address)) = (Host::new(settings()), Host::listening(settings()).await);
    let mut round = async |times, port_use| {
        for _ in 0..times {
            let (mut near, mut far) = match port_use {
                PortUse::Reuse => connect(&dialler, &mut host, &address).await,
                PortUse::New => {
                    let dial = dialler.dial_as(&address, Role::Dialer, port_use);
                    let (near, far) = tokio::join!(dial, host.inbound());
                    (near.unwrap().1, far.unwrap().1)
                }
            };
            converse(&mut near, &mut far).await;
        }
    };
    round(100, PortUse::Reuse).await;
    round(5, PortUse::New).await;
    until("the first are over", || tasks() <= 4).await;
    let held = Held::now();
    round(200, PortUse::Reuse).await;
    round(20, PortUse::New).await;
    held.is_all("220 connections").await;
}
