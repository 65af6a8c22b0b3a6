// What a session leaves on the device, as the host lays it out (state.rs mirrors these structs), and helpers
// of the kernels that are no products. Needs common.cuh, math.cuh and quant.cuh.

#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#endif

// A row of a pass: whose it is, where, and its token.
struct Row {
    int slot, pos, id, spare;
};

// Raw inputs by position in rings of `raw_rows`, finished slots by index.
struct Pooled {
    float* kv;
    float* score;
    u16* slots;
};

// One layer (or draft stage) of one session; a null window is kept by nobody.
struct LayerState {
    u16* window;
    int window_rows;
    int crossing; // hidden states in front of this layer cross the fp8 wire
    Pooled attention;
    Pooled index;
    int raw_rows;
    int spare;
};

// Failed checks of a row: the first in the pass stays.
DEV void mark(int* checks, int row, int number) {
    if (checks[row] == 0) checks[row] = number;
}

// Two roundings: the square root, then the quotient.
DEV float inverse_sqrt(float x) { return 1.0f / sqrtf(x); }

// Σ x² of a run of four.
DEV float squares4(float a, float b, float c, float d) { return fmaf(d, d, fmaf(c, c, fmaf(b, b, fmaf(a, a, 0.0f)))); }

// Adds up chain sums of runs, `runs[0 .. count)` in shared memory, by one whole warp.
DEV float fold_runs(const float* runs, int count) {
    float acc = 0.0f;
    int run = threadIdx.x & 31;
    for (; run + 224 < count; run += 256) {
        float next[8];
#pragma unroll
        for (int i = 0; i < 8; i++) next[i] = runs[run + 32 * i];
#pragma unroll
        for (int i = 0; i < 8; i++) acc = next[i] + acc;
    }
    for (; run < count; run += 32) acc = runs[run] + acc;
    return butterfly(acc);
}

// The order of selections as a key: value ascending, -0 as +0.
DEV u32 order_key(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Value, then the lower index: the larger key wins.
DEV u64 selection_key(float x, u32 index) { return ((u64)order_key(x) << 32) | (u64)(0xffffffffu - index); }

// One row of 32 · count values by one warp, count a power of two up to 8, lane l holding values l, l + 32, …:
// Hadamard butterflies at distance 1, 2, 4, …, one product with `factor`, bf16, then E2M1 in groups of 32.
DEV void hadamard_e2m1(float (&x)[8], int count, float factor) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i < count) {
                float other = __shfl_xor_sync(FULL, x[i], o);
                x[i] = (lane & o) == 0 ? x[i] + other : other - x[i];
            }
        }
    }
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) {
        if (o < count) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if ((i & o) == 0) {
                    float low = x[i], high = x[i + o];
                    x[i] = low + high;
                    x[i + o] = low - high;
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < count) {
            float v = bf16_round(x[i] * factor);
            float amax = max_c(fabsf(v), E2M1_AMAX_MIN);
            for (int o = 16; o > 0; o >>= 1) amax = max_c(__shfl_xor_sync(FULL, amax, o), amax);
            float scale = e2m1_scale(amax);
            x[i] = bf16_round(e2m1_round(v, 1.0f / scale) * scale);
        }
    }
}

// The factor of the root mean square of a position's streams, of n values in all.
DEV float stream_factor(float squares, int n, float eps) { return inverse_sqrt(squares / (float)n + eps); }

// Divides lane (j, k)'s entry by the sum of its row (or column) + eps; the sum ascends from its first.
template <int HC>
DEV float divided(float c, int first, int step, int hc, float eps) {
    float sum = __shfl_sync(FULL, c, first);
#pragma unroll
    for (int i = 1; i < (HC ? HC : hc); i++) sum = sum + __shfl_sync(FULL, c, first + i * step);
    return c / (sum + eps);
}

// post[hc] and comb[hc, hc] of one position from its mixes m · r, by one warp: lane j · hc + k holds (j, k).
// HC is hc where that is known, else 0.
template <int HC>
DEV void sinkhorn(const float* m, float r, int hc, int iterations, float eps, const float* scale, const float* base,
                  float* out) {
    int lane = threadIdx.x & 31;
    int entry = lane < hc * hc ? lane : 0;
    int j = entry / hc, k = entry % hc;
    if (lane < hc) out[lane] = sigmoid_c(m[hc + lane] * r * scale[1] + base[hc + lane]) * 2.0f;
    float c = m[2 * hc + entry] * r * scale[2] + base[2 * hc + entry];
    float largest = -INF_F;
    for (int i = 0; i < hc; i++) largest = max_c(__shfl_sync(FULL, c, j * hc + i), largest);
    c = exp_c(c - largest);
    float sum = __shfl_sync(FULL, c, j * hc);
    for (int i = 1; i < hc; i++) sum = sum + __shfl_sync(FULL, c, j * hc + i);
    c = c / sum + eps;
    c = divided<HC>(c, k, hc, hc, eps);
    for (int i = 1; i < iterations; i++) {
        c = divided<HC>(c, j * hc, 1, hc, eps);
        c = divided<HC>(c, k, hc, hc, eps);
    }
    if (lane < hc * hc) out[hc + lane] = c;
}

// How the streams of a pass are spread again: what hyper_mix left, and where post and comb go.
struct Spread {
    const float* raw;
    const float* scale;
    const float* base;
    float* mix; // [m, hc + hc * hc], or null
    int hc;
    int width;
    int iterations;
    float hc_eps;
    float norm_eps;
};

// One row of it, by one warp.
DEV void spread_row(const Spread& a, int row) {
    int mixes = (2 + a.hc) * a.hc;
    const float* m = a.raw + (u64)row * (mixes + 1);
    float r = stream_factor(m[mixes], a.width, a.norm_eps);
    float* out = a.mix + (u64)row * (a.hc + a.hc * a.hc);
    if (a.hc == 4)
        sinkhorn<4>(m, r, 4, a.iterations, a.hc_eps, a.scale, a.base, out);
    else
        sinkhorn<0>(m, r, a.hc, a.iterations, a.hc_eps, a.scale, a.base, out);
}
