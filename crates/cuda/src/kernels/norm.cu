// Root-mean-square norms of rows, and keys: normed, rotated, quantized, stored.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "state.cuh"

#define NORM_THREADS 256
#define NORM_RUNS_MAX 4096

// The factor of a row of `width` bf16 values (a multiple of 4), of which a thread gave its first run; every thread
// of the block gets it.
DEV float rms_factor(const u16* x, uint2 first, int width, float eps, float* runs, float* factor) {
    for (int run = threadIdx.x; run < width / 4; run += blockDim.x) {
        uint2 v = run == (int)threadIdx.x ? first : ((const uint2*)x)[run];
        runs[run] = squares4(bf16_lo(v.x), bf16_hi(v.x), bf16_lo(v.y), bf16_hi(v.y));
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        float sum = fold_runs(runs, width / 4);
        if (threadIdx.x == 0) *factor = inverse_sqrt((sum / (float)width) + eps);
    }
    __syncthreads();
    return *factor;
}

// A thread's first run, or zeros.
DEV uint2 first_run(const u16* x, int width) {
    return (int)threadIdx.x < width / 4 ? ((const uint2*)x)[threadIdx.x] : make_uint2(0, 0);
}

DEV float4 first_weights(const float* weight, int width) {
    return (int)threadIdx.x < width / 4 ? ((const float4*)weight)[threadIdx.x] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

struct RmsNorm {
    const u16* x;
    int stride;
    const float* weight;
    int width;
    float eps;
    u16* out;
};

// out[m, width] = bf16((x · r) · weight). Row m of x starts at m · stride. Grid (m). Waits for x.
DEV void norm_row(const RmsNorm& a) {
    __shared__ float runs[NORM_RUNS_MAX];
    __shared__ float factor;
    const u16* row = a.x + (u64)blockIdx.x * a.stride;
    float4 weights = first_weights(a.weight, a.width);
    wait_for_inputs();
    launch_dependents();
    uint2 first = first_run(row, a.width);
    float r = rms_factor(row, first, a.width, a.eps, runs, &factor);
    uint2* to = (uint2*)(a.out + (u64)blockIdx.x * a.width);
    for (int run = threadIdx.x; run < a.width / 4; run += blockDim.x) {
        bool kept = run == (int)threadIdx.x;
        uint2 v = kept ? first : ((const uint2*)row)[run];
        float4 w = kept ? weights : ((const float4*)a.weight)[run];
        to[run] = make_uint2(bf16_pair(bf16_lo(v.x) * r * w.x, bf16_hi(v.x) * r * w.y),
                             bf16_pair(bf16_lo(v.y) * r * w.z, bf16_hi(v.y) * r * w.w));
    }
}

// Rotates the pair (a, b) of a row; `back` undoes it. table: [positions][cos of pairs, sin of pairs].
DEV void rotate_pair(float& a, float& b, float c, float s) {
    float x = a * c - b * s;
    float y = a * s + b * c;
    a = bf16_round(x);
    b = bf16_round(y);
}

struct StoreKeys {
    const u16* x;
    int stride;
    const float* weight;
    int width;
    float eps;
    const float* table;
    int rope;
    const Row* rows;
    const LayerState* states;
    int places;
    int place;
    u16* out;
};

// Keys of a layer: norm, rotation of the last `rope` values, E4M3 in groups of 64 of the others. The row
// goes to out[m, width] (unless null) and into its session's window. Grid (m), width / 4 threads.
// Waits for x; rows, states and rotations are older.
DEV void key_row(const StoreKeys& a) {
    __shared__ float runs[256];
    __shared__ float factor;
    const u16* from = a.x + (u64)blockIdx.x * a.stride;
    Row row = a.rows[blockIdx.x];
    int at = 4 * threadIdx.x, pair = (at - (a.width - a.rope)) / 2;
    bool turned = at < a.width && at >= a.width - a.rope;
    float c[2] = {0.0f, 0.0f}, s[2] = {0.0f, 0.0f};
    if (turned) {
        const float* cos = a.table + (u64)row.pos * a.rope;
        const float* sin = cos + a.rope / 2;
#pragma unroll
        for (int i = 0; i < 2; i++) c[i] = cos[pair + i], s[i] = sin[pair + i];
    }
    float4 weights = first_weights(a.weight, a.width);
    u16* window = 0;
    if (a.states) {
        LayerState state = a.states[(u64)row.slot * a.places + a.place];
        if (state.window) window = state.window + (u64)(row.pos % state.window_rows) * a.width;
    }
    wait_for_inputs();
    launch_dependents();
    uint2 pairs = first_run(from, a.width);
    float r = rms_factor(from, pairs, a.width, a.eps, runs, &factor);
    // Whole warps.
    if ((int)threadIdx.x >= a.width / 4) return;
    float v[4] = {bf16_lo(pairs.x), bf16_hi(pairs.x), bf16_lo(pairs.y), bf16_hi(pairs.y)};
    float w[4] = {weights.x, weights.y, weights.z, weights.w};
    float amax = E4M3_AMAX_MIN;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = bf16_round(v[i] * r * w[i]);
        amax = max_c(fabsf(v[i]), amax);
    }
    for (int o = 8; o > 0; o >>= 1) amax = max_c(__shfl_xor_sync(FULL, amax, o), amax);
    if (turned) {
        rotate_pair(v[0], v[1], c[0], s[0]);
        rotate_pair(v[2], v[3], c[1], s[1]);
    } else {
        float scale = e4m3_scale(amax);
        float inverse = 1.0f / scale;
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = bf16_round(e4m3_round(v[i], inverse) * scale);
    }
    uint2 result = make_uint2(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]));
    if (a.out) ((uint2*)(a.out + (u64)blockIdx.x * a.width))[threadIdx.x] = result;
    if (window) ((uint2*)window)[threadIdx.x] = result;
}

extern "C" __global__ void rms_norm(const RmsNorm a) {
    norm_row(a);
}

extern "C" __global__ void store_keys(const StoreKeys a) {
    key_row(a);
}

struct NormKeys {
    RmsNorm norm;
    StoreKeys keys;
};

// Both, of the same rows. Grid (m, 2), 256 threads.
extern "C" __global__ void norm_keys(const NormKeys a) {
    if (blockIdx.y == 0)
        norm_row(a.norm);
    else
        key_row(a.keys);
}
