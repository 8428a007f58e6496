// Whole products of bfloat16 matrices by tiles. An element's sum is taken in one order, whatever
// the threads.
//
// What limits them is not the tiles but what feeds them. Loads of tiles that pass the first cache
// by (`stream`) leave the left panel's there, which the next product needs again; blocks of packed
// panels stay in the second cache; rows of the left operand that are aligned are not packed at all,
// but asked for one panel ahead; lines of the result are asked for one product ahead; and large
// results, which no cache keeps until they are read, are written past the caches in whole lines.
#include "products.h"
#ifdef HAS_TILES
#include <unistd.h>

#include <numeric>

namespace products {

constexpr int64_t CHUNK = 1024;  // k that are multiplied at a time
constexpr int64_t GROUP =
    4;  // panels of columns that a panel of rows meets before the next one does
constexpr int64_t WIDEST = 32;     // panels of a block, at most
constexpr int64_t HELD = 1 << 23;  // bytes of sums that wait for the next chunk
constexpr int64_t LARGE =
    1 << 24;  // bytes of a result from which no cache keeps it until it is read

// Bytes of the packed panels that stay in a thread's second cache.
static int64_t block_bytes() {
  int64_t cache = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
  cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  return (cache > 0 ? cache : 1 << 20) / 7 * 4;
}

// Where a product of two panels goes: rows from `row` on and columns from `column` on, of those
// from `first` to `end` that the same panel of rows meets one after the other; and which of the
// chunks of k it is of.
struct Panels {
  int64_t row, column, first, end;
  bool is_first, is_last;
  bool ends_row() const { return is_last && column + PANEL == end; }
};

// Multiplies, and gives each product of two panels, over each chunk of k in the order of k, to the
// result: result.lines(panels) says where its 32 lines go, then come result.fetch(lines, i), and
// result.put(lines, i, sums) with float32 [32], for every line that is there; after the last panel
// of columns of a row, and the last chunk, result.finish(panels). Lines are put beside the next
// product's tiles. The sums depend on the operands alone.
template <class Result>
static void product(const Operand& left, const Operand& right, int64_t k_count, int threads,
                    const Result& result) {
  static thread_local Workspace shared;
  const int64_t size = ceil_div(ceil_div(k_count, ceil_div(k_count, CHUNK)), STEP) * STEP,
                panel = PANEL * size;
  const int64_t rows = ceil_div(left.length, PANEL), columns = ceil_div(right.length, PANEL);
  const bool lies = lies_in_tiles(left), left_is_stationary = lies || rows <= columns;
  // One side is stationary: as it lies, or packed for all threads. The other one is streamed in
  // blocks, which each thread packs.
  const int64_t stationary = left_is_stationary ? rows : columns;
  const int64_t streamed = left_is_stationary ? columns : rows;
  static const int64_t bytes = block_bytes();
  const int64_t most = std::clamp<int64_t>(bytes / (panel * int64_t(sizeof(bfloat16))), 1, WIDEST);
  // A thread takes the next block when it is there, as the system may hold one of them up. Smaller
  // blocks cost more.
  const int64_t block = ceil_div(streamed, ceil_div(ceil_div(streamed, most), threads) * threads);
  bfloat16* const held = lies && k_count % STEP == 0 ? nullptr : shared.take(stationary * panel);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local Workspace own;
    bfloat16* const passing = own.take(block * panel);
    alignas(64) float sums[2][PANEL * PANEL];
    const Tiles tiles;
    for (int64_t k = 0; k < k_count; k += size) {
      const int64_t k_end = std::min(k_count, k + size), steps = ceil_div(k_end - k, STEP);
      const bool as_it_lies = lies && (k_end - k) % STEP == 0;  // else the last chunk
      const LeftPanel start = as_it_lies ? LeftPanel::lying(left, k)
                                         : LeftPanel::packed(left_is_stationary ? held : passing);
      const int64_t apart =
          as_it_lies ? PANEL * left.along : panel;  // elements from panel to panel
      // The n-th step of packing some panels, in the order in which their operand lies in memory.
      const auto pack = [&](bool is_left, int64_t first, int64_t count, bfloat16* to, int64_t n) {
        const Operand& from = is_left ? left : right;
        const int64_t p = from.across == 1 ? n / steps : n % count,
                      s = from.across == 1 ? n % steps : n / count;
        to += p * panel + s * 2 * TILE;
        if (is_left)
          pack_step<true>(from, (first + p) * PANEL, k + s * STEP, k_end, to);
        else
          pack_step<false>(from, (first + p) * PANEL, k + s * STEP, k_end, to);
      };
      if (!as_it_lies) {
#pragma omp for schedule(static)
        for (int64_t n = 0; n < stationary * steps; ++n)
          pack(left_is_stationary, 0, stationary, held, n);
      }
#pragma omp for schedule(dynamic)
      for (int64_t first = 0; first < streamed; first += block) {
        const int64_t end = std::min(streamed, first + block);
        for (int64_t n = 0; n < (end - first) * steps; ++n)
          pack(!left_is_stationary, first, end - first, passing, n);
        Panels panels{};
        typename Result::Lines lines{};  // none
        int turn = 0;
        const auto finish = [&] {
          if (panels.ends_row()) result.finish(panels);
        };
        // Panels of columns [c, c_end) meet panels of rows [r, r_end).
        const int64_t some = ceil_div(PANEL, steps);
        const auto meet = [&](int64_t r, int64_t r_end, int64_t c, int64_t c_end) {
          for (int64_t i = r; i < r_end; ++i)
            for (int64_t j = c; j < c_end; ++j) {
              LeftPanel one = start;
              one.data += (left_is_stationary ? i : i - first) * apart;
              const bfloat16* other =
                  left_is_stationary ? passing + (j - first) * panel : held + j * panel;
              const Panels here = {i * PANEL,     j * PANEL, c * PANEL,
                                   c_end * PANEL, k == 0,    k_end == k_count};
              const typename Result::Lines next = result.lines(here);
              // Rows of the panel after this one, a few of them with each panel of columns.
              const bfloat16* const ahead =
                  as_it_lies && i + 1 < r_end ? one.data + apart : nullptr;
              const int64_t met = (j - c) * PANEL / (c_end - c),
                            meets = (j - c + 1) * PANEL / (c_end - c);
              multiply(one, other, steps, sums[turn], PANEL, [&](int64_t s) {
                for (int64_t n = met; n < meets && ahead != nullptr; ++n)
                  _mm_prefetch(reinterpret_cast<const char*>(ahead + n * left.along + s * STEP),
                               _MM_HINT_T1);
                for (int64_t n = s * some; n < (s + 1) * some; ++n) {
                  if (n < next.count) result.fetch(next, n);
                  if (n < lines.count) result.put(lines, n, sums[turn ^ 1] + n * PANEL);
                }
              });
              finish();
              panels = here, lines = next, turn ^= 1;
            }
        };
        if (left_is_stationary)
          meet(0, rows, first, end);
        else
          for (int64_t c = 0; c < columns; c += GROUP)
            meet(first, end, c, std::min(columns, c + GROUP));
        for (int64_t n = 0; n < lines.count; ++n) result.put(lines, n, sums[turn ^ 1] + n * PANEL);
        finish();
      }
    }
    _mm_sfence();
  }
}

