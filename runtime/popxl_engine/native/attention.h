// Softmax attention and its gradient: one head at a time, 32 queries at a time. Scores stay in
// float32 in the cache; only probabilities are written, if somebody reads them. Where a mask hides
// all keys from some key on, or where probabilities are zero from there on, nothing is computed.
// Rows that come next are asked for before.
#pragma once
#include <atomic>
#include <vector>

#include "attention_rows.h"
#include "dropout.h"
#include "products.h"
#include "vectors.h"

namespace attention {

using products::Matrix;
using products::Workspace;

// Ways to multiply panels. A packed panel has PANEL elements for each k, of which there are a
// multiple of 32.
template <class T>
struct ByVectors {
  using Packed = float;
  using Left = vectors::Left;
  struct Scope {};
  static Left left(const Matrix<T>& from, int64_t k, int64_t k_end, Packed* workspace) {
    return vectors::left_panel(from, k, k_end, workspace);
  }
  static void pack_right(const Matrix<T>& from, int64_t p, int64_t k_count, Packed* to) {
    vectors::pack_right(from, p, k_count, to);
  }
  static void multiply(const Left& left, const Packed* right, int64_t k_count, float* sums,
                       int64_t stride) {
    vectors::multiply(left, right, k_count, sums, stride);
  }
};

#ifdef HAS_TILES
struct ByTiles {
  using Packed = bfloat16;
  using Left = products::LeftPanel;
  using Scope = products::Tiles;
  static Left left(const Matrix<bfloat16>& from, int64_t k, int64_t k_end, Packed* workspace) {
    const Matrix<bfloat16> part = {from.data + k * from.across, from.along, from.across,
                                   from.length};
    if (products::lies_in_tiles(part) && (k_end - k) % products::STEP == 0)
      return Left::lying(part, 0);
    products::pack_panel<true>(from, 0, k, k_end, workspace);
    return Left::packed(workspace);
  }
  static void pack_right(const Matrix<bfloat16>& from, int64_t p, int64_t k_count, Packed* to) {
    products::pack_panel<false>(from, p, 0, k_count, to);
  }
  // One body for all that call it.
  __attribute__((noinline)) static void multiply(const Left& left, const Packed* right,
                                                 int64_t k_count, float* sums, int64_t stride) {
    products::multiply(left, right, ceil_div(k_count, products::STEP), sums, stride,
                       [](int64_t) {});
  }
};
#endif

// [batch, heads, rows, columns] with a stride of 1 for columns.
template <class T>
struct View {
  T* data;
  int64_t batch, head, row;
  T* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct Sizes {
  int64_t batch, heads, queries, keys, width;  // width: of a head
  int64_t multiply_adds() const { return 2 * batch * heads * queries * keys * width; }
};

// Elements are dropped where their draws, read as int32, are below the threshold, and scaled
// elsewhere. The keys of the generator are for equal parts of the batch.
struct Dropout {
  const uint64_t* keys;
  int64_t parts, threshold;
  float scale;
};

// Packed panels of the right operand, for all columns: element (column, k).
template <class Way, class T>
static void pack_right(const Matrix<T>& from, int64_t k_count, typename Way::Packed* to) {
  for (int64_t p = 0; p < ceil_div(from.length, PANEL); ++p, to += PANEL * padded(k_count))
    Way::pack_right(from, p, k_count, to);
}

// rows x columns of sums into a result.
template <class T>
static void store(const float* sums, T* to, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, sums += PANEL, to += stride) narrow(sums, to, columns);
}

// Asks for rows, to be WRITTEN soon or read after that.
template <bool WRITTEN, class T>
static inline void prefetch(const T* first, int64_t stride, int64_t rows, int64_t width) {
  constexpr int64_t LINE = 64 / sizeof(T);
  for (int64_t i = 0; i < rows; ++i, first += stride)
    for (int64_t j = 0; j < width; j += LINE)
      __builtin_prefetch(first + j, WRITTEN, WRITTEN ? 3 : 2);
}

// What a mask does to each 32 queries, found by all threads of a parallel part together.
template <class T>
static void look(const T* mask, int64_t queries, int64_t keys, std::vector<MaskExtent>& extents) {
#pragma omp for schedule(static)
  for (int64_t q = 0; q < queries; q += PANEL)
    extents[q / PANEL] = mask_extent(mask + q * keys, std::min(PANEL, queries - q), keys);
}

// A left panel times packed right panels of `stride` elements: into rows of a result of some width.
template <class Way, class T>
static void multiply_store(const typename Way::Left& left, const typename Way::Packed* right,
                           int64_t stride, int64_t k_count, T* to, int64_t row, int64_t rows,
                           int64_t width, float* sums) {
  for (int64_t d = 0; d < width; d += PANEL, right += stride) {
    Way::multiply(left, right, k_count, sums, PANEL);
    store(sums, to + d, row, rows, std::min(PANEL, width - d));
  }
}

// The first `needed` of a row after dropout, elements of [batch, heads, queries, keys]; keys are an
// even number.
template <class T>
static void drop(const T* from, T* to, int64_t needed, const Sizes& n, int64_t head, int64_t query,
                 const Dropout& dropout) {
  const int64_t heads = n.batch / dropout.parts * n.heads;  // of one key
  const uint64_t key = dropout.keys[head / heads],
                 index = uint64_t((head % heads * n.queries + query) * n.keys);
  ::drop(from, to, key, index, int32_t(dropout.threshold), dropout.scale, needed);
}

// Probabilities of 32 queries of a head, from q on, and what dropout leaves of them: rows of `row`
// elements, in which zeros, or NaN, follow what queries see, up to a column. Without dropout,
// dropped is not written; it may be where probabilities are if nothing follows. scores: rows of
// padded(keys) + SKEW numbers, which are lost.
template <class Way, class T>
static void attend_to_keys(const View<T>& query, const typename Way::Packed* packed_keys,
                           const T* mask, const MaskExtent& extent, float scale, const Sizes& n,
                           const Dropout& dropout, int64_t head, int64_t q, float* scores,
                           typename Way::Packed* panel, T* probabilities, T* dropped, int64_t row,
                           int64_t column) {
  const int64_t rows = std::min(PANEL, n.queries - q), stride = padded(n.keys) + SKEW;
  const T* const first = query.at(head / n.heads, head % n.heads) + q * query.row;
  const auto left = Way::left({first, query.row, 1, rows}, 0, n.width, panel);
  for (int64_t k = 0; k < extent.end; k += PANEL)
    Way::multiply(left, packed_keys + k * padded(n.width), n.width, scores + k, stride);
  softmax(scores, stride, rows, scale, mask + q * n.keys, n.keys, extent, probabilities, row,
          column);
  for (int64_t i = 0; i < rows && dropout.parts > 0; ++i, probabilities += row, dropped += row) {
    drop(probabilities, dropped, extent.end, n, head, q + i, dropout);
    std::copy(probabilities + extent.end, probabilities + column, dropped + extent.end);
  }
}

// probabilities = softmax(query @ key.T * scale + mask), [..., queries, keys] in order; dropped:
// the same after dropout, where there is one; y = dropped @ value. Both are null where only y is
// wanted.
template <class Way, class T>
static void forward(const View<T>& query, const View<T>& key, const View<T>& value, const T* mask,
                    float scale, T* probabilities, T* dropped, const View<T>& y, const Sizes& n,
                    const Dropout& dropout, int threads) {
  using Packed = typename Way::Packed;
  const int64_t keys = n.keys, row = padded(keys), width = padded(n.width), stride = row + SKEW;
  const bool is_kept = probabilities != nullptr;
  std::vector<MaskExtent> extents(ceil_div(n.queries, PANEL));
#pragma omp parallel num_threads(threads) if (threads > 1 && n.multiply_adds() > SMALL)
  {
    thread_local Workspace workspace, floats, elements;
    Packed* const packed_keys =
        workspace.take<Packed>(2 * row * width + PANEL * std::max(width, row));
    Packed *const packed_values = packed_keys + row * width, *const panel =
                                                                 packed_values + row * width;
    float *const scores = floats.take<float>(PANEL * stride + PANEL * PANEL), *const sums =
                                                                                  scores +
                                                                                  PANEL * stride;
    T* const own = is_kept ? nullptr : elements.take<T>(PANEL * row);
    [[maybe_unused]] const typename Way::Scope scope;
    look(mask, n.queries, keys, extents);
#pragma omp for schedule(static)
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      const int64_t b = head / n.heads, h = head % n.heads;
      pack_right<Way, T>({key.at(b, h), key.row, 1, keys}, n.width, packed_keys);
      pack_right<Way, T>({value.at(b, h), 1, value.row, n.width}, keys, packed_values);
      for (int64_t q = 0; q < n.queries; q += PANEL) {
        const int64_t end = std::min(n.queries, q + PANEL), rows = end - q;
        const MaskExtent& extent = extents[q / PANEL];
        prefetch<true>(y.at(b, h) + q * y.row, y.row, rows, n.width);
        prefetch<false>(query.at(b, h) + end * query.row, query.row,
                        std::min(PANEL, n.queries - end), n.width);
        const int64_t first = (head * n.queries + q) * keys, used_row = is_kept ? keys : row;
        T* const probs = is_kept ? probabilities + first : own;
        T* const used = is_kept && dropout.parts > 0 ? dropped + first : probs;
        attend_to_keys<Way>(query, packed_keys, mask, extent, scale, n, dropout, head, q, scores,
                            panel, probs, used, used_row, is_kept ? keys : extent.end);
        const auto factors = Way::left({used, used_row, 1, rows}, 0, extent.end, panel);
        multiply_store<Way>(factors, packed_values, row * PANEL, extent.end, y.at(b, h) + q * y.row,
                            y.row, rows, n.width, sums);
      }
    }
  }
}

