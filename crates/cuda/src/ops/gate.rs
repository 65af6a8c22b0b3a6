//! Routing: the experts of rows and their weights.

use crate::driver::DevicePtr;
use crate::error::CudaError;
use crate::params::Route;

use super::{Ops, Spread, int};

impl Ops<'_> {
    /// Routes `m` rows: picks, ascending, and weights. Exactly one of `bias` and `hash` is given.
    pub fn route(
        &self,
        (logits, experts, m): (DevicePtr, usize, usize),
        k: usize,
        (bias, hash): (DevicePtr, DevicePtr),
        (route_scale, rows): (f32, DevicePtr),
        (picks, weights, spread): (DevicePtr, DevicePtr, Spread),
    ) -> Result<(), CudaError> {
        let (experts, k) = (int(experts), int(k));
        let params = Route { logits, experts, k, bias, hash, route_scale, rows, picks, weights, spread };
        self.run((m, if spread.mix == DevicePtr::NULL { 1 } else { 2 }, 1), 256, &params)
    }
}
