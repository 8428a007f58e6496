// Small products of matrices, by one thread. Every sum is taken in one order, that of the shared
// axis: a result's bits do not depend on the number of rows or columns, on how the operands lie, or
// on what is multiplied beside them. `few_rows.cpp` has the same order where it reads lines.
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "packing.h"

namespace {

using packing::DEPTH, packing::Lines, packing::pack, packing::transpose;

constexpr int64_t PANEL = 2 * WIDTH;
constexpr int64_t WIDE = 8 * WIDTH;  // of a panel for few rows: sums in it wait for each other less
constexpr int FEW = 2;               // rows
constexpr int ROWS = WIDTH == 16 ? 8 : 4;  // of a block, which is a panel wide

// COUNT left lines by VECTORS vectors of right ones, those of one k `apart` numbers from the next
// one's.
template <int COUNT, int VECTORS>
inline void multiply_block(const Lines<float>& left, const float* right, int64_t apart,
                           int64_t terms, float* sums, int64_t stride) {
  Vector sum[COUNT][VECTORS] = {};
  for (int64_t k = 0; k < terms; ++k, right += apart) {
    Vector at[VECTORS];
    for (int v = 0; v < VECTORS; ++v) at[v] = load(right + v * WIDTH);
    const float* const numbers = left.data + k * left.across;
    for (int i = 0; i < COUNT; ++i) {
      const Vector a = every(numbers[i * left.along]);
      for (int v = 0; v < VECTORS; ++v) sum[i][v] = fused(a, at[v], sum[i][v]);
    }
  }
  for (int i = 0; i < COUNT; ++i)
    for (int v = 0; v < VECTORS; ++v) store(sum[i][v], sums + i * stride + v * WIDTH);
}

// All left lines by a panel of VECTORS vectors.
template <int VECTORS>
void multiply_panel(const Lines<float>& left, const float* right, int64_t apart, int64_t terms,
                    float* sums, int64_t stride) {
  constexpr int MOST = VECTORS > 2 ? FEW : ROWS;  // sums of more would not stay in registers
  int64_t i = 0;
  const auto blocks = [&](auto count) {
    constexpr int COUNT = decltype(count)::value;
    if constexpr (COUNT <= MOST)
      for (; i + COUNT <= left.count; i += COUNT)
        multiply_block<COUNT, VECTORS>(left.from(i, 0), right, apart, terms, sums + i * stride,
                                       stride);
  };
  blocks(std::integral_constant<int, 8>());
  blocks(std::integral_constant<int, 4>());
  blocks(std::integral_constant<int, 2>());
  blocks(std::integral_constant<int, 1>());
}

void multiply_panel(const Lines<float>& left, const float* right, int64_t apart, int64_t width,
                    int64_t terms, float* sums, int64_t stride) {
  if (width == WIDE)
    multiply_panel<WIDE / WIDTH>(left, right, apart, terms, sums, stride);
  else if (width == PANEL)
    multiply_panel<PANEL / WIDTH>(left, right, apart, terms, sums, stride);
  else
    multiply_panel<1>(left, right, apart, terms, sums, stride);
}

// Memory that a thread keeps from call to call.
struct Room {
  std::vector<float> numbers;
  float* of(int64_t count) {
    if (int64_t(numbers.size()) < count) numbers.resize(std::size_t(count));
    return numbers.data();
  }
};

const Lines<float>& as_float(const Lines<float>& left, int64_t, Room&) { return left; }

Lines<float> as_float(const Lines<bfloat16>& left, int64_t terms, Room& room) {
  float* const to = room.of(left.count * terms);
  const auto copy = [&](int64_t across) {
    for (int64_t i = 0; i < left.count; ++i)
      for (int64_t k = 0; k < terms; ++k)
        to[i * terms + k] = wide(left.data[i * left.along + k * across]);
  };
  left.across == 1 ? copy(1) : copy(left.across);  // one is in vectors
  return {to, terms, 1, left.count};
}

// Vectors of lines as they lie, or none: where each number is to be packed first.
inline const float* as_they_lie(const Lines<float>& right) {
  return right.along == 1 ? right.data : nullptr;
}
inline const float* as_they_lie(const Lines<bfloat16>&) { return nullptr; }

// COUNT left lines times a panel of right ones whose terms lie side by side: turned in
// registers.
template <int COUNT, class T>
void multiply_turned(const Lines<float>& left, const Lines<T>& right, int64_t terms, float* sums,
                     int64_t stride) {
  constexpr int VECTORS = PANEL / WIDTH;
  Vector sum[COUNT][VECTORS] = {};
  const auto add = [&](int v, int64_t k, const Vector& at) {
    for (int i = 0; i < COUNT; ++i)
      sum[i][v] = fused(every(left.data[i * left.along + k * left.across]), at, sum[i][v]);
  };
  int64_t k = 0;
  for (; k + WIDTH <= terms; k += WIDTH)
    for (int v = 0; v < VECTORS; ++v) {
      Vector r[WIDTH];
      for (int64_t j = 0; j < WIDTH; ++j)
        r[j] = load(right.data + (v * WIDTH + j) * right.along + k);
      transpose(r);
      for (int64_t j = 0; j < WIDTH; ++j) add(v, k + j, r[j]);
    }
  for (; k < terms; ++k)
    for (int v = 0; v < VECTORS; ++v) {
      float numbers[WIDTH];
      for (int64_t j = 0; j < WIDTH; ++j)
        numbers[j] = wide(right.data[(v * WIDTH + j) * right.along + k]);
      add(v, k, load(numbers));
    }
  for (int i = 0; i < COUNT; ++i)
    for (int v = 0; v < VECTORS; ++v) store(sum[i][v], sums + i * stride + v * WIDTH);
}

// Left lines times right ones: row i has the sums of the left line i, rows `stride` apart. Right
// lines are a multiple of what a panel has, or some are multiplied twice.
template <class T>
void multiply(const Lines<T>& given, const Lines<T>& right, int64_t terms, float* sums,
              int64_t stride) {
  static thread_local Room wide_left, packed, part;
  const Lines<float> left = as_float(given, terms, wide_left);
  for (int64_t next = 0; next < right.count;) {
    const int64_t here = right.count - next;
    const bool may_lie = right.along == 1 && as_they_lie(right) != nullptr;
    const bool is_wide = may_lie && left.count <= FEW && here >= WIDE;
    const int64_t width = is_wide ? WIDE : here > WIDTH ? PANEL : WIDTH;
    const bool turns = right.across == 1 && left.count <= FEW && width == PANEL;
    const bool lies = (may_lie || turns) && right.count >= width;
    const int64_t j = lies ? std::min(next, right.count - width) : next;
    const Lines<T> lines = right.from(j, 0);
    const int64_t count = std::min(width, lines.count);
    for (int64_t k = 0; k < terms || k == 0; k += DEPTH) {
      const int64_t depth = std::min(DEPTH, terms - k);
      const Lines<T> at = lines.from(0, k);
      const float* vectors = as_they_lie(at);
      int64_t apart = at.across;
      if (!lies) {
        float* const to = packed.of(width * DEPTH);
        pack(at, width, depth, to);
        vectors = to, apart = width;
      }
      const bool is_direct = k == 0 && count == width;
      float* const to = is_direct ? sums + j : part.of(left.count * width);
      const int64_t row = is_direct ? stride : width;
      if (lies && turns)
        (left.count == 1 ? multiply_turned<1, T> : multiply_turned<FEW, T>)(left.from(0, k), at,
                                                                            depth, to, row);
      else
        multiply_panel(left.from(0, k), vectors, apart, width, depth, to, row);
      if (!is_direct)
        for (int64_t i = 0; i < left.count; ++i)
          for (int64_t c = 0; c < count; ++c) {
            float& sum = sums[i * stride + j + c];
            sum = k == 0 ? to[i * width + c] : sum + to[i * width + c];
          }
    }
    next = j + width;
  }
}

// Of few sums of many terms: as many parts of a sum as a vector has numbers, side by side.
template <class T>
void multiply_parts(const Lines<T>& left, const Lines<T>& right, int64_t terms, float* sums) {
  static thread_local Room room;
  const int64_t parts = terms / DEPTH, size = DEPTH * WIDTH, lines = left.count + right.count;
  float* const packed = room.of(lines * size);
  const auto pack_parts = [=](const Lines<T>& from, int64_t first, float* to) {
    for (int64_t i = 0; i < from.count; ++i)
      pack(Lines<T>{from.data + i * from.along + first * DEPTH * from.across, DEPTH * from.across,
                    from.across, std::min(WIDTH, parts - first)},
           WIDTH, DEPTH, to + i * size);
  };
  std::fill_n(sums, left.count * right.count, 0.0f);
  for (int64_t first = 0; first < parts; first += WIDTH) {
    pack_parts(left, first, packed);
    pack_parts(right, first, packed + left.count * size);
    for (int64_t i = 0; i < left.count; ++i)
      for (int64_t j = 0; j < right.count; ++j) {
        const float *a = packed + i * size, *b = packed + (left.count + j) * size;
        Vector sum{};
        for (int64_t k = 0; k < size; k += WIDTH) sum = fused(load(a + k), load(b + k), sum);
        float each[WIDTH];
        store(sum, each);
        float& to = sums[i * right.count + j];
        for (int64_t part = 0; part < std::min(WIDTH, parts - first); ++part)
          to = first + part == 0 ? each[part] : to + each[part];
      }
  }
  for (int64_t i = 0; i < left.count && parts * DEPTH < terms; ++i)
    for (int64_t j = 0; j < right.count; ++j) {
      float sum = 0.0f;
      for (int64_t k = parts * DEPTH; k < terms; ++k)
        sum = fused(wide(left.data[i * left.along + k * left.across]),
                    wide(right.data[j * right.along + k * right.across]), sum);
      sums[i * right.count + j] += sum;
    }
}

inline float* in_place(float* y) { return y; }
inline float* in_place(bfloat16*) { return nullptr; }

// y [rows, columns]. Where there are few columns, rows take the vectors.
template <class T>
void multiply_to(const Lines<T>& left, const Lines<T>& right, int64_t terms, const T* bias, T* y) {
  static thread_local Room room;
  const int64_t rows = left.count, columns = right.count;
  const bool in_parts = rows * columns < WIDTH && terms >= 2 * DEPTH;
  const bool is_turned = columns < WIDTH && rows > columns && !in_parts;
  float* const sums = in_place(y) == nullptr || is_turned ? room.of(rows * columns) : in_place(y);
  if (in_parts)
    multiply_parts(left, right, terms, sums);
  else if (is_turned)
    multiply(right, left, terms, sums, rows);
  else
    multiply(left, right, terms, sums, columns);
  if (is_turned)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const float sum = sums[j * rows + i];
        narrow(bias == nullptr ? sum : sum + wide(bias[j]), y[i * columns + j]);
      }
  else if (bias != nullptr)
    for (int64_t i = 0; i < rows; ++i)
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j)
        narrow(sums[i * columns + j] + wide(bias[j]), y[i * columns + j]);
  else if (in_place(y) == nullptr)
    narrow(sums, y, rows * columns);
}