// Elements of a thread's rows: gradients of scores; where they are computed again, also of what was
// multiplied with the values; and 32 rows of what dropout then drops from.
static int64_t backward_scratch(int64_t queries, int64_t keys, bool recomputes, bool drops_again) {
  return ((1 + recomputes) * queries + drops_again * PANEL) * padded(keys);
}

// Gradients for query, key and value from dy. factors: what was multiplied with the values, the
// probabilities or what dropout left of them. mask: that of the scores, which hides nothing that
// factors have, or null where it is not known. Dropout without parts has let through what is not
// zero in factors; where a probability is zero, so is the gradient of its score. Without
// probabilities and factors both are computed again, a head at a time, from the mask and what
// dropout draws. scratch: `backward_scratch` elements for each thread.
template <class Way, class T>
static void backward(const View<T>& dy, const View<T>& query, const View<T>& key,
                     const View<T>& value, const T* probabilities, const T* factors, const T* mask,
                     float scale, const View<T>& d_query, const View<T>& d_key,
                     const View<T>& d_value, const Sizes& n, const Dropout& dropout, T* scratch,
                     int threads) {
  using Packed = typename Way::Packed;
  const int64_t keys = n.keys, row = padded(keys), width = padded(n.width),
                queries = padded(n.queries);
  const int64_t stride = row + SKEW;
  std::atomic<int64_t> begun{0};  // threads
  const bool recomputes = probabilities == nullptr, drops_again = recomputes && dropout.parts > 0;
  const bool draws =
      dropout.parts > 0 && !recomputes;  // for the gradient of what dropout left, and nothing else
  const int64_t probs_row = recomputes ? row : keys;  // and that of factors
  std::vector<MaskExtent> extents(ceil_div(n.queries, PANEL));
#pragma omp parallel num_threads(threads) if (threads > 1 && n.multiply_adds() > SMALL)
  {
    thread_local Workspace workspace, floats;
    const int64_t packed = ((2 + recomputes) * row + 2 * queries) * width;
    Packed* const packed_values =
        workspace.take<Packed>(packed + PANEL * std::max({width, row, queries}));
    Packed *const packed_keys = packed_values + row * width, *const packed_queries =
                                                                 packed_keys + row * width;
    Packed *const packed_dy = packed_queries + queries * width, *const packed_for_scores =
                                                                    packed_dy + queries * width;
    Packed* const panel = packed_values + packed;
    float *const d_probs = floats.take<float>(PANEL * stride + PANEL * PANEL), *const sums =
                                                                                   d_probs +
                                                                                   PANEL * stride;
    std::vector<int64_t> ends(ceil_div(n.queries, PANEL));  // of the keys that have a probability
    std::vector<int64_t> factor_ends(ends.size());          // of those that have a factor
    T* const d_scores =
        scratch + begun++ * backward_scratch(n.queries, keys, recomputes, drops_again);
    T *const made = d_scores + n.queries * row, *const undropped = made + n.queries * row;
    [[maybe_unused]] const typename Way::Scope scope;
    if (mask != nullptr) look(mask, n.queries, keys, extents);
#pragma omp for schedule(static)
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      const int64_t b = head / n.heads, h = head % n.heads;
      pack_right<Way, T>({value.at(b, h), value.row, 1, keys}, n.width, packed_values);
      pack_right<Way, T>({key.at(b, h), 1, key.row, n.width}, keys, packed_keys);
      pack_right<Way, T>({query.at(b, h), 1, query.row, n.width}, n.queries, packed_queries);
      pack_right<Way, T>({dy.at(b, h), 1, dy.row, n.width}, n.queries, packed_dy);
      if (recomputes)
        pack_right<Way, T>({key.at(b, h), key.row, 1, keys}, n.width, packed_for_scores);
      const T* const used = recomputes ? made : factors + head * n.queries * keys;
      const auto end_of = [&](const T* from, int64_t rows) {
        return std::min(keys, panels_but(0.0f, from, rows, keys) * PANEL);
      };
      int64_t furthest = 0;  // end of the keys that any query up to here has a probability for
      for (int64_t q = 0; q < n.queries; q += PANEL) {
        const int64_t rows = std::min(PANEL, n.queries - q);
        const T* probs = recomputes ? nullptr : probabilities + (head * n.queries + q) * keys;
        const int64_t needed = mask != nullptr ? extents[q / PANEL].end : end_of(probs, rows);
        ends[q / PANEL] = needed;
        factor_ends[q / PANEL] =
            mask != nullptr || factors == probabilities ? needed : end_of(used + q * keys, rows);
        furthest = std::max(furthest, needed);
        prefetch<true>(d_query.at(b, h) + q * d_query.row, d_query.row, rows, n.width);
        if (recomputes) {
          T *const to = made + q * row, *const from = drops_again ? undropped : to;
          attend_to_keys<Way>(query, packed_for_scores, mask, extents[q / PANEL], scale, n, dropout,
                              head, q, d_probs, panel, from, to, row, furthest);
          probs = from;
        } else {
          const int64_t next = std::min(PANEL, n.queries - q - rows),
                        seen = std::min(keys, needed + PANEL);
          prefetch<false>(probs + rows * keys, keys, next, seen);
        }
        const auto of_dy =
            Way::left({dy.at(b, h) + q * dy.row, dy.row, 1, rows}, 0, n.width, panel);
        for (int64_t k = 0; k < needed; k += PANEL)
          Way::multiply(of_dy, packed_values + k * width, n.width, d_probs + k, stride);
        for (int64_t i = 0; i < rows && draws; ++i)
          drop(d_probs + i * stride, d_probs + i * stride, needed, n, head, q + i, dropout);
        if (!draws && dropout.scale != 1.0f)
          let_through(d_probs, stride, rows, dropout.scale, used + q * probs_row, probs_row,
                      needed);
        softmax_grad(d_probs, stride, rows, scale, probs, probs_row, needed, furthest,
                     d_scores + q * row, row);
        const auto of_scores = Way::left({d_scores + q * row, row, 1, rows}, 0, needed, panel);
        multiply_store<Way>(of_scores, packed_keys, row * PANEL, needed,
                            d_query.at(b, h) + q * d_query.row, d_query.row, rows, n.width, sums);
      }
      // left.T @ right, for each key; queries before the first ones whose end is behind one of 32
      // keys add nothing.
      const auto multiply_transposed = [&](const T* left, int64_t stride,
                                           const std::vector<int64_t>& ends, const Packed* right,
                                           const View<T>& result) {
        for (int64_t k = 0; k < keys; k += PANEL) {
          const int64_t rows = std::min(PANEL, keys - k);
          int64_t first = 0;
          while (first < n.queries && ends[first / PANEL] <= k) first += PANEL;
          first = std::min(first, n.queries);
          prefetch<true>(result.at(b, h) + k * result.row, result.row, rows, n.width);
          const auto transposed = Way::left({left + k, 1, stride, rows}, first, n.queries, panel);
          multiply_store<Way>(transposed, right + first * PANEL, queries * PANEL, n.queries - first,
                              result.at(b, h) + k * result.row, result.row, rows, n.width, sums);
        }
      };
      multiply_transposed(d_scores, row, ends, packed_queries, d_key);
      multiply_transposed(used, probs_row, factor_ends, packed_dy, d_value);
    }
  }
}

}  // namespace attention

