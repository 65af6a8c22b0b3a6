//! Plain weights: bf16 and fp32 matrices on fp32 activations.

use half::bf16;

use super::super::isa::Isa;
use super::super::pool::Columns;
use super::super::simd::Simd;
use super::tile::{Inputs, Packed, Place, Product, Visit};
use super::{Out, PackError, Rows, TILE, check, check_shape};

/// bf16 inputs to a run of 16 bytes.
const RUN_BF16: usize = 8;
/// fp32 inputs to a run of 16 bytes.
const RUN_F32: usize = 4;
/// Output rows to a tile of fp32 weights.
const TILE_F32: usize = 8;

/// A packed bf16 matrix.
#[derive(Debug, Clone)]
pub struct Bf16Matrix {
    n: usize,
    k: usize,
    visit: Visit,
    /// `[tile][run in visiting order][pair of inputs][row]`, the even input in the low half.
    pairs: Vec<[[u32; TILE]; RUN_BF16 / 2]>,
}

impl Bf16Matrix {
    /// Packs bf16 weights `[n, k]`.
    ///
    /// # Errors
    /// [`PackError`] if `k` is not a multiple of 8, the size is off, or a weight is NaN.
    pub fn pack(n: usize, k: usize, weights: &[bf16]) -> Result<Self, PackError> {
        check_shape(n, k, RUN_BF16)?;
        check("weights", (n, k), weights.len(), n * k)?;
        if let Some(index) = weights.iter().position(|w| w.is_nan()) {
            return Err(PackError::Nan { what: "weight", index });
        }
        let visit = Visit::new(k / RUN_BF16);
        let mut packed = Vec::with_capacity(n.div_ceil(TILE) * visit.runs());
        for tile in 0..n.div_ceil(TILE) {
            let rows = (n - tile * TILE).min(TILE);
            for run in visit.order() {
                let mut block = [[0; TILE]; RUN_BF16 / 2];
                for row in 0..rows {
                    let from = (tile * TILE + row) * k + run * RUN_BF16;
                    let (pairs, _) = weights[from..from + RUN_BF16].as_chunks::<2>();
                    for (e, [even, odd]) in pairs.iter().enumerate() {
                        block[e][row] = u32::from(even.to_bits()) | u32::from(odd.to_bits()) << 16;
                    }
                }
                packed.push(block);
            }
        }
        Ok(Self { n, k, visit, pairs: packed })
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
        self.pairs.len() * TILE * RUN_BF16 * 2
    }

    /// Multiplies fp32 rows: `out[m, n] = Σ_k x[m, k] · w[n, k]`, for the columns of `out`.
    ///
    /// # Panics
    /// If `x` has another width, or the columns are not the matrix's or do not start at a tile.
    pub fn product(&self, isa: Isa, x: Rows<'_>, out: Out<'_>) {
        assert_eq!(x.stride, self.k, "inputs of the product");
        isa.dispatch(Product { matrix: self, x: inputs(x, 0), out });
    }

    /// Multiplies block-diagonally: outputs `g·n/groups …` take inputs `g·k …` of rows `groups · k`
    /// long, for the columns of `out`.
    ///
    /// # Panics
    /// If `x` has another width, the groups do not start at tiles, or the columns do not.
    pub fn grouped(&self, isa: Isa, groups: usize, x: Rows<'_>, mut out: Out<'_>) {
        assert_eq!(x.stride, groups * self.k, "inputs of the product");
        let size = self.n / groups;
        assert!(size * groups == self.n && size.is_multiple_of(TILE), "{groups} groups of {} outputs", self.n);
        loop {
            let columns = out.range();
            let group = columns.start / size;
            let end = ((group + 1) * size).min(columns.end);
            let (now, rest) = match out {
                Out::Bf16(y) => split(y, end, Out::Bf16),
                Out::F32(y) => split(y, end, Out::F32),
            };
            isa.dispatch(Product { matrix: self, x: inputs(x, group * self.k), out: now });
            match rest {
                Some(more) => out = more,
                None => return,
            }
        }
    }
}

/// The columns before `at`, and those from there on if there are any.
fn split<'a, T>(y: Columns<'a, T>, at: usize, wrap: fn(Columns<'a, T>) -> Out<'a>) -> (Out<'a>, Option<Out<'a>>) {
    let (now, rest) = y.split_at(at);
    (wrap(now), (!rest.range().is_empty()).then(|| wrap(rest)))
}

