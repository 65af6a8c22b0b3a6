//! What a journal and a shadow are worth, and what a journal costs, in one run: `cargo bench --bench heal`.
//!
//! Four stages and a coordinator in this process over links in memory. A stage in the middle is killed
//! after so many committed tokens and a spare takes its place: once it has shadowed it, once the journal of
//! the stage in front of it has what it took in, once the head begins anew. What a shadow costs is in
//! `benches/shadow.rs`. Then the same request on two rings that nothing
//! happens to, one with journals, in CPU time of the process per token. Kinds take turns, medians.
//!
//! `-- --tokens 256,1024 --runs 3 --pairs 11` measures less.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench prints, and stops at the first surprise")]

#[path = "../tests/ring/rig.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod rig;

use std::time::Duration;

use ringfence::config::CoordinatorSettings;
use ringfence::coordinator::heals::HealStatus;
use ringfence::coordinator::job::{Event, Finish, Mode, Serve};
use ringfence::engine::Engine;
use ringfence::engine::cpu::{CpuEngine, CpuSettings};
use ringfence::ids::LayerRange;
use ringfence::node::journal::JournalConfig;
use ringfence::transport::memory::MemoryNetwork;
use rustix::time::{ClockId, clock_gettime};

use rig::{Rig, prompt, quick, ranges, request, tiny};

const CUT: &str = "0:1 1:2 2:4 4:7";
/// The stage that is killed.
const LOST: usize = 2;
const PROMPT: usize = 16;
/// Tokens behind the heal.
const REST: u32 = 16;
/// Tokens of a request whose CPU time is measured.
const TOKENS: u32 = 400;

/// An engine with the model's whole context.
fn engine(range: LayerRange) -> Box<dyn Engine> {
    let checkpoint = tiny();
    let context = checkpoint.config().max_positions;
    let settings = CpuSettings { max_context: Some(context), ..CpuSettings::default() };
    Box::new(CpuEngine::new(&checkpoint, range, &settings).unwrap())
}

/// How the state comes back.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Shadow,
    Journal,
    Head,
}

const WAYS: [(Way, &str); 3] =
    [(Way::Shadow, "by a shadow"), (Way::Journal, "by journal"), (Way::Head, "from the head")];

fn journal(on: bool) -> JournalConfig {
    if on { JournalConfig::default() } else { JournalConfig { memory: 0, spill: None } }
}