extern "C" {

#define VIEW(T, NAME) T *NAME, int64_t NAME##_batch, int64_t NAME##_head, int64_t NAME##_row
#define AS_VIEW(T, NAME) \
  attention::View<T> { NAME, NAME##_batch, NAME##_head, NAME##_row }

#define ATTENTION(T, NAME, ...)                                                                   \
  void attend_##NAME(VIEW(T, query), VIEW(T, key), VIEW(T, value), const T* mask, float scale,    \
                     T* probabilities, T* dropped, VIEW(T, y), int64_t batch, int64_t heads,      \
                     int64_t queries, int64_t keys, int64_t width, const uint64_t* seeds,         \
                     int64_t parts, int64_t threshold, float drop_scale, int threads) {           \
    attention::forward<__VA_ARGS__>(AS_VIEW(T, query), AS_VIEW(T, key), AS_VIEW(T, value), mask,  \
                                    scale, probabilities, dropped, AS_VIEW(T, y),                 \
                                    {batch, heads, queries, keys, width},                         \
                                    {seeds, parts, threshold, drop_scale}, threads);              \
  }                                                                                               \
  void attend_grad_##NAME(VIEW(T, dy), VIEW(T, query), VIEW(T, key), VIEW(T, value),              \
                          const T* probabilities, const T* factors, const T* mask, float scale,   \
                          VIEW(T, d_query), VIEW(T, d_key), VIEW(T, d_value), int64_t batch,      \
                          int64_t heads, int64_t queries, int64_t keys, int64_t width,            \
                          const uint64_t* seeds, int64_t parts, int64_t threshold,                \
                          float drop_scale, T* scratch, int threads) {                            \
    attention::backward<__VA_ARGS__>(AS_VIEW(T, dy), AS_VIEW(T, query), AS_VIEW(T, key),          \
                                     AS_VIEW(T, value), probabilities, factors, mask, scale,      \
                                     AS_VIEW(T, d_query), AS_VIEW(T, d_key), AS_VIEW(T, d_value), \
                                     {batch, heads, queries, keys, width},                        \
                                     {seeds, parts, threshold, drop_scale}, scratch, threads);    \
  }

// Elements of attend_grad's scratch.
int64_t attend_grad_scratch(int64_t queries, int64_t keys, int64_t recomputes, int64_t drops_again,
                            int threads) {
  return threads * attention::backward_scratch(queries, keys, recomputes, drops_again);
}

ATTENTION(float, f32, attention::ByVectors<float>, float)
#ifdef HAS_TILES
ATTENTION(bfloat16, bf16, attention::ByTiles, bfloat16)
#else
ATTENTION(bfloat16, bf16, attention::ByVectors<bfloat16>, bfloat16)
#endif
}
