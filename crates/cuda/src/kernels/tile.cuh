// Products of many activation rows in the canonical order. Needs common.cuh, quant.cuh, product.cuh.
//
// A thread holds 4·I/4 activations by 8 weight rows, so a canonical lane is one accumulator at a time:
// lanes are visited in bit-reversed order, and finished neighbours merge like a binary counter. KEPT
// levels of the counter wait in shared memory, the rest in local memory. Both operands are staged as fp32, 16
// values of every row at a time: a run of FP8, half a run of FP4, two runs of plain weights. Blocks may share
// the lanes of a tile (subtrees of the fold); their sums are added by tile_sum.

#define TILE_THREADS 256
#define PIECE 16
#define TILE_SEGMENTS 8

// One matrix of a launch.
struct TileSegment {
  const u8 *w;
  const u8 *scale;
  void *out;
  u32 rows;
  u32 first;      // its first tile
  u32 column;     // its first column among all
  u32 out_stride; // in elements
  u32 out_fp32;
  u32 x_offset;   // in bytes
};

struct TileParams {
  TileSegment segment[TILE_SEGMENTS];
  const u8 *x;           // codes [*, k], or bf16 rows
  const float *x_scale;  // of codes, [*, k / 128]
  float *partial;        // [splits, m, columns]
  const uint4 *items;    // null, or [1 + items]: how many; expert, first of `order`, count
  const u32 *order;      // rows of items: numbers of pairs
  u64 expert_codes;      // bytes of an expert
  u64 expert_scales;
  u32 segments;
  u32 k;
  u32 m;
  u32 x_stride;          // in bytes
  u32 splits;            // a power of two, at most 32
  u32 columns;
  u32 per_row;           // pairs to a row of x
};

// What a thread brings: one row of a piece on its way.
struct Brought {
  uint4 a;
  uint4 b;
};

template <int F>
struct TileFormat {
  static const bool PLAIN = F == WIDE || F == BF16;
  static const u32 VALUES = F == FP8 ? 16 : F == FP4 ? 32 : 8; // of a run
  // Pieces of a lane with `runs` runs.
  static DEV_MEMBER u32 pieces(u32 runs) { return F == FP8 ? runs : F == FP4 ? 2 * runs : (runs + 1) / 2; }
};

// Groups of four values of a thread's 8 weight rows or I activations.
template <int N, int STEP>
DEV void tile_fours(const float *from, float (&v)[N]) {
#pragma unroll
  for (int g = 0; g < N / 4; g++) {
    float4 four = *(const float4 *)(from + STEP * g);
    v[4 * g] = four.x, v[4 * g + 1] = four.y, v[4 * g + 2] = four.z, v[4 * g + 3] = four.w;
  }
}

// Adds the products of values FROM..TO of a piece to the runs' sums, which START begins.
template <int I, int TM, int TN, int FROM, int TO, bool START>
DEV void tile_chain(const float *w, const float *x, float (&s)[I][8]) {
#pragma unroll
  for (int k = FROM; k < TO; k++) {
    float b[8], a[I];
    tile_fours<8, 32>(w + k * TN, b);
    tile_fours<I, 16>(x + k * TM, a);
#pragma unroll
    for (int i = 0; i < I; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) s[i][j] = fmaf(b[j], a[i], START && k == FROM ? 0.0f : s[i][j]);
  }
}

// Ends a run: its sum times its scale goes to the lane's sum.
template <int F, int I, int TN>
DEV void tile_end(const float *scales, u32 n_at, u32 m_at, float (&s)[I][8], float (&acc)[I][8]) {
  float sx[I], sw[8];
  if (F == FP8) tile_fours<I, 16>(scales + n_at / 128 * (I * 4 * (512 / TN)) + m_at, sx);
  if (F == FP4) {
    tile_fours<8, 32>(scales + n_at, sw);
    tile_fours<I, 16>(scales + TN + m_at, sx);
  }
#pragma unroll
  for (int i = 0; i < I; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (F == FP8)
        acc[i][j] = fmaf(s[i][j], sx[i], acc[i][j]);
      else if (F == FP4)
        acc[i][j] = fmaf(s[i][j], sw[j] * sx[i], acc[i][j]);
      else
        acc[i][j] = s[i][j] + acc[i][j];
      if (F == FP4) s[i][j] = 0.0f; // the next piece adds to it
    }
}

