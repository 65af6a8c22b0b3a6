//! Ring == one process, token for token.

use ringfence::config::CoordinatorSettings;
use ringfence::coordinator::job::{Finish, Mode, Request};
use ringfence::engine::solo;
use ringfence::ids::{LayerRange, TokenId, WireEncoding};
use ringfence::model::Checkpoint;
use ringfence::proto::control::Sampling;
use ringfence::transport::memory::{MemoryNetwork, MemorySettings};

use crate::rig::{Rig, cuts, engine, greedy, prompt, quick, ranges, request, tiny, warm};

/// What one undrafted process makes of a request, with the same boundaries emulated.
pub(crate) fn reference(
    checkpoint: &Checkpoint,
    cut: &[LayerRange],
    request: &Request,
    encoding: WireEncoding,
    eos: &[TokenId],
) -> Vec<TokenId> {
    let mut engine = engine(checkpoint, checkpoint.all_layers());
    let request = solo::Request {
        prompt: &request.prompt,
        max_new: request.max_new,
        sampling: request.sampling,
        eos,
        boundaries: cut.iter().skip(1).map(|range| range.lo()).collect(),
        encoding,
        chunk: 7,
    };
    solo::generate(&mut engine, &request).unwrap()
}

async fn check_cut(cut: &[LayerRange], encoding: WireEncoding) {
    let checkpoint = tiny();
    let rig = Rig::new(cut, CoordinatorSettings { encoding, prefill_chunk: 16, ..quick() }).await;
    let drafts = cut.last().is_some_and(|tail| tail.lo() <= 4);
    let mode = if drafts { Mode::Pipelined } else { Mode::Plain };
    let request = request(&prompt(41), 24, mode);
    let expected = reference(&checkpoint, cut, &request, encoding, &[]);
    let run = rig.run(request).await;
    assert_eq!(run.tokens, expected, "cut {cut:?} {encoding} {mode:?}");
    assert_eq!(run.finish(), Finish::Length);
    assert_eq!(run.stats().acceptance_length.is_some(), drafts);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_cut_into_four_stages_equals_one_process_on_fp8() {
    for cut in cuts(7, 4) {
        check_cut(&cut, WireEncoding::Fp8).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_cut_into_four_stages_equals_one_process_on_bf16() {
    for cut in cuts(7, 4) {
        check_cut(&cut, WireEncoding::Bf16).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_a_layer_equals_one_process() {
    check_cut(&ranges("0:1 1:2 2:3 3:4 4:5 5:6 6:7"), WireEncoding::Fp8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelined_equals_plain_for_every_number_of_frames_in_flight() {
    let (checkpoint, cut) = (tiny(), ranges("0:2 2:4 4:7"));
    let samplings: [Sampling; 3] = [greedy(), warm(1), warm(77)];
    for in_flight_max in [1, 2, 8, 16] {
        let rig = Rig::new(&cut, CoordinatorSettings { in_flight_max, ..quick() }).await;
        for sampling in samplings {
            let pipelined = Request { sampling, ..request(&prompt(30), 60, Mode::Pipelined) };
            let expected = reference(&checkpoint, &cut, &pipelined, WireEncoding::Fp8, &[]);
            let plain = Request { mode: Some(Mode::Plain), ..pipelined.clone() };
            let run = rig.run(pipelined).await;
            assert_eq!(run.tokens, expected, "W = {in_flight_max}, {sampling:?}");
            assert!(run.stats().max_in_flight <= in_flight_max);
            let run = rig.run(plain).await;
            assert_eq!(run.tokens, expected, "plain, W = {in_flight_max}, {sampling:?}");
            assert_eq!(run.stats().acceptance_length, None);
        }
        rig.end().await;
    }
}

/// Frames travel on several lanes: whatever order they come in, no token is another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_overtake_one_another_change_nothing() {
    let (checkpoint, cut) = (tiny(), ranges("0:2 2:4 4:7"));
    for seed in 0..4 {
        let network = MemoryNetwork::with_settings(MemorySettings { shuffle: Some(seed), ..MemorySettings::default() });
        let settings = CoordinatorSettings { prefill_chunk: 3, in_flight_max: 16, ..quick() };
        let rig = Rig::over(network, &cut, settings, &|engine| Box::new(engine)).await;
        let requests: Vec<Request> = (0..3)
            .map(|at| Request {
                sampling: if at == 0 { greedy() } else { warm(seed + at) },
                ..request(&prompt(20 + 40 * at as usize), 40, Mode::Pipelined)
            })
            .collect();
        let runs = futures::future::join_all(requests.iter().map(|request| rig.run(request.clone()))).await;
        for (request, run) in requests.iter().zip(runs) {
            let expected = reference(&checkpoint, &cut, request, WireEncoding::Fp8, &[]);
            assert_eq!(run.tokens, expected, "order {seed}");
        }
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancel_only_saves_work() {
    let (checkpoint, cut) = (tiny(), ranges("0:2 2:4 4:7"));
    let request = request(&prompt(30), 60, Mode::Pipelined);
    let expected = reference(&checkpoint, &cut, &request, WireEncoding::Fp8, &[]);
    for cancel_out_of_band in [true, false] {
        let rig = Rig::new(&cut, CoordinatorSettings { cancel_out_of_band, ..quick() }).await;
        let run = rig.run(request.clone()).await;
        assert_eq!(run.tokens, expected, "out of band: {cancel_out_of_band}");
        let stats = run.stats();
        let rejected = stats.frames_per_token > 1.0;
        assert!(rejected, "drafts were rejected on the way: {stats:?}");
        for computed in &stats.frames_computed_per_token {
            assert!(*computed <= stats.frames_per_token, "{stats:?}");
        }
        rig.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_at_once_equal_sessions_alone() {
    let (checkpoint, cut) = (tiny(), ranges("0:3 3:4 4:7"));
    let rig = Rig::new(&cut, quick()).await;
    let requests: Vec<Request> = (0..6)
        .map(|at| Request {
            sampling: if at % 2 == 0 { greedy() } else { warm(at) },
            encoding: Some(if at % 3 == 0 { WireEncoding::Bf16 } else { WireEncoding::Fp8 }),
            ..request(&prompt(20 + 13 * at as usize), 40, if at == 2 { Mode::Plain } else { Mode::Pipelined })
        })
        .collect();
    let runs = futures::future::join_all(requests.iter().map(|request| rig.run(request.clone()))).await;
    for (request, run) in requests.iter().zip(runs) {
        let expected = reference(&checkpoint, &cut, request, request.encoding.unwrap(), &[]);
        assert_eq!(run.tokens, expected);
    }
    assert_eq!(rig.coordinator_sessions(), 0);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prompt_in_chunks_crosses_every_boundary() {
    let (checkpoint, cut) = (tiny(), ranges("0:2 2:4 4:7"));
    for prefill_chunk in [1, 5, 64, 300] {
        let rig = Rig::new(&cut, CoordinatorSettings { prefill_chunk, ..quick() }).await;
        let request = request(&prompt(300), 8, Mode::Pipelined);
        let expected = reference(&checkpoint, &cut, &request, WireEncoding::Fp8, &[]);
        assert_eq!(rig.run(request).await.tokens, expected, "chunks of {prefill_chunk}");
        rig.end().await;
    }
}
