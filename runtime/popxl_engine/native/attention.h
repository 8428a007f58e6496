// Softmax attention and its gradient: one head at a time, 32 queries at a time. Scores stay in float32 in the cache; only
// probabilities are written. Where a mask hides all keys from some key on, or where probabilities are zero from there
// on, nothing is computed.
#pragma once
#include <vector>

#include "dropout.h"
#include "products.h"
#include "vectors.h"

namespace attention {

using products::Matrix;
using products::Room;
using products::parts;

constexpr int64_t PANEL = 32;  // rows or columns of operands that are multiplied together

// Ways to multiply panels. A packed panel has PANEL elements for each k, of which there are a multiple of 32.
template <class T>
struct ByVectors {
  using Packed = float;
  using Left = vectors::Left;
  struct Scope {};
  static Left left(const Matrix<T>& from, int64_t k, int64_t k_end, Packed* room) {
    return vectors::left_panel(from, k, k_end, room);
  }
  static void pack_right(const Matrix<T>& from, int64_t p, int64_t k_count, Packed* to) {
    vectors::pack_right(from, p, k_count, to);
  }
  static void multiply(const Left& left, const Packed* right, int64_t k_count, float* sums) {
    vectors::multiply(left, right, k_count, sums);
  }
};

#ifdef HAS_TILES
struct ByTiles {
  using Packed = bfloat16;
  using Left = const bfloat16*;
  using Scope = products::Tiles;
  static Left left(const Matrix<bfloat16>& from, int64_t k, int64_t k_end, Packed* room) {
    products::pack_panel<true>(from, 0, k, k_end, room);
    return room;
  }
  static void pack_right(const Matrix<bfloat16>& from, int64_t p, int64_t k_count, Packed* to) {
    products::pack_panel<false>(from, p, 0, k_count, to);
  }
  static void multiply(Left left, const Packed* right, int64_t k_count, float* sums) {
    products::multiply(left, right, parts(k_count, products::STEP), sums);
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
};

static inline int64_t padded(int64_t count) { return parts(count, PANEL) * PANEL; }

// Elements are dropped where their draws, read as int32, are below the threshold, and scaled elsewhere. The keys of
// the generator are for equal parts of the batch.
struct Dropout {
  const uint64_t* keys;
  int64_t parts, threshold;
  float scale;
};

// Packed panels of the right operand, for all columns: element (column, k).
template <class Way, class T>
static void pack_right(const Matrix<T>& from, int64_t k_count, typename Way::Packed* to) {
  for (int64_t p = 0; p < parts(from.length, PANEL); ++p, to += PANEL * padded(k_count))
    Way::pack_right(from, p, k_count, to);
}

// rows x columns of sums into a result.
template <class T>
static void store(const float* sums, T* to, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, sums += PANEL, to += stride) {
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) narrow(sums[j], to[j]);
  }
}

// A left panel times packed right panels of `stride` elements: into rows of a result of some width.
template <class Way, class T>
static void multiply_store(const typename Way::Left& left, const typename Way::Packed* right, int64_t stride,
                           int64_t k_count, T* to, int64_t row, int64_t rows, int64_t width, float* sums) {
  for (int64_t d = 0; d < width; d += PANEL, right += stride) {
    Way::multiply(left, right, k_count, sums);
    store(sums, to + d, row, rows, std::min(PANEL, width - d));
  }
}

static inline uint32_t magnitude(float x) { return bits_as<uint32_t>(x) << 1; }
static inline uint32_t magnitude(bfloat16 x) { return x.bits & 0x7fffu; }

// Whether any of `count` numbers is not zero.
template <class T>
static bool any(const T* x, int64_t count) {
  uint32_t bits = 0;
#pragma omp simd reduction(| : bits)
  for (int64_t j = 0; j < count; ++j) bits |= magnitude(x[j]);
  return bits != 0;
}

// Key panels up to the last one in which a row has a probability.
template <class T>
static int64_t panels_with_any(const T* shares, int64_t rows, int64_t keys) {
  for (int64_t p = parts(keys, PANEL); p > 0; --p)
    for (int64_t i = 0; i < rows; ++i)
      if (any(shares + i * keys + (p - 1) * PANEL, std::min(PANEL, keys - (p - 1) * PANEL))) return p;
  return 0;
}

// For each 32 queries, key panels up to the last one that a mask lets any of them see.
template <class T>
static std::vector<int64_t> panels_seen(const T* mask, int64_t queries, int64_t keys) {
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

template <class T>
static float exponentials(float* x, float shift, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; ++j) sum += x[j] = decay(x[j] - shift, T{});
  return sum;
}

// exp(x - largest) / sum for the first `needed` of a row, zeros for the rest; NaN where all are minus infinity.
template <class T>
static void softmax(float* x, int64_t needed, T* to, int64_t keys) {
  const float most = largest(x, needed), share = 1.0f / exponentials<T>(x, most, needed);
  if (most == -INFINITY) needed = 0;
#pragma omp simd
  for (int64_t j = 0; j < needed; ++j) narrow(x[j] * share, to[j]);
  T rest;
  narrow(most == -INFINITY ? NAN : 0.0f, rest);
  std::fill(to + needed, to + keys, rest);
}