// Loads and stores of lanes; where all are there without a mask, for which AMD's CPUs wait.
static inline __m512 load_some(const float* from, __mmask16 mask) {
  return mask == __mmask16(-1) ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(mask, from);
}

static inline void store_some(float* to, __mmask16 mask, __m512 x) {
  if (mask == __mmask16(-1))
    _mm512_storeu_ps(to, x);
  else
    _mm512_mask_storeu_ps(to, mask, x);
}

static inline void store_some(bfloat16* to, __mmask32 mask, __m512i x) {
  if (mask == __mmask32(-1))
    _mm512_storeu_si512(to, x);
  else
    _mm512_mask_storeu_epi16(to, mask, x);
}

static inline __mmask16 lanes(int64_t count) {
  return __mmask16((1u << std::clamp<int64_t>(count, 0, SIDE)) - 1);
}

// total = old * total + weight * left @ right: float32; and the squares of what is in total then.
struct Accumulated {
  float* total;
  int64_t stride, rows, columns;
  float old, weight;
  bool passes_caches;
  double*
      squares;  // sums over panels, those of the same rows side by side; null: nobody asks for them
  struct Lines {
    float* to;
    int64_t count;
    __mmask16 masks[2];
    bool adds;
    __m512 kept;
    double* panel;  // where the sum of squares goes; null: nobody asks, or chunks follow
    __m512 squares;
  };
  Lines lines(const Panels& at) const {
    const bool is_squared = squares != nullptr && at.is_last;
    return {total + at.row * stride + at.column,
            std::min(PANEL, rows - at.row),
            {lanes(columns - at.column), lanes(columns - at.column - SIDE)},
            !at.is_first || old != 0.0f,  // what was there may be anything
            _mm512_set1_ps(at.is_first ? old : 1.0f),
            is_squared ? squares + at.row / PANEL * ceil_div(columns, PANEL) + at.column / PANEL
                       : nullptr,
            _mm512_setzero_ps()};
  }
  void fetch(const Lines& lines, int64_t i) const {
    if (passes_caches) return;
    const char* at = reinterpret_cast<const char*>(lines.to + i * stride);
    _mm_prefetch(at, _MM_HINT_ET0);
    _mm_prefetch(at + 64, _MM_HINT_ET0);
  }
  void put(Lines& lines, int64_t i, const float* sums) const {
    float* to = lines.to + i * stride;
    for (int64_t h = 0; h < 2; ++h, to += SIDE, sums += SIDE) {
      __m512 x = _mm512_mul_ps(_mm512_set1_ps(weight), _mm512_load_ps(sums));
      if (passes_caches) {
        _mm512_stream_ps(to, x);
      } else {
        if (lines.adds)
          x = _mm512_add_ps(_mm512_mul_ps(lines.kept, load_some(to, lines.masks[h])), x);
        store_some(to, lines.masks[h], x);
      }
      if (lines.panel != nullptr)
        lines.squares = _mm512_mask3_fmadd_ps(x, x, lines.squares, lines.masks[h]);
    }
    if (lines.panel != nullptr && i == lines.count - 1) *lines.panel = sum(lines.squares);
  }
  static double sum(__m512 x) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    return _mm512_reduce_add_pd(
        _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(high)));
  }
  void finish(const Panels&) const {}
};

