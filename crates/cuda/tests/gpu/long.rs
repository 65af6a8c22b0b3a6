//! Long waves: chunks of hundreds of positions against the CPU engine, with other sessions' rows in the same
//! pass, re-opened in their middle, and cut where a session's state reaches less far.

use ringfence_engine::engine::{Engine, SessionShape};
use ringfence_engine::ids::WireEncoding;

use crate::engine::{Step, compare, cpu, cuda};
use crate::support::{Outcome, Test};

/// All of them.
pub(crate) const TESTS: &[Test] = &[
    ("long_whole", |_| long("0:7", true)),
    ("long_middle", |_| long("2:5", false)),
    ("long_tail", |_| long("4:7", true)),
];

fn shape(reach: u32, encoding: WireEncoding, drafting: bool) -> SessionShape {
    SessionShape { positions: 640, reach, boundaries: vec![3], encoding, drafting }
}

/// Session 1 is one chunk longer than a wave; 2 decodes beside it; 3 is cut by its reach; 4 is a chunk of 70.
fn long(range: &str, drafts: bool) -> Outcome {
    let (mut expected, mut got) = (cpu(range)?, cuda(range, true)?);
    let drafting = drafts && expected.facts().draft_block > 0;
    let one = |session, pos, len, from| Step::Forward(vec![(session, pos, len, from)], 0);
    let mut steps = vec![
        Step::Open(1, shape(640, WireEncoding::Fp8, drafting)),
        Step::Open(2, shape(40, WireEncoding::Bf16, false)),
        Step::Open(3, shape(90, WireEncoding::Fp8, drafting)),
        Step::Open(4, shape(80, WireEncoding::Bf16, false)),
        one(2, 0, 30, 29),
        // Longer than a wave; logits of the last alone.
        one(1, 0, 600, 599),
        // A decode row in front of a long chunk, one behind it, and a short chunk.
        Step::Forward(vec![(2, 30, 1, 0), (3, 0, 300, 290), (4, 0, 70, 60)], 0),
        Step::Forward(vec![(4, 70, 1, 0), (1, 600, 33, 0), (2, 31, 1, 0)], 0),
        // Re-opened in the middle of the long chunk, with other tokens, twice; logits of all of them.
        Step::Forward(vec![(1, 250, 260, 0), (2, 32, 2, 0)], 1),
        Step::Forward(vec![(1, 251, 129, 379)], 2),
        one(1, 380, 1, 0),
        one(1, 381, 64, 0),
        one(3, 300, 24, 0),
        one(3, 324, 1, 0),
    ];
    if drafting {
        steps.extend([Step::Draft(1, 444, 5), Step::Draft(1, 400, 6), Step::Draft(3, 324, 7)]);
    }
    steps.extend((445..450).map(|pos| one(1, pos, 1, 0)));
    steps.extend([1, 2, 3, 4].map(Step::Close));
    compare(&mut expected, &mut got, &steps).map_err(|why| format!("{range}: {why}"))
}
