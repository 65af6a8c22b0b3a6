// Token ids to residual streams, and the ends of a pass: finite or not.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "state.cuh"

struct EmbedRows {
    const Row* rows;
    const u16* embedding;
    u16* hidden;
    int dim;
};

// hidden[m, hc, dim] = embedding[id] in every stream. Grid (m, hc).
extern "C" __global__ void embed_rows(const EmbedRows a) {
    wait_for_inputs();
    launch_dependents();
    int row = blockIdx.x, stream = blockIdx.y;
    const uint4* from = (const uint4*)(a.embedding + (u64)a.rows[row].id * a.dim);
    uint4* to = (uint4*)(a.hidden + ((u64)row * gridDim.y + stream) * a.dim);
    for (int i = threadIdx.x; i < a.dim / 8; i += blockDim.x) to[i] = from[i];
}

struct BlockRows {
    const Row* anchor;
    Row* rows;
    int block;
    int noise;
};

// The rows of a draft block behind its anchor: position at + 1 + k, the anchor's id, then noise. One block.
extern "C" __global__ void block_rows(const BlockRows a) {
    wait_for_inputs();
    launch_dependents();
    int k = threadIdx.x;
    if (k >= a.block) return;
    Row row = *a.anchor;
    row.pos = row.pos + 1 + k;
    row.id = k == 0 ? row.id : a.noise;
    a.rows[k] = row;
}

struct FiniteRows {
    const u16* x;
    int width;
    int* checks;
    int number;
};

// Marks rows of bf16 values that hold a NaN or an infinity. Grid (m).
extern "C" __global__ void finite_rows(const FiniteRows a) {
    wait_for_inputs();
    launch_dependents();
    const uint4* row = (const uint4*)(a.x + (u64)blockIdx.x * a.width);
    bool bad = false;
    for (int i = threadIdx.x; i < a.width / 8; i += blockDim.x) {
        uint4 v = row[i];
        u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            bad |= (words[k] & 0x7f80u) == 0x7f80u;
            bad |= (words[k] & 0x7f800000u) == 0x7f800000u;
        }
    }
    if (bad) mark(a.checks, blockIdx.x, a.number);
}

struct FiniteFloats {
    const float* x;
    int width;
    const int* picks;
    int* checks;
    int number;
};

// The same of fp32 values; row n of x is row picks[n] of the pass, or n itself without picks. Grid (n, 8).
extern "C" __global__ void finite_floats(const FiniteFloats a) {
    wait_for_inputs();
    launch_dependents();
    const float* row = a.x + (u64)blockIdx.x * a.width;
    bool bad = false;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < a.width; i += gridDim.y * blockDim.x)
        bad |= (__float_as_uint(row[i]) & 0x7f800000u) == 0x7f800000u;
    if (bad) mark(a.checks, a.picks ? a.picks[blockIdx.x] : (int)blockIdx.x, a.number);
}
