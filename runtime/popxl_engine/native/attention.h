// Softmax attention of bfloat16 queries, keys and values, and its gradient: one head at a time, 32 queries at a time,
// with products by tiles. Scores stay in float32 in the cache; only probabilities are written. Where a mask hides all
// keys from some key on, or where probabilities are zero from there on, nothing is computed.
#pragma once
#include <vector>

#include "products.h"
#ifdef HAS_TILES

namespace attention {

using namespace products;

// [batch, heads, rows, columns] with a stride of 1 for columns.
struct View {
  bfloat16* data;
  int64_t batch, head, row;
  bfloat16* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct Sizes {
  int64_t batch, heads, queries, keys, width;  // width: of a head
  int64_t query_panels() const { return parts(queries, PANEL); }
  int64_t key_panels() const { return parts(keys, PANEL); }
  int64_t width_panels() const { return parts(width, PANEL); }
};

// Elements are dropped where their draws, read as int32, are below the threshold, and scaled elsewhere. The keys of
// the generator are for equal parts of the batch.
struct Dropout {
  const uint64_t* keys;
  int64_t parts, threshold;
  float scale;
};

constexpr int64_t PAIR = 2 * TILE;  // a panel's step of 32 k

// Packed panels of the right operand, for all columns: element (column, k).
static void pack_right(const Operand& from, int64_t k_count, bfloat16* to) {
  const int64_t steps = parts(k_count, STEP);
  for (int64_t p = 0; p < parts(from.length, PANEL); ++p) pack_panel<false>(from, p, 0, k_count, to + p * steps * PAIR);
}

// Lanes of the 16 from j on that are below an end.
static inline __mmask16 lanes(int64_t j, int64_t end) {
  return end - j >= SIDE ? __mmask16(~0u) : __mmask16((1u << std::max<int64_t>(0, end - j)) - 1);
}

static inline void store(__m512 x, bfloat16* to, __mmask16 mask) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

static inline __m512 load(const bfloat16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

// rows x columns of sums into a result.
static void store(const float* sums, bfloat16* to, int64_t stride, int64_t rows, int64_t columns) {
  const __mmask16 first = lanes(0, columns), second = lanes(SIDE, columns);
  for (int64_t i = 0; i < rows; ++i, sums += PANEL, to += stride) {
    store(_mm512_load_ps(sums), to, first);
    store(_mm512_load_ps(sums + SIDE), to + SIDE, second);
  }
}

// A packed left panel times packed right panels of `stride` elements: into rows of a result of some width.
static void multiply_store(const bfloat16* left, const bfloat16* right, int64_t stride, int64_t steps, bfloat16* to,
                           int64_t row, int64_t rows, int64_t width, float* sums) {
  for (int64_t d = 0; d < width; d += PANEL, right += stride) {
    multiply(left, right, steps, sums);
    store(sums, to + d, row, rows, std::min(PANEL, width - d));
  }
}

// Whether any of `count` numbers is not zero.
static bool any(const bfloat16* x, int64_t count) {
  uint16_t bits = 0;
#pragma omp simd reduction(| : bits)
  for (int64_t j = 0; j < count; ++j) bits |= x[j].bits;
  return (bits & 0x7fffu) != 0;
}

// Key panels up to the last one in which a row has a probability.
static int64_t panels_with_any(const bfloat16* shares, int64_t rows, int64_t keys) {
  for (int64_t p = parts(keys, PANEL); p > 0; --p)
    for (int64_t i = 0; i < rows; ++i)
      if (any(shares + i * keys + (p - 1) * PANEL, std::min(PANEL, keys - (p - 1) * PANEL))) return p;
  return 0;
}

// For each 32 queries, key panels up to the last one that a mask lets any of them see.
static std::vector<int64_t> panels_seen(const bfloat16* mask, int64_t queries, int64_t keys) {
  std::vector<int64_t> result;
  for (int64_t q = 0; q < queries; q += PANEL) {
    int64_t seen = 0;
    for (int64_t i = q; i < std::min(queries, q + PANEL); ++i)
      for (int64_t j = keys; j > seen; --j)
        if (wide(mask[i * keys + j - 1]) != -INFINITY) seen = j;
    result.push_back(parts(seen, PANEL));
  }
  return result;
}

// exp(x) for x that are not positive, to 3e-6 of it; below -150 it is zero. 2**f by its series, f in [-1/2, 1/2].
static inline __m512 small_exponential(__m512 x) {
  const __m512 t = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-150.0f), x), _mm512_set1_ps(1.44269504f));
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(t, n);
  __m512 p = _mm512_set1_ps(1.33335581e-3f);
  for (const float c : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

// exp(x - largest) / sum for the first `needed` of a row, zeros for the rest; NaN where all are minus infinity. x has
// room up to the next 16.
static void softmax(float* x, int64_t needed, bfloat16* to, int64_t keys) {
  __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < needed; j += SIDE)
    most = _mm512_max_ps(most, _mm512_mask_loadu_ps(most, lanes(j, needed), x + j));
  const float largest = _mm512_reduce_max_ps(most);
  for (int64_t j = 0; j < needed; j += SIDE) {
    const __m512 e = small_exponential(_mm512_sub_ps(_mm512_loadu_ps(x + j), _mm512_set1_ps(largest)));
    sum = _mm512_mask_add_ps(sum, lanes(j, needed), sum, e);
    _mm512_storeu_ps(x + j, e);
  }
  if (largest == -INFINITY) needed = 0;
  const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
  for (int64_t j = 0; j < needed; j += SIDE)
    store(_mm512_mul_ps(_mm512_loadu_ps(x + j), share), to + j, lanes(j, needed));
  std::fill(to + needed, to + keys, bfloat16{uint16_t(largest == -INFINITY ? 0x7fc0 : 0)});
}

// The first `needed` of a row after dropout, elements of [batch, heads, queries, keys].
template <class T>
static void drop(const T* from, T* to, int64_t needed, const Sizes& n, int64_t head, int64_t query,
                 const Dropout& dropout) {
  constexpr int64_t WORDS = 64;
  uint64_t words[WORDS];
  int32_t draws[2 * WORDS];
  const int64_t heads = n.batch / dropout.parts * n.heads;  // of one key
  const int32_t least = int32_t(dropout.threshold);
  const float scale = dropout.scale;
  const uint64_t key = dropout.keys[head / heads], index = uint64_t((head % heads * n.queries + query) * n.keys);
  for (int64_t start = 0; start < needed; start += 2 * WORDS) {
    const int64_t count = std::min(needed - start, 2 * WORDS);
    const uint64_t first = (index + uint64_t(start)) / 2;  // keys are an even number
#pragma omp simd
    for (int64_t i = 0; i < WORDS; ++i) words[i] = squares64(first + uint64_t(i), key);
    std::memcpy(draws, words, sizeof(draws));  // the lower word first
#pragma omp simd
    for (int64_t i = 0; i < count; ++i)
      narrow(draws[i] >= least ? wide(from[start + i]) * scale : 0.0f, to[start + i]);
  }
}

// probabilities = softmax(query @ key.T * scale + mask), [..., queries, keys] in order; dropped: the same after dropout
// (may be null); y = dropped @ value.
static void forward(const View& query, const View& key, const View& value, const bfloat16* mask, float scale,
                    bfloat16* probabilities, bfloat16* dropped, const View& y, const Sizes& n, const Dropout& dropout,
                    int threads) {
  const int64_t steps = parts(n.width, STEP), key_steps = n.key_panels(), keys = n.keys, row = key_steps * PANEL;
  const std::vector<int64_t> seen = panels_seen(mask, n.queries, keys);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Room room;
    const int64_t of_keys = key_steps * steps * PAIR, of_values = n.width_panels() * key_steps * PAIR;
    bfloat16* const packed_keys = room.take(of_keys + of_values + steps * PAIR + key_steps * PAIR + 2 * PANEL * row);
    bfloat16 *const packed_values = packed_keys + of_keys, *const panel = packed_values + of_values;
    bfloat16* const shares = panel + steps * PAIR;
    float* const scores = reinterpret_cast<float*>(shares + key_steps * PAIR);
    alignas(64) float sums[PANEL * PANEL];
    const Tiles tiles;
#pragma omp for schedule(static)
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      const int64_t b = head / n.heads, h = head % n.heads;
      pack_right({key.at(b, h), key.row, 1, keys}, n.width, packed_keys);
      pack_right({value.at(b, h), 1, value.row, n.width}, keys, packed_values);
      for (int64_t q = 0; q < n.queries; q += PANEL) {
        const int64_t rows = std::min(PANEL, n.queries - q);
        const int64_t panels = seen[q / PANEL];
        const int64_t needed = std::min(keys, panels * PANEL);
        pack_panel<true>({query.at(b, h) + q * query.row, query.row, 1, rows}, 0, 0, n.width, panel);
        for (int64_t p = 0; p < panels; ++p) {
          multiply(panel, packed_keys + p * steps * PAIR, steps, sums);
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < PANEL; j += SIDE) {
              const int64_t k = p * PANEL + j;
              const __m512 added = load(mask + (q + i) * keys + k, lanes(k, keys));
              const __m512 x = _mm512_fmadd_ps(_mm512_load_ps(sums + i * PANEL + j), _mm512_set1_ps(scale), added);
              _mm512_storeu_ps(scores + i * row + k, x);
            }
        }
        bfloat16* const at = probabilities + (head * n.queries + q) * keys;
        for (int64_t i = 0; i < rows; ++i) softmax(scores + i * row, needed, at + i * keys, keys);
        const bfloat16* used = at;
        if (dropped != nullptr) {
          bfloat16* const to = dropped + (head * n.queries + q) * keys;
          for (int64_t i = 0; i < rows; ++i) {
            drop(at + i * keys, to + i * keys, needed, n, head, q + i, dropout);
            std::copy(at + i * keys + needed, at + (i + 1) * keys, to + i * keys + needed);  // zeros, or NaN
          }
          used = to;
        }
        pack_panel<true>({used, keys, 1, rows}, 0, 0, needed, shares);
        multiply_store(shares, packed_values, key_steps * PAIR, panels, y.at(b, h) + q * y.row, y.row, rows, n.width,
                       sums);
      }
    }
  }
}

