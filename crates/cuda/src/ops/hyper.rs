//! Residual streams: their mixes, a sublayer's input and what becomes of its result.
//!
//! Owns how streams are spread again, which any launch in between may say.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::params::{HyperEnter, HyperLeave, HyperMix, Params};

use super::{Ops, int};

/// Streams and the constants of their mixes.
#[derive(Debug, Clone, Copy)]
pub struct Streams {
    /// How many.
    pub hc: usize,
    /// Values of each.
    pub dim: usize,
    /// Sinkhorn rounds.
    pub iterations: usize,
    /// Added to weights and sums.
    pub hc_eps: f32,
    /// Added to means of squares.
    pub norm_eps: f32,
}

/// Weights of one mix on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixWeights {
    /// fp32 `[mixes, hc · dim]`.
    pub mix: DevicePtr,
    /// fp32 `[3]`, or `[1]` of a head.
    pub scale: DevicePtr,
    /// fp32 `[mixes]`.
    pub base: DevicePtr,
}

/// How streams are spread again behind a sublayer: what [`Ops::mix`] left, its weights, and where the
/// weights of the result and the streams go. Any launch between may say it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Spread {
    raw: DevicePtr,
    scale: DevicePtr,
    base: DevicePtr,
    pub(super) mix: DevicePtr,
    hc: i32,
    width: i32,
    iterations: i32,
    hc_eps: f32,
    norm_eps: f32,
}

impl Spread {
    /// From `raw` into `mix`, fp32 `[m, hc + hc · hc]`.
    #[must_use]
    pub fn new(raw: DevicePtr, weights: MixWeights, s: &Streams, mix: DevicePtr) -> Self {
        Self {
            raw,
            scale: weights.scale,
            base: weights.base,
            mix,
            hc: int(s.hc),
            width: int(s.hc * s.dim),
            iterations: int(s.iterations),
            hc_eps: s.hc_eps,
            norm_eps: s.norm_eps,
        }
    }

    /// Nothing is spread.
    #[must_use]
    pub fn none() -> Self {
        let null = DevicePtr::NULL;
        let (hc, width, iterations) = (0, 0, 0);
        Self { raw: null, scale: null, base: null, mix: null, hc, width, iterations, hc_eps: 0.0, norm_eps: 0.0 }
    }
}

impl Ops<'_> {
    /// The mixes of `m` rows of streams; `raw[m, mixes + 1]`.
    pub fn mix(
        &self,
        (x, picks, m): (DevicePtr, DevicePtr, usize),
        weights: MixWeights,
        mixes: usize,
        s: &Streams,
        raw: DevicePtr,
    ) -> Result<(), CudaError> {
        self.run((mixes + 1, m, 1), 1024, &HyperMix { x, picks, mix: weights.mix, width: int(s.hc * s.dim), raw })
    }

    /// From streams and their `mixes` mixes to a sublayer's or a head's input `x`. `y`, the row before
    /// its norm, may be null.
    pub fn enter(
        &self,
        (h, picks, m): (DevicePtr, DevicePtr, usize),
        (raw, weights, mixes): (DevicePtr, MixWeights, usize),
        s: &Streams,
        norm: DevicePtr,
        (y, x): (DevicePtr, DevicePtr),
    ) -> Result<(), CudaError> {
        let params = HyperEnter {
            h,
            picks,
            raw,
            scale: weights.scale,
            base: weights.base,
            hc: int(s.hc),
            dim: int(s.dim),
            mixes: int(mixes),
            hc_eps: s.hc_eps,
            norm_eps: s.norm_eps,
            weight: norm,
            y,
            x,
        };
        self.run_as(HyperEnter::KERNEL, (m, 1, 1), (1024, 5 * s.dim), &params)
    }

    /// Spreads a sublayer's result over the streams; `taps` is null, or where their mean goes.
    pub fn leave(
        &self,
        (h, m): (DevicePtr, usize),
        y: DevicePtr,
        mix: DevicePtr,
        s: &Streams,
        (taps, tap_stride, tap_at): (DevicePtr, usize, usize),
    ) -> Result<(), CudaError> {
        let params = HyperLeave {
            h,
            y,
            mix,
            hc: int(s.hc),
            dim: int(s.dim),
            taps,
            tap_stride: int(tap_stride),
            tap_at: int(tap_at),
        };
        self.run((m, (s.dim / 4).div_ceil(128), 1), 128, &params)
    }
}
