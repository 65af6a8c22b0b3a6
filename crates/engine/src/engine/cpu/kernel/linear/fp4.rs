//! FP4 weights: pairs of E2M1 codes with one E8M0 scale per row and 32 inputs.

use super::super::isa::Isa;
use super::super::quant::QuantRows;
use super::super::simd::{Simd, unpacked_place};
use super::tile::{Packed, Place, Product, Visit};
use super::{Out, PackError, TILE, check, check_shape};
use crate::model::format::E8M0_NAN;

/// Inputs to a run, half a byte each; also inputs to a scale.
const RUN: usize = 32;
/// Inputs to a scale of the activations.
const BLOCK: usize = 128;

/// One run of a tile.
type Run = [[u8; 2 * TILE]; RUN / 4];

/// A packed FP4 matrix.
#[derive(Debug, Clone)]
pub struct Fp4Matrix {
    n: usize,
    k: usize,
    visit: Visit,
    /// `[tile][run in visiting order][two pairs of inputs][row and pair]`, the even input in the low
    /// half of a byte, bytes as [`unpacked_place`] says.
    codes: Vec<Run>,
    /// `[tile][run in visiting order][row]`, E8M0.
    scales: Vec<[u8; TILE]>,
}

impl Fp4Matrix {
    /// Packs a matrix of `n` outputs and `k` inputs.
    ///
    /// | operand  | shape       | type                                  |
    /// |----------|-------------|---------------------------------------|
    /// | `codes`  | `[n, k/2]`  | two E2M1, the even input in the low half |
    /// | `scales` | `[n, k/32]` | E8M0                                  |
    ///
    /// # Errors
    /// [`PackError`] if `k` is not a multiple of 128, a size is off, or a scale is NaN.
    pub fn pack(n: usize, k: usize, codes: &[u8], scales: &[u8]) -> Result<Self, PackError> {
        check_shape(n, k, BLOCK)?;
        check("codes", (n, k), codes.len(), n * k / 2)?;
        check("scales", (n, k), scales.len(), n * k / RUN)?;
        if let Some(index) = scales.iter().position(|&s| s == E8M0_NAN) {
            return Err(PackError::Nan { what: "scale", index });
        }
        let visit = Visit::new(k / RUN);
        let size = n.div_ceil(TILE) * visit.runs();
        let (mut packed, mut packed_scales) = (Vec::with_capacity(size), Vec::with_capacity(size));
        for tile in 0..n.div_ceil(TILE) {
            let rows = (n - tile * TILE).min(TILE);
            for run in visit.order() {
                let mut block = [[0; 2 * TILE]; RUN / 4];
                let mut scale = [127; TILE];
                for row in 0..rows {
                    let r = tile * TILE + row;
                    let from = (r * k + run * RUN) / 2;
                    for (e, &pair) in codes[from..from + RUN / 2].iter().enumerate() {
                        block[e / 2][unpacked_place(e % 2, row)] = pair;
                    }
                    scale[row] = scales[r * (k / RUN) + run];
                }
                packed.push(block);
                packed_scales.push(scale);
            }
        }
        Ok(Self { n, k, visit, codes: packed, scales: packed_scales })
    }

    /// Output rows.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Resident bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.codes.len() * TILE * (RUN / 2 + 1)
    }

    /// Multiplies quantized rows: `out[m, n] = Σ_k x[m, k] · w[n, k]`, for the columns of `out`.
    ///
    /// # Panics
    /// If `x` has another width, or the columns are not the matrix's or do not start at a tile.
    pub fn product(&self, isa: Isa, x: &QuantRows, out: Out<'_>) {
        assert_eq!(x.k(), self.k, "inputs of the product");
        isa.dispatch(Product { matrix: self, x: x.inputs(), out });
    }
}

impl Packed for Fp4Matrix {
    const RUN: usize = RUN;
    const TILE: usize = TILE;
    const PER_STEP: usize = 4;
    type Run = Run;

    #[inline(always)]
    fn outputs(&self) -> usize {
        self.n
    }

    #[inline(always)]
    fn visit(&self) -> Visit {
        self.visit
    }

    #[inline(always)]
    fn tile(&self, tile: usize) -> &[Self::Run] {
        &self.codes[tile * self.visit.runs()..]
    }

    #[inline(always)]
    fn decode<V: Simd, const PLAIN: bool>(run: &Self::Run, step: usize) -> [V; 8] {
        V::load_e2m1(&run[step])
    }

    #[inline(always)]
    fn fold<V: Simd>(&self, place: Place, x_scales: &[f32], s: [V; 2], acc: [V; 2]) -> [V; 2] {
        let (eights, _) = self.scales[place.tile * self.visit.runs() + place.at].as_chunks::<8>();
        let x = V::splat(x_scales[place.run / (BLOCK / RUN)]);
        [s[0].fma(V::load_e8m0(&eights[0]).mul(x), acc[0]), s[1].fma(V::load_e8m0(&eights[1]).mul(x), acc[1])]
    }
}
