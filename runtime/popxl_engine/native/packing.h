// Lines of operands, packed so that vectors take the numbers of one k.
#pragma once
#include <algorithm>

#include "numbers.h"
#if defined(__SSE2__) && !(defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#include "operands.h"
#endif

namespace packing {

constexpr int64_t DEPTH = 384;  // terms that are summed up by themselves, as in few_rows.cpp

// A row of a left operand's, or a column of a right one's, is a line: element (i, k), of line i,
// lies at data[i * along + k * across].
template <class T>
struct Lines {
  const T* data;
  int64_t along, across, count;

  Lines from(int64_t i, int64_t k) const {
    return {data + i * along + k * across, along, across, count - i};
  }
};

static inline void transpose(Vector* r) {
#if defined(__AVX512F__)
  products::transpose(reinterpret_cast<__m512i*>(r));
#elif defined(__AVX2__) && defined(__FMA__)
  Vector t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = AVX2(unpcklps256, _mm256_unpacklo_ps)(r[i], r[i + 1]);
    t[i + 1] = AVX2(unpckhps256, _mm256_unpackhi_ps)(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = AVX2(shufps256, _mm256_shuffle_ps)(t[i], t[i + 2], 0x44);
    u[i + 1] = AVX2(shufps256, _mm256_shuffle_ps)(t[i], t[i + 2], 0xee);
    u[i + 2] = AVX2(shufps256, _mm256_shuffle_ps)(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = AVX2(shufps256, _mm256_shuffle_ps)(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = AVX2(vperm2f128_ps256, _mm256_permute2f128_ps)(u[i], u[i + 4], 0x20);
    r[i + 4] = AVX2(vperm2f128_ps256, _mm256_permute2f128_ps)(u[i], u[i + 4], 0x31);
  }
#elif defined(__SSE2__)
  __m128 a = (__m128)r[0], b = (__m128)r[1], c = (__m128)r[2], d = (__m128)r[3];
  _MM_TRANSPOSE4_PS(a, b, c, d);
  r[0] = (Vector)a, r[1] = (Vector)b, r[2] = (Vector)c, r[3] = (Vector)d;
#else
  for (int64_t i = 0; i < WIDTH; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const float kept = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = kept;
    }
#endif
}

// Packs `width` lines: their numbers of one k side by side. Those that are not there are zeros. It
// is inlined for the sake of callers who know the width.
template <class T>
__attribute__((always_inline)) static inline void pack(const Lines<T>& from, int64_t width,
                                                       int64_t terms, float* to) {
  const int64_t count = std::min(width, from.count);
  if (from.along == 1 && count == width) {
    for (int64_t k = 0; k < terms; ++k, to += width) {
      const T* const at = from.data + k * from.across;
      for (int64_t i = 0; i < width; ++i) to[i] = wide(at[i]);
    }
    return;
  }
  if (from.along == 1) {
    std::fill_n(to, width * terms, 0.0f);
    for (int64_t k = 0; k < terms; ++k) {
      const T* const at = from.data + k * from.across;
      for (int64_t i = 0; i < count; ++i) to[k * width + i] = wide(at[i]);
    }
    return;
  }
  int64_t k = 0;
  if (from.across == 1)
    for (; k + WIDTH <= terms; k += WIDTH)
      for (int64_t i = 0; i < width; i += WIDTH) {
        Vector r[WIDTH];
        for (int64_t j = 0; j < WIDTH; ++j)
          r[j] = i + j < count ? load(from.data + (i + j) * from.along + k) : Vector{};
        transpose(r);
        for (int64_t j = 0; j < WIDTH; ++j) store(r[j], to + (k + j) * width + i);
      }
  for (; k < terms; ++k)
    for (int64_t i = 0; i < width; ++i)
      to[k * width + i] = i < count ? wide(from.data[i * from.along + k * from.across]) : 0.0f;
}

}  // namespace packing
