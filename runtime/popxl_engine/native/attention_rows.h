// What attention does to rows of scores between its products.
#pragma once
#include <algorithm>

#include "lanes.h"
#include "operands.h"
#include "softcap.h"

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

// What 32 queries see of keys: none before `begin` and from `end` on, which are multiples of 32, or
// all keys. Of a mask the first `free` scores are left as they are, and the end is where a query
// sees none, whose probabilities are no numbers.
struct Extent {
  int64_t begin, free, end;
};

// What hides keys beside a mask, and a soft bound of scores.
struct Hiding {
  const int32_t* positions;  // of queries in their documents: earlier keys are hidden; or null
  int64_t diagonal;          // the first query's own key; later keys are hidden. -1: none is
  int64_t window;            // keys that a query sees up to its own; 0: any number
  float softcap;             // 0: none
};

struct Range {
  int64_t begin, end;
};

// The keys that a query sees; positions: those of its part of the batch.
static inline Range seen(const Hiding& hiding, const int32_t* positions, int64_t query,
                         int64_t keys) {
  if (hiding.diagonal < 0) return {0, keys};
  const int64_t own = hiding.diagonal + query, end = std::min(keys, own + 1);
  int64_t begin = hiding.window > 0 ? std::max<int64_t>(0, end - hiding.window) : 0;
  if (positions != nullptr) begin = std::max(begin, own - positions[query]);
  return {std::min(begin, end), end};
}

static inline Extent extent_of(const Hiding& hiding, const int32_t* positions, int64_t query,
                               int64_t rows, int64_t keys) {
  int64_t begin = keys, end = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const Range range = seen(hiding, positions, query + i, keys);
    begin = std::min(begin, range.begin);
    end = std::max(end, range.end);
  }
  return {begin / PANEL * PANEL, 0, std::min(keys, padded(end))};
}

template <class T>
static Extent extent_of(const T* mask, int64_t rows, int64_t keys) {
  int64_t end = std::min(keys, panels_but(-INFINITY, mask, rows, keys) * PANEL), free = 0;
  for (int64_t i = 0; i < rows; ++i)
    if (panels_but(-INFINITY, mask + i * keys, 1, end) == 0) end = keys;
  while (free < end && !any_but(0.0f, mask + free, keys, rows, std::min(PANEL, end - free)))
    free += PANEL;
  return {0, std::min(free, end), end};
}

// Numbers become what score(x, i) makes of them. The largest of these.
template <class Score>
static inline float scored(float* x, int64_t count, const Score& score) {
  return largest_over(count, [=](auto most, int64_t i) {
    using N = decltype(most);
    const N found = score(load_as<N>(x + i), i);
    store(found, x + i);
    return larger(found, most);
  });
}

// Sums become scores: x * scale, with a soft bound if it is not zero. The largest of them.
static inline float bounded(float* x, int64_t count, float scale, float cap) {
  if (cap == 0.0f) return scored(x, count, [=](auto at, int64_t) { return at * scale; });
  return scored(x, count, [=](auto at, int64_t) { return each(at * scale, softcap(cap)); });
}

// The same, plus a mask from extent.free on.
template <class T>
static inline float masked(float* x, float scale, float cap, const T* mask, const Extent& extent) {
  const float most = bounded(x, extent.free, scale, cap);
  const int64_t rest = extent.end - extent.free;
  x += extent.free, mask += extent.free;
  if (cap != 0.0f) {
    bounded(x, rest, scale, cap);
    scale = 1.0f;
  }
  const auto plus = [=](auto at, int64_t i) {
    return fused(at, scale, load_as<decltype(at)>(mask + i));
  };
  return larger(scored(x, rest, plus), most);
}

// The same of what a query sees; minus infinity elsewhere.
static inline float revealed(float* x, float scale, float cap, const Range& range,
                             const Extent& extent) {
  std::fill(x + extent.begin, x + range.begin, -INFINITY);
  std::fill(x + range.end, x + extent.end, -INFINITY);
  return bounded(x + range.begin, range.end - range.begin, scale, cap);
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

// Rows of sums become probabilities, exp(score - largest) / sum of scores; zeros from `first` to
// extent.begin and from extent.end to `columns`; NaN where all scores are minus infinity.
// score(x, i) makes scores of a row and finds the largest.
template <class T, class Score>
static inline void softmax(float* x, int64_t stride, int64_t rows, const Extent extent,
                           const Score& score, T* to, int64_t row, int64_t first, int64_t columns) {
  const int64_t begin = extent.begin, count = extent.end - begin;
  for (int64_t i = 0; i < rows; ++i, x += stride, to += row) {
    const float largest = score(x, i);
    T rest{};
    if (largest == -INFINITY) {
      narrow(NAN, rest);
      std::fill(to + first, to + columns, rest);
      continue;
    }
    const float inverse = 1.0f / exponentials<T>(x + begin, largest, count);
    const float* const from = x + begin;
    T* const at = to + begin;
    in_lanes(count,
             [=](auto n, int64_t j) { store(load_as<decltype(n)>(from + j) * inverse, at + j); });
    std::fill(to + first, to + begin, rest);
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
                                                  const Range range) {
  for (int64_t i = 0; i < rows; ++i, d += stride, left += keys) {
#pragma omp simd
    for (int64_t j = range.begin; j < range.end; ++j)
      d[j] = wide(left[j]) != 0.0f ? d[j] * factor : 0.0f;
  }
}

// Rows of gradients of scores, from gradients d of probs and, where scores are bounded, the slopes
// of that; zeros from `first` to `begin` and from `end` to `last`.
template <class T>
__attribute__((noinline)) static void softmax_grad(const float* d, int64_t stride, int64_t rows,
                                                   float scale, const T* probs, int64_t keys,
                                                   const Range range, const float* slopes, T* to,
                                                   int64_t row, int64_t first, int64_t last) {
  const int64_t begin = range.begin, count = range.end - begin;
  for (int64_t i = 0; i < rows; ++i, d += stride, probs += keys, to += row) {
    const float* const from = d + begin;
    const T* const of = probs + begin;
    T* const at = to + begin;
    const float mean = dot(of, from, count);
    const auto gradient = [=](auto n, int64_t j) {
      using N = decltype(n);
      return load_as<N>(of + j) * scale * (load_as<N>(from + j) - mean);
    };
    if (slopes == nullptr) {
      in_lanes(count, [=](auto n, int64_t j) { store(gradient(n, j), at + j); });
    } else {
      const float* const slope = slopes + i * stride + begin;
      in_lanes(count, [=](auto n, int64_t j) {
        store(gradient(n, j) * load_as<decltype(n)>(slope + j), at + j);
      });
    }
    std::fill(to + first, to + begin, T{});
    std::fill(to + range.end, to + last, T{});
  }
}

// Sums become the slopes of the soft bound of scores.
__attribute__((noinline)) static void slopes_of(float* x, int64_t stride, int64_t rows, float scale,
                                                float cap, const Range range) {
  for (int64_t i = 0; i < rows; ++i, x += stride)
    scored(x + range.begin, range.end - range.begin, [=](auto at, int64_t) {
      return each(at * scale, [=](auto one) { return softcap_slope(cap)(softcap(cap)(one)); });
    });
}

}  // namespace attention
