// Products of bfloat16 matrices with the tiles of AMX, accumulated in float32, for CPUs that have them.
//
// A tile is 16 rows of 64 bytes. Of the left operand it holds 16 rows of 32 consecutive k; of the right one 16 pairs of
// k of 16 columns, the two of a pair side by side. Operands are packed into panels of two tiles a step of 32 k; four
// tiles of sums, 32 rows by 32 columns, meet two tiles of each side. What is missing at the edges is packed as zeros.
#pragma once
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__linux__)
#define HAS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "operands.h"

namespace products {

constexpr int64_t SIDE = 16, STEP = 32, TILE = SIDE * STEP, PANEL = 2 * SIDE;
constexpr int64_t CHUNK = 1024;  // k that are packed at a time
constexpr int64_t BLOCK = 4;     // panels of the longer side that a thread packs at a time; they stay in its cache

// The tiles' shapes, as the CPU reads them.
struct Palette {
  uint8_t number = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Eight full tiles for the calling thread while this lives; then what other libraries had set.
struct Tiles {
  alignas(64) Palette before, ours;
  Tiles() {
    _tile_storeconfig(&before);
    for (int i = 0; i < 8; ++i) ours.bytes[i] = 64, ours.rows[i] = SIDE;
    _tile_loadconfig(&ours);
  }
  ~Tiles() { _tile_loadconfig(&before); }
};

// 16 by 16 numbers of 32 bits.
static inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// 16 i and 32 k of an operand, from (i, k) on, into a tile.
template <bool LEFT>
static inline void pack_tile(const Operand& from, int64_t i, int64_t k, int64_t k_end, bfloat16* to) {
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
      const __m256i second = 2 * j + 1 < ks ? _mm256_maskz_loadu_epi16(mask, at + from.across) : none;
      r[j] = _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
    }
    if (LEFT) transpose(r);
  }
  for (int64_t j = 0; j < SIDE; ++j) _mm512_store_si512(to + STEP * j, r[j]);
}

// 32 i of an operand, the p-th ones, over a chunk of k. It is not inlined, because that takes the compiler seconds.
template <bool LEFT>
__attribute__((noinline)) static void pack_panel(const Operand& from, int64_t p, int64_t k, int64_t k_end,
                                                 bfloat16* to) {
  for (; k < k_end; k += STEP, to += 2 * TILE) {
    pack_tile<LEFT>(from, p * PANEL, k, k_end, to);
    pack_tile<LEFT>(from, p * PANEL + SIDE, k, k_end, to + TILE);
  }
}

// Two panels' product, float32 [32, 32].
__attribute__((noinline)) static void multiply(const bfloat16* left, const bfloat16* right, int64_t steps,
                                               float* sums) {
  constexpr int64_t ROW = PANEL * sizeof(float);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s, left += 2 * TILE, right += 2 * TILE) {
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + TILE, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left + TILE, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, ROW);
  _tile_stored(1, sums + SIDE, ROW);
  _tile_stored(2, sums + SIDE * PANEL, ROW);
  _tile_stored(3, sums + SIDE * PANEL + SIDE, ROW);
}

// Calls use(sums, first row, first column, is_first) with float32 [32, 32] for every panel of rows and columns and
// every chunk of k, in the order of k; is_first: of the first chunk. What a call gets depends on the operands alone.
template <class Use>
void product(const Operand& left, const Operand& right, int64_t k_count, int threads, Use use) {
  thread_local Room shared;
  const int64_t size = parts(parts(k_count, parts(k_count, CHUNK)), STEP) * STEP;
  const int64_t panels_left = parts(left.length, PANEL), panels_right = parts(right.length, PANEL);
  const int64_t panel = PANEL * size;
  const bool left_stays = panels_left <= panels_right;  // the shorter side is packed for all threads
  const int64_t stay = left_stays ? panels_left : panels_right, go = left_stays ? panels_right : panels_left;
  bfloat16* const staying = shared.take(stay * panel);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Room own;
    bfloat16* const going = own.take(BLOCK * panel);
    alignas(64) float sums[PANEL * PANEL];
    const Tiles tiles;
    for (int64_t k = 0; k < k_count; k += size) {
      const int64_t k_end = std::min(k_count, k + size), steps = parts(k_end - k, STEP);
#pragma omp for schedule(static)
      for (int64_t p = 0; p < stay; ++p) {
        if (left_stays) pack_panel<true>(left, p, k, k_end, staying + p * panel);
        else pack_panel<false>(right, p, k, k_end, staying + p * panel);
      }
#pragma omp for schedule(static)
      for (int64_t first = 0; first < go; first += BLOCK) {
        const int64_t end = std::min(go, first + BLOCK);
        for (int64_t q = first; q < end; ++q) {
          if (left_stays) pack_panel<false>(right, q, k, k_end, going + (q - first) * panel);
          else pack_panel<true>(left, q, k, k_end, going + (q - first) * panel);
        }
        for (int64_t p = 0; p < stay; ++p)
          for (int64_t q = first; q < end; ++q) {
            const bfloat16 *one = staying + p * panel, *other = going + (q - first) * panel;
            if (left_stays) multiply(one, other, steps, sums);
            else multiply(other, one, steps, sums);
            use(sums, (left_stays ? p : q) * PANEL, (left_stays ? q : p) * PANEL, k == 0);
          }
      }
    }
  }
}

// total = old * total + share * left @ right: float32 [rows, columns].
static void accumulate_product(float* total, int64_t stride, const Operand& left, const Operand& right, int64_t k_count,
                               float old, float share, int threads) {
  product(left, right, k_count, threads, [=](const float* sums, int64_t row, int64_t column, bool is_first) {
    const int64_t rows = std::min(PANEL, left.length - row), columns = std::min(PANEL, right.length - column);
    const float kept = is_first ? old : 1.0f;
    for (int64_t i = 0; i < rows; ++i, sums += PANEL) {
      float* to = total + (row + i) * stride + column;
      if (kept == 0.0f) {  // what was there may be anything
        for (int64_t j = 0; j < columns; ++j) to[j] = share * sums[j];
      } else {
        for (int64_t j = 0; j < columns; ++j) to[j] = kept * to[j] + share * sums[j];
      }
    }
  });
}

}  // namespace products

extern "C" {

// Asks the system to let this process use tiles. Nonzero where it does not.
int64_t refuses_tiles() {
  constexpr int REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILES);
}

void accumulate_product(const bfloat16* left, int64_t left_row, int64_t left_k, const bfloat16* right, int64_t right_k,
                        int64_t right_column, float* total, int64_t stride, float old, float share, int64_t rows,
                        int64_t columns, int64_t k, int threads) {
  products::accumulate_product(total, stride, {left, left_row, left_k, rows}, {right, right_column, right_k, columns},
                               k, old, share, threads);
}
}
#endif
