// Products of a few rows with a large matrix. Reading the matrix limits them: it is read once, line
// by line as it lies. Every sum is taken in one order, whatever the number of rows and threads.
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "pieces.h"

namespace {

constexpr int64_t SUMS = 4096;  // that stay in the first cache, beside lines of the matrix
constexpr int64_t DEPTH = 384;  // lines of a part of the matrix: parts are summed up by themselves
constexpr int LINES = 8;        // of the matrix that are read side by side

// Whether what is read next is fetched in words. A row of float32 leaves the CPU time to see it by
// itself, and sums of several lines in registers: with words it takes a fifth longer.
template <int ROWS, class T>
constexpr bool FETCHES = ROWS > 1 || sizeof(T) < sizeof(float);

// What is multiplied: x float32 [rows, inner], rows `stride` apart, with a matrix whose element (k,
// j) lies at w[k * along + j * across].
template <class T>
struct Factors {
  const float* x;
  const T *w, *bias;
  T* y;
  int64_t stride, along, across, columns, inner;
  int rows;
};

// Adds to sums of each row, `apart` numbers from one another, the first `count` numbers of COUNT
// lines.
template <int ROWS, int COUNT, class T>
void add_lines(const float* x, int64_t stride, const T* w, int64_t along, float* sums,
               int64_t apart, int64_t count) {
  in_lanes(count, [=](auto n, int64_t i) {
    using N = decltype(n);
    N line[COUNT];
    for (int r = 0; r < COUNT; ++r) {
      line[r] = load_as<N>(w + r * along + i);
      if constexpr (FETCHES<ROWS, T>) prefetch<N>(w + (COUNT + r) * along + i);
    }
    for (int m = 0; m < ROWS; ++m) {
      N sum = load_as<N>(sums + m * apart + i);
      for (int r = 0; r < COUNT; ++r) sum = fused(line[r], x[m * stride + r], sum);
      store(sum, sums + m * apart + i);
    }
  });
}

// Lines k .. end of the matrix, whose columns lie side by side, into sums of `count` of them.
template <int ROWS, class T>
void sum_lines(const Factors<T>& f, int64_t k, int64_t end, const T* w, float* sums, int64_t apart,
               int64_t count) {
  for (int m = 0; m < ROWS; ++m) std::fill_n(sums + m * apart, count, 0.0f);
  for (w += k * f.along; k + LINES <= end; k += LINES, w += LINES * f.along)
    add_lines<ROWS, LINES>(f.x + k, f.stride, w, f.along, sums, apart, count);
  for (; k < end; ++k, w += f.along)
    add_lines<ROWS, 1>(f.x + k, f.stride, w, f.along, sums, apart, count);
}

// Lines of the matrix have its columns side by side. Threads share parts of lines, and columns
// where there are more threads than parts, so that each reads memory in one piece.
template <int ROWS, class T>
void by_columns(const Factors<T>& f, int threads) {
  const int64_t depths = (f.inner + DEPTH - 1) / DEPTH, spread = (threads + depths - 1) / depths;
  const int64_t most = std::min(SUMS / ROWS, (f.columns + spread - 1) / spread);
  const int64_t width = (most + LANES - 1) / LANES * LANES;
  const int64_t across = (f.columns + width - 1) / width;
  const int64_t apart = f.columns + LANES;  // not by a power of two, which one place of a cache has
  std::vector<float> sums(std::size_t(depths * ROWS * apart));
  float* const parts = sums.data();
  in_pieces(depths * across, 1, threads, [=](int64_t piece, int64_t) {
    const int64_t k = piece / across * DEPTH, j = piece % across * width;
    sum_lines<ROWS>(f, k, std::min(f.inner, k + DEPTH), f.w + j,
                    parts + piece / across * ROWS * apart + j, apart,
                    std::min(width, f.columns - j));
  });
  for (int m = 0; m < f.rows; ++m) {
    float* const row = parts + m * apart;
    for (int64_t part = 1; part < depths; ++part)
      in_lanes(f.columns, [=](auto n, int64_t j) {
        using N = decltype(n);
        store(load_as<N>(row + j) + load_as<N>(row + part * ROWS * apart + j), row + j);
      });
    if (f.bias != nullptr)
      in_lanes(f.columns, [=](auto n, int64_t j) {
        using N = decltype(n);
        store(load_as<N>(row + j) + load_as<N>(f.bias + j), row + j);
      });
    narrow(row, f.y + m * f.columns, f.columns);
  }
}

// COUNT lines of the matrix, from j on, which have what is summed side by side.
template <int ROWS, int COUNT, class T>
void sum_along(const Factors<T>& f, int64_t j) {
  const T* const w = f.w + j * f.across;
  Lanes sums[COUNT][ROWS] = {};
  int64_t k = 0;
  for (; k + LANES <= f.inner; k += LANES)
    for (int r = 0; r < COUNT; ++r) {
      if constexpr (COUNT == 1) prefetch<Lanes>(w + k + AHEAD);
      const Lanes line = load_as<Lanes>(w + r * f.across + k);
      for (int m = 0; m < ROWS; ++m)
        sums[r][m] = fused(line, load_as<Lanes>(f.x + m * f.stride + k), sums[r][m]);
    }
  for (int r = 0; r < COUNT; ++r)
    for (int m = 0; m < f.rows; ++m) {
      float sum = sum_of(sums[r][m]) + (f.bias == nullptr ? 0.0f : wide(f.bias[j + r]));
      for (int64_t i = k; i < f.inner; ++i)
        sum = fused(wide(w[r * f.across + i]), f.x[m * f.stride + i], sum);
      narrow(sum, f.y[m * f.columns + j + r]);
    }
}

template <int ROWS, class T>
void by_sums(const Factors<T>& f, int threads) {
  constexpr int COUNT = FETCHES<ROWS, T> ? 1 : LINES;
  const int64_t width = ((f.columns + threads - 1) / threads + COUNT - 1) / COUNT * COUNT;
  in_pieces(f.columns, width, threads, [=](int64_t j, int64_t end) {
    for (; j + COUNT <= end; j += COUNT) sum_along<ROWS, COUNT>(f, j);
    for (; j < end; ++j) sum_along<ROWS, 1>(f, j);
  });
}

template <int ROWS, class T>
void multiply_rows(const Factors<T>& f, int threads) {
  if (f.across == 1)
    by_columns<ROWS>(f, threads);
  else
    by_sums<ROWS>(f, threads);
}

// Rows that are compiled for are powers of two; what is missing to one are zeros whose sums nobody
// takes. A sum does not depend on other rows.
template <class T>
void multiply_few(const T* x, int64_t stride, const T* w, int64_t along, int64_t across,
                  const T* bias, T* y, int64_t rows, int64_t columns, int64_t inner, int threads) {
  const int64_t row = (inner + LANES - 1) / LANES * LANES, line = 64 / sizeof(float);
  const int64_t all = rows <= 2 ? rows : rows <= 4 ? 4 : 8;
  std::vector<float> memory(std::size_t(all * row + line));
  const int64_t beyond = int64_t(reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float)) % line;
  float* const left =
      memory.data() + (line - beyond) % line;  // vectors that begin with a line load twice as fast
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < inner; ++k) left[i * row + k] = wide(x[i * stride + k]);
  const Factors<T> f{left, w, bias, y, row, along, across, columns, inner, int(rows)};
  switch (all) {
    case 1:
      return multiply_rows<1>(f, threads);
    case 2:
      return multiply_rows<2>(f, threads);
    case 4:
      return multiply_rows<4>(f, threads);
    default:
      return multiply_rows<8>(f, threads);
  }
}

}  // namespace

extern "C" {

// x [rows, inner] with rows `stride` apart, 1 to 8 of them, times w, plus a bias where there is
// one: y [rows, columns].
#define FOR_TYPE(T, NAME)                                                                         \
  void multiply_few_##NAME(const T* x, int64_t stride, const T* w, int64_t along, int64_t across, \
                           const T* bias, T* y, int64_t rows, int64_t columns, int64_t inner,     \
                           int threads) {                                                         \
    multiply_few(x, stride, w, along, across, bias, y, rows, columns, inner, threads);            \
  }

FOR_ELEMENT_TYPE(FOR_TYPE)
}
