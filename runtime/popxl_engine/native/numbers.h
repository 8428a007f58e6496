// Element types, vectors of the CPU, and functions of a number or of a vector: where they take a
// type N, it is either.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__clang__))
#include <immintrin.h>
#endif

using std::int64_t;

// Functions are defined for the element type of the library that is compiled. Those of no one type
// are in float32's.
#ifdef BFLOAT16_LIBRARY
#define FOR_ELEMENT_TYPE(FUNCTIONS) FUNCTIONS(bfloat16, bf16)
#else
#define FOR_ELEMENT_TYPE(FUNCTIONS) FUNCTIONS(float, f32)
#endif

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
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

// The bits below float32's sign move to its exponent's and mantissa's places; a product with 2**112
// puts the exponent right, of subnormal numbers too. Infinities and NaN are what is beyond.
static inline float wide(float16 x) {
  const float magnitude = bits_as<float>(uint32_t(x.bits & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t beyond = magnitude >= 65536.0f ? 0x7f800000u : 0u;
  return bits_as<float>(bits_as<uint32_t>(magnitude) | beyond | uint32_t(x.bits & 0x8000u) << 16);
}

static inline bool is_nan(float x) { return (bits_as<uint32_t>(x) & 0x7fffffffu) > 0x7f800000u; }

// To bfloat16, adding `carry` to the 16 bits that are cut off.
static inline bfloat16 carried(float x, uint32_t carry) {
  const uint32_t bits = bits_as<uint32_t>(x);
  return {uint16_t(is_nan(x) ? (bits >> 16) | 0x40u : (bits + carry) >> 16)};
}

static inline bfloat16 nearest(float x) {
  return carried(x, 0x7fffu + ((bits_as<uint32_t>(x) >> 16) & 1u));
}

// Whether an instruction rounds two vectors to bfloat16. It makes zero of what is below 2**-126; so
// one number alone does, too: its place must not tell.
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define ROUNDS_TO_BFLOAT16
constexpr uint32_t LEAST_BFLOAT16 = 0x00800000u;
#else
constexpr uint32_t LEAST_BFLOAT16 = 0;
#endif

static inline void narrow(float x, float& to) { to = x; }
static inline void narrow(float x, bfloat16& to) {
  const uint32_t bits = bits_as<uint32_t>(x), sign = bits & 0x80000000u;
  to = bits - sign < LEAST_BFLOAT16 ? bfloat16{uint16_t(sign >> 16)} : nearest(x);
}

// Rounds to nearest even. Below 2**-14 float16 has the multiples of 2**-24, which are those of a
// sum with 0.5.
static inline void narrow(float x, float16& to) {
  const uint32_t bits = bits_as<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const float size = bits_as<float>(magnitude);
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t small = bits_as<uint32_t>(size + 0.5f) - 0x3f000000u;
  const uint32_t beyond = is_nan(x) ? 0x7e00u : 0x7c00u;
  const uint32_t number = size < 0x1p-14f ? small : normal;
  to = {uint16_t((bits >> 16 & 0x8000u) | (is_nan(x) || size >= 65520.0f ? beyond : number))};
}

// Rounds stochastically, with 16 random bits, as kernels/rounding.py says.
template <class T>
static inline T cut(float x, uint16_t noise);

template <>
inline bfloat16 cut(float x, uint16_t noise) {
  return carried(x, uint32_t(noise ^ 0x8000u));
}

template <>
inline float16 cut(float x, uint16_t noise) {
  const uint32_t lower = noise & 0x1fffu;
  const float small = std::floor(x * 0x1p24f + float(lower) * 0x1p-13f) * 0x1p-24f;
  const float normal = is_nan(x) ? x : bits_as<float>((bits_as<uint32_t>(x) + lower) & ~0x1fffu);
  float16 result;
  // of zeros the sum of bits keeps the sign
  narrow(std::fabs(x) < 0x1p-14f && x != 0.0f ? small : normal, result);
  return result;
}

// Rounds numbers to nearest. Compilers do not find the instruction for two vectors at a time.
static inline void narrow(const float* from, bfloat16* to, int64_t count) {
#ifdef ROUNDS_TO_BFLOAT16
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

static inline void narrow(const float* from, float16* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
}

static inline void narrow(const float* from, float* to, int64_t count) {
  std::memcpy(to, from, sizeof(float) * std::size_t(count));
}

// a * b + c, rounded once where the CPU can do so in one instruction. Written out, because
// compilers that contract products and sums at will do it differently in vectors and in what is
// left over.
static inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

#if defined(__AVX512F__)
using Vector = __m512;
static inline Vector fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__) && defined(__FMA__)
typedef float Vector __attribute__((vector_size(32)));
typedef short Halves __attribute__((vector_size(16)));
// GCC reads <immintrin.h> for a third of a second in every file: its own names do.
#ifdef __clang__
#define AVX2(builtin, intrinsic) intrinsic
#else
#define AVX2(builtin, intrinsic) __builtin_ia32_##builtin
#endif
static inline Vector fused(Vector a, Vector b, Vector c) {
  return AVX2(vfmaddps256, _mm256_fmadd_ps)(a, b, c);
}
#else
typedef float Vector __attribute__((vector_size(16)));
static inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < 4; ++i) c[i] = fused(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
#endif
constexpr int64_t WIDTH = sizeof(Vector) / sizeof(float);
typedef uint32_t VectorBits __attribute__((vector_size(sizeof(Vector))));
typedef uint16_t Narrow __attribute__((vector_size(sizeof(Vector) / 2)));

static inline Vector every(float x) { return x - Vector{}; }
static inline Vector fused(Vector a, Vector b, float c) { return fused(a, b, every(c)); }
static inline Vector fused(Vector a, float b, float c) { return fused(a, every(b), every(c)); }
static inline Vector fused(Vector a, float b, Vector c) { return fused(a, every(b), c); }

static inline Vector load(const float* from) {
  Vector result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}

static inline Vector load(const bfloat16* from) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
#elif defined(__AVX2__) && defined(__FMA__)
  Halves bits;
  std::memcpy(&bits, from, sizeof(bits));
  return (Vector)((VectorBits)AVX2(pmovzxwd256, _mm256_cvtepu16_epi32)(bits) << 16);
#else
  Narrow bits;
  std::memcpy(&bits, from, sizeof(bits));
  return (Vector)(__builtin_convertvector(bits, VectorBits) << 16);
#endif
}

static inline Vector load(const float16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  Halves bits;
  std::memcpy(&bits, from, sizeof(bits));
  return AVX2(vcvtph2ps256, _mm256_cvtph_ps)(bits);
#else
  Vector result;
  for (int64_t i = 0; i < WIDTH; ++i) result[i] = wide(from[i]);
  return result;
#endif
}

static inline void store(Vector x, float* to) { std::memcpy(to, &x, sizeof(x)); }

static inline uint16_t bits_of(bfloat16 x) { return x.bits; }
static inline uint32_t bits_of(float x) { return bits_as<uint32_t>(x); }
static inline VectorBits bits_of(Vector x) { return bits_as<VectorBits>(x); }

// The larger or the smaller one; y where one is NaN. Of comparisons with limits compilers make many
// instructions.
static inline float larger(float x, float y) { return x > y ? x : y; }
static inline float smaller(float x, float y) { return x < y ? x : y; }

#if defined(__AVX512F__)
static inline Vector larger(Vector x, Vector y) { return _mm512_max_ps(x, y); }
static inline Vector smaller(Vector x, Vector y) { return _mm512_min_ps(x, y); }
#elif defined(__AVX2__) && defined(__FMA__)
static inline Vector larger(Vector x, Vector y) { return AVX2(maxps256, _mm256_max_ps)(x, y); }
static inline Vector smaller(Vector x, Vector y) { return AVX2(minps256, _mm256_min_ps)(x, y); }
#else
static inline Vector larger(Vector x, Vector y) { return x > y ? x : y; }
static inline Vector smaller(Vector x, Vector y) { return x < y ? x : y; }
#endif

// NaN stays.
static inline float at_least(float x, float low) { return larger(low, x); }
static inline Vector at_least(Vector x, float low) { return larger(every(low), x); }
static inline float at_most(float x, float high) { return smaller(high, x); }
static inline Vector at_most(Vector x, float high) { return smaller(every(high), x); }

// y, but zero where x is less than a limit.
static inline float zero_below(float x, float limit, float y) { return x < limit ? 0.0f : y; }
static inline Vector zero_below(Vector x, float limit, Vector y) {
  return x < every(limit) ? Vector{} : y;
}

// exp(x) to 2 units in the last place, for x of -87.6 to 88; infinity up to 89. Coefficients:
// Cephes' expf (Moshier).
template <class N>
static inline N exponential(N x) {
  const float magic = 12582912.0f;  // 1.5 * 2**23 rounds to integers
  const N shifted = fused(x, 1.44269504f, magic);
  const N n = shifted - magic;
  const N f = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));
  N p = fused(f, 1.9875691500e-4f, 1.3981999507e-3f);
  p = fused(p, f, 8.3334519073e-3f);
  p = fused(p, f, 4.1665795894e-2f);
  p = fused(p, f, 1.6666665459e-1f);
  p = fused(p, f, 5.0000001201e-1f);
  p = fused(p * f, f, f) + 1.0f;
  return p * bits_as<N>((bits_of(shifted) - 0x4b400000u + 127u) << 23);
}

