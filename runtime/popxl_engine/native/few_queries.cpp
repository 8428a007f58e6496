// Softmax attention of a few queries to many keys, with a mask for each sequence: reading keys and
// values limits it, so they are read once, as they lie.
#include <vector>

#include "attention_rows.h"
#include "pieces.h"

namespace {

// [batch, heads, rows, columns] with a stride of 1 for columns.
template <class T>
struct View {
  T* data;
  int64_t batch, head, row;
  T* at(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * row; }
};

struct Sizes {
  int64_t batch, heads, queries, keys, width;  // width: of a head
};

// One past the last key that a mask leaves to be seen.
template <class T>
int64_t seen(const T* mask, int64_t keys) {
  while (keys > 0 && wide(mask[keys - 1]) == -INFINITY) --keys;
  return keys;
}

// probs = softmax(query @ key.T * scale + mask), y = probs @ value, of one query. scores: as many
// numbers as keys; sums: as many as a head is wide, as is `query`.
template <class T>
void attend_row(const float* query, const T* key, int64_t key_row, const T* value,
                int64_t value_row, const T* mask, float scale, const Sizes& n, float* scores,
                float* sums, T* probs, T* y) {
  const int64_t end = seen(mask, n.keys);
  for (int64_t s = 0; s < end; ++s) scores[s] = attention::dot(key + s * key_row, query, n.width);
  const float largest = attention::masked(scores, scale, 0.0f, mask, {0, 0, end});
  const bool sees = largest != -INFINITY;
  const float inverse = sees ? 1.0f / attention::exponentials<T>(scores, largest, end) : NAN;
  std::fill_n(sums, n.width, 0.0f);
  for (int64_t s = 0; s < end; ++s) {
    const float factor = scores[s] *= inverse;
    in_lanes(n.width, [=, row = value + s * value_row](auto number, int64_t i) {
      using N = decltype(number);
      store(fused(load_as<N>(row + i), factor, load_as<N>(sums + i)), sums + i);
    });
  }
  std::fill(scores + (sees ? end : 0), scores + n.keys, 0.0f * inverse);
  if (!sees) std::fill_n(sums, n.width, NAN);
  narrow(scores, probs, n.keys);
  narrow(sums, y, n.width);
}

template <class T>
void attend_few(const View<const T>& query, const View<const T>& key, const View<const T>& value,
                const View<const T>& mask, float scale, T* probs, T* y, const Sizes& n,
                int threads) {
  // what limits is reading, which threads share sooner
  const int taken = n.batch * n.heads * n.keys * n.width > SMALL / 8 ? threads : 1;
  in_pieces(n.batch * n.heads, 1, taken, [=](int64_t head, int64_t) {
    const int64_t b = head / n.heads, h = head % n.heads;
    std::vector<float> memory(std::size_t(n.keys + 2 * n.width));
    float *const scores = memory.data(), *const sums = scores + n.keys,
                 *const wide_query = sums + n.width;
    for (int64_t q = 0; q < n.queries; ++q) {
      const int64_t row = head * n.queries + q;
      const T* const narrow_query = query.at(b, h, q);
      for (int64_t i = 0; i < n.width; ++i) wide_query[i] = wide(narrow_query[i]);
      attend_row(wide_query, key.at(b, h, 0), key.row, value.at(b, h, 0), value.row,
                 mask.at(b, h, q), scale, n, scores, sums, probs + row * n.keys, y + row * n.width);
    }
  });
}

}  // namespace

extern "C" {

#define VIEW(T, NAME) T *NAME, int64_t NAME##_batch, int64_t NAME##_head, int64_t NAME##_row
#define AS_VIEW(T, NAME) \
  View<T> { NAME, NAME##_batch, NAME##_head, NAME##_row }

// probs [batch, heads, queries, keys] and y [batch, heads, queries, width] in order.
#define FOR_TYPE(T, NAME)                                                                        \
  void attend_few_##NAME(VIEW(const T, query), VIEW(const T, key), VIEW(const T, value),         \
                         VIEW(const T, mask), float scale, T* probs, T* y, int64_t batch,        \
                         int64_t heads, int64_t queries, int64_t keys, int64_t width,            \
                         int threads) {                                                          \
    attend_few<T>(AS_VIEW(const T, query), AS_VIEW(const T, key), AS_VIEW(const T, value),       \
                  AS_VIEW(const T, mask), scale, probs, y, {batch, heads, queries, keys, width}, \
                  threads);                                                                      \
  }

FOR_ELEMENT_TYPE(FOR_TYPE)
}
