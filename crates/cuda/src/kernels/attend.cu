// Sparse attention over a list of keys, which are the values too: the window's entries, oldest first, padded
// with absent ones to the window's size; compressed slots ascending; the rows of a draft block. The list is
// cut into blocks of 64; absent entries take no part in anything.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "product.cuh"
#include "state.cuh"
#include "keys.cuh"

#define HEADS 4
#define WARPS 8 /* of a block that scores */
#define AHEAD 4
#define SLICE 64
#define HALF 192 /* entries of a chunk that are waited for first */
#define CHUNK_MAX 640 /* entries of a list in shared memory at a time */

struct AttendScores {
    KeyList keys;
    const u16* q;
    int heads;
    int width;
    float scale;
    float* scores;
    int scores_stride;
    Spread spread;
};

// scores[m, heads, list]: dot(k, q) · scale, canonical with runs of eight. Four heads' queries live in a
// warp's registers while its keys pass by. With spread.mix, one more block of a row says how its streams are
// spread. Grid (blocks of the list [+ 1], heads / 4, m); blocks past a row's list do nothing. Width at most 512.
// What spreads the streams and the window's keys are read before the queries are waited for: the kernel in front
// waited for them.
extern "C" __global__ void attend_scores(const AttendScores a) {
    if (a.spread.mix && blockIdx.x + 1 == gridDim.x) {
        if (blockIdx.y == 0 && threadIdx.x < 32) spread_row(a.spread, blockIdx.z);
        wait_for_inputs();
        launch_dependents();
        return;
    }
    List list = list_of(a.keys, blockIdx.z);
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int start = blockIdx.x * BLOCK;
    bool early = start + BLOCK <= list.window_size;
    // A warp has every eighth entry of the block, AHEAD of them in flight; lane n finds the n-th.
    int mine = start + lane * WARPS + warp;
    const u16* place = 0;
    uint4 key[AHEAD][2];
    auto find = [&]() {
        if (lane < BLOCK / WARPS && present(list, mine)) place = entry(list, mine, a.width);
    };
    auto fetch = [&](int round) {
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            const uint4* from = (const uint4*)__shfl_sync(FULL, (u64)place, round + n);
            key[n][0] = key[n][1] = make_uint4(0, 0, 0, 0);
            if (from) {
                if (lane < a.width / 8) key[n][0] = from[lane];
                if (32 + lane < a.width / 8) key[n][1] = from[32 + lane];
            }
        }
    };
    if (early) {
        find();
        fetch(0);
    }
    wait_for_inputs();
    launch_dependents();
    if (start >= list.length) return;
    if (!early) {
        find();
        fetch(0);
    }
    float q[HEADS][16];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        int head = blockIdx.y * HEADS + h;
        const uint4* from = (const uint4*)(a.q + ((u64)blockIdx.z * a.heads + (head < a.heads ? head : 0)) * a.width);
#pragma unroll
        for (int step = 0; step < 2; step++) {
            int run = 32 * step + lane;
            uint4 v = run < a.width / 8 ? from[run] : make_uint4(0, 0, 0, 0);
            float* to = &q[h][8 * step];
            to[0] = bf16_lo(v.x), to[1] = bf16_hi(v.x), to[2] = bf16_lo(v.y), to[3] = bf16_hi(v.y);
            to[4] = bf16_lo(v.z), to[5] = bf16_hi(v.z), to[6] = bf16_lo(v.w), to[7] = bf16_hi(v.w);
        }
    }
    for (int round = 0; round < BLOCK / WARPS; round += AHEAD) {
        if (round > 0) fetch(round);
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            int i = start + (round + n) * WARPS + warp;
            if (!present(list, i)) continue;
            float acc[HEADS] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int step = 0; step < 2; step++) {
                // Lanes without a run stay as they are.
                if (32 * step + lane < a.width / 8) {
                    uint4 v = key[n][step];
                    float k[8] = {bf16_lo(v.x), bf16_hi(v.x), bf16_lo(v.y), bf16_hi(v.y),
                                  bf16_lo(v.z), bf16_hi(v.z), bf16_lo(v.w), bf16_hi(v.w)};
#pragma unroll
                    for (int h = 0; h < HEADS; h++) {
                        float s = 0.0f;
#pragma unroll
                        for (int e = 0; e < 8; e++) s = fmaf(k[e], q[h][8 * step + e], s);
                        acc[h] = s + acc[h];
                    }
                }
            }
            // Lanes 8 h … end with head h's sum.
            float sum = butterfly_transposed<HEADS>(acc);
            int h = lane / (32 / HEADS), head = blockIdx.y * HEADS + h;
            if (lane % (32 / HEADS) == 0 && head < a.heads)
                a.scores[((u64)blockIdx.z * a.heads + head) * a.scores_stride + i] = sum * a.scale;
        }
    }
}