// Gradients for query, key and value from dy. factors: what was multiplied with the values, the probabilities or what
// dropout left of them; without dropout it has no parts.
static void backward(const View& dy, const View& query, const View& key, const View& value,
                     const bfloat16* probabilities, const bfloat16* factors, float scale, const View& d_query,
                     const View& d_key, const View& d_value, const Sizes& n, const Dropout& dropout, int threads) {
  const int64_t steps = parts(n.width, STEP), keys = n.keys, key_steps = n.key_panels(), row = key_steps * PANEL;
  const int64_t query_steps = n.query_panels();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Room room;
    const int64_t of_values = key_steps * steps * PAIR, of_keys = n.width_panels() * key_steps * PAIR;
    const int64_t of_queries = n.width_panels() * query_steps * PAIR;
    const int64_t of_panel = std::max({steps, key_steps, query_steps}) * PAIR;
    bfloat16* const packed_values =
        room.take(of_values + of_keys + 2 * of_queries + of_panel + n.queries * row + 2 * PANEL * row + query_steps);
    bfloat16 *const packed_keys = packed_values + of_values, *const packed_queries = packed_keys + of_keys;
    bfloat16 *const packed_dy = packed_queries + of_queries, *const panel = packed_dy + of_queries;
    bfloat16* const d_scores = panel + of_panel;
    float* const d_shares = reinterpret_cast<float*>(d_scores + n.queries * row);
    alignas(64) float sums[PANEL * PANEL];
    const Tiles tiles;
#pragma omp for schedule(static)
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      const int64_t b = head / n.heads, h = head % n.heads;
      pack_right({value.at(b, h), value.row, 1, keys}, n.width, packed_values);
      pack_right({key.at(b, h), 1, key.row, n.width}, keys, packed_keys);
      pack_right({query.at(b, h), 1, query.row, n.width}, n.queries, packed_queries);
      pack_right({dy.at(b, h), 1, dy.row, n.width}, n.queries, packed_dy);
      const bfloat16* const shares = probabilities + head * n.queries * keys;
      const bfloat16* const used = factors + head * n.queries * keys;
      for (int64_t q = 0; q < n.queries; q += PANEL) {
        const int64_t rows = std::min(PANEL, n.queries - q);
        const int64_t panels = panels_with_any(shares + q * keys, rows, keys);
        const int64_t needed = std::min(keys, panels * PANEL);
        pack_panel<true>({dy.at(b, h) + q * dy.row, dy.row, 1, rows}, 0, 0, n.width, panel);
        for (int64_t p = 0; p < panels; ++p) {
          multiply(panel, packed_values + p * steps * PAIR, steps, sums);
          for (int64_t i = 0; i < rows; ++i)
            std::copy(sums + i * PANEL, sums + (i + 1) * PANEL, d_shares + i * row + p * PANEL);
        }
        for (int64_t i = 0; i < rows; ++i) {
          const bfloat16* share = shares + (q + i) * keys;
          float* d = d_shares + i * row;
          if (dropout.parts > 0) drop(d, d, needed, n, head, q + i, dropout);
          bfloat16* to = d_scores + (q + i) * row;
          __m512 sum = _mm512_setzero_ps();
          for (int64_t j = 0; j < needed; j += SIDE)
            sum = _mm512_fmadd_ps(load(share + j, lanes(j, needed)), _mm512_loadu_ps(d + j), sum);
          const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum)), factor = _mm512_set1_ps(scale);
          for (int64_t j = 0; j < needed; j += SIDE) {
            const __m512 share_scaled = _mm512_mul_ps(load(share + j, lanes(j, needed)), factor);
            store(_mm512_mul_ps(share_scaled, _mm512_sub_ps(_mm512_loadu_ps(d + j), mean)), to + j, lanes(j, needed));
          }
          std::fill(to + needed, to + row, bfloat16{0});
        }
        pack_panel<true>({d_scores + q * row, row, 1, rows}, 0, 0, needed, panel);
        multiply_store(panel, packed_keys, key_steps * PAIR, panels, d_query.at(b, h) + q * d_query.row, d_query.row,
                       rows, n.width, sums);
      }
      // left.T @ right, for each key; queries before the first with anything in `of` for one of 32 keys add nothing.
      const auto multiply_transposed = [&](const bfloat16* of, const bfloat16* left, int64_t stride,
                                           const bfloat16* right, const View& result) {
        for (int64_t k = 0; k < keys; k += PANEL) {
          const int64_t rows = std::min(PANEL, keys - k);
          int64_t first = 0;
          while (first < n.queries && !any(of + first * keys + k, rows)) ++first;
          first = first / STEP * STEP;
          pack_panel<true>({left + k, 1, stride, rows}, 0, first, n.queries, panel);
          multiply_store(panel, right + first / STEP * PAIR, query_steps * PAIR, parts(n.queries - first, STEP),
                         result.at(b, h) + k * result.row, result.row, rows, n.width, sums);
        }
      };
      multiply_transposed(shares, d_scores, row, packed_queries, d_key);
      multiply_transposed(used, used, keys, packed_dy, d_value);
    }
  }
}

}  // namespace attention

