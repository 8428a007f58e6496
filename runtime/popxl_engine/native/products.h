// Tiles of bfloat16 matrices, and products of panels of them, accumulated in float32.
//
// A tile is 16 rows of 64 bytes. Of the left operand it holds 16 rows of 32 consecutive k; of the
// right one 16 pairs of k of 16 columns, the two of a pair side by side. Operands are packed into
// panels of two tiles a step of 32 k; four tiles of sums, 32 rows by 32 columns, meet two tiles of
// each side. What is missing at the edges is packed as zeros. AMX multiplies whole tiles; where a
// CPU lacks it, AVX-512's dot products do their rows, and packed left tiles are like right ones.
#pragma once
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define HAS_TILES
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif
#include <immintrin.h>

#include <algorithm>

#include "operands.h"

namespace products {

constexpr int64_t SIDE = 16, STEP = 32, TILE = SIDE * STEP;
static_assert(PANEL == 2 * SIDE, "four tiles of sums");

// 16 i and 32 k of an operand, from (i, k) on, into a tile.
template <bool LEFT>
static inline void pack_tile(const Operand& from, int64_t i, int64_t k, int64_t k_end,
                             bfloat16* to) {
  __m512i r[SIDE];
  const int64_t is = std::clamp<int64_t>(from.length - i, 0, SIDE), ks = std::min(STEP, k_end - k);
  if (from.across == 1) {  // a load is 16 pairs of k of one i
    const __mmask32 mask = ks == STEP ? ~0u : (1u << ks) - 1;
    const bfloat16* at = from.data + i * from.along + k;
    for (int64_t j = 0; j < SIDE; ++j, at += from.along)
      r[j] = j < is ? _mm512_maskz_loadu_epi16(mask, at) : _mm512_setzero_si512();
    if (!LEFT) transpose(r);
  } else {  // two loads are one pair of k of 16 i
    const __mmask16 mask = __mmask16((1u << is) - 1);
    const bfloat16* at = from.data + i + k * from.across;
    for (int64_t j = 0; j < SIDE; ++j, at += 2 * from.across) {
      const __m256i none = _mm256_setzero_si256();
      const __m256i first = 2 * j < ks ? _mm256_maskz_loadu_epi16(mask, at) : none;
      const __m256i second =
          2 * j + 1 < ks ? _mm256_maskz_loadu_epi16(mask, at + from.across) : none;
      r[j] = _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                             _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
    }
    if (LEFT) transpose(r);
  }
  for (int64_t j = 0; j < SIDE; ++j) _mm512_store_si512(to + STEP * j, r[j]);
}

// Full tiles of 32 i and 32 k, where a load is 32 i of one k.
template <bool LEFT>
static inline void pack_pairs(const Operand& from, int64_t i, int64_t k, bfloat16* to) {
  alignas(64) static constexpr uint16_t PAIRS[2][STEP] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const __m512i lower = _mm512_load_si512(PAIRS[0]), upper = _mm512_load_si512(PAIRS[1]);
  const bfloat16* at = from.data + i + k * from.across;
  __m512i low[SIDE], high[SIDE];
  for (int64_t j = 0; j < SIDE; ++j, at += 2 * from.across) {
    const __m512i first = _mm512_loadu_si512(at), second = _mm512_loadu_si512(at + from.across);
    low[j] = _mm512_permutex2var_epi16(first, lower, second);
    high[j] = _mm512_permutex2var_epi16(first, upper, second);
  }
  if (LEFT) transpose(low), transpose(high);
  for (int64_t j = 0; j < SIDE; ++j) {
    _mm512_store_si512(to + STEP * j, low[j]);
    _mm512_store_si512(to + TILE + STEP * j, high[j]);
  }
}

// 32 i and 32 k of an operand, from (i, k) on. It is not inlined, because that takes the compiler
// seconds.
template <bool LEFT>
__attribute__((noinline)) static void pack_step(const Operand& from, int64_t i, int64_t k,
                                                int64_t k_end, bfloat16* to) {
  if constexpr (LEFT && !HAS_AMX) {
    pack_step<false>(from, i, k, k_end, to);
  } else if (from.across != 1 && i + PANEL <= from.length && k + STEP <= k_end) {
    pack_pairs<LEFT>(from, i, k, to);
  } else {
    pack_tile<LEFT>(from, i, k, k_end, to);
    pack_tile<LEFT>(from, i + SIDE, k, k_end, to + TILE);
  }
}

// 32 i of an operand, the p-th ones, over a chunk of k.
template <bool LEFT>
static inline void pack_panel(const Operand& from, int64_t p, int64_t k, int64_t k_end,
                              bfloat16* to) {
  for (; k < k_end; k += STEP, to += 2 * TILE) pack_step<LEFT>(from, p * PANEL, k, k_end, to);
}

// A panel of the left operand, packed or as it lies.
struct LeftPanel {
  const bfloat16* data;
  int64_t step, half, row;  // elements from step to step, tile to tile; bytes from row to row
  bool lies;
  static constexpr int64_t PACKED_ROW = HAS_AMX ? 64 : 4;
  static LeftPanel packed(const bfloat16* data) {
    return {data, 2 * TILE, TILE, PACKED_ROW, false};
  }
  static LeftPanel lying(const Operand& left, int64_t k) {
    return {left.data + k, STEP, SIDE * left.along, left.along * int64_t(sizeof(bfloat16)), true};
  }
};

// Whether tiles may be loaded from full panels of an operand as it lies, in whole steps of k.
static inline bool lies_in_tiles(const Operand& left) {
  return left.across == 1 && left.length % PANEL == 0 && left.along % STEP == 0 &&
         reinterpret_cast<uintptr_t>(left.data) % 64 == 0;
}

}  // namespace products

#if HAS_AMX
#include "amx.h"
#else
#include "dots.h"
#endif
#endif
