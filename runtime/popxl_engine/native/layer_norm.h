// Layer norm and RMS norm of a row, and their gradients, of a few rows at a time. The next rows are
// fetched meanwhile, since the CPU does not follow into other pages by itself.
#pragma once
#include <cmath>

#include "lanes.h"

namespace layer_norms {

template <class T>
static float mean_of(const T* row, int64_t columns) {
  return sum_over(columns,
                  [=](auto sum, int64_t i) { return sum + load_as<decltype(sum)>(row + i); }) /
         float(columns);
}

static inline float rstd_of(float squares, float epsilon, int64_t columns) {
  return 1.0f / std::sqrt(squares / float(columns) + epsilon);
}

// Over a row: of what is left of x less its mean, and of its squares.
template <class N>
struct Centred {
  N left, square;

  template <class T>
  inline N add(const T* x, float mean) {
    const N centred = load_as<N>(x) - mean;
    left = left + centred;
    square = fused(centred, centred, square);
    return centred;
  }
};

// Of a whole row: what the mean lacks, and of squares of what is centred by both.
struct Moments {
  float rest, squares;

  // Of equal numbers rounding may leave squares below zero.
  Moments(float left, float square, int64_t columns)
      : rest(left / float(columns)), squares(at_least(square - rest * left, 0.0f)) {}
};

// Of a row far from zero the mean has lost digits in rounding; what is left of the numbers less it
// gives them back.
template <class T>
static void forward(const T* x, const float* weight, const float* bias, T* y, float epsilon,
                    int64_t columns) {
  const float mean = mean_of(x, columns);
  Centred<Lanes> lanes{};
  int64_t first = 0;
  for (; first + LANES <= columns; first += LANES) lanes.add(x + first, mean);
  Centred<float> sums{sum_of(lanes.left), sum_of(lanes.square)};
  for (; first < columns; ++first) sums.add(x + first, mean);
  const Moments moments(sums.left, sums.square, columns);
  const float rstd = rstd_of(moments.squares, epsilon, columns), shift = -moments.rest * rstd;
  in_lanes(columns, [=](auto n, int64_t i) {
    using N = decltype(n);
    prefetch<N>(x + i + columns);
    prefetch<N, true>(y + i + columns);
    const N normal = fused(load_as<N>(x + i) - mean, rstd, shift);
    store(fused(normal, load_as<N>(weight + i), load_as<N>(bias + i)), y + i);
  });
}

// Over a row: of the gradient of what is normal, of that times what is centred, and of the square
// of what is centred, as rounding of the mean leaves it.
template <class N>
struct Sums {
  N slope, product;
  Centred<N> of;

