//! The whole model, teacher-forced along the golden text.

use ringfence_engine::engine::{Chunk, Engine, Output};
use ringfence_engine::ids::Position;

use crate::read::{Golden, SESSION, engine};

fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = id;
        }
    }
    best
}

fn log_prob(logits: &[f32], id: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    f64::from(logits[id] - max) - sum.ln()
}

/// Counts of positions whose argmax agrees, and the largest golden gap where it does not.
#[derive(Default)]
struct Agreement {
    equal: usize,
    of: usize,
    worst_gap: f32,
}

impl Agreement {
    fn add(&mut self, logits: &[f32], top_ids: &[i32], top: &[f32]) {
        self.of += 1;
        if argmax(logits) == usize::try_from(top_ids[0]).unwrap() {
            self.equal += 1;
        } else {
            self.worst_gap = self.worst_gap.max(top[0] - top[1]);
        }
    }
}

#[test]
fn teacher_forced_text_agrees() {
    let prompts: Vec<serde_json::Value> = serde_json::from_slice(
        &std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/prompts.json")).unwrap(),
    )
    .unwrap();
    let (mut prompt_rows, mut decode_rows) = (Agreement::default(), Agreement::default());
    let (mut drafted, mut drafts_equal) = (0, 0);
    for prompt in &prompts {
        let golden = Golden::open(prompt["name"].as_str().unwrap());
        let mut engine = engine(1);
        let mut out = Output::default();
        let ids = golden.ids("prompt_ids");
        let vocab = engine.facts().vocab;
        let chunk = Chunk { session: SESSION, pos: Position(0), ids: &ids, hidden: None, logits_from: Position(0) };
        engine.forward(&[chunk], &mut out).unwrap();
        let rows: Vec<&[f32]> = out.logits.chunks_exact(vocab).collect();
        assert_eq!(rows.len(), ids.len());
        let (top_ids, top) = (golden.i32("prefill.top5_ids"), golden.f32("prefill.top5_logits"));
        for (row, logits) in rows.iter().enumerate() {
            prompt_rows.add(logits, &top_ids[5 * row..], &top[5 * row..]);
        }
        if ids.len() >= 64 {
            let sum: f64 = (1..ids.len()).map(|p| -log_prob(rows[p - 1], ids[p].0 as usize)).sum();
            let nll = sum / (ids.len() - 1) as f64;
            let expected = prompt["prompt_nll"].as_f64().unwrap();
            println!("{}: nll {nll:.4}, golden {expected:.4}", golden.name);
            assert!((nll - expected).abs() <= 0.03, "{}: nll {nll}, golden {expected}", golden.name);
        }
        let greedy = golden.ids("greedy_ids");
        let (top_ids, top) = (golden.i32("decode.top5_ids"), golden.f32("decode.top5_logits"));
        let draft_ids = golden.i32("draft.output_ids");
        for step in 0..greedy.len() - 1 {
            let pos = Position(u32::try_from(ids.len() + step).unwrap());
            let fed = [greedy[step]];
            let chunk = Chunk { session: SESSION, pos, ids: &fed, hidden: None, logits_from: pos };
            engine.forward(&[chunk], &mut out).unwrap();
            decode_rows.add(&out.logits, &top_ids[5 * step..], &top[5 * step..]);
            let drafts = engine.draft(SESSION, pos, greedy[step + 1]).unwrap();
            for (k, token) in drafts.tokens.iter().enumerate() {
                drafted += 1;
                drafts_equal += usize::from(token.0 == u32::try_from(draft_ids[6 * step + 1 + k]).unwrap());
            }
        }
    }
    for (name, rows) in [("prompt", &prompt_rows), ("decode", &decode_rows)] {
        println!("{name}: {} of {} argmaxes equal, worst gap {}", rows.equal, rows.of, rows.worst_gap);
        assert!(rows.equal as f64 >= 0.88 * rows.of as f64, "{name}: {} of {}", rows.equal, rows.of);
        assert!(rows.worst_gap <= 1.2, "{name}: differs where the golden gap is {}", rows.worst_gap);
    }
    println!("drafts: {drafts_equal} of {drafted} equal");
    // A legal reordering keeps 90 % of them.
    assert!(drafts_equal as f64 >= 0.8 * f64::from(drafted), "{drafts_equal} of {drafted} draft tokens");
}
