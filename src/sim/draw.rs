//! Everything that is drawn in a run comes from here: one seed, the same numbers on every machine.

use std::time::Duration;

/// Stride of the counter: 2⁶⁴ over the golden ratio, odd.
const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes two words into one (the finalizer of SplitMix64).
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_add(STRIDE);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A generator of choices.
#[derive(Debug, Clone)]
pub(super) struct Draw(u64);

impl Draw {
    pub(super) fn new(seed: u64) -> Self {
        Self(mix(seed, STRIDE))
    }

    /// A generator of its own, so that more draws here change nothing there.
    pub(super) fn fork(&mut self) -> Self {
        Self(self.next())
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STRIDE);
        mix(self.0, 0)
    }

    /// A number below `bound`, which is above 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        // The high half of a 128-bit product.
        u64::try_from((u128::from(self.next()) * u128::from(bound)) >> 64).unwrap_or(0)
    }

    /// A number from `low` to `high`.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// The same as a `u32`.
    pub(super) fn count(&mut self, low: u32, high: u32) -> u32 {
        u32::try_from(self.between(u64::from(low), u64::from(high))).unwrap_or(high)
    }

    /// A place in something that holds `length` things, at least one.
    pub(super) fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or(0)
    }

    /// Whether something happens that has so many chances of a hundred.
    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A time from `low` to `high` microseconds.
    pub(super) fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.between(low, high))
    }

    /// A time from `low` to `high` milliseconds.
    pub(super) fn millis(&mut self, low: u64, high: u64) -> Duration {
        self.micros(low * 1_000, high * 1_000)
    }
}
