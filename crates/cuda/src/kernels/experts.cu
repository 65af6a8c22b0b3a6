// The experts of a layer: routed ones grouped by expert, the shared one beside them; no atomics.
//
// Pairs are (row, pick), numbered row * k + j; a row's picks ascend. Every block sorts the pairs by
// expert itself and cuts each expert's into items of at most M rows, which are the same everywhere.
// The shared expert's items come first. An item is cut into slices of weight rows, one to a block.
#include "common.cuh"
#include "quant.cuh"
#include "math.cuh"
#include "product.cuh"

#define PAIRS_MAX 512

struct ExpertParams {
  const u8 *w[2];        // routed experts' codes, [experts][rows][row bytes]: w1 and w3, or w2
  const u8 *scale[2];    // and scales
  const u8 *shared_w[2]; // the shared expert's
  const u8 *shared_scale[2];
  const u16 *x;          // of w1 and w3: [m, k]; of w2: [pairs + m, k]
  const int *picks;      // [m, per_row]
  const float *weights;  // [m, per_row]
  u16 *out;              // [pairs + m, rows]
  u32 k;                 // inputs
  u32 rows;              // of a matrix
  u32 m;
  u32 per_row;
  u32 x_stride;
  float limit;           // of the activation; infinite for none
  u32 x_bytes;           // of staged activations
};

// The sorted pairs of a pass.
struct Plan {
  u16 pair[PAIRS_MAX];  // sorted by expert, then number
  u16 first[PAIRS_MAX]; // of an item, into `pair`
  u16 expert[PAIRS_MAX];
  u32 items;
};

// Sorts; `size` is the most rows of an item. The whole block takes part.
DEV void make_plan(Plan &plan, const int *picks, u32 pairs, u32 size) {
  u16 *expert = plan.first; // until the items are cut
  for (u32 p = threadIdx.x; p < pairs; p += blockDim.x) expert[p] = (u16)picks[p];
  __syncthreads();
  for (u32 p = threadIdx.x; p < pairs; p += blockDim.x) {
    u32 mine = expert[p], rank = 0;
    for (u32 q = 0; q < pairs; q++) rank += expert[q] < mine || (expert[q] == mine && q < p);
    plan.pair[rank] = (u16)p;
    plan.expert[rank] = (u16)mine;
  }
  __syncthreads();
  if (warp_id() == 0) {
    u32 items = 0, lane = lane_id();
    u32 run = 0; // where the expert's pairs begin
    for (u32 base = 0; base < pairs; base += 32) {
      u32 i = base + lane;
      bool starts = i < pairs && (i == 0 || plan.expert[i] != plan.expert[i - 1]);
      u32 mask = __ballot_sync(FULL, starts);
      u32 before = mask & (FULL >> (31 - lane));
      u32 begin = before ? base + 31 - __clz(before) : run;
      bool cut = i < pairs && (i - begin) % size == 0;
      u32 cuts = __ballot_sync(FULL, cut);
      if (cut) plan.first[items + __popc(cuts & ((1u << lane) - 1u))] = (u16)i;
      items += __popc(cuts);
      run = mask ? base + 31 - __clz(mask) : run;
    }
    if (lane == 0) plan.items = items;
  }
  __syncthreads();
}

// Up to M rows that share their weights.
struct Item {
  u32 expert;
  u32 count;
  u32 pair[4]; // numbers: rows of `out`
};

DEV u32 pair_of(const Item &item, u32 i) {
  return i == 0 ? item.pair[0] : i == 1 ? item.pair[1] : i == 2 ? item.pair[2] : item.pair[3];
}

