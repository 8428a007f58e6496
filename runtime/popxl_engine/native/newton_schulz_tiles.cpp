// Newton-Schulz iteration of bfloat16 matrices by tiles, step by step: X = a X + (b A + c A A) X,
// with A = X X^T. Every product is summed in float32 and rounded once, with what it is added to.
//
// Of products that are symmetric half is multiplied and the rest is copied. Threads share every
// product, and meet after each. Every sum is taken in one order, whatever the number of threads.
#include "products.h"
#ifdef HAS_TILES
#include <utility>

#include "newton_schulz.h"

namespace products {
namespace {

static_assert(PANEL == LANES && SIDE == WIDTH, "a row of a panel is two vectors");

int64_t in_panels(int64_t length) { return ceil_div(length, PANEL) * PANEL; }

// Whole panels, with rows that begin in different sets of the cache.
struct Panelled {
  bfloat16* at;
  int64_t rows, columns;

  int64_t stride() const { return columns + PANEL; }
  int64_t size() const { return rows * stride(); }
  bfloat16* row(int64_t i) const { return at + i * stride(); }
  Operand by_rows() const { return {at, stride(), 1, rows}; }
  Operand by_columns() const { return {at, 1, stride(), columns}; }
};

// What a product becomes: scale * product + weight * added, rounded.
struct Result {
  Panelled to;
  float scale = 1.0f;
  const bfloat16* added = nullptr;  // of the same strides
  float weight = 0.0f;
};

// A product of two panels, float32 [32, 32], to its place, row i and column j.
void put(const Result& result, float* sums, int64_t i, int64_t j, bool is_mirrored) {
  for (int64_t m = 0; m < PANEL; ++m) {
    float* const line = sums + m * PANEL;
    const int64_t at = (i + m) * result.to.stride() + j;
    Lanes row = load_as<Lanes>(line) * result.scale;
    if (result.added) row = fused(load_as<Lanes>(result.added + at), result.weight, row);
    store(row, result.to.at + at);
    store(row, line);
  }
  for (int64_t half = 0; half < PANEL && is_mirrored; half += SIDE) {
    __m512i low[SIDE], high[SIDE];
    for (int64_t m = 0; m < SIDE; ++m) {
      low[m] = _mm512_load_si512(sums + m * PANEL + half);
      high[m] = _mm512_load_si512(sums + (SIDE + m) * PANEL + half);
    }
    transpose(low), transpose(high);
    for (int64_t m = 0; m < SIDE; ++m)
      store(Lanes{(Vector)low[m], (Vector)high[m]}, result.to.row(j + half + m) + i);
  }
}

// A worker's part of an operand, packed.
template <bool LEFT>
void pack(const Worker& worker, const Operand& from, int64_t k, bfloat16* to) {
  for (int64_t p = worker.index; p < from.length / PANEL; p += worker.count)
    pack_panel<LEFT>(from, p, 0, k, to + p * PANEL * k);
}

// A worker's part of the product of packed operands; result.to says how long they are.
void multiply_packed(const Worker& worker, const bfloat16* left, const bfloat16* right, int64_t k,
                     const Result& result, bool is_symmetric) {
  alignas(64) float sums[PANEL * PANEL];
  int64_t turn = 0;
  for (int64_t j = 0; j < result.to.columns; j += PANEL)
    for (int64_t i = 0; i < (is_symmetric ? j + PANEL : result.to.rows); i += PANEL) {
      if (turn++ % worker.count != worker.index) continue;
      multiply(LeftPanel::packed(left + i * k), right + j * k, k / STEP, sums, PANEL,
               [](int64_t) {});
      put(result, sums, i, j, is_symmetric && i < j);
    }
}

// What is needed for one matrix at a time.
struct Iteration : Matrices {
  Panelled x, y, square, polynomial;
  bfloat16 *left, *right;
  float* squares;

  Iteration(const Matrices& matrices, bfloat16* scratch) : Matrices(matrices) {
    const int64_t short_side = in_panels(few), long_side = in_panels(many);
    scratch += -(reinterpret_cast<intptr_t>(scratch) / 2) & (PANEL - 1);  // tiles are aligned
    const auto taken = [&](int64_t count) { return std::exchange(scratch, scratch + count); };
    for (Panelled* each : {&x, &y}) *each = {nullptr, short_side, long_side};
    for (Panelled* each : {&square, &polynomial}) *each = {nullptr, short_side, short_side};
    for (Panelled* each : {&x, &y, &square, &polynomial}) each->at = taken(each->size());
    left = taken(short_side * long_side);
    right = taken(short_side * long_side);
    squares = reinterpret_cast<float*>(scratch);
  }

  int64_t scratch() const {
    return reinterpret_cast<bfloat16*>(squares + in_panels(few)) - x.at + PANEL;
  }

  // X over its norm, amid zeros.
  void begin(const Worker& worker, const bfloat16* from) {
    for (int64_t i = worker.first(x.rows); i < worker.end(x.rows); ++i)
      std::fill(x.row(i) + (i < few ? many : 0), x.row(i) + x.columns, bfloat16{});
    const float norm = load(worker, x, from, squares);
    for (int64_t i = worker.first(few); i < worker.end(few); ++i)
      in_lanes(many, [&](auto none, int64_t j) {
        ::store(load_as<decltype(none)>(x.row(i) + j) / norm, x.row(i) + j);
      });
    worker.barrier.wait();
  }

  // A matrix times its own transpose, where what is packed for one side serves both but for AMX.
  void multiply_itself(const Worker& worker, const Panelled& matrix, const Result& result) {
    const int64_t k = matrix.columns;
    pack<false>(worker, matrix.by_rows(), k, right);
    if (HAS_AMX) pack<true>(worker, matrix.by_rows(), k, left);
    worker.barrier.wait();
    multiply_packed(worker, HAS_AMX ? left : right, right, k, result, true);
    worker.barrier.wait();
  }

  void step(const Worker& worker) {
    multiply_itself(worker, x, {square});
    multiply_itself(worker, square, {polynomial, c, square.at, b});
    pack<true>(worker, polynomial.by_rows(), polynomial.columns, left);
    pack<false>(worker, x.by_columns(), x.rows, right);
    worker.barrier.wait();
    multiply_packed(worker, left, right, x.rows, {y, 1.0f, x.at, a}, false);
    worker.barrier.wait();
    std::swap(x, y);
  }

  void operator()(const Worker& worker, const bfloat16* from, bfloat16* to) {
    const Tiles tiles;
    begin(worker, from);
    for (int64_t n = 0; n < steps; ++n) step(worker);
    store(worker, x, to);
  }
};

}  // namespace
}  // namespace products

extern "C" {

// Of `count` matrices, each [rows, columns], one after the other.
void newton_schulz_bf16(const bfloat16* x, bfloat16* y, bfloat16* scratch, int64_t count,
                        int64_t rows, int64_t columns, float a, float b, float c, float epsilon,
                        int64_t steps, int64_t, int threads) {
  const products::Iteration iteration({rows, columns, a, b, c, epsilon, steps}, scratch);
  iterate(iteration, x, y, count, threads);
}

// Elements of bfloat16 that one matrix needs beside its operands.
int64_t newton_schulz_scratch_bf16(int64_t rows, int64_t columns, int) {
  return products::Iteration({rows, columns}, nullptr).scratch();
}
}
#endif
