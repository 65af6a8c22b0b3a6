//! Sparse attention of one position over a list of keys, which are the values too.
//!
//! The list has a fixed layout: the window's entries in chronological order, padded with absent ones
//! to the window's size; compressed slots ascending; the rows of a draft block. It is cut into
//! blocks of 64 entries. Absent entries take no part in anything.

use half::bf16;

use super::compress::RingRows;
use super::isa::{Isa, Job};
use super::math::exp_v;
use super::simd::{Simd, sum_lanes};

/// List entries to a block.
const BLOCK: usize = 64;
/// Dimensions to a group: eight runs of eight.
const GROUP: usize = 64;

/// Which compressed slots a position attends to.
#[derive(Debug, Clone, Copy)]
pub enum Slots<'a> {
    /// The first so many.
    All(usize),
    /// These, ascending.
    These(&'a [u32]),
}

/// The keys of one position.
#[derive(Debug, Clone, Copy)]
pub struct Keys<'a> {
    /// Rows of the window, oldest first; at most `window_size`.
    pub window: RingRows<'a, bf16>,
    /// Entries that the window takes in the list.
    pub window_size: usize,
    /// Compressed slots, `[slots, width]`.
    pub compressed: &'a [bf16],
    /// Which of them.
    pub slots: Slots<'a>,
    /// Rows of a draft block, `[rows, width]`; empty otherwise.
    pub block: &'a [bf16],
}

impl<'a> Keys<'a> {
    fn slot_count(&self) -> usize {
        match self.slots {
            Slots::All(count) => count,
            Slots::These(picks) => picks.len(),
        }
    }

    /// Entries of the list, absent ones too.
    fn len(&self, width: usize) -> usize {
        self.window_size + self.slot_count() + self.block.len() / width
    }

    /// Entry `i`, unless it is absent.
    fn get(&self, i: usize, width: usize) -> Option<&'a [bf16]> {
        let row = |data: &'a [bf16], i: usize| &data[i * width..][..width];
        if i < self.window_size {
            return (i < self.window.count()).then(|| self.window.row(i, width));
        }
        let i = i - self.window_size;
        if i < self.slot_count() {
            return Some(match self.slots {
                Slots::All(_) => row(self.compressed, i),
                Slots::These(picks) => row(self.compressed, picks[i] as usize),
            });
        }
        Some(row(self.block, i - self.slot_count()))
    }
}

/// Buffers of [`attend`], to use again and again.
#[derive(Debug, Clone, Default)]
pub struct AttendScratch {
    /// Queries, `[heads, width]`, in lane order.
    q: Vec<[f32; 8]>,
    /// Keys of a block, `[64, width]`, in lane order.
    k: Vec<[f32; 8]>,
    /// Value sums, `[heads, width]`, in lane order.
    acc: Vec<[f32; 8]>,
    /// Running maximum and sum of every head.
    state: Vec<(f32, f32)>,
}

impl AttendScratch {
    /// Empty buffers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

/// One position's query and the constants of the layer.
#[derive(Debug, Clone, Copy)]
pub struct Query<'a> {
    /// `[heads, width]`.
    pub q: &'a [bf16],
    /// One per head; enters the denominator, last.
    pub sink: &'a [f32],
    /// Multiplies every finished dot product.
    pub scale: f32,
}

/// Attends: `out[heads, width]`, bf16.
///
/// # Panics
/// If the width of a head is not a positive multiple of 64, sizes differ, or there is no key.
pub fn attend(isa: Isa, query: Query<'_>, keys: &Keys<'_>, scratch: &mut AttendScratch, out: &mut [bf16]) {
    let heads = query.sink.len();
    assert!(heads > 0 && query.q.len().is_multiple_of(heads) && out.len() == query.q.len());
    let width = query.q.len() / heads;
    assert!(width > 0 && width.is_multiple_of(GROUP), "heads of {width} values, expected a multiple of {GROUP}");
    assert!(keys.window.count() <= keys.window_size, "{} rows in the window", keys.window.count());
    assert!(keys.len(width) - keys.window_size + keys.window.count() > 0, "no key to attend to");
    isa.dispatch(Attend { query, keys, width, scratch, out });
}

struct Attend<'a> {
    query: Query<'a>,
    keys: &'a Keys<'a>,
    width: usize,
    scratch: &'a mut AttendScratch,
    out: &'a mut [bf16],
}

impl Job for Attend<'_> {
    type Out = ();

    #[inline(always)]
    fn run<V: Simd>(self) {
        let Self { query, keys, width, scratch, out } = self;
        let (heads, eights) = (query.sink.len(), width / 8);
        scratch.q.resize(heads * eights, [0.0; 8]);
        scratch.k.resize(BLOCK * eights, [0.0; 8]);
        scratch.acc.clear();
        scratch.acc.resize(heads * eights, [0.0; 8]);
        scratch.state.clear();
        scratch.state.resize(heads, (f32::NEG_INFINITY, 0.0));
        for (q, row) in query.q.chunks_exact(width).zip(scratch.q.chunks_exact_mut(eights)) {
            to_lanes::<V>(q, row);
        }
        let len = keys.len(width);
        for start in (0..len).step_by(BLOCK) {
            let mut count = 0;
            for i in start..(start + BLOCK).min(len) {
                if let Some(key) = keys.get(i, width) {
                    to_lanes::<V>(key, &mut scratch.k[count * eights..][..eights]);
                    count += 1;
                }
            }
            if count == 0 {
                continue;
            }
            // Rows up to a multiple of eight are scored and not used.
            scratch.k[count * eights..count.next_multiple_of(8) * eights].fill([0.0; 8]);
            for head in 0..heads {
                let q = &scratch.q[head * eights..][..eights];
                let acc = &mut scratch.acc[head * eights..][..eights];
                let block = Block { k: &scratch.k, count, scale: query.scale };
                block.fold::<V>(q, &mut scratch.state[head], acc);
            }
        }
        for head in 0..heads {
            let (max, sum) = scratch.state[head];
            let sum = sum + first_lane(exp_v(V::splat(query.sink[head]).sub(V::splat(max))));
            let acc = &scratch.acc[head * eights..][..eights];
            from_lanes::<V>(acc, sum, &mut out[head * width..][..width]);
        }
    }
}

