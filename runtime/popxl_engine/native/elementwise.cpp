// Elementwise functions, and those of a few elements, each in one pass over memory.
//
// Functions take pointers to contiguous operands, sizes, numbers and the number of threads. A name
// ends in the element types of its operands: _f32, _bf16.
#include "draws.h"
#include "dropout.h"
#include "lanes.h"
#include "softcap.h"

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

// Rows of a gate and as many values, side by side: of(gate) * values.
template <class T, class F>
void gated(const T* x, T* y, int64_t rows, int64_t columns, int threads, F of) {
  in_pieces(rows, rows_per_piece(2 * columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const T *gate = x + r * 2 * columns, *values = gate + columns;
      T* const to = y + r * columns;
      in_lanes(columns, [=](auto n, int64_t i) {
        using N = decltype(n);
        store(each(load_as<N>(gate + i), of) * load_as<N>(values + i), to + i);
      });
    }
  });
}

template <class T, class F, class G>
void gated_grad(const T* dy, const T* x, T* dx, int64_t rows, int64_t columns, int threads, F of,
                G slope) {
  in_pieces(rows, rows_per_piece(2 * columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const T *gate = x + r * 2 * columns, *values = gate + columns, *from = dy + r * columns;
      T *const d_gate = dx + r * 2 * columns, *const d_values = d_gate + columns;
      in_lanes(columns, [=](auto n, int64_t i) {
        using N = decltype(n);
        const N g = load_as<N>(gate + i), d = load_as<N>(from + i);
        store(d * load_as<N>(values + i) * each(g, slope), d_gate + i);
        store(d * each(g, of), d_values + i);
      });
    }
  });
}

// Pairs i and i + pairs of each head of so many features rotated by angle i of the row's position;
// other features as they are.
template <class T>
void rotary(const T* x, int64_t stride, const float* sin, const float* cos, T* y, int64_t rows,
            int64_t columns, int64_t positions, int64_t pairs, int64_t size, int threads) {
  in_pieces(rows, rows_per_piece(columns), threads, [=](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const float *sines = sin + r % positions * pairs, *cosines = cos + r % positions * pairs;
      for (int64_t at = 0; at < columns; at += size) {
        const T* const from = x + r * stride + at;
        T* const to = y + r * columns + at;
        in_lanes(pairs, [=](auto n, int64_t i) {
          using N = decltype(n);
          const N a = load_as<N>(from + i), b = load_as<N>(from + pairs + i);
          const N s = load_as<N>(sines + i), c = load_as<N>(cosines + i);
          store(a * c - b * s, to + i);
          store(b * c + a * s, to + pairs + i);
        });
        std::copy(from + 2 * pairs, from + size, to + 2 * pairs);
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
void dropout(const T* x, T* y, uint64_t key, int32_t threshold, float scale, int64_t count,
             int threads) {
  in_pieces(count, PIECE, threads, [=](int64_t first, int64_t end) {
    drop(x + first, y + first, key, uint64_t(first), threshold, scale, end - first);
  });
}

}  // namespace

extern "C" {

#ifndef BFLOAT16_LIBRARY
void random_words(uint64_t* words, uint64_t key, uint64_t first, int64_t count, int threads) {
  draw(words, key, first, count, threads);
}
#endif

#define FOR_TYPE(T, NAME)                                                                      \
  void gelu_##NAME(const T* x, T* y, int64_t count, int threads) {                             \
    pointwise(x, y, count, threads, [](auto at) { return gelu(at, T{}); });                    \
  }                                                                                            \
  void gelu_grad_##NAME(const T* dy, const T* x, T* dx, int64_t count, int threads) {          \
    pointwise_grad(dy, x, dx, count, threads, [](auto at) { return gelu_slope(at, T{}); });    \
  }                                                                                            \
  void relu2_##NAME(const T* x, T* y, int64_t count, int threads) {                            \
    pointwise(x, y, count, threads, relu2);                                                    \
  }                                                                                            \
  void relu2_grad_##NAME(const T* dy, const T* x, T* dx, int64_t count, int threads) {         \
    pointwise_grad(dy, x, dx, count, threads, relu2_slope);                                    \
  }                                                                                            \
  void softcap_##NAME(const T* x, T* y, float cap, int64_t count, int threads) {               \
    pointwise(x, y, count, threads, softcap(cap));                                             \
  }                                                                                            \
  void softcap_grad_##NAME(const T* dy, const T* y, T* dx, float cap, int64_t count,           \
                           int threads) {                                                      \
    pointwise_grad(dy, y, dx, count, threads, softcap_slope(cap));                             \
  }                                                                                            \
  void swiglu_##NAME(const T* x, T* y, int64_t rows, int64_t columns, int threads) {           \
    gated(x, y, rows, columns, threads, [](auto at) { return swish(at, T{}); });               \
  }                                                                                            \
  void swiglu_grad_##NAME(const T* dy, const T* x, T* dx, int64_t rows, int64_t columns,       \
                          int threads) {                                                       \
    gated_grad(                                                                                \
        dy, x, dx, rows, columns, threads, [](auto at) { return swish(at, T{}); },             \
        [](auto at) { return swish_slope(at, T{}); });                                         \
  }                                                                                            \
  void geglu_##NAME(const T* x, T* y, int64_t rows, int64_t columns, int threads) {            \
    gated(x, y, rows, columns, threads, [](auto at) { return gelu(at, T{}); });                \
  }                                                                                            \
  void geglu_grad_##NAME(const T* dy, const T* x, T* dx, int64_t rows, int64_t columns,        \
                         int threads) {                                                        \
    gated_grad(                                                                                \
        dy, x, dx, rows, columns, threads, [](auto at) { return gelu(at, T{}); },              \
        [](auto at) { return gelu_slope(at, T{}); });                                          \
  }                                                                                            \
  void rotary_##NAME(const T* x, int64_t stride, const float* sin, const float* cos, T* y,     \
                     int64_t rows, int64_t columns, int64_t positions, int64_t pairs,          \
                     int64_t size, int threads) {                                              \
    rotary(x, stride, sin, cos, y, rows, columns, positions, pairs, size, threads);            \
  }                                                                                            \
  void accumulate_##NAME(float* total, const T* value, float old, float weight, int64_t count, \
                         int threads) {                                                        \
    accumulate(total, value, old, weight, count, threads);                                     \
  }                                                                                            \
  void dropout_##NAME(const T* x, T* y, uint64_t key, int64_t threshold, float scale,          \
                      int64_t count, int threads) {                                            \
    dropout(x, y, key, int32_t(threshold), scale, count, threads);                             \
  }

FOR_ELEMENT_TYPE(FOR_TYPE)
}
