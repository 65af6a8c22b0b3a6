//! The text of settings: there and back, and what is said of a wrong one.

use std::num::NonZeroU64;
use std::time::Duration;

use expect_test::{Expect, expect};
use proptest::prelude::*;
use ringfence::wan::{Chance, DELAY_MAX, HELD_BYTES_MAX, JitterShape, PathSettings, WanSettings};

fn parse(text: &str) -> WanSettings {
    text.parse().unwrap()
}

fn times() -> impl Strategy<Value = Duration> {
    let most = u64::try_from(DELAY_MAX.as_nanos()).unwrap();
    prop_oneof![
        Just(0),
        1..most,
        (0..60_u64).prop_map(|s| s * 1_000_000_000),
        (0..1_000_u64).prop_map(|ms| ms * 1_000_000)
    ]
    .prop_map(Duration::from_nanos)
}

fn chances() -> impl Strategy<Value = Chance> {
    prop_oneof![Just(0), 0..=1_000_000_000_u32, (0..=100_u32).prop_map(|p| p * 10_000_000)]
        .prop_map(|parts| Chance::from_billionths(parts).unwrap())
}

/// Any settings of a direction that can be written.
pub(crate) fn path_settings() -> impl Strategy<Value = PathSettings> {
    let shape = prop_oneof![Just(JitterShape::Uniform), Just(JitterShape::Normal)];
    let rate = prop_oneof![Just(None), (1..=1_000_000_000_000_u64).prop_map(NonZeroU64::new)];
    let queue = 0..=HELD_BYTES_MAX;
    let burst = prop_oneof![Just(1_u32), 2..50_u32];
    let timing = (times(), times(), shape, any::<bool>(), times());
    (timing, chances(), burst, chances(), rate, queue).prop_map(|(timing, loss, burst, reorder, rate, queue)| {
        let (delay, jitter, shape, keep_order, late) = timing;
        let most = if burst == 1 { 1_000_000_000 } else { 1_000_000_000 / (burst + 1) * burst };
        let loss = Chance::from_billionths(loss.per_billion().min(most)).unwrap();
        PathSettings { delay, jitter, shape, keep_order, loss, burst, reorder, late, rate, queue }
    })
}

proptest! {
    #[test]
    fn settings_come_back_from_their_text(inward in path_settings(), outward in path_settings(), same: bool) {
        let outward = if same { inward.clone() } else { outward };
        let wan = WanSettings { inward, outward };
        prop_assert_eq!(parse(&wan.to_string()), wan);
    }

    #[test]
    fn one_changed_field_comes_back(inward in path_settings(), field in 0..10_usize) {
        let (d, p) = (PathSettings::default(), inward);
        let one = match field {
            0 => PathSettings { delay: p.delay, ..d },
            1 => PathSettings { jitter: p.jitter, ..d },
            2 => PathSettings { shape: p.shape, ..d },
            3 => PathSettings { keep_order: p.keep_order, ..d },
            4 => PathSettings { loss: p.loss, ..d },
            5 => PathSettings { burst: p.burst, ..d },
            6 => PathSettings { reorder: p.reorder, ..d },
            7 => PathSettings { late: p.late, ..d },
            8 => PathSettings { rate: p.rate, ..d },
            _ => PathSettings { queue: p.queue, ..d },
        };
        let wan = WanSettings { inward: PathSettings::default(), outward: one };
        prop_assert_eq!(parse(&wan.to_string()), wan);
    }

    #[test]
    fn no_text_panics(text in "[a-z.]{0,6}[=,]?[0-9.]{0,22}[a-zA-Z%]{0,5},?.{0,4}") {
        if let Ok(wan) = text.parse::<WanSettings>() {
            prop_assert_eq!(parse(&wan.to_string()), wan);
        }
    }
}

