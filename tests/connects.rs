//! Connections that come and go leave memory, sockets and tasks as they were; alone in its process, so that nothing
//! else counts.

#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, dead_code, reason = "a test that fails, fails loudly")]

#[path = "endpoint/rig.rs"]
mod rig;

use std::fs;
use std::time::Duration;

use libp2p::core::Endpoint as Role;
use libp2p::core::transport::PortUse;
use ringfence::transport::endpoint::PathSettings;

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_end_leave_nothing_behind() {
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
    let (before, sockets_before, tasks_before) = (resident(), sockets(), tasks());
    round(200, PortUse::Reuse).await;
    round(20, PortUse::New).await;
    until("all tasks are over", || tasks() <= tasks_before).await;
    until("all sockets are closed", || sockets() <= sockets_before).await;
    let grown = resident().saturating_sub(before);
    assert!(grown < SLACK, "{before} bytes, and {grown} more after 220 connections");
}
