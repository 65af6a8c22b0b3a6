// The canonical product of weight rows in a ring and activation rows in shared memory. Needs
// common.cuh and quant.cuh.
//
// A step is 16 bytes of every row for every lane: one run of FP8, FP4, bf16 or fp32 weights, or two
// runs of eight FP8 codes that stand for bf16 weights (the layout in memory puts them together).
// Activations lie in shared memory as fp32 [step][m][quad][lane], four values to a quad, so that a
// warp reads 512 neighbouring bytes.

#define FP8 0
#define FP4 1
#define WIDE 2 /* FP8 codes times their scale, as the bf16 values they are */
#define BF16 3
#define F32 4

// Values of one lane and step.
template <int F> struct Values { static const int N = 16; };
template <> struct Values<FP4> { static const int N = 32; };
template <> struct Values<BF16> { static const int N = 8; };
template <> struct Values<F32> { static const int N = 4; };

// E2M1 codes decode to 2^-14 times their values, so codes of the activations are held times 2^14.
#define FP4_UP 16384.0f

// Whether activations are quantized.
template <int F> struct Coded { static const bool YES = F == FP8 || F == FP4; };

DEV u32 word_of(const uint4 &w, int i) { return i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w; }

// The weights of quad q. FP4 words are repacked when loaded: in each half of a word, four codes as
// s at 15, 12, 14, 13 and the rest at 11..9, 8..6, 5..3, 2..0, even values in the low half.
template <int F>
DEV void decode(const uint4 &w, int q, float (&out)[4]) {
  if (F == FP8 || F == WIDE) {
    e4m3x4(word_of(w, q), out);
  } else if (F == FP4) {
    u32 word = word_of(w, q / 2);
    u32 a, b;
    if (q % 2 == 0) {
      a = word & 0x8e008e00u;
      b = (word << 3) & 0x8e008e00u;
    } else {
      a = ((word << 6) & 0x0e000e00u) | ((word << 1) & 0x80008000u);
      b = ((word << 9) & 0x0e000e00u) | ((word << 2) & 0x80008000u);
    }
    out[0] = half_lo(a);
    out[1] = half_hi(a);
    out[2] = half_lo(b);
    out[3] = half_hi(b);
  } else if (F == BF16) {
    u32 a = word_of(w, 2 * q), b = word_of(w, 2 * q + 1);
    out[0] = bf16_lo(a);
    out[1] = bf16_hi(a);
    out[2] = bf16_lo(b);
    out[3] = bf16_hi(b);
  } else {
    out[0] = __uint_as_float(w.x);
    out[1] = __uint_as_float(w.y);
    out[2] = __uint_as_float(w.z);
    out[3] = __uint_as_float(w.w);
  }
}

DEV u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEV float4 shared_float4(u32 at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at));
  return v;
}

DEV uint4 shared_uint4(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}

DEV float shared_float(u32 at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
  return v;
}

DEV u32 shared_byte(u32 at) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

// Adds the products of quads FROM..TO of R rows and M activations to the runs' sums.
template <int F, int R, int M, int FROM, int TO>
DEV void quad_sums(const uint4 (&w)[R], u32 x, float up, float (&s)[R][M]) {
  const int QUADS = Values<F>::N / 4;
#pragma unroll
  for (int q = FROM; q < TO; q++) {
    float v[R][4];
#pragma unroll
    for (int r = 0; r < R; r++) {
      decode<F>(w[r], q, v[r]);
      if (F == WIDE) {
#pragma unroll
        for (int e = 0; e < 4; e++) v[r][e] = v[r][e] * up;
      }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
      float4 a = shared_float4(x + (m * QUADS + q) * (LANES * 16));
#pragma unroll
      for (int r = 0; r < R; r++) {
        s[r][m] = fmaf(v[r][0], a.x, s[r][m]);
        s[r][m] = fmaf(v[r][1], a.y, s[r][m]);
        s[r][m] = fmaf(v[r][2], a.z, s[r][m]);
        s[r][m] = fmaf(v[r][3], a.w, s[r][m]);
      }
    }
  }
}

// One step of R rows and M activations. `x` is this lane's first quad in shared memory, `here`
// whether the lane has a run, `sw` and `sx` are the scales of the weights and of the activations.
template <int F, int R, int M>
DEV void step_product(const uint4 (&w)[R], u32 x, bool here, const float (&sw)[R], const float (&sx)[M],
                      float (&acc)[R][M]) {
  float s[R][M] = {};
  quad_sums<F, R, M, 0, Values<F>::N / 4>(w, x, 1.0f, s);
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int m = 0; m < M; m++) {
      float next = Coded<F>::YES ? fmaf(s[r][m], sw[r] * sx[m], acc[r][m]) : s[r][m] + acc[r][m];
      if (here) acc[r][m] = next;
    }
}