// One slice of an item. UP: rows of w1 and w3 are taken together and end in the activation. One row's
// activations are staged before the router is waited for: its kernel waited for them; what w2 takes is waited
// for once the ring is filling, and the router's picks are older then.
template <int F, int R, int M, int STAGES, bool UP, bool EARLY>
DEV void expert_slice(const ExpertParams &p, const Item &item, u32 slice, u32 slices, uint4 *shared) {
  const u32 warps = blockDim.x / 32, warp = warp_id(), lane = lane_id();
  const u32 per_step = F == FP8 ? 512 : 1024;
  RowShape shape;
  shape.k = p.k;
  shape.runs = F == FP8 ? p.k / 16 : p.k / 32;
  shape.steps = (p.k + per_step - 1) / per_step;
  shape.row_bytes = F == FP8 ? p.k : p.k / 2;
  float4 *xs = (float4 *)(shared + warps * (STAGES * R * LANES));
  float *sx = (float *)((u8 *)xs + p.x_bytes);
  u8 *sw = (u8 *)(sx + M * (p.k / 128));
  const u32 blocks = (p.rows + 127) / 128 * (p.k / 128), sw_at = shared_address(sw);
  const u32 each = UP ? R / 2 : R; // rows of a matrix in a group
  const u32 groups = (p.rows + each - 1) / each;
  u32 begin = (u32)((u64)groups * slice / slices), end = (u32)((u64)groups * (slice + 1) / slices);
  const u8 *const *w = F == FP4 ? p.w : p.shared_w;
  const u8 *const *scale = F == FP4 ? p.scale : p.shared_scale;
  const u32 pairs = p.m * p.per_row;
  auto activations = [&]() {
    stage_rows_by<F, M>(p.k, xs, sx, [&](u32 row, u32 at, float (&v)[Chunk<F, M>::N]) {
      if (row >= item.count) return;
      u32 pair = pair_of(item, row);
      u32 from = !UP ? pair : pair < pairs ? pair / p.per_row : pair - pairs;
      load_chunk(p.x + (u64)from * p.x_stride + at, v);
    });
  };
  if (EARLY) {
    activations();
    wait_for_inputs();
    launch_dependents();
  }
  u32 expert = EARLY && F == FP4 ? (u32)p.picks[item.pair[0]] : item.expert;
  u64 codes = F == FP4 ? (u64)expert * p.rows * shape.row_bytes : 0;
  u64 scales = F == FP4 ? (u64)expert * p.rows * LANES * shape.steps : 0;
  auto locate = [&](u32 group) {
    Place at = {{w[0] + codes, w[1] + codes}, {scale[0] + scales, scale[1] + scales}, {sw_at, sw_at + blocks},
                group * each, p.rows, 0};
    return at;
  };
  auto stage = [&]() {
    if (F == FP8)
      for (u32 i = 0; i < (UP ? 2 : 1); i++) copy_bytes(sw + i * blocks, scale[i], blocks);
    if (!UP) wait_for_inputs();
    if (!EARLY) activations();
    __syncthreads();
  };
  auto store = [&](const Place &at, float sum) {
    const int EACH = Folded<R, M>::EACH;
    u32 i = lane / EACH, m = i / R;
    u32 pair = pair_of(item, m);
    bool live = lane % EACH == 0 && m < item.count;
    if (!UP) {
      u32 row = at.row + i % R;
      if (live && row < at.rows) p.out[(u64)pair * p.rows + row] = bf16_down(sum);
      return;
    }
    // Gates are in the first half of the rows, ups in the second.
    float gate = bf16_round(sum);
    float up = __shfl_xor_sync(FULL, gate, R / 2 * EACH);
    u32 row = at.row + i % R;
    if (!live || i % R >= R / 2 || row >= at.rows) return;
    float weight = F == FP4 ? p.weights[pair] : 1.0f;
    float g = min_c(p.limit, gate);
    float u = min_c(p.limit, max_c(-p.limit, up));
    p.out[(u64)pair * p.rows + row] = bf16_down((silu_c(g) * u) * weight);
  };
  stream_rows<F, R, M, STAGES, UP>(shape, shared_address(shared + warp * (STAGES * R * LANES) + lane),
                                   shared_address(xs + lane), shared_address(sx), begin + warp, end, warps, locate,
                                   stage, store);
}

// The kernel for as many rows as the item has.
template <int F, int M, int STAGES, bool UP>
DEV void by_count(const ExpertParams &p, const Item &item, u32 slice, u32 slices, uint4 *shared) {
  if constexpr (M == 1) {
    expert_slice<F, 4, 1, STAGES, UP, UP>(p, item, slice, slices, shared);
  } else {
    if (item.count == 1)
      expert_slice<F, 4, 1, STAGES, UP, false>(p, item, slice, slices, shared);
    else if (item.count == 2)
      expert_slice<F, 4, 2, STAGES, UP, false>(p, item, slice, slices, shared);
    else
      expert_slice<F, 4, M, STAGES, UP, false>(p, item, slice, slices, shared);
  }
}

// Slices to an item, so that the last round of blocks is nearly full: rounds times the share of an
// item in one, and what a slice costs beside its bytes.
DEV u32 best_slices(u32 items) {
  u32 mine = lane_id() + 1;
  u32 rounds = (items * mine + gridDim.x - 1) / gridDim.x;
  float cost = (float)rounds * (1.0f / (float)mine + 0.009f);
  u64 key = ((u64)__float_as_uint(cost) << 32) | mine;
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    u64 other = __shfl_xor_sync(FULL, key, o);
    key = key < other ? key : other;
  }
  return (u32)key;
}

