// Blocks of queries and keys, as attention of long sequences goes through them.
#pragma once
#include <algorithm>

#include "attention_ways.h"

namespace attention {

constexpr int64_t BLOCK = 128;  // queries or keys
constexpr int64_t SPAN = 256;  // keys that 32 queries meet at a time where nothing is added to keys
constexpr int64_t STRIDE = SPAN + PANEL;  // numbers from row to row

template <class T>
struct Problem {
  View<T> query, key, value;
  Sight<T> sight;
  float scale;
  Sizes n;
  Dropout dropout;
};

// One head of a problem.
template <class T>
struct Head {
  const Problem<T>& of;
  int64_t index;
  int64_t batch() const { return index / of.n.heads; }
  T* rows(const View<T>& view, int64_t row) const {
    return view.at(batch(), index % of.n.heads) + row * view.row;
  }
  Range seen(int64_t query) const {
    return attention::seen(of.sight.hiding, of.sight.positions(batch(), of.n.queries), query,
                           of.n.keys);
  }
  // The keys that any of some queries sees, in whole panels.
  Range seen_by(int64_t query, int64_t rows) const {
    const Extent extent = extent_of(of.sight.hiding, of.sight.positions(batch(), of.n.queries),
                                    query, std::min(rows, of.n.queries - query), of.n.keys);
    return {extent.begin, extent.end};
  }
};

// What lies in both, from the beginning of the second one on.
static inline Range within(const Range& range, int64_t begin, int64_t length) {
  const int64_t first = std::clamp<int64_t>(range.begin - begin, 0, length);
  return {first, std::clamp(range.end - begin, first, length)};
}

// A block's rows: 32 queries, and the keys of a block that they see, in panels.
struct Rows {
  int64_t query, count, key;  // the first key of the block
  Range keys;                 // of the block
};

template <class T>
static Rows rows_of(const Head<T>& head, int64_t query, int64_t key, int64_t length) {
  const Sizes& n = head.of.n;
  return {query, std::min(PANEL, n.queries - query), key,
          within(head.seen_by(query, PANEL), key, std::min(length, n.keys - key))};
}

// What 32 queries of a view make with keys of a block, of which right panels are packed.
template <class Way, class T>
static void multiply_rows(const Head<T>& head, const View<T>& left, const Rows& rows,
                          const typename Way::Packed* right, float* sums,
                          typename Way::Packed* panel) {
  const int64_t width = head.of.n.width;
  const auto of_rows =
      Way::left({head.rows(left, rows.query), left.row, 1, rows.count}, 0, width, panel);
  for (int64_t k = rows.keys.begin; k < rows.keys.end; k += PANEL)
    Way::multiply(of_rows, right + (rows.key + k) * padded(width), width, sums + k, STRIDE);
}

// left @ right, added to 32 rows of padded(width) sums. stride: from right panel to right panel.
template <class Way, class T>
static void add_product(const Matrix<T>& left, const Range& k, const typename Way::Packed* right,
                        int64_t stride, int64_t width, float* sums, typename Way::Packed* panel) {
  const auto of_rows = Way::left(left, k.begin, k.end, panel);
  for (int64_t d = 0; d < width; d += PANEL, right += stride)
    Way::template multiply<true>(of_rows, right, k.end - k.begin, sums + d, padded(width));
}

// The softmax of a query, so far.
struct Softmax {
  float most = -INFINITY, sum = 0.0f;

