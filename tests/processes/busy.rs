//! A machine whose every processor is busy, behind a network with 200 ms jitter: slow, and no fault.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringfence::clock;
use ringfence::engine::NUMERICS_ID;
use ringfence::proto::control::PROTOCOL_VERSION;
use ringfence::wan::{Proxy, ProxyHandle, ProxySettings};
use serde_json::{Value, json};

use super::http::{self, ids};
use super::rig::{CUT, Keys, Listening, Stage};

/// Uniform from none to 250 ms, each way, each packet.
const WAN: &str = "rtt=100ms,jitter=200ms";

/// Pause between two looks at the ring.
const LOOK: Duration = Duration::from_millis(50);

/// A process that only computes; it ends with this one.
struct Busy(Child);

impl Busy {
    fn start() -> Self {
        let spin = "while kill -0 $PPID 2>/dev/null; do i=0; while [ $i -lt 50000 ]; do i=$((i+1)); done; done";
        Self(Command::new("sh").args(["-c", spin]).stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ticks of all processors: in all, and without work.
fn ticks() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/stat").unwrap();
    let ticks: Vec<u64> = text.lines().next().unwrap().split_whitespace().skip(1).map(|n| n.parse().unwrap()).collect();
    // Guests are in user time already.
    (ticks.iter().take(8).sum(), ticks[3] + ticks[4])
}

/// A ring whose every hop goes through a proxy.
struct Far {
    // Dropped from the top: the coordinator first, so that it sees no fault.
    coordinator: Listening,
    stages: Vec<Stage>,
    _proxies: Vec<ProxyHandle>,
    _keys: Keys,
}

impl Far {
    fn start() -> Self {
        let keys = Keys::new();
        let peer = keys.peer("coordinator");
        let (mut stages, mut proxies, mut dial) = (Vec::new(), Vec::new(), Vec::new());
        for (seed, range) in (0..).zip(CUT) {
            let proxy = Proxy::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
            let announce = format!("/ip4/127.0.0.1/udp/{}/quic-v1", proxy.address().port());
            let stage = Stage::start(&keys, range, &["--allow", &peer, "--announce", &announce]);
            let port = stage.address.split('/').nth(4).unwrap().parse().unwrap();
            let settings = ProxySettings { wan: WAN.parse().unwrap(), seed, ..ProxySettings::default() };
            proxies.push(proxy.start(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), settings).unwrap());
            dial.push(format!("{announce}/p2p/{}", stage.peer));
            stages.push(stage);
        }
        let args: Vec<&str> = dial.iter().flat_map(|address| ["--stage", address]).collect();
        let coordinator = Listening::start(&keys, &[&args[..], &["--heal-wait", "60"]].concat());
        coordinator.ready();
        Self { coordinator, stages, _proxies: proxies, _keys: keys }
    }

    /// One stream: its token ids.
    fn stream(&self, seed: u64) -> Vec<u64> {
        let body = json!({"prompt": "And it came to pass", "max_tokens": 24, "temperature": 0.8, "seed": seed,
                          "ignore_eos": true, "stream": true, "return_token_ids": true});
        ids(&http::stream(&self.coordinator.url, &body).events())
    }
}

/// Says that it is over, however it ends.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// What looks at a ring saw.
#[derive(Default)]
struct Seen {
    /// Times that a stage was late by three heartbeats.
    suspicions: u64,
    /// The largest smoothed round trip of a hop, and jitter of one, in milliseconds.
    rtt_ms: u64,
    jitter_ms: u64,
}

impl Seen {
    fn look(&mut self, ring: &Value, late: &mut BTreeSet<String>) {
        for member in ring["members"].as_array().unwrap() {
            let peer = member["peer"].to_string();
            if member["alive"] == true {
                late.remove(&peer);
            } else if late.insert(peer) {
                self.suspicions += 1;
            }
        }
        for hop in ring["hops"].as_array().unwrap() {
            let ms = |name: &str| hop[name].as_u64().unwrap_or(0) / 1_000;
            (self.rtt_ms, self.jitter_ms) = (self.rtt_ms.max(ms("rtt_us")), self.jitter_ms.max(ms("jitter_us")));
        }
    }
}

/// Streams through the ring for so long while every processor is busy. What is reported is what came out;
/// nothing is asserted before.
fn run(time: Duration) -> Value {
    let far = Far::start();
    let expected: Vec<Vec<u64>> = (0..2).map(|seed| far.stream(seed)).collect();
    let processors = std::thread::available_parallelism().unwrap().get();
    let busy: Vec<Busy> = (0..processors).map(|_| Busy::start()).collect();
    let (start, began, before): (Value, Instant, _) = (far.coordinator.ring(), clock::now(), ticks());
    let done = AtomicBool::new(false);
    let (mut requests, mut tokens, mut differ) = (0_u64, 0_usize, 0_u64);
    let seen = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let (mut seen, mut late) = (Seen::default(), BTreeSet::new());
            while !done.load(Ordering::Acquire) {
                seen.look(&far.coordinator.ring(), &mut late);
                std::thread::sleep(LOOK);
            }
            seen
        });
        let over = Over(&done);
        while requests == 0 || clock::now() - began < time {
            let seed = requests % 2;
            let ids = far.stream(seed);
            (requests, tokens) = (requests + 1, tokens + ids.len());
            differ += u64::from(ids != expected[usize::try_from(seed).unwrap()]);
        }
        drop(over);
        watching.join().unwrap()
    });
    let (took, after, end) = (clock::now() - began, ticks(), far.coordinator.ring());
    drop(busy);
    let pids = |ring: &Value| -> Vec<Value> {
        ring["members"].as_array().unwrap().iter().map(|member| member["pid"].clone()).collect()
    };
    json!({
        "seconds": took.as_secs(),
        "network": WAN,
        "busy_processes": processors,
        "idle_percent": 100 * (after.1 - before.1) / (after.0 - before.0).max(1),
        "view_at_start": start["view"], "view_at_end": end["view"],
        "same_processes": pids(&start) == pids(&end) && pids(&end).len() == far.stages.len(),
        "breaks": end["heals"],
        "requests": requests, "tokens": tokens, "requests_with_other_ids": differ,
        "suspicions": seen.suspicions,
        "largest_smoothed_rtt_ms": seen.rtt_ms, "largest_smoothed_jitter_ms": seen.jitter_ms,
    })
}

