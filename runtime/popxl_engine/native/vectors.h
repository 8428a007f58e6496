// Products of panels with the CPU's vectors, in float32, of operands of any element type.
//
// A panel is 32 rows of the left operand or 32 columns of the right one. A block of sums stays in
// registers while one row of the right panel after another meets a number of each of its rows.
#pragma once
#include <algorithm>

#include "lanes.h"
#include "operands.h"

namespace vectors {

using products::Matrix;
using products::PANEL;

constexpr int64_t ROWS = WIDTH == 16 ? 8 : 4;  // of a block, which is two vectors wide

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

// Packs 32 columns whose k lie side by side, of as many k as fill vectors. Returns how many.
template <class T>
static inline int64_t pack_turned(const T*, int64_t, int64_t, float*) {
  return 0;
}

#if defined(__AVX512F__)
template <>
inline int64_t pack_turned(const float* from, int64_t along, int64_t k_count, float* to) {
  int64_t k = 0;
  for (; k + WIDTH <= k_count; k += WIDTH)
    for (int64_t i = 0; i < PANEL; i += WIDTH) {
      __m512i r[WIDTH];
      for (int64_t j = 0; j < WIDTH; ++j) r[j] = _mm512_loadu_si512(from + (i + j) * along + k);
      products::transpose(r);
      for (int64_t j = 0; j < WIDTH; ++j) _mm512_storeu_si512(to + (k + j) * PANEL + i, r[j]);
    }
  return k;
}
#endif

// 32 columns of an operand, the p-th ones: those of one k side by side. What is missing is zeros.
template <class T>
static void pack_right(const Matrix<T>& from, int64_t p, int64_t k_count, float* to) {
  const int64_t columns = std::min(PANEL, from.length - p * PANEL);
  const T* at = from.data + p * PANEL * from.along;
  if (columns < PANEL) std::fill_n(to, k_count * PANEL, 0.0f);
  if (from.along == 1) {
    for (int64_t k = 0; k < k_count; ++k, at += from.across, to += PANEL) {
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) to[j] = wide(at[j]);
    }
  } else {
    const int64_t first = columns == PANEL ? pack_turned(at, from.along, k_count, to) : 0;
    for (int64_t k = first; k < k_count; ++k)
      for (int64_t j = 0; j < columns; ++j) to[k * PANEL + j] = wide(at[j * from.along + k]);
  }
}

// ROWS rows by two vectors of a product, or what it adds to the sums.
template <bool ADDS>
static inline void multiply_block(const float* const* left, int64_t across, const float* right,
                                  int64_t k_count, float* sums, int64_t stride) {
  Vector first[ROWS], second[ROWS];
  for (int64_t i = 0; i < ROWS; ++i) {
    first[i] = ADDS ? load(sums + i * stride) : Vector{};
    second[i] = ADDS ? load(sums + i * stride + WIDTH) : Vector{};
  }
  for (int64_t k = 0; k < k_count; ++k, right += PANEL) {
    const Vector one = load(right), other = load(right + WIDTH);
    for (int64_t i = 0; i < ROWS; ++i) {
      const Vector a = every(left[i][k * across]);
      first[i] = fused(a, one, first[i]);
      second[i] = fused(a, other, second[i]);
    }
  }
  for (int64_t i = 0; i < ROWS; ++i, sums += stride) {
    store(first[i], sums);
    store(second[i], sums + WIDTH);
  }
}

// A panel times a panel: float32 [32, 32], into rows of `stride` numbers, or added to them. Those
// that are there, rounded up to a block, are written.
template <bool ADDS = false>
static void multiply(const Left& left, const float* right, int64_t k_count, float* sums,
                     int64_t stride) {
  for (int64_t i = 0; i < left.rows; i += ROWS) {
    const float* rows[ROWS];
    for (int64_t r = 0; r < ROWS; ++r)
      rows[r] = left.data + std::min(i + r, left.rows - 1) * left.along;
    for (int64_t j = 0; j < PANEL; j += 2 * WIDTH)
      multiply_block<ADDS>(rows, left.across, right + j, k_count, sums + i * stride + j, stride);
  }
}

}  // namespace vectors