struct AttendValues {
    KeyList keys;
    const float* scores;
    int scores_stride;
    int chunk; // entries in shared memory at a time, a multiple of 64
    const float* sink;
    int heads;
    int width;
    const float* table;
    int rope;
    u16* out;
};

#define BLOCKS (CHUNK_MAX / BLOCK)

// A lane's scores of a chunk: two of each block, absent ones -inf. All loads are in flight at once.
DEV void fetch_scores(const List& list, const float* scores, int from, int count, float (&score)[BLOCKS][2]) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = from + BLOCK * b + 32 * half + lane;
            score[b][half] = BLOCK * b < count && present(list, i) ? scores[i] : -INF_F;
        }
    }
}

// The probabilities of a chunk's entries by one warp for its head, each with its bf16 rounding, and what each
// block of 64 scales the sums before it by. Gives the largest score so far.
DEV float probabilities(const float (&score)[BLOCKS][2], int count, float largest, float2* p, float* alphas) {
    int lane = threadIdx.x & 31;
    float now[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) now[b] = max_c(score[b][1], max_c(score[b][0], -INF_F));
#pragma unroll
    for (int o = 16; o > 0; o >>= 1)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) now[b] = max_c(__shfl_xor_sync(FULL, now[b], o), now[b]);
    float before = largest, step = 0.0f;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        now[b] = max_c(now[b], before);
        if (lane == b) step = before - now[b];
        before = now[b];
    }
    // A block without present entries changes nothing: its factor is exp(0), or never read.
    if (lane < BLOCKS) alphas[lane] = exp_c(step);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        if (BLOCK * b < count) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float e = exp_c(score[b][half] - now[b]);
                p[BLOCK * b + 32 * half + lane] = make_float2(e, bf16_round(e));
            }
        }
    }
    return before;
}

// Adds entries [begin, stop) of a chunk to the sums, ascending.
DEV void add_entries(const float2* p, const u32* tile, int begin, int stop, float& sum, float& low, float& high) {
    int i = begin;
    for (; i + 16 <= stop; i += 16) {
        float2 e[16];
        u32 pair[16];
#pragma unroll
        for (int n = 0; n < 16; n++) {
            e[n] = p[i + n];
            pair[n] = tile[(i + n) * (SLICE / 2)];
        }
#pragma unroll
        for (int n = 0; n < 16; n++) {
            sum = sum + e[n].x;
            low = fmaf(e[n].y, bf16_lo(pair[n]), low);
            high = fmaf(e[n].y, bf16_hi(pair[n]), high);
        }
    }
    for (; i < stop; i++) {
        float2 e = p[i];
        u32 pair = tile[i * (SLICE / 2)];
        sum = sum + e.x;
        low = fmaf(e.y, bf16_lo(pair), low);
        high = fmaf(e.y, bf16_hi(pair), high);
    }
}