// exp(x) for x that are not positive, as exactly as results of a type need. What is below 2.5e-38
// becomes zero.
template <class N>
static inline N decay(N x, float) {
  return zero_below(x, -86.6f, exponential(x));
}

constexpr float LOG2_E = 1.44269504f;

// 2**x to 3e-6, for x of -126 to 127.
template <class N>
static inline N power_of_two(N x) {
  const float magic = 12582912.0f;  // 1.5 * 2**23 rounds to integers
  const N shifted = x + magic, f = x - (shifted - magic);
  N p = fused(f, 0.00957008f, 0.05591783f);
  p = fused(p, f, 0.24024745f);
  p = fused(p, f, 0.69312182f);
  p = fused(p, f, 0.99999926f);
  return bits_as<N>(bits_of(p) + (bits_of(shifted) << 23));
}

// 1 / (1 + x) to 7e-6, for x of 0 to 2**125: from the sum's bits, and two of Newton's steps.
template <class N>
static inline N reciprocal_of_next(N x) {
  const N negative = -1.0f - x, first = bits_as<N>(0xfef31000u - bits_of(negative));
  const N second = fused(first, fused(negative, first, 1.0f), first);
  return fused(second, fused(negative, second, 1.0f), second);
}

// To 3e-6; what is below 2e-38 becomes zero.
template <class N>
static inline N decay(N x, bfloat16) {
  return zero_below(x, -87.0f, power_of_two(x * LOG2_E));
}

