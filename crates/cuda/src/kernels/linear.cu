// Products of few activation rows in the canonical order: one warp takes R weight rows at a time
// and streams them through a ring of its own; activations are quantized and staged by every block.
#include "common.cuh"
#include "quant.cuh"
#include "product.cuh"

#define SEGMENTS 8

// One matrix of a launch.
struct Segment {
  const u8 *w;
  const u8 *scale;
  void *out;
  u32 rows;
  u32 first;      // the first row group
  u32 out_stride; // in elements
  u32 out_fp32;
  u32 x_offset;   // in elements
  u32 scale_at;   // of the scales in shared memory
};

struct LinearParams {
  Segment segment[SEGMENTS];
  const u16 *x;
  u32 segments;
  u32 groups;
  u32 k;
  u32 m;
  u32 x_stride;
  u32 runs;
  u32 steps;
  u32 row_bytes;
  u32 scale_bytes; // of all FP8 scales in shared memory
  u32 split;       // blockIdx.y is the segment, each with its own part of x
};

template <int F, int R, int M, int STAGES>
DEV void linear_body(const LinearParams &p) {
  extern __shared__ uint4 shared[];
  const int QUADS = Values<F>::N / 4;
  const u32 warps = blockDim.x / 32, warp = warp_id(), lane = lane_id();
  float4 *xs = (float4 *)(shared + warps * (STAGES * R * LANES));
  float *sx = (float *)(xs + p.steps * M * QUADS * LANES);
  u8 *sw = (u8 *)(sx + (Coded<F>::YES ? M * (p.k / 128) : 0));
  const u32 sw_at = shared_address(sw);

  u32 first = p.split ? blockIdx.y : 0;
  u32 end = p.split ? (p.segment[first].rows + R - 1) / R : p.groups;
  RowShape shape = {p.k, p.runs, p.steps, p.row_bytes};
  const bool several = p.segments > 1 && !p.split;
  const u8 *only_w = p.segment[first].w, *only_scale = p.segment[first].scale;
  const u32 only_rows = p.segment[first].rows;
  auto locate = [&](u32 group) {
    if (!several) {
      Place at = {{only_w, 0}, {only_scale, 0}, {sw_at, sw_at}, group * R, only_rows, first};
      return at;
    }
    u32 i = 0;
    while (i + 1 < p.segments && group >= p.segment[i + 1].first) i++;
    const Segment &s = p.segment[i];
    u32 blocks = sw_at + s.scale_at;
    Place at = {{s.w, 0}, {s.scale, 0}, {blocks, blocks}, (group - s.first) * R, s.rows, i};
    return at;
  };
  auto stage = [&]() {
    if (F == FP8 || F == WIDE) {
      for (u32 i = first; i < (p.split ? first + 1 : p.segments); i++) {
        const Segment &s = p.segment[i];
        copy_bytes(sw + s.scale_at, s.scale, (s.rows + 127) / 128 * (p.k / 128));
      }
    }
    launch_dependents();
    wait_for_inputs();
    stage_rows<F, M>(p.x + p.segment[first].x_offset, p.x_stride, p.k, p.m, xs, sx);
    __syncthreads();
  };
  auto store = [&](const Place &at, float sum) {
    const int EACH = Folded<R, M>::EACH;
    u32 i = lane / EACH, row = at.row + i % R, m = i / R;
    if (lane % EACH != 0 || m >= p.m || row >= at.rows) return;
    const Segment &s = p.segment[at.id];
    u64 to = (u64)m * s.out_stride + row;
    if (s.out_fp32)
      ((float *)s.out)[to] = sum;
    else
      ((u16 *)s.out)[to] = bf16_down(sum);
  };
  stream_rows<F, R, M, STAGES, false>(shape, shared_address(shared + warp * (STAGES * R * LANES) + lane),
                                      shared_address(xs + lane), shared_address(sx), warp * gridDim.x + blockIdx.x,
                                      end, gridDim.x * warps, locate, stage, store);
}

#define LINEAR(NAME, F, R, M, STAGES, THREADS, BLOCKS)                                      \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                             \
      NAME(const __grid_constant__ LinearParams p) {                                        \
    linear_body<F, R, M, STAGES>(p);                                                        \
  }

