// Logarithms of sums of exponentials, and their gradients, in one pass over memory. Every row's sum
// is taken in one order, so the number of threads does not change a bit.
//
// Functions take pointers to contiguous operands, sizes, numbers and the number of threads; rows of
// logits have a stride. A name ends in the element types of its operands: _f32, _bf16.
#include <algorithm>
#include <cmath>

#include "operands.h"
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

// log(sum(exp(row))) of a row whose largest number is infinite.
template <class T>
float infinite_total(const T* row, float most, int64_t columns) {
  const bool undefined = std::any_of(row, row + columns, [](T x) { return is_nan(wide(x)); });
  return undefined ? NAN : most;
}

// log(sum(exp(row))) of each row of bounded logits.
template <class T, class Bound>
void logsumexp(const T* logits, int64_t stride, float* totals, int64_t rows, int64_t columns,
               int threads, Bound bounded) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const T* row = logits + r * stride;
      const float most = bounded(largest(row, columns));
      totals[r] = std::isinf(most)
                      ? infinite_total(row, most, columns)
                      : most + std::log(sum_of_exponentials(row, most, columns, bounded));
    }
  });
}

// What a row's gradient is made with. At `at`, where that is a column, it has one more term.
struct Slope {
  float scale, picked;
  int64_t at;
};

// exp(row - total) * scale, plus `picked` at the index where that is valid; all that times the
// slope of the bound. The result may be the row's own memory.
template <class T, class Bound>
void gradient_of(const T* row, float total, const Slope& of, T* out, int64_t columns,
                 Bound bounded) {
  const float shift = total == -INFINITY ? 0.0f : total;
  const bool is_valid = of.at >= 0 && of.at < columns;
  const float there = is_valid ? bounded(wide(row[of.at])) : 0.0f;
  const float own = bounded.gradient(decay(there - shift, T{}) * of.scale + of.picked, there);
  in_lanes(columns, [=](auto n, int64_t i) {
    using N = decltype(n);
    prefetch<N>(row + i + AHEAD);
    prefetch<N, true>(out + i + AHEAD);
    const N y = bounded(load_as<N>(row + i));
    const N dy = each(y - shift, [](auto x) { return decay(x, T{}); }) * of.scale;
    store(bounded.gradient(dy, y), out + i);
  });
  if (is_valid) narrow(own, out[of.at]);
}

// The gradient of each row.
template <class T, class Bound>
void logsumexp_grad(const T* logits, int64_t stride, const float* totals, const float* scales,
                    const float* picked, const int64_t* indices, T* result, int64_t result_stride,
                    int64_t rows, int64_t columns, int threads, Bound bounded) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r)
      gradient_of(logits + r * stride, totals[r], {scales[r], picked[r], indices[r]},
                  result + r * result_stride, columns, bounded);
  });
}

// The total of a row and its gradient, for which exponentials are taken once: they wait in `kept`,
// which may be the result, for their sum.
template <class T, class Bound>
float total_and_gradient(const T* row, const Slope& of, float* kept, T* out, int64_t columns,
                         Bound bounded) {
  const float most = bounded(largest(row, columns));
  if (std::isinf(most)) {
    const float total = infinite_total(row, most, columns);
    gradient_of(row, total, of, out, columns, bounded);
    return total;
  }
  const bool is_valid = of.at >= 0 && of.at < columns;
  const float there = is_valid ? bounded(wide(row[of.at])) : 0.0f;
  const float sum = sum_over(columns, [=](auto sum, int64_t i) {
    using N = decltype(sum);
    prefetch<N>(row + columns + i);
    const N y = bounded(load_as<N>(row + i));
    const N share = each(y - most, [](auto x) { return decay(x, T{}); });
    store(bounded.gradient(share, y), kept + i);
    return sum + share;
  });
  const float factor = of.scale / sum;
  in_lanes(columns,
           [=](auto n, int64_t i) { store(load_as<decltype(n)>(kept + i) * factor, out + i); });
  if (is_valid)
    narrow(bounded.gradient(decay(there - most, T{}) * factor + of.picked, there), out[of.at]);
  return most + std::log(sum);
}

// `logsumexp` and `logsumexp_grad` of each row. The result may be the logits' own memory.
template <class T, class Bound>
void cross_entropy(const T* logits, int64_t stride, float* totals, const float* scales,
                   const float* picked, const int64_t* indices, T* result, int64_t result_stride,
                   int64_t rows, int64_t columns, int threads, Bound bounded) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    static thread_local products::Workspace workspace;
    for (int64_t r = first; r < end; ++r) {
      T* out = result + r * result_stride;
      float* kept;
      if constexpr (std::is_same_v<T, float>)
        kept = out;
      else
        kept = workspace.take<float>(columns);
      totals[r] = total_and_gradient(logits + r * stride, {scales[r], picked[r], indices[r]}, kept,
                                     out, columns, bounded);
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
  void cross_entropy_##NAME(const T* logits, int64_t stride, float* totals, const float* scales, \
                            const float* picked, const int64_t* indices, T* result,              \
                            int64_t result_stride, int64_t rows, int64_t columns, int threads) { \
    cross_entropy(logits, stride, totals, scales, picked, indices, result, result_stride, rows,  \
                  columns, threads, Unbounded{});                                                \
  }                                                                                              \
  void softcap_cross_entropy_##NAME(const T* logits, int64_t stride, float* totals,              \
                                    const float* scales, const float* picked,                    \
                                    const int64_t* indices, T* result, int64_t result_stride,    \
                                    float cap, int64_t rows, int64_t columns, int threads) {     \
    cross_entropy(logits, stride, totals, scales, picked, indices, result, result_stride, rows,  \
                  columns, threads, Softcap<T>{cap});                                            \
  }                                                                                              \
  void softcap_logsumexp_grad_##NAME(const T* logits, int64_t stride, const float* totals,       \
                                     const float* scales, const float* picked,                   \
                                     const int64_t* indices, T* result, int64_t result_stride,   \
                                     float cap, int64_t rows, int64_t columns, int threads) {    \
    logsumexp_grad(logits, stride, totals, scales, picked, indices, result, result_stride, rows, \
                   columns, threads, Softcap<T>{cap});                                           \
  }

FOR_ELEMENT_TYPE(FOR_TYPE)
}
