//! The device against itself: a position's bits are its session's history's alone. Chunks of every size
//! are single positions, batches are solo runs, what was thrown away left nothing.

use ringfence_cuda::CudaEngine;
use ringfence_engine::engine::{Engine, SessionShape};
use ringfence_engine::ids::{SessionId, WireEncoding};

use crate::engine::{Step, cuda, run, shape};
use crate::support::{Outcome, Test};

/// All of them.
pub(crate) const TESTS: &[Test] =
    &[("history_chunks", |_| chunks()), ("history_batches", |_| batches()), ("history_rewound", |_| rewound())];

/// Positions of a session here.
const POSITIONS: usize = 200;

fn wide() -> SessionShape {
    shape(POSITIONS as u32, &[], WireEncoding::Fp8, true)
}

fn open(engine: &mut CudaEngine, session: u64) -> Outcome {
    engine.open(SessionId(session), &wide()).map_err(|e| e.to_string())
}

/// The logits of one pass over chunks `(session, pos, positions)`, all of them asked for.
fn logits(engine: &mut CudaEngine, chunks: &[(u64, usize, usize)], seed: u64) -> Result<Vec<u32>, String> {
    let chunks = chunks.iter().map(|&(session, pos, len)| (session, pos, len, 0)).collect();
    match run(engine, &Step::Forward(chunks, seed)) {
        Some(Ok(seen)) => Ok(seen.1),
        other => Err(format!("no logits: {:?}", other.map(|seen| seen.err()))),
    }
}

/// A session's logits, position by position.
fn singles(engine: &mut CudaEngine, session: u64) -> Result<Vec<u32>, String> {
    open(engine, session)?;
    let mut all = Vec::new();
    for pos in 0..POSITIONS {
        all.extend(logits(engine, &[(session, pos, 1)], 0)?);
    }
    engine.close(SessionId(session));
    Ok(all)
}

fn chunks() -> Outcome {
    let mut engine = cuda("0:7", true)?;
    let vocab = engine.facts().vocab;
    let expected = singles(&mut engine, 5)?;
    for size in [2, 3, 5, 8, 16, 17, 63, 64, 65, POSITIONS] {
        open(&mut engine, 5)?;
        for pos in (0..POSITIONS).step_by(size) {
            let len = size.min(POSITIONS - pos);
            if logits(&mut engine, &[(5, pos, len)], 0)? != expected[pos * vocab..(pos + len) * vocab] {
                return Err(format!("a chunk of {len} at {pos} differs from its positions"));
            }
        }
        engine.close(SessionId(5));
    }
    Ok(())
}

/// Passes over two to sixteen sessions at different positions, whose chunks differ in size.
fn batches() -> Outcome {
    let mut engine = cuda("0:7", true)?;
    let vocab = engine.facts().vocab;
    for count in [2, 3, 8, 16] {
        let mut expected = Vec::new();
        for session in 0..count {
            expected.push(singles(&mut engine, session)?);
        }
        (0..count).try_for_each(|session| open(&mut engine, session))?;
        let mut next: Vec<usize> = (0..count as usize).map(|session| 7 * session % 50).collect();
        for (session, &to) in next.iter().enumerate().filter(|(_, to)| **to > 0) {
            logits(&mut engine, &[(session as u64, 0, to)], 0)?;
        }
        for round in 0..20 {
            let len = |session: usize| if round % 4 == 3 { 1 + (session + round) % 5 } else { 1 };
            let chunks: Vec<(u64, usize, usize)> =
                next.iter().enumerate().map(|(session, &pos)| (session as u64, pos, len(session))).collect();
            let got = logits(&mut engine, &chunks, 0)?;
            let mut rows = got.chunks_exact(vocab);
            for &(session, pos, len) in &chunks {
                for at in pos..pos + len {
                    if rows.next() != Some(&expected[session as usize][at * vocab..(at + 1) * vocab]) {
                        return Err(format!("{count} sessions, round {round}: session {session} differs at {at}"));
                    }
                }
                next[session as usize] = pos + len;
            }
        }
        (0..count).for_each(|session| engine.close(SessionId(session)));
    }
    Ok(())
}

/// Other tokens run ahead and are thrown away, again and again, across the ends of slots and windows.
fn rewound() -> Outcome {
    let mut engine = cuda("0:7", true)?;
    let vocab = engine.facts().vocab;
    let expected = singles(&mut engine, 9)?;
    for (ahead, step) in [(1, 1), (5, 2), (16, 3), (40, 17), (64, 31)] {
        open(&mut engine, 9)?;
        for pos in (0..POSITIONS).step_by(step) {
            let len = step.min(POSITIONS - pos);
            // What is thrown away are the tokens of another seed.
            let wrong = logits(&mut engine, &[(9, pos, ahead.min(POSITIONS - pos))], 1)?;
            let got = logits(&mut engine, &[(9, pos, len)], 0)?;
            if got != expected[pos * vocab..(pos + len) * vocab] {
                return Err(format!("rewound from {ahead} ahead, {len} at {pos} differ from the straight run"));
            }
            if wrong[..vocab] == got[..vocab] {
                return Err(format!("other tokens at {pos} changed nothing"));
            }
        }
        engine.close(SessionId(9));
    }
    Ok(())
}
