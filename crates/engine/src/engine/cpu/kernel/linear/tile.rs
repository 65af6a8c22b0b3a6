//! The loop of every product: tiles of output rows, canonical lanes visited in bit-reversed order.
//!
//! A vector holds eight output rows, so a canonical lane is one accumulator and the butterfly over
//! lanes is a tree of vertical sums. Visiting lanes in bit-reversed order makes that tree a binary
//! counter: two finished neighbours merge at once, and no more than five sums wait.

use super::super::isa::Job;
use super::super::simd::Simd;
use super::Out;

/// Lanes of the canonical order.
const LANES: usize = 32;

/// In which order the runs of a row are stored and visited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Visit {
    runs: usize,
    /// log2 of the lanes visited; lanes past them hold no run.
    levels: u32,
}

impl Visit {
    /// The order of a row of `runs` runs.
    pub(super) fn new(runs: usize) -> Self {
        Self { runs, levels: runs.min(LANES).next_power_of_two().trailing_zeros() }
    }

    /// Runs to a row.
    pub(super) fn runs(self) -> usize {
        self.runs
    }

    /// The lane visited as number `v`: `v` with its bits reversed.
    #[inline(always)]
    fn lane(self, v: usize) -> usize {
        if self.levels == 0 { 0 } else { v.reverse_bits() >> (usize::BITS - self.levels) }
    }

    /// Runs in the order of storage.
    pub(super) fn order(self) -> impl Iterator<Item = usize> {
        (0..1usize << self.levels).flat_map(move |v| (self.lane(v)..self.runs).step_by(LANES))
    }
}

/// A packed matrix, as the loop sees it.
pub(super) trait Packed {
    /// Inputs to a run.
    const RUN: usize;
    /// Output rows to a tile: eight for each vector.
    const TILE: usize;
    /// Inputs that one [`Packed::decode`] gives, at most eight vectors for the whole tile.
    const PER_STEP: usize;
    /// One run of a tile.
    type Run;

    /// Output rows.
    fn outputs(&self) -> usize;
    /// The order of the runs.
    fn visit(&self) -> Visit;
    /// The runs of a tile in the order of storage.
    fn tile(&self, tile: usize) -> &[Self::Run];
    /// The weights of some inputs: vector `e · TILE/8 + h` holds input e of rows 8h to 8h + 7.
    ///
    /// `PLAIN` is what [`Packed::plain`] said of the run.
    fn decode<V: Simd, const PLAIN: bool>(run: &Self::Run, step: usize) -> [V; 8];
    /// Whether run number `at` of a tile takes the shorter way to decode.
    #[inline(always)]
    fn plain(&self, _tile: usize, _at: usize) -> bool {
        true
    }
    /// Adds the sum of a run, scaled, to its lane's accumulator.
    fn fold<V: Simd>(&self, place: Place, x_scales: &[f32], s: [V; 2], acc: [V; 2]) -> [V; 2];
}

/// Where a run lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// The tile.
    pub(super) tile: usize,
    /// The run, as a number in its row.
    pub(super) run: usize,
    /// The run, as a number in the order of storage.
    pub(super) at: usize,
}

/// Activation rows: values and, for codes, one scale per 128 values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
    pub(super) scales: &'a [f32],
    pub(super) blocks: usize,
    pub(super) rows: usize,
}

/// One product.
pub(super) struct Product<'a, P> {
    pub(super) matrix: &'a P,
    pub(super) x: Inputs<'a>,
    pub(super) out: Out<'a>,
}

impl<P: Packed> Job for Product<'_, P> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(mut self) {
        let columns = self.out.range();
        assert!(columns.start.is_multiple_of(P::TILE), "columns start at {}, not at a tile", columns.start);
        assert!(columns.end <= self.matrix.outputs(), "columns {columns:?} of {}", self.matrix.outputs());
        assert!(self.x.values.len() >= (self.x.rows - 1) * self.x.stride + self.matrix.visit().runs() * P::RUN);
        let end = columns.end.div_ceil(P::TILE);
        let mut tile = columns.start / P::TILE;
        while tile < end {
            let tiles = (end - tile).min(4);
            let mut row = 0;
            while row < self.x.rows {
                // Even blocks of at most five rows: each decodes the weights once.
                let left = self.x.rows - row;
                let rows = left.div_ceil(left.div_ceil(5));
                self.tiles::<V>(tile, tiles, row, rows);
                row += rows;
            }
            tile += tiles;
        }
    }
}