/// Nobody was evicted, and nothing was said that is not so.
#[track_caller]
fn unharmed(report: &Value) {
    assert_eq!(report["breaks"], json!([]), "{report:#}");
    assert_eq!(report["view_at_start"], report["view_at_end"], "{report:#}");
    assert_eq!(
        (&report["same_processes"], &report["requests_with_other_ids"]),
        (&json!(true), &json!(0)),
        "{report:#}"
    );
    assert!(report["idle_percent"].as_u64().unwrap() <= 5, "it was not busy: {report:#}");
}

#[test]
fn a_busy_stage_behind_a_jittery_network_is_not_evicted() {
    unharmed(&run(Duration::from_secs(15)));
}

/// The same for ten minutes, or `--seconds`; writes `receipts/busy.json`, or `--report`.
#[cfg_attr(test, allow(dead_code, reason = "the bench records"))]
pub(crate) fn record() {
    let option = |name: &str| std::env::args().skip_while(|arg| arg != name).nth(1);
    let seconds = option("--seconds").map_or(600, |text| text.parse().unwrap());
    let file = option("--report").unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/receipts/busy.json").into());
    let mut report = run(Duration::from_secs(seconds));
    let system = rustix::system::uname();
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = processor.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    report["command"] = json!("cargo bench --bench busy");
    report["machine"] = json!({
        "processor": processor.trim_start_matches(['\t', ' ', ':']),
        "processors": report["busy_processes"],
        "system": format!("{} {} {}", text(system.sysname()), text(system.release()), text(system.machine())),
    });
    report["versions"] =
        json!({"ringfence": env!("CARGO_PKG_VERSION"), "protocol": PROTOCOL_VERSION, "numerics": NUMERICS_ID});
    std::fs::write(file, format!("{report:#}\n")).unwrap();
    unharmed(&report);
}
