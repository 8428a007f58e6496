// What attention multiplies its operands with, and what it takes.
#pragma once
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
  template <bool ADDS = false>
  static void multiply(const Left& left, const Packed* right, int64_t k_count, float* sums,
                       int64_t stride) {
    vectors::multiply<ADDS>(left, right, k_count, sums, stride);
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
  template <bool ADDS = false>
  __attribute__((noinline)) static void multiply(const Left& left, const Packed* right,
                                                 int64_t k_count, float* sums, int64_t stride) {
    products::multiply<ADDS>(left, right, ceil_div(k_count, products::STEP), sums, stride,
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
static void store_panel(const float* sums, T* to, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i, sums += PANEL, to += stride) narrow(sums, to, columns);
}

// What hides keys from queries: a mask [queries, keys], or what else is known of them.
template <class T>
struct Sight {
  const T* mask;  // or null
  Hiding hiding;
  const int32_t* positions(int64_t batch, int64_t queries) const {
    return hiding.positions == nullptr ? nullptr : hiding.positions + batch * queries;
  }
};

// Some keys' part of a row after dropout, elements of [batch, heads, queries, keys]: both the keys
// and the first one of the part are even numbers.
template <class T>
static void drop(const T* from, T* to, const Range& part, const Sizes& n, int64_t head,
                 int64_t query, const Dropout& dropout) {
  const int64_t heads = n.batch / dropout.parts * n.heads;  // of one key
  const uint64_t key = dropout.keys[head / heads],
                 index = uint64_t((head % heads * n.queries + query) * n.keys + part.begin);
  ::drop(from, to, key, index, int32_t(dropout.threshold), dropout.scale, part.end - part.begin);
}

}  // namespace attention