async fn ring(journals: bool) -> Rig {
    // Nothing but the kill is a fault, however busy the machine is.
    let settings =
        CoordinatorSettings { heal_wait: Duration::from_secs(50), dead_after: Duration::from_secs(20), ..quick() };
    let made = (&(|inner: CpuEngine| engine(inner.facts().range)) as rig::Wrap<'_>, None, journal(journals));
    Rig::made(MemoryNetwork::new(), &ranges(CUT), settings, made).await
}

/// Kills a stage after `committed` tokens, and gives what the heal was.
async fn healed(committed: u32, way: Way, mode: Mode) -> HealStatus {
    let mut rig = ring(way != Way::Head).await;
    let spare = engine(ranges(CUT)[LOST]);
    match way {
        Way::Shadow => rig.add_shadow(spare).await,
        Way::Journal | Way::Head => rig.add_with(spare),
    }
    rig.members(ranges(CUT).len() + 1).await;
    let mut job = rig.coordinator.submit(request(&prompt(PROMPT), committed + REST, mode)).unwrap();
    let mut tokens = 0;
    let finish = loop {
        match job.events.recv().await {
            Some(Event::Token { .. }) => {
                tokens += 1;
                if tokens == committed {
                    rig.network.kill(rig.stages[LOST].peer);
                }
            }
            Some(Event::Finished { reason, .. }) => break reason,
            other => panic!("{other:?} after {tokens} tokens"),
        }
    };
    assert_eq!((finish, tokens), (Finish::Length, committed + REST));
    let mut heals = rig.coordinator.status().heals;
    assert_eq!(heals.len(), 1, "{heals:?}");
    rig.end().await;
    heals.remove(0)
}

fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

/// CPU time of a token in µs on a ring.
async fn cost(rig: &Rig, mode: Mode) -> f64 {
    let before = cpu();
    let run = rig.run(request(&prompt(PROMPT), TOKENS, mode)).await;
    assert_eq!(run.finish(), Finish::Length);
    (cpu() - before).as_secs_f64() * 1e6 / f64::from(TOKENS)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The value of an option.
fn option(name: &str) -> Option<String> {
    std::env::args().skip_while(|arg| arg != name).nth(1)
}

async fn rebuilds(tokens: &[u32], runs: usize, mode: Mode) {
    println!("\nA killed stage {} of {CUT}, {mode:?}, medians of {runs}\n", ranges(CUT)[LOST]);
    println!("| committed tokens | rebuilt | ms until whole | ms until rebuilt | bytes | positions |");
    println!("|---|---|---|---|---|---|");
    for &committed in tokens {
        let mut heals = [const { Vec::new() }; WAYS.len()];
        for _ in 0..runs {
            for (of, (way, _)) in heals.iter_mut().zip(WAYS) {
                of.push(healed(committed, way, mode).await);
            }
        }
        for (heals, (_, how)) in heals.iter().zip(WAYS) {
            let of = |read: &dyn Fn(&HealStatus) -> u64| {
                let mut values: Vec<u64> = heals.iter().map(read).collect();
                values.sort_unstable();
                values[values.len() / 2]
            };
            let whole = of(&|heal| heal.whole_ms.unwrap() - heal.detected_ms);
            let rebuilt = of(&|heal| heal.rebuilt_ms.unwrap() - heal.detected_ms);
            let (bytes, positions) = (of(&|heal| heal.replayed_bytes), of(&|heal| heal.replayed_positions));
            println!("| {committed} | {how} | {whole} | {rebuilt} | {bytes} | {positions} |");
        }
    }
}

async fn overhead(pairs: usize, mode: Mode) -> f64 {
    let (on, off) = (ring(true).await, ring(false).await);
    for rig in [&on, &off] {
        cost(rig, mode).await;
    }
    let (mut with, mut without, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..pairs {
        // Who comes first changes, so that neither has the warmer machine.
        let (a, b) = if pair % 2 == 0 {
            let a = cost(&on, mode).await;
            (a, cost(&off, mode).await)
        } else {
            let b = cost(&off, mode).await;
            (cost(&on, mode).await, b)
        };
        with.push(a);
        without.push(b);
        ratios.push(a / b);
    }
    let (with, without, ratio) = (median(with), median(without), median(ratios));
    println!(
        "| {mode:?} | {without:.0} | {with:.0} | {:+.1} % | {:+.1} % |",
        (with / without - 1.0) * 1e2,
        (ratio - 1.0) * 1e2
    );
    on.end().await;
    off.end().await;
    ratio
}

fn main() {
    // The rig's own would tell of every kill.
    tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR).with_writer(std::io::stderr).init();
    let tokens: Vec<u32> = option("--tokens")
        .unwrap_or_else(|| "256,1024,2000".to_owned())
        .split(',')
        .filter_map(|tokens| tokens.parse().ok())
        .collect();
    let number = |name: &str, default: usize| option(name).map_or(default, |text| text.parse().unwrap());
    let (runs, pairs) = (number("--runs", 5), number("--pairs", 31));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        rebuilds(&tokens, runs, Mode::Pipelined).await;
        println!("\nCPU time of a token in µs, {TOKENS} tokens a run, {pairs} pairs\n");
        println!("| mode | without journals | with | medians | median of pairs |");
        println!("|---|---|---|---|---|");
        for mode in [Mode::Plain, Mode::Pipelined] {
            overhead(pairs, mode).await;
        }
    });
}
