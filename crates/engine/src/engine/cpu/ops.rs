//! Products over a wave's rows, shared among the pool's threads.
//!
//! Owns how work is cut for threads; the bits of a row don't depend on it.

use half::bf16;

use super::kernel::Isa;
use super::kernel::linear::{Bf16Matrix, F32Matrix, Fp4Matrix, Fp8Matrix, Out, Rows, TILE};
use super::kernel::pool::{Columns, Pool};
use super::kernel::quant::QuantRows;
use crate::ids::LayerRange;
use crate::model::ModelConfig;

/// What every operation of a pass needs.
pub(super) struct Ctx<'a> {
    /// Sizes.
    pub(super) config: &'a ModelConfig,
    /// Threads.
    pub(super) pool: &'a mut Pool,
    /// Instructions.
    pub(super) isa: Isa,
    /// Layers held.
    pub(super) range: LayerRange,
}

/// Makes a buffer `len` long and gives it; its memory is kept from pass to pass.
pub(super) fn sized<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    buffer.resize(len, T::default());
    buffer
}

/// A packed matrix that takes quantized rows.
pub(super) trait Quantized: Sync {
    /// Output rows.
    fn outputs(&self) -> usize;
    /// Some columns of the product.
    fn columns(&self, isa: Isa, x: &QuantRows, out: Out<'_>);
}

impl Quantized for Fp8Matrix {
    fn outputs(&self) -> usize {
        self.n()
    }

    fn columns(&self, isa: Isa, x: &QuantRows, out: Out<'_>) {
        self.product(isa, x, out);
    }
}

impl Quantized for Fp4Matrix {
    fn outputs(&self) -> usize {
        self.n()
    }

    fn columns(&self, isa: Isa, x: &QuantRows, out: Out<'_>) {
        self.product(isa, x, out);
    }
}

impl Ctx<'_> {
    /// `out[m, n] = bf16(Σ x · w)` of quantized rows.
    pub(super) fn linear(&mut self, w: &impl Quantized, x: &QuantRows, out: &mut Vec<bf16>) {
        let isa = self.isa;
        let out = Columns::all(sized(out, x.rows() * w.outputs()), x.rows());
        self.pool.run_columns(out, TILE, &|columns| w.columns(isa, x, Out::Bf16(columns)));
    }

    /// `out[m, n] = bf16(Σ x · w)` of fp32 rows.
    pub(super) fn plain(&mut self, w: &Bf16Matrix, x: Rows<'_>, out: &mut Vec<bf16>) {
        let isa = self.isa;
        let out = Columns::all(sized(out, x.rows() * w.n()), x.rows());
        self.pool.run_columns(out, TILE, &|columns| w.product(isa, x, Out::Bf16(columns)));
    }

    /// `out[m, n] = Σ x · w` of fp32 rows.
    pub(super) fn wide(&mut self, w: &Bf16Matrix, x: Rows<'_>, out: &mut Vec<f32>) {
        let isa = self.isa;
        let out = Columns::all(sized(out, x.rows() * w.n()), x.rows());
        self.pool.run_columns(out, TILE, &|columns| w.product(isa, x, Out::F32(columns)));
    }

    /// As [`Ctx::wide`], with fp32 weights.
    pub(super) fn mix(&mut self, w: &F32Matrix, x: Rows<'_>, out: &mut Vec<f32>) {
        let isa = self.isa;
        let out = Columns::all(sized(out, x.rows() * w.n()), x.rows());
        self.pool.run_columns(out, TILE, &|columns| w.product(isa, x, Out::F32(columns)));
    }

    /// Block-diagonal product: group `g` of the outputs takes group `g` of the inputs.
    pub(super) fn grouped(&mut self, w: &Bf16Matrix, groups: usize, x: Rows<'_>, out: &mut Vec<bf16>) {
        let isa = self.isa;
        let out = Columns::all(sized(out, x.rows() * w.n()), x.rows());
        self.pool.run_columns(out, TILE, &|columns| w.grouped(isa, groups, x, Out::Bf16(columns)));
    }

    /// Runs `task` on every `width`-long item of `buffer`, shared among threads.
    pub(super) fn each<T: Send>(&mut self, buffer: &mut [T], width: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
        if buffer.is_empty() {
            return;
        }
        self.pool.run_columns(Columns::all(buffer, 1), width, &|mut columns| {
            let first = columns.range().start / width;
            for (k, item) in columns.row(0).chunks_exact_mut(width).enumerate() {
                task(first + k, item);
            }
        });
    }
}
