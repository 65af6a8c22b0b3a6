// What crossing a stage boundary does to hidden states, without the bytes.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "state.cuh"

struct WireRoundtrip {
    u16* x;
    int dim;
    const Row* rows;
    const LayerState* states;
    int places;
    int place;
    int* checks;
};

// fp8 encode → decode of each stream of the rows whose session has a boundary in front of this layer.
// x[m, hc, dim] in place. A NaN marks its row. Grid (m, hc), 256 threads.
extern "C" __global__ void wire_roundtrip(const WireRoundtrip a) {
    wait_for_inputs();
    launch_dependents();
    __shared__ u32 warps[8];
    if (a.states[(u64)a.rows[blockIdx.x].slot * a.places + a.place].crossing == 0) return;
    u32* stream = (u32*)(a.x + ((u64)blockIdx.x * gridDim.y + blockIdx.y) * a.dim);
    u32 largest = 0;
    for (int i = threadIdx.x; i < a.dim / 2; i += blockDim.x) {
        u32 pair = stream[i] & 0x7fff7fffu;
        u32 low = pair & 0xffffu, high = pair >> 16;
        largest = largest > low ? largest : low;
        largest = largest > high ? largest : high;
    }
    for (int o = 16; o > 0; o >>= 1) {
        u32 other = __shfl_xor_sync(FULL, largest, o);
        largest = largest > other ? largest : other;
    }
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int w = 0; w < (int)blockDim.x / 32; w++) largest = largest > warps[w] ? largest : warps[w];
    if (largest > 0x7f80u) {
        if (threadIdx.x == 0) mark(a.checks, blockIdx.x, a.place + 1);
        return;
    }
    float scale = bf16_round(max_c(bf16_up((u16)largest), 1e-8f) * E4M3_INVERSE);
    float most = bf16_up((u16)0x7f7f);
    scale = scale < most ? scale : most;
    for (int i = threadIdx.x; i < a.dim / 2; i += blockDim.x) {
        u32 pair = stream[i];
        float v[2] = {bf16_lo(pair), bf16_hi(pair)};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float t = min_c(E4M3_MAX, max_c(-E4M3_MAX, v[k] / scale)) * 0.00390625f;
            v[k] = round_code(t, 6.103515625e-5f, 20u) * 256.0f * scale;
        }
        stream[i] = bf16_pair(v[0], v[1]);
    }
}
