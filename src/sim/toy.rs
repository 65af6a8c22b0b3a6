//! A toy model: the next token is a hash of the exact history, through state addressed by position.
//!
//! A stage that reads one leftover of a dead speculation, or one position too few or too many, computes
//! another hash from there on, and the text changes. Drafts hang on the last positions of the tail's own
//! windows, so that windows which were not rebuilt change what is drafted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;

use crate::engine::{Chunk, Drafts, Engine, EngineError, EngineFacts, OpenError, Output, SessionShape};
use crate::ids::{LayerRange, Position, SessionId, TokenId};
use crate::sim::draw::mix;

/// Layers of the model.
pub(super) const LAYERS: u16 = 6;

/// Small, so that wrong histories meet the right token by chance, too.
pub(super) const VOCAB: u32 = 37;

/// Ends a text.
pub(super) const EOS: TokenId = TokenId(5);

/// Residual streams, and values of each: a marker, sixteen digits of a hash, and nothing.
pub(super) const HC: usize = 1;
pub(super) const DIM: usize = 24;

/// Draft tokens in a block.
pub(super) const BLOCK: u32 = 4;

/// Positions that a draft looks back on.
const WINDOW: usize = 6;

/// Longest session.
pub(super) const CONTEXT: u32 = 1_024;

/// The largest value of a hidden state: with it every other one is exact in fp8.
const MARK: f32 = 448.0;

const DEPTH: usize = LAYERS as usize;

/// What goes into the first layer.
fn embed(id: TokenId) -> u64 {
    mix(u64::from(id.0), 1)
}

/// A layer's state behind one more position.
fn fold(layer: usize, before: Option<u64>, hidden: u64) -> u64 {
    mix(before.unwrap_or(layer as u64), hidden)
}

/// What a layer hands on.
fn hand_on(state: u64) -> u64 {
    mix(state, 2)
}

/// The token that the last layer's output stands for.
fn token(last: u64) -> TokenId {
    TokenId(u32::try_from(last % u64::from(VOCAB)).unwrap_or(0))
}

/// Every layer's state behind a history.
type States = [u64; DEPTH];

/// One more position for the whole model: the states behind it and the last layer's output.
fn step(before: Option<&States>, id: TokenId) -> (States, u64) {
    let mut states = [0; DEPTH];
    let mut hidden = embed(id);
    for (layer, state) in states.iter_mut().enumerate() {
        *state = fold(layer, before.map(|states| states[layer]), hidden);
        hidden = hand_on(*state);
    }
    (states, hidden)
}

/// What the drafter proposes behind `anchor`, which stands behind the last position of `window`. It looks
/// at nothing but its windows; `truth` is what the model will say, which it hits three times of four.
fn drafted(window: &[u64], anchor: TokenId, truth: impl Iterator<Item = TokenId>) -> Vec<TokenId> {
    let seen = window[window.len().saturating_sub(WINDOW)..].iter().fold(u64::from(anchor.0), |a, b| mix(a, *b));
    let guess = |(k, truth): (usize, TokenId)| {
        let luck = mix(seen, k as u64);
        if luck.is_multiple_of(4) { TokenId((truth.0 + 1 + u32::from(luck & 64 != 0)) % VOCAB) } else { truth }
    };
    truth.take(BLOCK as usize).enumerate().map(guess).collect()
}

/// What the model says from states on, having answered `first`.
fn oracle(states: States, first: TokenId) -> impl Iterator<Item = TokenId> {
    let mut states = states;
    let mut next = first;
    std::iter::repeat_with(move || {
        let (after, last) = step(Some(&states), next);
        (states, next) = (after, token(last));
        next
    })
}

/// The stream of a session that nothing ever happens to, made by the toy alone.
#[derive(Debug, Clone)]
pub(super) struct Reference {
    /// The new tokens, to the end of the text.
    pub(super) tokens: Vec<TokenId>,
    prompt: usize,
    /// The last layer's output at every position.
    outputs: Vec<u64>,
    states: Vec<States>,
}

