// The generator's draws, in words of two.
#pragma once
#include "numbers.h"
#include "pieces.h"

// Words for `count` counters from `first` on.
static void draw(uint64_t* words, uint64_t key, uint64_t first, int64_t count, int threads) {
  in_pieces(count, PIECE, threads, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) words[i] = squares64(first + uint64_t(i), key);
  });
}
