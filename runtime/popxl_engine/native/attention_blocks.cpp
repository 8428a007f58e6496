// Attention of long sequences, and its gradient, in blocks of queries and keys that stay in the
// cache: memory is linear in both. Softmax keeps the largest score and the sum of each query while
// it goes from block to block (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023,
// arXiv:2307.08691). The order of every sum is that of the blocks, whoever computes them.
#include "attention_blocks.h"

#include <atomic>
#include <deque>
#include <thread>
#include <vector>

#include "workers.h"

namespace attention {

// Calls work(first) for a worker's part of all blocks.
template <class Work>
static void for_own_blocks(int64_t length, const Worker& worker, const Work& work) {
  const int64_t blocks = ceil_div(length, BLOCK);
  for (int64_t i = worker.first(blocks); i < worker.end(blocks); ++i) work(i * BLOCK);
}

// Calls work(first) for blocks that no other worker has begun.
template <class Work>
static void for_next_blocks(int64_t length, std::atomic<int64_t>& next, const Work& work) {
  for (int64_t i; (i = next++) < ceil_div(length, BLOCK);) work(i * BLOCK);
}

// Forward

template <class Way, class T>
struct Forward {
  using Packed = typename Way::Packed;
  using Scope = typename Way::Scope;
  const Problem<T>& of;
  const View<T>& y;
  Packed *keys, *values;
  std::atomic<int64_t> next{0};  // block of queries

  // Numbers that are needed beside operands.
  static int64_t scratch(const Sizes& n) {
    return in_numbers<Packed>(2 * padded(n.keys) * padded(n.width));
  }

  Forward(const Problem<T>& of, const View<T>& y, float* scratch) : of(of), y(y) {
    Memory memory{scratch};
    keys = memory.take<Packed>(padded(of.n.keys) * padded(of.n.width));
    values = memory.take<Packed>(padded(of.n.keys) * padded(of.n.width));
  }

  // By each thread of a team.
  void attend(const Head<T>& head, const Worker& worker) {
    const Own<Way, T> own(of.n.width);
    for_own_blocks(of.n.keys, worker, [&](int64_t k) {
      pack_rows<Way>(head, of.key, k, of.n.keys, keys);
      pack_features<Way>(head, of.value, k, of.n.keys, values);
    });
    if (worker.index == 0) next = 0;
    worker.barrier.wait();
    for_next_blocks(of.n.queries, next, [&](int64_t q) { attend_queries(head, q, own); });
    worker.barrier.wait();
  }

