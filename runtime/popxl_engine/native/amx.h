// Tiles multiplied by AMX.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "products.h"

namespace products {

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

// Asks the system to let this process use tiles. Nonzero where it does not.
static inline int64_t refused() {
  constexpr int REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILES);
}

constexpr int64_t KEPT = 16;  // steps of the left panel that stay in the first cache

// 32 rows and columns of 32 k, added to tiles 0 to 3. The left operand's tiles are kept in the
// first cache, or pass it by.
template <bool STAYS, class Beside>
static inline void multiply_step(const bfloat16* left, int64_t half, int64_t row,
                                 const bfloat16* right, int64_t s, const Beside& beside) {
  if constexpr (STAYS)
    _tile_loadd(4, left, row);
  else
    _tile_stream_loadd(4, left, row);
  _tile_stream_loadd(6, right, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_stream_loadd(7, right + TILE, 64);
  _tile_dpbf16ps(1, 4, 7);
  beside(s);
  if constexpr (STAYS)
    _tile_loadd(5, left + half, row);
  else
    _tile_stream_loadd(5, left + half, row);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Two panels' product, float32 [32, 32], into rows of `stride` numbers, or added to them. beside(s)
// is called in every step. The right panel, which is not needed again soon, passes the first cache
// by.
template <bool ADDS = false, class Beside>
static inline void multiply(const LeftPanel& from, const bfloat16* right, int64_t steps,
                            float* sums, int64_t stride, const Beside& beside) {
  const int64_t half = from.half, row = from.row, to_row = stride * int64_t(sizeof(float));
  const bfloat16* left = from.data;
  if constexpr (ADDS) {
    _tile_loadd(0, sums, to_row);
    _tile_loadd(1, sums + SIDE, to_row);
    _tile_loadd(2, sums + SIDE * stride, to_row);
    _tile_loadd(3, sums + SIDE * stride + SIDE, to_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  int64_t s = 0;
  for (const int64_t kept = std::min(KEPT, steps); s < kept;
       ++s, left += from.step, right += 2 * TILE)
    multiply_step<true>(left, half, row, right, s, beside);
  for (; s < steps; ++s, left += from.step, right += 2 * TILE)
    multiply_step<false>(left, half, row, right, s, beside);
  _tile_stored(0, sums, to_row);
  _tile_stored(1, sums + SIDE, to_row);
  _tile_stored(2, sums + SIDE * stride, to_row);
  _tile_stored(3, sums + SIDE * stride + SIDE, to_row);
}

}  // namespace products
