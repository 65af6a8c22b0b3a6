//! Launches of the kernels that are no products: their parameters as the device reads them.
//!
//! Owns the list of the kernels and what all launches share; each file below owns the launches of a
//! group. Nothing here depends on a position: rows, picks and state are read on the device.

use cudarc::driver::CudaStream;

use crate::driver::{Device, DevicePtr, Launch, allow_shared};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::linear::to_u32;
use crate::nvrtc::Source;
use crate::params::Params;

pub use attend::KeyList;
pub use draft::{MARKOV_BLOCKS, MarkovStep};
pub use hyper::{MixWeights, Spread, Streams};
pub use norm::{Keys, Norm};
pub use prepare::{Preparing, Side};

mod attend;
mod attend_many;
mod draft;
mod embed;
mod gate;
mod hyper;
mod indexer;
mod norm;
mod prepare;
mod wire;

/// The files of these kernels.
pub const SOURCES: [Source; 10] = [
    Source {
        file: "embed.cu",
        text: include_str!("kernels/embed.cu"),
        kernels: &["embed_rows", "block_rows", "finite_rows", "finite_floats"],
    },
    Source {
        file: "norm.cu",
        text: include_str!("kernels/norm.cu"),
        kernels: &["rms_norm", "store_keys", "norm_keys"],
    },
    Source { file: "prepare.cu", text: include_str!("kernels/prepare.cu"), kernels: &["prepare"] },
    Source {
        file: "hyper.cu",
        text: include_str!("kernels/hyper.cu"),
        kernels: &["hyper_mix", "hyper_enter", "hyper_leave"],
    },
    Source { file: "wire.cu", text: include_str!("kernels/wire.cu"), kernels: &["wire_roundtrip"] },
    Source { file: "gate.cu", text: include_str!("kernels/gate.cu"), kernels: &["route"] },
    Source {
        file: "indexer.cu",
        text: include_str!("kernels/indexer.cu"),
        kernels: &["index_scores_64", "index_scores_128", "index_scores_256", "index_picks"],
    },
    Source { file: "attend.cu", text: include_str!("kernels/attend.cu"), kernels: &["attend_scores", "attend_values"] },
    Source {
        file: "attend_many.cu",
        text: include_str!("kernels/attend_many.cu"),
        kernels: &["many_scores", "many_values"],
    },
    Source { file: "draft.cu", text: include_str!("kernels/draft.cu"), kernels: &["markov_logits", "markov_token"] },
];

/// Most residual streams that the kernels take.
pub const STREAMS_MAX: usize = 5;
/// Widest head and widest key.
pub const HEAD_DIM_MAX: usize = 512;
/// Most routed experts, and most of them to a token.
pub const EXPERTS_MAX: usize = 1024;
/// Most routed experts to a token.
pub const PICKS_MAX: usize = 32;
/// Most values of all streams of a position.
pub const STREAM_VALUES_MAX: usize = 32_768;
/// Most values of a row that is normed.
pub const NORM_MAX: usize = 16_384;

/// A row of a pass on the device: its session's slot, position and token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Row {
    /// Slot of the session.
    pub slot: i32,
    /// Absolute position.
    pub pos: i32,
    /// Token id.
    pub id: i32,
    /// Nothing.
    pub spare: i32,
}

/// Rows of a pass and the state behind them, at one layer.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct At {
    /// `[m]` of [`Row`].
    pub rows: DevicePtr,
    /// The table of [`crate::state`].
    pub states: DevicePtr,
    /// Places of a session in it.
    pub places: i32,
    /// The layer's.
    pub place: i32,
}

/// Rotations on the device, `[positions][cos of pairs, sin of pairs]`.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// The first row.
    pub at: DevicePtr,
    /// Rotary dimensions.
    pub rope: usize,
}

/// Sizes of a head, of queries or of keys.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// How many.
    pub heads: usize,
    /// Values of each.
    pub width: usize,
}

/// The kernels on a stream.
#[derive(Debug, Clone, Copy)]
pub struct Ops<'a> {
    kernels: &'a Kernels,
    stream: &'a CudaStream,
    dependent: bool,
    joined: bool,
}

/// Lets the kernels have the shared memory they ask for.
///
/// # Errors
/// [`CudaError::Driver`].
pub fn prepare(device: &Device, kernels: &Kernels) -> Result<(), CudaError> {
    for name in ["hyper_enter", "attend_values", "index_scores_64", "index_scores_128", "index_scores_256"] {
        allow_shared(kernels.get(name)?, device.facts().shared_max - 8192)?;
    }
    attend_many::prepare(device, kernels)
}

fn int(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl<'a> Ops<'a> {
    /// The kernels on `stream`; with `dependent`, each may start before the one before it ends.
    #[must_use]
    pub fn new(kernels: &'a Kernels, stream: &'a CudaStream, dependent: bool) -> Self {
        Self { kernels, stream, dependent, joined: false }
    }

    /// The same on another stream.
    #[must_use]
    pub fn on(&self, stream: &'a CudaStream) -> Self {
        Self { stream, ..*self }
    }

    /// The same for a launch behind a join, which waits for the whole of both streams.
    #[must_use]
    pub fn joined(&self) -> Self {
        Self { joined: true, ..*self }
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &'a CudaStream {
        self.stream
    }

    fn run<P: Params>(&self, grid: (usize, usize, usize), threads: usize, params: &P) -> Result<(), CudaError> {
        self.run_as(P::KERNEL, grid, (threads, 0), params)
    }

    fn run_as<P: Params>(
        &self,
        kernel: &'static str,
        grid: (usize, usize, usize),
        (threads, shared): (usize, usize),
        params: &P,
    ) -> Result<(), CudaError> {
        let launch = Launch {
            function: self.kernels.get(kernel)?,
            grid: (to_u32(grid.0), to_u32(grid.1), to_u32(grid.2)),
            threads: to_u32(threads),
            shared: to_u32(shared),
            dependent: self.dependent,
        };
        // SAFETY: the parameter is the kernel's own; its places are the engine's, which keeps them
        // while the stream runs.
        unsafe { launch.run(self.stream, params) }
    }
}
