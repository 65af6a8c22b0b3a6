//! Times of whole layers and of their kernels, for benches: graphs of repeated launches between events.
//!
//! Not part of the interface; what it runs is what a pass runs, on the engine's own buffers.

use std::collections::BTreeSet;

use cudarc::driver::sys;
use ringfence_engine::engine::Engine;
use ringfence_engine::model::ModelConfig;

use crate::driver::DevicePtr;
use crate::engine::CudaEngine;
use crate::error::{CudaError, Doing};
use crate::floor::{self, Seen};
use crate::graph::Captured;
use crate::layer::Sees;
use crate::ops::Row;
use crate::pass::{Pass, Shape};
use crate::state::to_usize;
use crate::weights::LayerWeights;

/// Replays whose median counts.
const REPLAYS: usize = 15;
/// Repetitions in a graph.
const REPEATS: usize = 20;

/// Microseconds of one thing.
#[derive(Debug, Clone, PartialEq)]
pub struct Time {
    /// What was run.
    pub what: String,
    /// Median microseconds of one run.
    pub us: f64,
    /// Bytes of weights and keys that it must read; 0 where they were not counted.
    pub bytes: usize,
}

/// A step of a layer by name: what runs, and the bytes that it must read.
type Step = (
    &'static str,
    fn(&Pass<'_>, usize, usize) -> Result<(), CudaError>,
    fn(&ModelConfig, &LayerWeights, Seen) -> usize,
);

const STEPS: [Step; 6] = [
    (
        "enter attention",
        |pass, m, place| {
            let w = &pass.weights.layers[place];
            pass.enter(m, w.hc_attn, w.attn_norm)
        },
        |config, _, _| floor::mixes(config),
    ),
    (
        "queries, keys, compressors, picks",
        |pass, m, place| pass.projected(m, &pass.weights.layers[place], place, Sees::Target).map(|_| ()),
        |config, w, seen| floor::inputs(&w.attn) + floor::queries(&w.attn) + floor::index_keys(config, w, seen),
    ),
    (
        "attend",
        |pass, m, place| {
            let w = &pass.weights.layers[place];
            let picks = if w.attn.indexer.is_some() { pass.buffers.slot_picks } else { DevicePtr::NULL };
            pass.attend(m, w, place, (Sees::Target, picks))
        },
        floor::keys,
    ),
    (
        "output products",
        |pass, m, place| pass.output(m, &pass.weights.layers[place].attn),
        |_, w, _| floor::output(&w.attn),
    ),
    ("leave", |pass, m, _| pass.leave(m, None), |_, _, _| 0),
    (
        "experts with their router",
        |pass, m, place| pass.feed_forward(m, &pass.weights.layers[place]),
        |_, w, seen| floor::feed_forward(&w.ffn, seen),
    ),
];

impl CudaEngine {
    /// Times a layer of the range for these rows, whole and step by step. The rows' sessions must have
    /// room for their positions.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    #[doc(hidden)]
    pub fn time_layer(&mut self, place: usize, rows: &[Row]) -> Result<Vec<Time>, CudaError> {
        self.put_rows(rows)?;
        let m = rows.len();
        let whole = |pass: &Pass<'_>| pass.layer(m, &pass.weights.layers[place], place, (Sees::Target, None));
        let mut times = vec![self.time("layer", &whole)?];
        for (what, step, _) in STEPS {
            times.push(self.time(what, &|pass| step(pass, m, place))?);
        }
        let positions = rows.iter().map(|row| to_usize(row.pos.cast_unsigned()) + 1).max().unwrap_or(0);
        let seen = Seen { positions, experts: self.experts_of(m)? };
        let pass = self.pass();
        let (config, weights) = (pass.config, &pass.weights.layers[place]);
        times[0].bytes = floor::layer(config, weights, seen);
        for (time, (_, _, bytes)) in times[1..].iter_mut().zip(STEPS) {
            time.bytes = bytes(config, weights, seen);
        }
        Ok(times)
    }

    /// Times a draft block behind an anchor.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    #[doc(hidden)]
    pub fn time_draft(&mut self, block: usize, anchor: Row) -> Result<Time, CudaError> {
        self.put_anchor(anchor)?;
        self.time("draft", &|pass| pass.draft(block))
    }

    /// Times the last pass again, if it was one wave of `rows` rows: all of it on the stream, copies
    /// included, with logits of every row or (on a tail) without any.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    #[doc(hidden)]
    pub fn time_step(&self, rows: usize, logits: bool) -> Result<Time, CudaError> {
        self.device().bind()?;
        let logits = if logits && self.facts().is_tail() { rows } else { 0 };
        self.time_stream("step", &|| self.enqueue(Shape { rows, logits, drafting: false }))
    }

    /// How many experts the rows of the last pass go to, layer by layer; one wave as above. The rows'
    /// hidden states go through the range once more.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    #[doc(hidden)]
    pub fn experts_met(&self, rows: usize) -> Result<Vec<usize>, CudaError> {
        self.device().bind()?;
        // Puts rows and hidden states there; the layers below begin with them again.
        self.put_last(rows)?;
        let pass = self.pass();
        let mut met = Vec::new();
        for place in 0..self.facts().range.count() {
            pass.layer(rows, &pass.weights.layers[place], place, (Sees::Target, None))?;
            met.push(self.experts_of(rows)?);
        }
        Ok(met)
    }

    /// Different experts that the rows of the last layer went to.
    fn experts_of(&self, rows: usize) -> Result<usize, CudaError> {
        let pass = self.pass();
        let mut picks = vec![0i32; rows * pass.config.experts_per_token];
        // SAFETY: the buffer holds as many for a wave.
        unsafe { self.device().download(pass.buffers.expert_picks, &mut picks) }?;
        Ok(picks.into_iter().collect::<BTreeSet<i32>>().len())
    }

    fn time(&self, what: &str, work: &dyn Fn(&Pass<'_>) -> Result<(), CudaError>) -> Result<Time, CudaError> {
        let pass = self.pass();
        self.time_stream(what, &|| work(&pass))
    }

    fn time_stream(&self, what: &str, work: &dyn Fn() -> Result<(), CudaError>) -> Result<Time, CudaError> {
        let device = self.device();
        work()?;
        device.synchronize()?;
        let graph = Captured::new(device, &mut || (0..REPEATS).try_for_each(|_| work()))?;
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || device.context().new_event(flags).doing("make an event");
        let (start, end) = (event()?, event()?);
        let mut times = Vec::new();
        for _ in 0..REPLAYS + 2 {
            start.record(device.stream()).doing("record an event")?;
            graph.launch()?;
            end.record(device.stream()).doing("record an event")?;
            times.push(f64::from(start.elapsed_ms(&end).doing("read the clock")?) * 1e3 / REPEATS as f64);
        }
        let mut times = times.split_off(2);
        times.sort_by(f64::total_cmp);
        Ok(Time { what: what.to_owned(), us: times[times.len() / 2], bytes: 0 })
    }
}
