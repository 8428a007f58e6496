// Products of panels with the CPU's vectors, in float32, of operands of any element type.
//
// A panel is 32 rows of the left operand or 32 columns of the right one. A block of sums stays in
// registers while one row of the right panel after another meets a number of each of its rows.
#pragma once
#include <algorithm>

#include "lanes.h"
#include "operands.h"
#include "packing.h"

namespace vectors {

using products::Matrix;
using products::PANEL;

// Of a block, which is two vectors wide. AVX2's 16 registers hold 12 sums and what they are of.
constexpr int64_t ROWS = WIDTH == 16 ? 8 : WIDTH == 8 ? 6 : 4;

// A panel of the left operand: element (i, k) lies at data[i * along + k * across]. Rows from
// `rows` on are not there.
struct Left {
  const float* data;
  int64_t along, across, rows;
};

static inline const float* in_place(const float* data) { return data; }
static inline const float* in_place(const bfloat16*) { return nullptr; }

// Up to 32 rows of an operand, from k on: as they lie where that is float32 with the k side by
// side, else in `workspace`.
template <class T>
static Left left_panel(const Matrix<T>& from, int64_t k, int64_t k_end, float* workspace) {
  const int64_t rows = std::min(PANEL, from.length), count = k_end - k;
  const T* at = from.data + k * from.across;
  if (from.across == 1) {
    if (in_place(at) != nullptr) return {in_place(at), from.along, 1, rows};
    for (int64_t i = 0; i < rows; ++i) {
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) workspace[i * count + j] = wide(at[i * from.along + j]);
    }
    return {workspace, count, 1, rows};
  }
  for (int64_t j = 0; j < count; ++j, at += from.across) {
#pragma omp simd
    for (int64_t i = 0; i < rows; ++i) workspace[j * PANEL + i] = wide(at[i]);
  }
  return {workspace, 1, PANEL, rows};
}

// 32 columns of an operand, the p-th ones: those of one k side by side. What is missing is zeros.
template <class T>
static void pack_right(const Matrix<T>& from, int64_t p, int64_t k_count, float* to) {
  const packing::Lines<T> columns{from.data, from.along, from.across, from.length};
  packing::pack(columns.from(p * PANEL, 0), PANEL, k_count, to);
}

// COUNT rows by two vectors of a product, or what it adds to the sums.
template <bool ADDS, int64_t COUNT>
static inline void multiply_block(const float* const* left, int64_t across, const float* right,
                                  int64_t k_count, float* sums, int64_t stride) {
  Vector first[COUNT], second[COUNT];
  for (int64_t i = 0; i < COUNT; ++i) {
    first[i] = ADDS ? load(sums + i * stride) : Vector{};
    second[i] = ADDS ? load(sums + i * stride + WIDTH) : Vector{};
  }
  for (int64_t k = 0; k < k_count; ++k, right += PANEL) {
    const Vector one = load(right), other = load(right + WIDTH);
    for (int64_t i = 0; i < COUNT; ++i) {
      const Vector a = every(left[i][k * across]);
      first[i] = fused(a, one, first[i]);
      second[i] = fused(a, other, second[i]);
    }
  }
  for (int64_t i = 0; i < COUNT; ++i, sums += stride) {
    store(first[i], sums);
    store(second[i], sums + WIDTH);
  }
}

// COUNT rows of a product, from the i-th one on.
template <bool ADDS, int64_t COUNT>
static inline void multiply_rows(const Left& left, int64_t i, const float* right, int64_t k_count,
                                 float* sums, int64_t stride) {
  const float* rows[COUNT];
  for (int64_t r = 0; r < COUNT; ++r)
    rows[r] = left.data + std::min(i + r, left.rows - 1) * left.along;
  for (int64_t j = 0; j < PANEL; j += 2 * WIDTH)
    multiply_block<ADDS, COUNT>(rows, left.across, right + j, k_count, sums + i * stride + j,
                                stride);
}

// A panel times a panel: float32 [32, 32], into rows of `stride` numbers, or added to them. Those
// that are there, rounded up to a block, are written.
template <bool ADDS = false>
static void multiply(const Left& left, const float* right, int64_t k_count, float* sums,
                     int64_t stride) {
  int64_t i = 0;
  for (; i < left.rows && i + ROWS <= PANEL; i += ROWS)
    multiply_rows<ADDS, ROWS>(left, i, right, k_count, sums, stride);
  if constexpr (PANEL % ROWS != 0)
    if (i < left.rows) multiply_rows<ADDS, PANEL % ROWS>(left, i, right, k_count, sums, stride);
}

}  // namespace vectors
