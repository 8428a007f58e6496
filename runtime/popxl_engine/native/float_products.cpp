// Whole products of float32 matrices.
//
// A block of sums, two vectors wide, stays in registers. Packed columns of the right operand are
// for all threads, and meet one block of rows after the other in the first cache; each thread packs
// some rows of the left operand for its second cache. A sum is taken in the order of k, DEPTH of
// them by themselves, as in small_products.cpp: whatever the threads, and whatever other rows and
// columns there are. Blocks are as Goto and van de Geijn 2008, "Anatomy of high-performance matrix
// multiplication", ACM TOMS 34(3), has them.
#include <numeric>

#include "lanes.h"
#include "operands.h"
#include "packing.h"

namespace {

using packing::DEPTH, packing::Lines, packing::pack;
using products::Workspace;

constexpr int64_t ROWS = WIDTH == 16 ? 12 : WIDTH == 8 ? 6 : 4, COLUMNS = LANES;  // of a block
static_assert(ROWS < WIDTH || ROWS % WIDTH == 0, "`pack` writes whole vectors");
constexpr int64_t HEIGHT = 144;    // rows that a thread packs, at most
constexpr int64_t HELD = 1 << 20;  // numbers of the result that more and more k are added to
constexpr int64_t NARROWEST = 512, WIDEST = 4096;  // columns that are packed: least, most
constexpr int64_t SOON = 8 * COLUMNS;  // packed numbers that are fetched before they are needed

// y = old * y + weight * left @ right + bias.
struct Result {
  float* y;
  int64_t stride, rows, columns;
  float old, weight;
  const float* bias;  // null: none
  double* squares;    // of rows of blocks, to which those of y are added; null: nobody asks
};

#if defined(__x86_64__)
#define IN_REGISTERS(x, y) asm("" : "+v"(x), "+v"(y))
#else
#define IN_REGISTERS(x, y)
#endif

// y = factor * y + weight * left @ right of a block's packed rows and columns; without ADDS what
// was in y may be anything. It is not inlined: its sums need all registers.
template <bool ADDS>
__attribute__((noinline)) void multiply_block(const float* left, const float* right, int64_t terms,
                                              float factor, float weight, float* y,
                                              int64_t stride) {
  Vector low[ROWS] = {}, high[ROWS] = {};
  for (int64_t i = 0; i < ROWS; ++i) {
    __builtin_prefetch(y + i * stride, 1);
    __builtin_prefetch(y + i * stride + COLUMNS - 1, 1);
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < terms; ++k, left += ROWS, right += COLUMNS) {
    Vector one = load(right), other = load(right + WIDTH);
    IN_REGISTERS(one, other);  // else compilers load them again for each row
    __builtin_prefetch(right + SOON);
#pragma GCC unroll 12
    for (int64_t i = 0; i < ROWS; ++i) {
      const Vector number = every(left[i]);
      low[i] = fused(number, one, low[i]);
      high[i] = fused(number, other, high[i]);
    }
  }
  for (int64_t i = 0; i < ROWS; ++i, y += stride) {
    const Lanes sum = Lanes{low[i], high[i]} * weight;
    store(ADDS ? load_as<Lanes>(y) * factor + sum : sum, y);
  }
}

// The same with the rows and columns that are there.
template <bool ADDS>
void multiply_edge(const float* left, const float* right, int64_t terms, float factor, float weight,
                   float* y, int64_t stride, int64_t rows, int64_t columns) {
  float block[ROWS * COLUMNS] = {};
  for (int64_t i = 0; ADDS && i < rows; ++i)
    std::copy_n(y + i * stride, columns, block + i * COLUMNS);
  multiply_block<ADDS>(left, right, terms, factor, weight, block, COLUMNS);
  for (int64_t i = 0; i < rows; ++i) std::copy_n(block + i * COLUMNS, columns, y + i * stride);
}

// y + bias, and the sum of the squares: of rows and columns whose other sums are made.
double finish(float* y, int64_t stride, const float* bias, int64_t rows, int64_t columns) {
  double squares = 0.0;
  for (int64_t i = 0; i < rows; ++i, y += stride)
    in_lanes(columns, [&](auto n, int64_t j) {
      using N = decltype(n);
      N x = load_as<N>(y + j);
      if (bias != nullptr) store(x = x + load_as<N>(bias + j), y + j);
      if constexpr (std::is_same_v<N, Lanes>)
        squares += sum_of(x * x);
      else
        squares += x * x;
    });
  return squares;
}

void multiply(const Lines<float>& left, const Lines<float>& right, int64_t k_count, int threads,
              const Result& to) {
  static thread_local Workspace shared;
  const auto part_of = [](int64_t size, int64_t parts, int64_t unit) {
    return ceil_div(ceil_div(size, parts), unit) * unit;
  };
  const int64_t widest = std::clamp(HELD / to.rows, NARROWEST, WIDEST);
  const int64_t width = part_of(to.columns, ceil_div(to.columns, widest), COLUMNS);
  const int64_t heights = ceil_div(ceil_div(to.rows, HEIGHT), threads) * threads;
  const int64_t height = part_of(to.rows, heights, ROWS);
  // Of few rows, threads share columns too.
  const int64_t stacks = ceil_div(to.rows, height), strips = ceil_div(threads, stacks);
  const int64_t depth = std::min(DEPTH, k_count);
  float* const packed_right = shared.take<float>(width * depth);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Workspace own;
    // packed rows end in what `pack` writes beyond them
    float* const packed_left = own.take<float>(height * depth + WIDTH);
    for (int64_t column = 0; column < to.columns; column += width)
      for (int64_t k = 0; k < k_count; k += DEPTH) {
        const int64_t terms = std::min(DEPTH, k_count - k);
        const bool adds = k > 0 || to.old != 0.0f, is_last = k + terms == k_count;
        const float factor = k > 0 ? 1.0f : to.old;
        const int64_t blocks = ceil_div(std::min(width, to.columns - column), COLUMNS);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; ++b)
          pack(right.from(column + b * COLUMNS, k), COLUMNS, terms,
               packed_right + b * COLUMNS * terms);
#pragma omp for schedule(dynamic)
        for (int64_t piece = 0; piece < stacks * strips; ++piece) {
          const int64_t first = piece / strips * height, strip = piece % strips;
          const int64_t end = std::min(to.rows, first + height);
          for (int64_t row = first; row < end; row += ROWS)
            pack(left.from(row, k), ROWS, terms, packed_left + (row - first) * terms);
          for (int64_t b = blocks * strip / strips; b < blocks * (strip + 1) / strips; ++b)
            for (int64_t row = first; row < end; row += ROWS) {
              const int64_t at = column + b * COLUMNS;
              const int64_t rows = std::min(ROWS, to.rows - row),
                            columns = std::min(COLUMNS, to.columns - at);
              const float *const one = packed_left + (row - first) * terms, *const other =
                                                                                packed_right +
                                                                                b * COLUMNS * terms;
              float* const y = to.y + row * to.stride + at;
              if (rows == ROWS && columns == COLUMNS)
                (adds ? multiply_block<true> : multiply_block<false>)(one, other, terms, factor,
                                                                      to.weight, y, to.stride);
              else
                (adds ? multiply_edge<true> : multiply_edge<false>)(one, other, terms, factor,
                                                                    to.weight, y, to.stride, rows,
                                                                    columns);
              if (is_last && (to.bias != nullptr || to.squares != nullptr)) {
                const float* const bias = to.bias == nullptr ? nullptr : to.bias + at;
                const double squares = finish(y, to.stride, bias, rows, columns);
                if (to.squares != nullptr) to.squares[row / ROWS] += squares;
              }
            }
        }
      }
  }
}

}  // namespace

