//! Waves captured once and replayed: one launch for all kernels of a shape.
//!
//! Owns which shapes are captured, and the memory that this may take.

use std::collections::BTreeMap;

use cudarc::driver::{CudaGraph, sys};

use crate::driver::Device;
use crate::error::{CudaError, Doing};
use crate::pass::{FEW, Shape};

/// Rows of the waves that are captured: single positions, batches of them, verified drafts.
pub(crate) const ROWS: [usize; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 16];

/// A captured sequence of launches.
pub(crate) struct Captured(CudaGraph);

// SAFETY: a graph may be used by any thread, by one at a time; an engine is used through `&mut`.
unsafe impl Send for Captured {}

impl std::fmt::Debug for Captured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Captured")
    }
}

impl Captured {
    /// Captures what `enqueue` puts on the device's stream; nothing of it is run.
    pub(crate) fn new(device: &Device, enqueue: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<Self, CudaError> {
        let stream = device.stream();
        stream
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .doing("begin to capture a wave")?;
        let enqueued = enqueue();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).doing("capture a wave");
        enqueued?;
        let none = || CudaError::Driver { doing: "capture a wave".to_owned(), why: "nothing was captured".to_owned() };
        let graph = graph?.ok_or_else(none)?;
        graph.upload().doing("upload a captured wave")?;
        Ok(Self(graph))
    }

    /// Puts the sequence on the stream.
    pub(crate) fn launch(&self) -> Result<(), CudaError> {
        self.0.launch().doing("launch a captured wave")
    }
}

/// All that is captured.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    waves: BTreeMap<Shape, Captured>,
    draft: Option<Captured>,
    bytes: u64,
}

impl Graphs {
    /// The graph of a wave, if its shape was captured.
    pub(crate) fn wave(&self, shape: Shape) -> Option<&Captured> {
        self.waves.get(&shape)
    }

    /// The graph of a draft.
    pub(crate) fn draft(&self) -> Option<&Captured> {
        self.draft.as_ref()
    }

    /// Device memory that capturing took, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Shapes captured, drafts counted.
    pub(crate) fn count(&self) -> usize {
        self.waves.len() + usize::from(self.draft.is_some())
    }

    /// Keeps a wave's graph and counts what it took; gives whether more than `budget` bytes are taken.
    pub(crate) fn keep(
        &mut self,
        device: &Device,
        shape: Option<Shape>,
        graph: Captured,
        free_before: u64,
    ) -> Result<u64, CudaError> {
        match shape {
            Some(shape) => drop(self.waves.insert(shape, graph)),
            None => self.draft = Some(graph),
        }
        let (free, _) = device.memory()?;
        self.bytes = free_before.saturating_sub(free);
        Ok(self.bytes)
    }
}

const _: () = assert!(ROWS[ROWS.len() - 1] <= FEW, "a captured wave fits in the buffers");