#define LINEAR_ALL(NAME, F, ONE)           \
  LINEAR(NAME##_r1_m1, F, 1, 1, 4, ONE, 2) \
  LINEAR(NAME##_r2_m1_deep, F, 2, 1, 6, ONE, 2) \
  LINEAR(NAME##_r2_m1, F, 2, 1, 4, ONE, 2) \
  LINEAR(NAME##_r1_m2, F, 1, 2, 3, 512, 1) \
  LINEAR(NAME##_r1_m4, F, 1, 4, 3, 512, 1) \
  LINEAR(NAME##_r1_m8, F, 1, 8, 3, 512, 1) \
  LINEAR(NAME##_r4_m2, F, 4, 2, 3, 512, 1) \
  LINEAR(NAME##_r4_m4, F, 4, 4, 3, 512, 1) \
  LINEAR(NAME##_r4_m6, F, 4, 6, 3, 512, 1) \
  LINEAR(NAME##_r4_m8, F, 4, 8, 3, 512, 1)

// One-row kernels leave registers for the next kernel's blocks beside them.
LINEAR_ALL(linear_fp8, FP8, 512)
LINEAR_ALL(linear_fp4, FP4, 384)
LINEAR_ALL(linear_wide, WIDE, 512)
LINEAR_ALL(linear_bf16, BF16, 512)
LINEAR_ALL(linear_f32, F32, 512)

// ---- few rows of many inputs ----

struct SplitParams {
  const u8 *w;
  const u16 *x;
  void *out;
  u32 rows;
  u32 k;
  u32 x_stride;
  u32 out_stride;
  u32 out_fp32;
};

// Steps of a warp whose weights are fetched before the activations are waited for.
#define SPLIT_AHEAD 4

// One block takes one weight row and one activation row; warps share the steps, then the first
// warp adds them up per lane in their order.
template <int F>
DEV void split_body(const SplitParams &p) {
  extern __shared__ float sums[];
  const u32 N = Values<F>::N;
  u32 runs = p.k / N, steps = (runs + 31) / 32;
  u32 lane = lane_id(), warps = blockDim.x / 32;
  u32 row = blockIdx.x, m = blockIdx.y;
  const uint4 *w = (const uint4 *)p.w + (u64)row * runs;
  uint4 ahead[SPLIT_AHEAD];
#pragma unroll
  for (u32 n = 0; n < SPLIT_AHEAD; n++) {
    u32 run = (warp_id() + n * warps) * LANES + lane;
    ahead[n] = run < runs ? __ldg(w + run) : make_uint4(0, 0, 0, 0);
  }
  launch_dependents();
  wait_for_inputs();
  auto take = [&](u32 step, uint4 word) {
    u32 run = step * LANES + lane;
    float s = 0.0f;
    if (run < runs) {
      const u16 *x = p.x + (u64)m * p.x_stride + run * N;
#pragma unroll
      for (int q = 0; q < (int)N / 4; q++) {
        float v[4];
        decode<F>(word, q, v);
        uint2 pair = *(const uint2 *)(x + q * 4);
        s = fmaf(v[0], bf16_lo(pair.x), s);
        s = fmaf(v[1], bf16_hi(pair.x), s);
        s = fmaf(v[2], bf16_lo(pair.y), s);
        s = fmaf(v[3], bf16_hi(pair.y), s);
      }
    }
    sums[step * LANES + lane] = s;
  };
#pragma unroll
  for (u32 n = 0; n < SPLIT_AHEAD; n++) {
    u32 step = warp_id() + n * warps;
    if (step < steps) take(step, ahead[n]);
  }
  for (u32 step = warp_id() + SPLIT_AHEAD * warps; step < steps; step += warps) {
    u32 run = step * LANES + lane;
    take(step, run < runs ? __ldg(w + run) : make_uint4(0, 0, 0, 0));
  }
  __syncthreads();
  if (warp_id() != 0) return;
  float acc = 0.0f;
  for (u32 step = 0; step < steps; step++)
    if (step * LANES + lane < runs) acc = sums[step * LANES + lane] + acc;
  acc = butterfly(acc);
  if (lane == 0) {
    u64 at = (u64)m * p.out_stride + row;
    if (p.out_fp32)
      ((float *)p.out)[at] = acc;
    else
      ((u16 *)p.out)[at] = bf16_down(acc);
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1) split_bf16(const __grid_constant__ SplitParams p) {
  split_body<BF16>(p);
}

extern "C" __global__ void __launch_bounds__(1024, 1) split_f32(const __grid_constant__ SplitParams p) {
  split_body<F32>(p);
}
