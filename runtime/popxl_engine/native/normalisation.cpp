// Norms of rows, and sums over rows and columns, in one pass over memory. Every sum is taken in one
// order, so the number of threads does not change a bit.
//
// Functions take pointers to contiguous operands, sizes, numbers and the number of threads. A name
// ends in the element types of its operands: _f32, _bf16.
#include <numeric>
#include <vector>

#include "column_sums.h"
#include "layer_norm.h"

namespace {

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

}  // namespace

extern "C" {

#ifndef BFLOAT16_LIBRARY
// For each row what one slice of it lacks to the mean of all, and their variance, from moments: a
// mean, what rounding took from it, and a variance.
void merge_moments(const float* own, const float* slices, float* shift, float* variance,
                   int64_t size, int64_t rows, int) {
  const float count = float(size);
  const int64_t next = 3 * rows, end = next * size;
  for (int64_t r = 0; r < rows; ++r) {
    const float* const of = slices + 3 * r;
    float mean = 0.0f, rest = 0.0f, squares = 0.0f;
    for (int64_t i = 0; i < end; i += next) mean += of[i];
    mean /= count;
    for (int64_t i = 0; i < end; i += next) rest += of[i] - mean + of[i + 1];
    rest /= count;
    for (int64_t i = 0; i < end; i += next) {
      const float deviation = of[i] - mean + of[i + 1] - rest;
      squares += of[i + 2] + deviation * deviation;
    }
    shift[r] = own[3 * r] - mean - rest;
    variance[r] = squares / count;
  }
}
#endif

#define FOR_TYPE(T, NAME)                                                                         \
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
  }

FOR_ELEMENT_TYPE(FOR_TYPE)
}
