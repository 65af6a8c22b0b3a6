//! Times of whole layers and of their kernels, for benches: graphs of repeated launches between events.
//!
//! Not part of the interface; what it runs is what a pass runs, on the engine's own buffers.

use std::collections::BTreeSet;

use cudarc::driver::sys;
use ringfence_engine::engine::Engine;

use crate::driver::DevicePtr;
use crate::engine::CudaEngine;
use crate::error::{CudaError, Doing};
use crate::graph::Captured;
use crate::layer::Sees;
use crate::ops::Row;
use crate::pass::{Pass, Shape};

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
}

/// A step of a layer by name.
type Step = (&'static str, fn(&Pass<'_>, usize, usize) -> Result<(), CudaError>);

const STEPS: [Step; 8] = [
    ("enter attention", |pass, m, place| {
        let w = &pass.weights.layers[place];
        pass.enter(m, w.hc_attn, w.attn_norm)
    }),
    ("products of the input", |pass, m, place| pass.inputs(m, &pass.weights.layers[place].attn)),
    ("keys and products of queries", |pass, m, place| {
        pass.queries_and_keys(m, &pass.weights.layers[place], place, Sees::Target)
    }),
    ("queries, compressors, picks", |pass, m, place| pass.prepared(m, &pass.weights.layers[place], place).map(|_| ())),
    ("attend", |pass, m, place| {
        let w = &pass.weights.layers[place];
        let picks = if w.attn.indexer.is_some() { pass.buffers.slot_picks } else { DevicePtr::NULL };
        pass.attend(m, w, place, (Sees::Target, picks))
    }),
    ("output products", |pass, m, place| pass.output(m, &pass.weights.layers[place].attn)),
    ("leave", |pass, m, _| pass.leave(m, None)),
    ("experts with their router", |pass, m, place| pass.feed_forward(m, &pass.weights.layers[place])),
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
        for (what, step) in STEPS {
            times.push(self.time(what, &|pass| step(pass, m, place))?);
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
            let mut picks = vec![0i32; rows * pass.config.experts_per_token];
            // SAFETY: the buffer holds as many for a wave.
            unsafe { self.device().download(pass.buffers.expert_picks, &mut picks) }?;
            met.push(picks.into_iter().collect::<BTreeSet<i32>>().len());
        }
        Ok(met)
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
        Ok(Time { what: what.to_owned(), us: times[times.len() / 2] })
    }
}