// The same for sums with a number of 1: what is below 2e-38 need not become zero.
template <class N>
static inline N small_or_decay(N x, float) {
  return exponential(at_least(x, -86.6f));
}

template <class N>
static inline N small_or_decay(N x, bfloat16) {
  return power_of_two(at_least(x, -87.0f) * LOG2_E);
}

// tanh(x) to 5 units in the last place, by a quotient of polynomials that is one from 9.02 on.
// Their coefficients are those of the least relative error, moved by the last places that round
// best.
template <class N>
static inline N hyperbolic_tangent(N x, float) {
  const N t = at_most(at_least(x, -9.02f), 9.02f), square = t * t;
  N p = fused(square, 1.33192142e-8f, 2.05834676e-5f);
  N q = fused(square, 7.76203876e-7f, 3.28309077e-4f);
  p = fused(p, square, 3.49403429e-3f);
  q = fused(q, square, 2.5871072e-2f);
  p = fused(p, square, 0.133797154f);
  q = fused(q, square, 0.467130274f);
  return at_most(at_least(fused(p * square, t, t) / fused(q, square, 1.0f), -1.0f), 1.0f);
}

// To 3e-7 of one: 1 - 2 / (1 + exp(2x)), without a division.
template <class N>
static inline N hyperbolic_tangent(N x, bfloat16) {
  const N e = exponential(at_most(at_least(x, -9.1f), 9.1f) * 2.0f);
  const N r = reciprocal_of_next(e);
  return fused(fused(r, fused(-1.0f - e, r, 1.0f), r), -2.0f, 1.0f);  // with a third step
}