impl Reference {
    /// The stream behind a prompt.
    pub(super) fn new(prompt: &[TokenId], max_new: u32, ignore_eos: bool) -> Self {
        let (mut outputs, mut states) = (Vec::new(), Vec::<States>::new());
        let mut tokens = Vec::new();
        let mut feed = |id| {
            let (after, last) = step(states.last(), id);
            outputs.push(last);
            states.push(after);
            token(last)
        };
        let mut answer = EOS;
        for id in prompt {
            answer = feed(*id);
        }
        while tokens.len() < max_new as usize {
            tokens.push(answer);
            if answer == EOS && !ignore_eos {
                break;
            }
            answer = feed(answer);
        }
        Self { tokens, prompt: prompt.len(), outputs, states }
    }

    /// The block that an unbroken run drafts from a position, or `None` past the end of the text.
    pub(super) fn block(&self, at: Position) -> Option<Vec<TokenId>> {
        let at = at.0 as usize;
        let anchor = *self.tokens.get((at + 1).checked_sub(self.prompt)?)?;
        let window = self.outputs.get(..=at)?;
        Some(drafted(window, anchor, oracle(*self.states.get(at)?, anchor)))
    }
}

/// One session in the layers of a range: never truncated, only rewritten.
#[derive(Debug)]
struct State {
    shape: SessionShape,
    /// Position by position, the states of the range's layers.
    layers: Vec<Vec<u64>>,
    /// Of the whole model, at the tail: what the drafter's luck is drawn with.
    whole: Vec<States>,
    /// The drafter's window, at the tail.
    window: Vec<u64>,
    next: usize,
    /// The planted bug: windows are not filled before the first draft.
    forgets: bool,
}

/// What the toys of one run share.
#[derive(Debug, Default)]
pub(crate) struct Toys {
    /// How many sessions each process has state of.
    pub(super) open: BTreeMap<u64, usize>,
    /// Sessions that a tail had state of.
    tails: BTreeSet<SessionId>,
    /// The planted bug: a tail that gets its state again does not fill its windows.
    pub(super) forgets_windows: bool,
}

/// The same, shared.
pub(crate) type SharedToys = Arc<Mutex<Toys>>;

/// The toy's layers of one range.
#[derive(Debug)]
pub(crate) struct ToyEngine {
    facts: EngineFacts,
    sessions: BTreeMap<SessionId, State>,
    /// Number of the process, and what it shares.
    toys: (u64, SharedToys),
}

impl ToyEngine {
    /// An engine of process `number`.
    pub(crate) fn new(range: LayerRange, number: u64, toys: SharedToys) -> Self {
        let facts = EngineFacts {
            range,
            layers: LAYERS,
            hc: HC,
            dim: DIM,
            vocab: VOCAB as usize,
            device: "toy".to_owned(),
            draft_block: if range.hi() == LAYERS { BLOCK } else { 0 },
            max_context: CONTEXT,
            weight_bytes: 1,
        };
        Self { facts, sessions: BTreeMap::new(), toys: (number, toys) }
    }

    fn count(&self) {
        let (number, toys) = &self.toys;
        toys.lock().unwrap_or_else(PoisonError::into_inner).open.insert(*number, self.sessions.len());
    }

    fn check(&self, chunk: &Chunk<'_>) -> Result<(), EngineError> {
        let session = chunk.session;
        let state = self.sessions.get(&session).ok_or(EngineError::NotOpen { session })?;
        let (ids, got) = (chunk.ids.len(), chunk.hidden.map_or(0, <[bf16]>::len));
        let expected = if self.facts.is_head() { 0 } else { ids * HC * DIM };
        if ids == 0 || got != expected {
            return Err(EngineError::Shape { ids, got, expected });
        }
        let (pos, len) = (chunk.pos, u32::try_from(ids).unwrap_or(u32::MAX));
        let (next, end) = (Position(u32::try_from(state.next).unwrap_or(u32::MAX)), Position(state.shape.positions));
        if pos > next || pos.plus(len) > end {
            return Err(EngineError::Range { pos, len, next, end });
        }
        if pos.plus(state.shape.reach) < next {
            return Err(EngineError::Reach { pos, next, reach: state.shape.reach });
        }
        Ok(())
    }