  // Products become exponentials of scores less the largest one. The factor for what was added up
  // before.
  template <class T>
  float add(float* x, int64_t count, float scale, float cap, T) {
    const float before = most;
    most = larger(bounded(x, count, scale, cap), before);
    const float shift = most == -INFINITY ? 0.0f : most;
    const float factor = most == before ? 1.0f : decay(before - shift, T{});
    sum = sum * factor + exponentials<T>(x, shift, count);
    return factor;
  }
};

// Zeros in a row where a range is not within another.
template <class T>
static inline void clear_outside(T* row, const Range& range, const Range& all) {
  std::fill(row + all.begin, row + range.begin, T{});
  std::fill(row + range.end, row + all.end, T{});
}

// What dropout leaves of a row's keys.
template <class T>
static void drop_row(const Head<T>& head, const Rows& rows, int64_t r, float* row) {
  float* const at = row + rows.keys.begin;
  drop(at, at, {rows.key + rows.keys.begin, rows.key + rows.keys.end}, head.of.n, head.index,
       rows.query + r, head.of.dropout);
}

// Memory of a thread, or of all, that parts are taken from, each at a boundary of LINE bytes.
constexpr int64_t LINE = 64;

struct Memory {
  char* at;
  explicit Memory(void* from)
      : at(static_cast<char*>(from) + -reinterpret_cast<uintptr_t>(from) % LINE) {}
  template <class T>
  T* take(int64_t count) {
    T* const taken = reinterpret_cast<T*>(at);
    at += ceil_div(count * int64_t(sizeof(T)), LINE) * LINE;
    return taken;
  }
};

// float32 numbers whose memory such elements fit in, wherever it begins.
template <class Packed>
static int64_t in_numbers(int64_t count) {
  return (count * int64_t(sizeof(Packed)) + LINE) / int64_t(sizeof(float));
}

// Packed right operands of a head: rows as columns, whose k are features; or features as columns,
// whose k are rows.
template <class Way, class T>
static void pack_rows(const Head<T>& head, const View<T>& view, int64_t row, int64_t rows,
                      typename Way::Packed* to) {
  const int64_t width = head.of.n.width, count = std::min(BLOCK, rows - row);
  for (int64_t p = 0; p * PANEL < count; ++p)
    Way::pack_right({head.rows(view, row), view.row, 1, count}, p, width,
                    to + (row + p * PANEL) * padded(width));
}

template <class Way, class T>
static void pack_features(const Head<T>& head, const View<T>& view, int64_t row, int64_t rows,
                          typename Way::Packed* to) {
  const int64_t width = head.of.n.width, count = std::min(BLOCK, rows - row);
  for (int64_t p = 0; p * PANEL < width; ++p)
    Way::pack_right({head.rows(view, row), 1, view.row, width}, p, count,
                    to + (p * padded(rows) + row) * PANEL);
}

// Sums of a block's rows, each times a factor, into rows of a result.
template <class T, class Factor>
static void store_rows(float* sums, int64_t rows, int64_t width, const View<T>& to, T* at,
                       const Factor& factor) {
  for (int64_t i = 0; i < rows; ++i, sums += padded(width), at += to.row) {
    const float by = factor(i);
    in_lanes(width, [=](auto n, int64_t j) { store(load_as<decltype(n)>(sums + j) * by, at + j); });
  }
}

// What a thread works with.
template <class Way, class T>
struct Own {
  using Packed = typename Way::Packed;
  float *scores, *d_probs, *kept;  // of 32 queries; kept: by dropout, of one
  float *sums, *more_sums;         // of a block
  T *factors, *d_scores;           // of a block
  Packed* panel;
  explicit Own(int64_t width) {
    thread_local Workspace workspace;
    const int64_t rows = BLOCK * STRIDE, columns = BLOCK * padded(width);
    const int64_t numbers = 2 * PANEL * STRIDE + BLOCK + 2 * columns;
    Memory memory{workspace.take<char>(numbers * int64_t(sizeof(float)) +
                                       2 * rows * int64_t(sizeof(T)) +
                                       PANEL * (SPAN + padded(width)) * int64_t(sizeof(Packed)))};
    scores = memory.take<float>(PANEL * STRIDE);
    d_probs = memory.take<float>(PANEL * STRIDE);
    kept = memory.take<float>(BLOCK);
    sums = memory.take<float>(columns);
    more_sums = memory.take<float>(columns);
    factors = memory.take<T>(rows);
    d_scores = memory.take<T>(rows);
    panel = memory.take<Packed>(PANEL * (SPAN + padded(width)));
  }
};

}  // namespace attention
