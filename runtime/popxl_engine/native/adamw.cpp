// AdamW's update of a tensor, in one pass. Every element's result depends on nothing but the
// operands.
#include <algorithm>
#include <cmath>
#include <vector>

#include "draws.h"
#include "lanes.h"
#include "pieces.h"

namespace {

// What one step of AdamW multiplies with. In float32 the first steps' corrections would lose four
// digits.
struct Adam {
  float scale, beta1, share1, beta2, share2;  // share = 1 - beta
  float decay, step_size, root_share, epsilon;
  Adam(double scale, double step, double rate, double beta1, double beta2, double epsilon,
       double decay)
      : scale(float(scale)),
        beta1(float(beta1)),
        share1(float(1 - beta1)),
        beta2(float(beta2)),
        share2(float(1 - beta2)),
        decay(float(1 - rate * decay)),
        step_size(float(rate / (1 - std::pow(beta1, step)))),
        root_share(float(1 / std::sqrt(1 - std::pow(beta2, step)))),
        epsilon(float(epsilon)) {}
};

// Random bits of element i: base[i mod PERIOD], which is half of a draw, plus half of draw PERIOD /
// 2 + i div PERIOD, as kernels/rounding.py says.
constexpr int64_t PERIOD = 1 << 16;
typedef uint16_t Bits __attribute__((may_alias));  // they are parts of words

struct Noise {
  uint64_t key = 0;  // of the generator, odd; 0: there is no noise
  const Bits* base = nullptr;
  uint16_t shift(int64_t period) const {
    const uint64_t draw = PERIOD / 2 + uint64_t(period);
    return uint16_t(squares64(draw / 2, key) >> draw % 2 * 32);
  }
};

// The noises of at most three tensors, with bits of elements up to `end`. They stay until this
// thread asks again.
static void draw_noises(const uint64_t* keys, int64_t end, int threads, Noise* noises,
                        int tensors = 3) {
  static thread_local std::vector<uint64_t> kept[3];
  const int64_t count = (std::min(end, PERIOD) + 3) / 4;
  for (int n = 0; n < tensors; ++n) {
    if (keys[n] == 0) continue;
    if (int64_t(kept[n].size()) < count) kept[n].resize(std::size_t(count));
    draw(kept[n].data(), keys[n], 0, count, threads);
    noises[n] = {keys[n], reinterpret_cast<const Bits*>(kept[n].data())};
  }
}

// Element types, as the library's caller numbers them.
enum Type : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

struct Operand {
  void* data;
  Type type;
};

constexpr int64_t BLOCK =
    2048;  // elements that are worked on in float32 at a time, in the first cache

template <class T>
static void to_float32(const void* from, int64_t first, int64_t count, float* to) {
  const T* at = static_cast<const T*>(from) + first;
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) store(load(at + i), to + i);
  for (; i < count; ++i) to[i] = wide(at[i]);
}

// A block of an operand in float32: the operand itself, where it is that, else a copy.
static float* wide_block(const Operand& from, int64_t first, int64_t count, float* copy) {
  if (from.type == FLOAT32) return static_cast<float*>(from.data) + first;
  if (from.type == BFLOAT16)
    to_float32<bfloat16>(from.data, first, count, copy);
  else
    to_float32<float16>(from.data, first, count, copy);
  return copy;
}

// The bits for a block of an operand, none where it is rounded to nearest.
struct Drawn {
  const Bits* bits = nullptr;
  uint16_t shift = 0;
  Drawn(const Bits* bits) : bits(bits) {}
  Drawn(const Noise& noise, int64_t index) {
    if (noise.key == 0) return;
    bits = noise.base + index % PERIOD;
    shift = noise.shift(index / PERIOD);
  }
};

// A tensor's numbers all go through one loop: what is below 2**-126 may stay, which is faster.
struct ToNearest {
  ToNearest(const Drawn&) {}
  inline float store(float x, float& to, int64_t) const { return to = x; }
  inline float store(float x, bfloat16& to, int64_t) const {
    to = nearest(x);
    return wide(to);
  }
};

struct Stochastic {
  const Bits* bits;
  uint16_t shift;
  Stochastic(const Drawn& drawn) : bits(drawn.bits), shift(drawn.shift) {}
  inline float store(float x, float& to, int64_t) const { return to = x; }
  template <class T>
  inline float store(float x, T& to, int64_t i) const {
    to = cut<T>(x, uint16_t(bits[i] + shift));
    return wide(to);
  }
};