// y = left @ right + bias (may be null), rounded once.
struct Rounded {
  bfloat16* y;
  int64_t stride, rows, columns;
  const bfloat16* bias;
  bool passes_caches;
  float* held;  // sums of the chunks so far, a panel by a panel after the other; null: there is one
                // chunk
  struct Lines {
    bfloat16* to;
    int64_t next, count;  // elements from line to line, lines
    float* before;        // what the chunks so far have come to
    bool is_first, is_last;
    __mmask32 mask;
    __m512 low_bias, high_bias;
  };
  Lines lines(const Panels& at) const {
    const __mmask32 mask = lanes(columns - at.column) | __mmask32(lanes(columns - at.column - SIDE))
                                                            << SIDE;
    const __m512i added =
        bias == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, bias + at.column);
    const auto as_floats = [](__m256i x) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    };
    return {
        passes_caches ? stage() + at.column - at.first : y + at.row * stride + at.column,
        passes_caches ? WIDEST * PANEL : stride,
        std::min(PANEL, rows - at.row),
        held == nullptr ? nullptr : held + (at.row * ceil_div(columns, PANEL) + at.column) * PANEL,
        at.is_first,
        at.is_last,
        mask,
        as_floats(_mm512_castsi512_si256(added)),
        as_floats(_mm512_extracti64x4_epi64(added, 1))};
  }
  void fetch(const Lines& lines, int64_t i) const {
    if (held != nullptr) {
      const char* at = reinterpret_cast<const char*>(lines.before + i * PANEL);
      _mm_prefetch(at, _MM_HINT_ET0);
      _mm_prefetch(at + 64, _MM_HINT_ET0);
    } else if (!passes_caches) {
      _mm_prefetch(reinterpret_cast<const char*>(lines.to + i * stride), _MM_HINT_ET0);
    }
  }
  void put(const Lines& lines, int64_t i, const float* sums) const {
    __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + SIDE);
    float* before = lines.before + i * PANEL;
    if (!lines.is_first) {
      low = _mm512_add_ps(_mm512_load_ps(before), low);
      high = _mm512_add_ps(_mm512_load_ps(before + SIDE), high);
    }
    if (!lines.is_last) {
      _mm512_store_ps(before, low);
      _mm512_store_ps(before + SIDE, high);
      return;
    }
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_add_ps(high, lines.high_bias),
                                              _mm512_add_ps(low, lines.low_bias));
    store_some(lines.to + i * lines.next, lines.mask, (__m512i)both);
  }
  static bfloat16* stage() {
    static thread_local Workspace workspace;
    return workspace.take(PANEL * WIDEST * PANEL);
  }
  // Writes a row's panels from where put has left them, whole lines past the caches.
  void finish(const Panels& at) const {
    if (!passes_caches) return;
    constexpr int64_t LINE = 32;  // elements
    const int64_t count = std::min(PANEL, rows - at.row),
                  width = std::min(at.end, columns) - at.first;
    for (int64_t i = 0; i < count; ++i) {
      const bfloat16* from = stage() + i * WIDEST * PANEL;
      bfloat16* to = y + (at.row + i) * stride + at.first;
      const auto part = [&](int64_t start, int64_t length) {
        const __mmask32 mask = (__mmask32(1) << length) - 1;
        _mm512_mask_storeu_epi16(to + start, mask, _mm512_maskz_loadu_epi16(mask, from + start));
      };
      int64_t j = std::min<int64_t>(width, -(reinterpret_cast<intptr_t>(to) / 2) & (LINE - 1));
      part(0, j);
      for (; j + LINE <= width; j += LINE)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + j), _mm512_loadu_si512(from + j));
      part(j, width - j);
    }
  }
};

}  // namespace products