extern "C" {

#define VIEW(NAME) bfloat16 *NAME, int64_t NAME##_batch, int64_t NAME##_head, int64_t NAME##_row
#define AS_VIEW(NAME) attention::View{NAME, NAME##_batch, NAME##_head, NAME##_row}

void attend(VIEW(query), VIEW(key), VIEW(value), const bfloat16* mask, float scale, bfloat16* probabilities,
               bfloat16* dropped, VIEW(y), int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width,
               const uint64_t* seeds, int64_t parts, int64_t threshold, float drop_scale, int threads) {
  attention::forward(AS_VIEW(query), AS_VIEW(key), AS_VIEW(value), mask, scale, probabilities, dropped, AS_VIEW(y),
                     {batch, heads, queries, keys, width}, {seeds, parts, threshold, drop_scale}, threads);
}

void attend_grad(VIEW(dy), VIEW(query), VIEW(key), VIEW(value), const bfloat16* probabilities,
                 const bfloat16* factors, float scale, VIEW(d_query), VIEW(d_key), VIEW(d_value), int64_t batch,
                 int64_t heads, int64_t queries, int64_t keys, int64_t width, const uint64_t* seeds, int64_t parts,
                 int64_t threshold, float drop_scale, int threads) {
  attention::backward(AS_VIEW(dy), AS_VIEW(query), AS_VIEW(key), AS_VIEW(value), probabilities, factors, scale,
                      AS_VIEW(d_query), AS_VIEW(d_key), AS_VIEW(d_value), {batch, heads, queries, keys, width},
                      {seeds, parts, threshold, drop_scale}, threads);
}
}
#endif