    fn run(&mut self, chunk: &Chunk<'_>, out: &mut Output) -> Result<(), EngineError> {
        let (tail, range) = (self.facts.is_tail(), self.facts.range);
        let Some(state) = self.sessions.get_mut(&chunk.session) else {
            return Err(EngineError::NotOpen { session: chunk.session });
        };
        for (k, id) in chunk.ids.iter().enumerate() {
            let at = chunk.pos.0 as usize + k;
            let pos = chunk.pos.plus(u32::try_from(k).unwrap_or(u32::MAX));
            let mut hidden = match chunk.hidden {
                None => embed(*id),
                Some(values) => read(&values[k * DIM..(k + 1) * DIM]).ok_or(EngineError::NotFinite { range, pos })?,
            };
            for (layer, states) in range.layers().zip(&mut state.layers) {
                let before = at.checked_sub(1).and_then(|before| states.get(before)).copied();
                let after = fold(usize::from(layer), before, hidden);
                put(states, at, after);
                hidden = hand_on(after);
            }
            if tail {
                let before = at.checked_sub(1).and_then(|before| state.whole.get(before)).copied();
                let (whole, _) = step(before.as_ref(), *id);
                put(&mut state.whole, at, whole);
                if state.shape.drafting {
                    put(&mut state.window, at, if state.forgets { 0 } else { hidden });
                }
                if pos >= chunk.logits_from {
                    out.logits.extend((0..VOCAB).map(|id| f32::from(u8::from(token(hidden).0 == id))));
                }
            } else {
                write(hidden, &mut out.hidden);
            }
        }
        state.next = chunk.pos.0 as usize + chunk.ids.len();
        Ok(())
    }
}

/// Writes at a place, which is at most the end.
fn put<T>(list: &mut Vec<T>, at: usize, value: T) {
    if let Some(slot) = list.get_mut(at) {
        *slot = value;
    } else {
        list.push(value);
    }
}

/// A hash as a hidden state: a marker that sets the scale, then digits below sixteen.
fn write(hash: u64, out: &mut Vec<bf16>) {
    out.push(bf16::from_f32(MARK));
    out.extend((0..16).map(|digit| bf16::from_f32(f32::from((hash >> (4 * digit)) as u8 & 15))));
    out.extend([bf16::ZERO; DIM - 17]);
}

/// The hash that a hidden state carries; `None` where it is not one that [`write`] makes.
fn read(values: &[bf16]) -> Option<u64> {
    let (mark, rest) = values.split_first()?;
    if mark.to_f32() != MARK || rest[16..].iter().any(|value| value.to_f32() != 0.0) {
        return None;
    }
    rest[..16].iter().rev().try_fold(0_u64, |hash, digit| {
        let digit = (0..16_u8).find(|wanted| f32::from(*wanted) == digit.to_f32())?;
        Some(hash << 4 | u64::from(digit))
    })
}

impl Engine for ToyEngine {
    fn facts(&self) -> &EngineFacts {
        &self.facts
    }

    fn state_bytes(&self, shape: &SessionShape) -> u64 {
        u64::from(shape.positions)
    }

