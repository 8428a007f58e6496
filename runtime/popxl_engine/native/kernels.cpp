// Kernels whose cost is passes over memory, in one pass each. Every element's result depends on
// nothing but the operands, and every row's sum is taken in one order, so the number of threads
// does not change a bit.
//
// A function takes pointers to contiguous operands, sizes, numbers and the number of threads; rows
// of logits have a stride. Its name ends in the element types of its operands: _f32, _bf16.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "draws.h"
#include "dropout.h"
#include "layer_norm.h"

namespace {

// y = of(x), element by element.
template <class T, class F>
void pointwise(const T* x, T* y, int64_t count, int threads, F of) {
  in_pieces(count, PIECE, threads, [=](int64_t first, int64_t end) {
    in_lanes(end - first, [of, x = x + first, y = y + first](auto n, int64_t i) {
      using N = decltype(n);
      prefetch<N>(x + i + AHEAD);
      prefetch<N, true>(y + i + AHEAD);
      store(each(load_as<N>(x + i), of), y + i);
    });
  });
}

// dx = dy * slope(x), element by element.
template <class T, class F>
void pointwise_grad(const T* dy, const T* x, T* dx, int64_t count, int threads, F slope) {
  in_pieces(count, PIECE, threads, [=](int64_t first, int64_t end) {
    in_lanes(end - first,
             [slope, dy = dy + first, x = x + first, dx = dx + first](auto n, int64_t i) {
               using N = decltype(n);
               prefetch<N>(dy + i + AHEAD);
               prefetch<N>(x + i + AHEAD);
               prefetch<N, true>(dx + i + AHEAD);
               store(load_as<N>(dy + i) * each(load_as<N>(x + i), slope), dx + i);
             });
  });
}

// max(x, 0)^2 and its slope.
const auto relu2 = [](auto at) { return zero_below(at, 0.0f, at * at); };
const auto relu2_slope = [](auto at) { return zero_below(at, 0.0f, at + at); };

// Rows of a gate and as many values, side by side: swish(gate) * values.
template <class T>
void swiglu(const T* x, T* y, int64_t rows, int64_t columns, int threads) {
  in_pieces(rows, rows_per_piece(2 * columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const T *gate = x + r * 2 * columns, *values = gate + columns;
      T* const to = y + r * columns;
      in_lanes(columns, [=](auto n, int64_t i) {
        using N = decltype(n);
        const N of_gate = each(load_as<N>(gate + i), [](auto at) { return swish(at, T{}); });
        store(of_gate * load_as<N>(values + i), to + i);
      });
    }
  });
}

template <class T>
void swiglu_grad(const T* dy, const T* x, T* dx, int64_t rows, int64_t columns, int threads) {
  in_pieces(rows, rows_per_piece(2 * columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const T *gate = x + r * 2 * columns, *values = gate + columns, *from = dy + r * columns;
      T *const d_gate = dx + r * 2 * columns, *const d_values = d_gate + columns;
      in_lanes(columns, [=](auto n, int64_t i) {
        using N = decltype(n);
        const N g = load_as<N>(gate + i), d = load_as<N>(from + i);
        const N slope = each(g, [](auto at) { return swish_slope(at, T{}); });
        store(d * load_as<N>(values + i) * slope, d_gate + i);
        store(d * each(g, [](auto at) { return swish(at, T{}); }), d_values + i);
      });
    }
  });
}

// Pairs i and i + pairs of each head rotated by angle i of the row's position.
template <class T>
void rotary(const T* x, int64_t stride, const float* sin, const float* cos, T* y, int64_t rows,
            int64_t columns, int64_t positions, int64_t pairs, int threads) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const float *sines = sin + r % positions * pairs, *cosines = cos + r % positions * pairs;
      for (int64_t at = 0; at < columns; at += 2 * pairs) {
        const T* const from = x + r * stride + at;
        T* const to = y + r * columns + at;
        in_lanes(pairs, [=](auto n, int64_t i) {
          using N = decltype(n);
          const N a = load_as<N>(from + i), b = load_as<N>(from + pairs + i);
          const N s = load_as<N>(sines + i), c = load_as<N>(cosines + i);
          store(a * c - b * s, to + i);
          store(b * c + a * s, to + pairs + i);
        });
      }
    }
  });
}