 private:
  void attend_queries(const Head<T>& head, int64_t q, const Own<Way, T>& own) const {
    const int64_t width = padded(of.n.width), count = std::min(BLOCK, of.n.queries - q);
    Softmax softmax[BLOCK];
    std::fill_n(own.sums, BLOCK * width, 0.0f);
    const Range seen = head.seen_by(q, BLOCK);
    for (int64_t k = seen.begin; k < seen.end; k += SPAN)
      for (int64_t i = 0; i < count; i += PANEL) {
        const Rows rows = rows_of(head, q + i, k, SPAN);
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
  std::atomic<int64_t> next_queries{0}, next_keys{0};  // blocks

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

  // By each thread of a team.
  void attend(const Head<T>& head, const Worker& worker) {
    const Own<Way, T> own(of.n.width);
    const int64_t width = padded(of.n.width);
    for_own_blocks(of.n.keys, worker, [&](int64_t k) {
      pack_rows<Way>(head, of.value, k, of.n.keys, values);
      pack_rows<Way>(head, of.key, k, of.n.keys, keys);
      pack_features<Way>(head, of.key, k, of.n.keys, keys_by_feature);
      progress[k / BLOCK] = 0;
    });
    if (worker.index == 0) next_queries = next_keys = 0;
    worker.barrier.wait();
    for_next_blocks(of.n.queries, next_queries, [&](int64_t q) {
      pack_features<Way>(head, of.query, q, of.n.queries, queries_by_feature);
      pack_features<Way>(head, dy, q, of.n.queries, dy_by_feature);
      std::fill_n(d_queries + q * width, std::min(BLOCK, padded(of.n.queries - q)) * width, 0.0f);
      ranges[q / BLOCK] = head.seen_by(q, BLOCK);
      look_at_queries(head, q, own);
    });
    worker.barrier.wait();
    for_next_blocks(of.n.keys, next_keys, [&](int64_t k) { attend_to_keys(head, k, own); });
    worker.barrier.wait();
    for_own_blocks(of.n.queries, worker, [&](int64_t q) {
      store_rows(d_queries + q * width, std::min(BLOCK, of.n.queries - q), of.n.width, d_query,
                 head.rows(d_query, q), [](int64_t) { return 1.0f; });
    });
    worker.barrier.wait();
  }

 private:
  void look_at_queries(const Head<T>& head, int64_t q, const Own<Way, T>& own) const {
    const int64_t count = std::min(BLOCK, of.n.queries - q);
    Softmax softmax[BLOCK];
    std::fill_n(mean + q, count, 0.0f);
    const Range seen = ranges[q / BLOCK];
    for (int64_t k = seen.begin; k < seen.end; k += SPAN)
      for (int64_t i = 0; i < count; i += PANEL) {
        const Rows rows = rows_of(head, q + i, k, SPAN);
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
      Rows& rows = panels[i / PANEL] = rows_of(head, q + i, k, BLOCK);
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

// Teams of threads: each thread of a team has work for some blocks of a head.
struct Teams {
  int64_t count, size, threads;
  Teams(const Sizes& n, int64_t threads) : threads(threads) {
    const int64_t most = std::clamp<int64_t>(ceil_div(n.queries, BLOCK) / 4, 1, threads);
    count = std::clamp<int64_t>(threads / most, 1, std::max<int64_t>(1, n.batch * n.heads));
    size = threads / count;
  }
  int64_t of(int64_t thread) const { return std::min(thread / size, count - 1); }
  // Threads of a team; the last one has those that are left.
  int64_t members(int64_t team) const {
    return team < count - 1 ? size : threads - size * (count - 1);
  }
};

// Numbers that are needed beside operands.
template <class Work>
static int64_t scratch_of(const Sizes& n, int threads) {
  return Teams(n, threads).count * Work::scratch(n);
}

// Each team works on one head after the other.
template <class Work, class... Operands>
static void share(const Sizes& n, int threads, float* scratch, const Operands&... operands) {
  std::deque<Work> works;
  std::deque<Barrier> barriers;
  on_workers(n.multiply_adds() > SMALL ? threads : 1, [&](const Worker& worker) {
    const Teams teams(n, worker.count);
    if (worker.index == 0)
      for (int64_t team = 0; team < teams.count; ++team) {
        works.emplace_back(operands..., scratch + team * Work::scratch(n));
        barriers.emplace_back(int(teams.members(team)));
      }
    worker.barrier.wait();
    const int64_t team = teams.of(worker.index);
    const Worker member{barriers[team], int(worker.index - team * teams.size),
                        int(teams.members(team))};
    Work& work = works[team];
    [[maybe_unused]] const typename Work::Scope scope;
    for (int64_t head = team; head < n.batch * n.heads; head += teams.count)
      work.attend({work.of, head}, member);
  });
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
#define ATTENTION(T, NAME, ...)                                                                 \
  int64_t attend_blocks_scratch_##NAME(int64_t heads, int64_t queries, int64_t keys,            \
                                       int64_t width, int threads) {                            \
    return attention::scratch_of<attention::Forward<__VA_ARGS__>>(                              \
        {1, heads, queries, keys, width}, threads);                                             \
  }                                                                                             \
  int64_t attend_blocks_grad_scratch_##NAME(int64_t heads, int64_t queries, int64_t keys,       \
                                            int64_t width, int threads) {                       \
    return attention::scratch_of<attention::Backward<__VA_ARGS__>>(                             \
        {1, heads, queries, keys, width}, threads);                                             \
  }                                                                                             \
  void attend_blocks_##NAME(                                                                    \
      VIEW(T, query), VIEW(T, key), VIEW(T, value), const int32_t* positions, int64_t diagonal, \
      int64_t window, float softcap, float scale, VIEW(T, y), int64_t batch, int64_t heads,     \
      int64_t queries, int64_t keys, int64_t width, const uint64_t* seeds, int64_t parts,       \
      int64_t threshold, float drop_scale, float* scratch, int threads) {                       \
    const auto of = PROBLEM(T);                                                                 \
    const auto to = AS_VIEW(T, y);                                                              \
    attention::share<attention::Forward<__VA_ARGS__>>(of.n, threads, scratch, of, to);          \
  }                                                                                             \
  void attend_blocks_grad_##NAME(                                                               \
      VIEW(T, dy), VIEW(T, query), VIEW(T, key), VIEW(T, value), const int32_t* positions,      \
      int64_t diagonal, int64_t window, float softcap, float scale, VIEW(T, d_query),           \
      VIEW(T, d_key), VIEW(T, d_value), int64_t batch, int64_t heads, int64_t queries,          \
      int64_t keys, int64_t width, const uint64_t* seeds, int64_t parts, int64_t threshold,     \
      float drop_scale, float* scratch, int threads) {                                          \
    const auto of = PROBLEM(T);                                                                 \
    const auto from = AS_VIEW(T, dy);                                                           \
    const auto for_query = AS_VIEW(T, d_query), for_key = AS_VIEW(T, d_key),                    \
               for_value = AS_VIEW(T, d_value);                                                 \
    attention::share<attention::Backward<__VA_ARGS__>>(of.n, threads, scratch, of, from,        \
                                                       for_query, for_key, for_value);          \
  }

#ifndef BFLOAT16_LIBRARY
ATTENTION(float, f32, attention::ByVectors<float>, float)
#elif defined(HAS_TILES)
ATTENTION(bfloat16, bf16, attention::ByTiles, bfloat16)
#else
ATTENTION(bfloat16, bf16, attention::ByVectors<bfloat16>, bfloat16)
#endif
}
