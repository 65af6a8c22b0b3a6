// Residual streams: their mixes, the row that a sublayer takes, and what becomes of its result.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "state.cuh"

#define MIX_RUNS_MAX 8192
#define MIX_AHEAD 4 /* runs of a thread whose weights are fetched first */
#define STREAMS_MAX 5

struct HyperMix {
    const u16* x;
    const int* picks;
    const float* fn;
    int width;
    float* raw;
};

// raw[m, mixes + 1]: the mixes fn[mixes, width] · x of the streams x[m, width], then Σ x². Each in the
// canonical order with runs of four. `picks` says which rows of x, or null. Grid (mixes + 1, m).
// The weights are on their way before the streams are waited for.
extern "C" __global__ void hyper_mix(const HyperMix a) {
    __shared__ float runs[MIX_RUNS_MAX];
    int mix = blockIdx.x;
    bool squares = mix + 1 == gridDim.x;
    const float4* weights = (const float4*)(a.fn + (u64)(squares ? 0 : mix) * a.width);
    float4 ahead[MIX_AHEAD];
#pragma unroll
    for (int n = 0; n < MIX_AHEAD; n++) {
        int run = n * blockDim.x + threadIdx.x;
        ahead[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!squares && run < a.width / 4) ahead[n] = weights[run];
    }
    wait_for_inputs();
    launch_dependents();
    int row = a.picks ? a.picks[blockIdx.y] : (int)blockIdx.y;
    const uint2* from = (const uint2*)(a.x + (u64)row * a.width);
    auto take = [&](int run, uint2 v, float4 w) {
        float a = bf16_lo(v.x), b = bf16_hi(v.x), c = bf16_lo(v.y), d = bf16_hi(v.y);
        runs[run] = squares ? squares4(a, b, c, d) : fmaf(w.w, d, fmaf(w.z, c, fmaf(w.y, b, fmaf(w.x, a, 0.0f))));
    };
    uint2 streams[MIX_AHEAD];
#pragma unroll
    for (int n = 0; n < MIX_AHEAD; n++) {
        int run = n * blockDim.x + threadIdx.x;
        if (run < a.width / 4) streams[n] = from[run];
    }
#pragma unroll
    for (int n = 0; n < MIX_AHEAD; n++) {
        int run = n * blockDim.x + threadIdx.x;
        if (run < a.width / 4) take(run, streams[n], ahead[n]);
    }
    for (int run = MIX_AHEAD * blockDim.x + threadIdx.x; run < a.width / 4; run += blockDim.x)
        take(run, from[run], weights[run]);
    __syncthreads();
    if (threadIdx.x < 32) {
        float sum = fold_runs(runs, a.width / 4);
        if (threadIdx.x == 0) a.raw[(u64)blockIdx.y * gridDim.x + mix] = sum;
    }
}

struct HyperEnter {
    const u16* h;
    const int* picks;
    const float* raw;
    const float* scale;
    const float* base;
    int hc;
    int dim;
    int mixes;
    float hc_eps;
    float norm_eps;
    const float* weight;
    u16* y;
    u16* x;
};