// What is multiplied: matrices, and axes of such.
struct Sizes {
  int64_t rows, columns, terms;
  int64_t left_row, left_term, right_column, right_term;  // strides
  int64_t axes;                                           // that follow
};
struct Axis {
  int64_t size, left, right;  // and strides, which may be zero
};

template <class T>
void multiply_all(const T* left, const T* right, const T* bias, T*& y, const Sizes& s,
                  const Axis* axis, int64_t axes) {
  if (axes == 0) {
    multiply_to<T>({left, s.left_row, s.left_term, s.rows},
                   {right, s.right_column, s.right_term, s.columns}, s.terms, bias, y);
    y += s.rows * s.columns;
    return;
  }
  for (int64_t i = 0; i < axis->size; ++i)
    multiply_all(left + i * axis->left, right + i * axis->right, bias, y, s, axis + 1, axes - 1);
}

template <class T>
void multiply_small(const T* left, const T* right, const T* bias, T* y, const int64_t* numbers) {
  Sizes sizes;
  std::memcpy(&sizes, numbers, sizeof(sizes));
  std::vector<Axis> axes(std::size_t(sizes.axes) + 1);
  std::memcpy(axes.data(), numbers + sizeof(sizes) / sizeof(int64_t),
              std::size_t(sizes.axes) * sizeof(Axis));
  multiply_all(left, right, bias, y, sizes, axes.data(), sizes.axes);
}

}  // namespace

extern "C" {

// y = left @ right, contiguous, plus a bias for its columns where there is one. sizes: those of
// `Sizes`, then of each `Axis`. All of it is one thread's.
#define FOR_TYPE(T, NAME)                                                        \
  void multiply_small_##NAME(const T* left, const T* right, const T* bias, T* y, \
                             const int64_t* sizes, int) {                        \
    multiply_small(left, right, bias, y, sizes);                                 \
  }

FOR_ELEMENT_TYPE(FOR_TYPE)
}
