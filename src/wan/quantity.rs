//! Numbers with a unit, read and written exactly: times, rates, sizes, chances.

use std::fmt;

/// Names of units with their size in the smallest one, smallest first.
pub(super) type Units = &'static [(&'static str, u64)];

/// Times, in nanoseconds.
pub(super) const TIME: Units = &[("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];

/// Rates, in bits per second.
pub(super) const RATE: Units = &[("bit", 1), ("kbit", 1_000), ("mbit", 1_000_000), ("gbit", 1_000_000_000)];

/// Sizes, in bytes.
pub(super) const SIZE: Units =
    &[("b", 1), ("kb", 1_000), ("kib", 1 << 10), ("mb", 1_000_000), ("mib", 1 << 20), ("gb", 1_000_000_000)];

/// Shares, in parts per billion.
const SHARE: Units = &[("%", 10_000_000)];

/// Digits behind the point that are read.
const FRACTION_DIGITS_MAX: usize = 12;

/// How likely something is, in parts per billion: exact in text, and the same on every machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Chance(u32);

impl Chance {
    pub(super) const ONE: u32 = 1_000_000_000;

    /// Never.
    pub const NEVER: Self = Self(0);

    /// A chance of so many parts per billion; `None` above 1,000,000,000, which is always.
    #[must_use]
    pub fn from_billionths(parts: u32) -> Option<Self> {
        (parts <= Self::ONE).then_some(Self(parts))
    }

    /// In parts per billion.
    #[must_use]
    pub fn per_billion(self) -> u32 {
        self.0
    }

    /// Reads `0.1%`.
    pub(super) fn read(text: &str) -> Option<Self> {
        u32::try_from(read(text, SHARE)?).ok().and_then(Self::from_billionths)
    }

    /// This chance, divided by `n`; at least one part per billion unless it is none.
    pub(super) fn over(self, n: u32) -> Self {
        Self((self.0 / n.max(1)).max(u32::from(self.0 > 0)))
    }

    /// One in `n`.
    pub(super) fn one_in(n: u32) -> Self {
        Self(Self::ONE).over(n)
    }

    /// `p / (1 − p)`, at most certain.
    pub(super) fn odds(self) -> Self {
        let (p, one) = (u64::from(self.0), u64::from(Self::ONE));
        let odds = (p * one).checked_div(one - p).unwrap_or(one);
        Self(u32::try_from(odds.min(one)).unwrap_or(Self::ONE))
    }
}

impl fmt::Display for Chance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / 10_000_000, self.0 % 10_000_000);
        if rest == 0 {
            return write!(f, "{whole}%");
        }
        write!(f, "{whole}.{}%", format!("{rest:07}").trim_end_matches('0'))
    }
}

/// Reads a number with one of the units behind it, in either case; 0 needs none.
///
/// Digits below the smallest unit are cut off. `None` where it is no number, has no unit, or is
/// too large.
pub(super) fn read(text: &str, units: Units) -> Option<u64> {
    if text == "0" {
        return Some(0);
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, name) = text.split_at(end);
    let (_, unit) = units.iter().find(|(unit, _)| name.eq_ignore_ascii_case(unit))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.len() > FRACTION_DIGITS_MAX {
        return None;
    }
    let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let digits = u128::from(whole.parse::<u64>().ok()?) * scale + u128::from(fraction.parse::<u64>().ok()?);
    u64::try_from(digits.checked_mul(u128::from(*unit))? / scale).ok()
}

/// Writes a number with the largest unit that it is a multiple of.
pub(super) fn write(value: u64, units: Units) -> String {
    let fits = |&&(_, unit): &&(&str, u64)| value >= unit && value.is_multiple_of(unit);
    let &(name, unit) = units.iter().rev().find(fits).unwrap_or(&units[0]);
    format!("{}{name}", value / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_exactly() {
        assert_eq!(read("40ms", TIME), Some(40_000_000));
        assert_eq!(read("0.25ms", TIME), Some(250_000));
        assert_eq!(read("1.5s", TIME), Some(1_500_000_000));
        assert_eq!(read("0", TIME), Some(0));
        assert_eq!(read("50Mbit", RATE), Some(50_000_000));
        assert_eq!(read("256kb", SIZE), Some(256_000));
        assert_eq!(read("256KiB", SIZE), Some(262_144));
        assert_eq!(Chance::read("0.1%"), Some(Chance(1_000_000)));
        assert_eq!(Chance::read("100%"), Some(Chance(Chance::ONE)));
    }

    #[test]
    fn what_is_no_number_is_refused() {
        let texts = ["", "40", "ms", "-1ms", "+1ms", "1e3ms", "1..2ms", ".5ms", "1.ms", "1 ms", "٣ms", "4m", "4msx"];
        for text in texts {
            assert_eq!(read(text, TIME), None, "{text:?}");
        }
        assert_eq!(read("99999999999999999999s", TIME), None);
        assert_eq!(read("18446744073709551615s", TIME), None);
        assert_eq!(read("0.0000000000001s", TIME), None);
        assert_eq!(Chance::read("100.1%"), None);
        assert_eq!(Chance::read("1"), None);
    }

    #[test]
    fn numbers_are_written_as_people_do() {
        assert_eq!(write(40_000_000, TIME), "40ms");
        assert_eq!(write(1_500_000_000, TIME), "1500ms");
        assert_eq!(write(2_000_000_000, TIME), "2s");
        assert_eq!(write(1, TIME), "1ns");
        assert_eq!(write(0, TIME), "0ns");
        assert_eq!(write(262_144, SIZE), "256kib");
        assert_eq!(Chance(1_000_000).to_string(), "0.1%");
        assert_eq!(Chance(1).to_string(), "0.0000001%");
        assert_eq!(Chance(Chance::ONE).to_string(), "100%");
    }

    #[test]
    fn odds_and_shares() {
        assert_eq!(Chance(Chance::ONE / 2).odds(), Chance(Chance::ONE));
        assert_eq!(Chance(Chance::ONE).odds(), Chance(Chance::ONE));
        assert_eq!(Chance(Chance::ONE / 5).odds(), Chance(Chance::ONE / 4));
        assert_eq!(Chance::one_in(4), Chance(250_000_000));
        assert_eq!(Chance(1).over(9), Chance(1));
        assert_eq!(Chance::NEVER.over(9), Chance::NEVER);
    }
}
