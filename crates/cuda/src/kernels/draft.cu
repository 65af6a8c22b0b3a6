// The Markov head of a draft block: each token's logits take a bias by the token before it.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "state.cuh"

#define MARKOV_THREADS 256
#define MARKOV_BLOCKS_MAX 1024

struct MarkovLogits {
    const Row* anchor;
    const int* tokens;
    int k;
    const u16* markov_in;
    const u16* markov_out;
    int rank;
    int vocab;
    float* logits;
    const u16* y;
    int dim;
    const u16* confidence_weights;
    float* confidence;
    u64* best;
};

// A value of the confidence head's input: the head's input row, then the Markov embedding.
DEV float confidence_input(const u16* y, int dim, const u16* markov, int i) {
    return bf16_up(i < dim ? y[i] : markov[i - dim]);
}

// logits[k, v] += markov_out[v] · markov_in[token before], one warp a row of the vocabulary, and each block's
// best; the last block computes confidence[k]. Grid (blocks + 1).
extern "C" __global__ void markov_logits(const MarkovLogits a) {
    wait_for_inputs();
    launch_dependents();
    __shared__ u64 warps[MARKOV_THREADS / 32];
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int before = a.k == 0 ? a.anchor->id : a.tokens[a.k - 1];
    const u16* markov = a.markov_in + (u64)before * a.rank;
    int blocks = gridDim.x - 1;
    if ((int)blockIdx.x == blocks) {
        if (warp > 0) return;
        const u16* y = a.y + (u64)a.k * a.dim;
        float acc = 0.0f;
        for (int run = lane; run < (a.dim + a.rank) / 8; run += 32) {
            float s = 0.0f;
            for (int e = 0; e < 8; e++)
                s = fmaf(bf16_up(a.confidence_weights[8 * run + e]), confidence_input(y, a.dim, markov, 8 * run + e), s);
            acc = s + acc;
        }
        acc = butterfly(acc);
        if (lane == 0) a.confidence[a.k] = acc;
        return;
    }
    float* logits = a.logits + (u64)a.k * a.vocab;
    u64 best = 0;
    for (int v = blockIdx.x * (MARKOV_THREADS / 32) + warp; v < a.vocab; v += blocks * (MARKOV_THREADS / 32)) {
        const uint4* weights = (const uint4*)(a.markov_out + (u64)v * a.rank);
        float acc = 0.0f;
        for (int run = lane; run < a.rank / 8; run += 32) {
            uint4 w = weights[run], x = ((const uint4*)markov)[run];
            float s = fmaf(bf16_lo(w.x), bf16_lo(x.x), 0.0f);
            s = fmaf(bf16_hi(w.x), bf16_hi(x.x), s);
            s = fmaf(bf16_lo(w.y), bf16_lo(x.y), s);
            s = fmaf(bf16_hi(w.y), bf16_hi(x.y), s);
            s = fmaf(bf16_lo(w.z), bf16_lo(x.z), s);
            s = fmaf(bf16_hi(w.z), bf16_hi(x.z), s);
            s = fmaf(bf16_lo(w.w), bf16_lo(x.w), s);
            s = fmaf(bf16_hi(w.w), bf16_hi(x.w), s);
            acc = s + acc;
        }
        acc = butterfly(acc);
        float logit = logits[v] + acc;
        if (lane == 0) logits[v] = logit;
        u64 key = selection_key(logit, (u32)v);
        best = best > key ? best : key;
    }
    if (lane == 0) warps[warp] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < MARKOV_THREADS / 32; w++) best = best > warps[w] ? best : warps[w];
        a.best[blockIdx.x] = best;
    }
}

struct MarkovToken {
    const u64* best;
    int blocks;
    int k;
    int* tokens;
};

// tokens[k]: the largest logit, the lowest of equals. One block, 32 threads.
extern "C" __global__ void markov_token(const MarkovToken a) {
    wait_for_inputs();
    launch_dependents();
    u64 best = 0;
    for (int i = threadIdx.x; i < a.blocks; i += 32) best = best > a.best[i] ? best : a.best[i];
    for (int o = 16; o > 0; o >>= 1) {
        u64 other = __shfl_xor_sync(FULL, best, o);
        best = best > other ? best : other;
    }
    if (threadIdx.x == 0) a.tokens[a.k] = (int)(0xffffffffu - (u32)best);
}
