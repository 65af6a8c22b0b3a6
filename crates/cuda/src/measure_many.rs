//! Times of the steps of a long wave's layer, for benches. Not part of the interface.

use cudarc::driver::sys;

use crate::driver::DevicePtr;
use crate::engine::CudaEngine;
use crate::error::{CudaError, Doing};
use crate::layer::Sees;
use crate::measure::Time;
use crate::ops::Row;
use crate::pass::Pass;

/// Runs of which the least time counts.
const RUNS: usize = 3;

/// A step of a layer by name.
type Step = (&'static str, fn(&Pass<'_>, usize, usize) -> Result<(), CudaError>);

const STEPS: [Step; 9] = [
    ("layer", |pass, m, place| pass.layer(m, &pass.weights.layers[place], place, (Sees::Target, None))),
    ("enter attention", |pass, m, place| {
        let w = &pass.weights.layers[place];
        pass.enter(m, w.hc_attn, w.attn_norm)
    }),
    ("products of the input", |pass, m, place| pass.many_inputs(m, &pass.weights.layers[place].attn)),
    ("keys and products of queries", |pass, m, place| pass.many_queries(m, &pass.weights.layers[place], place)),
    ("queries, compressors, picks", |pass, m, place| {
        pass.many_prepared(m, &pass.weights.layers[place], place).map(|_| ())
    }),
    ("attend", |pass, m, place| {
        let w = &pass.weights.layers[place];
        let picks = if w.attn.indexer.is_some() { pass.buffers.slot_picks } else { DevicePtr::NULL };
        pass.many_attend(m, w, place, picks)
    }),
    ("output products", |pass, m, place| pass.many_output(m, &pass.weights.layers[place].attn)),
    ("leave", |pass, m, _| pass.leave(m, None)),
    ("router and experts", |pass, m, place| pass.many_experts(m, &pass.weights.layers[place])),
];

impl CudaEngine {
    /// Times a layer of the range for many rows, whole and step by step. The rows' sessions must have room
    /// for their positions.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    #[doc(hidden)]
    pub fn time_many(&mut self, place: usize, rows: &[Row]) -> Result<Vec<Time>, CudaError> {
        self.put_rows(rows)?;
        let (device, pass) = (self.device(), self.pass());
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || device.context().new_event(flags).doing("make an event");
        let (start, end) = (event()?, event()?);
        let mut times = Vec::new();
        for (what, step) in STEPS {
            let mut us = f64::INFINITY;
            for _ in 0..RUNS {
                start.record(device.stream()).doing("record an event")?;
                step(&pass, rows.len(), place)?;
                end.record(device.stream()).doing("record an event")?;
                us = us.min(f64::from(start.elapsed_ms(&end).doing("read the clock")?) * 1e3);
            }
            times.push(Time { what: what.to_owned(), us, bytes: 0 });
        }
        Ok(times)
    }
}
