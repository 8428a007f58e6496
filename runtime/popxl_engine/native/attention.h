// Softmax attention and its gradient: one head at a time, 32 queries at a time. Scores stay in
// float32 in the cache; only probabilities are written, if somebody reads them. Nothing is computed
// before the first key that any of the 32 sees, nor after the last one, as attributes or a mask
// say, or probabilities that are zero. Rows that come next are asked for before.
#pragma once
#include <atomic>
#include <vector>

#include "attention_ways.h"

namespace attention {

// Asks for rows, to be WRITTEN soon or read after that.
template <bool WRITTEN, class T>
static inline void prefetch(const T* first, int64_t stride, int64_t rows, int64_t width) {
  constexpr int64_t LINE = 64 / sizeof(T);
  for (int64_t i = 0; i < rows; ++i, first += stride)
    for (int64_t j = 0; j < width; j += LINE)
      __builtin_prefetch(first + j, WRITTEN, WRITTEN ? 3 : 2);
}

// What each 32 queries see by a mask, found by all threads of a parallel part together.
template <class T>
static void look(const T* mask, int64_t queries, int64_t keys, std::vector<Extent>& extents) {
#pragma omp for schedule(static)
  for (int64_t q = 0; q < queries; q += PANEL)
    extents[q / PANEL] = extent_of(mask + q * keys, std::min(PANEL, queries - q), keys);
}

// What 32 queries see; masked: what each see by a mask, if there is one.
template <class T>
static Extent look(const Sight<T>& sight, const std::vector<Extent>& masked, const Sizes& n,
                   int64_t batch, int64_t q) {
  if (sight.mask != nullptr) return masked[q / PANEL];
  const int64_t rows = std::min(PANEL, n.queries - q);
  return extent_of(sight.hiding, sight.positions(batch, n.queries), q, rows, n.keys);
}

// A left panel times packed right panels of `stride` elements: into rows of a result of some width.
template <class Way, class T>
static void multiply_store(const typename Way::Left& left, const typename Way::Packed* right,
                           int64_t stride, int64_t k_count, T* to, int64_t row, int64_t rows,
                           int64_t width, float* sums) {
  for (int64_t d = 0; d < width; d += PANEL, right += stride) {
    Way::multiply(left, right, k_count, sums, PANEL);
    store_panel(sums, to + d, row, rows, std::min(PANEL, width - d));
  }
}

// Products of 32 queries of a head, from q on, with the keys that they see.
template <class Way, class T>
static void multiply_keys(const View<T>& query, const typename Way::Packed* packed_keys,
                          const Range& range, const Sizes& n, int64_t head, int64_t q,
                          float* scores, typename Way::Packed* panel) {
  const int64_t rows = std::min(PANEL, n.queries - q), stride = padded(n.keys) + SKEW;
  const T* const first = query.at(head / n.heads, head % n.heads) + q * query.row;
  const auto left = Way::left({first, query.row, 1, rows}, 0, n.width, panel);
  for (int64_t k = range.begin; k < range.end; k += PANEL)
    Way::multiply(left, packed_keys + k * padded(n.width), n.width, scores + k, stride);
}

// Probabilities of 32 queries of a head, from q on, and what dropout leaves of them: rows of `row`
// elements, in which zeros, or NaN, are before and after what queries see, from `first` up to a
// column. Without dropout, dropped is not written; it may be where probabilities are if nothing
// follows. scores: rows of padded(keys) + SKEW numbers, which are lost.
template <class Way, class T>
static void attend_to_keys(const View<T>& query, const typename Way::Packed* packed_keys,
                           const Sight<T>& sight, const Extent& extent, float scale, const Sizes& n,
                           const Dropout& dropout, int64_t head, int64_t q, float* scores,
                           typename Way::Packed* panel, T* probabilities, T* dropped, int64_t row,
                           int64_t first, int64_t column) {
  const int64_t rows = std::min(PANEL, n.queries - q), stride = padded(n.keys) + SKEW;
  multiply_keys<Way>(query, packed_keys, {extent.begin, extent.end}, n, head, q, scores, panel);
  const float cap = sight.hiding.softcap;
  if (sight.mask != nullptr) {
    const auto score = [&](float* x, int64_t i) {
      return masked(x, scale, cap, sight.mask + (q + i) * n.keys, extent);
    };
    softmax(scores, stride, rows, extent, score, probabilities, row, first, column);
  } else {
    const int32_t* const positions = sight.positions(head / n.heads, n.queries);
    const auto score = [&](float* x, int64_t i) {
      return revealed(x, scale, cap, seen(sight.hiding, positions, q + i, n.keys), extent);
    };
    softmax(scores, stride, rows, extent, score, probabilities, row, first, column);
  }
  const int64_t begin = extent.begin, end = extent.end;
  for (int64_t i = 0; i < rows && dropout.parts > 0; ++i, probabilities += row, dropped += row) {
    std::copy(probabilities + first, probabilities + begin, dropped + first);
    drop(probabilities + begin, dropped + begin, {begin, end}, n, head, q + i, dropout);
    std::copy(probabilities + end, probabilities + column, dropped + end);
  }
}

// probabilities = softmax(query @ key.T * scale) of what is seen, plus a mask if there is one,
// [..., queries, keys] in order; dropped: the same after dropout, where there is one; y = dropped @
// value. Both are null where only y is wanted.
template <class Way, class T>
static void forward(const View<T>& query, const View<T>& key, const View<T>& value,
                    const Sight<T>& sight, float scale, T* probabilities, T* dropped,
                    const View<T>& y, const Sizes& n, const Dropout& dropout, int threads) {
  using Packed = typename Way::Packed;
  const int64_t keys = n.keys, row = padded(keys), width = padded(n.width), stride = row + SKEW;
  const bool is_kept = probabilities != nullptr;
  std::vector<Extent> extents(ceil_div(n.queries, PANEL));
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
    if (sight.mask != nullptr) look(sight.mask, n.queries, keys, extents);
#pragma omp for schedule(static)
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      const int64_t b = head / n.heads, h = head % n.heads;
      pack_right<Way, T>({key.at(b, h), key.row, 1, keys}, n.width, packed_keys);
      pack_right<Way, T>({value.at(b, h), 1, value.row, n.width}, keys, packed_values);
      for (int64_t q = 0; q < n.queries; q += PANEL) {
        const int64_t end = std::min(n.queries, q + PANEL), rows = end - q;
        const Extent extent = look(sight, extents, n, b, q);
        prefetch<true>(y.at(b, h) + q * y.row, y.row, rows, n.width);
        prefetch<false>(query.at(b, h) + end * query.row, query.row,
                        std::min(PANEL, n.queries - end), n.width);
        const int64_t first = (head * n.queries + q) * keys, used_row = is_kept ? keys : row;
        T* const probs = is_kept ? probabilities + first : own;
        T* const used = is_kept && dropout.parts > 0 ? dropped + first : probs;
        attend_to_keys<Way>(query, packed_keys, sight, extent, scale, n, dropout, head, q, scores,
                            panel, probs, used, used_row, is_kept ? 0 : extent.begin,
                            is_kept ? keys : extent.end);
        const auto factors = Way::left({used, used_row, 1, rows}, extent.begin, extent.end, panel);
        multiply_store<Way>(factors, packed_values + extent.begin * PANEL, row * PANEL,
                            extent.end - extent.begin, y.at(b, h) + q * y.row, y.row, rows, n.width,
                            sums);
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
// probabilities or what dropout left of them. Where probabilities and factors are given and nothing
// says what is hidden, it is where they are zero. Dropout without parts has let through what is not
// zero in factors; where a probability is zero, so is the gradient of its score. Without
// probabilities and factors both are computed again, a head at a time, from what is seen and what
// dropout draws. scratch: `backward_scratch` elements for each thread.
template <class Way, class T>
static void backward(const View<T>& dy, const View<T>& query, const View<T>& key,
                     const View<T>& value, const T* probabilities, const T* factors,
                     const Sight<T>& sight, float scale, const View<T>& d_query,
                     const View<T>& d_key, const View<T>& d_value, const Sizes& n,
                     const Dropout& dropout, T* scratch, int threads) {
  using Packed = typename Way::Packed;
  const int64_t keys = n.keys, row = padded(keys), width = padded(n.width),
                queries = padded(n.queries);
  const int64_t stride = row + SKEW;
  std::atomic<int64_t> begun{0};  // threads
  const float cap = sight.hiding.softcap;
  const bool recomputes = probabilities == nullptr, drops_again = recomputes && dropout.parts > 0,
             scores_again = recomputes || cap != 0.0f,
             is_known = recomputes || sight.mask != nullptr || sight.hiding.diagonal >= 0;
  const bool draws =
      dropout.parts > 0 && !recomputes;  // for the gradient of what dropout left, and nothing else
  const int64_t probs_row = recomputes ? row : keys;  // and that of factors
  std::vector<Extent> extents(ceil_div(n.queries, PANEL));
#pragma omp parallel num_threads(threads) if (threads > 1 && n.multiply_adds() > SMALL)
  {
    thread_local Workspace workspace, floats;
    const int64_t packed = ((2 + scores_again) * row + 2 * queries) * width;
    Packed* const packed_values =
        workspace.take<Packed>(packed + PANEL * std::max({width, row, queries}));
    Packed *const packed_keys = packed_values + row * width, *const packed_queries =
                                                                 packed_keys + row * width;
    Packed *const packed_dy = packed_queries + queries * width, *const packed_for_scores =
                                                                    packed_dy + queries * width;
    Packed* const panel = packed_values + packed;
    float* const d_probs = floats.take<float>((1 + (cap != 0.0f)) * PANEL * stride + PANEL * PANEL);
    float *const sums = d_probs + PANEL * stride, *const slopes =
                                                      cap != 0.0f ? sums + PANEL * PANEL : nullptr;
    std::vector<Range> ranges(extents.size());        // of the keys that have a probability
    std::vector<Range> factor_ranges(ranges.size());  // of those that have a factor
    std::vector<int64_t> nearest(ranges.size());      // key of any range from here on
    T* const d_scores =
        scratch + begun++ * backward_scratch(n.queries, keys, recomputes, drops_again);
    T *const made = d_scores + n.queries * row, *const undropped = made + n.queries * row;
    [[maybe_unused]] const typename Way::Scope scope;
    if (sight.mask != nullptr) look(sight.mask, n.queries, keys, extents);
#pragma omp for schedule(static)
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      const int64_t b = head / n.heads, h = head % n.heads;
      pack_right<Way, T>({value.at(b, h), value.row, 1, keys}, n.width, packed_values);
      pack_right<Way, T>({key.at(b, h), 1, key.row, n.width}, keys, packed_keys);
      pack_right<Way, T>({query.at(b, h), 1, query.row, n.width}, n.queries, packed_queries);
      pack_right<Way, T>({dy.at(b, h), 1, dy.row, n.width}, n.queries, packed_dy);
      if (scores_again)
        pack_right<Way, T>({key.at(b, h), key.row, 1, keys}, n.width, packed_for_scores);
      const T* const used = recomputes ? made : factors + head * n.queries * keys;
      const auto range_of = [&](const T* from, int64_t rows) {
        return Range{0, std::min(keys, panels_but(0.0f, from, rows, keys) * PANEL)};
      };
      for (int64_t q = 0, p = 0; q < n.queries; q += PANEL, ++p) {
        const int64_t rows = std::min(PANEL, n.queries - q);
        if (is_known) {
          const Extent extent = look(sight, extents, n, b, q);
          ranges[p] = factor_ranges[p] = {extent.begin, extent.end};
        } else {
          const int64_t first = (head * n.queries + q) * keys;
          ranges[p] = range_of(probabilities + first, rows);
          factor_ranges[p] = factors == probabilities ? ranges[p] : range_of(factors + first, rows);
        }
      }
      for (int64_t p = int64_t(ranges.size()) - 1, least = keys; p >= 0; --p)
        nearest[p] = least = std::min(least, ranges[p].begin);
      int64_t furthest = 0;  // end of the keys that any query up to here has a probability for
      for (int64_t q = 0; q < n.queries; q += PANEL) {
        const int64_t rows = std::min(PANEL, n.queries - q), first = nearest[q / PANEL];
        const T* probs = recomputes ? nullptr : probabilities + (head * n.queries + q) * keys;
        const Range range = ranges[q / PANEL];
        furthest = std::max(furthest, range.end);
        prefetch<true>(d_query.at(b, h) + q * d_query.row, d_query.row, rows, n.width);
        if (recomputes) {
          T *const to = made + q * row, *const from = drops_again ? undropped : to;
          attend_to_keys<Way>(query, packed_for_scores, sight, look(sight, extents, n, b, q), scale,
                              n, dropout, head, q, d_probs, panel, from, to, row, first, furthest);
          probs = from;
        } else {
          const int64_t next = std::min(PANEL, n.queries - q - rows),
                        seen = std::min(keys, range.end + PANEL) - range.begin;
          prefetch<false>(probs + rows * keys + range.begin, keys, next, seen);
        }
        if (slopes != nullptr) {
          multiply_keys<Way>(query, packed_for_scores, range, n, head, q, slopes, panel);
          slopes_of(slopes, stride, rows, scale, cap, range);
        }
        const auto of_dy =
            Way::left({dy.at(b, h) + q * dy.row, dy.row, 1, rows}, 0, n.width, panel);
        for (int64_t k = range.begin; k < range.end; k += PANEL)
          Way::multiply(of_dy, packed_values + k * width, n.width, d_probs + k, stride);
        for (int64_t i = 0; i < rows && draws; ++i) {
          float* const at = d_probs + i * stride + range.begin;
          drop(at, at, range, n, head, q + i, dropout);
        }
        if (!draws && dropout.scale != 1.0f)
          let_through(d_probs, stride, rows, dropout.scale, used + q * probs_row, probs_row, range);
        softmax_grad(d_probs, stride, rows, scale, probs, probs_row, range, slopes,
                     d_scores + q * row, row, first, furthest);
        const auto of_scores =
            Way::left({d_scores + q * row, row, 1, rows}, range.begin, range.end, panel);
        multiply_store<Way>(of_scores, packed_keys + range.begin * PANEL, row * PANEL,
                            range.end - range.begin, d_query.at(b, h) + q * d_query.row,
                            d_query.row, rows, n.width, sums);
      }
      // left.T @ right, for each key; queries before the first ones whose range ends behind one of
      // 32 keys add nothing, nor those after the last ones whose range begins before.
      const auto multiply_transposed = [&](const T* left, int64_t stride,
                                           const std::vector<Range>& ranges, const Packed* right,
                                           const View<T>& result) {
        for (int64_t k = 0; k < keys; k += PANEL) {
          const int64_t rows = std::min(PANEL, keys - k);
          int64_t first = 0, last = n.queries;
          while (first < n.queries && ranges[first / PANEL].end <= k) first += PANEL;
          first = std::min(first, n.queries);
          while (last > first && ranges[(last - 1) / PANEL].begin > k)
            last = (last - 1) / PANEL * PANEL;
          prefetch<true>(result.at(b, h) + k * result.row, result.row, rows, n.width);
          const auto transposed = Way::left({left + k, 1, stride, rows}, first, last, panel);
          multiply_store<Way>(transposed, right + first * PANEL, queries * PANEL, last - first,
                              result.at(b, h) + k * result.row, result.row, rows, n.width, sums);
        }
      };
      multiply_transposed(d_scores, row, ranges, packed_queries, d_key);
      multiply_transposed(used, probs_row, factor_ranges, packed_dy, d_value);
    }
  }
}

}  // namespace attention

extern "C" {

#define VIEW(T, NAME) T *NAME, int64_t NAME##_batch, int64_t NAME##_head, int64_t NAME##_row
#define AS_VIEW(T, NAME) \
  attention::View<T> { NAME, NAME##_batch, NAME##_head, NAME##_row }

#define ATTENTION(T, NAME, ...)                                                                   \
  void attend_##NAME(                                                                             \
      VIEW(T, query), VIEW(T, key), VIEW(T, value), const T* mask, const int32_t* positions,      \
      int64_t diagonal, int64_t window, float softcap, float scale, T* probabilities, T* dropped, \
      VIEW(T, y), int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width,     \
      const uint64_t* seeds, int64_t parts, int64_t threshold, float drop_scale, int threads) {   \
    attention::forward<__VA_ARGS__>(AS_VIEW(T, query), AS_VIEW(T, key), AS_VIEW(T, value),        \
                                    {mask, {positions, diagonal, window, softcap}}, scale,        \
                                    probabilities, dropped, AS_VIEW(T, y),                        \
                                    {batch, heads, queries, keys, width},                         \
                                    {seeds, parts, threshold, drop_scale}, threads);              \
  }                                                                                               \
  void attend_grad_##NAME(VIEW(T, dy), VIEW(T, query), VIEW(T, key), VIEW(T, value),              \
                          const T* probabilities, const T* factors, const T* mask,                \
                          const int32_t* positions, int64_t diagonal, int64_t window,             \
                          float softcap, float scale, VIEW(T, d_query), VIEW(T, d_key),           \
                          VIEW(T, d_value), int64_t batch, int64_t heads, int64_t queries,        \
                          int64_t keys, int64_t width, const uint64_t* seeds, int64_t parts,      \
                          int64_t threshold, float drop_scale, T* scratch, int threads) {         \
    attention::backward<__VA_ARGS__>(                                                             \
        AS_VIEW(T, dy), AS_VIEW(T, query), AS_VIEW(T, key), AS_VIEW(T, value), probabilities,     \
        factors, {mask, {positions, diagonal, window, softcap}}, scale, AS_VIEW(T, d_query),      \
        AS_VIEW(T, d_key), AS_VIEW(T, d_value), {batch, heads, queries, keys, width},             \
        {seeds, parts, threshold, drop_scale}, scratch, threads);                                 \
  }

#ifndef BFLOAT16_LIBRARY
// Elements of attend_grad's scratch, of either type.
int64_t attend_grad_scratch(int64_t queries, int64_t keys, int64_t recomputes, int64_t drops_again,
                            int threads) {
  return threads * attention::backward_scratch(queries, keys, recomputes, drops_again);
}

ATTENTION(float, f32, attention::ByVectors<float>, float)
#elif defined(HAS_TILES)
ATTENTION(bfloat16, bf16, attention::ByTiles, bfloat16)
#else
ATTENTION(bfloat16, bf16, attention::ByVectors<bfloat16>, bfloat16)
#endif
}
