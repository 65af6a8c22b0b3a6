//! What crossing a boundary does to hidden states.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::params::WireRoundtrip;

use super::{At, Ops, Streams, int};

impl Ops<'_> {
    /// What the fp8 wire does, to rows whose session has a boundary here.
    pub fn roundtrip(
        &self,
        (x, m): (DevicePtr, usize),
        s: &Streams,
        at: At,
        checks: DevicePtr,
    ) -> Result<(), CudaError> {
        let params = WireRoundtrip {
            x,
            dim: int(s.dim),
            rows: at.rows,
            states: at.states,
            places: at.places,
            place: at.place,
            checks,
        };
        self.run((m, s.hc, 1), 256, &params)
    }
}