template <class T>
static void round_apart(const float* from, T* to, int64_t count, const Drawn& drawn) {
  const Stochastic rounding(drawn);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) rounding.store(from[i], to[i], i);
}

template <class T>
static void round_block(float* block, T* to, int64_t count, const Drawn& drawn) {
  if (drawn.bits == nullptr) {
    narrow(block, to, count);
    return to_float32<T>(to, 0, count, block);
  }
  const Stochastic rounding(drawn);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) block[i] = rounding.store(block[i], to[i], i);
}

// Stores a block, which becomes what was stored.
static void store_block(float* block, const Operand& to, int64_t first, int64_t count,
                        const Drawn& drawn) {
  if (to.type == BFLOAT16)
    round_block(block, static_cast<bfloat16*>(to.data) + first, count, drawn);
  else if (to.type == FLOAT16)
    round_block(block, static_cast<float16*>(to.data) + first, count, drawn);
}

// What a block's elements become, whose gradients are there as float32.
struct Formula {
  const Adam& a;
  const float* gradient;
  inline float mean(int64_t i, float m) const {
    return a.beta1 * m + a.share1 * (gradient[i] * a.scale);
  }
  inline float square(int64_t i, float v) const {
    const float g = gradient[i] * a.scale;
    return a.beta2 * v + a.share2 * g * g;
  }
  inline float weight(float weight, float m, float v) const {
    return weight * a.decay - a.step_size * m / (std::sqrt(v) * a.root_share + a.epsilon);
  }
};

// A block and what rounds it: weight, m and v. The update is made from the moments as rounded.
struct Block {
  const Operand* operands;
  const Drawn* drawn;
  int64_t first, count;
  template <class T>
  T* at(int n) const {
    return static_cast<T*>(operands[n].data) + first;
  }
  bool has(Type weight, Type moments) const {
    return operands[0].type == weight && operands[1].type == moments && operands[2].type == moments;
  }
  bool is_stochastic() const { return drawn[0].bits || drawn[1].bits || drawn[2].bits; }
};

// All in one loop, whose roots and quotients take as long as the rest together: for the commonest
// types.
template <class Rounding, class W, class M>
static void update_at_once(const Formula& formula, const Block& block) {
  W* weight = block.at<W>(0);
  M *m = block.at<M>(1), *v = block.at<M>(2);
  const Rounding of_weight(block.drawn[0]), of_m(block.drawn[1]), of_v(block.drawn[2]);
#pragma omp simd
  for (int64_t i = 0; i < block.count; ++i) {
    const float mean = of_m.store(formula.mean(i, wide(m[i])), m[i], i);
    const float square = of_v.store(formula.square(i, wide(v[i])), v[i], i);
    of_weight.store(formula.weight(wide(weight[i]), mean, square), weight[i], i);
  }
}

// The same for any types, from copies in float32.
static void update_copies(const Formula& formula, const Block& block) {
  float copies[3][BLOCK], *rows[3];
  for (int n = 0; n < 3; ++n)
    rows[n] = wide_block(block.operands[n], block.first, block.count, copies[n]);
  float *weight = rows[0], *m = rows[1], *v = rows[2];
#pragma omp simd
  for (int64_t i = 0; i < block.count; ++i) {
    m[i] = formula.mean(i, m[i]);
    v[i] = formula.square(i, v[i]);
  }
  for (int n = 1; n < 3; ++n)
    store_block(rows[n], block.operands[n], block.first, block.count, block.drawn[n]);
#pragma omp simd
  for (int64_t i = 0; i < block.count; ++i) weight[i] = formula.weight(weight[i], m[i], v[i]);
  store_block(weight, block.operands[0], block.first, block.count, block.drawn[0]);
}

template <class W, class M>
static void update(const Formula& formula, const Block& block) {
  if (block.is_stochastic())
    update_at_once<Stochastic, W, M>(formula, block);
  else
    update_at_once<ToNearest, W, M>(formula, block);
}

static void adamw_block(const Adam& a, const Block& block) {
  float copy[BLOCK];
  const Formula formula{a, wide_block(block.operands[3], block.first, block.count, copy)};
  if (block.has(FLOAT32, FLOAT32))
    update_at_once<ToNearest, float, float>(formula, block);
  else if (block.has(BFLOAT16, FLOAT32))
    update<bfloat16, float>(formula, block);
  else if (block.has(FLOAT32, BFLOAT16))
    update<float, bfloat16>(formula, block);
  else if (block.has(BFLOAT16, BFLOAT16))
    update<bfloat16, bfloat16>(formula, block);
  else
    update_copies(formula, block);
}

