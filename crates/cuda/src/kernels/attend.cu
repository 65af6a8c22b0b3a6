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
#define SCORED 32 /* entries of a block that scores */
#define WARPS 4 /* of it */
#define AHEAD 4
#define SLICE 64
#define VALUE_THREADS 160 /* of a block that adds values: a warp to a head, and one */
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
};

// scores[m, heads, list]: dot(k, q) · scale, canonical with runs of eight. Four heads' queries live in a
// warp's registers while its keys pass by. Grid (list / 32, heads / 4, m), 128 threads; blocks past a row's list
// do nothing. Width at most 512. The window's keys are read before the queries are waited for: the kernel in front
// waited for them.
extern "C" __global__ void attend_scores(const AttendScores a) {
    List list = list_of(a.keys, blockIdx.z);
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int start = blockIdx.x * SCORED;
    bool early = start + SCORED <= list.window_size;
    // A warp has every fourth entry of the block, AHEAD of them in flight; lane n finds the n-th.
    int mine = start + lane * WARPS + warp;
    const u16* place = 0;
    uint4 key[AHEAD][2];
    auto find = [&]() {
        if (lane < SCORED / WARPS && present(list, mine)) place = entry(list, mine, a.width);
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
    for (int round = 0; round < SCORED / WARPS; round += AHEAD) {
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

// What a head's warp knows of a chunk's blocks of 64.
struct Blocks {
    float largest[BLOCKS]; // scores of each
    float alphas[BLOCKS];  // what the sums before it are scaled by
};

// A chunk's raw scores to `exact`, and each block's largest, by a head's warp. Absent entries are -inf. All loads
// are in flight at once.
DEV void fetch_scores(const List& list, const float* scores, int from, int count, float* exact, Blocks& blocks) {
    int lane = threadIdx.x & 31;
    float now[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        float score[2];
#pragma unroll
        for (int part = 0; part < 2; part++) {
            int i = BLOCK * b + 32 * part + lane;
            score[part] = BLOCK * b < count && present(list, from + i) ? scores[from + i] : -INF_F;
            if (BLOCK * b < count) exact[i] = score[part];
        }
        now[b] = max_c(score[1], max_c(score[0], -INF_F));
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) now[b] = max_c(__shfl_xor_sync(FULL, now[b], o), now[b]);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
        if (lane == 0) blocks.largest[b] = now[b];
}

// The probabilities of a chunk's entries by their head's warp, unrounded and in bf16, and what each block
// of 64 scales the sums before it by. Gives the largest score so far.
DEV float probabilities(int count, float largest, float* exact, float* rounded, Blocks& blocks) {
    int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int b = 0; BLOCK * b < count; b++) {
        float before = largest;
        largest = max_c(blocks.largest[b], largest);
        // A block without present entries changes nothing: its factor is exp(0), or never read.
        float alpha = exp_c(before - largest);
        if (lane == 0) blocks.alphas[b] = alpha;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            int i = BLOCK * b + 32 * part + lane;
            float e = exp_c(exact[i] - largest);
            exact[i] = e;
            rounded[i] = bf16_round(e);
        }
    }
    return largest;
}

#define BATCH 16 /* entries whose loads fly together */

// A head's values of a lane's two columns, or (in `low`) its probabilities alone.
struct Sums {
    float low, high;
};

// Adds one entry.
template <bool VALUES>
DEV void add_entry(float p, u32 pair, Sums& sums) {
    if (VALUES) {
        sums.low = fmaf(p, bf16_lo(pair), sums.low);
        sums.high = fmaf(p, bf16_hi(pair), sums.high);
    } else {
        sums.low = sums.low + p;
    }
}

// What BATCH entries need for them, from shared memory.
template <bool VALUES>
struct Batch {
    float p[BATCH];
    u32 pair[VALUES ? BATCH : 1];

    // From entry i, a multiple of four.
    DEV_MEMBER void load(const float* weights, const u32* tile, int i) {
#pragma unroll
        for (int n = 0; n < BATCH; n += 4) {
            float4 v = *(const float4*)(weights + i + n);
            p[n] = v.x, p[n + 1] = v.y, p[n + 2] = v.z, p[n + 3] = v.w;
        }
        if (VALUES) {
#pragma unroll
            for (int n = 0; n < BATCH; n++) pair[n] = tile[(i + n) * (SLICE / 2)];
        }
    }

    // Ascending.
    DEV_MEMBER void add(Sums& sums) const {
#pragma unroll
        for (int n = 0; n < BATCH; n++) add_entry<VALUES>(p[n], pair[VALUES ? n : 0], sums);
    }
};

template <bool VALUES>
DEV void scale_sums(Sums& sums, float alpha) {
    sums.low = sums.low * alpha;
    if (VALUES) sums.high = sums.high * alpha;
}

// Whole blocks [begin, stop) of a chunk, all present: a batch is on its way while the one before is added.
template <bool VALUES>
DEV void add_blocks(const float* weights, const u32* tile, const float* alphas, int begin, int stop, Sums& sums) {
    if (begin >= stop) return;
    Batch<VALUES> now, next;
    now.load(weights, tile, begin);
#pragma unroll 1
    for (int start = begin; start < stop; start += BLOCK) {
        scale_sums<VALUES>(sums, alphas[start / BLOCK]);
#pragma unroll
        for (int i = 0; i < BLOCK; i += BATCH) {
            // Past the last batch, the last again.
            int after = start + i + BATCH < stop ? start + i + BATCH : start + i;
            next.load(weights, tile, after);
            now.add(sums);
            now = next;
        }
    }
}

// Entries [begin, stop) of a chunk one by one.
template <bool VALUES>
DEV void add_entries(const float* weights, const u32* tile, int begin, int stop, Sums& sums) {
    for (int i = begin; i < stop; i++) add_entry<VALUES>(weights[i], VALUES ? tile[i * (SLICE / 2)] : 0u, sums);
}

// Blocks from `from` up to `to` of a list, whose chunk begins at `base`; both multiples of 64 behind `base`, or the
// list's end.
template <bool VALUES>
DEV void add_span(const List& list, const float* weights, const u32* tile, const float* alphas, int base, int from, int to,
                  Sums& sums) {
    int even = from + (to - from) / BLOCK * BLOCK;
    bool all = from >= list.window_size || list.present >= (even < list.window_size ? even : list.window_size);
    if (all) {
        add_blocks<VALUES>(weights, tile, alphas, from - base, even - base, sums);
        from = even;
    }
    for (int start = from; start < to; start += BLOCK) {
        // Present entries of the block: [start, window_end) and [slots, end).
        int end = start + BLOCK < to ? start + BLOCK : to;
        int slots = list.window_size > start ? list.window_size : start;
        slots = slots < end ? slots : end;
        int window_end = list.present > start ? list.present : start;
        window_end = window_end < slots ? window_end : slots;
        scale_sums<VALUES>(sums, alphas[(start - base) / BLOCK]);
        add_entries<VALUES>(weights, tile, start - base, window_end - base, sums);
        add_entries<VALUES>(weights, tile, slots - base, end - base, sums);
    }
}

// out[m, heads, width] from the scores: online softmax over blocks of 64 entries in list order, the
// denominator of unrounded, the values of bf16 probabilities, the sink last, the rotation undone at the end.
// A warp has a head, a lane two of 64 dimensions; one more warp adds up the denominators, a lane to a head. Grid
// (heads / 4, width / 64, m), 160 threads. The first chunk's values are on their way before the scores are waited
// for: the kernel in front waited for them.
extern "C" __global__ void attend_values(const AttendValues a) {
    DYNAMIC_SHARED(uint4, shared);
    __shared__ Blocks blocks[HEADS];
    __shared__ float denominators[HEADS];
    __shared__ const u16* places[CHUNK_MAX];
    List list = list_of(a.keys, blockIdx.z);
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    bool summing = warp == HEADS;
    int number = summing ? lane % HEADS : warp; // of the head among the block's
    int head = blockIdx.x * HEADS + number;
    bool mine = head < a.heads;
    int from = blockIdx.y * SLICE;
    // Rows of 64 values, then the heads' probabilities, unrounded and rounded.
    const u32* tile = (const u32*)shared + lane;
    int stride = a.chunk + 4; // so that heads lie in banks of their own
    float* exact = (float*)(shared + a.chunk * (SLICE / 8)) + number * stride;
    float* rounded = exact + HEADS * stride;
    const float* scores = a.scores + ((u64)blockIdx.z * a.heads + (mine ? head : 0)) * a.scores_stride;
    float largest = -INF_F;
    Sums sums = {0.0f, 0.0f};
    for (int base = 0; base < list.length; base += a.chunk) {
        int count = list.length - base < a.chunk ? list.length - base : a.chunk;
        // Eight lanes fetch a row's values of the slice.
#pragma unroll
        for (int n = 0; n < (CHUNK_MAX + VALUE_THREADS - 1) / VALUE_THREADS; n++) {
            int i = n * VALUE_THREADS + threadIdx.x;
            if (i < count) places[i] = present(list, base + i) ? entry(list, base + i, a.width) + from : 0;
        }
        __syncthreads();
        // What comes first is used while the rest is on its way.
        int first = count < HALF ? count : HALF;
        auto fetch = [&](int begin, int stop) {
#pragma unroll 4
            for (int i = begin + threadIdx.x / 8; i < stop; i += VALUE_THREADS / 8) {
                const uint4* key = (const uint4*)places[i];
                if (key) copy_async(shared_address(shared + i * (SLICE / 8) + (threadIdx.x & 7)), key + (threadIdx.x & 7), 16u);
            }
            copy_commit();
        };
        fetch(0, first);
        fetch(first, count);
        if (base == 0) {
            wait_for_inputs();
            launch_dependents();
        }
        if (!summing) {
            fetch_scores(list, scores, base, count, exact, blocks[number]);
            __syncwarp();
            largest = probabilities(count, largest, exact, rounded, blocks[number]);
        }
        copy_wait<1>();
        __syncthreads();
        const float* alphas = blocks[number].alphas;
#pragma unroll 1
        for (int begin = 0, stop = first; begin < count; begin = first, stop = count) {
            if (begin > 0) {
                copy_wait<0>();
                __syncthreads();
            }
            if (summing)
                add_span<false>(list, exact, tile, alphas, base, base + begin, base + stop, sums);
            else
                add_span<true>(list, rounded, tile, alphas, base, base + begin, base + stop, sums);
            if (stop == count) break;
        }
        __syncthreads();
    }
    if (summing && lane < HEADS) denominators[lane] = sums.low;
    __syncthreads();
    if (summing || !mine) return;
    float sum = denominators[number] + exp_c(a.sink[head] - largest);
    float x = bf16_round(sums.low / sum), y = bf16_round(sums.high / sum);
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