extern "C" {

// total = old * total + weight * left @ right. squares, which may be null: one number, the sum of
// total's squares then.
void accumulate_product_f32(const float* left, int64_t left_row, int64_t left_k, const float* right,
                            int64_t right_k, int64_t right_column, float* total, int64_t stride,
                            float old, float weight, int64_t rows, int64_t columns, int64_t k,
                            float* squares, int threads) {
  static thread_local Workspace workspace;
  const int64_t blocks = squares == nullptr ? 0 : ceil_div(rows, ROWS);
  double* const sums = squares == nullptr ? nullptr : workspace.take<double>(blocks);
  std::fill_n(sums, blocks, 0.0);
  multiply({left, left_row, left_k, rows}, {right, right_column, right_k, columns}, k, threads,
           {total, stride, rows, columns, old, weight, nullptr, sums});
  if (squares != nullptr) *squares = float(std::accumulate(sums, sums + blocks, 0.0));
}

// y = left @ right + bias; bias may be null.
void multiply_add_f32(const float* left, int64_t left_row, int64_t left_k, const float* right,
                      int64_t right_k, int64_t right_column, const float* bias, float* y,
                      int64_t stride, int64_t rows, int64_t columns, int64_t k, int threads) {
  multiply({left, left_row, left_k, rows}, {right, right_column, right_k, columns}, k, threads,
           {y, stride, rows, columns, 0.0f, 1.0f, bias, nullptr});
}
}
