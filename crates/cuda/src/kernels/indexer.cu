// The indexer: how much a position wants each compressed slot, and which it takes.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "state.cuh"

#define SCORE_THREADS 256
#define SLOTS 16 /* to a block at a time */
#define APART 4 /* values between heads in shared memory, so that two lie in banks of their own */
#define KEPT 8 /* keys that a thread keeps in registers */
#define PICK_THREADS 1024

struct IndexScores {
    const u16* q;
    const u16* w;
    float factor;
    int heads;
    int topk;
    int ratio;
    const Row* rows;
    const LayerState* states;
    int places;
    int place;
    u16* keys;
    int keys_stride;
};

// A slot's values, or those of the last slot behind it.
template <int RUNS>
DEV void fetch_slot(const u16* slots, int slot, int visible, float (&k)[RUNS][8]) {
    const uint4* key = (const uint4*)(slots + (u64)(slot < visible ? slot : visible - 1) * (8 * RUNS));
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        uint4 v = key[run];
        k[run][0] = bf16_lo(v.x), k[run][1] = bf16_hi(v.x), k[run][2] = bf16_lo(v.y), k[run][3] = bf16_hi(v.y);
        k[run][4] = bf16_lo(v.z), k[run][5] = bf16_hi(v.z), k[run][6] = bf16_lo(v.w), k[run][7] = bf16_hi(v.w);
    }
}

// bf16 scores as 16-bit keys of the total order, keys[m, slot]: d = bf16(q · k), a = bf16(max(d, 0) · w),
// score = bf16(Σ a), heads ascending. A lane has a slot and every other head of its warp; a dot visits the
// canonical lanes one by one and folds them like the butterfly. Rows that take every slot are left out. Grid
// (blocks, m), any blocks.
template <int RUNS>
DEV void index_scores(const IndexScores& a) {
    DYNAMIC_SHARED(float, shared);
    const int width = 8 * RUNS;
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    Row row = a.rows[blockIdx.y];
    int visible = (row.pos + 1) / a.ratio;
    if (visible <= a.topk || (int)(blockIdx.x * SLOTS) >= visible) return;
    // Queries [heads, width], the heads' weights, then what each head says of each slot.
    int slot = lane % SLOTS, half = lane / SLOTS;
    float* weights = shared + a.heads * (width + APART);
    float* said = weights + a.heads;
    const u16* slots = a.states[(u64)row.slot * a.places + a.place].index.slots;
    // The first slots are on their way while the queries are staged.
    float k[RUNS][8];
    fetch_slot<RUNS>(slots, blockIdx.x * SLOTS + slot, visible, k);
    const uint4* q = (const uint4*)(a.q + (u64)blockIdx.y * a.heads * width);
#pragma unroll 4
    for (int i = threadIdx.x; i < a.heads * RUNS; i += SCORE_THREADS) {
        uint4 v = q[i];
        float4* to = (float4*)(shared + i / RUNS * (width + APART) + 8 * (i % RUNS));
        to[0] = make_float4(bf16_lo(v.x), bf16_hi(v.x), bf16_lo(v.y), bf16_hi(v.y));
        to[1] = make_float4(bf16_lo(v.z), bf16_hi(v.z), bf16_lo(v.w), bf16_hi(v.w));
    }
    for (int h = threadIdx.x; h < a.heads; h += SCORE_THREADS)
        weights[h] = bf16_round(bf16_up(a.w[(u64)blockIdx.y * a.heads + h]) * a.factor);
    __syncthreads();
    for (int first = blockIdx.x * SLOTS; first < visible; first += gridDim.x * SLOTS) {
        if (first != (int)(blockIdx.x * SLOTS)) fetch_slot<RUNS>(slots, first + slot, visible, k);
        for (int h = 2 * warp + half; h < a.heads; h += SCORE_THREADS / 16) {
            const float4* head = (const float4*)(shared + h * (width + APART));
            float v[RUNS];
#pragma unroll
            for (int run = 0; run < RUNS; run++) {
                float4 low = head[2 * run], high = head[2 * run + 1];
                float s = fmaf(k[run][0], low.x, 0.0f);
                s = fmaf(k[run][1], low.y, s);
                s = fmaf(k[run][2], low.z, s);
                s = fmaf(k[run][3], low.w, s);
                s = fmaf(k[run][4], high.x, s);
                s = fmaf(k[run][5], high.y, s);
                s = fmaf(k[run][6], high.z, s);
                s = fmaf(k[run][7], high.w, s);
                v[run] = s + 0.0f;
            }
#pragma unroll
            for (int o = RUNS / 2; o > 0; o >>= 1)
#pragma unroll
                for (int l = 0; l < RUNS / 2; l++)
                    if (l < o) v[l] = v[l] + v[l + o];
            said[h * SLOTS + slot] = bf16_round(max_c(0.0f, bf16_round(v[0])) * weights[h]);
        }
        __syncthreads();
        if (warp == 0 && half == 0) {
            float sum = 0.0f;
#pragma unroll 8
            for (int h = 0; h < a.heads; h++) sum = sum + said[h * SLOTS + slot];
            if (first + slot < visible)
                a.keys[(u64)blockIdx.y * a.keys_stride + first + slot] = (u16)(order_key(bf16_round(sum)) >> 16);
        }
        __syncthreads();
    }
}

