// Attention of many rows: all heads of a row share its keys. The bits are those of attend.cu.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "product.cuh"
#include "state.cuh"
#include "keys.cuh"
#include "tile.cuh"

#define KEY_TILE 256
#define HEAD_TILE 64

struct ManyScores {
    KeyList keys;
    const u16* q;
    int heads;
    int width;
    float scale;
    float* scores;
    int scores_stride;
    Spread spread;
};

// scores[m, heads, list]: tiles of 64 heads by 256 keys. With spread.mix, one more block of a row says how its
// streams are spread. Grid (tiles of the list [+ 1], heads / 64, m); blocks past a row's list do nothing.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1) many_scores(const __grid_constant__ ManyScores a) {
    wait_for_inputs();
    launch_dependents();
    if (a.spread.mix && blockIdx.x + 1 == gridDim.x) {
        if (blockIdx.y == 0 && threadIdx.x < 32) spread_row(a.spread, blockIdx.z);
        return;
    }
    __shared__ const u8* places[KEY_TILE];
    List list = list_of(a.keys, blockIdx.z);
    int first = blockIdx.x * KEY_TILE;
    if (first >= list.length) return;
    const u16* q = a.q + (u64)blockIdx.z * a.heads * a.width;
    int mine = first + threadIdx.x;
    // What is absent is computed from something and read by nobody.
    places[threadIdx.x] = (const u8*)(present(list, mine) ? entry(list, mine, a.width) : q);
    __syncthreads();
    TileParams p;
    p.segment[0].w = 0;
    p.segment[0].scale = 0;
    p.segment[0].out = a.scores + (u64)blockIdx.z * a.heads * a.scores_stride;
    p.segment[0].rows = list.length;
    p.segment[0].first = 0;
    p.segment[0].column = 0;
    p.segment[0].out_stride = a.scores_stride;
    p.segment[0].out_fp32 = 1;
    p.segment[0].x_offset = 0;
    p.x = (const u8*)q;
    p.x_scale = 0;
    p.partial = 0;
    p.items = 0;
    p.order = 0;
    p.expert_codes = p.expert_scales = 0;
    p.segments = 1;
    p.k = a.width;
    p.m = a.heads;
    p.x_stride = 2 * a.width;
    p.splits = 1;
    p.columns = 4;
    p.per_row = 1;
    TileKeys keys = {places, a.scale};
    tile_body<BF16, 2, 4, 8, KEYS, 2>(p, blockIdx.x, blockIdx.y * HEAD_TILE, 0, make_uint4(0, 0, 0, 0), keys);
}

struct ManyValues {
    KeyList keys;
    const float* scores;
    int scores_stride;
    const float* sink;
    int heads;
    int width;
    const float* table;
    int rope;
    u16* out;
};

#define WIDE_SLICE 256 /* dimensions of a block of threads: eight of a lane */
#define EACH 8         /* heads of a warp */
#define STRIDE 68      /* floats from one head's entries to the next's, or one entry's heads */

// out[m, heads, width] from the scores: online softmax over blocks of 64 entries in list order, as attend_values.
// A warp has eight heads, a lane eight of 256 dimensions. Grid (width / 256, heads / 64, m), 256 threads.
extern "C" __global__ void __launch_bounds__(256, 2) many_values(const __grid_constant__ ManyValues a) {
    wait_for_inputs();
    launch_dependents();
    extern __shared__ float4 many_shared[];
    __shared__ const u16* places[2][BLOCK];
    List list = list_of(a.keys, blockIdx.z);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int head = blockIdx.y * HEAD_TILE + warp * EACH, from = blockIdx.x * WIDE_SLICE, mine = from + 8 * lane;
    // Values of two blocks; then a warp's own: probabilities by entry, and by head as they are before rounding.
    uint4* values = (uint4*)many_shared;
    float* weights = (float*)(many_shared + 2 * BLOCK * (WIDE_SLICE / 8)) + warp * (BLOCK * EACH + EACH * STRIDE);
    float* exact = weights + BLOCK * EACH;
    const float* scores = a.scores + (u64)blockIdx.z * a.heads * a.scores_stride;
    auto find = [&](int start) {
        int i = start + threadIdx.x;
        if (threadIdx.x < BLOCK)
            places[start / BLOCK & 1][threadIdx.x] =
                i < list.length && present(list, i) ? entry(list, i, a.width) : 0;
    };
    // A warp brings every eighth entry, a lane eight of its values.
    auto bring = [&](int start) {
        u32 buffer = start / BLOCK & 1;
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) {
            const u16* place = places[buffer][n * 8 + warp];
            if (place && mine < a.width)
                copy_async(shared_address(values + (buffer * BLOCK + n * 8 + warp) * 32 + lane), place + mine, 16u);
        }
        copy_commit();
    };
    float score[EACH][2];
    auto fetch = [&](int start) {
#pragma unroll
        for (int h = 0; h < EACH; h++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int i = start + 32 * half + lane;
                bool here = head + h < a.heads && i < list.length && present(list, i);
                score[h][half] = here ? scores[(u64)(head + h) * a.scores_stride + i] : -INF_F;
            }
    };
    float acc[EACH][8], largest[EACH], sum = 0.0f;