// total = old * total + weight * value
template <class T>
void accumulate(float* total, const T* value, float old, float weight, int64_t count, int threads) {
  in_pieces(count, PIECE, threads, [=](int64_t first, int64_t end) {
    if (old == 0.0f) {  // what was there may be anything
#pragma omp simd
      for (int64_t i = first; i < end; ++i) total[i] = weight * wide(value[i]);
    } else {
#pragma omp simd
      for (int64_t i = first; i < end; ++i) total[i] = old * total[i] + weight * wide(value[i]);
    }
  });
}

template <class T>
float row_squares(const T* x, int64_t count) {
  return sum_over(count, [=](auto sum, int64_t i) {
    using N = decltype(sum);
    prefetch<N>(x + i + AHEAD);
    const N at = load_as<N>(x + i);
    return fused(at, at, sum);
  });
}

// The sum of all squares: of a row in float32, of rows in float64. In float32 alone a large
// tensor's would lose three digits.
template <class T>
void squares(const T* x, T* total, int64_t count, int threads) {
  constexpr int64_t ROW = 1024;
  std::vector<double> sums((count + PIECE - 1) / PIECE);
  double* to = sums.data();
  in_pieces(count, PIECE, threads, [=](int64_t first, int64_t end) {
    double sum = 0.0;
    for (int64_t start = first; start < end; start += ROW)
      sum += row_squares(x + start, std::min(ROW, end - start));
    to[first / PIECE] = sum;
  });
  narrow(float(std::accumulate(sums.begin(), sums.end(), 0.0)), *total);
}

// The sum of COUNT rows, pair by pair.
template <int COUNT, class N, class T>
inline N sum_of_rows(const T* x, int64_t columns) {
  if constexpr (COUNT == 1)
    return load_as<N>(x);
  else
    return sum_of_rows<COUNT / 2, N>(x, columns) +
           sum_of_rows<COUNT / 2, N>(x + COUNT / 2 * columns, columns);
}

// Adds the first `count` columns of COUNT rows, and fetches those of the next rows.
template <int COUNT, class T>
void add_rows(const T* x, int64_t columns, float* sums, int64_t count) {
  in_lanes(count, [=](auto n, int64_t i) {
    using N = decltype(n);
    for (int r = 0; r < COUNT; ++r) prefetch<N>(x + i + (COUNT + r) * columns);
    store(load_as<N>(sums + i) + sum_of_rows<COUNT, N>(x + i, columns), sums + i);
  });
}

// total = old * total + weight * the sum over rows. Sums of eight rows are added up over 32 rows,
// and these then: one sum over many rows in float32 would lose digits.
template <class T>
void column_sums(const T* x, float* total, float old, float weight, int64_t rows, int64_t columns,
                 int threads) {
  constexpr int64_t FEW = 8, SOME = 32, MOST = 512;
  const int64_t width =
      std::min(MOST, ((columns + threads - 1) / threads + LANES - 1) / LANES * LANES);
  in_pieces(columns, width, rows * columns < PIECE ? 1 : threads, [=](int64_t first, int64_t end) {
    float sums[MOST] = {}, part[MOST];
    const int64_t count = end - first;
    for (int64_t start = 0; start < rows; start += SOME) {
      const int64_t stop = std::min(rows, start + SOME);
      std::fill_n(part, count, 0.0f);
      int64_t r = start;
      for (; r + FEW <= stop; r += FEW)
        add_rows<FEW>(x + r * columns + first, columns, part, count);
      for (; r < stop; ++r) add_rows<1>(x + r * columns + first, columns, part, count);
      add_rows<1>(part, 0, sums, count);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float value = weight * sums[i];
      total[first + i] =
          old == 0.0f ? value : old * total[first + i] + value;  // what was there may be anything
    }
  });
}

template <class T>
void layer_norm(const T* x, const float* weight, const float* bias, T* y, float epsilon,
                int64_t rows, int64_t columns, int threads) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t at = first * columns; at < end * columns; at += columns)
      layer_norms::forward(x + at, weight, bias, y + at, epsilon, columns);
  });
}