template <class T>
static float dot(const T* x, const float* y, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; ++j) sum += wide(x[j]) * y[j];
  return sum;
}

// The first `needed` of a row after dropout, elements of [batch, heads, queries, keys]; keys are an even number.
template <class T>
static void drop(const T* from, T* to, int64_t needed, const Sizes& n, int64_t head, int64_t query,
                 const Dropout& dropout) {
  const int64_t heads = n.batch / dropout.parts * n.heads;  // of one key
  const uint64_t key = dropout.keys[head / heads], index = uint64_t((head % heads * n.queries + query) * n.keys);
  ::drop(from, to, key, index, int32_t(dropout.threshold), dropout.scale, needed);
}

// probabilities = softmax(query @ key.T * scale + mask), [..., queries, keys] in order; dropped: the same after dropout
// (may be null); y = dropped @ value.
template <class Way, class T>
static void forward(const View<T>& query, const View<T>& key, const View<T>& value, const T* mask, float scale,
                    T* probabilities, T* dropped, const View<T>& y, const Sizes& n, const Dropout& dropout,
                    int threads) {
  using Packed = typename Way::Packed;
  const int64_t keys = n.keys, row = padded(keys), width = padded(n.width);
  const std::vector<int64_t> seen = panels_seen(mask, n.queries, keys);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Room room, floats;
    Packed* const packed_keys = room.take<Packed>(2 * row * width + PANEL * std::max(width, row));
    Packed *const packed_values = packed_keys + row * width, *const panel = packed_values + row * width;
    float *const scores = floats.take<float>(PANEL * row + PANEL * PANEL), *const sums = scores + PANEL * row;
    [[maybe_unused]] const typename Way::Scope scope;
#pragma omp for schedule(static)
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      const int64_t b = head / n.heads, h = head % n.heads;
      pack_right<Way, T>({key.at(b, h), key.row, 1, keys}, n.width, packed_keys);
      pack_right<Way, T>({value.at(b, h), 1, value.row, n.width}, keys, packed_values);
      for (int64_t q = 0; q < n.queries; q += PANEL) {
        const int64_t rows = std::min(PANEL, n.queries - q);
        const int64_t needed = std::min(keys, seen[q / PANEL] * PANEL);
        const auto queries = Way::left({query.at(b, h) + q * query.row, query.row, 1, rows}, 0, n.width, panel);
        for (int64_t k = 0; k < needed; k += PANEL) {
          Way::multiply(queries, packed_keys + k * width, n.width, sums);
          const int64_t columns = std::min(PANEL, needed - k);
          for (int64_t i = 0; i < rows; ++i) {
            const T* added = mask + (q + i) * keys + k;
            float* to = scores + i * row + k;
#pragma omp simd
            for (int64_t j = 0; j < columns; ++j) to[j] = fused(sums[i * PANEL + j], scale, wide(added[j]));
          }
        }
        T* const at = probabilities + (head * n.queries + q) * keys;
        for (int64_t i = 0; i < rows; ++i) softmax(scores + i * row, needed, at + i * keys, keys);
        const T* used = at;
        if (dropped != nullptr) {
          T* const to = dropped + (head * n.queries + q) * keys;
          for (int64_t i = 0; i < rows; ++i) {
            drop(at + i * keys, to + i * keys, needed, n, head, q + i, dropout);
            std::copy(at + i * keys + needed, at + (i + 1) * keys, to + i * keys + needed);  // zeros, or NaN
          }
          used = to;
        }
        const auto shares = Way::left({used, keys, 1, rows}, 0, needed, panel);
        multiply_store<Way>(shares, packed_values, row * PANEL, needed, y.at(b, h) + q * y.row, y.row, rows, n.width,
                            sums);
      }
    }
  }
}

