// The experts of many rows: pairs of a row and a pick sorted by expert, then FP4 tiles of each expert's rows.
// What a tile's neighbours are changes no bit of it. No atomics.
#include "common.cuh"
#include "quant.cuh"
#include "math.cuh"
#include "product.cuh"
#include "tile.cuh"

#define ITEM_ROWS 16

struct PlanParams {
  const int *picks; // [pairs]
  uint4 *items;     // [1 + items]
  u32 *order;       // [pairs]
  u32 pairs;
  u32 experts;
};

// Pairs by expert, in their order, and the items of at most ITEM_ROWS of them: how many items, then of each the
// expert, its first pair in `order` and how many. One block, a thread to an expert.
extern "C" __global__ void __launch_bounds__(1024) experts_plan(const __grid_constant__ PlanParams p) {
  wait_for_inputs();
  launch_dependents();
  __shared__ u64 sums[32];
  const u32 e = threadIdx.x, lane = lane_id(), warp = warp_id();
  u32 mine = 0;
#pragma unroll 8
  for (u32 i = 0; i < p.pairs; i++) mine += (u32)p.picks[i] == e;
  // Pairs in the low half, items in the high half.
  const u64 own = (u64)((mine + ITEM_ROWS - 1) / ITEM_ROWS) << 32 | mine;
  u64 before = own;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    u64 other = __shfl_up_sync(FULL, before, o);
    if (lane >= o) before += other;
  }
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  before -= own;
  for (u32 i = 0; i < warp; i++) before += sums[i];
  const u32 first = (u32)before, item = (u32)(before >> 32), items = (u32)(own >> 32);
  for (u32 i = 0; i < items; i++)
    p.items[1 + item + i] = make_uint4(0, e, first + i * ITEM_ROWS, min((u32)ITEM_ROWS, mine - i * ITEM_ROWS));
  if (e + 1 == blockDim.x) p.items[0] = make_uint4(item + items, 0, 0, 0);
  u32 at = first;
#pragma unroll 8
  for (u32 i = 0; i < p.pairs; i++)
    if ((u32)p.picks[i] == e) p.order[at++] = i;
}

// FP4 products of each item's rows. Grid (splits · tiles of all segments, most items), 256 threads. Blocks that
// share a tile are neighbours: each takes lanes whose codes lie between those of the others, so that what
// memory gives at a time is used while the cache holds it.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2) experts_tile(const __grid_constant__ TileParams p) {
  wait_for_inputs();
  launch_dependents();
  if (blockIdx.y >= p.items[0].x) return;
  const uint4 item = p.items[1 + blockIdx.y];
  tile_body<FP4, 1, 8, 4, ITEMS, 1>(p, blockIdx.x / p.splits, 0, blockIdx.x % p.splits, item, TileKeys());
}

struct GateParams {
  const u16 *gates;     // [rows, 2 · inner]: w1's, w3's
  const float *weights; // [routed]
  u8 *codes;            // [rows, inner]
  float *scales;        // [rows, inner / 128]
  u32 rows;
  u32 routed;           // the shared expert's rows are behind
  u32 inner;
  float limit;          // infinite for none
};

// The activation of gates and ups, as codes for w2: a warp takes a group of 128.
extern "C" __global__ void __launch_bounds__(256) experts_gate(const __grid_constant__ GateParams p) {
  wait_for_inputs();
  launch_dependents();
  u32 blocks = p.inner / 128, group = blockIdx.x * 8 + warp_id(), lane = lane_id();
  if (group >= p.rows * blocks) return;
  u32 row = group / blocks, at = group % blocks * 128 + lane * 4;
  const u16 *from = p.gates + (u64)row * 2 * p.inner + at;
  uint2 gate = *(const uint2 *)from, up = *(const uint2 *)(from + p.inner);
  float g[4] = {bf16_lo(gate.x), bf16_hi(gate.x), bf16_lo(gate.y), bf16_hi(gate.y)};
  float u[4] = {bf16_lo(up.x), bf16_hi(up.x), bf16_lo(up.y), bf16_hi(up.y)};
  float weight = row < p.routed ? p.weights[row] : 1.0f, v[4], amax = 0.0f;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    float a = min_c(p.limit, g[e]), b = min_c(p.limit, max_c(-p.limit, u[e]));
    v[e] = bf16_round((silu_c(a) * b) * weight);
    amax = fmaxf(amax, fabsf(v[e]));
  }
  float scale = e4m3_scale(warp_max(amax));
  float inverse = 1.0f / scale;
#pragma unroll
  for (int e = 0; e < 4; e++) v[e] = e4m3_round(v[e], inverse);
  u32 code = (u32)e4m3x2_code(v[0], v[1]) | (u32)e4m3x2_code(v[2], v[3]) << 16;
  *(u32 *)(p.codes + (u64)row * p.inner + at) = code;
  if (lane == 0) p.scales[group] = scale;
}
