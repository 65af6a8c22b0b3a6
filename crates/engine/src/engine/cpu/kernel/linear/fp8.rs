//! FP8 weights: E4M3 codes with one E8M0 scale per 128 × 128 block.

use super::super::isa::Isa;
use super::super::quant::QuantRows;
use super::super::simd::{Simd, unpacked_place};
use super::tile::{Inputs, Packed, Place, Product, Visit};
use super::{Out, PackError, TILE, check, check_shape};
use crate::model::format::{E8M0_NAN, e4m3_decode, e8m0_decode};

/// Inputs to a run, one byte each.
const RUN: usize = 16;
/// Rows and inputs to a scale.
const BLOCK: usize = 128;

/// One run of a tile.
type Run = [[u8; 2 * TILE]; RUN / 2];

/// A packed FP8 matrix.
#[derive(Debug, Clone)]
pub struct Fp8Matrix {
    n: usize,
    k: usize,
    visit: Visit,
    /// `[tile][run in visiting order][two inputs][row and input]`: codes with their halves swapped,
    /// bytes as [`unpacked_place`] says.
    codes: Vec<Run>,
    /// Of every run of a tile, whether none of its codes is zero or subnormal: most are so, and
    /// decode faster.
    plain: Vec<bool>,
    /// `[n/128][k/128]`.
    scales: Vec<f32>,
}

impl Fp8Matrix {
    /// Packs a matrix of `n` outputs and `k` inputs.
    ///
    /// | operand  | shape                       | type |
    /// |----------|-----------------------------|------|
    /// | `codes`  | `[n, k]`                    | E4M3 |
    /// | `scales` | `[ceil(n/128), ceil(k/128)]`| E8M0 |
    ///
    /// # Errors
    /// [`PackError`] if `k` is not a multiple of 128, a size is off, or a code or scale is NaN.
    pub fn pack(n: usize, k: usize, codes: &[u8], scales: &[u8]) -> Result<Self, PackError> {
        check_shape(n, k, BLOCK)?;
        check("codes", (n, k), codes.len(), n * k)?;
        check("scales", (n, k), scales.len(), n.div_ceil(BLOCK) * (k / BLOCK))?;
        if let Some(index) = codes.iter().position(|c| c & 0x7f == 0x7f) {
            return Err(PackError::Nan { what: "code", index });
        }
        if let Some(index) = scales.iter().position(|&s| s == E8M0_NAN) {
            return Err(PackError::Nan { what: "scale", index });
        }
        let visit = Visit::new(k / RUN);
        let size = n.div_ceil(TILE) * visit.runs();
        let (mut packed, mut plain) = (Vec::with_capacity(size), Vec::with_capacity(size));
        for tile in 0..n.div_ceil(TILE) {
            let rows = (n - tile * TILE).min(TILE);
            for run in visit.order() {
                let mut block = [[0x83; 2 * TILE]; RUN / 2];
                let mut none = true;
                for row in 0..rows {
                    let from = (tile * TILE + row) * k + run * RUN;
                    for (e, &code) in codes[from..from + RUN].iter().enumerate() {
                        block[e / 2][unpacked_place(e % 2, row)] = code.rotate_left(4);
                        none &= code & 0x7f >= 8;
                    }
                }
                packed.push(block);
                plain.push(none);
            }
        }
        Ok(Self { n, k, visit, codes: packed, plain, scales: scales.iter().map(|&s| e8m0_decode(s)).collect() })
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
        self.codes.len() * (TILE * RUN + 1) + self.scales.len() * 4
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

/// Gives the values `q · s` of an FP8 matrix as bf16, which is exact: a matrix whose layer uses it
/// as a plain bf16 product.
///
/// # Errors
/// [`PackError`] as for [`Fp8Matrix::pack`].
pub fn fp8_to_bf16(n: usize, k: usize, codes: &[u8], scales: &[u8]) -> Result<Vec<half::bf16>, PackError> {
    check_shape(n, k, BLOCK)?;
    check("codes", (n, k), codes.len(), n * k)?;
    let blocks = k / BLOCK;
    check("scales", (n, k), scales.len(), n.div_ceil(BLOCK) * blocks)?;
    let mut values = Vec::with_capacity(n * k);
    for (i, &code) in codes.iter().enumerate() {
        let scale = e8m0_decode(scales[(i / k / BLOCK) * blocks + i % k / BLOCK]);
        let value = e4m3_decode(code) * scale;
        if value.is_nan() {
            return Err(PackError::Nan { what: "code", index: i });
        }
        values.push(half::bf16::from_f32(value));
    }
    Ok(values)
}

impl Packed for Fp8Matrix {
    const RUN: usize = RUN;
    const TILE: usize = TILE;
    const PER_STEP: usize = 2;
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
    fn plain(&self, tile: usize, at: usize) -> bool {
        self.plain[tile * self.visit.runs() + at]
    }

    #[inline(always)]
    fn decode<V: Simd, const PLAIN: bool>(run: &Self::Run, step: usize) -> [V; 8] {
        let [a, b, c, d] = V::load_swapped::<PLAIN>(&run[step]);
        let none = V::splat(0.0);
        [a, b, c, d, none, none, none, none]
    }

    #[inline(always)]
    fn fold<V: Simd>(&self, place: Place, x_scales: &[f32], s: [V; 2], acc: [V; 2]) -> [V; 2] {
        let block = place.run / (BLOCK / RUN);
        let row_block = place.tile / (BLOCK / TILE);
        let scale = V::splat(self.scales[row_block * (self.k / BLOCK) + block] * x_scales[block]);
        [s[0].fma(scale, acc[0]), s[1].fma(scale, acc[1])]
    }
}

impl QuantRows {
    /// The rows as a product takes them.
    pub(super) fn inputs(&self) -> Inputs<'_> {
        Inputs {
            values: self.codes(),
            stride: self.k(),
            scales: self.scales(),
            blocks: self.k() / BLOCK,
            rows: self.rows(),
        }
    }
}
