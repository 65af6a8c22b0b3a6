// From the checkpoint's layout to the kernels'; nothing is rounded and no code changes its value.
#include "common.cuh"

struct RepackParams {
  const u8 *from;
  u8 *to;
  u64 count;     // items of the kernel
  u32 runs;      // of a row
  u32 steps;     // of a row
};

// Words of eight E2M1 codes: in each half, four codes as s at 15, 12, 14, 13 and the rest at 11..9,
// 8..6, 5..3, 2..0; even codes in the low half.
extern "C" __global__ void __launch_bounds__(256) repack_fp4(const __grid_constant__ RepackParams p) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (u64)gridDim.x * blockDim.x) {
    u32 word = ((const u32 *)p.from)[i];
    u32 out = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      u32 code = (word >> (4 * e)) & 15u;
      int pair = e / 2;
      u32 sign = (code >> 3) << (pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13);
      u32 rest = (code & 7u) << (9 - 3 * pair);
      out |= (sign | rest) << (e % 2 ? 16 : 0);
    }
    ((u32 *)p.to)[i] = out;
  }
}

// FP4 scales [row][run] to [row][lane][step]; 1 where a lane has no run.
extern "C" __global__ void __launch_bounds__(256) repack_fp4_scales(const __grid_constant__ RepackParams p) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (u64)gridDim.x * blockDim.x) {
    u32 step = (u32)(i % p.steps), lane = (u32)(i / p.steps % LANES);
    u64 row = i / ((u64)p.steps * LANES);
    u32 run = step * LANES + lane;
    p.to[i] = run < p.runs ? p.from[row * p.runs + run] : (u8)127;
  }
}

// Runs of eight FP8 codes to pairs: a lane finds its runs of steps 2s and 2s + 1 side by side; rows
// are padded with zero codes to whole pairs of steps. Items are eight bytes of the result.
extern "C" __global__ void __launch_bounds__(256) repack_wide(const __grid_constant__ RepackParams p) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (u64)gridDim.x * blockDim.x) {
    u64 row = i / ((u64)p.steps * 64);
    u32 at = (u32)(i % ((u64)p.steps * 64));
    u32 run = at / 64 * 64 + at % 2 * 32 + at % 64 / 2;
    uint2 codes = make_uint2(0, 0);
    if (run < p.runs) codes = ((const uint2 *)p.from)[row * p.runs + run];
    ((uint2 *)p.to)[i] = codes;
  }
}

struct FillParams {
  u32 *to;
  u64 count; // words
  u32 seed;
  u32 kind; // 0 any bits, 1 E4M3 codes, 2 E8M0 scales about 2^-8, 3 bf16 in (-2, 2), 4 fp32 in (-2, 2)
};

// Random weights for measurements.
extern "C" __global__ void __launch_bounds__(256) fill_random(const __grid_constant__ FillParams p) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += (u64)gridDim.x * blockDim.x) {
    u32 x = (u32)i * 0x9e3779b1u + p.seed + (u32)(i >> 32) * 0x85ebca6bu;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    if (p.kind == 1) x &= 0xf7f7f7f7u;
    if (p.kind == 2) x = 0x77777777u + (x & 0x03030303u);
    if (p.kind == 3) x = (x & 0x83ff83ffu) | 0x3c003c00u;
    if (p.kind == 4) x = (x & 0x81ffffffu) | 0x3e000000u;
    p.to[i] = x;
  }
}

struct CopyParams {
  const uint4 *from;
  uint4 *to;
  u64 count;
};

// A plain copy, to measure what the memory gives: a block takes 4 x 512 neighbouring 16 bytes.
extern "C" __global__ void __launch_bounds__(512) copy_all(const __grid_constant__ CopyParams p) {
  u64 i = (u64)blockIdx.x * 2048 + threadIdx.x;
  uint4 v[4];
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (i + j * 512 < p.count) v[j] = __ldcs(p.from + i + j * 512);
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (i + j * 512 < p.count) __stcs(p.to + i + j * 512, v[j]);
}
