// Attention of long sequences, and its gradient, in blocks of queries and keys that stay in the
// cache: memory is linear in both. Softmax keeps the largest score and the sum of each query while
// it goes from block to block (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023,
// arXiv:2307.08691). Threads share one head after the other; the order of every sum is that of the
// blocks, whoever computes them.
#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "attention_ways.h"

namespace attention {

constexpr int64_t BLOCK = 128;             // queries or keys
constexpr int64_t STRIDE = BLOCK + PANEL;  // numbers from row to row of a block
constexpr int64_t SPINS = 200;             // of a thread that waits, before it lets others run

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
static Rows rows_of(const Head<T>& head, int64_t query, int64_t key) {
  const Sizes& n = head.of.n;
  return {query, std::min(PANEL, n.queries - query), key,
          within(head.seen_by(query, PANEL), key, std::min(BLOCK, n.keys - key))};
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
                                       PANEL * (BLOCK + padded(width)) * int64_t(sizeof(Packed)))};
    scores = memory.take<float>(PANEL * STRIDE);
    d_probs = memory.take<float>(PANEL * STRIDE);
    kept = memory.take<float>(BLOCK);
    sums = memory.take<float>(columns);
    more_sums = memory.take<float>(columns);
    factors = memory.take<T>(rows);
    d_scores = memory.take<T>(rows);
    panel = memory.take<Packed>(PANEL * (BLOCK + padded(width)));
  }
};

// Forward

template <class Way, class T>
struct Forward {
  using Packed = typename Way::Packed;
  using Scope = typename Way::Scope;
  const Problem<T>& of;
  const View<T>& y;
  Packed *keys, *values;

  // Numbers that are needed beside operands.
  static int64_t scratch(const Sizes& n) {
    return in_numbers<Packed>(2 * padded(n.keys) * padded(n.width));
  }

  Forward(const Problem<T>& of, const View<T>& y, float* scratch) : of(of), y(y) {
    Memory memory{scratch};
    keys = memory.take<Packed>(padded(of.n.keys) * padded(of.n.width));
    values = memory.take<Packed>(padded(of.n.keys) * padded(of.n.width));
  }

  // All threads of a parallel part.
  void attend(const Head<T>& head) {
    const Own<Way, T> own(of.n.width);
#pragma omp for schedule(static)
    for (int64_t k = 0; k < of.n.keys; k += BLOCK) {
      pack_rows<Way>(head, of.key, k, of.n.keys, keys);
      pack_features<Way>(head, of.value, k, of.n.keys, values);
    }
#pragma omp for schedule(dynamic)
    for (int64_t q = 0; q < of.n.queries; q += BLOCK) attend_queries(head, q, own);
  }

 private:
  void attend_queries(const Head<T>& head, int64_t q, const Own<Way, T>& own) const {
    const int64_t width = padded(of.n.width), count = std::min(BLOCK, of.n.queries - q);
    Softmax softmax[BLOCK];
    std::fill_n(own.sums, BLOCK * width, 0.0f);
    const Range seen = head.seen_by(q, BLOCK);
    for (int64_t k = seen.begin / BLOCK * BLOCK; k < seen.end; k += BLOCK)
      for (int64_t i = 0; i < count; i += PANEL) {
        const Rows rows = rows_of(head, q + i, k);
        if (rows.keys.begin == rows.keys.end) continue;
        float* const sums = own.sums + i * width;
        multiply_rows<Way>(head, of.query, rows, keys, own.scores, own.panel);
        for (int64_t r = 0; r < rows.count; ++r)
          add_row(head, rows, r, softmax[i + r], own, sums + r * width);
        add_product<Way, T>({own.factors, STRIDE, 1, rows.count}, rows.keys,
                            values + (k + rows.keys.begin) * PANEL, padded(of.n.keys) * PANEL,
                            of.n.width, sums, own.panel);
      }
    store_rows(own.sums, count, of.n.width, y, head.rows(y, q),
               [&](int64_t i) { return 1.0f / softmax[i].sum; });
  }