/// The rows as a product takes them, from input `offset` on.
fn inputs(x: Rows<'_>, offset: usize) -> Inputs<'_> {
    Inputs { values: &x.values[offset..], stride: x.stride, scales: &[], blocks: 0, rows: x.rows }
}

impl Packed for Bf16Matrix {
    const RUN: usize = RUN_BF16;
    const TILE: usize = TILE;
    const PER_STEP: usize = 2;
    type Run = [[u32; TILE]; RUN_BF16 / 2];

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
        &self.pairs[tile * self.visit.runs()..]
    }

    #[inline(always)]
    fn decode<V: Simd, const PLAIN: bool>(run: &Self::Run, step: usize) -> [V; 8] {
        let (eights, _) = run[step].as_chunks::<8>();
        let [a, c] = V::load_bf16_pairs(&eights[0]);
        let [b, d] = V::load_bf16_pairs(&eights[1]);
        let none = V::splat(0.0);
        [a, b, c, d, none, none, none, none]
    }

    #[inline(always)]
    fn fold<V: Simd>(&self, _: Place, _: &[f32], s: [V; 2], acc: [V; 2]) -> [V; 2] {
        // fma(s, 1, acc)
        [s[0].add(acc[0]), s[1].add(acc[1])]
    }
}

/// A packed fp32 matrix.
#[derive(Debug, Clone)]
pub struct F32Matrix {
    n: usize,
    k: usize,
    visit: Visit,
    /// `[tile of 8][run in visiting order][input][row]`.
    values: Vec<[[f32; TILE_F32]; RUN_F32]>,
}

impl F32Matrix {
    /// Packs fp32 weights `[n, k]`.
    ///
    /// # Errors
    /// [`PackError`] if `k` is not a multiple of 4, the size is off, or a weight is NaN.
    pub fn pack(n: usize, k: usize, weights: &[f32]) -> Result<Self, PackError> {
        check_shape(n, k, RUN_F32)?;
        check("weights", (n, k), weights.len(), n * k)?;
        if let Some(index) = weights.iter().position(|w| w.is_nan()) {
            return Err(PackError::Nan { what: "weight", index });
        }
        let visit = Visit::new(k / RUN_F32);
        let mut packed = Vec::with_capacity(n.div_ceil(TILE_F32) * visit.runs());
        for tile in 0..n.div_ceil(TILE_F32) {
            let rows = (n - tile * TILE_F32).min(TILE_F32);
            for run in visit.order() {
                let mut block = [[0.0; TILE_F32]; RUN_F32];
                for row in 0..rows {
                    let from = (tile * TILE_F32 + row) * k + run * RUN_F32;
                    for (e, &weight) in weights[from..from + RUN_F32].iter().enumerate() {
                        block[e][row] = weight;
                    }
                }
                packed.push(block);
            }
        }
        Ok(Self { n, k, visit, values: packed })
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
        self.values.len() * TILE_F32 * RUN_F32 * 4
    }

    /// Multiplies fp32 rows: `out[m, n] = Σ_k x[m, k] · w[n, k]`, for the columns of `out`.
    ///
    /// # Panics
    /// If `x` has another width, or the columns are not the matrix's or do not start at a tile.
    pub fn product(&self, isa: Isa, x: Rows<'_>, out: Out<'_>) {
        assert_eq!(x.stride, self.k, "inputs of the product");
        isa.dispatch(Product { matrix: self, x: inputs(x, 0), out });
    }
}

impl Packed for F32Matrix {
    const RUN: usize = RUN_F32;
    const TILE: usize = TILE_F32;
    const PER_STEP: usize = RUN_F32;
    type Run = [[f32; TILE_F32]; RUN_F32];

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
        &self.values[tile * self.visit.runs()..]
    }

    #[inline(always)]
    fn decode<V: Simd, const PLAIN: bool>(run: &Self::Run, _step: usize) -> [V; 8] {
        let none = V::splat(0.0);
        [V::load(&run[0]), V::load(&run[1]), V::load(&run[2]), V::load(&run[3]), none, none, none, none]
    }

    #[inline(always)]
    fn fold<V: Simd>(&self, _: Place, _: &[f32], s: [V; 2], acc: [V; 2]) -> [V; 2] {
        // fma(s, 1, acc)
        [s[0].add(acc[0]), acc[1]]
    }
}
