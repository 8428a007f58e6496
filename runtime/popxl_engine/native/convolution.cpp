// Short convolutions over the rows of sequences. Every sum is taken in one order, so the number of
// threads does not change a bit.
//
// Functions take pointers to contiguous operands, sizes, numbers and the number of threads. A name
// ends in the element types of its operands: _f32, _bf16.
#include <algorithm>
#include <vector>

#include "column_sums.h"

namespace {

// To each row are added up to `size` rows before it in its sequence, each times a row of the
// weight; transposed: rows after it.
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

// gradient, [size, columns]: row i - 1 is the sum of dy times x of i rows before. Up to 16 pieces
// of rows sum it up for themselves.
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

}  // namespace

extern "C" {

#define FOR_TYPE(T, NAME)                                                                        \
  void short_convolution_##NAME(const T* x, const float* weight, const int32_t* positions, T* y, \
                                int64_t rows, int64_t columns, int64_t size,                     \
                                int64_t is_transposed, int threads) {                            \
    short_convolution(x, weight, positions, y, rows, columns, size, is_transposed, threads);     \
  }                                                                                              \
  void short_convolution_weight_grad_##NAME(const T* dy, const T* x, const int32_t* positions,   \
                                            float* gradient, int64_t rows, int64_t columns,      \
                                            int64_t size, int threads) {                         \
    short_convolution_weight_grad(dy, x, positions, gradient, rows, columns, size, threads);     \
  }

FOR_ELEMENT_TYPE(FOR_TYPE)
}
