// What products of matrices work on, whatever multiplies them.
#pragma once
#include <cstddef>
#include <cstdlib>

#include "numbers.h"

namespace products {

using std::int64_t;

// Memory that a thread keeps from call to call.
struct Room {
  void* data = nullptr;
  std::size_t size = 0;
  ~Room() { std::free(data); }
  template <class T = bfloat16>
  T* take(int64_t count) {
    const std::size_t need = (std::size_t(count) * sizeof(T) + 4095) / 4096 * 4096;
    if (need > size) {
      std::free(data);
      data = std::aligned_alloc(4096, need);
      if (data == nullptr) std::abort();
      size = need;
    }
    return static_cast<T*>(data);
  }
};

// One side of a product. Element (i, k), i a row of the left operand or a column of the right one, lies at
// data[i * along + k * across]; one of the strides is 1.
template <class T>
struct Matrix {
  const T* data;
  int64_t along, across, length;  // length: how many i
};

using Operand = Matrix<bfloat16>;

static inline int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace products
