//! Random numbers of a path: the same seed gives the same numbers on every machine, for ever.

use std::time::Duration;

use super::quantity::Chance;

/// A generator of 64 bits a step: a counter with an odd stride, mixed (SplitMix64).
#[derive(Debug, Clone)]
pub(super) struct Draws(u64);

/// Stride of the counter: 2⁶⁴ over the golden ratio, odd.
const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// Uniform draws that are added up to a normal one; twelve have variance one.
const NORMAL_TERMS: u32 = 12;

impl Draws {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed for something that has number `n` of those made from this seed.
    pub(super) fn derive(seed: u64, n: u64) -> u64 {
        Self(seed ^ n.wrapping_mul(STRIDE).rotate_left(32)).next()
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STRIDE);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, or 0.
    fn below(&mut self, bound: u64) -> u64 {
        // The high half of a 128-bit product.
        u64::try_from((u128::from(self.next()) * u128::from(bound)) >> 64).unwrap_or_default()
    }

    /// Whether it happens. Certain and impossible things draw nothing.
    pub(super) fn happens(&mut self, chance: Chance) -> bool {
        match chance.per_billion() {
            0 => false,
            Chance::ONE => true,
            some => self.below(u64::from(Chance::ONE)) < u64::from(some),
        }
    }

    /// `mean` with a deviation of at most `jitter`, every value as likely as another; never below zero.
    pub(super) fn uniform(&mut self, mean: Duration, jitter: Duration) -> Duration {
        let (mean, jitter) = (nanos(mean), nanos(jitter));
        Duration::from_nanos((mean + self.below(2 * jitter + 1)).saturating_sub(jitter))
    }

    /// `mean` with a standard deviation of `jitter`, at most six of them away; never below zero.
    pub(super) fn normal(&mut self, mean: Duration, jitter: Duration) -> Duration {
        let (mean, jitter) = (nanos(mean), nanos(jitter));
        let sum: u64 = (0..NORMAL_TERMS).map(|_| self.below(jitter + 1)).sum();
        Duration::from_nanos((mean + sum).saturating_sub(u64::from(NORMAL_TERMS / 2) * jitter))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.min(super::DELAY_MAX).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn draws_are_the_same_everywhere() {
        let mut draws = Draws::new(0);
        // The published first outputs of the generator for seed 0.
        assert_eq!(draws.next(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(draws.next(), 0x6e78_9e6a_a1b9_65f4);
        assert_ne!(Draws::derive(1, 0), Draws::derive(1, 1));
        assert_ne!(Draws::derive(1, 0), Draws::derive(2, 0));
    }

    #[test]
    fn uniform_jitter_fills_its_range_and_no_more() {
        let mut draws = Draws::new(7);
        let drawn: Vec<Duration> = (0..10_000).map(|_| draws.uniform(20 * MS, 2 * MS)).collect();
        let (least, most) = (*drawn.iter().min().unwrap(), *drawn.iter().max().unwrap());
        assert!((18 * MS..=18 * MS + MS / 100).contains(&least), "{least:?}");
        assert!((22 * MS - MS / 100..=22 * MS).contains(&most), "{most:?}");
        let mean = drawn.iter().sum::<Duration>() / 10_000;
        // The mean's own deviation is 2 ms / √3 / 100.
        assert!(mean.abs_diff(20 * MS) < Duration::from_micros(50), "{mean:?}");
    }

    #[test]
    fn normal_jitter_has_its_deviation() {
        let mut draws = Draws::new(7);
        let drawn: Vec<Duration> = (0..10_000).map(|_| draws.normal(20 * MS, 2 * MS)).collect();
        let within = |sigmas: u32| drawn.iter().filter(|time| time.abs_diff(20 * MS) < 2 * MS * sigmas).count();
        assert!((6_600..7_050).contains(&within(1)), "{}", within(1));
        assert!((9_450..9_650).contains(&within(2)), "{}", within(2));
        assert_eq!(within(7), 10_000);
    }

    #[test]
    fn jitter_never_goes_below_zero() {
        let mut draws = Draws::new(1);
        assert!((0..1_000).any(|_| draws.uniform(MS, 10 * MS).is_zero()));
        assert!((0..1_000).any(|_| draws.normal(MS, 10 * MS).is_zero()));
    }
}
