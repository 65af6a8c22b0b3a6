// FP8 products of many activation rows: codes of the rows, tiles, the sums of shared tiles.
#include "common.cuh"
#include "quant.cuh"
#include "product.cuh"
#include "tile.cuh"

struct CodeParams {
  const u16 *x;
  u8 *codes;     // [m, k]
  float *scales; // [m, k / 128]
  u32 m;
  u32 k;
  u32 x_stride;
};

// Activations to E4M3 codes and scales: a warp takes a group of 128.
extern "C" __global__ void __launch_bounds__(256) tile_codes(const __grid_constant__ CodeParams p) {
  wait_for_inputs();
  launch_dependents();
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

TILES(tile_fp8, FP8)

// The sums of the blocks that shared a tile, in the order of the fold. Grid (columns / 256, m).
extern "C" __global__ void __launch_bounds__(256) tile_sum(const __grid_constant__ TileParams p) {
  wait_for_inputs();
  launch_dependents();
  u32 column = blockIdx.x * 256 + threadIdx.x, m = blockIdx.y;
  if (column >= p.columns) return;
  u32 number = 0;
  while (number + 1 < p.segments && column >= p.segment[number + 1].column) number++;
  const TileSegment &segment = p.segment[number];
  float v[32];
#pragma unroll
  for (int i = 0; i < 32; i++) v[i] = i < (int)p.splits ? p.partial[((u64)i * p.m + m) * p.columns + column] : 0.0f;
  for (u32 n = p.splits; n > 1; n /= 2)
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (i < (int)n / 2) v[i] = v[2 * i] + v[2 * i + 1];
  u64 to = (u64)m * segment.out_stride + column - segment.column;
  if (segment.out_fp32)
    ((float *)segment.out)[to] = v[0];
  else
    ((u16 *)segment.out)[to] = bf16_down(v[0]);
}
