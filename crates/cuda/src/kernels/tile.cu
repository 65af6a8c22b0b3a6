// FP8 products of many activation rows in the canonical order.
//
// A thread holds 8 activations by 4 weight rows, so a canonical lane is one accumulator at a time:
// lanes are visited in bit-reversed order and finished neighbours merge like a binary counter.
// Levels 0 and 1 of the counter wait in registers, 2 to 4 in shared memory. Blocks may share the
// lanes of a tile (subtrees of the fold); their sums are added by tile_sum.
#include "common.cuh"
#include "quant.cuh"

#define TILE_M 128
#define TILE_N 64
#define THREADS 256
#define RUN 16

struct CodeParams {
  const u16 *x;
  u8 *codes;    // [m, k]
  float *scales; // [m, k / 128]
  u32 m;
  u32 k;
  u32 x_stride;
};

// Activations to E4M3 codes and scales: a warp takes a group of 128.
extern "C" __global__ void __launch_bounds__(256) tile_codes(const __grid_constant__ CodeParams p) {
  launch_dependents();
  wait_for_inputs();
  u32 blocks = p.k / 128, group = blockIdx.x * 8 + warp_id(), lane = lane_id();
  if (group >= p.m * blocks) return;
  u32 row = group / blocks, block = group % blocks;
  uint2 words = *(const uint2 *)(p.x + (u64)row * p.x_stride + block * 128 + lane * 4);
  float v[4] = {bf16_lo(words.x), bf16_hi(words.x), bf16_lo(words.y), bf16_hi(words.y)};
  float amax = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
  float scale = e4m3_scale(warp_max(amax));
  float inverse = 1.0f / scale;
#pragma unroll
  for (int e = 0; e < 4; e++) v[e] = e4m3_round(v[e], inverse);
  u32 code = (u32)e4m3x2_code(v[0], v[1]) | (u32)e4m3x2_code(v[2], v[3]) << 16;
  *(u32 *)(p.codes + (u64)row * p.k + block * 128 + lane * 4) = code;
  if (lane == 0) p.scales[group] = scale;
}

struct TileParams {
  const u8 *w;       // [rows, k]
  const u8 *scale;   // [rows / 128, k / 128]
  const u8 *x;       // codes
  const float *x_scale;
  float *partial;    // [splits, m, rows]
  void *out;
  u32 rows;
  u32 k;
  u32 m;
  u32 out_stride;
  u32 out_fp32;
  u32 splits;        // 1, 2, 4 or 8
};

#define PAIR 2 /* runs of a lane that are staged together, where it has as many */

// A staged run: values by k, then the scales of its products.
struct Run {
  float w[RUN][TILE_N];
  float x[RUN][TILE_M];
  float scale[TILE_M];
};

