// Newton-Schulz iteration of float32 matrices: X = (a + b X X^T + c (X X^T)^2) X, step by step or,
// where they are long, on X X^T alone.
//
// Of products that are symmetric half is multiplied and the rest is copied. Threads share every
// product, and meet after each. Every sum is taken in one order, whatever the number of threads.
#include "newton_schulz.h"

#include <utility>

namespace {

constexpr int64_t ROWS = 6;   // whose sums, of two vectors each, stay in registers
constexpr int64_t SIDE = 32;  // of blocks that are multiplied or copied whole
static_assert(SIDE % LANES == 0, "blocks are of whole vectors");

// Rows that begin in different sets of the cache, with room for whole tiles. What lies beyond rows
// and columns is anything: of a product, it reaches nothing but what lies beyond its own.
struct Matrix {
  float* at;
  int64_t rows, columns;

  int64_t stride() const { return ceil_div(columns, SIDE) * SIDE + 16; }
  int64_t size() const { return ceil_div(rows, ROWS) * ROWS * stride(); }
  float* row(int64_t i) const { return at + i * stride(); }
};

// What a product becomes: scale * product + weight * added + diagonal * identity.
struct Result {
  Matrix to;
  float scale = 1.0f;
  const float* added = nullptr;  // of the same strides
  float weight = 0.0f, diagonal = 0.0f;
};

// A tile's rows, i and following, to columns of the result, where those are not multiplied.
void mirror(const Matrix& to, const float* tile, int64_t i, int64_t j) {
  for (int64_t c = j; c < std::min(j + LANES, to.columns); ++c) {
    const int64_t below = c / ROWS * ROWS / SIDE * SIDE;
    float* const row = to.row(c);
    for (int64_t m = 0; m < std::min(below - i, ROWS); ++m) row[i + m] = tile[m * LANES + c - j];
  }
}

// Rows i and following, and a tile's columns, of lhs @ rhs.
void multiply_tile(const Matrix& lhs, const Matrix& rhs, const Result& result, bool is_symmetric,
                   int64_t i, int64_t j) {
  Lanes sums[ROWS] = {};
  const float *a = lhs.row(i), *b = rhs.at + j;
  const int64_t along = lhs.stride(), step = rhs.stride();
  for (int64_t k = 0; k < lhs.columns; ++k, b += step) {
    const Lanes line = load_as<Lanes>(b);
    for (int64_t m = 0; m < ROWS; ++m) sums[m] = fused(line, a[m * along + k], sums[m]);
  }
  float tile[ROWS * LANES];
  for (int64_t m = 0; m < ROWS; ++m) {
    Lanes row = sums[m] * result.scale;
    const int64_t at = (i + m) * result.to.stride() + j;
    if (result.added) row = fused(load_as<Lanes>(result.added + at), result.weight, row);
    store(row, tile + m * LANES);
    if (result.diagonal != 0.0f && i + m >= j && i + m < j + LANES)
      tile[m * LANES + i + m - j] += result.diagonal;
    store(load_as<Lanes>(tile + m * LANES), result.to.at + at);
  }
  if (is_symmetric) mirror(result.to, tile, i, j);
}

// A worker's part of lhs @ rhs.
void multiply(const Worker& worker, const Matrix& lhs, const Matrix& rhs, const Result& result,
              bool is_symmetric = true) {
  for (int64_t block = 0; block < rhs.columns; block += SIDE)
    for (int64_t i = worker.index * ROWS; i < lhs.rows; i += worker.count * ROWS)
      if (!is_symmetric || block >= i / SIDE * SIDE)
        for (int64_t j = block; j < std::min(block + SIDE, rhs.columns); j += LANES)
          multiply_tile(lhs, rhs, result, is_symmetric, i, j);
}

// What is needed for one matrix at a time.
struct Iteration : Matrices {
  bool by_gram_matrix = false;
  Matrix x, transposed, y, square, polynomial, next, whole, other;
  float* squares;

  Iteration(const Matrices& matrices, float* scratch) : Matrices(matrices) {
    const auto taken = [&](int64_t rows, int64_t columns) {
      const Matrix made{scratch, rows, columns};
      scratch += made.size();
      return made;
    };
    x = taken(few, many), y = taken(few, many), transposed = taken(many, few);
    for (Matrix* each : {&square, &polynomial, &next, &whole, &other}) *each = taken(few, few);
    squares = scratch;
  }

  int64_t scratch() const { return squares + few - x.at; }

  // X over its norm, and its transpose.
  void begin(const Worker& worker, const float* from) {
    const float norm = load(worker, x, from, squares);
    in_blocks(worker, few, many,
              [&](int64_t i, int64_t j) { transposed.row(j)[i] = x.row(i)[j] /= norm; });
    worker.barrier.wait();
  }

  void make_polynomial(const Worker& worker) {
    multiply(worker, square, square, {polynomial, c, square.at, b, a});
    worker.barrier.wait();
  }

  // The product of all steps' polynomials so far becomes one more's.
  void extend(const Worker& worker, bool is_first) {
    if (is_first)
      in_blocks(worker, few, few,
                [&](int64_t i, int64_t j) { whole.row(i)[j] = polynomial.row(i)[j]; });
    else
      multiply(worker, polynomial, whole, {other});
  }

  // The polynomials of all steps, found from the first X X^T; X is multiplied once.
  void on_gram_matrix(const Worker& worker) {
    make_polynomial(worker);
    for (int64_t step = 1; step <= steps; ++step) {
      extend(worker, step == 1);
      if (step < steps) multiply(worker, polynomial, square, {next});
      worker.barrier.wait();
      if (step > 1) std::swap(whole, other);
      if (step == steps) break;
      multiply(worker, polynomial, next, {square});
      worker.barrier.wait();
      make_polynomial(worker);
    }
    multiply(worker, whole, x, {y}, false);
    worker.barrier.wait();
  }

  void step_by_step(const Worker& worker) {
    for (int64_t step = 1;; ++step) {
      make_polynomial(worker);
      multiply(worker, polynomial, x, {y}, false);
      worker.barrier.wait();
      if (step == steps) break;
      std::swap(x, y);
      in_blocks(worker, few, many,
                [&](int64_t i, int64_t j) { transposed.row(j)[i] = x.row(i)[j]; });
      worker.barrier.wait();
      multiply(worker, x, transposed, {square});
      worker.barrier.wait();
    }
  }

  void operator()(const Worker& worker, const float* from, float* to) {
    begin(worker, from);
    multiply(worker, x, transposed, {square});
    worker.barrier.wait();
    if (by_gram_matrix)
      on_gram_matrix(worker);
    else
      step_by_step(worker);
    store(worker, y, to);
  }
};

}  // namespace

extern "C" {

// Of `count` matrices, each [rows, columns], one after the other.
void newton_schulz_f32(const float* x, float* y, float* scratch, int64_t count, int64_t rows,
                       int64_t columns, float a, float b, float c, float epsilon, int64_t steps,
                       int64_t by_gram_matrix, int threads) {
  Iteration iteration({rows, columns, a, b, c, epsilon, steps}, scratch);
  iteration.by_gram_matrix = by_gram_matrix;
  iterate(iteration, x, y, count, threads);
}

// Elements of float32 that one matrix needs beside its operands.
int64_t newton_schulz_scratch_f32(int64_t rows, int64_t columns, int) {
  return Iteration({rows, columns}, nullptr).scratch();
}
}
