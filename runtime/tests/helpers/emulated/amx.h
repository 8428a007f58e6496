// AMX's tiles in plain C++, for CPUs that have none: included before the library's units, with __AMX_BF16__ defined.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace emulated {

static thread_local float tiles[8][16][16];
static thread_local unsigned char shapes[64];

static inline float as_float(uint16_t narrow) {
  const uint32_t bits = uint32_t(narrow) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

static inline void load(int tile, const void* from, long stride) {
  for (int i = 0; i < 16; ++i) std::memcpy(tiles[tile][i], (const char*)from + i * stride, 64);
}

static inline void store(int tile, void* to, long stride) {
  for (int i = 0; i < 16; ++i) std::memcpy((char*)to + i * stride, tiles[tile][i], 64);
}

static inline void multiply(int sums, int left, int right) {
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 16; ++j) {
        uint16_t one[2], other[2];
        std::memcpy(one, &tiles[left][i][k], 4);
        std::memcpy(other, &tiles[right][k][j], 4);
        for (int h = 0; h < 2; ++h) tiles[sums][i][j] += as_float(one[h]) * as_float(other[h]);
      }
}

}  // namespace emulated

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_zero(tile) std::memset(emulated::tiles[tile], 0, sizeof(emulated::tiles[tile]))
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) emulated::multiply(sums, left, right)
#define _tile_storeconfig(to) std::memcpy(to, emulated::shapes, sizeof(emulated::shapes))
#define _tile_loadconfig(from) std::memcpy(emulated::shapes, from, sizeof(emulated::shapes))
#define syscall(...) 0L  // asks for tiles, and gets them
#endif