// The same for two runs of eight codes that stand for bf16 weights, with the scale of each run.
template <int R, int M>
DEV void step_product_wide(const uint4 (&w)[R], u32 x, bool here, bool both, float low, float high,
                           float (&acc)[R][M]) {
  float s[R][M] = {};
  quad_sums<WIDE, R, M, 0, 2>(w, x, low, s);
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int m = 0; m < M; m++) {
      float next = s[r][m] + acc[r][m];
      if (here) acc[r][m] = next;
      s[r][m] = 0.0f;
    }
  quad_sums<WIDE, R, M, 2, 4>(w, x, high, s);
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int m = 0; m < M; m++) {
      float next = s[r][m] + acc[r][m];
      if (both) acc[r][m] = next;
    }
}

// Where the quad of values k..k+3 of row m lies, in float4.
template <int F>
DEV u32 quad_at(u32 k, u32 m, u32 M) {
  const u32 N = Values<F>::N;
  u32 step, lane, q;
  if (F == WIDE) {
    u32 run = k / 8;
    step = run / 64;
    lane = run % 32;
    q = (run / 32) % 2 * 2 + (k % 8) / 4;
  } else {
    u32 run = k / N;
    step = run / LANES;
    lane = run % LANES;
    q = k % N / 4;
  }
  return ((step * M + m) * (N / 4) + q) * LANES + lane;
}

// Values of a row that a thread stages at a time: one row's are shared among more warps, with less code to a warp.
template <int F, int M> struct Chunk { static const int N = F == F32 ? 4 : F == BF16 || M == 1 ? 8 : 16; };

// Two, four or eight words of bf16 pairs.
template <int WORDS>
DEV void load_words(const u16 *from, u32 (&words)[WORDS]) {
  if (WORDS == 2) {
    uint2 w = *(const uint2 *)from;
    words[0] = w.x;
    words[1] = w.y;
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      uint4 w = *(const uint4 *)(from + 2 * i);
      words[i] = w.x;
      words[i + 1] = w.y;
      words[i + 2] = w.z;
      words[i + 3] = w.w;
    }
  }
}

// Stages a chunk of row m that starts at value k. With codes, 128 / N neighbouring lanes hold a group
// of 128 and the scale goes to `scale`; all lanes of the warp must take part, those without a
// chunk with `live` unset.
template <int F, int N>
DEV void stage_chunk(float (&v)[N], bool live, u32 k, u32 m, u32 M, float4 *xs, float *scale) {
  if (Coded<F>::YES) {
    float amax = 0.0f;
#pragma unroll
    for (int e = 0; e < N; e++) amax = fmaxf(amax, fabsf(v[e]));
#pragma unroll
    for (int o = 64 / N; o > 0; o >>= 1) amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, o));
    float s = e4m3_scale(amax);
    float inverse = 1.0f / s;
#pragma unroll
    for (int e = 0; e < N; e++) {
      v[e] = e4m3_round(v[e], inverse);
      if (F == FP4) v[e] = v[e] * FP4_UP;
    }
    if (live && lane_id() % (128 / N) == 0) *scale = s;
  }
  if (!live) return;
#pragma unroll
  for (int e = 0; e < N; e += 4)
    xs[quad_at<F>(k + e, m, M)] = make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]);
}

// Stages M rows of k values; `load(row, k, values)` gives a chunk's, with zeros for rows that are
// not there. The whole block takes part.
template <int F, int M, typename Load>
DEV void stage_rows_by(u32 k, float4 *xs, float *sx, Load load) {
  const int N = Chunk<F, M>::N, TIMES = F == F32 ? 4 : 2;
  u32 chunks = k / N, total = M * chunks;
  for (u32 base = 0; base < total; base += TIMES * blockDim.x) {
    float v[TIMES][N];
#pragma unroll
    for (int t = 0; t < TIMES; t++) {
      u32 i = base + t * blockDim.x + threadIdx.x;
#pragma unroll
      for (int e = 0; e < N; e++) v[t][e] = 0.0f;
      if (i < total) load(M == 1 ? 0 : i / chunks, (M == 1 ? i : i % chunks) * N, v[t]);
    }
#pragma unroll
    for (int t = 0; t < TIMES; t++) {
      u32 i = base + t * blockDim.x + threadIdx.x;
      if (i - lane_id() >= total) break; // the whole warp
      u32 row = M == 1 ? 0 : i / chunks, at = (M == 1 ? i : i % chunks) * N;
      stage_chunk<F, N>(v[t], i < total, at, row, M, xs, sx + row * (k / 128) + at / 128);
    }
  }
}

