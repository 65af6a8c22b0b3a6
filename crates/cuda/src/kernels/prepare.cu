// What stands between the products of a layer's input and its attention: queries, indexer queries, and
// compressors: what a position leaves for pooling, and the slot that a last position finishes.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "state.cuh"

// The head norm's factor from the lane's sum of squares: everything in bf16 steps.
DEV float head_factor(float sum, int width, float eps) {
    float mean = bf16_round((sum / (float)width));
    float v = bf16_round(mean + eps);
    return bf16_round(inverse_sqrt(v));
}

struct HeadNormRotate {
    u16* q;
    int heads;
    int width;
    float eps;
    const float* table;
    int rope;
    const Row* rows;
};

#define HEAD_RUNS 4 /* of a lane: a head has at most 512 values */

// q[m, heads, width] in place, one warp per head; `block` is the block of heads. Waits for the queries.
DEV void query_heads(const HeadNormRotate& a, int block) {
    int row = blockIdx.x, lane = threadIdx.x & 31;
    int head = block * (blockDim.x / 32) + threadIdx.x / 32;
    bool mine = head < a.heads;
    uint2* values = (uint2*)(a.q + ((u64)row * a.heads + head) * a.width);
    const float* cos = a.table + (u64)a.rows[row].pos * a.rope;
    const float* sin = cos + a.rope / 2;
    float c[HEAD_RUNS][2], s[HEAD_RUNS][2];
#pragma unroll
    for (int n = 0; n < HEAD_RUNS; n++) {
        int run = 32 * n + lane, pair = (4 * run - (a.width - a.rope)) / 2;
        if (run < a.width / 4 && 4 * run >= a.width - a.rope) {
#pragma unroll
            for (int i = 0; i < 2; i++) c[n][i] = cos[pair + i], s[n][i] = sin[pair + i];
        }
    }
    wait_for_inputs();
    launch_dependents();
    if (!mine) return;
    uint2 v[HEAD_RUNS];
#pragma unroll
    for (int n = 0; n < HEAD_RUNS; n++)
        if (32 * n + lane < a.width / 4) v[n] = values[32 * n + lane];
    float acc = 0.0f;
#pragma unroll
    for (int n = 0; n < HEAD_RUNS; n++) {
        if (32 * n + lane < a.width / 4) {
            float a = bf16_lo(v[n].x), b = bf16_hi(v[n].x), c = bf16_lo(v[n].y), d = bf16_hi(v[n].y);
            float s = bf16_round(a * a) + 0.0f;
            s = s + bf16_round(b * b);
            s = s + bf16_round(c * c);
            acc = (s + bf16_round(d * d)) + acc;
        }
    }
    float r = head_factor(butterfly(acc), a.width, a.eps);
#pragma unroll
    for (int n = 0; n < HEAD_RUNS; n++) {
        int run = 32 * n + lane;
        if (run >= a.width / 4) continue;
        float x[4] = {bf16_lo(v[n].x), bf16_hi(v[n].x), bf16_lo(v[n].y), bf16_hi(v[n].y)};
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = bf16_round(x[i] * r);
        if (4 * run >= a.width - a.rope) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float a = x[2 * i], b = x[2 * i + 1];
                x[2 * i] = a * c[n][i] - b * s[n][i];
                x[2 * i + 1] = a * s[n][i] + b * c[n][i];
            }
        }
        values[run] = make_uint2(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]));
    }
}

struct IndexQueries {
    u16* q;
    int heads;
    int width;
    const float* table;
    int rope;
    const Row* rows;
    int topk;
    int ratio;
    float factor;
};

// Indexer queries q[m, heads, width] in place: rotation, Hadamard, E2M1 in groups of 32. One warp per
// head, width / 32 values per lane: lane l holds values l, l + 32, …. Nothing is done for rows that see no
// more slots than they may pick.
DEV void index_heads(const IndexQueries& a, int block) {
    int row = blockIdx.x, lane = threadIdx.x & 31;
    int head = block * (blockDim.x / 32) + threadIdx.x / 32;
    int pos = a.rows[row].pos;
    if (head >= a.heads || (pos + 1) / a.ratio <= a.topk) return;
    u16* values = a.q + ((u64)row * a.heads + head) * a.width;
    const float* cos = a.table + (u64)pos * a.rope;
    const float* sin = cos + a.rope / 2;
    float x[8];
    int count = a.width / 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = 0.0f;
        int at = 32 * i + lane;
        if (i < count) {
            x[i] = bf16_up(values[at]);
            float other = __shfl_xor_sync(FULL, x[i], 1);
            int from = at - (a.width - a.rope);
            if (from >= 0) {
                float c = cos[from / 2], s = sin[from / 2];
                // Even: a·c − b·s with b the other; odd: a·s + b·c with a the other.
                x[i] = bf16_round((from & 1) == 0 ? x[i] * c - other * s : other * s + x[i] * c);
            }
        }
    }
    hadamard_e2m1(x, count, a.factor);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) values[32 * i + lane] = bf16_down(x[i]);
}

