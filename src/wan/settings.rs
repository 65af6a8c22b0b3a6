//! What a path does to packets, and its text: `rtt=40ms,jitter=2ms,loss=0.1%,rate=50mbit`.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use super::Way;
use super::path::HELD_BYTES_MAX;
use super::quantity::{self, Chance, RATE, SIZE, TIME};

/// Longest delay, jitter or hold-back; longer ones are refused in text and cut elsewhere.
pub const DELAY_MAX: Duration = Duration::from_secs(60);

/// Fastest rate in text, in bits per second.
const RATE_MAX: u64 = 1_000_000_000_000;

/// Longest run of losses in text, in packets.
const BURST_MAX: u32 = 1_000_000;

/// How delays spread around their mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum JitterShape {
    /// Every delay within ± jitter is as likely as another.
    #[default]
    Uniform,
    /// Jitter is the standard deviation; no delay is more than six of them away from the mean.
    Normal,
}

/// What a path does, in one direction. The default does nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSettings {
    /// Mean one-way delay, after the queue. Default none, at most [`DELAY_MAX`].
    pub delay: Duration,
    /// Deviation of a packet's delay; no delay falls below zero. Default none.
    pub jitter: Duration,
    /// What `jitter` means. Default uniform.
    pub shape: JitterShape,
    /// Whether a packet waits for those before it where jitter would let it overtake. Default yes.
    pub keep_order: bool,
    /// Share of packets that are lost as they enter. Default none.
    pub loss: Chance,
    /// Mean length of a run of losses, in packets; 1 loses each packet by itself. Default 1.
    pub burst: u32,
    /// Share of packets that are held back for `late`, so that others overtake. Default none.
    pub reorder: Chance,
    /// For how long a reordered packet is held back. Default 2 ms.
    pub late: Duration,
    /// Bits per second, headers ([`HEADER_BYTES`](super::HEADER_BYTES)) included. Default unlimited.
    pub rate: Option<NonZeroU64>,
    /// Bytes that wait for their turn under `rate`, headers included and without the packet that is
    /// being sent; what does not fit is dropped at the tail. Default 256,000. Larger loses less and
    /// waits longer.
    pub queue: u64,
}

impl Default for PathSettings {
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            shape: JitterShape::Uniform,
            keep_order: true,
            loss: Chance::NEVER,
            burst: 1,
            reorder: Chance::NEVER,
            late: Duration::from_millis(2),
            rate: None,
            queue: 256_000,
        }
    }
}

/// Both directions. As text, fields with commas between:
///
/// | field     | value                  | sets                                                     |
/// |-----------|------------------------|----------------------------------------------------------|
/// | `rtt`     | `40ms`                 | half of it as delay in either direction                  |
/// | `delay`   | `20ms`                 | the mean one-way delay                                   |
/// | `jitter`  | `2ms`                  | the deviation of a one-way delay                         |
/// | `dist`    | `uniform`, `normal`    | what jitter means: ± that much, or a standard deviation  |
/// | `order`   | `keep`, `free`         | whether jitter may reorder                               |
/// | `loss`    | `0.1%`                 | packets lost                                             |
/// | `burst`   | `4`                    | mean length of a run of losses, in packets               |
/// | `reorder` | `1%`                   | packets held back so that others overtake                |
/// | `late`    | `2ms`                  | for how long they are                                    |
/// | `rate`    | `50mbit`, `none`       | bits per second                                          |
/// | `queue`   | `256kb`                | bytes that wait for the rate                             |
///
/// Units: `ns us ms s`, `bit kbit mbit gbit`, `b kb mb gb` (thousands) and `kib mib`. A field is of
/// both directions; `in.rate` and `out.rate` are of one. Later fields win over earlier ones, and
/// `none` puts back the defaults. [`Display`](fmt::Display) writes what differs from them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WanSettings {
    /// From the clients to the target.
    pub inward: PathSettings,
    /// From the target back to the clients.
    pub outward: PathSettings,
}

