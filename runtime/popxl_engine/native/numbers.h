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

// exp(x) to 2 units in the last place; what is below 2.5e-38 becomes zero. Coefficients: Cephes' expf (Moshier).
static inline float exponential(float x) {
  const float lowest = -86.6f, highest = 88.72284f, magic = 12582912.0f;  // magic: 1.5 * 2**23 rounds to integers
  float clamped = x < lowest ? lowest : x;
  clamped = clamped > highest ? highest : clamped;
  const float shifted = fused(clamped, 1.44269504f, magic);
  const float n = shifted - magic;
  const float f = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, clamped));
  float p = 1.9875691500e-4f;
  p = fused(p, f, 1.3981999507e-3f);
  p = fused(p, f, 8.3334519073e-3f);
  p = fused(p, f, 4.1665795894e-2f);
  p = fused(p, f, 1.6666665459e-1f);
  p = fused(p, f, 5.0000001201e-1f);
  p = fused(p * f, f, f) + 1.0f;
  const uint32_t half_power = ((bits_as<uint32_t>(shifted) - 0x4b400000u) + 126u) << 23;  // 2**(n - 1)
  float result = p * bits_as<float>(half_power) * 2.0f;
  result = x < lowest ? 0.0f : result;
  result = x > highest ? INFINITY : result;
  return is_nan(x) ? x : result;
}

// exp(x) for x that are not positive, as exactly as results of a type need.
static inline float decay(float x, float) { return exponential(x); }

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

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

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