// Grid (rows / 64, m / 128, splits).
extern "C" __global__ void __launch_bounds__(THREADS, 1) tile_fp8(const __grid_constant__ TileParams p) {
  extern __shared__ float4 shared[];
  Run *runs = (Run *)shared;
  float *waiting = (float *)(runs + 2 * PAIR);
  const u32 tid = threadIdx.x, lane = lane_id(), warp = warp_id();
  // A warp covers 32 rows by 32 activations, so that its reads of a k are 128 bytes each.
  const u32 row_at = warp % 2 * 32 + lane % 8 * 4, m_at = warp / 2 * 32 + lane / 8 * 8;
  const u32 row0 = blockIdx.x * TILE_N, m0 = blockIdx.y * TILE_M;
  const u32 steps = p.k / 512, blocks = p.k / 128;
  const u32 count = LANES / p.splits, first = blockIdx.z * count;

  // Threads 0-63 bring weight rows, 64-191 activation rows.
  const bool brings_w = tid < TILE_N, brings_x = tid >= TILE_N && tid < TILE_N + TILE_M;
  const u32 mine = brings_w ? min(row0 + tid, p.rows - 1) : min(m0 + tid - TILE_N, p.m - 1);
  const u8 *from = (brings_w ? p.w : p.x) + (u64)mine * p.k;
  const float *x_scale = p.x_scale + (u64)(brings_x ? mine : 0) * blocks;
  const u8 *w_scale = p.scale + (u64)(row0 / 128) * blocks;
  uint4 words[PAIR] = {};
  float scales[PAIR] = {};
  auto fetch = [&](u32 visit, u32 step) {
#pragma unroll
    for (int i = 0; i < PAIR; i++) {
      // Where a lane has an odd number of runs, the last comes twice and is used once.
      u32 run = min(step + i, steps - 1) * LANES + (__brev(visit) >> 27);
      if (brings_w || brings_x) words[i] = __ldg((const uint4 *)(from + run * RUN));
      if (brings_x) scales[i] = e8m0_value(w_scale[run / 8]) * x_scale[run / 8];
    }
  };
  auto put = [&](Run &to, const uint4 &word, float scale) {
    if (brings_w || brings_x) {
      float *at = brings_w ? &to.w[0][tid] : &to.x[0][tid - TILE_N];
      const u32 stride = brings_w ? TILE_N : TILE_M;
      float v[4];
      e4m3x4(word.x, v);
#pragma unroll
      for (int e = 0; e < 4; e++) at[(0 + e) * stride] = v[e];
      e4m3x4(word.y, v);
#pragma unroll
      for (int e = 0; e < 4; e++) at[(4 + e) * stride] = v[e];
      e4m3x4(word.z, v);
#pragma unroll
      for (int e = 0; e < 4; e++) at[(8 + e) * stride] = v[e];
      e4m3x4(word.w, v);
#pragma unroll
      for (int e = 0; e < 4; e++) at[(12 + e) * stride] = v[e];
    }
    if (brings_x) to.scale[tid - TILE_N] = scale;
  };

  launch_dependents();
  wait_for_inputs();
  float acc[8][4], level0[8][4], level1[8][4];
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) acc[i][j] = level0[i][j] = level1[i][j] = 0.0f;
  auto put_all = [&](u32 buffer) {
#pragma unroll
    for (int i = 0; i < PAIR; i++) put(runs[buffer * PAIR + i], words[i], scales[i]);
  };
  fetch(first, 0);
  put_all(0);
  __syncthreads();
  u32 buffer = 0;
  for (u32 u = 0; u < count; u++) {
    for (u32 step = 0; step < steps; step += PAIR) {
      bool same = step + PAIR < steps, more = same || u + 1 < count;
      if (more) fetch(first + (same ? u : u + 1), same ? step + PAIR : 0);
      for (u32 half = 0; half < PAIR && step + half < steps; half++) {
        const Run &now = runs[buffer * PAIR + half];
        float s[8][4];
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) s[i][j] = 0.0f;
#pragma unroll
        for (int k = 0; k < RUN; k++) {
          float4 w = *(const float4 *)&now.w[k][row_at];
          float4 a = *(const float4 *)&now.x[k][m_at];
          float4 b = *(const float4 *)&now.x[k][m_at + 4];
          float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
          for (int i = 0; i < 8; i++) {
            s[i][0] = fmaf(w.x, x[i], s[i][0]);
            s[i][1] = fmaf(w.y, x[i], s[i][1]);
            s[i][2] = fmaf(w.z, x[i], s[i][2]);
            s[i][3] = fmaf(w.w, x[i], s[i][3]);
          }
        }
        float4 a = *(const float4 *)&now.scale[m_at];
        float4 b = *(const float4 *)&now.scale[m_at + 4];
        float sc[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) acc[i][j] = fmaf(s[i][j], sc[i], acc[i][j]);
      }
      buffer ^= 1;
      if (more) put_all(buffer);
      __syncthreads();
    }
    if (u + 1 == count) {
      // Every level waits: merged below.
    } else if (!(u & 1)) {
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          level0[i][j] = acc[i][j];
          acc[i][j] = 0.0f;
        }
      continue;
    }
    bool end = u + 1 == count;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (count > 1) acc[i][j] = level0[i][j] + acc[i][j];
    if (!(u & 2)) {
      if (end) break;
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          level1[i][j] = acc[i][j];
          acc[i][j] = 0.0f;
        }
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) acc[i][j] = level1[i][j] + acc[i][j];
    for (u32 level = 2; level < 5; level++) {
      float *at = waiting + (level - 2) * (32 * THREADS) + tid;
      if (u >> level & 1) {
#pragma unroll
        for (int e = 0; e < 32; e++) acc[e / 4][e % 4] = at[e * THREADS] + acc[e / 4][e % 4];
      } else {
        if (end) break;
#pragma unroll
        for (int e = 0; e < 32; e++) {
          at[e * THREADS] = acc[e / 4][e % 4];
          acc[e / 4][e % 4] = 0.0f;
        }
        break;
      }
    }
  }

  u32 row = row0 + row_at;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 m = m0 + m_at + i;
    if (m >= p.m) continue;
    if (p.splits > 1) {
      float *to = p.partial + ((u64)blockIdx.z * p.m + m) * p.rows + row;
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (row + j < p.rows) to[j] = acc[i][j];
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (row + j >= p.rows) continue;
        u64 to = (u64)m * p.out_stride + row + j;
        if (p.out_fp32)
          ((float *)p.out)[to] = acc[i][j];
        else
          ((u16 *)p.out)[to] = bf16_down(acc[i][j]);
      }
    }
  }
}

// The sums of the blocks that shared a tile, in the order of the fold. Grid (rows / 256, m).
extern "C" __global__ void __launch_bounds__(256) tile_sum(const __grid_constant__ TileParams p) {
  launch_dependents();
  wait_for_inputs();
  u32 row = blockIdx.x * 256 + threadIdx.x, m = blockIdx.y;
  if (row >= p.rows) return;
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = i < (int)p.splits ? p.partial[((u64)i * p.m + m) * p.rows + row] : 0.0f;
  for (u32 n = p.splits; n > 1; n /= 2)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (i < (int)n / 2) v[i] = v[2 * i] + v[2 * i + 1];
  u64 to = (u64)m * p.out_stride + row;
  if (p.out_fp32)
    ((float *)p.out)[to] = v[0];
  else
    ((u16 *)p.out)[to] = bf16_down(v[0]);
}