    fn open(&mut self, session: SessionId, shape: &SessionShape) -> Result<(), OpenError> {
        if self.sessions.contains_key(&session) {
            return Err(OpenError::AlreadyOpen { session });
        }
        if shape.positions > CONTEXT {
            return Err(OpenError::TooLong { asked: shape.positions, limit: CONTEXT });
        }
        let layers = vec![Vec::new(); self.facts.range.count()];
        let forgets = self.facts.is_tail() && {
            let mut toys = self.toys.1.lock().unwrap_or_else(PoisonError::into_inner);
            !toys.tails.insert(session) && toys.forgets_windows
        };
        let state = State { shape: shape.clone(), layers, whole: Vec::new(), window: Vec::new(), next: 0, forgets };
        self.sessions.insert(session, state);
        self.count();
        Ok(())
    }

    fn close(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        self.count();
    }

    fn forward(&mut self, batch: &[Chunk<'_>], out: &mut Output) -> Result<(), EngineError> {
        out.hidden.clear();
        out.logits.clear();
        for chunk in batch {
            self.check(chunk)?;
        }
        batch.iter().try_for_each(|chunk| self.run(chunk, out))
    }

    fn draft(&mut self, session: SessionId, at: Position, anchor: TokenId) -> Result<Drafts, EngineError> {
        let none = |why| EngineError::Draft { pos: at, why };
        let state = self.sessions.get_mut(&session).ok_or(EngineError::NotOpen { session })?;
        state.forgets = false;
        let place = at.0 as usize;
        let window = state.window.get(..=place).ok_or(none("its windows were not computed"))?;
        let states = *state.whole.get(place).ok_or(none("it was not computed"))?;
        let tokens = drafted(window, anchor, oracle(states, anchor));
        Ok(Drafts { confidence: vec![0.0; tokens.len()], tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::wire::Wire;
    use crate::ids::WireEncoding;

    #[test]
    fn a_hash_crosses_every_wire_unchanged() {
        for hash in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef] {
            let mut hidden = Vec::new();
            write(hash, &mut hidden);
            for encoding in [WireEncoding::Fp8, WireEncoding::Bf16] {
                let wire = Wire::new(encoding, HC, DIM);
                let (mut bytes, mut back) = (Vec::new(), Vec::new());
                wire.encode(Position(0), &hidden, &mut bytes).unwrap();
                wire.decode(Position(0), &bytes, &mut back).unwrap();
                assert_eq!(read(&back), Some(hash), "{encoding}");
            }
        }
    }

    #[test]
    fn the_layers_one_by_one_say_what_the_reference_says() {
        let prompt = [TokenId(3), TokenId(9)];
        let reference = Reference::new(&prompt, 12, true);
        let shape = SessionShape {
            positions: 64,
            reach: 64,
            boundaries: vec![2, 4],
            encoding: WireEncoding::Fp8,
            drafting: true,
        };
        let ranges = ["0:2", "2:4", "4:6"].map(|range| range.parse().unwrap());
        let mut ring = ranges.map(|range| ToyEngine::new(range, 0, SharedToys::default()));
        let session = SessionId(1);
        for stage in &mut ring {
            let drafting = stage.facts.is_tail();
            stage.open(session, &SessionShape { drafting, ..shape.clone() }).unwrap();
        }
        let fed: Vec<TokenId> = prompt.iter().copied().chain(reference.tokens.iter().copied()).collect();
        for (at, id) in fed[..fed.len() - 1].iter().enumerate() {
            let pos = Position(u32::try_from(at).unwrap());
            let mut out = Output::default();
            for stage in &mut ring {
                let hidden = std::mem::take(&mut out.hidden);
                let hidden = (!stage.facts.is_head()).then_some(&hidden[..]);
                stage.forward(&[Chunk { session, pos, ids: &[*id], hidden, logits_from: pos }], &mut out).unwrap();
            }
            if at + 1 >= prompt.len() {
                let answer = TokenId(u32::try_from(out.logits.iter().position(|l| *l > 0.5).unwrap()).unwrap());
                assert_eq!(answer, fed[at + 1]);
                assert_eq!(ring[2].draft(session, pos, answer).unwrap().tokens, reference.block(pos).unwrap());
            }
        }
    }
}
