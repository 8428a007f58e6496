// What attention does to rows of scores between its products.
#pragma once
#include <algorithm>

#include "lanes.h"
#include "operands.h"

namespace attention {

using products::PANEL;
using std::int64_t;

constexpr int64_t SKEW =
    16;  // numbers between rows, so that they do not meet in the same lines of a cache

static inline int64_t padded(int64_t count) { return ceil_div(count, PANEL) * PANEL; }

// Whether any of rows x columns numbers has other bits than x. Columns are a panel's.
template <class T>
__attribute__((noinline)) static bool any_but(float x, const T* from, int64_t stride, int64_t rows,
                                              int64_t columns) {
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
  int64_t p = ceil_div(keys, PANEL);
  while (p > 0 &&
         !any_but(x, from + (p - 1) * PANEL, keys, rows, std::min(PANEL, keys - (p - 1) * PANEL)))
    --p;
  return p;
}

// What a mask does to 32 queries: it leaves the first `free` of their scores as they are, and hides
// those from `end` on. Both are multiples of 32, or all keys; the end is where a query sees none,
// whose probabilities are no numbers.
struct MaskExtent {
  int64_t free, end;
};

template <class T>
static MaskExtent mask_extent(const T* mask, int64_t rows, int64_t keys) {
  int64_t end = std::min(keys, panels_but(-INFINITY, mask, rows, keys) * PANEL), free = 0;
  for (int64_t i = 0; i < rows; ++i)
    if (panels_but(-INFINITY, mask + i * keys, 1, end) == 0) end = keys;
  while (free < end && !any_but(0.0f, mask + free, keys, rows, std::min(PANEL, end - free)))
    free += PANEL;
  return {std::min(free, end), end};
}

// Sums become scores: x * scale + mask. The largest of them.
template <class T>
static inline float scored(float* x, float scale, const T* mask, const MaskExtent& extent) {
  const float most = largest_over(extent.free, [=](auto most, int64_t i) {
    using N = decltype(most);
    const N score = load_as<N>(x + i) * scale;
    store(score, x + i);
    return larger(score, most);
  });
  const auto masked = [x = x + extent.free, mask = mask + extent.free, scale](auto most,
                                                                              int64_t i) {
    using N = decltype(most);
    const N score = fused(load_as<N>(x + i), scale, load_as<N>(mask + i));
    store(score, x + i);
    return larger(score, most);
  };
  return larger(largest_over(extent.end - extent.free, masked), most);
}

template <class T>
static inline float exponentials(float* x, float shift, int64_t count) {
  return sum_over(count, [=](auto sum, int64_t i) {
    using N = decltype(sum);
    const N y = each(load_as<N>(x + i) - shift, [](auto at) { return decay(at, T{}); });
    store(y, x + i);
    return sum + y;
  });
}

// exp(score - largest) / sum of rows of scores x * scale + mask; zeros from extent.end on, NaN
// where all scores are minus infinity. Of a row of results `columns` numbers are written.
template <class T>
__attribute__((noinline)) static void softmax(float* x, int64_t stride, int64_t rows, float scale,
                                              const T* mask, int64_t keys, const MaskExtent extent,
                                              T* to, int64_t row, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, x += stride, mask += keys, to += row) {
    const float largest = scored(x, scale, mask, extent);
    T rest{};
    if (largest == -INFINITY) {
      narrow(NAN, rest);
      std::fill(to, to + columns, rest);
      continue;
    }
    const float inverse = 1.0f / exponentials<T>(x, largest, extent.end);
    in_lanes(extent.end,
             [=](auto n, int64_t j) { store(load_as<decltype(n)>(x + j) * inverse, to + j); });
    std::fill(to + extent.end, to + columns, rest);
  }
}

template <class T>
static inline float dot(const T* x, const float* y, int64_t count) {
  return sum_over(count, [=](auto sum, int64_t i) {
    using N = decltype(sum);
    return sum + load_as<N>(x + i) * load_as<N>(y + i);
  });
}

// Rows of gradients of what dropout left of probs become those of probs.
template <class T>
__attribute__((noinline)) static void let_through(float* d, int64_t stride, int64_t rows,
                                                  float factor, const T* left, int64_t keys,
                                                  int64_t end) {
  for (int64_t i = 0; i < rows; ++i, d += stride, left += keys) {
#pragma omp simd
    for (int64_t j = 0; j < end; ++j) d[j] = wide(left[j]) != 0.0f ? d[j] * factor : 0.0f;
  }
}

// Rows of gradients of scores, from gradients d of probs; zeros from `end` to `furthest`.
template <class T>
__attribute__((noinline)) static void softmax_grad(const float* d, int64_t stride, int64_t rows,
                                                   float scale, const T* probs, int64_t keys,
                                                   int64_t end, int64_t furthest, T* to,
                                                   int64_t row) {
  for (int64_t i = 0; i < rows; ++i, d += stride, probs += keys, to += row) {
    const float mean = dot(probs, d, end);
    in_lanes(end, [=](auto n, int64_t j) {
      using N = decltype(n);
      store(load_as<N>(probs + j) * scale * (load_as<N>(d + j) - mean), to + j);
    });
    std::fill(to + end, to + furthest, T{});
  }
}

}  // namespace attention
