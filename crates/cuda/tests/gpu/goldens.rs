//! The tiny model along the golden texts that the official code computed, on the device: the bits of the
//! processor, and within the bounds of `crates/engine/tests/golden/README.md`.

use ringfence_engine::engine::{Chunk, Drafts, Engine, Output, SessionShape};
use ringfence_engine::ids::{Position, SessionId, TokenId, WireEncoding};
use safetensors::SafeTensors;

use crate::engine::{cpu, cuda};
use crate::support::{Outcome, Test, same_f32};

/// All of them.
pub(crate) const TESTS: &[Test] = &[("goldens", |_| goldens())];

const PROMPTS: [&str; 6] = ["p1-bos", "p2-short", "p3-past-window", "p4-detail", "p5-long", "p6-chat"];

/// The file of one prompt.
struct Golden(Vec<u8>);

impl Golden {
    fn open(name: &str) -> Result<Self, String> {
        let path = format!("crates/engine/tests/golden/{name}.safetensors");
        std::fs::read(&path).map(Self).map_err(|e| format!("{path}: {e}"))
    }

    fn words<T>(&self, tensor: &str, read: impl Fn([u8; 4]) -> T) -> Result<Vec<T>, String> {
        let file = SafeTensors::deserialize(&self.0).map_err(|e| e.to_string())?;
        let view = file.tensor(tensor).map_err(|e| format!("{tensor}: {e}"))?;
        Ok(view.data().as_chunks::<4>().0.iter().map(|word| read(*word)).collect())
    }

    fn ids(&self, tensor: &str) -> Result<Vec<TokenId>, String> {
        self.words(tensor, |word| TokenId(u32::from_le_bytes(word)))
    }
}

/// Rows whose best token agrees, and the largest golden gap where it does not.
#[derive(Default)]
struct Agreement {
    equal: usize,
    of: usize,
    gap: f32,
}

impl Agreement {
    /// `top_ids` and `top` are five to a row.
    fn add(&mut self, logits: &[f32], vocab: usize, (top_ids, top): (&[TokenId], &[f32])) {
        for ((row, ids), top) in logits.chunks_exact(vocab).zip(top_ids.chunks_exact(5)).zip(top.chunks_exact(5)) {
            let best = (0..vocab).fold(0, |best, i| if row[i] > row[best] { i } else { best });
            self.of += 1;
            if ids[0].0 as usize == best {
                self.equal += 1;
            } else {
                self.gap = self.gap.max(top[0] - top[1]);
            }
        }
    }

    fn held(&self, what: &str) -> Outcome {
        println!("     {what}: {} of {} best tokens equal, largest gap at another {}", self.equal, self.of, self.gap);
        if self.of > 0 && self.equal * 100 >= self.of * 88 && self.gap <= 1.2 {
            return Ok(());
        }
        Err(format!("{what}: {} of {} best tokens, gap {}", self.equal, self.of, self.gap))
    }
}

/// Both engines with one session.
struct Pair([Box<dyn Engine>; 2]);

impl Pair {
    /// The logits of a chunk, whose bits are both engines'.
    fn forward(&mut self, pos: usize, ids: &[TokenId]) -> Result<Vec<f32>, String> {
        let at = Position(pos as u32);
        let chunk = Chunk { session: SessionId(1), pos: at, ids, hidden: None, logits_from: at };
        let mut outs = [Output::default(), Output::default()];
        for (engine, out) in self.0.iter_mut().zip(&mut outs) {
            engine.forward(&[chunk], out).map_err(|e| e.to_string())?;
        }
        let [expected, got] = outs;
        same_f32(&format!("logits at {pos}"), &got.logits, &expected.logits)?;
        Ok(got.logits)
    }

    fn draft(&mut self, pos: usize, anchor: TokenId) -> Result<Drafts, String> {
        let mut draft =
            |at: usize| self.0[at].draft(SessionId(1), Position(pos as u32), anchor).map_err(|e| e.to_string());
        let (expected, got) = (draft(0)?, draft(1)?);
        if got == expected { Ok(got) } else { Err(format!("draft at {pos}: {got:?} for {expected:?}")) }
    }
}

fn goldens() -> Outcome {
    let mut pair = Pair([Box::new(cpu("0:7")?), Box::new(cuda("0:7", true)?)]);
    let vocab = pair.0[1].facts().vocab;
    let (mut prompts, mut decoded) = (Agreement::default(), Agreement::default());
    let (mut drafted, mut equal) = (0, 0);
    for name in PROMPTS {
        let golden = Golden::open(name)?;
        let shape = SessionShape {
            positions: 512,
            reach: 300,
            boundaries: Vec::new(),
            encoding: WireEncoding::Bf16,
            drafting: true,
        };
        for engine in &mut pair.0 {
            engine.close(SessionId(1));
            engine.open(SessionId(1), &shape).map_err(|e| e.to_string())?;
        }
        let prompt = golden.ids("prompt_ids")?;
        let logits = pair.forward(0, &prompt).map_err(|why| format!("{name}: {why}"))?;
        let top = |phase: &str| {
            Ok::<_, String>((
                golden.ids(&format!("{phase}.top5_ids"))?,
                golden.words(&format!("{phase}.top5_logits"), f32::from_le_bytes)?,
            ))
        };
        let (ids, values) = top("prefill")?;
        prompts.add(&logits, vocab, (&ids, &values));
        let (ids, values) = top("decode")?;
        let (greedy, drafts) = (golden.ids("greedy_ids")?, golden.ids("draft.output_ids")?);
        for step in 0..greedy.len() - 1 {
            let pos = prompt.len() + step;
            let logits = pair.forward(pos, &greedy[step..=step]).map_err(|why| format!("{name}: {why}"))?;
            decoded.add(&logits, vocab, (&ids[5 * step..], &values[5 * step..]));
            let got = pair.draft(pos, greedy[step + 1]).map_err(|why| format!("{name}: {why}"))?;
            drafted += got.tokens.len();
            equal += got.tokens.iter().zip(&drafts[6 * step + 1..]).filter(|(got, golden)| got == golden).count();
        }
    }
    prompts.held("prompts")?;
    decoded.held("decoded")?;
    println!("     {equal} of {drafted} draft tokens equal");
    if drafted > 0 && equal * 100 >= drafted * 80 { Ok(()) } else { Err(format!("{equal} of {drafted} drafts")) }
}