// What a tile works on.
#define DENSE 0 /* rows of matrices, rows of activations */
#define ITEMS 1 /* a matrix of an expert, the rows of an item */
#define KEYS 2  /* keys that one row attends to, the heads of its query */

// Of KEYS: where the keys are, and by what their products are multiplied.
struct TileKeys {
  const u8 *const *at;
  float scale;
};

// One tile of 4 · I · WM activations by 64 · WN weight rows, WM · WN = 8 warps.
template <int F, int WM, int WN, int I, int MODE>
struct Tile {
  static const int TM = 4 * I * WM, TN = 64 * WN;
  // Floats from one value of the activations to the next. An item's few rows are brought by all threads, a value
  // by each, and lie apart so that they meet in few banks.
  static const int XS = MODE == ITEMS ? TM + 4 : TM;
  static const int BROUGHT = MODE == ITEMS ? TN : TM + TN; // rows that threads bring by runs
  static const int SLOTS = (BROUGHT + TILE_THREADS - 1) / TILE_THREADS;
  static const int BLOCKS = TN / 128; // rows of FP8 scales
  static const int SCALES = F == FP8 ? BLOCKS * TM : F == FP4 ? TN + TM : 0;
  static const int BUFFER = PIECE * (TN + XS) + SCALES; // floats
};

