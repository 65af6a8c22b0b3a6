// Routing: which experts a row takes, and with which weights.
#include "common.cuh"
#include "math.cuh"
#include "quant.cuh"
#include "state.cuh"

// The k best of score + bias, by one warp: lane l holds the keys of experts l, l + 32, …; what is taken goes
// to 0. The largest key, of equals the lowest expert.
template <int EACH>
DEV void choose(const float* scores, const float* bias, int experts, int k, u32* chosen) {
    int lane = threadIdx.x & 31;
    u32 keys[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int e = 32 * i + lane;
        keys[i] = e < experts ? order_key(scores[e] + bias[e]) : 0u;
    }
    for (int n = 0; n < k; n++) {
        u32 best = 0, at = 0xffffu;
#pragma unroll
        for (int i = 0; i < EACH; i++) best = best > keys[i] ? best : keys[i];
        best = __reduce_max_sync(FULL, best);
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--)
            if (keys[i] == best && 32 * i + lane < experts) at = 32 * i + lane;
        at = __reduce_min_sync(FULL, at);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if ((u32)(32 * i + lane) == at) keys[i] = 0u;
        if (lane == 0) chosen[n] = at;
    }
}

struct Route {
    const float* logits;
    int experts;
    int k;
    const float* bias;
    const u16* hash;
    float route_scale;
    const Row* rows;
    int* picks;
    float* weights;
    Spread spread;
};

// picks[m, k] (ascending ids) and weights[m, k] from router logits [m, experts]: scores √softplus, the k best
// of score + bias, or the token's own ids where `hash` is given; weights normed over the picks, ascending.
// Experts ≤ 1024, k ≤ 32. A second block of a row says how its streams are spread; the mixes for it are older
// than the product in front and not waited for. Grid (m, spread.mix ? 2 : 1), 256 threads.
extern "C" __global__ void route(const Route a) {
    if (blockIdx.y == 1) {
        if (threadIdx.x < 32) spread_row(a.spread, blockIdx.x);
        wait_for_inputs();
        launch_dependents();
        return;
    }
    float first_bias = a.bias && (int)threadIdx.x < a.experts ? a.bias[threadIdx.x] : 0.0f;
    u32 hashed = a.hash && (int)threadIdx.x < a.k ? a.hash[(u64)a.rows[blockIdx.x].id * a.k + threadIdx.x] : 0u;
    wait_for_inputs();
    launch_dependents();
    __shared__ float scores[1024], biases[1024];
    __shared__ u32 chosen[32];
    int row = blockIdx.x, lane = threadIdx.x;
    for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
        scores[e] = sqrtf(softplus_c(a.logits[(u64)row * a.experts + e]));
        if (a.bias) biases[e] = e == (int)threadIdx.x ? first_bias : a.bias[e];
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    if (a.hash) {
        if (lane < a.k) chosen[lane] = hashed;
    } else {
        if (a.experts <= 256)
            choose<8>(scores, biases, a.experts, a.k, chosen);
        else
            choose<32>(scores, biases, a.experts, a.k, chosen);
    }
    __syncwarp();
    // Ascending by rank; equal ids (a token's row may list one twice) keep their order.
    u32 id = lane < a.k ? chosen[lane] : 0u;
    int rank = 0;
    for (int i = 0; i < a.k; i++) {
        u32 other = chosen[i];
        rank += other < id || (other == id && i < lane);
    }
    __syncwarp();
    if (lane < a.k) chosen[rank] = id;
    __syncwarp();
    if (lane < a.k) {
        float sum = 0.0f;
        for (int i = 0; i < a.k; i++) sum = sum + scores[chosen[i]];
        u32 mine = chosen[lane];
        a.picks[(u64)row * a.k + lane] = (int)mine;
        a.weights[(u64)row * a.k + lane] = (scores[mine] / sum) * a.route_scale;
    }
}
