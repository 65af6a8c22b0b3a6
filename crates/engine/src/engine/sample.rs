//! From logits to a token: greedy, or sampled as a pure function of (logits, seed, position).
//!
//! The token that will be fed at absolute position q depends on nothing else, so the plain, the
//! speculative and the healed stream of a session are one stream. Sums are fp64 chains in a stated
//! order; exponentials are the canonical ones.

use super::cpu::kernel::select::{argmax, top_k};
use super::cpu::kernel::{Isa, math, vector};
use crate::ids::{Position, TokenId};
use serde::{Deserialize, Serialize};

/// How the tail picks a token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Most likely tokens kept; 0 keeps all.
    pub top_k: u32,
    /// Probability mass kept; 1 keeps all.
    pub top_p: f32,
    /// Smallest probability kept, as a share of the largest; 0 keeps all.
    pub min_p: f32,
    /// Key of the random numbers; the counter is the position.
    pub seed: u64,
}

/// The coldest temperature that is not greedy.
pub const TEMPERATURE_MIN: f32 = 1e-5;
/// Tokens ranked at first when only a probability mass is asked for.
const RANKED_FIRST: usize = 256;

/// The log-softmax of one row of logits at temperature 1, ready to be asked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogSoftmax {
    max: f32,
    log_total: f32,
}

impl LogSoftmax {
    /// The natural log of the probability of a token of the same row of logits.
    ///
    /// # Panics
    /// If the token is past the row's end.
    #[must_use]
    pub fn of(&self, logits: &[f32], token: TokenId) -> f32 {
        (logits[token.0 as usize] - self.max) - self.log_total
    }
}

/// Picks tokens; holds buffers, and nothing that a result depends on.
#[derive(Debug, Clone)]
pub struct Sampler {
    isa: Isa,
    /// exp(logit / temperature − max), by id.
    weights: Vec<f32>,
    /// Ids in the order they are ranked or kept in.
    ids: Vec<u32>,
}

impl Default for Sampler {
    fn default() -> Self {
        Self::new()
    }
}

impl Sampler {
    /// A sampler with empty buffers.
    #[must_use]
    pub fn new() -> Self {
        Self { isa: Isa::detect(), weights: Vec::new(), ids: Vec::new() }
    }

    /// Picks the token to feed at `position`: the largest logit where the temperature is 0, else by
    /// temperature, then the `top_k` most likely, then the smallest number of those with mass
    /// `top_p`, then those at least `min_p` times as likely as the likeliest, then the inverse of the
    /// cumulative sum in ascending id.
    ///
    /// # Panics
    /// If there are no logits.
    pub fn pick(&mut self, logits: &[f32], sampling: &Sampling, position: Position) -> TokenId {
        assert!(!logits.is_empty(), "no logits to pick from");
        if sampling.temperature <= 0.0 {
            return greedy(logits);
        }
        let temperature = sampling.temperature.max(TEMPERATURE_MIN);
        self.weights.clear();
        self.weights.extend(logits.iter().map(|l| l / temperature));
        let best = argmax(&self.weights);
        let max = self.weights[best];
        vector::exp_minus(self.isa, &mut self.weights, max);
        self.keep(sampling);
        if sampling.min_p > 0.0 {
            let least = sampling.min_p.min(1.0) * self.weights[best];
            let weights = &self.weights;
            self.ids.retain(|&id| weights[id as usize] >= least);
        }
        let total: f64 = self.ids.iter().fold(0.0, |sum, &id| sum + f64::from(self.weights[id as usize]));
        let target = uniform(sampling.seed, position) * total;
        let mut sum = 0.0;
        for &id in &self.ids {
            sum += f64::from(self.weights[id as usize]);
            if sum > target {
                return TokenId(id);
            }
        }
        // Only where weights are not numbers.
        greedy(logits)
    }

