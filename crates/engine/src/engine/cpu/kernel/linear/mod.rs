//! Matrix products in the canonical order: `y[m, n] = Σ_k w[n, k] · x[m, k]`.
//!
//! Weights are repacked once from the checkpoint's bytes into [`Fp8Matrix`], [`Fp4Matrix`],
//! [`Bf16Matrix`] or [`F32Matrix`]: tiles of output rows side by side, so that one vector holds one
//! input of eight rows and no sum crosses lanes. Codes stay as stored.
//!
//! | step | arithmetic |
//! |---|---|
//! | 1 | the inputs of a row are cut into 16-byte runs of weight code; run i belongs to lane i mod 32 |
//! | 2 | `s = +0`, then `s = fma(w_e, x_e, s)` over the run, on codes |
//! | 3 | `acc = fma(s, s_w · s_x, acc)` per lane from +0, runs ascending |
//! | 4 | the 32 lanes fold by the xor butterfly 16, 8, 4, 2, 1 |
//!
//! The bits of a row depend neither on the rows beside it, nor on the range of outputs asked for,
//! nor on the instructions.

mod float;
mod fp4;
mod fp8;
mod tile;

use half::bf16;

pub use float::{Bf16Matrix, F32Matrix};
pub use fp4::Fp4Matrix;
pub use fp8::{Fp8Matrix, fp8_to_bf16};

use super::pool::Columns;

/// Output rows to a tile: ranges of outputs start at multiples of it.
pub const TILE: usize = 16;

/// Why the bytes of a matrix were not packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// The inputs do not fill whole runs.
    #[error("matrix has {k} inputs, expected a positive multiple of {multiple}")]
    Inputs {
        /// Inputs that came.
        k: usize,
        /// Their granule.
        multiple: usize,
    },
    /// There is no output row.
    #[error("matrix has no output row")]
    Outputs,
    /// A buffer has another size than the shape says.
    #[error("{what} of a {n}×{k} matrix: expected {expected} items, got {got}")]
    Size {
        /// Which buffer.
        what: &'static str,
        /// Output rows.
        n: usize,
        /// Inputs.
        k: usize,
        /// Items expected.
        expected: usize,
        /// Items that came.
        got: usize,
    },
    /// A code or a scale is not a number.
    #[error("{what} {index} is NaN: the checkpoint is damaged")]
    Nan {
        /// Which buffer.
        what: &'static str,
        /// Where in it.
        index: usize,
    },
}

/// Where a product goes: bf16 (rounded to nearest even) or fp32, some columns of `[m, n]`.
#[derive(Debug)]
pub enum Out<'a> {
    /// Rounded once to bf16.
    Bf16(Columns<'a, bf16>),
    /// The fp32 sum itself.
    F32(Columns<'a, f32>),
}

impl<'a> Out<'a> {
    /// All columns of a bf16 `[rows, n]` buffer.
    #[must_use]
    pub fn bf16(y: &'a mut [bf16], rows: usize) -> Self {
        Self::Bf16(Columns::all(y, rows))
    }

    /// All columns of an fp32 `[rows, n]` buffer.
    #[must_use]
    pub fn f32(y: &'a mut [f32], rows: usize) -> Self {
        Self::F32(Columns::all(y, rows))
    }

    /// The columns to compute.
    fn range(&self) -> std::ops::Range<usize> {
        match self {
            Self::Bf16(c) => c.range(),
            Self::F32(c) => c.range(),
        }
    }
}

/// fp32 rows of activations for a float matrix, each `k` long and `stride` from the next.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    values: &'a [f32],
    stride: usize,
    rows: usize,
}

impl<'a> Rows<'a> {
    /// `[rows, k]` contiguous.
    ///
    /// # Panics
    /// If the values are not a whole number of rows.
    #[must_use]
    pub fn new(values: &'a [f32], rows: usize) -> Self {
        assert!(rows > 0 && values.len().is_multiple_of(rows), "{} values in {rows} rows", values.len());
        Self { values, stride: values.len() / rows, rows }
    }

    /// How many rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// Checks the sizes of a matrix's buffers.
fn check(what: &'static str, shape: (usize, usize), got: usize, expected: usize) -> Result<(), PackError> {
    let (n, k) = shape;
    if got == expected { Ok(()) } else { Err(PackError::Size { what, n, k, expected, got }) }
}

/// Checks a matrix's shape.
fn check_shape(n: usize, k: usize, multiple: usize) -> Result<(), PackError> {
    if n == 0 {
        return Err(PackError::Outputs);
    }
    if k == 0 || !k.is_multiple_of(multiple) {
        return Err(PackError::Inputs { k, multiple });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