impl<P: Packed> Product<'_, P> {
    /// Up to four tiles for up to four rows, as many at a time as there are registers for.
    #[inline(always)]
    fn tiles<V: Simd>(&mut self, first: usize, tiles: usize, row: usize, rows: usize) {
        let mut t = 0;
        while t < tiles {
            let tile = first + t;
            // A tile of one vector leaves registers for a second tile.
            let thin = P::TILE == 8 && tiles - t >= 2;
            t += match (rows, tiles - t) {
                (1, 4..) => self.block::<V, 4, 1>(tile, row),
                (1, 3) => self.block::<V, 3, 1>(tile, row),
                (1, 2) => self.block::<V, 2, 1>(tile, row),
                (1, _) => self.block::<V, 1, 1>(tile, row),
                (2, 2..) => self.block::<V, 2, 2>(tile, row),
                (2, _) => self.block::<V, 1, 2>(tile, row),
                (3, _) if thin => self.block::<V, 2, 3>(tile, row),
                (3, _) => self.block::<V, 1, 3>(tile, row),
                (4, _) if thin => self.block::<V, 2, 4>(tile, row),
                (4, _) => self.block::<V, 1, 4>(tile, row),
                (_, _) if thin => self.block::<V, 2, 5>(tile, row),
                (_, _) => self.block::<V, 1, 5>(tile, row),
            };
        }
    }

    /// `T` tiles for `M` rows; gives back `T`.
    #[inline(always)]
    fn block<V: Simd, const T: usize, const M: usize>(&mut self, tile: usize, row: usize) -> usize {
        let mut x: [&[f32]; M] = [&[]; M];
        let mut scales: [&[f32]; M] = [&[]; M];
        for m in 0..M {
            x[m] = &self.x.values[(row + m) * self.x.stride..];
            scales[m] = &self.x.scales[(row + m) * self.x.blocks..];
        }
        let sums = sums::<P, V, T, M>(self.matrix, tile, x, scales);
        let columns = self.out.range();
        for (t, rows) in sums.iter().enumerate() {
            let from = (tile + t) * P::TILE - columns.start;
            let to = (from + P::TILE).min(columns.end - columns.start);
            for (m, sum) in rows.iter().enumerate() {
                match &mut self.out {
                    Out::F32(y) => store_f32(*sum, &mut y.row(row + m)[from..to]),
                    Out::Bf16(y) => store_bf16(*sum, &mut y.row(row + m)[from..to]),
                }
            }
        }
        T
    }
}

/// The sums of `T` tiles for `M` rows.
#[inline(always)]
fn sums<P: Packed, V: Simd, const T: usize, const M: usize>(
    matrix: &P,
    first: usize,
    x: [&[f32]; M],
    scales: [&[f32]; M],
) -> [[[V; 2]; M]; T] {
    let visit = matrix.visit();
    let halves = P::TILE / 8;
    let zero = V::splat(0.0);
    let mut tiles: [&[P::Run]; T] = [&[]; T];
    for t in 0..T {
        tiles[t] = &matrix.tile(first + t)[..visit.runs];
    }
    let mut waiting = [[[[zero; 2]; M]; T]; 5];
    let mut at = 0;
    let mut v = 0;
    loop {
        let mut acc = [[[zero; 2]; M]; T];
        let mut run = visit.lane(v);
        while run < visit.runs {
            let mut plain = true;
            for t in 0..T {
                plain &= matrix.plain(first + t, at);
            }
            let s = if plain {
                run_sums::<P, V, T, M, true>(tiles, at, x, run)
            } else {
                run_sums::<P, V, T, M, false>(tiles, at, x, run)
            };
            for t in 0..T {
                for m in 0..M {
                    let place = Place { tile: first + t, run, at };
                    acc[t][m] = matrix.fold(place, scales[m], s[t][m], acc[t][m]);
                }
            }
            at += 1;
            run += LANES;
        }
        if visit.levels < 5 {
            // The lane's partners further off hold +0.
            add::<V, T, M>(&mut acc, &[[[zero; 2]; M]; T], halves);
        }
        let mut level = 0;
        while (v >> level) & 1 == 1 {
            add::<V, T, M>(&mut acc, &waiting[level], halves);
            level += 1;
        }
        v += 1;
        if v >> visit.levels == 1 {
            return acc;
        }
        waiting[level] = acc;
    }
}

/// Step 2: one run of `T` tiles for `M` rows.
#[inline(always)]
fn run_sums<P: Packed, V: Simd, const T: usize, const M: usize, const PLAIN: bool>(
    tiles: [&[P::Run]; T],
    at: usize,
    x: [&[f32]; M],
    run: usize,
) -> [[[V; 2]; M]; T] {
    let halves = P::TILE / 8;
    let mut xr: [&[f32]; M] = [&[]; M];
    for m in 0..M {
        xr[m] = &x[m][run * P::RUN..][..P::RUN];
    }
    let mut s = [[[V::splat(0.0); 2]; M]; T];
    for step in 0..P::RUN / P::PER_STEP {
        for t in 0..T {
            let w = P::decode::<V, PLAIN>(&tiles[t][at], step);
            for m in 0..M {
                for e in 0..P::PER_STEP {
                    let xe = V::splat(xr[m][step * P::PER_STEP + e]);
                    for h in 0..halves {
                        s[t][m][h] = w[e * halves + h].fma(xe, s[t][m][h]);
                    }
                }
            }
        }
    }
    s
}

/// Adds lane sums, vector by vector.
#[inline(always)]
fn add<V: Simd, const T: usize, const M: usize>(acc: &mut [[[V; 2]; M]; T], o: &[[[V; 2]; M]; T], halves: usize) {
    for t in 0..T {
        for m in 0..M {
            for h in 0..halves {
                acc[t][m][h] = o[t][m][h].add(acc[t][m][h]);
            }
        }
    }
}

/// Stores one row of a tile, cut to the columns that exist.
#[inline(always)]
fn store_f32<V: Simd>(sum: [V; 2], out: &mut [f32]) {
    let (eights, rest) = out.as_chunks_mut::<8>();
    for (h, eight) in eights.iter_mut().enumerate() {
        sum[h].store(eight);
    }
    if !rest.is_empty() {
        let mut last = [0.0; 8];
        sum[eights.len()].store(&mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// Rounds and stores one row of a tile, cut to the columns that exist.
#[inline(always)]
fn store_bf16<V: Simd>(sum: [V; 2], out: &mut [half::bf16]) {
    let (eights, rest) = out.as_chunks_mut::<8>();
    for (h, eight) in eights.iter_mut().enumerate() {
        sum[h].store_bf16(eight);
    }
    if !rest.is_empty() {
        let mut last = [half::bf16::ZERO; 8];
        sum[eights.len()].store_bf16(&mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}