  template <class T>
  inline void add(const T* dy, const T* x, const float* weight, float mean) {
    const N centred = of.add(x, mean), d = load_as<N>(dy) * load_as<N>(weight);
    slope = slope + d;
    product = fused(d, centred, product);
  }
};

// A row's gradient: dy * rstd * weight + (x - mean) * factor + term. Less `rest`, too, x - mean is
// centred.
struct Row {
  float mean, rest, rstd, factor, term;
};

template <class T>
static Row row_of(const T* dy, const T* x, const float* weight, float mean, float epsilon,
                  int64_t columns) {
  Sums<Lanes> lanes{};
  int64_t i = 0;
  for (; i + LANES <= columns; i += LANES) lanes.add(dy + i, x + i, weight + i, mean);
  Sums<float> sums{
      sum_of(lanes.slope), sum_of(lanes.product), {sum_of(lanes.of.left), sum_of(lanes.of.square)}};
  for (; i < columns; ++i) sums.add(dy + i, x + i, weight + i, mean);
  const Moments moments(sums.of.left, sums.of.square, columns);
  const float count = float(columns), rest = moments.rest,
              rstd = rstd_of(moments.squares, epsilon, columns);
  // rstd of large rows is so small that its cube alone would be zero
  const float factor = -rstd * (rstd * (rstd * ((sums.product - rest * sums.slope) / count)));
  return {mean, rest, rstd, factor, -rstd * (sums.slope / count) - rest * factor};
}

// What FEW rows add to the parameters' gradients goes to memory once.
template <int FEW, class T>
static void gradients(const T* dy, const T* x, const float* weight, T* dx, float* dweight,
                      float* dbias, float epsilon, int64_t columns) {
  float means[FEW];
  Row rows[FEW];
  for (int r = 0; r < FEW; ++r) means[r] = mean_of(x + r * columns, columns);
  for (int r = 0; r < FEW; ++r)
    rows[r] = row_of(dy + r * columns, x + r * columns, weight, means[r], epsilon, columns);
  in_lanes(columns, [=](auto n, int64_t i) {
    using N = decltype(n);
    const N gain = load_as<N>(weight + i);
    N of_gain = load_as<N>(dweight + i), of_bias = load_as<N>(dbias + i);
#pragma GCC unroll 4
    for (int r = 0; r < FEW; ++r) {
      const int64_t at = r * columns + i, next = at + FEW * columns;
      prefetch<N>(x + next);
      prefetch<N>(dy + next);
      prefetch<N, true>(dx + next);
      const N centred = load_as<N>(x + at) - rows[r].mean, d = load_as<N>(dy + at),
              scaled = d * rows[r].rstd;
      of_gain = fused(scaled, centred - rows[r].rest, of_gain);
      of_bias = of_bias + d;
      store(fused(scaled, gain, fused(centred, rows[r].factor, rows[r].term)), dx + at);
    }
    store(of_gain, dweight + i);
    store(of_bias, dbias + i);
  });
}

}  // namespace layer_norms

namespace rms_norms {

template <class T>
static void forward(const T* x, const float* weight, T* y, float epsilon, int64_t columns) {
  const float rrms = layer_norms::rstd_of(squares_of(x, columns), epsilon, columns);
  in_lanes(columns, [=](auto n, int64_t i) {
    using N = decltype(n);
    prefetch<N>(x + i + columns);
    prefetch<N, true>(y + i + columns);
    store(load_as<N>(x + i) * rrms * load_as<N>(weight + i), y + i);
  });
}

// A row's gradient: dy * weight * rrms + x * factor.
struct Row {
  float rrms, factor;
};

template <class T>
static Row row_of(const T* dy, const T* x, const float* weight, float epsilon, int64_t columns) {
  const float rrms = layer_norms::rstd_of(squares_of(x, columns), epsilon, columns);
  const float product = sum_over(columns, [=](auto sum, int64_t i) {
    using N = decltype(sum);
    return fused(load_as<N>(dy + i) * load_as<N>(weight + i), load_as<N>(x + i), sum);
  });
  return {rrms, -rrms * (rrms * (rrms * (product / float(columns))))};
}

// What FEW rows add to the gain's gradient goes to memory once.
template <int FEW, class T>
static void gradients(const T* dy, const T* x, const float* weight, T* dx, float* dweight,
                      float epsilon, int64_t columns) {
  Row rows[FEW];
  for (int r = 0; r < FEW; ++r)
    rows[r] = row_of(dy + r * columns, x + r * columns, weight, epsilon, columns);
  in_lanes(columns, [=](auto n, int64_t i) {
    using N = decltype(n);
    const N gain = load_as<N>(weight + i);
    N of_gain = load_as<N>(dweight + i);
#pragma GCC unroll 4
    for (int r = 0; r < FEW; ++r) {
      const int64_t at = r * columns + i, next = at + FEW * columns;
      prefetch<N>(x + next);
      prefetch<N>(dy + next);
      prefetch<N, true>(dx + next);
      const N value = load_as<N>(x + at), scaled = load_as<N>(dy + at) * rows[r].rrms;
      of_gain = fused(scaled, value, of_gain);
      store(fused(scaled, gain, value * rows[r].factor), dx + at);
    }
    store(of_gain, dweight + i);
  });
}

}  // namespace rms_norms
