// What attention does to rows of scores between its products. Rows of float32 numbers are as long as a multiple of 32.
#pragma once
#include <algorithm>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "operands.h"

namespace attention {

using products::parts;
using std::int64_t;

constexpr int64_t PANEL = 32;  // rows or columns of operands that are multiplied together
constexpr int64_t SKEW = 16;   // numbers between rows, so that they do not meet in the same lines of a cache
constexpr int64_t LANES = 32;  // of a row's numbers, every 32nd one goes into the same of so many sums

static inline int64_t padded(int64_t count) { return parts(count, PANEL) * PANEL; }

static inline uint32_t bits_of(float x) { return bits_as<uint32_t>(x); }
static inline uint16_t bits_of(bfloat16 x) { return x.bits; }

// Whether any of rows x columns numbers has other bits than x. Columns are a panel's.
template <class T>
__attribute__((noinline)) static bool any_but(float x, const T* from, int64_t stride, int64_t rows, int64_t columns) {
  T wanted;
  narrow(x, wanted);
  const auto bits = bits_of(wanted);
  decltype(bits_of(wanted)) lanes[PANEL] = {}, found = 0;
  for (int64_t i = 0; i < rows; ++i, from += stride) {
    if (columns == PANEL) {
#pragma omp simd
      for (int64_t l = 0; l < PANEL; ++l) lanes[l] |= bits_of(from[l]) ^ bits;
    } else {
      for (int64_t l = 0; l < columns; ++l) lanes[l] |= bits_of(from[l]) ^ bits;
    }
  }
  for (int64_t l = 0; l < PANEL; ++l) found |= lanes[l];
  return found != 0;
}

// Key panels up to the last one in which any of some rows is not x.
template <class T>
static int64_t panels_but(float x, const T* from, int64_t rows, int64_t keys) {
  int64_t p = parts(keys, PANEL);
  while (p > 0 && !any_but(x, from + (p - 1) * PANEL, keys, rows, std::min(PANEL, keys - (p - 1) * PANEL))) --p;
  return p;
}

// What a mask does to 32 queries: it leaves the first `free` of their scores as they are, and hides those from `end`
// on. Both are multiples of 32, or all keys; the end is where a query sees none, whose probabilities are no numbers.
struct Sight {
  int64_t free, end;
};

template <class T>
static Sight sight(const T* mask, int64_t rows, int64_t keys) {
  int64_t end = std::min(keys, panels_but(-INFINITY, mask, rows, keys) * PANEL), free = 0;
  for (int64_t i = 0; i < rows; ++i)
    if (panels_but(-INFINITY, mask + i * keys, 1, end) == 0) end = keys;
  while (free < end && !any_but(0.0f, mask + free, keys, rows, std::min(PANEL, end - free))) free += PANEL;
  return {std::min(free, end), end};
}

// Of sums and maxima by lanes: halves together, until one is left.
static inline float total(const float* lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_load_ps(lanes), _mm512_load_ps(lanes + 16)));
#else
  float sums[LANES];
  std::copy(lanes, lanes + LANES, sums);
  for (int64_t half = LANES / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) sums[l] += sums[l + half];
  return sums[0];
#endif
}

static inline float most(const float* lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_load_ps(lanes), _mm512_load_ps(lanes + 16)));
#else
  return *std::max_element(lanes, lanes + LANES);
#endif
}

