// What products of matrices work on, whatever multiplies them.
#pragma once
#include <cstddef>
#include <cstdlib>

#include "numbers.h"
#include "pieces.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace products {

using std::int64_t;

constexpr int64_t PANEL = 32;  // rows or columns of operands that are multiplied together

// Memory that a thread keeps from call to call.
struct Workspace {
  void* data = nullptr;
  std::size_t size = 0;
  ~Workspace() { std::free(data); }
  template <class T = bfloat16>
  T* take(int64_t count) {
    const std::size_t need = (std::size_t(count) * sizeof(T) + 4095) / 4096 * 4096;
    if (need > size) {
      std::free(data);
      data = std::aligned_alloc(4096, need);
      if (data == nullptr) std::abort();
      size = need;
    }
    return static_cast<T*>(data);
  }
};

// One side of a product. Element (i, k), i a row of the left operand or a column of the right one,
// lies at data[i * along + k * across]; one of the strides is 1.
template <class T>
struct Matrix {
  const T* data;
  int64_t along, across, length;  // length: how many i
};

using Operand = Matrix<bfloat16>;

#if defined(__AVX512F__)
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
#endif

}  // namespace products