#[test]
fn a_round_trip_is_split_in_two() {
    let wan = parse("rtt=40ms,jitter=2ms,loss=0.1%,rate=50mbit,queue=256kb,reorder=1%");
    assert_eq!(wan.inward, wan.outward);
    let expected = PathSettings {
        delay: Duration::from_millis(20),
        jitter: Duration::from_millis(2),
        loss: Chance::from_billionths(1_000_000).unwrap(),
        rate: NonZeroU64::new(50_000_000),
        queue: 256_000,
        reorder: Chance::from_billionths(10_000_000).unwrap(),
        ..PathSettings::default()
    };
    assert_eq!(wan.inward, expected);
    assert_eq!(wan.to_string(), "rtt=40ms,jitter=2ms,loss=0.1%,reorder=1%,rate=50mbit", "the queue is the default");
    assert_eq!(parse("rtt=1ns").to_string(), "in.delay=0ns,out.delay=1ns");
}

#[test]
fn directions_differ_where_asked() {
    let wan = parse(" rate = 50mbit , in.rate=10mbit, out.delay=5ms,burst=2,out.loss=1.25% ");
    assert_eq!(wan.to_string(), "in.delay=0ns,out.delay=5ms,out.loss=1.25%,burst=2,in.rate=10mbit,out.rate=50mbit");
    let changed = wan.with("rate=none,rtt=2ms").unwrap();
    assert_eq!(changed.to_string(), "rtt=2ms,out.loss=1.25%,burst=2");
    assert_eq!(changed.with("none,dist=normal,order=free").unwrap().to_string(), "dist=normal,order=free");
    assert_eq!(changed.with("none").unwrap(), WanSettings::default());
    assert_eq!(WanSettings::default().to_string(), "none");
}

fn refused(text: &str, expected: &Expect) {
    expected.assert_eq(&text.parse::<WanSettings>().unwrap_err().to_string());
}

#[test]
fn an_error_names_field_value_and_unit() {
    refused("rtt=40", &expect!["rtt=40: expected a time up to 120s with its unit, ns, us, ms or s, such as 40ms"]);
    refused(
        "in.delay=61s",
        &expect!["in.delay=61s: expected a time up to 60s with its unit, ns, us, ms or s, such as 40ms"],
    );
    refused("loss=0.1", &expect!["loss=0.1: expected a share from 0% to 100% with its sign, such as 0.1%"]);
    refused(
        "rate=0mbit",
        &expect![
            "rate=0mbit: expected bits per second up to 1000gbit with their unit, bit, kbit, mbit or gbit, such as 50mbit, or none; to let nothing through, cut"
        ],
    );
    refused(
        "rate=50mb",
        &expect![
            "rate=50mb: expected bits per second up to 1000gbit with their unit, bit, kbit, mbit or gbit, such as 50mbit, or none; to let nothing through, cut"
        ],
    );
    refused(
        "queue=1gb",
        &expect!["queue=1gb: expected bytes up to 32mib with their unit, b, kb, kib, mb or mib, such as 256kb"],
    );
    refused("burst=0", &expect!["burst=0: expected packets, 1 to 1000000, without a unit"]);
    refused("dist=pareto", &expect!["dist=pareto: expected uniform or normal"]);
    refused("order=maybe", &expect!["order=maybe: expected keep or free"]);
    refused(
        "in.rtt=40ms",
        &expect![[
            r#"unknown field "in.rtt": expected rtt, delay, jitter, dist, order, loss, burst, reorder, late, rate or queue, with in. or out. in front for one direction"#
        ]],
    );
    refused(
        "lag=40ms",
        &expect![[
            r#"unknown field "lag": expected rtt, delay, jitter, dist, order, loss, burst, reorder, late, rate or queue, with in. or out. in front for one direction"#
        ]],
    );
    refused("rtt", &expect![[r#""rtt": expected NAME=VALUE, such as rtt=40ms, with commas between"#]]);
    refused("", &expect![[r#""": expected NAME=VALUE, such as rtt=40ms, with commas between"#]]);
    refused("rtt=1ms,,", &expect![[r#""": expected NAME=VALUE, such as rtt=40ms, with commas between"#]]);
    refused("loss=1%,loss=2%", &expect!["loss is given twice: leave one out"]);
    refused(
        "loss=80%,burst=3",
        &expect![
            "in: loss=80% cannot be reached with burst=3: runs of 3 have a packet between them that is not lost; raise burst or lower loss"
        ],
    );
}
