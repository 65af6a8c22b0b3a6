// exp, ln, softplus, sigmoid and silu by the fixed polynomials of docs/numerics.md. Needs
// common.cuh. The same operations in the same order as the CPU's, so the same bits.

#define LOG2_E 1.44269504088896340736f
#define LN2_HIGH 0.69314575f
#define LN2_LOW 1.4286068e-6f
#define EXP_MIN (-110.0f)
#define EXP_MAX 95.0f
#define SQRT2_F 1.41421356237309504880f
#define SOFTPLUS_LINEAR 20.0f

// 2^n for integral n from -126 to 127.
DEV float pow2_int(float n) { return __uint_as_float((u32)((int)n + 127) << 23); }

// e^x as y * a * b, where only the last product rounds or overflows.
DEV void exp_parts(float x, float &y, float &a, float &b) {
  x = min_c(EXP_MAX, max_c(EXP_MIN, x));
  float n = rintf(x * LOG2_E);
  float high = fmaf(n, -LN2_HIGH, x);
  float r = fmaf(n, -LN2_LOW, high);
  float tail = fmaf(n, -LN2_LOW, high - r);
  float p = 0.00019890991f;
  p = fmaf(p, r, 0.001393365f);
  p = fmaf(p, r, 0.0083333105f);
  p = fmaf(p, r, 0.041666467f);
  p = fmaf(p, r, 0.16666667f);
  p = fmaf(p, r, 0.5f);
  y = 1.0f + (r + fmaf(p, r * r, tail));
  float half = rintf(n * 0.5f);
  a = pow2_int(half);
  b = pow2_int(n - half);
}

// e^x; underflows gradually to 0, overflows to infinity.
DEV float exp_c(float x) {
  float y, a, b;
  exp_parts(x, y, a, b);
  return (y * a) * b;
}

// k ln 2 + ln(1 + f) + c.
DEV float ln_parts(float k, float f, float c) {
  float z = f * f;
  float p = 0.06971612f;
  p = fmaf(p, f, -0.11479734f);
  p = fmaf(p, f, 0.1168542f);
  p = fmaf(p, f, -0.12425687f);
  p = fmaf(p, f, 0.14249058f);
  p = fmaf(p, f, -0.16667802f);
  p = fmaf(p, f, 0.20000716f);
  p = fmaf(p, f, -0.24999997f);
  p = fmaf(p, f, 0.3333333f);
  float small = fmaf(p, f * z, z * -0.5f);
  float low = fmaf(k, LN2_LOW, c);
  return fmaf(k, LN2_HIGH, f + (small + low));
}

// A positive normal as m * 2^k with m in [sqrt 1/2, sqrt 2).
DEV void split_near_one(float x, float &k, float &m) {
  u32 bits = __float_as_uint(x);
  m = __uint_as_float((bits & 0x007fffffu) | 0x3f800000u);
  k = (float)((int)(bits >> 23) - 127);
  if (!(m < SQRT2_F)) {
    k = k + 1.0f;
    m = m * 0.5f;
  }
}

// ln(1 + e^x), and x itself above 20.
DEV float softplus_c(float x) {
  float e = exp_c(x);
  float d = 1.0f + e;
  float lost = e < 1.0f ? e - (d - 1.0f) : 1.0f - (d - e);
  float k, m;
  split_near_one(d, k, m);
  bool near = d < SQRT2_F;
  float f = near ? e : m - 1.0f;
  float c = near ? 0.0f : lost / d;
  return SOFTPLUS_LINEAR < x ? x : ln_parts(k, f, c);
}

// 1 / (1 + e^-x).
DEV float sigmoid_c(float x) {
  float z = exp_c(0.0f - fabsf(x));
  float d = 1.0f + z;
  float lost = z - (d - 1.0f);
  bool negative = x < 0.0f;
  float q = (negative ? z : 1.0f) / d;
  float inverse = negative ? 1.0f - q : q;
  return fmaf(0.0f - q * lost, inverse, q);
}

// x / (1 + e^-x).
DEV float silu_c(float x) {
  float y, a, b;
  exp_parts(0.0f - fabsf(x), y, a, b);
  float z = (y * a) * b;
  float d = 1.0f + z;
  float lost = z - (d - 1.0f);
  bool negative = x < 0.0f;
  float bounded = max_c(EXP_MIN, x);
  float factor = negative ? y : 1.0f;
  float top = negative ? bounded : x;
  float product = top * factor;
  float product_lost = fmaf(top, factor, 0.0f - product);
  float q = product / d;
  float minus_q = 0.0f - q;
  float rest = fmaf(minus_q, d, product) + product_lost;
  float fix = fmaf(minus_q, lost, rest) / d;
  q = fix == fix ? q + fix : q;
  return (q * (negative ? a : 1.0f)) * (negative ? b : 1.0f);
}
