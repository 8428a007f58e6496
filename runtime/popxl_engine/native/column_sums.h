// Sums of columns.
#pragma once
#include <algorithm>

#include "lanes.h"
#include "pieces.h"

// The sum of COUNT rows, pair by pair.
template <int COUNT, class N, class T>
static inline N sum_of_rows(const T* x, int64_t columns) {
  if constexpr (COUNT == 1)
    return load_as<N>(x);
  else
    return sum_of_rows<COUNT / 2, N>(x, columns) +
           sum_of_rows<COUNT / 2, N>(x + COUNT / 2 * columns, columns);
}

// Adds the first `count` columns of COUNT rows, and fetches those of the next rows.
template <int COUNT, class T>
static void add_rows(const T* x, int64_t columns, float* sums, int64_t count) {
  in_lanes(count, [=](auto n, int64_t i) {
    using N = decltype(n);
    for (int r = 0; r < COUNT; ++r) prefetch<N>(x + i + (COUNT + r) * columns);
    store(load_as<N>(sums + i) + sum_of_rows<COUNT, N>(x + i, columns), sums + i);
  });
}

// total = old * total + weight * the sum over rows. Sums of eight rows are added up over 32 rows,
// and these then: one sum over many rows in float32 would lose digits.
template <class T>
static void column_sums(const T* x, float* total, float old, float weight, int64_t rows,
                        int64_t columns, int threads) {
  constexpr int64_t FEW = 8, SOME = 32, MOST = 512;
  const int64_t width =
      std::min(MOST, ((columns + threads - 1) / threads + LANES - 1) / LANES * LANES);
  in_pieces(columns, width, rows * columns < PIECE ? 1 : threads, [=](int64_t first, int64_t end) {
    float sums[MOST] = {}, part[MOST];
    const int64_t count = end - first;
    for (int64_t start = 0; start < rows; start += SOME) {
      const int64_t stop = std::min(rows, start + SOME);
      std::fill_n(part, count, 0.0f);
      int64_t r = start;
      for (; r + FEW <= stop; r += FEW)
        add_rows<FEW>(x + r * columns + first, columns, part, count);
      for (; r < stop; ++r) add_rows<1>(x + r * columns + first, columns, part, count);
      add_rows<1>(part, 0, sums, count);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float value = weight * sums[i];
      total[first + i] =
          old == 0.0f ? value : old * total[first + i] + value;  // what was there may be anything
    }
  });
}