  void add_row(const Head<T>& head, const Rows& rows, int64_t r, Softmax& softmax,
               const Own<Way, T>& own, float* sums) const {
    const Range seen = within(head.seen(rows.query + r), rows.key, rows.keys.end);
    float* const x = own.scores + r * STRIDE;
    const float before =
        softmax.add(x + seen.begin, seen.end - seen.begin, of.scale, of.sight.hiding.softcap, T{});
    if (before != 1.0f)
      in_lanes(of.n.width, [=](auto n, int64_t j) {
        store(load_as<decltype(n)>(sums + j) * before, sums + j);
      });
    clear_outside(x, seen, rows.keys);
    if (of.dropout.parts > 0) drop_row(head, rows, r, x);
    const Range keys = rows.keys;
    narrow(x + keys.begin, own.factors + r * STRIDE + keys.begin, keys.end - keys.begin);
  }
};

// Gradient

template <class Way, class T>
struct Backward {
  using Packed = typename Way::Packed;
  using Scope = typename Way::Scope;
  const Problem<T>& of;
  const View<T>&dy, &d_query, &d_key, &d_value;
  Packed *values, *keys, *keys_by_feature, *queries_by_feature, *dy_by_feature;
  float* d_queries;              // [queries, width]
  float *most, *inverse, *mean;  // of each query's scores, exponentials and their gradients
  std::vector<Range> ranges;     // of the keys that each block of queries sees
  std::vector<std::atomic<int64_t>> progress;  // queries that have what a block of keys adds
  std::atomic<int64_t> next{0};                // block of keys

  static int64_t scratch(const Sizes& n) {
    const int64_t width = padded(n.width), queries = padded(n.queries);
    return in_numbers<Packed>((3 * padded(n.keys) + 2 * queries) * width) + (width + 3) * queries;
  }

  Backward(const Problem<T>& of, const View<T>& dy, const View<T>& d_query, const View<T>& d_key,
           const View<T>& d_value, float* scratch)
      : of(of),
        dy(dy),
        d_query(d_query),
        d_key(d_key),
        d_value(d_value),
        ranges(ceil_div(of.n.queries, BLOCK)),
        progress(ceil_div(of.n.keys, BLOCK)) {
    Memory memory{scratch};
    const int64_t width = padded(of.n.width), queries = padded(of.n.queries);
    for (Packed** each : {&values, &keys, &keys_by_feature})
      *each = memory.take<Packed>(padded(of.n.keys) * width);
    for (Packed** each : {&queries_by_feature, &dy_by_feature})
      *each = memory.take<Packed>(queries * width);
    d_queries = memory.take<float>(queries * width);
    for (float** each : {&most, &inverse, &mean}) *each = memory.take<float>(queries);
  }