template <int F, int WM, int WN, int I, int MODE, int KEPT>
DEV void tile_body(const TileParams &p, u32 n_tile, u32 m0, u32 part, uint4 item, TileKeys keys) {
  typedef Tile<F, WM, WN, I, MODE> T;
  typedef TileFormat<F> Format;
  extern __shared__ float4 shared[];
  float *buffers = (float *)shared;
  float4 *kept = shared + 2 * T::BUFFER / 4;
  const u32 tid = threadIdx.x, lane = lane_id(), warp = warp_id();
  // A warp covers 64 weight rows by 4 · I activations.
  const u32 n_at = warp % WN * 64 + lane % 8 * 4, m_at = warp / WN * (4 * I) + lane / 8 * 4;
  u32 number = 0;
  while (number + 1 < p.segments && n_tile >= p.segment[number + 1].first) number++;
  const TileSegment &segment = p.segment[number];
  const u32 row0 = (n_tile - segment.first) * T::TN;
  const u32 blocks = p.k / 128, runs = p.k / Format::VALUES, steps = (p.k + 1023) / 1024;
  const u32 row_bytes = F == FP8 ? p.k : F == FP4 ? p.k / 2 : F == WIDE ? (p.k + 511) / 512 * 512 : 2 * p.k;
  const u8 *codes = segment.w + (MODE == ITEMS ? item.y * p.expert_codes : 0);
  const u8 *code_scales = segment.scale + (MODE == ITEMS ? item.y * p.expert_scales : 0);
  const u32 live = MODE == ITEMS ? item.w : p.m; // rows, from m0 on

  // What this thread brings of each piece: weight rows first, then activations.
  const u8 *from[T::SLOTS];
  const u8 *w_scale[T::SLOTS];
  const float *x_scale[T::SLOTS];
  Brought brought[T::SLOTS];
  // Scales as they are loaded: nothing waits for them before they are put.
  u32 code_scale[T::SLOTS][T::BLOCKS];
  float scale[T::SLOTS];
#pragma unroll
  for (int i = 0; i < T::SLOTS; i++) {
    u32 r = i * TILE_THREADS + tid;
    from[i] = 0;
    w_scale[i] = code_scales;
    x_scale[i] = p.x_scale;
    brought[i].a = brought[i].b = make_uint4(0, 0, 0, 0);
    scale[i] = 0.0f;
#pragma unroll
    for (int b = 0; b < T::BLOCKS; b++) code_scale[i][b] = 0;
    if (r < T::TN) {
      u32 row = row0 + r < segment.rows ? row0 + r : segment.rows - 1;
      from[i] = MODE == KEYS ? keys.at[r] : codes + (u64)row * row_bytes;
      if (F == FP4) w_scale[i] += (u64)row * LANES * steps;
      if (F == WIDE) w_scale[i] += (u64)(row / 128) * blocks;
    } else if (r < T::BROUGHT) {
      u32 at = m0 + r - T::TN;
      if (at >= live) at = live - 1;
      u32 row = MODE == ITEMS ? p.order[item.z + at] / p.per_row : at;
      from[i] = p.x + (u64)row * p.x_stride + segment.x_offset;
      if (F == FP8 || F == FP4) x_scale[i] += (u64)row * blocks;
    }
  }

  // Of an item: a value of a row, and the scale of a row.
  const u8 *value_from = 0;
  const float *value_scale = 0;
  u32 value = 0;
  float row_scale = 0.0f;
  if (MODE == ITEMS) {
    u32 row = tid / PIECE < live ? tid / PIECE : live - 1, scaled = tid < live ? tid : live - 1;
    value_from = p.x + (u64)(p.order[item.z + row] / p.per_row) * p.x_stride + tid % PIECE;
    value_scale = p.x_scale + (u64)(p.order[item.z + scaled] / p.per_row) * blocks;
  }

  auto fetch = [&](u32 visit, u32 piece) {
    const u32 l = __brev(visit) >> 27;
    if (MODE == ITEMS) {
      u32 run = piece / 2 * LANES + l;
      value = value_from[run * 32 + (piece & 1) * 16];
      if ((piece & 1) && tid < T::TM) row_scale = value_scale[run / 4];
    }
#pragma unroll
    for (int i = 0; i < T::SLOTS; i++) {
      const u32 r = i * TILE_THREADS + tid;
      if ((i + 1) * TILE_THREADS > T::BROUGHT && r >= T::BROUGHT) continue;
      const bool is_w = (i + 1) * TILE_THREADS <= T::TN || (i * TILE_THREADS < T::TN && r < T::TN);
      if (F == FP8) {
        u32 run = piece * LANES + l;
        brought[i].a = __ldg((const uint4 *)(from[i] + run * 16));
        if (!is_w) {
          scale[i] = x_scale[i][run / 8];
#pragma unroll
          for (int b = 0; b < T::BLOCKS; b++) {
            u32 block = row0 / 128 + b, last = (segment.rows - 1) / 128;
            if (block > last) block = last;
            code_scale[i][b] = code_scales[(u64)block * blocks + run / 8];
          }
        }
      } else if (F == FP4) {
        u32 run = piece / 2 * LANES + l, half = piece & 1;
        if (is_w) {
          // The whole run comes with its first half.
          if (!half) brought[i].a = __ldg((const uint4 *)(from[i] + run * 16));
          if (half) code_scale[i][0] = w_scale[i][l * steps + piece / 2];
        } else {
          brought[i].a = __ldg((const uint4 *)(from[i] + run * 32 + half * 16));
          if (half) scale[i] = x_scale[i][run / 4];
        }
      } else {
        u32 run = 2 * piece * LANES + l;
        bool second = run + LANES < runs;
        if (F == WIDE && is_w) {
          brought[i].a = __ldg((const uint4 *)(from[i] + (piece * LANES + l) * 16));
          brought[i].b.x = w_scale[i][run / 16];
          brought[i].b.y = second ? w_scale[i][run / 16 + 2] : 127u;
        } else {
          brought[i].a = __ldg((const uint4 *)(from[i] + run * 16));
          brought[i].b = second ? __ldg((const uint4 *)(from[i] + run * 16 + 512)) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  };
  auto put = [&](u32 buffer, u32 piece) {
    float *base = buffers + buffer * T::BUFFER;
    if (MODE == ITEMS) {
      base[PIECE * T::TN + tid % PIECE * T::XS + tid / PIECE] = half_lo(e4m3x2_half((u16)value)) * FP4_UP;
      if ((piece & 1) && tid < T::TM) base[PIECE * (T::TN + T::XS) + T::TN + tid] = row_scale;
    }
#pragma unroll
    for (int i = 0; i < T::SLOTS; i++) {
      const u32 r = i * TILE_THREADS + tid;
      if ((i + 1) * TILE_THREADS > T::BROUGHT && r >= T::BROUGHT) continue;
      const bool is_w = (i + 1) * TILE_THREADS <= T::TN || (i * TILE_THREADS < T::TN && r < T::TN);
      float *to = is_w ? base + r : base + PIECE * T::TN + (r - T::TN);
      const u32 stride = is_w ? (u32)T::TN : (u32)T::XS;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float v[4];
        if (F == FP8) {
          e4m3x4(word_of(brought[i].a, q), v);
        } else if (F == FP4) {
          if (is_w) {
            const uint4 &run = brought[i].a;
            decode<FP4>(piece & 1 ? make_uint4(run.z, run.w, 0, 0) : run, q, v);
          } else {
            e4m3x4(word_of(brought[i].a, q), v);
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = v[e] * FP4_UP;
          }
        } else if (F == WIDE && is_w) {
          e4m3x4(word_of(brought[i].a, q), v);
          float up = e8m0_value(q < 2 ? brought[i].b.x : brought[i].b.y);
#pragma unroll
          for (int e = 0; e < 4; e++) v[e] = v[e] * up;
        } else {
          decode<BF16>(q < 2 ? brought[i].a : brought[i].b, q & 1, v);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) to[(4 * q + e) * stride] = v[e];
      }
      float *scales = base + PIECE * (T::TN + T::XS);
      if (F == FP8 && !is_w) {
#pragma unroll
        for (int b = 0; b < T::BLOCKS; b++) scales[b * T::TM + (r - T::TN)] = e8m0_value(code_scale[i][b]) * scale[i];
      }
      if (F == FP4 && (piece & 1)) scales[r] = is_w ? e8m0_value(code_scale[i][0]) : scale[i];
    }
  };

  const u32 count = LANES / p.splits, first = part * count, end = first + count;
  auto pieces = [&](u32 visit) {
    u32 l = __brev(visit) >> 27;
    return Format::pieces(l < runs ? (runs - l + LANES - 1) / LANES : 0);
  };
  // The piece that is fetched next; lanes without runs have none.
  u32 next = first, next_piece = 0;
  auto settle = [&]() {
    while (next < end && next_piece >= pieces(next)) {
      next++;
      next_piece = 0;
    }
  };

  wait_for_inputs();
  launch_dependents();
  float acc[I][8], s[I][8], deep[5 - KEPT][I][8];
#pragma unroll
  for (int i = 0; i < I; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) acc[i][j] = s[i][j] = 0.0f;
  settle();
  if (next < end) {
    fetch(next, next_piece);
    put(0, next_piece);
    next_piece++;
    settle();
  }
  __syncthreads();
  u32 buffer = 0;
  for (u32 visit = first; visit < end; visit++) {
    const u32 l = __brev(visit) >> 27, here = pieces(visit);
    for (u32 piece = 0; piece < here; piece++) {
      const bool more = next < end;
      const u32 coming = next_piece;
      if (more) {
        fetch(next, next_piece);
        next_piece++;
        settle();
      }
      const float *base = buffers + buffer * T::BUFFER;
      const float *w = base + n_at, *x = base + PIECE * T::TN + m_at, *scales = base + PIECE * (T::TN + T::XS);
      if (Format::PLAIN) {
        tile_chain<I, T::XS, T::TN, 0, 8, true>(w, x, s);
        tile_end<F, I, T::TN>(scales, n_at, m_at, s, acc);
        if ((2 * piece + 1) * LANES + l < runs) {
          tile_chain<I, T::XS, T::TN, 8, 16, true>(w, x, s);
          tile_end<F, I, T::TN>(scales, n_at, m_at, s, acc);
        }
      } else {
        tile_chain<I, T::XS, T::TN, 0, PIECE, F == FP8>(w, x, s);
        if (F == FP8 || (piece & 1)) tile_end<F, I, T::TN>(scales, n_at, m_at, s, acc);
      }
      buffer ^= 1;
      if (more) put(buffer, coming);
      __syncthreads();
    }
    // The counter: what waits at the levels of the low ones merges, the rest waits.
    const u32 u = visit - first;
    u32 level = 0;
    for (; u >> level & 1; level++) {
      if (level < KEPT) {
#pragma unroll
        for (int i = 0; i < I; i++)
#pragma unroll
          for (int g = 0; g < 2; g++) {
            float4 v = kept[(level * 2 * I + 2 * i + g) * TILE_THREADS + tid];
            acc[i][4 * g] = v.x + acc[i][4 * g];
            acc[i][4 * g + 1] = v.y + acc[i][4 * g + 1];
            acc[i][4 * g + 2] = v.z + acc[i][4 * g + 2];
            acc[i][4 * g + 3] = v.w + acc[i][4 * g + 3];
          }
      } else {
#pragma unroll
        for (int i = 0; i < I; i++)
#pragma unroll
          for (int j = 0; j < 8; j++) acc[i][j] = deep[level - KEPT][i][j] + acc[i][j];
      }
    }
    if (u + 1 == count) break;
    if (level < KEPT) {
#pragma unroll
      for (int i = 0; i < I; i++)
#pragma unroll
        for (int g = 0; g < 2; g++)
          kept[(level * 2 * I + 2 * i + g) * TILE_THREADS + tid] =
              make_float4(acc[i][4 * g], acc[i][4 * g + 1], acc[i][4 * g + 2], acc[i][4 * g + 3]);
    } else {
#pragma unroll
      for (int i = 0; i < I; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) deep[level - KEPT][i][j] = acc[i][j];
    }
#pragma unroll
    for (int i = 0; i < I; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) acc[i][j] = 0.0f;
  }

#pragma unroll
  for (int i = 0; i < I; i++) {
    u32 at = m0 + m_at + i % 4 + 16 * (i / 4);
    if (at >= live) continue;
    u32 m = MODE == ITEMS ? p.order[item.z + at] : at;
#pragma unroll
    for (int g = 0; g < 2; g++) {
      const u32 row = row0 + n_at + 32 * g;
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = MODE == KEYS ? acc[i][4 * g + j] * keys.scale : acc[i][4 * g + j];
      const bool whole = row + 4 <= segment.rows && segment.out_stride % 4 == 0 && p.columns % 4 == 0;
      if (p.splits > 1) {
        float *to = p.partial + ((u64)part * p.m + m) * p.columns + segment.column + row;
        if (whole && segment.column % 4 == 0)
          *(float4 *)to = make_float4(v[0], v[1], v[2], v[3]);
        else
#pragma unroll
          for (int j = 0; j < 4; j++)
            if (row + j < segment.rows) to[j] = v[j];
        continue;
      }
      u64 to = (u64)m * segment.out_stride + row;
      if (whole) {
        if (segment.out_fp32)
          *(float4 *)((float *)segment.out + to) = make_float4(v[0], v[1], v[2], v[3]);
        else
          *(uint2 *)((u16 *)segment.out + to) = make_uint2(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]));
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (row + j >= segment.rows) continue;
        if (segment.out_fp32)
          ((float *)segment.out)[to + j] = v[j];
        else
          ((u16 *)segment.out)[to + j] = bf16_down(v[j]);
      }
    }
  }
}

// A tile of activations and weight rows. Grid (m / TM, tiles of all segments, splits), 256 threads.
#define TILE(NAME, F, WM, WN, I)                                                               \
  extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1)                               \
      NAME(const __grid_constant__ TileParams p) {                                            \
    tile_body<F, WM, WN, I, DENSE, 2>(p, blockIdx.y, blockIdx.x * (4 * I * WM), blockIdx.z,    \
                                   make_uint4(0, 0, 0, 0), TileKeys());                       \
  }

// The shapes of tiles: 128 × 128, 64 × 256 and 32 × 512.
#define TILES(NAME, F)          \
  TILE(NAME##_128, F, 4, 2, 8) \
  TILE(NAME##_64, F, 2, 4, 8)  \
  TILE(NAME##_32, F, 1, 8, 8)