/// The present keys of one block.
struct Block<'a> {
    k: &'a [[f32; 8]],
    count: usize,
    scale: f32,
}

impl Block<'_> {
    /// Folds the block into one head's running maximum, sum and values.
    #[inline(always)]
    fn fold<V: Simd>(&self, q: &[[f32; 8]], state: &mut (f32, f32), acc: &mut [[f32; 8]]) {
        let mut p = [[f32::NEG_INFINITY; 8]; BLOCK / 8];
        let eights = q.len();
        for (g, scores) in p[..self.count.div_ceil(8)].iter_mut().enumerate() {
            let dots = score8::<V>(q, &self.k[g * 8 * eights..][..8 * eights]);
            dots.mul(V::splat(self.scale)).store(scores);
        }
        let p = p.as_flattened_mut();
        let mut max = state.0;
        for &score in &p[..self.count] {
            max = if score > max { score } else { max };
        }
        let alpha = first_lane(exp_v(V::splat(state.0).sub(V::splat(max))));
        let (rows, _) = p.as_chunks_mut::<8>();
        for row in rows {
            exp_v(V::load(row).sub(V::splat(max))).store(row);
        }
        let mut sum = state.1 * alpha;
        for &e in &p[..self.count] {
            sum += e;
        }
        *state = (max, sum);
        let (rows, _) = p.as_chunks_mut::<8>();
        for row in rows {
            V::load(row).round_bf16().store(row);
        }
        let (groups, _) = acc.as_chunks_mut::<8>();
        for (g, group) in groups.iter_mut().enumerate() {
            let mut values = [V::splat(0.0); 8];
            for (value, old) in values.iter_mut().zip(group.iter()) {
                *value = V::load(old).mul(V::splat(alpha));
            }
            for (key, &e) in self.k.chunks_exact(eights).zip(&p[..self.count]) {
                let e = V::splat(e);
                for (value, k) in values.iter_mut().zip(&key[8 * g..8 * g + 8]) {
                    *value = e.fma(V::load(k), *value);
                }
            }
            for (value, new) in values.iter().zip(group) {
                value.store(new);
            }
        }
    }
}

/// The first lane.
#[inline(always)]
fn first_lane<V: Simd>(v: V) -> f32 {
    let mut x = [0.0; 8];
    v.store(&mut x);
    x[0]
}

/// bf16 values to fp32 in lane order: of every 64, vector e holds element e of the eight runs.
#[inline(always)]
pub(super) fn to_lanes<V: Simd>(row: &[bf16], out: &mut [[f32; 8]]) {
    let (runs, _) = row.as_chunks::<8>();
    for (runs, out) in runs.chunks_exact(8).zip(out.chunks_exact_mut(8)) {
        let mut rows = [V::splat(0.0); 8];
        for (row, run) in rows.iter_mut().zip(runs) {
            *row = V::load_bf16(run);
        }
        for (column, out) in V::transpose(rows).iter().zip(out) {
            column.store(out);
        }
    }
}

/// `values / sum`, back in their own order, rounded to bf16.
#[inline(always)]
fn from_lanes<V: Simd>(values: &[[f32; 8]], sum: f32, out: &mut [bf16]) {
    let (runs, _) = out.as_chunks_mut::<8>();
    for (values, runs) in values.chunks_exact(8).zip(runs.chunks_exact_mut(8)) {
        let mut columns = [V::splat(0.0); 8];
        for (column, value) in columns.iter_mut().zip(values) {
            *column = V::load(value).div(V::splat(sum));
        }
        for (row, run) in V::transpose(columns).iter().zip(runs) {
            row.store_bf16(run);
        }
    }
}

/// The dot products of one query with eight keys, all in lane order, in the canonical order of runs
/// of eight.
#[inline(always)]
pub(super) fn score8<V: Simd>(q: &[[f32; 8]], keys: &[[f32; 8]]) -> V {
    let zero = V::splat(0.0);
    let (groups, _) = q.as_chunks::<8>();
    let mut rows: [&[[[f32; 8]; 8]]; 8] = [&[]; 8];
    for (row, key) in rows.iter_mut().zip(keys.chunks_exact(q.len())) {
        *row = &key.as_chunks::<8>().0[..groups.len()];
    }
    // The 32 lanes of every key: four vectors each.
    let mut acc = [[zero; 8]; 4];
    for (g, group) in groups.iter().enumerate() {
        let mut s = [zero; 8];
        for e in 0..8 {
            let q = V::load(&group[e]);
            for j in 0..8 {
                s[j] = V::load(&rows[j][g][e]).fma(q, s[j]);
            }
        }
        let lanes = &mut acc[g % 4];
        for j in 0..8 {
            lanes[j] = s[j].add(lanes[j]);
        }
    }
    let mut folded = [zero; 8];
    for j in 0..8 {
        folded[j] = acc[0][j].add(acc[2][j]).add(acc[1][j].add(acc[3][j]));
    }
    sum_lanes(folded)
}