  // All threads of a parallel part.
  void attend(const Head<T>& head) {
    const Own<Way, T> own(of.n.width);
    const int64_t width = padded(of.n.width);
#pragma omp for schedule(static)
    for (int64_t k = 0; k < of.n.keys; k += BLOCK) {
      pack_rows<Way>(head, of.value, k, of.n.keys, values);
      pack_rows<Way>(head, of.key, k, of.n.keys, keys);
      pack_features<Way>(head, of.key, k, of.n.keys, keys_by_feature);
      progress[k / BLOCK] = 0;
    }
#pragma omp for schedule(dynamic)
    for (int64_t q = 0; q < of.n.queries; q += BLOCK) {
      pack_features<Way>(head, of.query, q, of.n.queries, queries_by_feature);
      pack_features<Way>(head, dy, q, of.n.queries, dy_by_feature);
      std::fill_n(d_queries + q * width, std::min(BLOCK, padded(of.n.queries - q)) * width, 0.0f);
      ranges[q / BLOCK] = head.seen_by(q, BLOCK);
      look_at_queries(head, q, own);
    }
#pragma omp single
    next = 0;
    for (int64_t block; (block = next++) < int64_t(progress.size());)
      attend_to_keys(head, block * BLOCK, own);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t q = 0; q < of.n.queries; q += BLOCK)
      store_rows(d_queries + q * width, std::min(BLOCK, of.n.queries - q), of.n.width, d_query,
                 head.rows(d_query, q), [](int64_t) { return 1.0f; });
  }

 private:
  void look_at_queries(const Head<T>& head, int64_t q, const Own<Way, T>& own) const {
    const int64_t count = std::min(BLOCK, of.n.queries - q);
    Softmax softmax[BLOCK];
    std::fill_n(mean + q, count, 0.0f);
    const Range seen = ranges[q / BLOCK];
    for (int64_t k = seen.begin / BLOCK * BLOCK; k < seen.end; k += BLOCK)
      for (int64_t i = 0; i < count; i += PANEL) {
        const Rows rows = rows_of(head, q + i, k);
        if (rows.keys.begin == rows.keys.end) continue;
        multiply_rows<Way>(head, of.query, rows, keys, own.scores, own.panel);
        multiply_rows<Way>(head, dy, rows, values, own.d_probs, own.panel);
        for (int64_t r = 0; r < rows.count; ++r) look_at_row(head, rows, r, softmax[i + r], own);
      }
    for (int64_t i = 0; i < count; ++i) {
      most[q + i] = softmax[i].most;
      inverse[q + i] = 1.0f / softmax[i].sum;
      mean[q + i] *= inverse[q + i];
    }
  }

  void look_at_row(const Head<T>& head, const Rows& rows, int64_t r, Softmax& softmax,
                   const Own<Way, T>& own) const {
    const Range seen = within(head.seen(rows.query + r), rows.key, rows.keys.end);
    const int64_t length = seen.end - seen.begin;
    float *const x = own.scores + r * STRIDE + seen.begin, *const d = own.d_probs + r * STRIDE;
    const float before = softmax.add(x, length, of.scale, of.sight.hiding.softcap, T{});
    if (of.dropout.parts > 0) drop_row(head, rows, r, d);
    float& sum = mean[rows.query + r];
    sum = sum * before + dot(x, d + seen.begin, length);
  }

  void attend_to_keys(const Head<T>& head, int64_t k, const Own<Way, T>& own) {
    const int64_t width = padded(of.n.width), length = std::min(BLOCK, of.n.keys - k);
    std::fill_n(own.sums, BLOCK * width, 0.0f);
    std::fill_n(own.more_sums, BLOCK * width, 0.0f);
    for (int64_t q = 0; q < of.n.queries; q += BLOCK) {
      const Range seen = within(ranges[q / BLOCK], k, length);
      if (seen.begin == seen.end) continue;
      add_queries(head, k, q, length, own);
      progress[k / BLOCK].store(q + 1, std::memory_order_release);
    }
    const auto whole = [](int64_t) { return 1.0f; };
    store_rows(own.sums, length, of.n.width, d_key, head.rows(d_key, k), whole);
    store_rows(own.more_sums, length, of.n.width, d_value, head.rows(d_value, k), whole);
    wait(k, of.n.queries - 1);
    progress[k / BLOCK].store(of.n.queries, std::memory_order_release);
  }

  // Until the keys before those of a block have added to a query.
  void wait(int64_t k, int64_t query) const {
    if (k == 0) return;
    const std::atomic<int64_t>& before = progress[k / BLOCK - 1];
    for (int64_t n = 0; before.load(std::memory_order_acquire) <= query; ++n)
      if (n >= SPINS) std::this_thread::yield();
  }

  void add_queries(const Head<T>& head, int64_t k, int64_t q, int64_t length,
                   const Own<Way, T>& own) const {
    const int64_t width = padded(of.n.width), queries = padded(of.n.queries),
                  count = std::min(BLOCK, of.n.queries - q);
    Rows panels[BLOCK / PANEL];
    for (int64_t i = 0; i < count; i += PANEL) {
      Rows& rows = panels[i / PANEL] = rows_of(head, q + i, k);
      multiply_rows<Way>(head, of.query, rows, keys, own.scores, own.panel);
      multiply_rows<Way>(head, dy, rows, values, own.d_probs, own.panel);
      for (int64_t r = 0; r < rows.count; ++r)
        differentiate(head, rows, r, length, own, own.factors + (i + r) * STRIDE,
                      own.d_scores + (i + r) * STRIDE);
    }
    for (int64_t c = 0; c < length; c += PANEL) {
      const auto sees = [&](int64_t i) {
        const Range& seen = panels[i / PANEL].keys;
        return seen.begin <= c && c < seen.end;
      };
      int64_t first = 0, last = count;
      while (first < count && !sees(first)) first += PANEL;
      while (last > first && !sees(last - 1)) last = (last - 1) / PANEL * PANEL;
      if (first >= last) continue;
      const int64_t rows = std::min(PANEL, length - c), at = (q + first) * PANEL;
      add_product<Way, T>({own.d_scores + c, 1, STRIDE, rows}, {first, last},
                          queries_by_feature + at, queries * PANEL, of.n.width,
                          own.sums + c * width, own.panel);
      add_product<Way, T>({own.factors + c, 1, STRIDE, rows}, {first, last}, dy_by_feature + at,
                          queries * PANEL, of.n.width, own.more_sums + c * width, own.panel);
    }
    wait(k, q);
    for (int64_t i = 0; i < count; i += PANEL) {
      const Rows& rows = panels[i / PANEL];
      if (rows.keys.begin == rows.keys.end) continue;
      add_product<Way, T>({own.d_scores + i * STRIDE, STRIDE, 1, rows.count}, rows.keys,
                          keys_by_feature + (k + rows.keys.begin) * PANEL,
                          padded(of.n.keys) * PANEL, of.n.width, d_queries + (q + i) * width,
                          own.panel);
    }
  }

  // A query's probabilities, as they are multiplied with values, and gradients of its scores.
  void differentiate(const Head<T>& head, const Rows& rows, int64_t r, int64_t length,
                     const Own<Way, T>& own, T* factors, T* d_scores) const {
    const int64_t query = rows.query + r;
    const Range seen = within(head.seen(query), rows.key, rows.keys.end);
    const bool drops = of.dropout.parts > 0;
    if (drops) {
      std::fill_n(own.kept, BLOCK, 1.0f);
      drop_row(head, rows, r, own.kept);
    }
    const float *const x = own.scores + r * STRIDE + seen.begin,
                       *const d = own.d_probs + r * STRIDE + seen.begin,
                       *const kept = own.kept + seen.begin;
    const float scale = of.scale, cap = of.sight.hiding.softcap, largest = most[query],
                by = inverse[query], less = mean[query];
    T *const factor = factors + seen.begin, *const d_score = d_scores + seen.begin;
    in_lanes(seen.end - seen.begin, [=](auto n, int64_t j) {
      using N = decltype(n);
      N score = load_as<N>(x + j) * scale, d_prob = load_as<N>(d + j);
      N slope{};
      if (cap != 0.0f) {
        score = each(score, softcap(cap));
        slope = each(score, softcap_slope(cap)) * scale;
      }
      const N prob = each(score - largest, [](auto at) { return decay(at, T{}); }) * by;
      N used = prob;
      if (drops) {
        used = prob * load_as<N>(kept + j);
        d_prob = d_prob * load_as<N>(kept + j);
      }
      store(used, factor + j);
      d_prob = prob * (d_prob - less);
      if (cap != 0.0f)
        store(d_prob * slope, d_score + j);
      else
        store(d_prob * scale, d_score + j);
    });
    clear_outside(factors, seen, {0, length});
    clear_outside(d_scores, seen, {0, length});
  }
};

