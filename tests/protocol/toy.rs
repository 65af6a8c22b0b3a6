//! A toy model whose next token is a hash of the whole history, through position-addressed state.
//!
//! A stage that reads one leftover of a dead speculation computes another hash from there on.

use ringfence::ids::{Position, TokenId};

/// Small, so that wrong histories meet the right token by chance, too.
pub(crate) const VOCAB: u32 = 11;

/// One of the finalizers of splitmix64, over two words.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23) ^ b.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A small generator of choices, the same on every machine.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0, 0x7269_6e67)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// The state of one stage's layers for one session: never truncated, only rewritten.
#[derive(Clone, Default)]
pub(crate) struct ToyStage {
    layer: u64,
    /// `chain[p]` mixes what came in at positions `0..=p`; stale where it was not rewritten.
    chain: Vec<u64>,
}

impl ToyStage {
    pub(crate) fn new(layer: u64) -> Self {
        Self { layer, chain: Vec::new() }
    }

    /// Runs positions from `pos` on; reads the state at `pos − 1` as it stands there.
    pub(crate) fn forward(&mut self, pos: Position, ids: &[TokenId], hidden: &[u64]) -> Vec<u64> {
        assert_eq!(ids.len(), hidden.len());
        let at = pos.0 as usize;
        assert!(at <= self.chain.len(), "the toy continues at {} at most, got {at}", self.chain.len());
        let mut before = if at == 0 { self.layer } else { self.chain[at - 1] };
        let mut out = Vec::new();
        for (i, (id, hidden)) in ids.iter().zip(hidden).enumerate() {
            before = mix(mix(before, *hidden), u64::from(id.0));
            if at + i == self.chain.len() {
                self.chain.push(before);
            } else {
                self.chain[at + i] = before;
            }
            out.push(mix(before, self.layer));
        }
        out
    }
}

/// The token that a hidden state of the last stage stands for.
pub(crate) fn answer(hidden: u64) -> TokenId {
    TokenId((hidden % u64::from(VOCAB)) as u32)
}

/// What goes into the first stage at a position.
pub(crate) fn embed(id: TokenId) -> u64 {
    mix(u64::from(id.0), 1)
}

/// The stream that never speculates: the model's answer at every position of prompt and
/// continuation, `prompt.len() + new − 1` of them.
pub(crate) fn plain_answers(stages: usize, prompt: &[TokenId], new: usize) -> Vec<TokenId> {
    let mut ring: Vec<ToyStage> = (0..stages as u64).map(ToyStage::new).collect();
    let mut answers = Vec::new();
    let mut tokens = prompt.to_vec();
    let mut pos = 0;
    while pos < prompt.len() + new.saturating_sub(1) {
        let id = tokens[pos];
        let mut hidden = vec![embed(id)];
        for stage in &mut ring {
            hidden = stage.forward(Position(pos as u32), &[id], &hidden);
        }
        answers.push(answer(hidden[0]));
        if pos + 1 == tokens.len() {
            tokens.push(answer(hidden[0]));
        }
        pos += 1;
    }
    answers
}
