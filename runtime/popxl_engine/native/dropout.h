// Dropout of a row. Which elements stay depends on the generator's key and their indices alone.
#pragma once
#include <algorithm>

#include "numbers.h"

// x * scale where the draws of elements `index` and following, read as int32, are at least the
// threshold; else zero. The index is even. It is not inlined, because then compilers do not find
// the vector instructions.
template <class T>
__attribute__((noinline)) static void drop(const T* x, T* y, uint64_t key, uint64_t index,
                                           int32_t threshold, float scale, int64_t count) {
  constexpr int64_t WORDS = 64;
  uint64_t words[WORDS];
  int32_t draws[2 * WORDS];
  float row[2 * WORDS];
  for (int64_t start = 0; start < count; start += 2 * WORDS) {
    const uint64_t first = (index + uint64_t(start)) / 2;
    const int64_t length = std::min(count - start, 2 * WORDS), drawn = (length + 1) / 2;
#pragma omp simd
    for (int64_t i = 0; i < drawn; ++i) words[i] = squares64(first + uint64_t(i), key);
    std::memcpy(draws, words, std::size_t(drawn) * sizeof(words[0]));  // the lower word first
    const T* from = x + start;
#pragma omp simd
    for (int64_t i = 0; i < length; ++i)
      row[i] = draws[i] >= threshold ? wide(from[i]) * scale : 0.0f;
    narrow(row, y + start, length);
  }
}
