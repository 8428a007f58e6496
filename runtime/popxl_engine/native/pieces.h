// Work on memory in pieces, which threads share.
#pragma once
#include <algorithm>
#include <cstdint>

using std::int64_t;

static inline int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

constexpr int64_t PIECE = 1 << 14;  // elements that one thread takes at a time

// Multiply-adds that one thread makes sooner than others wake, and much sooner than others that
// wait for a core which another program has.
constexpr int64_t SMALL = 1 << 18;

// Calls work(first, end) for pieces of 0 .. count.
template <class Work>
static void in_pieces(int64_t count, int64_t piece, int threads, Work work) {
  const int64_t pieces = ceil_div(count, piece);
#pragma omp parallel for schedule(static) num_threads(threads) if (pieces > 1 && threads > 1)
  for (int64_t i = 0; i < pieces; ++i) work(i * piece, std::min(count, (i + 1) * piece));
}

// Rows that make up about a piece.
static inline int64_t rows_per_piece(int64_t columns) {
  return std::max<int64_t>(1, PIECE / std::max<int64_t>(1, columns));
}
