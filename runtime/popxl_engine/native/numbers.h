// Element types, and functions of one number that compilers turn into vector instructions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct bfloat16 {
  uint16_t bits;
};

template <class To, class From>
static inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

static inline float wide(float x) { return x; }
static inline float wide(bfloat16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }

static inline bool is_nan(float x) { return (bits_as<uint32_t>(x) & 0x7fffffffu) > 0x7f800000u; }

// To bfloat16, adding `carry` to the 16 bits that are cut off: 0x7fff plus the last kept bit rounds to nearest even,
// 16 random bits round stochastically.
static inline bfloat16 cut(float x, uint32_t carry) {
  const uint32_t bits = bits_as<uint32_t>(x);
  return {uint16_t(is_nan(x) ? (bits >> 16) | 0x40u : (bits + carry) >> 16)};
}

static inline void narrow(float x, float& to) { to = x; }
static inline void narrow(float x, bfloat16& to) { to = cut(x, 0x7fffu + ((bits_as<uint32_t>(x) >> 16) & 1u)); }

// a * b + c, rounded once where the CPU can do so in one instruction. Written out, because compilers that contract
// products and sums at will do it differently in vectors and in what is left over.
static inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// exp(x) to 2 units in the last place, for x of -87.6 to 88; infinity up to 89. Coefficients: Cephes' expf (Moshier).
static inline float exponential(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2**23 rounds to integers
  const float shifted = fused(x, 1.44269504f, magic);
  const float n = shifted - magic;
  const float f = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = fused(p, f, 1.3981999507e-3f);
  p = fused(p, f, 8.3334519073e-3f);
  p = fused(p, f, 4.1665795894e-2f);
  p = fused(p, f, 1.6666665459e-1f);
  p = fused(p, f, 5.0000001201e-1f);
  p = fused(p * f, f, f) + 1.0f;
  return p * bits_as<float>((bits_as<uint32_t>(shifted) - 0x4b400000u + 127u) << 23);
}

// exp(x) for x that are not positive, as exactly as results of a type need. What is below 2.5e-38 becomes zero.
static inline float decay(float x, float) {
  const float lowest = -86.6f;
  return x < lowest ? 0.0f : exponential(x);
}

// To 3e-6; what is below 2e-38 becomes zero. 2**f by its series, f in [-1/2, 1/2].
static inline float decay(float x, bfloat16) {
  const float lowest = -87.0f, magic = 12582912.0f;  // magic: 1.5 * 2**23 rounds to integers
  const float t = (x < lowest ? lowest : x) * 1.44269504f, shifted = t + magic, f = t - (shifted - magic);
  float p = 1.33335581e-3f;
  p = fused(p, f, 9.61812911e-3f);
  p = fused(p, f, 5.55041087e-2f);
  p = fused(p, f, 2.40226507e-1f);
  p = fused(p, f, 6.93147181e-1f);
  p = fused(p, f, 1.0f);
  const float power = bits_as<float>((bits_as<uint32_t>(shifted) - 0x4b400000u + 127u) << 23);
  return x < lowest ? 0.0f : is_nan(x) ? x : p * power;
}

// GELU's tanh form: x * sigmoid(2u), 2u = C (x + 0.044715 x**3), and its slope; beyond 10 they are 0 or x, 0 or 1.
constexpr float GELU_C = 1.5957691216057308f, GELU_CUBIC = 0.044715f;

static inline float gelu(float x) {
  const float t = x < -10.06f ? -10.06f : x > 10.0f ? 10.0f : x;  // of -10.06 the exponential is infinity
  return x / (1.0f + exponential(-GELU_C * t * (1.0f + GELU_CUBIC * t * t)));
}

static inline float gelu_slope(float x) {
  const float t = x < -10.0f ? -10.0f : x > 10.0f ? 10.0f : x, square = t * t;
  const float e = exponential(-GELU_C * t * (1.0f + GELU_CUBIC * square)), s = 1.0f / (1.0f + e);
  return s + t * s * (s * e) * GELU_C * (1.0f + 3.0f * GELU_CUBIC * square);  // s(1 - s) = s * s * e
}

// Squares64 (Widynski 2020, arXiv:2004.06278): the output for a counter. popxl/generator.py says what draws are.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "draws are read from words in memory");

static inline uint64_t swap_halves(uint64_t x) { return (x >> 32) | (x << 32); }

static inline uint64_t squares64(uint64_t counter, uint64_t key) {
  const uint64_t y = counter * key, z = y + key;
  uint64_t x = swap_halves(y * y + y);
  x = swap_halves(x * x + z);
  x = swap_halves(x * x + y);
  const uint64_t t = x * x + z;
  x = swap_halves(t);
  return t ^ ((x * x + y) >> 32);
}

template <class T>
static float largest(const T* x, int64_t count) {
  float most = -INFINITY;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; ++i) most = most < wide(x[i]) ? wide(x[i]) : most;
  return most;
}