#define WIDTH_MAX 1024
#define ROWS_KEPT 8

// One of a layer's two compressors. kv and score are products of the pass, [m, stride] each.
struct CompressSide {
    const float* kv;
    const float* score;
    int stride;
    int width;
    const float* ape;
    const float* norm;
};

struct Compress {
    CompressSide attention;
    CompressSide index;
    int ratio;
    int overlap;
    const float* table;
    int rope;
    float eps;
    float hadamard;
    const Row* rows;
    const LayerState* states;
    int places;
    int place;
};

// Where the raw inputs of position `pos - back` are: in the pass, or in the session's ring.
struct Raw {
    const float* kv;
    const float* score;
    const float* ape;
};

DEV Raw raw_at(const Compress& a, const CompressSide& side, const Pooled& pooled, int raw_rows, Row row, int pos, int raw_width) {
    Raw raw;
    int at = (int)blockIdx.x - (row.pos - pos);
    if (at >= 0 && a.rows[at].slot == row.slot) {
        raw.kv = side.kv + (u64)at * side.stride;
        raw.score = side.score + (u64)at * side.stride;
        raw.ape = side.ape + (u64)(pos % a.ratio) * raw_width;
    } else {
        u64 ring = (u64)(pos % raw_rows) * raw_width;
        raw.kv = pooled.kv + ring;
        raw.score = pooled.score + ring;
        raw.ape = 0;
    }
    return raw;
}

DEV float score_of(const Raw& raw, int column) { return raw.ape ? raw.score[column] + raw.ape[column] : raw.score[column]; }

// Pools `count` rows, oldest first: row i is position first + i, of which the earlier half takes columns
// d, the later half columns width + d where blocks overlap.
DEV float pool(const Compress& a, const CompressSide& side, const Pooled& pooled, int raw_rows, Row row, int raw_width, int first,
               int count, int split, int d) {
    float kept[ROWS_KEPT];
    float largest = -INF_F;
    for (int i = 0; i < count; i++) {
        int column = i < split ? d : raw_width - side.width + d;
        largest = max_c(largest, score_of(raw_at(a, side, pooled, raw_rows, row, first + i, raw_width), column));
    }
    float sum = 0.0f;
    for (int i = 0; i < count; i++) {
        int column = i < split ? d : raw_width - side.width + d;
        float e = exp_c(score_of(raw_at(a, side, pooled, raw_rows, row, first + i, raw_width), column) - largest);
#pragma unroll
        for (int k = 0; k < ROWS_KEPT; k++)
            if (k == i) kept[k] = e;
        sum = sum + e;
    }
    float value = 0.0f;
    for (int i = 0; i < count; i++) {
        int column = i < split ? d : raw_width - side.width + d;
        Raw raw = raw_at(a, side, pooled, raw_rows, row, first + i, raw_width);
        float e = 0.0f;
        if (count <= ROWS_KEPT) {
#pragma unroll
            for (int k = 0; k < ROWS_KEPT; k++)
                if (k == i) e = kept[k];
        } else {
            e = exp_c(score_of(raw, column) - largest);
        }
        value = fmaf(e / sum, raw.kv[column], value);
    }
    return value;
}