extern "C" __global__ void index_scores_64(const IndexScores a) {
    wait_for_inputs();
    launch_dependents();
    index_scores<8>(a);
}

extern "C" __global__ void index_scores_128(const IndexScores a) {
    wait_for_inputs();
    launch_dependents();
    index_scores<16>(a);
}

extern "C" __global__ void index_scores_256(const IndexScores a) {
    wait_for_inputs();
    launch_dependents();
    index_scores<32>(a);
}

struct IndexPicks {
    const u16* keys;
    int keys_stride;
    int topk;
    int ratio;
    const Row* rows;
    int* picks;
};

// Counts a bin, once for all lanes of a warp that have the same.
DEV void tally(int* counts, bool valid, int bin) {
    u32 peers = __match_any_sync(FULL, valid ? bin : -1);
    if (valid && (peers & ((1u << (threadIdx.x & 31)) - 1u)) == 0u) atomicAdd(&counts[bin], __popc(peers));
}

// The bin of 256, from the highest down, in which the count reaches `wanted`, and what lies above it. By one
// warp.
DEV void find_bin(const int* counts, int wanted, int* bin, int* above) {
    int lane = threadIdx.x & 31, high = 255 - 8 * lane;
    int mine = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) mine += counts[high - i];
    int before = mine;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        int other = __shfl_up_sync(FULL, before, o);
        if (lane >= o) before += other;
    }
    before -= mine;
    if (before < wanted && before + mine >= wanted) {
        int i = 0;
        while (before + counts[high - i] < wanted) before += counts[high - i++];
        *bin = high - i;
        *above = before;
    }
}

// picks[m, topk]: the slots of the topk first keys (key descending, slot ascending), ascending. Rows that see
// no more slots than that take all and are left out. Grid (m), PICK_THREADS threads.
extern "C" __global__ void index_picks(const IndexPicks a) {
    wait_for_inputs();
    launch_dependents();
    __shared__ int counts[512];
    __shared__ int bin, above, low_bin, low_above;
    __shared__ u32 warps[PICK_THREADS / 32 + 1];
    int visible = (a.rows[blockIdx.x].pos + 1) / a.ratio;
    if (visible <= a.topk) return;
    const u16* keys = a.keys + (u64)blockIdx.x * a.keys_stride;
    int* picks = a.picks + (u64)blockIdx.x * a.topk;
    int kept[KEPT];
#pragma unroll
    for (int n = 0; n < KEPT; n++) {
        int i = n * PICK_THREADS + threadIdx.x;
        kept[n] = i < visible ? keys[i] : -1;
    }
    for (int i = threadIdx.x; i < 512; i += PICK_THREADS) counts[i] = 0;
    __syncthreads();
    // The high bytes, then the low bytes of the keys that share the deciding one.
#pragma unroll
    for (int n = 0; n < KEPT; n++)
        if (n * PICK_THREADS < visible) tally(counts, kept[n] >= 0, kept[n] >> 8);
    for (int from = KEPT * PICK_THREADS; from < visible; from += PICK_THREADS) {
        int i = from + threadIdx.x;
        tally(counts, i < visible, i < visible ? keys[i] >> 8 : 0);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_bin(counts, a.topk, &bin, &above);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < KEPT; n++)
        if (n * PICK_THREADS < visible) tally(counts + 256, kept[n] >= 0 && kept[n] >> 8 == bin, kept[n] & 255);
    for (int from = KEPT * PICK_THREADS; from < visible; from += PICK_THREADS) {
        int i = from + threadIdx.x;
        int key = i < visible ? keys[i] : 0;
        tally(counts + 256, i < visible && key >> 8 == bin, key & 255);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_bin(counts + 256, a.topk - above, &low_bin, &low_above);
    __syncthreads();
    int last = bin << 8 | low_bin;
    int equals = a.topk - above - low_above;
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    u32 below = (1u << lane) - 1u;
    int better = 0, equal = 0;
    for (int n = 0; n * PICK_THREADS < visible; n++) {
        int i = n * PICK_THREADS + threadIdx.x;
        int key = -1;
        if (n < KEPT) {
#pragma unroll
            for (int k = 0; k < KEPT; k++)
                if (k == n) key = kept[k];
        } else if (i < visible) {
            key = keys[i];
        }
        u32 first = __ballot_sync(FULL, key > last), second = __ballot_sync(FULL, key == last);
        if (lane == 0) warps[warp] = (u32)__popc(first) | (u32)__popc(second) << 16;
        __syncthreads();
        // Counts before each warp: the first warp adds them up.
        if (warp == 0) {
            u32 mine = warps[lane], sum = mine;
            for (int o = 1; o < 32; o <<= 1) {
                u32 other = __shfl_up_sync(FULL, sum, o);
                if (lane >= o) sum += other;
            }
            warps[lane] = sum - mine;
            if (lane == 31) warps[32] = sum;
        }
        __syncthreads();
        u32 before = warps[warp], all = warps[32];
        int at_better = better + (int)(before & 0xffffu) + __popc(first & below);
        int at_equal = equal + (int)(before >> 16) + __popc(second & below);
        if (key > last) picks[at_better + (at_equal < equals ? at_equal : equals)] = i;
        if (key == last && at_equal < equals) picks[at_better + at_equal] = i;
        better += (int)(all & 0xffffu);
        equal += (int)(all >> 16);
        __syncthreads();
    }
}
