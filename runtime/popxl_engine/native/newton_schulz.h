// What Newton-Schulz iterations share, whatever multiplies: matrices of one size, one after the
// other, each of which all threads load, and store when it is done.
#pragma once
#include <cmath>

#include "lanes.h"
#include "pieces.h"
#include "workers.h"

constexpr int64_t BLOCK = 16;   // of a copy from rows to columns
constexpr int64_t SHARED = 64;  // rows from which on threads share a matrix

// Calls copy(i, j) for a worker's rows i of a matrix and all of its columns, in small blocks: one
// side may lie column by column.
template <class Copy>
static void in_blocks(const Worker& worker, int64_t rows, int64_t columns, Copy copy) {
  for (int64_t block = 0; block < columns; block += BLOCK)
    for (int64_t i = worker.first(rows); i < worker.end(rows); ++i)
      for (int64_t j = block; j < std::min(block + BLOCK, columns); ++j) copy(i, j);
}

// Matrices of one size, turned so that they have no more rows than columns, and the numbers of
// their iteration.
struct Matrices {
  int64_t few, many, row_step, column_step;
  float a, b, c, epsilon;
  int64_t steps;

  Matrices(int64_t rows, int64_t columns, float a = 0.0f, float b = 0.0f, float c = 0.0f,
           float epsilon = 0.0f, int64_t steps = 0)
      : few(std::min(rows, columns)),
        many(std::max(rows, columns)),
        row_step(rows <= columns ? columns : 1),
        column_step(rows <= columns ? 1 : columns),
        a(a),
        b(b),
        c(c),
        epsilon(epsilon),
        steps(steps) {}

  // Calls copy(column_step), by a constant where that is one: for vectors.
  template <class Copy>
  void with_step(Copy copy) const {
    if (column_step == 1)
      copy(std::integral_constant<int64_t, 1>());
    else
      copy(column_step);
  }

  // Copies a matrix to the rows of x, and returns its norm plus epsilon. squares: room for a number
  // of each row.
  template <class Rows, class T>
  float load(const Worker& worker, const Rows& x, const T* from, float* squares) const {
    with_step([&](auto step) {
      in_blocks(worker, few, many,
                [&](int64_t i, int64_t j) { x.row(i)[j] = from[i * row_step + j * step]; });
    });
    for (int64_t i = worker.first(few); i < worker.end(few); ++i)
      squares[i] = squares_of(x.row(i), many);
    worker.barrier.wait();
    double sum = 0.0;
    for (int64_t i = 0; i < few; ++i) sum += squares[i];
    return std::sqrt(float(sum)) + epsilon;
  }

  template <class Rows, class T>
  void store(const Worker& worker, const Rows& x, T* to) const {
    with_step([&](auto step) {
      in_blocks(worker, few, many,
                [&](int64_t i, int64_t j) { to[i * row_step + j * step] = x.row(i)[j]; });
    });
    worker.barrier.wait();
  }
};

// Calls a copy of the iteration, for each thread, for every matrix.
template <class Iteration, class T>
static void iterate(const Iteration& iteration, const T* x, T* y, int64_t count, int threads) {
  const int64_t size = iteration.few * iteration.many;
  on_workers(iteration.few < SHARED ? 1 : threads, [&](const Worker& worker) {
    Iteration own = iteration;  // each swaps by itself
    for (int64_t n = 0; n < count; ++n) own(worker, x + n * size, y + n * size);
  });
}
