// Activation quantization: groups of values share a power-of-two scale. Needs common.cuh.
//
// Everything is exact but the one rounding to the code, and the same operations as the CPU's.

#define E4M3_MAX 448.0f
#define E4M3_INVERSE (1.0f / 448.0f)
#define E4M3_AMAX_MIN 1e-4f
#define E2M1_MAX 6.0f
#define E2M1_INVERSE (1.0f / 6.0f)
#define E2M1_AMAX_MIN __int_as_float(0x01c00000) /* 6 * 2^-126 */

// 2^ceil(log2 x) of a positive normal x; NaN past the format.
DEV float pow2ceil(float x) {
  u32 bits = __float_as_uint(x) & 0x7fffffffu;
  u32 exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0u);
  return exponent >= 255u ? NAN_F : __uint_as_float(exponent << 23);
}

// The scale of a group whose largest magnitude is `amax` (any lower bound is applied here).
DEV float e4m3_scale(float amax) { return pow2ceil(fmaxf(amax, E4M3_AMAX_MIN) * E4M3_INVERSE); }
DEV float e2m1_scale(float amax) { return pow2ceil(fmaxf(amax, E2M1_AMAX_MIN) * E2M1_INVERSE); }

// The code value nearest to t, |t| within the format, ties to even: `normal` is the power of two
// from which on steps grow, 2^up times a value's power of two the number whose ulp is the step.
DEV float round_code(float t, float normal, u32 up) {
  float magnitude = fabsf(t);
  u32 power = __float_as_uint(magnitude) & 0x7f800000u;
  u32 floor = __float_as_uint(normal);
  float ruler = __uint_as_float((power > floor ? power : floor) + (up << 23));
  return copysignf((magnitude + ruler) - ruler, t);
}

// The E4M3 code of x / scale as a value; `inverse` is 1 / scale, a power of two. A NaN stays one.
DEV float e4m3_round(float x, float inverse) {
  float t = min_c(E4M3_MAX, max_c(-E4M3_MAX, x * inverse));
  return t != t ? t : round_code(t, 1.0f / 64.0f, 20u);
}

// The E2M1 code of x / scale as a value; -0 becomes +0, as the official quantizer has it.
DEV float e2m1_round(float x, float inverse) {
  float t = min_c(E2M1_MAX, max_c(-E2M1_MAX, (x + 0.0f) * inverse));
  return t != t ? t : round_code(t, 1.0f, 22u);
}

// Quantizes one group held by W neighbouring lanes, V values each, and puts back code * scale,
// which the caller rounds to bf16. All lanes of the warp must take part.
template <int W, int V>
DEV void e4m3_in_place(float (&x)[V]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < V; i++) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
  for (int o = W / 2; o > 0; o >>= 1) amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, o));
  float scale = e4m3_scale(amax);
  float inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < V; i++) x[i] = e4m3_round(x[i], inverse) * scale;
}

// The same with E2M1 codes.
template <int W, int V>
DEV void e2m1_in_place(float (&x)[V]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < V; i++) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
  for (int o = W / 2; o > 0; o >>= 1) amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, o));
  float scale = e2m1_scale(amax);
  float inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < V; i++) x[i] = e2m1_round(x[i], inverse) * scale;
}