#pragma unroll
    for (int h = 0; h < EACH; h++) {
        largest[h] = -INF_F;
#pragma unroll
        for (int d = 0; d < 8; d++) acc[h][d] = 0.0f;
    }
    find(0);
    find(BLOCK);
    fetch(0);
    __syncthreads();
    bring(0);
    for (int start = 0; start < list.length; start += BLOCK) {
        copy_wait<0>();
        __syncthreads();
        // Everybody is done with the block before: its places and values make room.
        if (start + BLOCK < list.length) bring(start + BLOCK);
        float alpha[EACH];
#pragma unroll
        for (int h = 0; h < EACH; h++) {
            float now = max_c(score[h][1], max_c(score[h][0], -INF_F));
#pragma unroll
            for (int o = 16; o > 0; o >>= 1) now = max_c(__shfl_xor_sync(FULL, now, o), now);
            now = max_c(now, largest[h]);
            alpha[h] = exp_c(largest[h] - now);
            largest[h] = now;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float e = exp_c(score[h][half] - now);
                exact[h * STRIDE + 32 * half + lane] = e;
                weights[(32 * half + lane) * EACH + h] = bf16_round(e);
            }
        }
        __syncwarp();
        if (start + BLOCK < list.length) fetch(start + BLOCK);
        // Present entries of the block: [start, window_end) and [slots, end).
        int end = start + BLOCK < list.length ? start + BLOCK : list.length;
        int slots = list.window_size > start ? list.window_size : start;
        slots = slots < end ? slots : end;
        int window_end = list.present > start ? list.present : start;
        window_end = window_end < slots ? window_end : slots;
        // The denominators: a lane has a head.
        float own = 1.0f;
#pragma unroll
        for (int h = 0; h < EACH; h++) own = lane % EACH == h ? alpha[h] : own;
        sum = sum * own;
        const float* mine_exact = exact + lane % EACH * STRIDE;
#pragma unroll 8
        for (int i = 0; i < window_end - start; i++) sum = sum + mine_exact[i];
#pragma unroll 8
        for (int i = slots - start; i < end - start; i++) sum = sum + mine_exact[i];
#pragma unroll
        for (int h = 0; h < EACH; h++)
#pragma unroll
            for (int d = 0; d < 8; d++) acc[h][d] = acc[h][d] * alpha[h];
        const uint4* block = values + (start / BLOCK & 1) * BLOCK * 32 + lane;
        auto add = [&](int begin, int stop) {
#pragma unroll 4
            for (int i = begin; i < stop; i++) {
                uint4 v = block[i * 32];
                float4 low = *(const float4*)(weights + i * EACH), high = *(const float4*)(weights + i * EACH + 4);
                float w[EACH] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                float x[8] = {bf16_lo(v.x), bf16_hi(v.x), bf16_lo(v.y), bf16_hi(v.y),
                              bf16_lo(v.z), bf16_hi(v.z), bf16_lo(v.w), bf16_hi(v.w)};
#pragma unroll
                for (int h = 0; h < EACH; h++)
#pragma unroll
                    for (int d = 0; d < 8; d++) acc[h][d] = fmaf(w[h], x[d], acc[h][d]);
            }
        };
        add(0, window_end - start);
        add(slots - start, end - start);
        __syncthreads();
        find(start + 2 * BLOCK);
    }
    float totals[EACH];
#pragma unroll
    for (int h = 0; h < EACH; h++) totals[h] = __shfl_sync(FULL, sum, h);
    if (mine >= a.width) return;
    const float* cos = a.table + (u64)a.keys.rows[blockIdx.z].pos * a.rope;
    const int turned = (mine - (a.width - a.rope)) / 2;
#pragma unroll 1
    for (int h = 0; h < EACH && head + h < a.heads; h++) {
        float high = 0.0f, total = 0.0f, out[8];
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            if (n != h) continue;
            high = largest[n];
            total = totals[n];
#pragma unroll
            for (int d = 0; d < 8; d++) out[d] = acc[n][d];
        }
        total = total + exp_c(a.sink[head + h] - high);
#pragma unroll
        for (int d = 0; d < 8; d++) out[d] = bf16_round(out[d] / total);
        if (mine >= a.width - a.rope) {
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                float c = cos[turned + pair], s = cos[a.rope / 2 + turned + pair] * -1.0f;
                float x = out[2 * pair], y = out[2 * pair + 1];
                out[2 * pair] = x * c - y * s;
                out[2 * pair + 1] = x * s + y * c;
            }
        }
        uint4 to = make_uint4(bf16_pair(out[0], out[1]), bf16_pair(out[2], out[3]), bf16_pair(out[4], out[5]),
                              bf16_pair(out[6], out[7]));
        *(uint4*)(a.out + ((u64)blockIdx.z * a.heads + head + h) * a.width + mine) = to;
    }
}
