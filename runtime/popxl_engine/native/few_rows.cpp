// Products of a few rows with a large matrix. Reading the matrix limits them: it is read once, line
// by line as it lies. Every sum is taken in one order, whatever the number of rows and threads.
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "pieces.h"

namespace {

constexpr int64_t MOST = 512;  // columns of a piece, at most
constexpr int LINES = 8;       // of the matrix that are added at a time

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

// Adds to sums of each row the first `count` numbers of COUNT lines, and fetches those of the next
// lines.
template <int ROWS, int COUNT, class T>
void add_lines(const float* x, int64_t stride, const T* w, int64_t along, float* sums,
               int64_t count) {
  in_lanes(count, [=](auto n, int64_t i) {
    using N = decltype(n);
    N line[COUNT];
    for (int r = 0; r < COUNT; ++r) {
      line[r] = load_as<N>(w + r * along + i);
      prefetch<N>(w + (COUNT + r) * along + i);
    }
    for (int m = 0; m < ROWS; ++m) {
      N sum = load_as<N>(sums + m * MOST + i);
      for (int r = 0; r < COUNT; ++r) sum = fused(line[r], x[m * stride + r], sum);
      store(sum, sums + m * MOST + i);
    }
  });
}

// Lines of the matrix have its columns side by side.
template <int ROWS, class T>
void by_columns(const Factors<T>& f, int64_t first, int64_t end) {
  alignas(64) float sums[ROWS * MOST];
  const int64_t count = end - first;
  for (int m = 0; m < ROWS; ++m)
    for (int64_t j = 0; j < count; ++j)
      sums[m * MOST + j] = f.bias == nullptr ? 0.0f : wide(f.bias[first + j]);
  const T* w = f.w + first;
  int64_t k = 0;
  for (; k + LINES <= f.inner; k += LINES, w += LINES * f.along)
    add_lines<ROWS, LINES>(f.x + k, f.stride, w, f.along, sums, count);
  for (; k < f.inner; ++k, w += f.along)
    add_lines<ROWS, 1>(f.x + k, f.stride, w, f.along, sums, count);
  for (int m = 0; m < f.rows; ++m) narrow(sums + m * MOST, f.y + m * f.columns + first, count);
}

// Lines of the matrix have what is summed side by side.
template <int ROWS, class T>
void by_sums(const Factors<T>& f, int64_t first, int64_t end) {
  for (int64_t j = first; j < end; ++j) {
    const T* w = f.w + j * f.across;
    Lanes sums[ROWS] = {};
    int64_t k = 0;
    for (; k + LANES <= f.inner; k += LANES) {
      prefetch<Lanes>(w + k + AHEAD);
      const Lanes line = load_as<Lanes>(w + k);
      for (int m = 0; m < ROWS; ++m)
        sums[m] = fused(line, load_as<Lanes>(f.x + m * f.stride + k), sums[m]);
    }
    for (int m = 0; m < f.rows; ++m) {
      float sum = sum_of(sums[m]) + (f.bias == nullptr ? 0.0f : wide(f.bias[j]));
      for (int64_t i = k; i < f.inner; ++i) sum = fused(wide(w[i]), f.x[m * f.stride + i], sum);
      narrow(sum, f.y[m * f.columns + j]);
    }
  }
}

template <int ROWS, class T>
void multiply_rows(const Factors<T>& f, int threads) {
  const int64_t pieces = (f.columns + threads * MOST - 1) / (threads * MOST) * threads;
  const int64_t width = ((f.columns + pieces - 1) / pieces + LANES - 1) / LANES * LANES;
  in_pieces(f.columns, width, threads, [=](int64_t first, int64_t end) {
    if (f.across == 1)
      by_columns<ROWS>(f, first, end);
    else
      by_sums<ROWS>(f, first, end);
  });
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

FOR_TYPE(float, f32)
FOR_TYPE(bfloat16, bf16)
}