// Moments of 8 bits, as popxl/moments.py says.
constexpr int64_t SHARING = 32;  // numbers that share a power of two
constexpr int64_t CODED_BLOCK = 1024;
constexpr int MANTISSA = 3;

static inline float power(uint32_t exponent) { return bits_as<float>(exponent << 23); }

template <int BIAS, bool IS_SIGNED>
struct Coded {
  static constexpr uint32_t LARGEST = IS_SIGNED ? 0x7f : 0xff, LIFT = (127 - BIAS) << MANTISSA;
  uint8_t *codes, *scales;
  Coded(void* coded, int64_t count)
      : codes(static_cast<uint8_t*>(coded)), scales(static_cast<uint8_t*>(coded) + count) {}

  // A block of at most SHARING numbers, as float32.
  inline void decode(int64_t first, int64_t count, float* to) const {
    const float scale = power(scales[first / SHARING]);
    const uint8_t* from = codes + first;
    const float step = power(127 + 1 - BIAS - MANTISSA);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t size = from[i] & LARGEST;
      const float normal = bits_as<float>((size + LIFT) << 20), small = float(size) * step;
      const float value = (size < 1u << MANTISSA ? small : normal) * scale;
      to[i] = bits_as<float>(bits_as<uint32_t>(value) | (from[i] & ~LARGEST) << 24);
    }
  }

  // The codes of such a block, each with 16 random bits. Without a sign, what is above zero stays.
  void encode(int64_t first, int64_t count, const float* from, const Bits* bits) const {
    int32_t most = 0;  // numbers without a sign are in the order of their bits
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; ++i)
      most = std::max(most, int32_t(bits_as<uint32_t>(from[i]) & 0x7fffffffu));
    const int32_t exponent = std::min(std::max(((most - 1) >> 23) + 1, 37), 253);
    scales[first / SHARING] = most >= 0x7f800000 ? 255 : uint8_t(exponent);
    const float inverse = power(uint32_t(254 - exponent)), steps = power(127 - 1 + BIAS + MANTISSA);
    const float limit = power(127 + 1 - BIAS);
    uint8_t* to = codes + first;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t sign = bits_as<uint32_t>(from[i]) >> 31;
      const float size = std::fabs(from[i]), x = size * inverse;
      const uint32_t drawn = bits[i] ^ 0x8000u;
      const int32_t normal = int32_t(((bits_as<uint32_t>(x) + (drawn << 4)) >> 20) - LIFT);
      const int32_t small = int32_t((x < limit ? x : 0.0f) * steps + float(drawn) * 0x1p-16f);
      int32_t code = std::min(x < limit ? small : normal, int32_t(LARGEST));
      if (!IS_SIGNED) code = std::max(code, int32_t(size != 0.0f));
      to[i] = uint8_t(IS_SIGNED ? uint32_t(code) | sign << 7 : uint32_t(code));
    }
  }
};

using First = Coded<15, true>;
using Second = Coded<31, false>;

// Random bits of a block from element `index` on, across ends of periods; zeros, which round to
// nearest, where there are none.
static void draw_block(const Noise& noise, int64_t index, int64_t count, Bits* to) {
  if (noise.key == 0) return std::fill(to, to + count, Bits(0));
  for (int64_t i = 0, end; i < count; i = end) {
    end = std::min(count, i + PERIOD - (index + i) % PERIOD);
    const Drawn drawn(noise, index + i);
#pragma omp simd
    for (int64_t n = 0; n < end - i; ++n) to[i + n] = uint16_t(drawn.bits[n] + drawn.shift);
  }
}

struct CodedUpdate {
  const Adam& a;
  const Operand &weight, &gradient;
  const First& first;
  const Second& second;
  const Noise* noises;

