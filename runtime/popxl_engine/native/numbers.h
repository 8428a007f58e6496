// Element types, and functions of one number that compilers turn into vector instructions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

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

// Rounds numbers to nearest. Compilers do not find the instruction for two vectors at a time.
static inline void narrow(const float* from, bfloat16* to, int64_t count) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  for (int64_t i = 0; i < count; i += 32) {
    const uint32_t mask = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
    const __m512 low = _mm512_maskz_loadu_ps(__mmask16(mask), from + i);
    const __m512 high = _mm512_maskz_loadu_ps(__mmask16(mask >> 16), from + i + 16);
    _mm512_mask_storeu_epi16(to + i, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
#else
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
#endif
}

static inline void narrow(const float* from, float* to, int64_t count) {
  std::memcpy(to, from, sizeof(float) * std::size_t(count));
}

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

// 2**x to 3e-6, for x of -126 to 127.
static inline float power_of_two(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2**23 rounds to integers
  const float shifted = x + magic, f = x - (shifted - magic);
  float p = 0.00957008f;
  p = fused(p, f, 0.05591783f);
  p = fused(p, f, 0.24024745f);
  p = fused(p, f, 0.69312182f);
  p = fused(p, f, 0.99999926f);
  return bits_as<float>(bits_as<uint32_t>(p) + (bits_as<uint32_t>(shifted) << 23));
}

// 1 / x to 7e-6, for x of 1 to 2**125: from its bits, and two of Newton's steps.
static inline float reciprocal(float x) {
  const float first = bits_as<float>(0x7ef31000u - bits_as<uint32_t>(x));
  const float second = fused(first, fused(-x, first, 1.0f), first);
  return fused(second, fused(-x, second, 1.0f), second);
}

// To 3e-6; what is below 2e-38 becomes zero.
static inline float decay(float x, bfloat16) {
  const float lowest = -87.0f, log2_e = 1.44269504f;
  return x < lowest ? 0.0f : power_of_two(x * log2_e);
}

// GELU's tanh form: x * sigmoid(2u), 2u = C (x + 0.044715 x**3), and its slope, as exactly as results of a type need;
// beyond 10 they are 0 or x, 0 or 1.
constexpr float GELU_C = 1.5957691216057308f, GELU_CUBIC = 0.044715f, GELU_BINARY = GELU_C * 1.44269504f;

static inline float within(float x, float low, float high) {
  const float above = x < low ? low : x;
  return above > high ? high : above;
}

static inline float gelu_slope(float t, float e, float s) {  // with e = exp(-2u) and s = sigmoid(2u)
  return s + t * s * (s * e) * GELU_C * (1.0f + 3.0f * GELU_CUBIC * (t * t));  // s(1 - s) = s * s * e
}

static inline float gelu(float x, float) {
  const float t = within(x, -10.06f, 10.0f);  // of -10.06 the exponential is infinity
  return x / (1.0f + exponential(-GELU_C * t * (1.0f + GELU_CUBIC * t * t)));
}

static inline float gelu_slope(float x, float) {
  const float t = within(x, -10.0f, 10.0f);
  const float e = exponential(-GELU_C * t * (1.0f + GELU_CUBIC * t * t));
  return gelu_slope(t, e, 1.0f / (1.0f + e));
}

static inline float gelu(float x, bfloat16) {
  const float t = within(x, -9.9f, 9.9f);
  const float s = reciprocal(1.0f + power_of_two(-GELU_BINARY * t * (1.0f + GELU_CUBIC * t * t)));
  return x * (x < -9.9f ? 0.0f : s);
}

static inline float gelu_slope(float x, bfloat16) {
  const float t = within(x, -9.9f, 9.9f);
  const float e = power_of_two(-GELU_BINARY * t * (1.0f + GELU_CUBIC * t * t));
  return gelu_slope(t, e, reciprocal(1.0f + e));
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
