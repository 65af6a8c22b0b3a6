//! One process, no ring: generates and scores with a single engine over all layers.
//!
//! Owns the reference that a ring is compared with. Stage boundaries are emulated, tokens are
//! picked by the tail's own function at the positions where they will be fed, nothing is drafted:
//! so the result is the stream that a ring with these boundaries must commit.

use super::sample::{Sampler, greedy};
use super::{Chunk, Engine, EngineError, OpenError, Output, SessionShape};
use crate::engine::sample::Sampling;
use crate::ids::{Position, SessionId, TokenId, WireEncoding};

/// The session that a solo run opens; no ring counts this far.
const SESSION: SessionId = SessionId(u64::MAX);

/// A request to one process.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// Prompt tokens, at least one.
    pub prompt: &'a [TokenId],
    /// New tokens at most.
    pub max_new: u32,
    /// How tokens are picked.
    pub sampling: Sampling,
    /// Tokens that end the text; the one that does is the last of the result.
    pub eos: &'a [TokenId],
    /// Layers in front of which a stage boundary is emulated, ascending.
    pub boundaries: Vec<u16>,
    /// The encoding there.
    pub encoding: WireEncoding,
    /// Positions of the prompt computed at once, at least 1; changes no bit.
    pub chunk: u32,
}

/// What a model thinks of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// The most likely next token at each position.
    pub argmax: Vec<TokenId>,
    /// Natural log-probability of the token that really follows, per position but the last.
    pub logprobs: Vec<f32>,
    /// The most likely next tokens with their log-probabilities at each position, best first.
    pub top: Vec<Vec<(TokenId, f32)>>,
    /// Mean of the negative `logprobs`; 0 for a single token.
    pub mean_nll: f64,
}

/// Why a solo run failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SoloError {
    /// There is nothing to continue.
    #[error("the prompt has no token: give at least one")]
    Empty,
    /// The engine lacks the embedding or the head.
    #[error("the engine holds layers {range} of {layers}: a single process needs all of them")]
    Partial {
        /// Layers held.
        range: crate::ids::LayerRange,
        /// Layers of the model.
        layers: u16,
    },
    /// The session was not opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A pass failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// A session that is closed when the run ends, well or not.
struct Session<'a> {
    engine: &'a mut dyn Engine,
    out: Output,
}

impl<'a> Session<'a> {
    fn open(engine: &'a mut dyn Engine, shape: &SessionShape) -> Result<Self, SoloError> {
        let facts = engine.facts();
        if !facts.is_head() || !facts.is_tail() {
            return Err(SoloError::Partial { range: facts.range, layers: facts.layers });
        }
        engine.open(SESSION, shape)?;
        Ok(Self { engine, out: Output::default() })
    }

    /// Computes `ids` at `pos`; logits from `logits_from` on are in the output.
    fn feed(&mut self, pos: usize, ids: &[TokenId], logits_from: usize) -> Result<(), SoloError> {
        let chunk =
            Chunk { session: SESSION, pos: position(pos), ids, hidden: None, logits_from: position(logits_from) };
        Ok(self.engine.forward(&[chunk], &mut self.out)?)
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.engine.close(SESSION);
    }
}