    /// Leaves in `ids`, ascending, the tokens that may be picked.
    fn keep(&mut self, sampling: &Sampling) {
        let count = self.weights.len();
        let most = if sampling.top_k == 0 { count } else { (sampling.top_k as usize).min(count) };
        if sampling.top_p < 1.0 {
            let mut ranked = most.min(RANKED_FIRST);
            loop {
                top_k(&self.weights, ranked, &mut self.ids);
                let kept = prefix(&self.weights, &self.ids, self.mass(most) * f64::from(sampling.top_p));
                if kept < ranked || ranked == most {
                    self.ids.truncate(kept.max(1));
                    break;
                }
                ranked = (ranked * 8).min(most);
            }
            self.ids.sort_unstable();
        } else if most < count {
            top_k(&self.weights, most, &mut self.ids);
            self.ids.sort_unstable();
        } else {
            self.ids.clear();
            self.ids.extend(0..count as u32);
        }
    }

    /// The mass of the `most` most likely tokens, added in ascending id.
    fn mass(&self, most: usize) -> f64 {
        let mut ids = Vec::new();
        if most < self.weights.len() {
            top_k(&self.weights, most, &mut ids);
            ids.sort_unstable();
            return ids.iter().fold(0.0, |sum, &id| sum + f64::from(self.weights[id as usize]));
        }
        self.weights.iter().fold(0.0, |sum, &w| sum + f64::from(w))
    }

    /// The log-softmax of a row of logits.
    ///
    /// # Panics
    /// If there are no logits.
    pub fn log_softmax(&mut self, logits: &[f32]) -> LogSoftmax {
        let max = logits[argmax(logits)];
        self.weights.clear();
        self.weights.extend_from_slice(logits);
        vector::exp_minus(self.isa, &mut self.weights, max);
        let total = self.weights.iter().fold(0.0, |sum, &w| sum + f64::from(w));
        LogSoftmax { max, log_total: math::ln(total as f32) }
    }

    /// The `k` most likely tokens with their log-probabilities, descending; ties by lower id.
    pub fn top(&mut self, logits: &[f32], softmax: &LogSoftmax, k: usize) -> Vec<(TokenId, f32)> {
        top_k(logits, k, &mut self.ids);
        self.ids.iter().map(|&id| (TokenId(id), softmax.of(logits, TokenId(id)))).collect()
    }
}

/// The id of the largest logit, the lowest of equals.
#[must_use]
pub fn greedy(logits: &[f32]) -> TokenId {
    TokenId(argmax(logits) as u32)
}

/// How many of the ranked ids it takes to reach `mass`; all of them if they don't.
fn prefix(weights: &[f32], ranked: &[u32], mass: f64) -> usize {
    let mut sum = 0.0;
    for (i, &id) in ranked.iter().enumerate() {
        sum += f64::from(weights[id as usize]);
        if sum >= mass {
            return i + 1;
        }
    }
    ranked.len()
}

/// The uniform number in [0, 1) of a position: word 0 of Philox with key `seed` and counter
/// `position`, times 2^-32.
#[must_use]
pub fn uniform(seed: u64, position: Position) -> f64 {
    let word = philox([position.0, 0, 0, 0], [seed as u32, (seed >> 32) as u32])[0];
    f64::from(word) / 4_294_967_296.0
}