// Gradients for query, key and value from dy. factors: what was multiplied with the values, the probabilities or what
// dropout left of them; without dropout it has no parts.
template <class Way, class T>
static void backward(const View<T>& dy, const View<T>& query, const View<T>& key, const View<T>& value,
                     const T* probabilities, const T* factors, float scale, const View<T>& d_query,
                     const View<T>& d_key, const View<T>& d_value, const Sizes& n, const Dropout& dropout,
                     int threads) {
  using Packed = typename Way::Packed;
  const int64_t keys = n.keys, row = padded(keys), width = padded(n.width), queries = padded(n.queries);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Room room, floats, elements;
    Packed* const packed_values =
        room.take<Packed>(2 * (row + queries) * width + PANEL * std::max({width, row, queries}));
    Packed *const packed_keys = packed_values + row * width, *const packed_queries = packed_keys + row * width;
    Packed *const packed_dy = packed_queries + queries * width, *const panel = packed_dy + queries * width;
    float *const d_shares = floats.take<float>(PANEL * row + PANEL * PANEL), *const sums = d_shares + PANEL * row;
    T* const d_scores = elements.take<T>(n.queries * row);
    [[maybe_unused]] const typename Way::Scope scope;
#pragma omp for schedule(static)
    for (int64_t head = 0; head < n.batch * n.heads; ++head) {
      const int64_t b = head / n.heads, h = head % n.heads;
      pack_right<Way, T>({value.at(b, h), value.row, 1, keys}, n.width, packed_values);
      pack_right<Way, T>({key.at(b, h), 1, key.row, n.width}, keys, packed_keys);
      pack_right<Way, T>({query.at(b, h), 1, query.row, n.width}, n.queries, packed_queries);
      pack_right<Way, T>({dy.at(b, h), 1, dy.row, n.width}, n.queries, packed_dy);
      const T* const shares = probabilities + head * n.queries * keys;
      const T* const used = factors + head * n.queries * keys;
      for (int64_t q = 0; q < n.queries; q += PANEL) {
        const int64_t rows = std::min(PANEL, n.queries - q);
        const int64_t needed = std::min(keys, panels_with_any(shares + q * keys, rows, keys) * PANEL);
        const auto of_dy = Way::left({dy.at(b, h) + q * dy.row, dy.row, 1, rows}, 0, n.width, panel);
        for (int64_t k = 0; k < needed; k += PANEL) {
          Way::multiply(of_dy, packed_values + k * width, n.width, sums);
          for (int64_t i = 0; i < rows; ++i)
            std::copy(sums + i * PANEL, sums + (i + 1) * PANEL, d_shares + i * row + k);
        }
        for (int64_t i = 0; i < rows; ++i) {
          const T* share = shares + (q + i) * keys;
          float* d = d_shares + i * row;
          if (dropout.parts > 0) drop(d, d, needed, n, head, q + i, dropout);
          T* to = d_scores + (q + i) * row;
          const float mean = dot(share, d, needed);
#pragma omp simd
          for (int64_t j = 0; j < needed; ++j) narrow(wide(share[j]) * scale * (d[j] - mean), to[j]);
          std::fill(to + needed, to + row, T{});
        }
        const auto of_scores = Way::left({d_scores + q * row, row, 1, rows}, 0, needed, panel);
        multiply_store<Way>(of_scores, packed_keys, row * PANEL, needed, d_query.at(b, h) + q * d_query.row,
                            d_query.row, rows, n.width, sums);
      }
      // left.T @ right, for each key; queries before the first with anything in `of` for one of 32 keys add nothing.
      const auto multiply_transposed = [&](const T* of, const T* left, int64_t stride, const Packed* right,
                                           const View<T>& result) {
        for (int64_t k = 0; k < keys; k += PANEL) {
          const int64_t rows = std::min(PANEL, keys - k);
          int64_t first = 0;
          while (first < n.queries && !any(of + first * keys + k, rows)) ++first;
          first = first / PANEL * PANEL;
          const auto turned = Way::left({left + k, 1, stride, rows}, first, n.queries, panel);
          multiply_store<Way>(turned, right + first * PANEL, queries * PANEL, n.queries - first,
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

#define VIEW(T, NAME) T *NAME, int64_t NAME##_batch, int64_t NAME##_head, int64_t NAME##_row
#define AS_VIEW(T, NAME) attention::View<T>{NAME, NAME##_batch, NAME##_head, NAME##_row}

#define ATTENTION(T, NAME, ...)                                                                                      \
  void attend_##NAME(VIEW(T, query), VIEW(T, key), VIEW(T, value), const T* mask, float scale, T* probabilities,     \
                     T* dropped, VIEW(T, y), int64_t batch, int64_t heads, int64_t queries, int64_t keys,            \
                     int64_t width, const uint64_t* seeds, int64_t parts, int64_t threshold, float drop_scale,       \
                     int threads) {                                                                                  \
    attention::forward<__VA_ARGS__>(AS_VIEW(T, query), AS_VIEW(T, key), AS_VIEW(T, value), mask, scale,              \
                                    probabilities, dropped, AS_VIEW(T, y), {batch, heads, queries, keys, width},     \
                                    {seeds, parts, threshold, drop_scale}, threads);                                 \
  }                                                                                                                  \
  void attend_grad_##NAME(VIEW(T, dy), VIEW(T, query), VIEW(T, key), VIEW(T, value), const T* probabilities,         \
                          const T* factors, float scale, VIEW(T, d_query), VIEW(T, d_key), VIEW(T, d_value),         \
                          int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t width,                \
                          const uint64_t* seeds, int64_t parts, int64_t threshold, float drop_scale, int threads) {  \
    attention::backward<__VA_ARGS__>(AS_VIEW(T, dy), AS_VIEW(T, query), AS_VIEW(T, key), AS_VIEW(T, value),          \
                                     probabilities, factors, scale, AS_VIEW(T, d_query), AS_VIEW(T, d_key),          \
                                     AS_VIEW(T, d_value), {batch, heads, queries, keys, width},                      \
                                     {seeds, parts, threshold, drop_scale}, threads);                                \
  }

ATTENTION(float, f32, attention::ByVectors<float>, float)
#ifdef HAS_TILES
ATTENTION(bfloat16, bf16, attention::ByTiles, bfloat16)
#else
ATTENTION(bfloat16, bf16, attention::ByVectors<bfloat16>, bfloat16)
#endif
}