/// Why a text is not taken as settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// Not a name and a value.
    #[error("{item:?}: expected NAME=VALUE, such as rtt=40ms, with commas between")]
    Shape {
        /// What came.
        item: String,
    },
    /// No such field.
    #[error(
        "unknown field {name:?}: expected rtt, delay, jitter, dist, order, loss, burst, reorder, late, rate or queue, with in. or out. in front for one direction"
    )]
    Unknown {
        /// What came.
        name: String,
    },
    /// A value that the field does not take.
    #[error("{name}={value}: expected {expected}")]
    Value {
        /// The field.
        name: String,
        /// What came.
        value: String,
        /// What it takes, with the unit.
        expected: &'static str,
    },
    /// A field that comes twice.
    #[error("{name} is given twice: leave one out")]
    Twice {
        /// The field.
        name: String,
    },
    /// More losses than such runs can hold.
    #[error(
        "{way}: loss={loss} cannot be reached with burst={burst}: runs of {burst} have a packet between them that is not lost; raise burst or lower loss"
    )]
    Burst {
        /// The direction.
        way: &'static str,
        /// Share of packets to lose.
        loss: Chance,
        /// Mean run.
        burst: u32,
    },
}

const TIME_EXPECTED: &str = "a time up to 60s with its unit, ns, us, ms or s, such as 40ms";
const RTT_EXPECTED: &str = "a time up to 120s with its unit, ns, us, ms or s, such as 40ms";
const CHANCE_EXPECTED: &str = "a share from 0% to 100% with its sign, such as 0.1%";
const RATE_EXPECTED: &str = "bits per second up to 1000gbit with their unit, bit, kbit, mbit or gbit, such as 50mbit, or none; to let nothing through, cut";
const QUEUE_EXPECTED: &str = "bytes up to 32mib with their unit, b, kb, kib, mb or mib, such as 256kb";

impl PathSettings {
    /// Sets one field; `Err` says what it takes, `None` that there is no such field.
    fn set(&mut self, name: &str, value: &str) -> Option<Result<(), &'static str>> {
        fn put<T>(field: &mut T, value: Option<T>, expected: &'static str) -> Result<(), &'static str> {
            value.map(|value| *field = value).ok_or(expected)
        }
        let choice = |first: &str, second: &str| match value {
            _ if value == first => Some(true),
            _ if value == second => Some(false),
            _ => None,
        };
        Some(match name {
            "delay" => put(&mut self.delay, time(value, DELAY_MAX), TIME_EXPECTED),
            "jitter" => put(&mut self.jitter, time(value, DELAY_MAX), TIME_EXPECTED),
            "dist" => {
                let shape = choice("uniform", "normal");
                let shape = shape.map(|uniform| if uniform { JitterShape::Uniform } else { JitterShape::Normal });
                put(&mut self.shape, shape, "uniform or normal")
            }
            "order" => put(&mut self.keep_order, choice("keep", "free"), "keep or free"),
            "loss" => put(&mut self.loss, Chance::read(value), CHANCE_EXPECTED),
            "burst" => {
                let burst = value.parse().ok().filter(|burst| (1..=BURST_MAX).contains(burst));
                put(&mut self.burst, burst, "packets, 1 to 1000000, without a unit")
            }
            "reorder" => put(&mut self.reorder, Chance::read(value), CHANCE_EXPECTED),
            "late" => put(&mut self.late, time(value, DELAY_MAX), TIME_EXPECTED),
            "rate" => put(&mut self.rate, rate(value), RATE_EXPECTED),
            "queue" => {
                let queue = quantity::read(value, SIZE).filter(|bytes| *bytes <= HELD_BYTES_MAX);
                put(&mut self.queue, queue, QUEUE_EXPECTED)
            }
            _ => return None,
        })
    }

    /// Every field but the delay, as text.
    fn texts(&self) -> [(&'static str, String); 9] {
        let name = |first: bool, names: [&str; 2]| names[usize::from(!first)].to_owned();
        [
            ("jitter", time_text(self.jitter)),
            ("dist", name(self.shape == JitterShape::Uniform, ["uniform", "normal"])),
            ("order", name(self.keep_order, ["keep", "free"])),
            ("loss", self.loss.to_string()),
            ("burst", self.burst.to_string()),
            ("reorder", self.reorder.to_string()),
            ("late", time_text(self.late)),
            ("rate", self.rate.map_or_else(|| "none".to_owned(), |rate| quantity::write(rate.get(), RATE))),
            ("queue", quantity::write(self.queue, SIZE)),
        ]
    }

    fn check(&self, way: Way) -> Result<(), SettingsError> {
        let (burst, loss) = (self.burst.max(1), self.loss);
        // Runs of `burst` come at most once in `burst + 1` packets.
        let reachable = u64::from(loss.per_billion()) * u64::from(burst + 1) <= u64::from(burst) * 1_000_000_000;
        if burst == 1 || reachable { Ok(()) } else { Err(SettingsError::Burst { way: way.name(), loss, burst }) }
    }
}

fn time(text: &str, most: Duration) -> Option<Duration> {
    quantity::read(text, TIME).map(Duration::from_nanos).filter(|time| *time <= most)
}

fn time_text(time: Duration) -> String {
    quantity::write(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), TIME)
}