// gradients: the parameters', [2, columns]. Up to 16 pieces of rows sum them up for themselves.
template <class T>
void layer_norm_grad(const T* dy, const T* x, const float* weight, T* dx, float* gradients,
                     float epsilon, int64_t rows, int64_t columns, int threads) {
  constexpr int FEW = 4;
  const int64_t piece = (rows + 15) / 16, pieces = (rows + piece - 1) / piece;
  std::vector<float> sums(pieces * 2 * columns);
  float* const parts = sums.data();
  in_pieces(rows, piece, threads, [=](int64_t first, int64_t end) {
    float *dweight = parts + first / piece * 2 * columns, *dbias = dweight + columns;
    int64_t r = first;
    for (int64_t at = r * columns; r + FEW <= end; r += FEW, at += FEW * columns)
      layer_norms::gradients<FEW>(dy + at, x + at, weight, dx + at, dweight, dbias, epsilon,
                                  columns);
    for (int64_t at = r * columns; r < end; ++r, at += columns)
      layer_norms::gradients<1>(dy + at, x + at, weight, dx + at, dweight, dbias, epsilon, columns);
  });
  column_sums(parts, gradients, 0.0f, 1.0f, pieces, 2 * columns, threads);
}

template <class T>
void rms_norm(const T* x, const float* weight, T* y, float epsilon, int64_t rows, int64_t columns,
              int threads) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t at = first * columns; at < end * columns; at += columns)
      rms_norms::forward(x + at, weight, y + at, epsilon, columns);
  });
}

// As of layer norm; gradient: the gain's, [columns].
template <class T>
void rms_norm_grad(const T* dy, const T* x, const float* weight, T* dx, float* gradient,
                   float epsilon, int64_t rows, int64_t columns, int threads) {
  constexpr int FEW = 4;
  const int64_t piece = (rows + 15) / 16, pieces = (rows + piece - 1) / piece;
  std::vector<float> sums(pieces * columns);
  float* const parts = sums.data();
  in_pieces(rows, piece, threads, [=](int64_t first, int64_t end) {
    float* const dweight = parts + first / piece * columns;
    int64_t r = first;
    for (int64_t at = r * columns; r + FEW <= end; r += FEW, at += FEW * columns)
      rms_norms::gradients<FEW>(dy + at, x + at, weight, dx + at, dweight, epsilon, columns);
    for (int64_t at = r * columns; r < end; ++r, at += columns)
      rms_norms::gradients<1>(dy + at, x + at, weight, dx + at, dweight, epsilon, columns);
  });
  column_sums(parts, gradient, 0.0f, 1.0f, pieces, columns, threads);
}

// cap * tanh(x / cap), and its slope from that.
auto softcap(float cap) {
  return [cap](auto at) { return hyperbolic_tangent(at / cap) * cap; };
}
auto softcap_slope(float cap) {
  return [cap](auto at) {
    const auto share = at / cap;
    return fused(share, share * -1.0f, 1.0f);
  };
}

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

// Logits with a softcap; the gradient is at what that gives.
struct Softcap {
  float cap;
  template <class N>
  N operator()(N x) const {
    return each(x, softcap(cap));
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

// exp(logits - total) * scale for each row of bounded logits, plus `picked` at the row's index where
// that is valid; all that times the slope of the bound. The result may be the logits' own memory.
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

// To each row are added up to `size` rows before it in its sequence, each times a row of the weight;
// transposed: rows after it.
template <class T>
void short_convolution(const T* x, const float* weight, const int32_t* positions, T* y,
                       int64_t rows, int64_t columns, int64_t size, bool is_transposed,
                       int threads) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    std::vector<int64_t> distances(size);
    for (int64_t r = first; r < end; ++r) {
      int64_t count = 0;
      for (int64_t i = 1; i <= size; ++i) {
        const int64_t later = is_transposed ? r + i : r;
        if (later < rows && later >= i && positions[later] >= i) distances[count++] = i;
      }
      const int64_t* const own = distances.data();
      const int64_t ahead = is_transposed ? columns : -columns;
      const T* const row = x + r * columns;
      T* const to = y + r * columns;
      in_lanes(columns, [=](auto n, int64_t c) {
        using N = decltype(n);
        N sum = load_as<N>(row + c);
        for (int64_t j = 0; j < count; ++j)
          sum = fused(load_as<N>(row + own[j] * ahead + c),
                      load_as<N>(weight + (own[j] - 1) * columns + c), sum);
        store(sum, to + c);
      });
    }
  });
}