// All items; M is the most rows of one. An item of the shared expert has twice the bytes of a
// routed one: with several rows it is cut into twice the slices.
template <int M, int STAGES, bool UP>
DEV void experts_body(const ExpertParams &p) {
  extern __shared__ uint4 shared[];
  __shared__ Plan plan;
  // What follows w1 and w3 reads picks early, so the router must have ended.
  if (UP && M > 1) wait_for_inputs();
  if (!UP || M > 1) launch_dependents();
  u32 pairs = p.m * p.per_row, routed = pairs;
  if (M > 1) {
    make_plan(plan, p.picks, pairs, M);
    routed = plan.items;
  }
  u32 chunks = (p.m + M - 1) / M;
  u32 slices; // of an item
  u32 common; // units of the shared expert
  if (M == 1 && gridDim.x >= 4 * (routed + 1) && gridDim.x >= routed * (routed + 1)) {
    // A unit for every block. The shared expert has as many weights as another, and they decode faster.
    slices = (gridDim.x + routed) / (routed + 1);
    if (4 * (gridDim.x - routed * slices) < 3 * slices) slices = gridDim.x / (routed + 1);
    common = gridDim.x - routed * slices;
  } else {
    slices = best_slices(routed + 2 * chunks);
    common = chunks * 2 * slices;
  }
  for (u32 unit = blockIdx.x; unit < common + routed * slices; unit += gridDim.x) {
    Item item;
    if (unit < common) {
      u32 pieces = common / chunks, chunk = unit / pieces;
      item.expert = 0;
      item.count = min((u32)M, p.m - chunk * M);
#pragma unroll
      for (int i = 0; i < 4; i++) item.pair[i] = pairs + chunk * M + min((u32)i, item.count - 1);
      by_count<FP8, M, STAGES, UP>(p, item, unit % pieces, pieces, shared);
    } else {
      u32 number = (unit - common) / slices, slice = (unit - common) % slices;
      if (M == 1) {
        item.expert = UP ? 0 : (u32)p.picks[number];
        item.count = 1;
#pragma unroll
        for (int i = 0; i < 4; i++) item.pair[i] = number;
      } else {
        u32 first = plan.first[number];
        u32 end = number + 1 == routed ? pairs : plan.first[number + 1];
        item.expert = plan.expert[first];
        item.count = end - first;
#pragma unroll
        for (int i = 0; i < 4; i++) item.pair[i] = plan.pair[min(first + i, end - 1)];
      }
      by_count<FP4, M, STAGES, UP>(p, item, slice, slices, shared);
    }
    __syncthreads(); // until nobody reads what this slice staged
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) experts_up_m1(const __grid_constant__ ExpertParams p) {
  experts_body<1, 4, true>(p);
}
extern "C" __global__ void __launch_bounds__(512, 1) experts_down_m1(const __grid_constant__ ExpertParams p) {
  experts_body<1, 4, false>(p);
}
extern "C" __global__ void __launch_bounds__(512, 1) experts_up_m4(const __grid_constant__ ExpertParams p) {
  experts_body<4, 3, true>(p);
}
extern "C" __global__ void __launch_bounds__(512, 1) experts_down_m4(const __grid_constant__ ExpertParams p) {
  experts_body<4, 3, false>(p);
}

struct SumParams {
  const u16 *parts; // [pairs + m, dim]
  u16 *out;         // [m, dim]
  u32 m;
  u32 per_row;
  u32 dim;
};

// out[row] = bf16(sum of its picks, ascending, then the shared expert). Grid (dim / 512, m), 128
// threads of four values.
extern "C" __global__ void __launch_bounds__(128) experts_sum(const __grid_constant__ SumParams p) {
  wait_for_inputs();
  launch_dependents();
  u32 row = blockIdx.y, at = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (at >= p.dim) return;
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  auto add = [&](u64 part) {
    uint2 w = *(const uint2 *)(p.parts + part * p.dim + at);
    sum[0] = sum[0] + bf16_lo(w.x);
    sum[1] = sum[1] + bf16_hi(w.x);
    sum[2] = sum[2] + bf16_lo(w.y);
    sum[3] = sum[3] + bf16_hi(w.y);
  };
#pragma unroll 8
  for (u32 j = 0; j < p.per_row; j++) add((u64)row * p.per_row + j);
  add((u64)p.m * p.per_row + row);
  uint2 out = make_uint2(bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]));
  *(uint2 *)(p.out + (u64)row * p.dim + at) = out;
}