// GELU's tanh form: x * sigmoid(2u), 2u = C (x + 0.044715 x**3), and its slope, as exactly as
// results of a type need; beyond 10 they are 0 or x, 0 or 1.
constexpr float GELU_C = 1.5957691216057308f, GELU_CUBIC = GELU_C * 0.044715f;

template <class N>
static inline N gelu_slope(N t, N square, N e,
                           N s) {  // with e = exp(-2u) and s = sigmoid(2u); s(1 - s) = s * s * e
  return fused(s * (s * e), t * fused(square, 3 * GELU_CUBIC, GELU_C), s);
}

template <class N>
static inline N gelu(N x, float) {
  const N t = at_most(at_least(x, -10.06f), 10.0f);  // of -10.06 the exponential is infinity
  return x / (exponential(t * fused(t * t, -GELU_CUBIC, -GELU_C)) + 1.0f);
}

template <class N>
static inline N gelu_slope(N x, float) {
  const N t = at_most(at_least(x, -10.0f), 10.0f), square = t * t;
  const N e = exponential(t * fused(square, -GELU_CUBIC, -GELU_C));
  return gelu_slope(t, square, e, 1.0f / (e + 1.0f));
}

template <class N>
static inline N gelu(N x, bfloat16) {
  const N t = at_most(at_least(x, -9.9f), 9.9f);
  const N e = power_of_two(t * fused(t * t, -GELU_CUBIC * LOG2_E, -GELU_C * LOG2_E));
  return x * zero_below(x, -9.9f, reciprocal_of_next(e));
}

template <class N>
static inline N gelu_slope(N x, bfloat16) {
  const N t = at_most(at_least(x, -9.9f), 9.9f), square = t * t;
  const N e = power_of_two(t * fused(square, -GELU_CUBIC * LOG2_E, -GELU_C * LOG2_E));
  return gelu_slope(t, square, e, reciprocal_of_next(e));
}

// e = exp(-x), for x that is not too far from zero for it, and 1 / (1 + e).
template <class N>
struct Sigmoid {
  N near, e, s;
  inline Sigmoid(N x, float) {
    near = at_most(at_least(x, -86.6f), 86.6f);
    e = exponential(near * -1.0f);
    s = 1.0f / (e + 1.0f);
  }
  inline Sigmoid(N x, bfloat16) {
    near = at_most(at_least(x, -86.0f), 86.0f);
    e = power_of_two(near * -LOG2_E);
    s = reciprocal_of_next(e);
  }
};

template <class N, class T>
static inline N swish(N x, T type) {
  return x * zero_below(x, -86.0f, Sigmoid<N>(x, type).s);
}

template <class N, class T>
static inline N swish_slope(N x, T type) {  // s(1 - s) = s * s * e
  const Sigmoid<N> of(x, type);
  return zero_below(x, -86.0f, fused(of.near * of.s, of.s * of.e, of.s));
}

// Squares64 (Widynski 2020, arXiv:2004.06278): the output for a counter. popxl/generator.py says
// what draws are.
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