// gradient, [size, columns]: row i - 1 is the sum of dy times x of i rows before. Up to 16 pieces of
// rows sum it up for themselves.
template <class T>
void short_convolution_weight_grad(const T* dy, const T* x, const int32_t* positions,
                                   float* gradient, int64_t rows, int64_t columns, int64_t size,
                                   int threads) {
  const int64_t piece = std::max<int64_t>(1, (rows + 15) / 16), pieces = ceil_div(rows, piece);
  std::vector<float> sums(pieces * size * columns);
  float* const parts = sums.data();
  in_pieces(rows, piece, threads, [=](int64_t first, int64_t end) {
    float* const part = parts + first / piece * size * columns;
    for (int64_t r = first; r < end; ++r) {
      const T *slopes = dy + r * columns, *row = x + r * columns;
      for (int64_t i = 1; i <= size && i <= r && i <= positions[r]; ++i) {
        const T* const before = row - i * columns;
        float* const to = part + (i - 1) * columns;
        in_lanes(columns, [=](auto n, int64_t c) {
          using N = decltype(n);
          store(fused(load_as<N>(slopes + c), load_as<N>(before + c), load_as<N>(to + c)), to + c);
        });
      }
    }
  });
  column_sums(parts, gradient, 0.0f, 1.0f, pieces, size * columns, threads);
}

template <class T>
void dropout(const T* x, T* y, uint64_t key, int32_t threshold, float scale, int64_t count,
             int threads) {
  in_pieces(count, PIECE, threads, [=](int64_t first, int64_t end) {
    drop(x + first, y + first, key, uint64_t(first), threshold, scale, end - first);
  });
}

}  // namespace

