// Tiles multiplied by AVX-512's dot products: each adds a pair of k of one row to 16 columns.
#pragma once
#include <cstring>

#include "products.h"

namespace products {

struct Tiles {};  // nothing to prepare

static inline int64_t refused() { return 0; }

constexpr int64_t ROWS = 8;  // whose sums, of two vectors each, stay in registers

// ROWS rows of two panels' product, from `left` on, or what it adds to the sums. beside(s) is
// called in every step.
template <bool LIES, bool ADDS, class Beside>
static inline void multiply_rows(const LeftPanel& from, const char* left, const bfloat16* right,
                                 int64_t steps, float* sums, int64_t stride, const Beside& beside) {
  const int64_t row = LIES ? from.row : LeftPanel::PACKED_ROW,
                pair_to_pair = LIES ? 4 : 64;  // bytes
  __m512 first[ROWS], second[ROWS];
  for (int64_t i = 0; i < ROWS; ++i) {
    first[i] = ADDS ? _mm512_loadu_ps(sums + i * stride) : _mm512_setzero_ps();
    second[i] = ADDS ? _mm512_loadu_ps(sums + i * stride + SIDE) : _mm512_setzero_ps();
  }
  for (int64_t s = 0; s < steps;
       ++s, left += from.step * int64_t(sizeof(bfloat16)), right += 2 * TILE) {
    beside(s);
    for (int64_t pair = 0; pair < SIDE; ++pair) {
      const __m512bh one = (__m512bh)_mm512_load_si512(right + STEP * pair);
      const __m512bh other = (__m512bh)_mm512_load_si512(right + TILE + STEP * pair);
      for (int64_t i = 0; i < ROWS; ++i) {
        int32_t two;
        std::memcpy(&two, left + i * row + pair * pair_to_pair, sizeof(two));
        const __m512bh every = (__m512bh)_mm512_set1_epi32(two);
        first[i] = _mm512_dpbf16_ps(first[i], every, one);
        second[i] = _mm512_dpbf16_ps(second[i], every, other);
      }
    }
  }
  for (int64_t i = 0; i < ROWS; ++i, sums += stride) {
    _mm512_storeu_ps(sums, first[i]);
    _mm512_storeu_ps(sums + SIDE, second[i]);
  }
}

// Two panels' product, float32 [32, 32], into rows of `stride` numbers, or added to them. beside(s)
// is called once for every step, a part of them with each of the rows' steps: what it does costs
// less there than between them.
template <bool ADDS = false, class Beside>
static inline void multiply(const LeftPanel& from, const bfloat16* right, int64_t steps,
                            float* sums, int64_t stride, const Beside& beside) {
  constexpr int64_t BLOCKS = PANEL / ROWS;
  for (int64_t b = 0; b < BLOCKS; ++b) {
    const int64_t i = b * ROWS;
    const char* left =
        reinterpret_cast<const char*>(from.data + i / SIDE * from.half) + i % SIDE * from.row;
    const auto some = [&](int64_t s) {
      const int64_t turn = b * steps + s;
      if ((turn + 1) / BLOCKS > turn / BLOCKS) beside(turn / BLOCKS);
    };
    if (from.lies)
      multiply_rows<true, ADDS>(from, left, right, steps, sums + i * stride, stride, some);
    else
      multiply_rows<false, ADDS>(from, left, right, steps, sums + i * stride, stride, some);
  }
}

}  // namespace products