// Stores a row's raw inputs; where the row ends a block, pools the block (and the one before it, where they
// overlap) into a slot: norm, rotation, quantization.
DEV void compress_row(const Compress& a, bool index) {
    __shared__ float values[WIDTH_MAX];
    __shared__ float runs[WIDTH_MAX / 4];
    __shared__ float factor;
    Row row = a.rows[blockIdx.x];
    LayerState state = a.states[(u64)row.slot * a.places + a.place];
    const CompressSide& side = index ? a.index : a.attention;
    Pooled pooled = index ? state.index : state.attention;
    int width = side.width, raw_width = a.overlap ? 2 * width : width;
    u64 ring = (u64)(row.pos % state.raw_rows) * raw_width;
    const float* kv = side.kv + (u64)blockIdx.x * side.stride;
    const float* score = side.score + (u64)blockIdx.x * side.stride;
    const float* ape = side.ape + (u64)(row.pos % a.ratio) * raw_width;
    for (int i = threadIdx.x; i < raw_width; i += blockDim.x) {
        pooled.kv[ring + i] = kv[i];
        pooled.score[ring + i] = score[i] + ape[i];
    }
    if ((row.pos + 1) % a.ratio != 0) return;
    int slot = row.pos / a.ratio, first = slot * a.ratio;
    bool before = a.overlap && slot > 0;
    int from = before ? first - a.ratio : first;
    int count = before ? 2 * a.ratio : a.ratio;
    int split = before ? a.ratio : 0;
    for (int d = threadIdx.x; d < width; d += blockDim.x)
        values[d] = bf16_round(pool(a, side, pooled, state.raw_rows, row, raw_width, from, count, split, d));
    __syncthreads();
    for (int run = threadIdx.x; run < width / 4; run += blockDim.x)
        runs[run] = squares4(values[4 * run], values[4 * run + 1], values[4 * run + 2], values[4 * run + 3]);
    __syncthreads();
    if (threadIdx.x < 32) {
        float sum = fold_runs(runs, width / 4);
        if (threadIdx.x == 0) factor = inverse_sqrt(sum / (float)width + a.eps);
    }
    __syncthreads();
    const float* cos = a.table + (u64)first * a.rope;
    const float* sin = cos + a.rope / 2;
    for (int pair = threadIdx.x; pair < width / 2; pair += blockDim.x) {
        int d = 2 * pair, turned = pair - (width - a.rope) / 2;
        float x = bf16_round(values[d] * factor * side.norm[d]);
        float y = bf16_round(values[d + 1] * factor * side.norm[d + 1]);
        if (turned >= 0) {
            float c = cos[turned], s = sin[turned];
            float even = bf16_round(x * c - y * s);
            y = bf16_round(x * s + y * c);
            x = even;
        }
        values[d] = x;
        values[d + 1] = y;
    }
    __syncthreads();
    u16* out = pooled.slots + (u64)slot * width;
    int lane = threadIdx.x & 31;
    if (index) {
        if (threadIdx.x >= 32) return;
        float x[8];
        int each = width / 32;
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = i < each ? values[32 * i + lane] : 0.0f;
        hadamard_e2m1(x, each, a.hadamard);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < each) out[32 * i + lane] = bf16_down(x[i]);
        return;
    }
    for (int group = threadIdx.x / 32; group < width / 64; group += blockDim.x / 32) {
        float x[2] = {values[64 * group + 2 * lane], values[64 * group + 2 * lane + 1]};
        if (64 * group < width - a.rope) {
            float amax = max_c(fabsf(x[1]), max_c(fabsf(x[0]), E4M3_AMAX_MIN));
            for (int o = 16; o > 0; o >>= 1) amax = max_c(__shfl_xor_sync(FULL, amax, o), amax);
            float scale = e4m3_scale(amax);
            x[0] = e4m3_round(x[0], 1.0f / scale) * scale;
            x[1] = e4m3_round(x[1], 1.0f / scale) * scale;
        }
        ((u32*)out)[32 * group + lane] = bf16_pair(x[0], x[1]);
    }
}

struct Prepare {
    HeadNormRotate queries;
    IndexQueries index;
    Compress compress;
    int query_blocks;
    int index_blocks;
    Spread spread;
};

// All three of the same rows. With spread.mix, one more block of a row says how its streams are spread; what it
// reads is older than the kernel in front, as are rows and rotations. Grid (m, query blocks + index blocks +
// compressors [+ 1]), PREPARE_THREADS threads.
extern "C" __global__ void prepare(const Prepare a) {
    int block = blockIdx.y;
    if (block < a.query_blocks) {
        query_heads(a.queries, block);
        return;
    }
    if (a.spread.mix && block + 1 == gridDim.y && threadIdx.x < 32) spread_row(a.spread, blockIdx.x);
    wait_for_inputs();
    launch_dependents();
    if (a.spread.mix && block + 1 == gridDim.y) return;
    if (block < a.query_blocks + a.index_blocks)
        index_heads(a.index, block - a.query_blocks);
    else
        compress_row(a.compress, block - a.query_blocks - a.index_blocks == 1);
}