// out[m, heads, width] from the scores: online softmax over blocks of 64 entries in list order, the
// denominator of unrounded, the values of bf16 probabilities, the sink last, the rotation undone at the end.
// A warp has a head, a lane two of 64 dimensions. Grid (heads / 4, width / 64, m), 128 threads. The first chunk's
// values are on their way before the scores are waited for: the kernel in front waited for them.
extern "C" __global__ void attend_values(const AttendValues a) {
    DYNAMIC_SHARED(uint4, shared);
    __shared__ float alphas[HEADS][CHUNK_MAX / BLOCK];
    __shared__ const u16* places[CHUNK_MAX];
    List list = list_of(a.keys, blockIdx.z);
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int head = blockIdx.x * HEADS + warp;
    bool mine = head < a.heads;
    int from = blockIdx.y * SLICE;
    // Rows of 64 values, then the heads' probabilities.
    const u32* tile = (const u32*)shared + lane;
    float2* p = (float2*)(shared + a.chunk * (SLICE / 8)) + warp * a.chunk;
    const float* scores = a.scores + ((u64)blockIdx.z * a.heads + (mine ? head : 0)) * a.scores_stride;
    float largest = -INF_F, sum = 0.0f, low = 0.0f, high = 0.0f;
    for (int base = 0; base < list.length; base += a.chunk) {
        int count = list.length - base < a.chunk ? list.length - base : a.chunk;
        // A thread finds every 128th entry; eight lanes fetch a row's values of the slice.
#pragma unroll
        for (int n = 0; n < CHUNK_MAX / 128; n++) {
            int i = 128 * n + threadIdx.x;
            if (i < count) places[i] = present(list, base + i) ? entry(list, base + i, a.width) + from : 0;
        }
        __syncthreads();
        // What comes first is used while the rest is on its way.
        int half = count < HALF ? count : HALF;
#pragma unroll 8
        for (int i = threadIdx.x / 8; i < half; i += 16) {
            const uint4* key = (const uint4*)places[i];
            if (key) copy_async(shared_address(shared + i * (SLICE / 8) + (threadIdx.x & 7)), key + (threadIdx.x & 7), 16u);
        }
        copy_commit();
#pragma unroll 8
        for (int i = half + threadIdx.x / 8; i < count; i += 16) {
            const uint4* key = (const uint4*)places[i];
            if (key) copy_async(shared_address(shared + i * (SLICE / 8) + (threadIdx.x & 7)), key + (threadIdx.x & 7), 16u);
        }
        copy_commit();
        if (base == 0) {
            wait_for_inputs();
            launch_dependents();
        }
        float score[BLOCKS][2];
        fetch_scores(list, scores, base, count, score);
        largest = probabilities(score, count, largest, p, alphas[warp]);
        copy_wait<1>();
        __syncthreads();
        for (int start = base; start < base + count; start += BLOCK) {
            if (start - base == HALF) {
                copy_wait<0>();
                __syncthreads();
            }
            // Present entries of the block: [start, window_end) and [slots, end).
            int end = start + BLOCK < list.length ? start + BLOCK : list.length;
            int slots = list.window_size > start ? list.window_size : start;
            slots = slots < end ? slots : end;
            int window_end = list.present > start ? list.present : start;
            window_end = window_end < slots ? window_end : slots;
            float alpha = alphas[warp][(start - base) / BLOCK];
            sum = sum * alpha;
            low = low * alpha;
            high = high * alpha;
            add_entries(p, tile, start - base, window_end - base, sum, low, high);
            add_entries(p, tile, slots - base, end - base, sum, low, high);
        }
        __syncthreads();
    }
    if (!mine) return;
    sum = sum + exp_c(a.sink[head] - largest);
    float x = bf16_round(low / sum), y = bf16_round(high / sum);
    int pair = from / 2 + lane - (a.width - a.rope) / 2;
    if (pair >= 0) {
        const float* cos = a.table + (u64)a.keys.rows[blockIdx.z].pos * a.rope;
        float c = cos[pair], s = cos[a.rope / 2 + pair] * -1.0f;
        float even = x * c - y * s;
        y = x * s + y * c;
        x = even;
    }
    ((u32*)(a.out + ((u64)blockIdx.z * a.heads + head) * a.width + from))[lane] = bf16_pair(x, y);
}