fn position(pos: usize) -> Position {
    Position(count(pos))
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn shape(positions: u32, chunk: usize, boundaries: &[u16], encoding: WireEncoding) -> SessionShape {
    SessionShape { positions, reach: count(chunk), boundaries: boundaries.to_vec(), encoding, drafting: false }
}

/// Continues a prompt one token at a time, undrafted.
///
/// # Errors
/// [`SoloError`] where the engine does not hold the whole model or refuses the session.
pub fn generate(engine: &mut dyn Engine, request: &Request<'_>) -> Result<Vec<TokenId>, SoloError> {
    let (prompt, chunk) = (request.prompt, request.chunk.max(1) as usize);
    let Some(last) = prompt.len().checked_sub(1) else { return Err(SoloError::Empty) };
    let mut tokens = Vec::new();
    if request.max_new == 0 {
        return Ok(tokens);
    }
    // The last new token is never fed.
    let positions = count(prompt.len()).saturating_add(request.max_new - 1);
    let shape = shape(positions, chunk, &request.boundaries, request.encoding);
    let mut session = Session::open(engine, &shape)?;
    let mut sampler = Sampler::new();
    for (at, ids) in prompt.chunks(chunk).enumerate() {
        session.feed(at * chunk, ids, last)?;
    }
    loop {
        let pos = prompt.len() + tokens.len();
        let token = sampler.pick(&session.out.logits, &request.sampling, position(pos));
        tokens.push(token);
        if tokens.len() == request.max_new as usize || request.eos.contains(&token) {
            return Ok(tokens);
        }
        session.feed(pos, &[token], pos)?;
    }
}

/// Scores a text: what the model puts at each position, and how likely the real tokens are.
///
/// `top` most likely tokens are listed per position; `chunk` positions are computed at once, which
/// changes no bit.
///
/// # Errors
/// [`SoloError`] where the engine does not hold the whole model or refuses the session.
pub fn score(
    engine: &mut dyn Engine,
    ids: &[TokenId],
    boundaries: &[u16],
    encoding: WireEncoding,
    top: u32,
    chunk: u32,
) -> Result<Score, SoloError> {
    if ids.is_empty() {
        return Err(SoloError::Empty);
    }
    let chunk = chunk.max(1) as usize;
    let vocab = engine.facts().vocab;
    let mut session = Session::open(engine, &shape(count(ids.len()), chunk, boundaries, encoding))?;
    let mut score = Score { argmax: Vec::new(), logprobs: Vec::new(), top: Vec::new(), mean_nll: 0.0 };
    let mut sampler = Sampler::new();
    for (at, part) in ids.chunks(chunk).enumerate() {
        session.feed(at * chunk, part, at * chunk)?;
        for row in session.out.logits.chunks_exact(vocab) {
            let next = score.argmax.len() + 1;
            let softmax = sampler.log_softmax(row);
            score.argmax.push(greedy(row));
            score.top.push(sampler.top(row, &softmax, top as usize));
            if let Some(id) = ids.get(next) {
                score.logprobs.push(softmax.of(row, *id));
            }
        }
    }
    if !score.logprobs.is_empty() {
        let sum: f64 = score.logprobs.iter().map(|&logprob| -f64::from(logprob)).sum();
        #[allow(clippy::cast_precision_loss, reason = "positions are below 2^24")]
        let n = score.logprobs.len() as f64;
        score.mean_nll = sum / n;
    }
    Ok(score)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::{CpuEngine, CpuSettings};
    use crate::model::Checkpoint;

    fn engine() -> CpuEngine {
        let checkpoint = Checkpoint::tiny().unwrap();
        CpuEngine::new(&checkpoint, checkpoint.all_layers(), &CpuSettings::default()).unwrap()
    }

    fn request<'a>(prompt: &'a [TokenId], temperature: f32, chunk: u32) -> Request<'a> {
        Request {
            prompt,
            max_new: 30,
            sampling: Sampling { temperature, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 7 },
            eos: &[],
            boundaries: vec![2, 4],
            encoding: WireEncoding::Fp8,
            chunk,
        }
    }

    #[test]
    fn the_prompt_chunk_changes_no_token() {
        let prompt: Vec<TokenId> = (0..70).map(|i| TokenId(i * 29 % 2048)).collect();
        let mut engine = engine();
        for temperature in [0.0, 0.8] {
            let expected = generate(&mut engine, &request(&prompt, temperature, 1)).unwrap();
            assert_eq!(expected.len(), 30);
            for chunk in [7, 64, 70, 1000] {
                assert_eq!(generate(&mut engine, &request(&prompt, temperature, chunk)).unwrap(), expected);
            }
        }
    }

    #[test]
    fn generation_ends_with_the_end_token_and_the_session_is_closed() {
        let prompt: Vec<TokenId> = (0..9).map(TokenId).collect();
        let mut engine = engine();
        let all = generate(&mut engine, &request(&prompt, 0.0, 4)).unwrap();
        let eos = [all[3]];
        let ended = generate(&mut engine, &Request { eos: &eos, ..request(&prompt, 0.0, 4) }).unwrap();
        let end = all.iter().position(|token| *token == eos[0]).unwrap();
        assert_eq!(ended, all[..=end]);
        assert!(generate(&mut engine, &Request { max_new: 0, ..request(&prompt, 0.0, 4) }).unwrap().is_empty());
        assert_eq!(generate(&mut engine, &request(&[], 0.0, 4)), Err(SoloError::Empty));
    }

    #[test]
    fn scores_are_those_of_the_stream() {
        let prompt: Vec<TokenId> = (0..20).map(|i| TokenId(i * 31 % 2048)).collect();
        let mut engine = engine();
        let tokens = generate(&mut engine, &request(&prompt, 0.0, 4)).unwrap();
        let text: Vec<TokenId> = prompt.iter().chain(&tokens).copied().collect();
        let score = score(&mut engine, &text, &[2, 4], WireEncoding::Fp8, 5, 11).unwrap();
        assert_eq!(score.argmax[prompt.len() - 1..text.len() - 1], tokens);
        assert_eq!((score.argmax.len(), score.logprobs.len()), (text.len(), text.len() - 1));
        for (argmax, top) in score.argmax.iter().zip(&score.top) {
            assert_eq!((top.len(), top[0].0), (5, *argmax));
            assert!(top.windows(2).all(|pair| pair[0].1 >= pair[1].1));
        }
        let mean = -score.logprobs.iter().map(|&l| f64::from(l)).sum::<f64>() / score.logprobs.len() as f64;
        assert!((score.mean_nll - mean).abs() < 1e-9);
    }
}