  void block(int64_t start, int64_t count, int64_t index) const {
    float m[CODED_BLOCK], v[CODED_BLOCK], copies[2][CODED_BLOCK];
    Bits bits[CODED_BLOCK];
    each(count, [&](int64_t i, int64_t n) { first.decode(start + i, n, m + i); });
    each(count, [&](int64_t i, int64_t n) { second.decode(start + i, n, v + i); });
    const Formula formula{a, wide_block(gradient, start, count, copies[0])};
    float* w = wide_block(weight, start, count, copies[1]);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      m[i] = formula.mean(i, m[i]);
      v[i] = formula.square(i, v[i]);
      w[i] = formula.weight(w[i], m[i], v[i]);
    }
    draw_block(noises[0], index, count, bits);
    const Bits* drawn = noises[0].key == 0 ? nullptr : bits;
    store_block(w, weight, start, count, Drawn(drawn));
    draw_block(noises[1], index, count, bits);
    each(count, [&](int64_t i, int64_t n) { first.encode(start + i, n, m + i, bits + i); });
    draw_block(noises[2], index, count, bits);
    each(count, [&](int64_t i, int64_t n) { second.encode(start + i, n, v + i, bits + i); });
  }

  // Whole blocks, whose length compilers know, and what is left.
  template <class Work>
  static void each(int64_t count, Work work) {
    int64_t i = 0;
    for (; i + SHARING <= count; i += SHARING) work(i, SHARING);
    if (i < count) work(i, count - i);
  }
};

}  // namespace

extern "C" {

// Rounds numbers at random, with the bits of a key's elements from `offset` on.
void round_at_random(void* to, int64_t type, const void* from, uint64_t key, int64_t offset,
                     int64_t count, int threads) {
  Noise noise;
  draw_noises(&key, offset + count, threads, &noise, 1);
  in_pieces(count, PIECE, threads, [&](int64_t first, int64_t end) {
    for (int64_t start = first, stop; start < end; start = stop) {  // up to the end of a period
      stop = std::min(end, start + PERIOD - (offset + start) % PERIOD);
      const Drawn drawn(noise, offset + start);
      const float* x = static_cast<const float*>(from) + start;
      if (type == BFLOAT16)
        round_apart(x, static_cast<bfloat16*>(to) + start, stop - start, drawn);
      else
        round_apart(x, static_cast<float16*>(to) + start, stop - start, drawn);
    }
  });
}

// As `adamw`, with moments of 8 bits.
void adamw_8bit(void* weight, int64_t weight_type, void* gradient, int64_t gradient_type,
                void* first, void* second, uint64_t weight_key, uint64_t first_key,
                uint64_t second_key, int64_t offset, double scale, double step, double rate,
                double beta1, double beta2, double epsilon, double decay, int64_t count,
                int threads) {
  const Adam a(scale, step, rate, beta1, beta2, epsilon, decay);
  const Operand w{weight, Type(weight_type)}, g{gradient, Type(gradient_type)};
  const First m(first, count);
  const Second v(second, count);
  const uint64_t keys[] = {weight_key, first_key, second_key};
  Noise noises[3];
  draw_noises(keys, offset + count, threads, noises);
  const CodedUpdate update{a, w, g, m, v, noises};
  in_pieces(count, PIECE, threads, [&](int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += CODED_BLOCK)
      update.block(start, std::min(CODED_BLOCK, end - start), offset + start);
  });
}

// Operands with their types; keys: of the generators whose bits round weight, m and v; 0: to
// nearest. Elements have the bits of those from `offset` on.
void adamw(void* weight, int64_t weight_type, void* m, int64_t m_type, void* v, int64_t v_type,
           void* gradient, int64_t gradient_type, uint64_t weight_key, uint64_t m_key,
           uint64_t v_key, int64_t offset, double scale, double step, double rate, double beta1,
           double beta2, double epsilon, double decay, int64_t count, int threads) {
  const Adam a(scale, step, rate, beta1, beta2, epsilon, decay);
  const Operand operands[] = {{weight, Type(weight_type)},
                              {m, Type(m_type)},
                              {v, Type(v_type)},
                              {gradient, Type(gradient_type)}};
  const uint64_t keys[] = {weight_key, m_key, v_key};
  Noise noises[3];
  draw_noises(keys, offset + count, threads, noises);
  in_pieces(count, PIECE, threads, [&](int64_t first, int64_t end) {
    for (int64_t start = first, stop; start < end; start = stop) {  // up to the end of a period
      const int64_t index = offset + start;
      stop = std::min({end, start + BLOCK, start + PERIOD - index % PERIOD});
      const Drawn drawn[] = {{noises[0], index}, {noises[1], index}, {noises[2], index}};
      adamw_block(a, {operands, drawn, start, stop - start});
    }
  });
}
}