extern "C" {

void random_words(uint64_t* words, uint64_t key, uint64_t first, int64_t count, int threads) {
  draw(words, key, first, count, threads);
}

#define FOR_TYPE(T, NAME)                                                                         \
  void gelu_##NAME(const T* x, T* y, int64_t count, int threads) {                                \
    pointwise(x, y, count, threads, [](auto at) { return gelu(at, T{}); });                       \
  }                                                                                               \
  void gelu_grad_##NAME(const T* dy, const T* x, T* dx, int64_t count, int threads) {             \
    pointwise_grad(dy, x, dx, count, threads, [](auto at) { return gelu_slope(at, T{}); });       \
  }                                                                                               \
  void relu2_##NAME(const T* x, T* y, int64_t count, int threads) {                               \
    pointwise(x, y, count, threads, relu2);                                                       \
  }                                                                                               \
  void relu2_grad_##NAME(const T* dy, const T* x, T* dx, int64_t count, int threads) {            \
    pointwise_grad(dy, x, dx, count, threads, relu2_slope);                                       \
  }                                                                                               \
  void softcap_##NAME(const T* x, T* y, float cap, int64_t count, int threads) {                  \
    pointwise(x, y, count, threads, softcap(cap));                                                \
  }                                                                                               \
  void softcap_grad_##NAME(const T* dy, const T* y, T* dx, float cap, int64_t count,              \
                           int threads) {                                                         \
    pointwise_grad(dy, y, dx, count, threads, softcap_slope(cap));                                \
  }                                                                                               \
  void swiglu_##NAME(const T* x, T* y, int64_t rows, int64_t columns, int threads) {              \
    swiglu(x, y, rows, columns, threads);                                                         \
  }                                                                                               \
  void swiglu_grad_##NAME(const T* dy, const T* x, T* dx, int64_t rows, int64_t columns,          \
                          int threads) {                                                          \
    swiglu_grad(dy, x, dx, rows, columns, threads);                                               \
  }                                                                                               \
  void rotary_##NAME(const T* x, int64_t stride, const float* sin, const float* cos, T* y,        \
                     int64_t rows, int64_t columns, int64_t positions, int64_t pairs,             \
                     int threads) {                                                               \
    rotary(x, stride, sin, cos, y, rows, columns, positions, pairs, threads);                     \
  }                                                                                               \
  void accumulate_##NAME(float* total, const T* value, float old, float weight, int64_t count,    \
                         int threads) {                                                           \
    accumulate(total, value, old, weight, count, threads);                                        \
  }                                                                                               \
  void squares_##NAME(const T* x, T* total, int64_t count, int threads) {                         \
    squares(x, total, count, threads);                                                            \
  }                                                                                               \
  void column_sums_##NAME(const T* x, float* total, float old, float weight, int64_t rows,        \
                          int64_t columns, int threads) {                                         \
    column_sums(x, total, old, weight, rows, columns, threads);                                   \
  }                                                                                               \
  void layer_norm_##NAME(const T* x, const float* weight, const float* bias, T* y, float epsilon, \
                         int64_t rows, int64_t columns, int threads) {                            \
    layer_norm(x, weight, bias, y, epsilon, rows, columns, threads);                              \
  }                                                                                               \
  void layer_norm_grad_##NAME(const T* dy, const T* x, const float* weight, T* dx,                \
                              float* gradients, float epsilon, int64_t rows, int64_t columns,     \
                              int threads) {                                                      \
    layer_norm_grad(dy, x, weight, dx, gradients, epsilon, rows, columns, threads);               \
  }                                                                                               \
  void rms_norm_##NAME(const T* x, const float* weight, T* y, float epsilon, int64_t rows,        \
                       int64_t columns, int threads) {                                            \
    rms_norm(x, weight, y, epsilon, rows, columns, threads);                                      \
  }                                                                                               \
  void rms_norm_grad_##NAME(const T* dy, const T* x, const float* weight, T* dx, float* gradient, \
                            float epsilon, int64_t rows, int64_t columns, int threads) {          \
    rms_norm_grad(dy, x, weight, dx, gradient, epsilon, rows, columns, threads);                  \
  }                                                                                               \
  void short_convolution_##NAME(const T* x, const float* weight, const int32_t* positions, T* y,  \
                                int64_t rows, int64_t columns, int64_t size,                      \
                                int64_t is_transposed, int threads) {                             \
    short_convolution(x, weight, positions, y, rows, columns, size, is_transposed, threads);      \
  }                                                                                               \
  void short_convolution_weight_grad_##NAME(const T* dy, const T* x, const int32_t* positions,    \
                                            float* gradient, int64_t rows, int64_t columns,       \
                                            int64_t size, int threads) {                          \
    short_convolution_weight_grad(dy, x, positions, gradient, rows, columns, size, threads);      \
  }                                                                                               \
  void dropout_##NAME(const T* x, T* y, uint64_t key, int64_t threshold, float scale,             \
                      int64_t count, int threads) {                                               \
    dropout(x, y, key, int32_t(threshold), scale, count, threads);                                \
  }                                                                                               \
  void logsumexp_##NAME(const T* logits, int64_t stride, float* totals, int64_t rows,             \
                        int64_t columns, int threads) {                                           \
    logsumexp(logits, stride, totals, rows, columns, threads, Unbounded{});                       \
  }                                                                                               \
  void softcap_logsumexp_##NAME(const T* logits, int64_t stride, float* totals, float cap,        \
                                int64_t rows, int64_t columns, int threads) {                     \
    logsumexp(logits, stride, totals, rows, columns, threads, Softcap{cap});                      \
  }                                                                                               \
  void logsumexp_grad_##NAME(const T* logits, int64_t stride, const float* totals,                \
                             const float* scales, const float* picked, const int64_t* indices,    \
                             T* result, int64_t result_stride, int64_t rows, int64_t columns,     \
                             int threads) {                                                       \
    logsumexp_grad(logits, stride, totals, scales, picked, indices, result, result_stride, rows,  \
                   columns, threads, Unbounded{});                                                \
  }                                                                                               \
  void softcap_logsumexp_grad_##NAME(const T* logits, int64_t stride, const float* totals,        \
                                     const float* scales, const float* picked,                    \
                                     const int64_t* indices, T* result, int64_t result_stride,    \
                                     float cap, int64_t rows, int64_t columns, int threads) {     \
    logsumexp_grad(logits, stride, totals, scales, picked, indices, result, result_stride, rows,  \
                   columns, threads, Softcap{cap});                                               \
  }

FOR_TYPE(float, f32)
FOR_TYPE(bfloat16, bf16)
}
