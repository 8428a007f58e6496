// What a CPU can do at most: multiply operands that are in its registers, or come from the second
// cache, and read memory. Of operands that are all one, the sums count what was multiplied.
#include <time.h>

#include "lanes.h"
#include "products.h"
#ifdef HAS_TILES
#if HAS_AMX
#include "amx.h"
#else
#include "dots.h"
#endif
#endif

namespace ceilings {

constexpr int64_t HEIGHT = WIDTH == 16 ? 12 : 6;  // rows of a block of sums, two vectors wide
constexpr int64_t KEPT = 32;  // steps whose left operands are in the first cache

// Compilers do not know what it holds: they compute nothing beforehand, or once for several rows.
volatile float zero = 0.0f;

// A panel of right operands, `count` numbers, meets rows of ones in every round. Without loads both
// operands stay in registers.
template <bool LOADS>
static double multiply(const float* right, int64_t count, int64_t rounds) {
  Lanes sums[HEIGHT], column = load_as<Lanes>(right);
  for (Lanes& row : sums) row = Lanes{every(zero), every(zero)};
  float left[KEPT * HEIGHT];
  for (float& number : left) number = 1.0f + zero;
  const Vector one = every(1.0f + zero);
  for (int64_t round = 0; round < rounds; ++round)
    for (int64_t at = 0, k = 0; at + LANES <= count; at += LANES, k = (k + 1) % KEPT) {
      if constexpr (LOADS) column = load_as<Lanes>(right + at);
      for (int64_t i = 0; i < HEIGHT; ++i) {
        const Vector row = LOADS ? every(left[k * HEIGHT + i]) : one;
        sums[i] = {fused(row, column.low, sums[i].low), fused(row, column.high, sums[i].high)};
      }
    }
  double total = 0.0;
  for (const Lanes& row : sums) total += sum_of(row);
  return total;
}

#ifdef HAS_TILES
using products::SIDE, products::TILE;
constexpr int64_t PAIR = 2 * TILE;  // numbers of a step: two tiles of the right operand
static const bfloat16 ONE = {0x3f80};

#if HAS_AMX
template <bool LOADS>
static double multiply(const bfloat16* right, int64_t count, int64_t rounds) {
  const products::Tiles tiles;
  alignas(64) bfloat16 left[PAIR];
  for (bfloat16& number : left) number = ONE;
  alignas(64) float sums[4][SIDE * SIDE];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, left, 64);
  _tile_loadd(5, left + TILE, 64);
  _tile_loadd(6, right, 64);
  _tile_loadd(7, right + TILE, 64);
  for (int64_t round = 0; round < rounds; ++round)
    for (int64_t at = 0; at + PAIR <= count; at += PAIR) {
      if constexpr (LOADS) {
        products::multiply_step<true>(left, TILE, 64, right + at, 0, [](int64_t) {});
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  double total = 0.0;
  for (const auto& tile : sums)
    for (const float sum : tile) total += sum;
  return total;
}
#else
template <bool LOADS>
static double multiply(const bfloat16* right, int64_t count, int64_t rounds) {
  constexpr int64_t COLUMNS = 32;  // numbers of a vector: pairs of k of 16 columns
  __m512 sums[HEIGHT][2];
  for (auto& row : sums) row[0] = row[1] = _mm512_set1_ps(zero);
  int32_t left[KEPT * HEIGHT];
  for (int32_t& pair : left) pair = 0x3f803f80 + int32_t(zero);
  const __m512i one = _mm512_set1_epi32(left[0]);
  __m512i columns[2] = {_mm512_loadu_si512(right), _mm512_loadu_si512(right + COLUMNS)};
  for (int64_t round = 0; round < rounds; ++round)
    for (int64_t at = 0, k = 0; at + 2 * COLUMNS <= count; at += 2 * COLUMNS, k = (k + 1) % KEPT) {
      if constexpr (LOADS)
        for (int64_t j = 0; j < 2; ++j) columns[j] = _mm512_loadu_si512(right + at + COLUMNS * j);
      for (int64_t i = 0; i < HEIGHT; ++i) {
        const __m512i row = LOADS ? _mm512_set1_epi32(left[k * HEIGHT + i]) : one;
        for (int64_t j = 0; j < 2; ++j)
          sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)row, (__m512bh)columns[j]);
      }
    }
  double total = 0.0;
  for (const auto& row : sums) total += sum_of(Lanes{row[0], row[1]});
  return total;
}
#endif
#endif

// Seconds that this thread has run, not waited for a core.
static double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// Each thread multiplies a panel of its own. Found are the sum of all products, and how often the
// threads could do this in a second, added up.
template <class T>
static void multiply_all(const T* right, int64_t count, int64_t rounds, bool loads, double* found,
                         int threads) {
  double total = 0.0, often = 0.0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : total, often)
  for (int thread = 0; thread < threads; ++thread) {
    const T* own = right + thread * count;
    const double begin = now();
    total += loads ? multiply<true>(own, count, rounds) : multiply<false>(own, count, rounds);
    often += 1.0 / (now() - begin);
  }
  found[0] = total, found[1] = often;
}

constexpr int64_t AT_ONCE = 4 * LANES;  // numbers, whose sums wait for no others

static double read(const float* from, int64_t first, int64_t end) {
  Lanes sums[4] = {};
  for (int64_t i = first; i + AT_ONCE <= end; i += AT_ONCE)
    for (int64_t j = 0; j < 4; ++j) sums[j] = sums[j] + load_as<Lanes>(from + i + j * LANES);
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace ceilings

extern "C" {
#ifndef BFLOAT16_LIBRARY
// Products of a panel of `count` numbers for each thread and a block of ones: `multiply_all`.
void multiply_ceiling_f32(const float* right, int64_t count, int64_t rounds, int64_t loads,
                          double* found, int threads) {
  ceilings::multiply_all(right, count, rounds, loads != 0, found, threads);
}

// The sum of numbers, of whole pieces for each thread.
void read_ceiling(const float* from, int64_t count, double* sum, int threads) {
  double total = 0.0;
  const int64_t own = count / threads / ceilings::AT_ONCE * ceilings::AT_ONCE;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : total)
  for (int thread = 0; thread < threads; ++thread)
    total += ceilings::read(from, thread * own, (thread + 1) * own);
  *sum = total;
}

#elif defined(HAS_TILES)
void multiply_ceiling_bf16(const bfloat16* right, int64_t count, int64_t rounds, int64_t loads,
                           double* found, int threads) {
  ceilings::multiply_all(right, count, rounds, loads != 0, found, threads);
}
#endif
}