// A chunk of bf16 values as fp32.
template <int N>
DEV void load_chunk(const u16 *from, float (&v)[N]) {
  u32 words[N / 2];
  load_words<N / 2>(from, words);
#pragma unroll
  for (int e = 0; e < N / 2; e++) {
    v[2 * e] = bf16_lo(words[e]);
    v[2 * e + 1] = bf16_hi(words[e]);
  }
}

// Stages `m` of M rows of k bf16 values, the rest as zeros.
template <int F, int M>
DEV void stage_rows(const u16 *x, u32 stride, u32 k, u32 m, float4 *xs, float *sx) {
  stage_rows_by<F, M>(k, xs, sx, [&](u32 row, u32 at, float (&v)[Chunk<F, M>::N]) {
    if (row < m) load_chunk(x + (u64)row * stride + at, v);
  });
}

// Copies bytes to shared memory, words where both sides allow.
DEV void copy_bytes(u8 *to, const u8 *from, u32 count) {
  if ((((u64)from | (u64)to | count) & 3u) == 0) {
    for (u32 i = threadIdx.x; i < count / 4; i += blockDim.x) ((u32 *)to)[i] = ((const u32 *)from)[i];
  } else {
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
  }
}

// ---- the ring ----

// Copies 16 bytes to shared memory without a register; `size` of them, then zeros.
DEV void copy_async(u32 to, const void *from, u32 size) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}

DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
DEV void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// The fold of R rows of M activations: lane l has value l / (32 / N) of [m][r], N their number
// rounded up to a power of two.
template <int R, int M>
struct Folded {
  static const int COUNT = R * M;
  static const int N = COUNT <= 1 ? 1 : COUNT <= 2 ? 2 : COUNT <= 4 ? 4 : COUNT <= 8 ? 8 : COUNT <= 16 ? 16 : 32;
  static const int EACH = LANES / N;
};

template <int R, int M>
DEV float fold(float (&acc)[R][M]) {
  const int N = Folded<R, M>::N;
  float v[N];
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = 0.0f;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int r = 0; r < R; r++) v[m * R + r] = acc[r][m];
  return butterfly_transposed<N>(v);
}

// ---- the stream ----

// Shape of the rows of a matrix.
struct RowShape {
  u32 k;
  u32 runs;
  u32 steps;
  u32 row_bytes;
};

// Where a group of R rows lies: neighbours in one matrix, or half of them in each of two.
struct Place {
  const u8 *w[2];     // the matrices
  const u8 *scale[2]; // their FP4 scales
  u32 blocks[2];      // their scales of 128 x 128 blocks, in shared memory
  u32 row;            // the first row
  u32 rows;           // of a matrix
  u32 id;             // for the store
};

// The FP4 scales of one row and lane, step by step: steps bytes, up to four.
DEV u32 fp4_scales(const u8 *scale, u64 row, u32 steps, u32 lane) {
  const u8 *p = scale + (row * LANES + lane) * steps;
  if (steps == 4) return *(const u32 *)p;
  if (steps == 2) return *(const u16 *)p;
  u32 out = 0;
  for (u32 i = 0; i < steps; i++) out |= (u32)p[i] << (8 * i);
  return out;
}

