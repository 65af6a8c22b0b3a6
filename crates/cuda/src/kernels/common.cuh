// Types, formats and the fold that every kernel shares.
//
// Compiled with --fmad=false, no -ftz, correctly rounded division and square root: an operation is
// contracted only where fma is spelled. Nothing here depends on a header of the toolkit.

#pragma nv_diag_suppress 177 /* a file may use some of it only */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV static __device__ __forceinline__
#define DEV_MEMBER __device__ __forceinline__
#define FULL 0xffffffffu
#define LANES 32
#define INF_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)

DEV u32 lane_id() { return threadIdx.x & 31u; }

DEV u32 warp_id() { return threadIdx.x >> 5; }

// ---- bf16 ----

// bf16 bits to fp32, exactly.
DEV float bf16_up(u16 bits) { return __uint_as_float((u32)bits << 16); }

// The low and the high bf16 of a word.
DEV float bf16_lo(u32 pair) { return __uint_as_float(pair << 16); }
DEV float bf16_hi(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// fp32 to bf16 bits: nearest, ties to even; a NaN stays one.
DEV u16 bf16_down(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// Two values to one word, the first in the low half.
DEV u32 bf16_pair(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// Rounds to bf16 and back.
DEV float bf16_round(float x) { return bf16_up(bf16_down(x)); }

// ---- comparisons of the canonical arithmetic ----

// a > b ? a : b: a NaN on either side gives b.
DEV float max_c(float a, float b) { return a > b ? a : b; }

// a < b ? a : b: a NaN on either side gives b.
DEV float min_c(float a, float b) { return a < b ? a : b; }

// ---- E8M0 ----

// The value of a scale code, 2^(code - 127); code 0 is subnormal, 255 is refused when loading.
DEV float e8m0_value(u32 code) {
  u32 bits = code << 23;
  return __uint_as_float(bits > 0x00400000u ? bits : 0x00400000u);
}

// ---- E4M3 ----

// Two codes (low byte first) to two fp16, exactly.
DEV u32 e4m3x2_half(u16 codes) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}

// The low and the high fp16 of a word to fp32, exactly.
DEV float half_lo(u32 halves) {
  float x;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(x) : "r"(halves));
  return x;
}

DEV float half_hi(u32 halves) {
  float x;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(x) : "r"(halves));
  return x;
}

// Four codes of a word, lowest byte first.
DEV void e4m3x4(u32 word, float out[4]) {
  u32 a = e4m3x2_half((u16)word);
  u32 b = e4m3x2_half((u16)(word >> 16));
  out[0] = half_lo(a);
  out[1] = half_hi(a);
  out[2] = half_lo(b);
  out[3] = half_hi(b);
}

// Two values that E4M3 can say to their codes, the first in the low byte.
DEV u16 e4m3x2_code(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// ---- E2M1 ----

// The value of a code (low four bits).
DEV float e2m1_value(u32 code) {
  // As an fp16 with the code's three bits at the seam of exponent and mantissa it is 2^-14 times
  // the value.
  u32 bits = ((code & 8u) << 12) | ((code & 7u) << 9);
  return half_lo(bits) * 16384.0f;
}

// ---- the fold ----

// Step 4 of a canonical dot: every lane gets the sum of the lanes' values.
DEV float butterfly(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v = v + __shfl_xor_sync(FULL, v, o);
  return v;
}

// The largest value of the warp, in every lane; NaN counts as absent.
DEV float warp_max(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, o));
  return v;
}

// One level of the fold below: N values become N / 2 at lane distance O.
template <int N, int O>
struct Fold {
  static DEV_MEMBER float run(float (&v)[N]) {
    bool upper = lane_id() & O;
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      float keep = upper ? v[i + N / 2] : v[i];
      float give = upper ? v[i] : v[i + N / 2];
      half[i] = keep + __shfl_xor_sync(FULL, give, O);
    }
    return Fold<N / 2, O / 2>::run(half);
  }
};

template <int O>
struct Fold<1, O> {
  static DEV_MEMBER float run(float (&v)[1]) {
    float r = v[0];
#pragma unroll
    for (int o = O; o > 0; o >>= 1) r = r + __shfl_xor_sync(FULL, r, o);
    return r;
  }
};

// The fold of N values per lane at once, N a power of two up to 32, with N - 1 + log2(32 / N)
// shuffles and the additions of `butterfly`: lane l ends with the sum of value l / (32 / N).
template <int N>
DEV float butterfly_transposed(float (&v)[N]) {
  return Fold<N, 16>::run(v);
}

// ---- dependent launches ----

// Lets the next kernel of the stream start its prologue.
DEV void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until what the kernels before wrote can be read. Every kernel that may be launched as a
// dependent one calls it before its first read of activations and before its first write.
DEV void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
