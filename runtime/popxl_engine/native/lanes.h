// Numbers side by side, in two vectors of the CPU: one instruction rounds two to bfloat16, and sums
// in one vector alone would wait for each other.
//
// Functions for numbers of a type N, which is Lanes or float, do both a row and what is left of it.
// Sums have lanes because GCC adds up those of `omp simd reduction` one after the other, which
// takes as long as a row of 768.
#pragma once
#include <cstddef>
#include <type_traits>

#include "numbers.h"

struct Lanes {
  Vector low, high;
};
constexpr int64_t LANES = 2 * WIDTH;
constexpr int64_t AHEAD = 1024;  // how many numbers before they are needed memory is fetched

static inline Lanes operator+(Lanes a, Lanes b) { return {a.low + b.low, a.high + b.high}; }
static inline Lanes operator*(Lanes a, Lanes b) { return {a.low * b.low, a.high * b.high}; }
static inline Lanes operator-(Lanes a, Lanes b) { return {a.low - b.low, a.high - b.high}; }
static inline Lanes operator-(Lanes a, float b) { return {a.low - b, a.high - b}; }
static inline Lanes operator*(Lanes a, float b) { return {a.low * b, a.high * b}; }
static inline Lanes operator/(Lanes a, float b) { return {a.low / b, a.high / b}; }

static inline Lanes fused(Lanes a, Lanes b, Lanes c) {
  return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
}

static inline Lanes fused(Lanes a, float b, float c) {
  return {fused(a.low, b, c), fused(a.high, b, c)};
}

static inline Lanes fused(Lanes a, float b, Lanes c) {
  return {fused(a.low, b, c.low), fused(a.high, b, c.high)};
}

static inline Lanes larger(Lanes a, Lanes b) {
  return {larger(a.low, b.low), larger(a.high, b.high)};
}

// A function of a number or a vector, of all.
template <class Function>
static inline Lanes each(Lanes x, Function function) {
  return {function(x.low), function(x.high)};
}

template <class Function>
static inline float each(float x, Function function) {
  return function(x);
}

template <class N, class T>
static inline N load_as(const T* from) {
  if constexpr (std::is_same_v<N, float>)
    return wide(*from);
  else
    return {load(from), load(from + WIDTH)};
}

template <class T>
static inline void store(float x, T* to) {
  narrow(x, *to);
}

static inline void store(Lanes x, float* to) {
  store(x.low, to);
  store(x.high, to + WIDTH);
}

static inline void store(Vector x, bfloat16* to) {
  const VectorBits bits = bits_of(x), upper = bits >> 16,
                   rounded = (bits + (0x7fffu + (upper & 1u))) >> 16;
  const Narrow kept =
      __builtin_convertvector(x == x ? rounded : upper | 0x40u, Narrow);  // NaN is not itself
  std::memcpy(to, &kept, sizeof(kept));
}

static inline void store(Lanes x, bfloat16* to) {
#ifdef ROUNDS_TO_BFLOAT16
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(x.high, x.low));
#else
  store(x.low, to);
  store(x.high, to + WIDTH);
#endif
}

// Fetches what will soon be loaded or, with `is_stored`, stored as an N. It need not be memory of
// ours.
template <class N, bool is_stored = false, class T>
static inline void prefetch(const T* at) {
  constexpr int64_t LINE = 64 / sizeof(T);
  if constexpr (!std::is_same_v<N, float>)
    for (int64_t i = 0; i < LANES; i += LINE) __builtin_prefetch(at + i, is_stored);
}

static inline float sum_of(Lanes x) {
  typedef float Four __attribute__((vector_size(16)));
  const Vector both = x.low + x.high;
  Four sum{}, next;
  for (std::size_t i = 0; i < sizeof(both); i += sizeof(next)) {
    std::memcpy(&next, (const char*)&both + i, sizeof(next));
    sum += next;
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

static inline float largest_of(Lanes x) {
  float row[WIDTH], most = -INFINITY;
  store(larger(x.low, x.high), row);
  for (int64_t j = 0; j < WIDTH; j += 4)
    most = larger(larger(larger(row[j], row[j + 1]), larger(row[j + 2], row[j + 3])), most);
  return most;
}

// Calls work(N(), i) for numbers i and following, from 0 up to `count`.
template <class Work>
static inline void in_lanes(int64_t count, Work work) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) work(Lanes{}, i);
  for (; i < count; ++i) work(0.0f, i);
}

// What step(so_far, i) makes of numbers i and following, from 0 up to `count`, where so_far is an
// N. join makes one of two, whole one number of all lanes. All of it is inlined, for compilers that
// count the three calls of a long step as too many.
template <class Step, class Join, class Whole>
__attribute__((flatten)) static inline float over(int64_t count, float start, Step step, Join join,
                                                  Whole whole) {
  Lanes one{every(start), every(start)}, other = one;
  int64_t i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    one = step(one, i);
    other = step(other, i + LANES);
  }
  for (; i + LANES <= count; i += LANES) one = step(one, i);
  float all = whole(join(one, other));
  for (; i < count; ++i) all = step(all, i);
  return all;
}

// The sum of all that add(sum, i) adds.
template <class Add>
static inline float sum_over(int64_t count, Add add) {
  return over(count, 0.0f, add, [](Lanes x, Lanes y) { return x + y; }, sum_of);
}

// The sum of all squares.
template <class T>
static float squares_of(const T* x, int64_t count) {
  return sum_over(count, [=](auto sum, int64_t i) {
    const auto at = load_as<decltype(sum)>(x + i);
    return fused(at, at, sum);
  });
}

// The largest of all that step(most, i) compares.
template <class Step>
static inline float largest_over(int64_t count, Step step) {
  return over(count, -INFINITY, step, [](Lanes x, Lanes y) { return larger(x, y); }, largest_of);
}

// The largest of numbers that are not NaN.
template <class T>
static float largest(const T* x, int64_t count) {
  return largest_over(count, [=](auto most, int64_t i) {
    using N = decltype(most);
    prefetch<N>(x + i + AHEAD);
    return larger(load_as<N>(x + i), most);
  });
}