// Streams the row groups begin, begin + stride, ... below `end` through this warp's ring (at this
// lane's first slot) and folds them. `locate(group)` gives a Place, groups ascending; `stage()` is
// called by the whole block once the ring is filling and leaves activations in shared memory at
// `xs` (with this lane's offset) and their scales at `sx`; `store(place, sum)` takes this lane's
// sum. PAIR: a group is R / 2 rows of each of two matrices.
template <int F, int R, int M, int STAGES, bool PAIR, typename Locate, typename Stage, typename Store>
DEV void stream_rows(const RowShape &shape, u32 ring, u32 xs, u32 sx, u32 begin, u32 end, u32 stride, Locate locate,
                     Stage stage, Store store) {
  const u32 QUADS = Values<F>::N / 4;
  const u32 STAGE_BYTES = R * LANES * 16;
  const int EACH = PAIR ? R / 2 : R; // rows of a matrix
  const u32 lane = lane_id();
  const u32 blocks = shape.k / 128;
  const u32 steps = shape.steps, last = steps - 1;
  // Whether this lane has no run, or no second run, in the last step.
  const u32 rest = F == WIDE ? shape.runs % 64 : shape.runs % 32;
  const bool short_first = rest != 0 && lane >= rest;
  const bool short_second = rest != 0 && lane + 32 >= rest;
  const u32 last_size = F != WIDE && short_first ? 0 : 16;

  u32 issue_group = begin, issue_step = 0, to = ring;
  const u8 *from[PAIR ? 2 : 1];
  u32 offset[EACH];
  auto issue = [&]() {
    if (issue_group < end) {
      if (issue_step == 0) {
        Place at = locate(issue_group);
        u32 most = at.rows - 1 - at.row;
#pragma unroll
        for (int r = 0; r < EACH; r++) offset[r] = min((u32)r, most) * shape.row_bytes;
#pragma unroll
        for (int i = 0; i < (PAIR ? 2 : 1); i++) from[i] = at.w[i] + (u64)at.row * shape.row_bytes + lane * 16;
      }
      u32 size = issue_step == last ? last_size : 16;
#pragma unroll
      for (int r = 0; r < R; r++)
        copy_async(to + r * (LANES * 16), from[PAIR ? r / EACH : 0] + offset[r % EACH], size);
#pragma unroll
      for (int i = 0; i < (PAIR ? 2 : 1); i++) from[i] += 512;
      if (issue_step == last) {
        issue_step = 0;
        issue_group += stride;
      } else {
        issue_step++;
      }
    }
    to = to == ring + (STAGES - 1) * STAGE_BYTES ? ring : to + STAGE_BYTES;
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) issue();
  u32 fp4_next[R];
  auto fetch_scales = [&](u32 group) {
    if (F == FP4 && group < end) {
      Place at = locate(group);
#pragma unroll
      for (int r = 0; r < R; r++)
        fp4_next[r] = fp4_scales(at.scale[PAIR ? r / EACH : 0], min(at.row + r % EACH, at.rows - 1), steps, lane);
    }
  };
  fetch_scales(begin);

  stage();

  u32 read = ring;
  for (u32 group = begin; group < end; group += stride) {
    Place at = locate(group);
    u32 fp4_now[R];
    if (F == FP4) {
#pragma unroll
      for (int r = 0; r < R; r++) fp4_now[r] = fp4_next[r];
      fetch_scales(group + stride);
    }
    // A step is 512 values: 4 blocks of 128, 16 runs of eight or 8 of sixteen to a block.
    u32 per_block = F == WIDE ? lane / 16 : F == FP8 ? lane / 8 : lane / 4;
    u32 block_at[2] = {at.blocks[0] + at.row / 128 * blocks + per_block,
                       at.blocks[PAIR ? 1 : 0] + at.row / 128 * blocks + per_block};
    u32 x = xs, x_scale_at = sx + 4 * per_block;
    float acc[R][M];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int m = 0; m < M; m++) acc[r][m] = 0.0f;
    for (u32 step = 0; step < steps; step++) {
      copy_wait<STAGES - 2>();
      uint4 w[R];
#pragma unroll
      for (int r = 0; r < R; r++) w[r] = shared_uint4(read + r * (LANES * 16));
      read = read == ring + (STAGES - 1) * STAGE_BYTES ? ring : read + STAGE_BYTES;
      issue();
      bool here = !(step == last && short_first);
      if (F == WIDE) {
        bool both = !(step == last && short_second);
        float low = e8m0_value(shared_byte(block_at[0]));
        float high = e8m0_value(shared_byte(block_at[0] + 2));
        block_at[0] += 4;
        step_product_wide<R, M>(w, x, here, both, low, high, acc);
      } else {
        float weight_scale[R], x_scale[M];
        if (F == FP8) {
          float first = e8m0_value(shared_byte(block_at[0]));
          float second = PAIR ? e8m0_value(shared_byte(block_at[1])) : first;
          block_at[0] += 4;
          block_at[1] += 4;
#pragma unroll
          for (int r = 0; r < R; r++) weight_scale[r] = r < EACH ? first : second;
        } else if (F == FP4) {
#pragma unroll
          for (int r = 0; r < R; r++) {
            weight_scale[r] = e8m0_value(fp4_now[r] & 255u);
            fp4_now[r] >>= 8;
          }
        }
        if (Coded<F>::YES) {
#pragma unroll
          for (int m = 0; m < M; m++) x_scale[m] = shared_float(x_scale_at + m * 4 * blocks);
          x_scale_at += F == FP8 ? 16 : 32;
        }
        step_product<F, R, M>(w, x, here, weight_scale, x_scale, acc);
      }
      x += M * QUADS * LANES * 16;
    }
    store(at, fold<R, M>(acc));
  }
}