// Heads one after the other, each by all threads.
template <class Work>
static void for_heads(Work& work, int threads) {
  const Sizes& n = work.of.n;
#pragma omp parallel num_threads(threads) if (threads > 1 && n.multiply_adds() > SMALL)
  {
    [[maybe_unused]] const typename Work::Scope scope;
    for (int64_t head = 0; head < n.batch * n.heads; ++head) work.attend({work.of, head});
  }
}

}  // namespace attention

extern "C" {

#define VIEW(T, NAME) T *NAME, int64_t NAME##_batch, int64_t NAME##_head, int64_t NAME##_row
#define AS_VIEW(T, NAME) \
  attention::View<T> { NAME, NAME##_batch, NAME##_head, NAME##_row }
#define PROBLEM(T)                                                \
  attention::Problem<T> {                                         \
    AS_VIEW(T, query), AS_VIEW(T, key), AS_VIEW(T, value),        \
        {nullptr, {positions, diagonal, window, softcap}}, scale, \
        {batch, heads, queries, keys, width}, {                   \
      seeds, parts, threshold, drop_scale                         \
    }                                                             \
  }

// scratch: as many numbers as the functions that are named so say.
#define ATTENTION(T, NAME, ...)                                                                  \
  int64_t attend_blocks_scratch_##NAME(int64_t keys, int64_t width, int) {                       \
    return attention::Forward<__VA_ARGS__>::scratch({1, 1, 0, keys, width});                     \
  }                                                                                              \
  int64_t attend_blocks_grad_scratch_##NAME(int64_t queries, int64_t keys, int64_t width, int) { \
    return attention::Backward<__VA_ARGS__>::scratch({1, 1, queries, keys, width});              \
  }                                                                                              \
  void attend_blocks_##NAME(                                                                     \
      VIEW(T, query), VIEW(T, key), VIEW(T, value), const int32_t* positions, int64_t diagonal,  \
      int64_t window, float softcap, float scale, VIEW(T, y), int64_t batch, int64_t heads,      \
      int64_t queries, int64_t keys, int64_t width, const uint64_t* seeds, int64_t parts,        \
      int64_t threshold, float drop_scale, float* scratch, int threads) {                        \
    const auto of = PROBLEM(T);                                                                  \
    const auto to = AS_VIEW(T, y);                                                               \
    attention::Forward<__VA_ARGS__> work(of, to, scratch);                                       \
    attention::for_heads(work, threads);                                                         \
  }                                                                                              \
  void attend_blocks_grad_##NAME(                                                                \
      VIEW(T, dy), VIEW(T, query), VIEW(T, key), VIEW(T, value), const int32_t* positions,       \
      int64_t diagonal, int64_t window, float softcap, float scale, VIEW(T, d_query),            \
      VIEW(T, d_key), VIEW(T, d_value), int64_t batch, int64_t heads, int64_t queries,           \
      int64_t keys, int64_t width, const uint64_t* seeds, int64_t parts, int64_t threshold,      \
      float drop_scale, float* scratch, int threads) {                                           \
    const auto of = PROBLEM(T);                                                                  \
    const auto from = AS_VIEW(T, dy);                                                            \
    const auto for_query = AS_VIEW(T, d_query), for_key = AS_VIEW(T, d_key),                     \
               for_value = AS_VIEW(T, d_value);                                                  \
    attention::Backward<__VA_ARGS__> work(of, from, for_query, for_key, for_value, scratch);     \
    attention::for_heads(work, threads);                                                         \
  }

ATTENTION(float, f32, attention::ByVectors<float>, float)
#ifdef HAS_TILES
ATTENTION(bfloat16, bf16, attention::ByTiles, bfloat16)
#else
ATTENTION(bfloat16, bf16, attention::ByVectors<bfloat16>, bfloat16)
#endif
}