/// Philox4x32-10: ten rounds of multiply and mix of a counter under a key.
#[must_use]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
        }
        let a = u64::from(counter[0]) * 0xd251_1f53;
        let b = u64::from(counter[2]) * 0xcd9e_8d57;
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32, top_k: u32, top_p: f32) -> Sampling {
        Sampling { temperature, top_k, top_p, min_p: 0.0, seed: 42 }
    }

    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn temperature_zero_is_the_lowest_of_the_largest() {
        let mut sampler = Sampler::new();
        assert_eq!(sampler.pick(&[1.0, 5.0, 5.0], &sampling(0.0, 0, 1.0), Position(3)), TokenId(1));
    }

    #[test]
    fn a_pick_depends_on_logits_seed_and_position_only() {
        let logits: Vec<f32> = (0..2048).map(|i| ((i * 37) % 101) as f32 / 10.0).collect();
        let s = sampling(0.8, 50, 0.9);
        let mut used = Sampler::new();
        let first: Vec<TokenId> = (0..64).map(|q| used.pick(&logits, &s, Position(q))).collect();
        let again: Vec<TokenId> = (0..64).rev().map(|q| Sampler::new().pick(&logits, &s, Position(q))).collect();
        assert!(first.iter().eq(again.iter().rev()));
        assert!(first.iter().any(|t| *t != first[0]));
        let other: Vec<TokenId> =
            (0..64).map(|q| used.pick(&logits, &Sampling { seed: 43, ..s }, Position(q))).collect();
        assert_ne!(first, other);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let mut sampler = Sampler::new();
        let mut counts = [0u32; 4];
        for q in 0..40_000 {
            counts[sampler.pick(&logits, &sampling(1.0, 0, 1.0), Position(q)).0 as usize] += 1;
        }
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        for (count, logit) in counts.iter().zip(logits) {
            let expected = f64::from(logit).exp() / total;
            assert!((f64::from(*count) / 40_000.0 - expected).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn top_k_then_top_p_cut_by_probability_then_id() {
        let logits = [1.0f32, 3.0, 3.0, 2.0, 0.0];
        let mut sampler = Sampler::new();
        let mut kept = |k: u32, p: f32| {
            sampler.pick(&logits, &sampling(1.0, k, p), Position(0));
            sampler.ids.clone()
        };
        assert_eq!(kept(1, 1.0), [1]);
        assert_eq!(kept(3, 1.0), [1, 2, 3]);
        assert_eq!(kept(0, 1.0), [0, 1, 2, 3, 4]);
        // Within the three kept, 3 and 3 have 0.84 of the mass.
        assert_eq!(kept(3, 0.84), [1, 2]);
        assert_eq!(kept(3, 0.85), [1, 2, 3]);
        assert_eq!(kept(0, 0.0), [1]);
        assert_eq!(kept(0, 0.999_999), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn min_p_cuts_below_a_share_of_the_likeliest_after_the_others() {
        let logits = [1.0f32, 3.0, 3.0, 2.0, 0.0];
        let mut sampler = Sampler::new();
        let mut kept = |k: u32, p: f32, least: f32| {
            sampler.pick(&logits, &Sampling { min_p: least, ..sampling(1.0, k, p) }, Position(0));
            sampler.ids.clone()
        };
        // Shares of the likeliest: 0.135, 1, 1, 0.368, 0.050.
        assert_eq!(kept(0, 1.0, 0.04), [0, 1, 2, 3, 4]);
        assert_eq!(kept(0, 1.0, 0.1), [0, 1, 2, 3]);
        assert_eq!(kept(0, 1.0, 0.3), [1, 2, 3]);
        assert_eq!(kept(0, 1.0, 1.0), [1, 2]);
        assert_eq!(kept(1, 1.0, 0.01), [1]);
        assert_eq!(kept(0, 0.84, 0.01), [1, 2, 3]);
        // Hotter, the shares are closer.
        sampler.pick(&logits, &Sampling { min_p: 0.3, ..sampling(2.0, 0, 1.0) }, Position(0));
        assert_eq!(sampler.ids, [0, 1, 2, 3]);
    }

    #[test]
    fn a_mass_past_the_first_ranked_tokens_is_reached() {
        let logits = vec![0.0f32; 3000];
        let mut sampler = Sampler::new();
        sampler.pick(&logits, &sampling(1.0, 0, 0.5), Position(0));
        assert!(sampler.ids.iter().copied().eq(0..1500));
    }

    #[test]
    fn scores_are_log_probabilities() {
        let logits: Vec<f32> = (0..500).map(|i| ((i * 7) % 83) as f32 / 7.0 - 4.0).collect();
        let mut sampler = Sampler::new();
        let softmax = sampler.log_softmax(&logits);
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let expected = f64::from(logits[17]) - total.ln();
        assert!((f64::from(softmax.of(&logits, TokenId(17))) - expected).abs() < 1e-5);
        let top = sampler.top(&logits, &softmax, 5);
        assert_eq!(top.len(), 5);
        assert_eq!(top[0].0, greedy(&logits));
        assert!(top.windows(2).all(|w| w[0].1 >= w[1].1));
    }
}