// The row that a sublayer takes: y = bf16(Σ pre_j · h_j), x = rms_norm(y). `raw` is hyper_mix's of `mixes`
// mixes, of which the first hc are taken. `y` may be null. Grid (m). Only `raw` is waited for: the kernel in
// front is hyper_mix, which waited for the streams.
extern "C" __global__ void hyper_enter(const HyperEnter a) {
    DYNAMIC_SHARED(float, shared);
    __shared__ float factor, weights[STREAMS_MAX];
    int mixes = a.mixes;
    const float* m = a.raw + (u64)blockIdx.x * (mixes + 1);
    // Values, then the chain sums of runs.
    float* values = shared;
    float* runs = shared + a.dim;
    int row = a.picks ? a.picks[blockIdx.x] : (int)blockIdx.x;
    const u16* streams = a.h + (u64)row * a.hc * a.dim;
    int run = threadIdx.x;
    // Loads of the first runs fly while the weights are computed.
    uint2 next[STREAMS_MAX];
#pragma unroll
    for (int j = 0; j < STREAMS_MAX; j++)
        if (j < a.hc && run < a.dim / 4) next[j] = ((const uint2*)(streams + (u64)j * a.dim))[run];
    float4 norms = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (run < a.dim / 4) norms = ((const float4*)a.weight)[run];
    float scale = 0.0f, base = 0.0f;
    if ((int)threadIdx.x < a.hc) scale = a.scale[0], base = a.base[threadIdx.x];
    wait_for_inputs();
    launch_dependents();
    if ((int)threadIdx.x < a.hc) {
        float r = stream_factor(m[mixes], a.hc * a.dim, a.norm_eps);
        weights[threadIdx.x] = sigmoid_c(m[threadIdx.x] * r * scale + base) + a.hc_eps;
    }
    __syncthreads();
    for (; run < a.dim / 4; run += blockDim.x) {
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < STREAMS_MAX; j++) {
            if (j < a.hc) {
                float pre = weights[j];
                v[0] = v[0] + pre * bf16_lo(next[j].x);
                v[1] = v[1] + pre * bf16_hi(next[j].x);
                v[2] = v[2] + pre * bf16_lo(next[j].y);
                v[3] = v[3] + pre * bf16_hi(next[j].y);
            }
        }
        int after = run + blockDim.x;
#pragma unroll
        for (int j = 0; j < STREAMS_MAX; j++)
            if (j < a.hc && after < a.dim / 4) next[j] = ((const uint2*)(streams + (u64)j * a.dim))[after];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = bf16_round(v[i]);
        ((float4*)values)[run] = make_float4(v[0], v[1], v[2], v[3]);
        runs[run] = squares4(v[0], v[1], v[2], v[3]);
        if (a.y) ((uint2*)(a.y + (u64)blockIdx.x * a.dim))[run] = make_uint2(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]));
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        float sum = fold_runs(runs, a.dim / 4);
        if (threadIdx.x == 0) factor = inverse_sqrt((sum / (float)a.dim) + a.norm_eps);
    }
    __syncthreads();
    float norm = factor;
    for (int run = threadIdx.x; run < a.dim / 4; run += blockDim.x) {
        float4 v = ((const float4*)values)[run];
        float4 w = run == (int)threadIdx.x ? norms : ((const float4*)a.weight)[run];
        ((uint2*)(a.x + (u64)blockIdx.x * a.dim))[run] =
            make_uint2(bf16_pair(v.x * norm * w.x, v.y * norm * w.y), bf16_pair(v.z * norm * w.z, v.w * norm * w.w));
    }
}

struct HyperLeave {
    u16* h;
    const u16* y;
    const float* mix;
    int hc;
    int dim;
    u16* taps;
    int tap_stride;
    int tap_at;
};

// The streams after a sublayer, in place: h_k = bf16(post_k · y + Σ_j comb_jk · h_j). With `taps`, their mean
// goes to taps[m, tap_stride] from `tap_at` on. Grid (m, dim / (4 · threads)). The streams
// are read before `y` is waited for: several kernels lie between them.
extern "C" __global__ void hyper_leave(const HyperLeave a) {
    int run = blockIdx.y * blockDim.x + threadIdx.x;
    if (run >= a.dim / 4) return;
    const float* post = a.mix + (u64)blockIdx.x * (a.hc + a.hc * a.hc);
    const float* comb = post + a.hc;
    u16* streams = a.h + (u64)blockIdx.x * a.hc * a.dim;
    float old[STREAMS_MAX][4];
#pragma unroll
    for (int j = 0; j < STREAMS_MAX; j++) {
        if (j < a.hc) {
            uint2 v = ((const uint2*)(streams + (u64)j * a.dim))[run];
            old[j][0] = bf16_lo(v.x);
            old[j][1] = bf16_hi(v.x);
            old[j][2] = bf16_lo(v.y);
            old[j][3] = bf16_hi(v.y);
        }
    }
    wait_for_inputs();
    launch_dependents();
    uint2 s = ((const uint2*)(a.y + (u64)blockIdx.x * a.dim))[run];
    float result[4] = {bf16_lo(s.x), bf16_hi(s.x), bf16_lo(s.y), bf16_hi(s.y)};
    float mean[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < STREAMS_MAX; k++) {
        if (k < a.hc) {
            float next[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < STREAMS_MAX; j++)
                    if (j < a.hc) sum = sum + comb[j * a.hc + k] * old[j][i];
                next[i] = bf16_round(post[k] * result[i] + sum);
                mean[i] = k == 0 ? next[i] : mean[i] + next[i];
            }
            ((uint2*)(streams + (u64)k * a.dim))[run] =
                make_uint2(bf16_pair(next[0], next[1]), bf16_pair(next[2], next[3]));
        }
    }
    if (a.taps) {
        float n = (float)a.hc;
        ((uint2*)(a.taps + (u64)blockIdx.x * a.tap_stride + a.tap_at))[run] =
            make_uint2(bf16_pair((mean[0] / n), (mean[1] / n)),
                       bf16_pair((mean[2] / n), (mean[3] / n)));
    }
}