// Sums become scores: x * scale + mask; minus infinity up to the next multiple of 32. The largest of them.
template <class T>
static inline float scored(float* x, float scale, const T* mask, const Sight& sight) {
  alignas(64) float lanes[LANES];
  for (int64_t l = 0; l < LANES; ++l) lanes[l] = -INFINITY;
  int64_t j = 0;
  for (; j + LANES <= sight.free; j += LANES) {
#pragma omp simd
    for (int64_t l = 0; l < LANES; ++l) {
      const float score = x[j + l] = fused(x[j + l], scale, 0.0f);
      lanes[l] = lanes[l] < score ? score : lanes[l];
    }
  }
  for (; j + LANES <= sight.end; j += LANES) {
#pragma omp simd
    for (int64_t l = 0; l < LANES; ++l) {
      const float score = x[j + l] = fused(x[j + l], scale, wide(mask[j + l]));
      lanes[l] = lanes[l] < score ? score : lanes[l];
    }
  }
  for (int64_t l = 0; j < sight.end; ++j, ++l) {
    const float score = x[j] = fused(x[j], scale, wide(mask[j]));
    lanes[l] = lanes[l] < score ? score : lanes[l];
  }
  for (; j < padded(sight.end); ++j) x[j] = -INFINITY;
  return most(lanes);
}

template <class T>
static inline float exponentials(float* x, float shift, int64_t count) {
  alignas(64) float lanes[LANES] = {};
  for (int64_t j = 0; j < count; j += LANES) {
#pragma omp simd
    for (int64_t l = 0; l < LANES; ++l) lanes[l] += x[j + l] = decay(x[j + l] - shift, T{});
  }
  return total(lanes);
}

// x * share into rows of results; x may change.
static inline void put(float* x, float share, int64_t count, float* to) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) to[j] = x[j] * share;
}

static inline void put(float* x, float share, int64_t count, bfloat16* to) {
#pragma omp simd
  for (int64_t j = 0; j < padded(count); ++j) x[j] *= share;
  narrow(x, to, count);
}

// exp(score - largest) / sum of rows of scores x * scale + mask; zeros from sight.end on, NaN where all scores are
// minus infinity. Of a row of results `columns` numbers are written.
template <class T>
__attribute__((noinline)) static void softmax(float* x, int64_t stride, int64_t rows, float scale, const T* mask,
                                              int64_t keys, const Sight sight, T* to, int64_t row, int64_t columns) {
  const int64_t count = padded(sight.end);
  for (int64_t i = 0; i < rows; ++i, x += stride, mask += keys, to += row) {
    const float largest = scored(x, scale, mask, sight);
    T rest{};
    if (largest == -INFINITY) {
      narrow(NAN, rest);
      std::fill(to, to + columns, rest);
      continue;
    }
    put(x, 1.0f / exponentials<T>(x, largest, count), sight.end, to);
    std::fill(to + sight.end, to + columns, rest);
  }
}

template <class T>
static inline float dot(const T* x, const float* y, int64_t count) {
  alignas(64) float lanes[LANES] = {};
  int64_t j = 0;
  for (; j + LANES <= count; j += LANES) {
#pragma omp simd
    for (int64_t l = 0; l < LANES; ++l) lanes[l] += wide(x[j + l]) * y[j + l];
  }
  for (int64_t l = 0; j < count; ++j, ++l) lanes[l] += wide(x[j]) * y[j];
  return total(lanes);
}

// Rows of gradients of what dropout left of shares become those of shares.
template <class T>
__attribute__((noinline)) static void let_through(float* d, int64_t stride, int64_t rows, float factor, const T* left,
                                                  int64_t keys, int64_t end) {
  for (int64_t i = 0; i < rows; ++i, d += stride, left += keys) {
#pragma omp simd
    for (int64_t j = 0; j < end; ++j) d[j] = wide(left[j]) != 0.0f ? d[j] * factor : 0.0f;
  }
}

// Rows of gradients of scores, from gradients d of shares; zeros from `end` to `furthest`.
template <class T>
__attribute__((noinline)) static void softmax_grad(float* d, int64_t stride, int64_t rows, float scale, const T* shares,
                                                   int64_t keys, int64_t end, int64_t furthest, T* to, int64_t row) {
  for (int64_t i = 0; i < rows; ++i, d += stride, shares += keys, to += row) {
    const float mean = dot(shares, d, end);
#pragma omp simd
    for (int64_t j = 0; j < end; ++j) d[j] = wide(shares[j]) * scale * (d[j] - mean);
    narrow(d, to, end);
    std::fill(to + end, to + furthest, T{});
  }
}

}  // namespace attention
