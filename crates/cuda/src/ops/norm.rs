//! Norms of rows, and keys: normed, rotated, quantized, stored.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::params::{NormKeys, RmsNorm, StoreKeys};

use super::{At, Ops, Table, int};

/// A norm: its weights, fp32 `[width]`, and what is added to the mean of squares.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// Weights.
    pub weight: DevicePtr,
    /// Values of a row.
    pub width: usize,
    /// Added to the mean.
    pub eps: f32,
}

/// Keys of some rows.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    /// Keys before their norm, bf16 `[m, norm.width]`.
    pub x: DevicePtr,
    /// Their norm.
    pub norm: Norm,
    /// Their rotations.
    pub table: Table,
    /// Whose they are.
    pub at: At,
    /// Whether they go into windows.
    pub store: bool,
    /// Where they go beside; null for nowhere.
    pub out: DevicePtr,
}

impl Ops<'_> {
    /// RMS norm of `m` rows.
    pub fn rms_norm(
        &self,
        (x, stride, m): (DevicePtr, usize, usize),
        norm: Norm,
        out: DevicePtr,
    ) -> Result<(), CudaError> {
        self.run((m, 1, 1), 256, &norm_params((x, stride), norm, out))
    }

    /// Keys of `m` rows: normed, rotated, quantized; into `out` and, with `store`, into windows.
    pub fn store_keys(&self, m: usize, keys: &Keys) -> Result<(), CudaError> {
        self.run((m, 1, 1), 256, &key_params(keys))
    }

    /// An RMS norm and keys, of the same rows.
    pub fn norm_keys(
        &self,
        m: usize,
        (x, stride): (DevicePtr, usize),
        (norm, out): (Norm, DevicePtr),
        keys: &Keys,
    ) -> Result<(), CudaError> {
        let params = NormKeys { norm: norm_params((x, stride), norm, out), keys: key_params(keys) };
        self.run((m, 2, 1), 256, &params)
    }
}

fn norm_params((x, stride): (DevicePtr, usize), norm: Norm, out: DevicePtr) -> RmsNorm {
    RmsNorm { x, stride: int(stride), weight: norm.weight, width: int(norm.width), eps: norm.eps, out }
}

fn key_params(keys: &Keys) -> StoreKeys {
    let Keys { x, norm, table, at, store, out } = *keys;
    StoreKeys {
        x,
        stride: int(norm.width),
        weight: norm.weight,
        width: int(norm.width),
        eps: norm.eps,
        table: table.at,
        rope: int(table.rope),
        rows: at.rows,
        states: if store { at.states } else { DevicePtr::NULL },
        places: at.places,
        place: at.place,
        out,
    }
}