extern "C" {

// Asks the system to let this process use tiles. Nonzero where it does not.
int64_t refuses_tiles() { return products::refused(); }

// total = old * total + weight * left @ right. squares, which may be null: one number, the sum of
// total's squares then.
void accumulate_product_bf16(const bfloat16* left, int64_t left_row, int64_t left_k,
                             const bfloat16* right, int64_t right_k, int64_t right_column,
                             float* total, int64_t stride, float old, float weight, int64_t rows,
                             int64_t columns, int64_t k, float* squares, int threads) {
  using namespace products;
  static thread_local Workspace workspace;
  const int64_t panels = squares == nullptr ? 0 : ceil_div(rows, PANEL) * ceil_div(columns, PANEL);
  double* const sums = squares == nullptr ? nullptr : workspace.take<double>(panels);
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(total) % 64 == 0 && stride % SIDE == 0 && columns % PANEL == 0;
  // A gradient whose squares come with it is read when weights are updated: after those of all
  // other layers.
  const bool is_read_late = squares != nullptr || rows * columns * int64_t(sizeof(float)) >= LARGE;
  const bool is_written_once = old == 0.0f && k <= CHUNK;
  product({left, left_row, left_k, rows}, {right, right_column, right_k, columns}, k, threads,
          Accumulated{total, stride, rows, columns, old, weight,
                      is_aligned && is_read_late && is_written_once, sums});
  if (squares != nullptr) *squares = float(std::accumulate(sums, sums + panels, 0.0));
}

// y = left @ right + bias; bias may be null.
void multiply_add_bf16(const bfloat16* left, int64_t left_row, int64_t left_k,
                       const bfloat16* right, int64_t right_k, int64_t right_column,
                       const bfloat16* bias, bfloat16* y, int64_t stride, int64_t rows,
                       int64_t columns, int64_t k, int threads) {
  using namespace products;
  static thread_local Workspace workspace;
  const bool is_large = rows * columns * int64_t(sizeof(bfloat16)) >= LARGE,
             is_wide = columns > rows;
  // Of several chunks' sums, a part of the longer side at a time is held.
  const int64_t longer = std::max(rows, columns),
                most = HELD / int64_t(sizeof(float)) / std::min(rows, columns);
  const int64_t part = k <= CHUNK ? longer : std::max<int64_t>(most / PANEL, 1) * PANEL;
  for (int64_t first = 0; first < longer; first += part) {
    const int64_t row = is_wide ? 0 : first, column = is_wide ? first : 0;
    const int64_t height = is_wide ? rows : std::min(part, rows - row);
    const int64_t width = is_wide ? std::min(part, columns - column) : columns;
    const int64_t panels = ceil_div(height, PANEL) * ceil_div(width, PANEL);
    float* held = k <= CHUNK ? nullptr : workspace.take<float>(panels * PANEL * PANEL);
    const Operand rows_of = {left + row * left_row, left_row, left_k, height};
    const Operand columns_of = {right + column * right_column, right_column, right_k, width};
    const bfloat16* const added = bias == nullptr ? nullptr : bias + column;
    product(rows_of, columns_of, k, threads,
            Rounded{y + row * stride + column, stride, height, width, added, is_large, held});
  }
}
}
#endif
