// Small products of matrices, by one thread. Every sum is taken in one order, that of the shared
// axis: a result's bits do not depend on the number of rows or columns, on how the operands lie, or
// on what is multiplied beside them. `few_rows.cpp` has the same order where it reads lines.
#include <algorithm>
#include <vector>

#include "lanes.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#include "operands.h"
#endif

namespace {

constexpr int64_t DEPTH = 384;  // terms that are summed up by themselves, as in few_rows.cpp
constexpr int64_t PANEL = 2 * WIDTH;
constexpr int64_t WIDE = 8 * WIDTH;  // of a panel for few rows: sums in it wait for each other less
constexpr int FEW = 2;               // rows
constexpr int ROWS = WIDTH == 16 ? 8 : 4;  // of a block, which is a panel wide

// A row of a left operand's, or a column of a right one's, is a line: element (i, k), of line i,
// lies at data[i * along + k * across].
template <class T>
struct Lines {
  const T* data;
  int64_t along, across, count;

  Lines from(int64_t i, int64_t k) const {
    return {data + i * along + k * across, along, across, count - i};
  }
};

static inline void transpose(Vector* r) {
#if defined(__AVX512F__)
  products::transpose(reinterpret_cast<__m512i*>(r));
#elif defined(__AVX2__)
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = (Vector)_mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = (Vector)_mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
#elif defined(__SSE2__)
  __m128 a = (__m128)r[0], b = (__m128)r[1], c = (__m128)r[2], d = (__m128)r[3];
  _MM_TRANSPOSE4_PS(a, b, c, d);
  r[0] = (Vector)a, r[1] = (Vector)b, r[2] = (Vector)c, r[3] = (Vector)d;
#else
  for (int64_t i = 0; i < WIDTH; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const float kept = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = kept;
    }
#endif
}

// Packs `width` lines: their numbers of one k side by side. Those that are not there are zeros.
template <class T>
void pack(const Lines<T>& from, int64_t width, int64_t terms, float* to) {
  const int64_t count = std::min(width, from.count);
  if (from.along == 1) {
    if (count < width) std::fill_n(to, width * terms, 0.0f);
    for (int64_t k = 0; k < terms; ++k) {
      const T* const at = from.data + k * from.across;
      for (int64_t i = 0; i < count; ++i) to[k * width + i] = wide(at[i]);
    }
    return;
  }
  int64_t k = 0;
  if (from.across == 1)
    for (; k + WIDTH <= terms; k += WIDTH)
      for (int64_t i = 0; i < width; i += WIDTH) {
        Vector r[WIDTH];
        for (int64_t j = 0; j < WIDTH; ++j)
          r[j] = i + j < count ? load(from.data + (i + j) * from.along + k) : Vector{};
        transpose(r);
        for (int64_t j = 0; j < WIDTH; ++j) store(r[j], to + (k + j) * width + i);
      }
  for (; k < terms; ++k)
    for (int64_t i = 0; i < width; ++i)
      to[k * width + i] = i < count ? wide(from.data[i * from.along + k * from.across]) : 0.0f;
}

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
  for (int64_t i = 0; i < left.count; ++i)
    for (int64_t k = 0; k < terms; ++k)
      to[i * terms + k] = wide(left.data[i * left.along + k * left.across]);
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
  if (is_turned || bias != nullptr || in_place(y) == nullptr)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const float sum = is_turned ? sums[j * rows + i] : sums[i * columns + j];
        narrow(bias == nullptr ? sum : sum + wide(bias[j]), y[i * columns + j]);
      }
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

FOR_TYPE(float, f32)
FOR_TYPE(bfloat16, bf16)
}
