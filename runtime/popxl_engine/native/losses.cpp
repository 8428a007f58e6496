// Logarithms of sums of exponentials, and their gradients, in one pass over memory. Every row's sum
// is taken in one order, so the number of threads does not change a bit.
//
// Functions take pointers to contiguous operands, sizes, numbers and the number of threads; rows of
// logits have a stride. A name ends in the element types of its operands: _f32, _bf16.
#include <algorithm>
#include <cmath>

#include "pieces.h"
#include "softcap.h"

namespace {

// Logits as they are.
struct Unbounded {
  template <class N>
  N operator()(N x) const {
    return x;
  }
  template <class N>
  N gradient(N dy, N) const {
    return dy;
  }
};

// Logits of a type with a softcap; the gradient is at what that gives.
template <class T>
struct Softcap {
  float cap;
  template <class N>
  N operator()(N x) const {
    return each(x, softcap(cap, T{}));
  }
  template <class N>
  N gradient(N dy, N bounded) const {
    return dy * each(bounded, softcap_slope(cap));
  }
};

// Fetches the next row meanwhile, whose largest number is looked for first.
template <class T, class Bound>
float sum_of_exponentials(const T* row, float shift, int64_t columns, Bound bounded) {
  return sum_over(columns, [=](auto sum, int64_t i) {
    using N = decltype(sum);
    prefetch<N>(row + columns + i);
    const auto x = bounded(load_as<N>(row + i)) - shift;
    return sum + each(x, [](auto at) { return small_or_decay(at, T{}); });
  });
}

// log(sum(exp(row))) of each row of bounded logits.
template <class T, class Bound>
void logsumexp(const T* logits, int64_t stride, float* totals, int64_t rows, int64_t columns,
               int threads, Bound bounded) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const T* row = logits + r * stride;
      const float most = bounded(largest(row, columns));
      if (std::isinf(most)) {
        const bool undefined = std::any_of(row, row + columns, [](T x) { return is_nan(wide(x)); });
        totals[r] = undefined ? NAN : most;
      } else {
        totals[r] = most + std::log(sum_of_exponentials(row, most, columns, bounded));
      }
    }
  });
}

// exp(logits - total) * scale for each row of bounded logits, plus `picked` at the row's index
// where that is valid; all that times the slope of the bound. The result may be the logits' own
// memory.
template <class T, class Bound>
void logsumexp_grad(const T* logits, int64_t stride, const float* totals, const float* scales,
                    const float* picked, const int64_t* indices, T* result, int64_t result_stride,
                    int64_t rows, int64_t columns, int threads, Bound bounded) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const T* row = logits + r * stride;
      T* out = result + r * result_stride;
      const float shift = totals[r] == -INFINITY ? 0.0f : totals[r], scale = scales[r];
      const int64_t at = indices[r];
      const bool is_valid = at >= 0 && at < columns;
      const float there = is_valid ? bounded(wide(row[at])) : 0.0f;
      const float own = bounded.gradient(decay(there - shift, T{}) * scale + picked[r], there);
      in_lanes(columns, [=](auto n, int64_t i) {
        using N = decltype(n);
        prefetch<N>(row + i + AHEAD);
        prefetch<N, true>(out + i + AHEAD);
        const N y = bounded(load_as<N>(row + i));
        const N dy = each(y - shift, [](auto x) { return decay(x, T{}); }) * scale;
        store(bounded.gradient(dy, y), out + i);
      });
      if (is_valid) narrow(own, out[at]);
    }
  });
}

}  // namespace

extern "C" {

#define FOR_TYPE(T, NAME)                                                                        \
  void logsumexp_##NAME(const T* logits, int64_t stride, float* totals, int64_t rows,            \
                        int64_t columns, int threads) {                                          \
    logsumexp(logits, stride, totals, rows, columns, threads, Unbounded{});                      \
  }                                                                                              \
  void softcap_logsumexp_##NAME(const T* logits, int64_t stride, float* totals, float cap,       \
                                int64_t rows, int64_t columns, int threads) {                    \
    logsumexp(logits, stride, totals, rows, columns, threads, Softcap<T>{cap});                  \
  }                                                                                              \
  void logsumexp_grad_##NAME(const T* logits, int64_t stride, const float* totals,               \
                             const float* scales, const float* picked, const int64_t* indices,   \
                             T* result, int64_t result_stride, int64_t rows, int64_t columns,    \
                             int threads) {                                                      \
    logsumexp_grad(logits, stride, totals, scales, picked, indices, result, result_stride, rows, \
                   columns, threads, Unbounded{});                                               \
  }                                                                                              \
  void softcap_logsumexp_grad_##NAME(const T* logits, int64_t stride, const float* totals,       \
                                     const float* scales, const float* picked,                   \
                                     const int64_t* indices, T* result, int64_t result_stride,   \
                                     float cap, int64_t rows, int64_t columns, int threads) {    \
    logsumexp_grad(logits, stride, totals, scales, picked, indices, result, result_stride, rows, \
                   columns, threads, Softcap<T>{cap});                                           \
  }

FOR_TYPE(float, f32)
FOR_TYPE(bfloat16, bf16)
}