fn rate(text: &str) -> Option<Option<NonZeroU64>> {
    if text == "none" {
        return Some(None);
    }
    let rate = NonZeroU64::new(quantity::read(text, RATE)?)?;
    (rate.get() <= RATE_MAX).then_some(Some(rate))
}

impl WanSettings {
    /// The settings of a direction.
    #[must_use]
    pub fn of(&self, way: Way) -> &PathSettings {
        match way {
            Way::In => &self.inward,
            Way::Out => &self.outward,
        }
    }

    /// The settings of a direction, to change.
    pub fn of_mut(&mut self, way: Way) -> &mut PathSettings {
        match way {
            Way::In => &mut self.inward,
            Way::Out => &mut self.outward,
        }
    }

    /// These settings with the fields in `text` changed, the others kept.
    ///
    /// # Errors
    /// [`SettingsError`] with the field, what came, and what is expected.
    pub fn with(&self, text: &str) -> Result<Self, SettingsError> {
        let mut changed = self.clone();
        let mut seen = BTreeSet::new();
        for item in text.split(',').map(str::trim) {
            if item == "none" {
                changed = Self::default();
                continue;
            }
            let (name, value) = item.split_once('=').ok_or_else(|| SettingsError::Shape { item: item.to_owned() })?;
            let (name, value) = (name.trim(), value.trim());
            if !seen.insert(name) {
                return Err(SettingsError::Twice { name: name.to_owned() });
            }
            changed.set(name, value)?;
        }
        for way in Way::BOTH {
            changed.of(way).check(way)?;
        }
        Ok(changed)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), SettingsError> {
        let refuse = |expected| SettingsError::Value { name: name.to_owned(), value: value.to_owned(), expected };
        if name == "rtt" {
            let rtt = time(value, 2 * DELAY_MAX).ok_or_else(|| refuse(RTT_EXPECTED))?;
            self.inward.delay = rtt / 2;
            self.outward.delay = rtt - rtt / 2;
            return Ok(());
        }
        let (ways, field): (&[Way], &str) = match name.split_once('.') {
            Some(("in", field)) => (&[Way::In], field),
            Some(("out", field)) => (&[Way::Out], field),
            _ => (&Way::BOTH, name),
        };
        for way in ways {
            let set = self.of_mut(*way).set(field, value);
            set.ok_or_else(|| SettingsError::Unknown { name: name.to_owned() })?.map_err(refuse)?;
        }
        Ok(())
    }
}

impl FromStr for WanSettings {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        Self::default().with(text)
    }
}

impl fmt::Display for WanSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut items = Vec::new();
        let (inward, outward) = (self.inward.delay, self.outward.delay);
        if inward == outward && !inward.is_zero() {
            items.push(format!("rtt={}", time_text(inward + outward)));
        } else if inward != outward {
            items.push(format!("in.delay={},out.delay={}", time_text(inward), time_text(outward)));
        }
        let defaults = PathSettings::default().texts();
        for ((inward, outward), default) in self.inward.texts().into_iter().zip(self.outward.texts()).zip(defaults) {
            let name = default.0;
            if inward == outward && inward != default {
                items.push(format!("{name}={}", inward.1));
            } else if inward != outward {
                let ways = [("in", &inward), ("out", &outward)].into_iter().filter(|(_, text)| **text != default);
                items.extend(ways.map(|(way, text)| format!("{way}.{name}={}", text.1)));
            }
        }
        if items.is_empty() { f.write_str("none") } else { f.write_str(&items.join(",")) }
    }
}
